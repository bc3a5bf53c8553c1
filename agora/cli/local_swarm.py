"""A swarm of daemons on this machine, each a real process: started, watched, killed and stopped from outside.

`swarm demo`, the benchmarks and the process tests use it. Knows: processes, their data directories, journals and
control sockets. Must not know: what the daemons train, what is made of their events; imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from agora_protocol.errors import LocalError

from agora.node import control_client, paths
from agora.observe.journal import Follower

T = TypeVar("T")

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05
CAUSE_SECONDS: Final = 3.0


class SwarmFailed(LocalError):
    """Raised when a daemon ended by itself, or what was waited for did not happen in time; says which and why."""


Launch = Callable[[Sequence[str], Mapping[str, str], Path], subprocess.Popen[bytes]]
"""Starts `agora-node ARGUMENTS` with this environment, its output going to this file, in a process group of its own."""


class LocalDaemon:
    """One `agora-node join` process with its own data directory: reads its journal, asks it questions, kills it."""

    def __init__(self, name: str, root: Path, process: subprocess.Popen[bytes]) -> None:
        self.name, self.root, self.process = name, root, process
        self.end_is_intended = False  # whether it was told to end, so that its end is no failure of the swarm
        self._journal = Follower(root)
        self._socket = paths.socket_of(paths.Home(root))
        self._history: list[dict[str, Any]] = []

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def new_events(self) -> list[dict[str, Any]]:
        """Returns the events that the journal has gained since the last call of this method or of `events`."""
        return self._journal.news()

    def events(self, kind: str = "", **fields: Any) -> list[dict[str, Any]]:
        """Returns the journal's events since the start, of one kind if it is given, whose fields have these values."""
        self._history += self.new_events()
        wanted = ({"event": kind} if kind else {}) | fields
        return [event for event in self._history if all(event.get(name) == value for name, value in wanted.items())]

    @property
    def is_serving(self) -> bool:
        """Whether it has ever reported that it serves its span."""
        return bool(self.events("StateChanged", state="serving"))

    @property
    def peer(self) -> str:
        """Its peer id, which its first event names."""
        return str(self.events("PeerStarted")[0]["peer"])

    def ask(self, question: str, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
        """Returns the answer on its control socket to `question` with these arguments.

        Raises DaemonUnreachable when none comes within `timeout_s`, DaemonRefused for an error as answer.
        """
        return control_client.ask(self._socket, question, timeout_s=timeout_s, **arguments)

    def try_ask(self, question: str, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any] | None:
        """Returns the answer on its control socket; None when it does not answer or refuses."""
        with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
            return self.ask(question, timeout_s, **arguments)
        return None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the daemon's own process alone; waits for the end, which is intended, after SIGKILL."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.end_is_intended = True
            self.process.wait(10.0)

    def kill_group(self) -> None:
        """Kills the daemon and all processes that it has started, and removes its socket and registry file."""
        self.end_is_intended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.send_signal(signal.SIGKILL)  # it may have been forked too recently to lead its group
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        paths.unregister(self._socket)

    def log(self) -> str:
        """Returns the last 3000 characters that it has printed, from log.txt; "" when that cannot be read."""
        with contextlib.suppress(OSError):
            return (self.root / "log.txt").read_text(errors="replace")[-3000:]
        return ""

    def last_words(self) -> str:
        """Returns the error that it ended with, or else the last line that it has printed."""
        lines = self.log().strip().splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its log is empty"])[-1]


class LocalSwarm:
    """Starts, watches, kills and stops the daemons of one run, on loopback: a founder, and others that it invites."""

    def __init__(
        self,
        directory: Path,
        manifest: str,
        *,
        threads: int = 1,
        corpus: Path | None = None,
        flags: Sequence[str] = (),
        launch: Launch | None = None,
    ) -> None:
        """Writes the manifest, TOML, to DIR/run.toml; each daemon has its data directory in DIR.

        threads: compute threads of each daemon. corpus: where tokenised texts are kept, default DIR/corpus. flags:
        further arguments of every `agora-node join`. launch: how a process is started, default a new interpreter.
        """
        self.directory = directory
        self.corpus = corpus or directory / "corpus"
        self.file = directory / "run.toml"
        self.file.write_text(manifest, encoding="utf-8")
        self.daemons: dict[str, LocalDaemon] = {}
        self.invite = ""  # what the next daemon joins; "" lets it found the run from the manifest's file
        self._threads, self._flags = threads, tuple(flags)
        self._launch = launch or start_interpreter

    def start(
        self, name: str, *, run: str = "", flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> LocalDaemon:
        """Starts a daemon in DIR/NAME, its output in log.txt there; waits for nothing but the founder's invite.

        A name that was used before is the same peer again, with what is left in its directory. run: what it joins,
        default the invite. flags, environment: for this daemon only, beside those of all.
        """
        root = self.directory / name
        root.mkdir(mode=0o700, exist_ok=True)
        arguments = ["join", run or self.invite or str(self.file), "--dir", str(root)]
        arguments += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", str(self._threads)]
        arguments += ["--corpus-cache", str(self.corpus), *self._flags, *flags]
        needed = {"OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        needed["AGORA_ALLOW_PRIVATE"] = "true"  # its daemons have no other addresses than those of loopback
        needed["AGORA_MOST_STAGES"] = "1"  # a pipeline is wanted, although one machine could hold all of a small model
        process = self._launch(arguments, {**os.environ, **needed, **(environment or {})}, root / "log.txt")
        daemon = self.daemons[name] = LocalDaemon(name, root, process)
        if not self.invite and not run:
            self.take_invite(daemon)
        return daemon

    def take_invite(self, daemon: LocalDaemon) -> str:
        """Waits for a daemon's invite, returns it, and lets all later daemons join by it.

        Raises SwarmFailed when none comes within START_SECONDS, or a daemon ends by itself meanwhile.
        """
        answer = self.until(lambda: daemon.try_ask("invite"), f"{daemon.name} to give its invite", START_SECONDS)
        self.invite = str(answer["invite"])
        return self.invite

    def until(self, condition: Callable[[], T | None], description: str, within_s: float = START_SECONDS) -> T:
        """Calls `condition` again and again until its value is true, and returns that value.

        Raises SwarmFailed when a daemon ends by itself, and after `within_s`, as "waited ... for {description}".
        """
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            self.check_alive()
            if time.monotonic() > deadline:
                words = "; ".join(f"{daemon.name}: {daemon.last_words()}" for daemon in self.daemons.values())
                raise SwarmFailed(f"waited {within_s:.0f} s for {description}; the last lines are: {words}")
            time.sleep(POLL_SECONDS)
        return value

    def check_alive(self) -> None:
        """Raises SwarmFailed when daemons have ended by themselves; first waits CAUSE_SECONDS, to name all of them."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while failed := [d for d in self.daemons.values() if not d.end_is_intended and not d.is_alive]:
            if time.monotonic() > deadline or not any(daemon.is_alive for daemon in self.daemons.values()):
                ended = "ended by itself with exit code"
                raise SwarmFailed("; ".join(f"{d.name} {ended} {d.process.poll()}: {d.last_words()}" for d in failed))
            time.sleep(POLL_SECONDS)

    def terminate(self) -> None:
        """Sends SIGTERM to all daemons that run, without waiting for their end."""
        for daemon in self.daemons.values():
            daemon.end_is_intended = True
            daemon.process.send_signal(signal.SIGTERM)

    def stop(self, within_s: float = STOP_SECONDS) -> dict[str, int | None]:
        """Ends all daemons: SIGTERM, and SIGKILL after `within_s`. Returns exit codes by name, None for the killed."""
        self.terminate()
        deadline = time.monotonic() + within_s
        codes: dict[str, int | None] = dict.fromkeys(self.daemons)
        for name, daemon in self.daemons.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[name] = daemon.process.wait(max(0.01, deadline - time.monotonic()))
        self.kill_all()
        return codes

    def kill_all(self) -> None:
        """Ends every process that this swarm has started, now."""
        for daemon in self.daemons.values():
            daemon.kill_group()


def start_interpreter(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts `agora-node ARGUMENTS` in a new interpreter, as users do; it gets SIGTERM when this process dies.

    within: a command that replaces itself by the one that follows it, such as `ip netns exec NAME`.
    """

    def terminate_with_parent() -> None:
        """Runs in the new process: has the kernel send it SIGTERM when its parent dies (PR_SET_PDEATHSIG)."""
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    with log.open("wb") as output:
        return subprocess.Popen(
            [*within, sys.executable, "-m", "agora.cli.main_node", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=terminate_with_parent,
        )
