"""Claims about how a demo goes on or gives up, on daemons and a clock made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite

from agora.cli import demo_command
from agora.cli.console import Failure
from agora.cli.demo_command import DemoOptions
from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from agora.observe import events, journal

INVITE = str(
    Invite(RunId("ab" * 32), ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL5ga1AxRwCbSFcigTjH8ZZE19FUW6GaoiLpSTU2AQyj7",))
)
HEARTBEAT = events.Traffic(1, 2, 3)
SERVING = events.StateChanged("serving", "")
SPAN = events.SpanChosen(0, 0, "")
LONG_S = 10 * demo_command.STALL_TIMEOUT_S
Script = Sequence[tuple[float, events.Event]]


class Clock:
    """Stands in for the module `time`: it passes only while somebody sleeps, and too long a sleep fails the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < LONG_S, "the demo hangs"


class Running:
    """A process that never ends by itself."""

    pid = 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send_signal(self, sig: int) -> None:
        pass


class ScriptedDaemon(LocalDaemon):
    """A daemon that reports a heartbeat at every look; `script` has what else it reports, and when."""

    clock: Clock
    script: list[tuple[float, events.Event]]

    def new_events(self) -> list[dict[str, Any]]:
        reported: list[events.Event] = [HEARTBEAT]
        while self.script and self.script[0][0] <= self.clock.now:
            reported.append(self.script.pop(0)[1])
        return [journal.to_json(event) | {"at_unix": self.clock.now} for event in reported]

    def ask(self, question: str, timeout_s: float = 10.0, **_: Any) -> dict[str, Any]:
        if question == "evaluate":
            self.clock.sleep(2 * demo_command.STALL_TIMEOUT_S)
        return {"invite": INVITE, "loss": 2.0}

    def answers_peers(self) -> bool:
        return True

    def kill_group(self) -> None:
        self.end_is_intended = True

    def last_words(self) -> str:
        return "no peer of stage 1 answers"


class ScriptedSwarm(LocalSwarm):
    """A swarm whose daemons follow scripts, in the order in which they are started."""

    def __init__(self, directory: Path, clock: Clock, scripts: Sequence[Script]) -> None:
        super().__init__(directory, "")
        self.clock, self.scripts = clock, scripts

    def start(
        self, name: str, *, run: str = "", flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> LocalDaemon:
        daemon = ScriptedDaemon(name, self.directory / name, Running())
        daemon.clock, daemon.script = self.clock, list(self.scripts[len(self.daemons)])
        self.daemons[name] = daemon
        self.take_invite(daemon)
        return daemon


Make = Callable[[DemoOptions, Sequence[Script]], demo_command.Demo]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(demo_command, "POLL_INTERVAL_S", 2.0)
    monkeypatch.setattr(demo_command, "cores", lambda: 8)
    clock = Clock()
    monkeypatch.setattr(demo_command, "time", clock)
    return clock


@pytest.fixture
def swarm(clock: Clock, tmp_path: Path) -> Make:
    def make(plan: DemoOptions, scripts: Sequence[Script]) -> demo_command.Demo:
        return demo_command.Demo(plan, ScriptedSwarm(tmp_path, clock, scripts), target_tokens=8)

    return make


def completed(*times: float) -> list[tuple[float, events.Event]]:
    return [(at, events.MicrobatchCompleted(f"m{at}", 8.0, 4, 0.1)) for at in times]


def test_heartbeats_alone_do_not_keep_a_demo_going(swarm: Make, clock: Clock) -> None:
    scripts = [[(10.0, SERVING), *completed(30.0, 60.0)], [(20.0, SERVING)]]
    with pytest.raises(Failure, match=r"180 s: no peer of stage 1 answers") as caught:
        swarm(DemoOptions(peers=2, stages=2, steps=4), scripts).train()
    assert "2 microbatches" in str(caught.value)
    assert clock.now == pytest.approx(60.0 + demo_command.STALL_TIMEOUT_S, abs=5.0)


def test_a_replacement_that_joins_is_not_training(swarm: Make, clock: Clock) -> None:
    scripts = [[(20.0 * late, SPAN), (20.0 * late + 1.0, SERVING)] for late in range(20)]
    made = swarm(DemoOptions(peers=2, stages=1, steps=4, kill_every=30.0), scripts)
    with pytest.raises(Failure, match="180 s"):
        made.train()
    killed = [daemon for daemon in made.swarm.daemons.values() if daemon.end_is_intended]
    assert len(killed) >= 3 and len(made.swarm.daemons) == 2 + len(killed)
    assert clock.now == pytest.approx(21.0 + demo_command.STALL_TIMEOUT_S, abs=5.0)


def test_slow_is_not_stalled_and_an_evaluation_may_take_its_time(swarm: Make, clock: Clock) -> None:
    slow = [demo_command.STALL_TIMEOUT_S * 0.9 * number for number in (1, 2, 3, 4)]
    steps = [
        (at + 1.0, events.StepTaken(0, number, 8, None, 0.1, gradient_norm=1.0))
        for number, at in enumerate(slow[1::2], 1)
    ]
    first = sorted([(9.0, SPAN), (10.0, SERVING), *completed(*slow), *steps], key=lambda entry: entry[0])
    late = slow[-1] + 3 * demo_command.STALL_TIMEOUT_S
    result = swarm(DemoOptions(peers=2, stages=1, steps=2), [first, [(late, SERVING)]]).train()
    assert (result.heldout_loss, result.run_id) == (2.0, "ab" * 32) and clock.now > slow[
        -1
    ] + 2 * demo_command.STALL_TIMEOUT_S


def test_a_dir_that_is_a_file_or_not_empty_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for directory, text in ((file, "cannot make"), (tmp_path, "is not empty")):
        with pytest.raises(Failure, match=text):
            demo_command.run(DemoOptions(directory=directory), as_json=True)
