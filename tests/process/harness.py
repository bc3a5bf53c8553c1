"""Real daemons for tests: started, watched by journal and control socket, killed by their pid, always ended.

A test waits for what it needs with `Swarm.until`, which fails with the logs of every daemon when the deadline passes;
nothing here sleeps for a fixed time and hopes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agora_protocol.manifest import Manifest

from agora.node import control_client, paths
from agora.observe.journal import Follower
from tests.process.forked import Forked

START_S = 60.0


@dataclass
class Daemon:
    """One `agora-node join` in a process group of its own, and everything that its journal has said so far."""

    name: str
    root: Path
    process: Forked
    events: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self._follower = Follower(self.root)

    def read(self) -> list[dict[str, Any]]:
        """All events so far."""
        self.events += self._follower.news()
        return self.events

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of one kind whose fields are as given."""
        return [e for e in self.read() if e["event"] == kind and all(e.get(k) == v for k, v in fields.items())]

    def ask(self, question: str, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
        """What the daemon answers on its control socket."""
        return control_client.ask(paths.socket_of(paths.Home(self.root)), question, timeout_s=timeout_s, **arguments)

    def asked(self, question: str, **arguments: Any) -> dict[str, Any] | None:
        """Its answer, or None while it cannot answer."""
        try:
            return self.ask(question, **arguments)
        except (control_client.DaemonUnreachable, control_client.DaemonRefused):
            return None

    @property
    def serving(self) -> bool:
        """Whether it has said that it serves its span."""
        return bool(self.of("StateChanged", state="serving"))

    @property
    def peer(self) -> str:
        """Its peer id."""
        return str(self.of("PeerStarted")[0]["peer"])

    def fired(self) -> list[list[str]]:
        """The faults that it fired, as written before they acted: [pid, point, action, count, time]."""
        log = self.root / "faults.log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The signal, to the daemon's own process only: its p2p daemon must notice by itself."""
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(10)
            self.ended = True

    def log(self) -> str:
        """The end of what it printed."""
        with contextlib.suppress(OSError):
            return (self.root / "log.txt").read_text(errors="replace")[-3000:]
        return ""


class Swarm:
    """The daemons of one test."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.daemons: dict[str, Daemon] = {}
        self.corpus = directory.parent / "corpus"  # kept by content: all tests of a session tokenise a text once
        self.file = directory / "run.toml"
        self.file.write_text(manifest.to_toml(), encoding="utf-8")
        self._invite = ""

    def start(
        self, name: str, stages: str = "auto", *, faults: str = "", run: str = "", flags: Sequence[str] = ()
    ) -> Daemon:
        """A daemon of the run; the first founds it from the manifest file, the others join by invite.

        A name that was there before is the same peer again, on what is left in its directory.
        """
        root = self.directory / name
        root.mkdir(mode=0o700, exist_ok=True)
        arguments = ["join", run or self._invite or str(self.file)]
        arguments += ["--dir", str(root), "--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", "--stages", stages]
        arguments += ["--corpus-cache", str(self.corpus), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if faults:
            environment |= {"AGORA_FAULTS": faults, "AGORA_FAULTS_LOG": str(root / "faults.log")}
        process = Forked(arguments, environment, root / "log.txt")
        daemon = self.daemons[name] = Daemon(name, root, process)
        if not self._invite and not run:
            self._invite = str(self.until(lambda: daemon.asked("invite"), f"{name} to say its invite")["invite"])
        return daemon

    def forget_invite(self) -> None:
        """Nobody is left who could be asked: the next start reads the manifest file."""
        self._invite = ""

    def invite_of(self, daemon: Daemon) -> str:
        """The invite that another daemon gives; later starts use it."""
        self._invite = str(daemon.ask("invite")["invite"])
        return self._invite

    def until(self, ready: Callable[[], Any], what: str, within_s: float = START_S) -> Any:
        """The first truthy value of `ready`; fails, with every log, at the deadline or when a daemon dies unasked."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if value := ready():
                return value
            for daemon in self.daemons.values():
                expected = daemon.ended or "kill" in " ".join(f[2] for f in daemon.fired())
                if daemon.process.poll() not in (None, 0) and not expected:
                    raise AssertionError(f"{daemon.name} ended with {daemon.process.returncode}\n{self.logs()}")
            time.sleep(0.05)
        raise AssertionError(f"waited {within_s:.0f} s for {what}\n{self.logs()}")

    def serving(self, *names: str) -> None:
        """Waits until these daemons (all by default) serve."""
        chosen = [self.daemons[name] for name in names] or list(self.daemons.values())
        self.until(lambda: all(d.serving for d in chosen), f"{[d.name for d in chosen]} to serve")

    def completed(self, daemon: Daemon) -> int:
        """Training microbatches that this origin has brought home."""
        return len(daemon.of("MicrobatchCompleted", purpose="train"))

    def logs(self) -> str:
        """The end of every daemon's log."""
        return "\n".join(f"--- {d.name} (exit {d.process.poll()})\n{d.log()}" for d in self.daemons.values())

    def stop(self, *, within_s: float = 10.0) -> dict[str, int | None]:
        """SIGTERM to all that live; their exit codes. Who has not left within 10 s is killed and shows None."""
        for daemon in self.daemons.values():
            if daemon.process.poll() is None:
                daemon.process.terminate()
        deadline = time.monotonic() + within_s
        codes: dict[str, int | None] = {}
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[daemon.name] = daemon.process.wait(max(0.01, deadline - time.monotonic()))
            codes.setdefault(daemon.name, None)
            daemon.read()
        self.clean()
        return codes

    def clean(self) -> None:
        """Whatever is left of the process groups that this swarm started ends now."""
        for daemon in self.daemons.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(daemon.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(5)
            paths.unregister(paths.socket_of(paths.Home(daemon.root)))


@contextlib.contextmanager
def swarm(directory: Path, manifest: Manifest) -> Iterator[Swarm]:
    """A swarm that is gone afterwards, however the test ends."""
    made = Swarm(directory, manifest)
    try:
        yield made
    finally:
        made.clean()


def last_step(daemon: Daemon) -> int:
    """The furthest that any of its stages has come."""
    return max((event["step"] for event in daemon.of("StepTaken")), default=0)


def counted_twice(daemons: Sequence[Daemon]) -> set[tuple[str, int]]:
    """(microbatch, stage) pairs whose gradient more than one hop added, over all daemons, the killed ones included."""
    seen: set[tuple[str, int]] = set()
    twice: set[tuple[str, int]] = set()
    for daemon in daemons:
        for event in daemon.of("MicrobatchCounted"):
            for stage in event["stages"]:
                (twice if (event["microbatch"], stage) in seen else seen).add((event["microbatch"], stage))
    return twice


def abandoned(daemon: Daemon) -> set[str]:
    """Microbatches that this origin started and neither completed nor dropped (yet)."""
    started = {e["microbatch"] for e in daemon.of("MicrobatchStarted", purpose="train")}
    return started - {e["microbatch"] for e in daemon.of("MicrobatchCompleted")}
