"""Starts daemons by forking a process that has imported everything: 0.1 s instead of the seconds that imports take.

A forked daemon is `agora-node` in every other way: it has a process group, arguments, environment, standard streams and
an exit code of its own. The demo's tests and those of command lines start daemons as users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["agora.cli.main_node", "agora.node.process.main", "agora.node.process.daemon"])


class Forked:
    """`agora-node ARGUMENTS`, with the methods of a Popen that tests use; it prints to `log`.

    file_bytes: no file that it writes can become larger, as on a disk that is full.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, *, file_bytes: int | None = None
    ) -> None:
        args = (list(arguments), dict(environment), str(log), file_bytes)
        self._process = _FORKS.Process(target=_main, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("agora-node", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To the daemon alone, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server has seen its end, and not yet told of it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _main(arguments: list[str], environment: dict[str, str], log: str, file_bytes: int | None) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the fork server ends when the tests do
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.clear()
    os.environ.update(environment)
    # Shells without a terminal start what they put into the background with SIGINT ignored; a daemon keeps to that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    from agora.cli import main_node

    sys.argv = ["agora-node", *arguments]
    main_node.main()
