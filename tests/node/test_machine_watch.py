"""Claims about what a daemon tells its owner of this machine: who else uses it, and what a day costs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agora.cli.status_command import lines_of
from agora.node.limits.machine_use import Observation
from agora.node.limits.pausing import Hours, Pausing
from agora.node.process.machine_watch import DayEstimate, MachineWatch, estimate_day, observers_of
from agora.node.settings import Settings
from agora.observe import events

TRAFFIC = events.Traffic(0, sent_bytes=1_000_000, received_bytes=3_000_000)


@pytest.mark.parametrize(
    ("age_s", "worked_s", "watts", "price", "estimated"),
    [
        (59.0, 59.0, 300.0, 0.3, None),
        (86_400.0, 86_400.0, None, 0.3, DayEstimate(1_000_000, 3_000_000, None, None)),
        (3_600.0, 3_600.0, 300.0, 0.0, DayEstimate(24_000_000, 72_000_000, 7.2, None)),
        (3_600.0, 3_600.0, 300.0, 0.3, DayEstimate(24_000_000, 72_000_000, 7.2, 2.16)),
        (3_600.0, 900.0, 300.0, 0.3, DayEstimate(24_000_000, 72_000_000, 1.8, 0.54)),  # paused for most of the time
    ],
)
def test_a_day_is_estimated_by_what_has_been_since_the_start_pauses_included(
    age_s: float, worked_s: float, watts: float | None, price: float, estimated: DayEstimate | None
) -> None:
    assert estimate_day(TRAFFIC, age_s, worked_s, watts, price) == estimated


def test_a_look_pauses_tells_who_and_counts_only_working_time(tmp_path: Path) -> None:
    now, seen = [0.0], [Observation("command"), Observation("person", why_unknown="loginctl is not installed")]
    settings = Settings(when_idle=True, idle_minutes=1, watts=100.0, price_per_kwh=0.5)
    pause = Pausing(tmp_path / "paused", Hours(), time.time, 60.0, lambda: now[0])
    told: list[events.Event] = []
    observers = [lambda: seen[0], lambda: seen[1]]
    watch = MachineWatch(settings, pause, told.append, observers, lambda: "", lambda: now[0])

    def look(at: float, use: str = "") -> dict[str, Any]:
        now[0], seen[0] = at, Observation("command", use)
        asyncio.run(watch.look())
        return watch.describe(TRAFFIC)

    assert look(0.0)["when_idle"]["in_use"] == "" and not pause.reason and not told
    assert look(100.0, "a game")["when_idle"]["in_use"] == "a game" and pause.reason
    told_later = look(130.0)
    idle, day = told_later["when_idle"], told_later["day"]
    assert pause.reason and (idle["in_use"], idle["last_use"], idle["resumes_in_s"]) == ("", "a game", 30.0)
    assert idle["observers"] == {"command": "watched", "person": "loginctl is not installed"}
    assert look(160.0)["when_idle"]["resumes_in_s"] is None and not pause.reason
    assert day["watts_from"] == "settings" and day["estimated"] is True
    look(200.0)
    # 100 of the first 160 s, and all since.
    assert watch.describe(TRAFFIC)["day"]["kwh"] == pytest.approx(2.4 * 140 / 200, abs=1e-3)


def test_an_owner_whose_machine_tells_nothing_is_told_so_once(tmp_path: Path) -> None:
    told: list[events.Event] = []
    pause = Pausing(tmp_path / "paused", Hours(), time.time)
    observers = [lambda: Observation("gpu", why_unknown="nvidia-smi is not installed")]
    watch = MachineWatch(Settings(when_idle=True), pause, told.append, observers, lambda: "")
    asyncio.run(watch.look())
    asyncio.run(watch.look())
    (event,) = told
    assert isinstance(event, events.OwnerTold) and "gpu: nvidia-smi is not installed" in event.text
    assert "in_use_command" in event.text and not pause.reason


def test_the_owner_chooses_what_is_watched() -> None:
    def count(**chosen: Any) -> int:
        return len(observers_of(Settings.model_validate(chosen), lambda: "", time.time))

    assert count() == 0
    assert count(when_idle=True) == 3, "no command was given"
    assert count(when_idle=True, in_use_command="true") == 4
    assert count(when_idle=True, in_use_command="true", idle_observers="gpu, command") == 2
    assert count(when_idle=True, in_use_command="true", idle_observers="gpu") == 1


def test_the_status_says_that_the_day_is_estimated_and_what_is_not_watched() -> None:
    status = {
        "name": "poems",
        "run_id": "ab",
        "step": 1,
        "loss": None,
        "tokens_per_second": 0.0,
        "stages": [],
        "peers": [],
        "health": {"state": "PAUSED", "why": "this peer is paused while its machine is in use (a game)", "do": None},
        "machine": {
            "when_idle": {"idle_minutes": 10.0, "observers": {"gpu": "watched", "person": "no logind"}},
            "day": {"sent_bytes": 2e9, "received_bytes": 3e9, "kwh": 7.2, "watts": 300.0, "watts_from": "the GPU"}
            | {"cost": 2.16, "price_per_kwh": 0.3},
        },
    }
    text = "\n".join(lines_of(status))
    assert "an estimated 2.00 GB sent, 3.00 GB received, 7.20 kWh at 300 W by the GPU, 2.16 at 0.3 per kWh" in text
    assert "works once nobody has used this machine for 10 min; it watches gpu; not watched: person (no logind)" in text
    status["machine"] = {"when_idle": None, "day": None}
    assert "machine" not in "\n".join(lines_of(status)).replace("its machine", "")
