"""Child processes of a benchmark: started here, spoken to in JSON lines, ended here, whatever happens.

Knows: processes, pipes, deadlines. Must not know: what the children measure. Each child leads a process group of its
own, so that what it forked (a libp2p daemon, hivemind's pools) ends with it.

The talk: the parent writes one JSON object per line to the child's standard input and reads one per line from its
standard output; the child's standard error goes to a file. End of input tells a child to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

STOP_S = 4.0
TAIL_LINES = 12


class BenchFailed(Exception):
    """The benchmark cannot go on; the text says which part failed and shows the end of its log."""


class Child:
    """One process that answers JSON lines. `ask` has a deadline; `close` never raises and always ends the group."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._left = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def tell(self, order: Mapping[str, object]) -> None:
        """Sends one order without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as broken:
            raise self._failed("ended before it was told what to do") from broken

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The child's next answer. Raises BenchFailed when it ends first, or takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._left:
            self._left += self._read_some(deadline, timeout_s)
        line, _, self._left = self._left.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as bad:
            raise self._failed(f"answered {line[:80]!r}, which is not JSON") from bad
        if not isinstance(answer, dict):
            raise self._failed(f"answered {line[:80]!r}, which is no JSON object")
        return answer

    def ask(self, order: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """`tell` and `hear`."""
        self.tell(order)
        return self.hear(timeout_s)

    def dismiss(self) -> None:
        """Tells the child to end, without waiting for it."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self) -> None:
        """Ends the child: end of input, then SIGTERM, then SIGKILL to its whole group."""
        if self._process.returncode is not None:
            return
        self.dismiss()
        end_group(self._process, STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_some(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise self._failed(f"did not answer within {timeout_s:.0f} s")
        some = os.read(self._process.stdout.fileno(), 1 << 16)
        if not some:
            raise self._failed("ended by itself")
        return some

    def _failed(self, what: str) -> BenchFailed:
        return BenchFailed(f"{self.name} {what}; the end of its log:\n{tail(self.log)}")


def end_group(process: subprocess.Popen[Any], wait_s: float) -> None:
    """Ends a process that leads its own group: waits, SIGTERM, waits, SIGKILL; then reaps it.

    The leader is reaped last: until then its group's number cannot come to mean anybody else's processes.
    """
    if not _exited_within(process.pid, wait_s):
        _signal_group(process.pid, signal.SIGTERM)
        _exited_within(process.pid, wait_s)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"  (no log: {error})"
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  (empty)"


class Nursery:
    """Owns the children of one benchmark: `start` them through it, and leaving the `with` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owned = contextlib.ExitStack()
        self._children: list[Child] = []

    def start(self, name: str, role: str, spec: Mapping[str, object], threads: int = 1) -> Child:
        """Starts `agora.bench.worker ROLE` with its spec; `threads` is what its numeric libraries may use."""
        command = [sys.executable, "-m", "agora.bench.worker", role, json.dumps(spec)]
        child = Child(name, command, self.folder / f"{name}.log", thread_environment(threads))
        self._owned.callback(child.close)
        self._children.append(child)
        return child

    def adopt(self, end: Callable[[], object]) -> None:
        """Calls `end` when the nursery closes, for processes that were started in another way."""
        self._owned.callback(end)

    def close(self) -> None:
        """Tells all children to end, then ends them one by one, the last started first."""
        for child in self._children:
            child.dismiss()
        self._children.clear()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def thread_environment(threads: int) -> dict[str, str]:
    """Environment that bounds the threads of OpenMP and MKL."""
    count = str(threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM becomes KeyboardInterrupt inside, so that both ways to stop a benchmark end its children.

    While they are being ended, further signals of the two kinds keep their default meaning: leave at once.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exited_within(pid: int, wait_s: float) -> bool:
    """Whether the child ended, without reaping it."""
    deadline = time.monotonic() + wait_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
