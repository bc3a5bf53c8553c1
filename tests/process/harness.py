"""Real daemons for tests: a LocalSwarm whose daemons are forked, with faults to inject and every log in a failure.

A test waits for what it needs with `Swarm.until`; nothing here sleeps for a fixed time and hopes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from agora_protocol.manifest import Manifest

from agora.cli.local_swarm import LocalDaemon as Daemon
from agora.cli.local_swarm import LocalSwarm, SwarmFailed
from tests.process.forked import Forked

T = TypeVar("T")
START_S = 60.0


class Swarm(LocalSwarm):
    """The daemons of one test."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        # The corpus is kept by content: all tests of a session tokenise a text once.
        super().__init__(directory, manifest.to_toml(), corpus=directory.parent / "corpus", launch=Forked)

    def start(  # type: ignore[override]
        self, name: str, stages: str = "auto", *, faults: str = "", run: str = "", flags: Sequence[str] = ()
    ) -> Daemon:
        """Starts a daemon for these stages. faults: as AGORA_FAULTS has them; `fired` tells which have acted."""
        injected = {"AGORA_FAULTS": faults, "AGORA_FAULTS_LOG": str(self.directory / name / "faults.log")}
        environment = injected if faults else None
        return super().start(name, run=run, flags=["--stages", stages, *flags], environment=environment)

    def until(self, condition: Callable[[], T | None], description: str, within_s: float = START_S) -> T:
        """See LocalSwarm; a failure shows the end of every daemon's log."""
        try:
            return super().until(condition, description, within_s)
        except SwarmFailed as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def check_alive(self) -> None:
        """See LocalSwarm; a daemon that left in order, or that a fault has killed, fails no test."""
        for daemon in self.daemons.values():
            if daemon.process.poll() == 0 or "kill" in " ".join(entry[2] for entry in fired(daemon)):
                daemon.end_is_intended = True
        super().check_alive()

    def serving(self, *names: str) -> None:
        """Waits until these daemons (all by default) serve."""
        chosen = [self.daemons[name] for name in names] or list(self.daemons.values())
        self.until(lambda: all(d.is_serving for d in chosen), f"{[d.name for d in chosen]} to serve")

    def completed(self, daemon: Daemon) -> int:
        """Returns how many training microbatches this origin has brought home."""
        return len(daemon.events("MicrobatchCompleted", purpose="train"))

    def logs(self) -> str:
        """Returns the end of every daemon's log."""
        return "\n".join(f"--- {d.name} (exit {d.process.poll()})\n{d.log()}" for d in self.daemons.values())


@contextlib.contextmanager
def swarm(directory: Path, manifest: Manifest) -> Iterator[Swarm]:
    """A swarm whose processes are gone afterwards, however the test ends."""
    made = Swarm(directory, manifest)
    try:
        yield made
    finally:
        made.kill_all()


def fired(daemon: Daemon) -> list[list[str]]:
    """Returns the faults that have acted, as logged before they did: [pid, point, action, count, time]."""
    log = daemon.root / "faults.log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def last_step(daemon: Daemon) -> int:
    """Returns the furthest step that any of its stages has taken."""
    return max((event["step"] for event in daemon.events("StepTaken")), default=0)


def counted_twice(daemons: Sequence[Daemon]) -> set[tuple[str, int]]:
    """Returns the (microbatch, stage) pairs whose gradient more than one hop added, killed daemons included."""
    seen: set[tuple[str, int]] = set()
    twice: set[tuple[str, int]] = set()
    for daemon in daemons:
        for event in daemon.events("MicrobatchCounted"):
            for stage in event["stages"]:
                (twice if (event["microbatch"], stage) in seen else seen).add((event["microbatch"], stage))
    return twice
