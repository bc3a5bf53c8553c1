"""Starts, watches, kills and stops a swarm of daemons on this machine, each a real process.

`swarm demo`, the benchmarks and the process tests use it. Knows: processes, their data directories, journals and
control sockets. Must not know: what the daemons train, how their events are added up; imports no torch.
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

START_S: Final = 120.0
STOP_S: Final = 10.0
ANSWER_S: Final = 60.0
POLL_S: Final = 0.05
CAUSE_S: Final = 3.0


class SwarmFailed(LocalError):
    """Raised when a daemon has ended by itself, or when a condition did not become true in time; says which and why."""


Launch = Callable[[Sequence[str], Mapping[str, str], Path], subprocess.Popen[bytes]]
"""Type of a function that starts `agora-node`: (arguments, environment, file for its output) -> the process.

The process must lead a new process group.
"""


class LocalDaemon:
    """One `agora-node join` process: reads its journal, asks it questions on its control socket, kills it.

    root: its data directory.
    """

    def __init__(self, name: str, root: Path, process: subprocess.Popen[bytes]) -> None:
        self.name, self.root, self.process = name, root, process
        self.end_is_intended = False  # whether it was told to end, so that its end is not a failure of the swarm
        self._journal = Follower(root)
        self._socket = paths.socket_of(paths.Home(root))
        self._history: list[dict[str, Any]] = []

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self.process.poll() is None

    def new_events(self) -> list[dict[str, Any]]:
        """Returns the journal's events, as JSON fields, since the last call of this method or of `events`."""
        return self._journal.news()

    def events(self, kind: str = "", **fields: Any) -> list[dict[str, Any]]:
        """Reads the journal and returns all its events so far, as JSON fields, but for those got from new_events.

        kind: returns only events of this kind, "" for all. fields: returns only events whose fields have these values.
        """
        self._history += self.new_events()
        wanted = ({"event": kind} if kind else {}) | fields
        return [event for event in self._history if all(event.get(name) == value for name, value in wanted.items())]

    @property
    def is_serving(self) -> bool:
        """Whether it has ever reported that it serves its span."""
        return bool(self.events("StateChanged", state="serving"))

    @property
    def peer(self) -> str:
        """Its peer id, from the PeerStarted event. Raises IndexError before that event."""
        return str(self.events("PeerStarted")[0]["peer"])

    def ask(self, question: str, timeout_s: float = ANSWER_S, **arguments: Any) -> dict[str, Any]:
        """Sends a question with these arguments to its control socket, and returns the answer.

        Raises DaemonUnreachable when no answer comes within `timeout_s`, DaemonRefused when the answer is an error.
        """
        return control_client.ask(self._socket, question, timeout_s=timeout_s, **arguments)

    def try_ask(self, question: str, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any] | None:
        """Like `ask`, with a shorter default timeout, but returns None if the daemon does not answer or refuses."""
        with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
            return self.ask(question, timeout_s, **arguments)
        return None

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Sends `signal_number` to the daemon's process alone, not to processes that it has started.

        After SIGKILL it waits for the end, up to 10 s, and marks it as intended.
        """
        self.process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            self.end_is_intended = True
            self.process.wait(10.0)

    def kill_group(self) -> None:
        """Kills the daemon and all processes that it has started, waits, removes its socket and registry file."""
        self.end_is_intended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.send_signal(signal.SIGKILL)  # it may have been forked too recently to lead its group
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        paths.unregister(self._socket)

    def log(self) -> str:
        """Returns the last 3000 characters of its output, from log.txt; "" when that cannot be read."""
        with contextlib.suppress(OSError):
            return (self.root / "log.txt").read_text(errors="replace")[-3000:]
        return ""

    def last_words(self) -> str:
        """Returns the last error line of its output; without one, its last line."""
        lines = self.log().strip().splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its log is empty"])[-1]


class LocalSwarm:
    """Starts, watches, kills and stops the daemons of one run, on loopback: a founder, and others that it invites.

    It is not a context manager: whoever uses it must call `stop` or `kill_all`. daemons: by name, ended ones included.
    """

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
        """Writes `manifest`, a TOML text, to DIR/run.toml; DIR, `directory`, gets each daemon's data directory.

        threads: compute threads of each daemon. corpus: where tokenised texts are kept, default DIR/corpus. flags:
        further arguments of every `agora-node join`. launch: starts a process, default start_interpreter.
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
        """Starts a daemon whose data directory is DIR/NAME, with its output in log.txt there; returns at once.

        Only for the founder it waits, until that gives its invite. A name that was used before starts the same peer
        again, with the files that are left. run: what it joins, default the invite. flags, environment: for this daemon
        only, in addition to those of all.
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
        """Waits until a daemon gives its invite, returns it, and lets all later daemons join by it.

        Raises SwarmFailed if none comes within START_S, or a daemon ends by itself meanwhile.
        """
        answer = self.until(lambda: daemon.try_ask("invite"), f"{daemon.name} to give its invite", START_S)
        self.invite = str(answer["invite"])
        return self.invite

    def until(self, condition: Callable[[], T | None], description: str, within_s: float = START_S) -> T:
        """Waits until `condition()` is true, which it calls again and again, and returns its value.

        Raises SwarmFailed when a daemon ends by itself, and after `within_s` seconds with the text "waited ... for
        {description}".
        """
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            self.check_alive()
            if time.monotonic() > deadline:
                words = "; ".join(f"{daemon.name}: {daemon.last_words()}" for daemon in self.daemons.values())
                raise SwarmFailed(f"waited {within_s:.0f} s for {description}; the last lines are: {words}")
            time.sleep(POLL_S)
        return value

    def check_alive(self) -> None:
        """Raises SwarmFailed if daemons have ended by themselves, after waiting CAUSE_S so as to name all."""
        deadline = time.monotonic() + CAUSE_S
        while failed := [d for d in self.daemons.values() if not d.end_is_intended and not d.is_alive]:
            if time.monotonic() > deadline or not any(daemon.is_alive for daemon in self.daemons.values()):
                ended = "ended by itself with exit code"
                raise SwarmFailed("; ".join(f"{d.name} {ended} {d.process.poll()}: {d.last_words()}" for d in failed))
            time.sleep(POLL_S)

    def terminate(self) -> None:
        """Sends SIGTERM to all daemons, marks their end as intended, and does not wait for it."""
        for daemon in self.daemons.values():
            daemon.end_is_intended = True
            daemon.process.send_signal(signal.SIGTERM)

    def stop(self, within_s: float = STOP_S) -> dict[str, int | None]:
        """Ends all daemons: SIGTERM, SIGKILL after `within_s` seconds. Returns exit codes by name, None if killed."""
        self.terminate()
        deadline = time.monotonic() + within_s
        codes: dict[str, int | None] = dict.fromkeys(self.daemons)
        for name, daemon in self.daemons.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[name] = daemon.process.wait(max(0.01, deadline - time.monotonic()))
        self.kill_all()
        return codes

    def kill_all(self) -> None:
        """Kills every daemon of this swarm, and all processes that they have started."""
        with contextlib.ExitStack() as every:  # an error with one leaves no other alive
            for daemon in self.daemons.values():
                every.callback(daemon.kill_group)


def start_interpreter(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts `agora-node` with these arguments in a new interpreter; it gets SIGTERM when this process dies.

    log: the file for its output. within: a command that executes the one after it, such as `ip netns exec NAME`.
    """

    def terminate_with_parent() -> None:
        """Runs in the new process: asks the kernel for a SIGTERM when the parent dies."""
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
