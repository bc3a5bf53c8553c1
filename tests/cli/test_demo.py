"""Claims about how a demo goes on or gives up, on daemons and a clock made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite

from agora.cli import demo, demo_peers, demo_plan
from agora.cli.console import Failure
from agora.cli.demo_plan import Plan
from agora.observe import events, journal

INVITE = str(
    Invite(RunId("ab" * 32), ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL5ga1AxRwCbSFcigTjH8ZZE19FUW6GaoiLpSTU2AQyj7",))
)
HEARTBEAT = events.Traffic(1, 2, 3)
SERVING = events.StateChanged("serving", "")
LONG_S = 10 * demo.STALL_SECONDS


class Clock:
    """Time passes only while somebody sleeps, and a test that sleeps for too long has failed."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < LONG_S, "the demo hangs"


class Peer:
    """A daemon whose heart beats at every look; `script` has what else it reports, and when."""

    alive = True

    def __init__(self, index: int, clock: Clock, script: Sequence[tuple[float, events.Event]]) -> None:
        self.index, self.follower, self._clock, self._script = index, self, clock, list(script)

    def news(self) -> list[dict[str, Any]]:
        found: list[events.Event] = [HEARTBEAT]
        while self._script and self._script[0][0] <= self._clock.now:
            found.append(self._script.pop(0)[1])
        return [journal.to_json(event) | {"at_unix": self._clock.now} for event in found]

    def ask(self, question: str, **_: Any) -> dict[str, Any]:
        if question == "evaluate":
            self._clock.sleep(2 * demo.STALL_SECONDS)
        return {"invite": INVITE, "loss": 2.0}

    def last_words(self) -> str:
        return "no peer of stage 1 answers"


Make = Callable[[Plan, Sequence[Sequence[tuple[float, events.Event]]]], demo.Swarm]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep, time=time.time))
    monkeypatch.setattr(demo, "POLL_SECONDS", 2.0)
    monkeypatch.setattr(demo_plan, "cores", lambda: 8)
    return clock


@pytest.fixture
def swarm(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    def make(plan: Plan, scripts: Sequence[Sequence[tuple[float, events.Event]]]) -> demo.Swarm:
        monkeypatch.setattr(demo_peers, "start", lambda index, *_: Peer(index, clock, scripts[index]))
        return demo.Swarm(plan, tmp_path, target_tokens=8)

    return make


def completed(*times: float) -> list[tuple[float, events.Event]]:
    return [(at, events.MicrobatchCompleted(f"m{at}", 8.0, 4, 0.1)) for at in times]


def test_heartbeats_alone_do_not_keep_a_demo_going(swarm: Make, clock: Clock) -> None:
    scripts = [[(10.0, SERVING), *completed(30.0, 60.0)], [(20.0, SERVING)]]
    with pytest.raises(Failure, match=r"180 s: no peer of stage 1 answers") as caught:
        swarm(Plan(peers=2, stages=2, steps=4), scripts).train()
    assert "2 microbatches" in str(caught.value)
    assert clock.now == pytest.approx(60.0 + demo.STALL_SECONDS, abs=5.0)


def test_a_replacement_that_joins_is_not_training(swarm: Make, clock: Clock) -> None:
    scripts = [[(1.0, SERVING)], [(2.0, SERVING)], *([(50.0 * late, SERVING)] for late in range(1, 20))]
    made = swarm(Plan(peers=2, stages=1, steps=4), scripts)
    made._owed += 18  # as after so many kills
    with pytest.raises(Failure, match="180 s"):
        made.train()
    assert clock.now == pytest.approx(2.0 + demo.STALL_SECONDS, abs=5.0)


def test_slow_is_not_stalled_and_an_evaluation_may_take_its_time(swarm: Make, clock: Clock) -> None:
    slow = [demo.STALL_SECONDS * 0.9 * number for number in (1, 2, 3, 4)]
    steps = [(at + 1.0, events.StepTaken(0, number, 8, None, 0.1)) for number, at in enumerate(slow[1::2], 1)]
    first = sorted([(10.0, SERVING), *completed(*slow), *steps], key=lambda told: told[0])
    late = slow[-1] + 3 * demo.STALL_SECONDS
    result = swarm(Plan(peers=2, stages=1, steps=2), [first, [(late, SERVING)]]).train()
    assert (result.evaluated, result.run_id) == (2.0, "ab" * 32) and clock.now > slow[-1] + 2 * demo.STALL_SECONDS
