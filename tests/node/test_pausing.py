"""Claims about when the owner lets the daemon work: hours of the day, and a pause that a restart remembers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from agora_protocol.errors import DiskError

from agora.node.limits.pausing import BY_OWNER, DAY_MINUTES, Hours, Pausing


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("", [0, 600, 1439], []),
        ("22-07", [22 * 60, 1439, 0, 419], [420, 720, 22 * 60 - 1]),
        ("9:30-17", [570, 1019], [569, 1020, 0]),
        ("0-6, 12:00-13:00", [0, 359, 720, 779], [360, 719, 780]),
        ("20-24", [1200, 1439], [0, 1199]),
        ("20-0", [1200, 1439], [0, 1199]),
        ("24-7", [0, 419], [420, 1439]),
        ("0-24", [0, 600, 1439], []),
    ],
)
def test_hours_hold_their_begin_and_not_their_end(text: str, inside: list[int], outside: list[int]) -> None:
    hours = Hours.parse(text)
    assert all(map(hours.contains, inside)) and not any(map(hours.contains, outside))
    assert Hours.parse(str(hours)) == hours


@pytest.mark.parametrize(
    "text", ["22", "22-22", "25-3", "10-24:30", "9:75-10", "a-b", "1-2,,3-4", ",".join(["1-2"] * 25)]
)
def test_what_is_no_range_of_hours_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"22-07|fewer"):
        Hours.parse(text)


def test_the_next_begin_is_the_nearest_after_the_present_minute() -> None:
    hours = Hours.parse("22-07,12-13")
    assert [hours.next_begin(minute) for minute in (8 * 60, 14 * 60, DAY_MINUTES - 1)] == ["12:00", "22:00", "12:00"]


def at(hour: int) -> float:
    """Unix seconds of that hour of a day, in local time."""
    return time.mktime((2026, 6, 1, hour, 0, 0, 0, 0, -1))


def test_a_pause_stands_until_resume_also_for_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "paused"
    pause = Pausing(file, Hours(), lambda: at(3))
    assert pause.reason == ""
    pause.pause()
    assert pause.reason == BY_OWNER and "agora-node resume" in pause.remedy
    assert Pausing(file, Hours(), lambda: at(3)).reason == BY_OWNER
    assert pause.resume() == "" and pause.resume() == ""
    assert Pausing(file, Hours(), lambda: at(3)).reason == ""


def test_outside_its_hours_it_rests_and_says_until_when(tmp_path: Path) -> None:
    now = [at(8)]
    pause = Pausing(tmp_path / "paused", Hours.parse("22-07"), lambda: now[0])
    assert pause.reason == "outside its hours 22:00-07:00 until 22:00"
    assert "outside its hours" in pause.resume()
    now[0] = at(23)
    assert pause.reason == ""


def test_whoever_waits_for_a_pause_hears_of_it_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        pause = Pausing(tmp_path / "paused", Hours(), time.time)
        waiting = asyncio.create_task(pause.wait_until(paused=True))
        await asyncio.sleep(0)
        assert not waiting.done()
        pause.pause()
        await waiting
        pause.resume()
        await pause.wait_until(paused=False)

    asyncio.run(scenario())


def test_a_pause_that_cannot_be_remembered_holds_and_says_so(tmp_path: Path) -> None:
    pause = Pausing(tmp_path / "missing" / "paused", Hours(), time.time)
    with pytest.raises(DiskError, match="only until a restart"):
        pause.pause()
    assert pause.reason == BY_OWNER
