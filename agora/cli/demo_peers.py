"""The demo's daemons: each a process group of its own, started, asked, killed and stopped.

Knows: processes, their data directories and control sockets. Must not know: what the demo counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agora.cli.console import Failure
from agora.node import control_client, paths
from agora.observe.journal import Follower

STOP_SECONDS = 10.0
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass
class Daemon:
    """One `agora-node join` process with its own data directory."""

    index: int
    root: Path
    process: subprocess.Popen[bytes]
    follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        self.follower = Follower(self.root)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    @property
    def socket(self) -> Path:
        """Its control socket."""
        return paths.socket_of(paths.Home(self.root))

    def ask(self, question: str, *, timeout_s: float = 5.0, **arguments: Any) -> dict[str, Any] | None:
        """The daemon's answer; None while it does not answer, or is not ready to."""
        try:
            return control_client.ask(self.socket, question, timeout_s=timeout_s, **arguments)
        except (control_client.DaemonUnreachable, control_client.DaemonRefused):
            return None

    def signal(self, number: int) -> None:
        """Sends a signal to the whole process group, the p2p daemon included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_words(self) -> str:
        """The error that it ended with, or the last line of its log."""
        try:
            lines = (self.root / "log.txt").read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it left no log"
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (said or lines or ["it said nothing"])[-1]


def start(index: int, directory: Path, run: str, threads: int, flags: Sequence[str] = ()) -> Daemon:
    """Starts a daemon on loopback, any free port, with what it says in DIR/peer-N/log.txt. flags: more of `join`'s."""
    root = directory / f"peer-{index}"
    root.mkdir(mode=0o700)
    command = [sys.executable, "-m", "agora.cli.main_node", "join", run, "--dir", str(root)]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", str(threads)]
    command += ["--corpus-cache", str(directory / "corpus"), "--allow-files", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with (root / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    return Daemon(index, root, process)


def _die_with_parent() -> None:
    """SIGTERM for the daemon when the demo is killed without a chance to stop it."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def stop(daemons: Sequence[Daemon]) -> list[int]:
    """SIGTERM to all, SIGKILL to what is left after 10 s, and to every process group; who had to be killed."""
    for daemon in daemons:
        if daemon.alive:
            daemon.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and any(daemon.alive for daemon in daemons):
        time.sleep(0.05)
    stubborn = [daemon.index for daemon in daemons if daemon.alive]
    kill(daemons)
    return stubborn


def kill(daemons: Sequence[Daemon]) -> None:
    """SIGKILL to every process group, and the files that killed daemons leave in the runtime directory."""
    for daemon in daemons:
        daemon.signal(signal.SIGKILL)
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(5.0)
        paths.unregister(daemon.socket)


def ended_unasked(daemon: Daemon) -> Failure:
    """The demo's failure when a daemon ends by itself."""
    code = daemon.process.returncode
    return Failure(f"peer {daemon.index} ended by itself with exit code {code}: {daemon.last_words()}")
