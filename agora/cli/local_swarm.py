"""Starts, watches, kills and stops a swarm of daemons on this machine, each a real process.

The one piece of machinery for whoever needs real daemons on one machine: a demo, a benchmark, a test.
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
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

from agora_protocol.errors import LocalError

from agora.node import daemon_registry, paths
from agora.node.control import control_client
from agora.observe.journal import JournalTail

T = TypeVar("T")

START_TIMEOUT_S: Final = 120.0  # for a daemon to give its invite, or for another condition
STOP_TIMEOUT_S: Final = 10.0  # between SIGTERM and SIGKILL
KILL_TIMEOUT_S: Final = 60.0  # for a process to end after SIGKILL
ANSWER_TIMEOUT_S: Final = 60.0
POLL_INTERVAL_S: Final = 0.05
COMMON_CAUSE_WINDOW_S: Final = 3.0  # after a daemon has ended by itself, in which others may end for the same cause


class SwarmFailed(LocalError):
    """Raised when daemons have ended by themselves, or a condition did not become true in time; the text names them."""


# Type of a function that starts `agora-node`: (arguments, environment, file for its output) -> the process.
#
# The process must lead a new process group.
Launch = Callable[[Sequence[str], Mapping[str, str], Path], subprocess.Popen[bytes]]


class LocalDaemon:
    """One daemon, an `agora-node join` process: reads its journal, asks questions over its control socket, kills it.

    root: its data directory. end_is_intended: whether its end is no failure of the swarm; set it before ending the
    daemon by other means than this class.
    """

    def __init__(self, name: str, root: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.root = root
        self.process = process
        self.end_is_intended = False
        self._journal = JournalTail(root)
        self._socket = daemon_registry.socket_of(paths.Home(root))
        self._history: list[dict[str, Any]] = []

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def new_events(self) -> list[dict[str, Any]]:
        """The journal's events since the last call. Do not mix with `events`, `is_serving` and `peer`, which read on as
        well.
        """
        return self._journal.read_new()

    def events(self, kind: str = "", **fields: Any) -> list[dict[str, Any]]:
        """All events so far of `kind` ("": any) whose fields have these values, but those that new_events returned."""
        self._history += self.new_events()
        wanted = ({"event": kind} if kind else {}) | fields
        return [event for event in self._history if all(event.get(name) == value for name, value in wanted.items())]

    @property
    def is_serving(self) -> bool:
        # Whether this process has ever reported that it serves its span; it may have left or died since.
        return bool(self.events("PeerStarted", pid=self.process.pid))

    @property
    def peer(self) -> str:
        return str(self.events("PeerStarted")[0]["peer"])

    def ask(self, question: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Raises DaemonUnreachable without an answer within `timeout_s` seconds, DaemonRefused for an error."""
        return control_client.ask(self._socket, question, timeout_s=timeout_s, **arguments)

    def try_ask(self, question: str, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any] | None:
        """Returns the answer to a question, see `ask`; None if no answer comes in `timeout_s` or it is an error."""
        with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
            return self.ask(question, timeout_s, **arguments)
        return None

    def answers_peers(self) -> bool:
        """Returns whether a daemon that gives its invite also answers other peers: from the phase "directory" on.

        Reads the whole journal. Without an answer to "invite", the phases may be those of an earlier process.
        """
        steps = [event["name"] for event in JournalTail(self.root).read_new() if event["event"] == "StartStep"]
        return "directory" in takewhile(lambda step: step != "identity", reversed(steps))

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """To the daemon's process alone. SIGKILL marks its end as intended and waits; raises TimeoutExpired after
        KILL_TIMEOUT_S.
        """
        self.process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            self.end_is_intended = True
            self.process.wait(KILL_TIMEOUT_S)

    def kill_group(self) -> None:
        """Kills the daemon with all that it has started, and removes its socket and registry file; waits up to 5 s."""
        self.end_is_intended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.send_signal(signal.SIGKILL)  # it may have been forked too recently to lead its group
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        daemon_registry.unregister(self._socket)

    def log(self) -> str:
        """The last 3000 characters of log.txt; "" if it cannot be read."""
        with contextlib.suppress(OSError):
            return (self.root / "log.txt").read_text(errors="replace")[-3000:]
        return ""

    def last_words(self) -> str:
        """The last line of the log that begins with "error: ", without that; otherwise the last line."""
        lines = self.log().strip().splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its log is empty"])[-1]


class LocalSwarm:
    """The daemons of one run on this machine, over loopback: starts, watches, kills and stops them.

    The first daemon founds the run; each later one joins by `invite`. The caller must call `stop` or `kill_all` at the
    end. daemons: by name, in the order of their first starts, ended ones included. file: the manifest's file. corpus:
    the folder of tokenised texts. launch: starts the processes of the daemons that follow.
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

        threads: compute threads of each daemon.
        corpus: where tokenised texts are kept, default DIR/corpus.
        flags: further arguments of every `agora-node join`.
        launch: starts a process, default start_interpreter.
        """
        self.directory = directory
        self.corpus = corpus or directory / "corpus"
        self.file = directory / "run.toml"
        self.file.write_text(manifest, encoding="utf-8")
        self.daemons: dict[str, LocalDaemon] = {}
        self.invite = ""  # what the next daemon joins; "" lets it found the run from the manifest's file
        self._threads = threads
        self._flags = tuple(flags)
        self.launch = launch or start_interpreter

    def start(
        self, name: str, *, run: str = "", flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> LocalDaemon:
        """Starts a daemon with the data directory DIR/NAME, its output in log.txt there; returns it without waiting.

        Only for the founder (there is no invite yet, and no `run`) waits until it gives its invite, see take_invite. A
        daemon holds at most one stage, unless `environment` says otherwise. A name that was used before starts the same
        peer again, with the files that are left. run: what the daemon joins, by default the invite, or the manifest's
        file. flags, environment: for this daemon only, in addition to those of all.
        """
        root = self.directory / name
        root.mkdir(mode=0o700, exist_ok=True)
        arguments = ["join", run or self.invite or str(self.file), "--dir", str(root)]
        arguments += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", str(self._threads)]
        arguments += ["--corpus-cache", str(self.corpus), *self._flags, *flags]
        needed = {"OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        needed["AGORA_ALLOW_PRIVATE"] = "true"  # its daemons have no other addresses than those of loopback
        needed["AGORA_MOST_STAGES"] = "1"  # a pipeline is wanted, although one machine could hold all of a small model
        needed["AGORA_AT_END"] = "go-on"  # who measures says when it is over
        needed["AGORA_EXPORT_AT_END"] = "never"
        process = self.launch(arguments, {**os.environ, **needed, **(environment or {})}, root / "log.txt")
        daemon = self.daemons[name] = LocalDaemon(name, root, process)
        if not self.invite and not run:
            self.take_invite(daemon)
        return daemon

    def take_invite(self, daemon: LocalDaemon) -> str:
        """Waits until the daemon gives its invite, by which later ones join. Raises SwarmFailed after START_TIMEOUT_S
        or at its end.
        """

        def ask_for_invite() -> dict[str, Any] | None:
            answer = daemon.try_ask("invite")
            return answer if answer is not None and daemon.answers_peers() else None

        answer = self.until(ask_for_invite, f"{daemon.name} to give its invite", START_TIMEOUT_S)
        self.invite = str(answer["invite"])
        return self.invite

    def until(self, condition: Callable[[], T | None], description: str, within_s: float = START_TIMEOUT_S) -> T:
        """Polls `condition` until it is true. Raises SwarmFailed when a daemon ends by itself, and after `within_s`."""
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            self.check_alive()
            if time.monotonic() > deadline:
                words = "; ".join(f"{daemon.name}: {daemon.last_words()}" for daemon in self.daemons.values())
                raise SwarmFailed(f"Waited {within_s:.0f} s for {description}; the last lines are: {words}")
            time.sleep(POLL_INTERVAL_S)
        return value

    def check_alive(self) -> None:
        """Raises SwarmFailed, with their last words, if daemons have ended by themselves; waits up to
        COMMON_CAUSE_WINDOW_S for others to follow.
        """
        deadline = time.monotonic() + COMMON_CAUSE_WINDOW_S
        while failed := [d for d in self.daemons.values() if self.has_failed(d)]:
            if time.monotonic() > deadline or not any(daemon.is_alive for daemon in self.daemons.values()):
                ended = "ended by itself with exit code"
                raise SwarmFailed("; ".join(f"{d.name} {ended} {d.process.poll()}: {d.last_words()}" for d in failed))
            time.sleep(POLL_INTERVAL_S)

    def has_failed(self, daemon: LocalDaemon) -> bool:
        """Returns whether a daemon has ended although its end was not intended."""
        return not daemon.end_is_intended and not daemon.is_alive

    def terminate(self) -> None:
        """Sends SIGTERM to all daemons and marks their ends as intended; does not wait for them to end."""
        for daemon in self.daemons.values():
            daemon.end_is_intended = True
            daemon.process.send_signal(signal.SIGTERM)

    def stop(self, within_s: float = STOP_TIMEOUT_S) -> dict[str, int | None]:
        """SIGTERM, after `within_s` seconds SIGKILL. Exit codes by name: None where it was killed here, negative after
        a signal.
        """
        self.terminate()
        deadline = time.monotonic() + within_s
        codes: dict[str, int | None] = dict.fromkeys(self.daemons)
        for name, daemon in self.daemons.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[name] = daemon.process.wait(max(0.01, deadline - time.monotonic()))
        self.kill_all()
        return codes

    def kill_all(self) -> None:
        """Kills every daemon of this swarm, and all processes that it has started; see LocalDaemon.kill_group."""
        with contextlib.ExitStack() as every:  # an error with one leaves no other alive
            for daemon in self.daemons.values():
                every.callback(daemon.kill_group)


def start_interpreter(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts `agora-node` with these arguments in a new interpreter, and returns the process without waiting.

    The new process leads a new session and process group, and gets SIGTERM when the present process dies. log: the file
    for its output, which is emptied first. within: a command that executes the command after it, such as `ip netns exec
    NAME`.
    """

    def terminate_with_parent() -> None:
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
