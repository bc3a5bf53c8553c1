"""Child processes of a benchmark: started here, spoken to in JSON lines, ended here, whatever happens.

Each child leads a process group of its own, so that what it forked (a libp2p daemon, hivemind's pools) ends with it.

The talk: the parent writes one JSON object per line to the child's standard input and reads one per line from its
standard output; the child's standard error goes to a file. At the end of its input a child stops.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

STOP_S = 3.0
TAIL_LINES = 12
# The folder that holds the package `benchmarks`, for children that must import it, too.
SCRIPTS = Path(__file__).resolve().parents[1]
Name = TypeVar("Name")


class BenchFailed(Exception):
    """The benchmark cannot go on; the text says which part failed and shows the end of its log."""


class Child:
    """One process that answers JSON lines. `ask` has a deadline; `close` never raises and always ends the group."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._left = b""
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, order: Mapping[str, object]) -> None:
        """Sends one order without waiting for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError) as broken:
            raise self._failed("ended before it was told what to do") from broken

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Returns the child's next answer. Raises BenchFailed when it ends first, or takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._left:
            self._left += self._read_some(deadline, timeout_s)
        line, _, self._left = self._left.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as bad:
            raise self._failed(f"answered {line[:80]!r}, which is not JSON") from bad
        if not isinstance(answer, dict):
            raise self._failed(f"answered {line[:80]!r}, which is not a JSON object")
        return answer

    def ask(self, order: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Sends one order and returns its answer. Raises BenchFailed when none comes within `timeout_s`."""
        self.tell(order)
        return self.hear(timeout_s)

    def dismiss(self) -> None:
        """Asks the child to end, by the end of its input, without waiting for it."""
        with contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def close(self) -> None:
        """Ends the child and what it forked; see `end_children`."""
        end_children([self])

    def _read_some(self, deadline: float, timeout_s: float) -> bytes:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise self._failed(f"did not answer within {timeout_s:.0f} s")
        some = os.read(self.process.stdout.fileno(), 1 << 16)
        if not some:
            raise self._failed("ended by itself")
        return some

    def _failed(self, what: str) -> BenchFailed:
        return BenchFailed(f"{self.name} {what}; the end of its log:\n{tail(self.log)}")


def deal(
    children: Sequence[Child], orders: Iterable[tuple[Name, Mapping[str, object]]], timeout_s: float
) -> Iterator[tuple[Name, dict[str, Any]]]:
    """Gives each free child the next order, and yields (name of the order, answer) as the answers come.

    `orders` is read no further than there are free children. Raises BenchFailed when a child ends, or when no child
    answers within `timeout_s`.
    """
    waiting, free = iter(orders), list(children)
    busy: dict[Child, Name] = {}
    while True:
        while free and (order := next(waiting, None)) is not None:
            child = free.pop(0)
            child.tell(order[1])
            busy[child] = order[0]
        if not busy:
            return
        child = _first_to_answer(list(busy), timeout_s)
        yield busy.pop(child), child.hear(timeout_s)
        free.append(child)


def _first_to_answer(children: Sequence[Child], timeout_s: float) -> Child:
    # Returns a child that has answered; the first one when none does in time, so that `hear` raises for it.
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.process.stdout is not None
            selector.register(child.process.stdout, selectors.EVENT_READ, child)
        ready = selector.select(timeout_s)
    found: Child = ready[0][0].data if ready else children[0]
    return found


def start_node(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Starts a daemon by a module that changes something in `agora-node` first, see LocalSwarm's `launch`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def end_children(children: Sequence[Child]) -> None:
    """Ends children together: end of input, SIGTERM, SIGKILL to their groups, STOP_S between each; then reaps them.

    A leader is reaped last: until then its group's number cannot be reused for other processes.
    """
    alive = [child for child in children if child.process.returncode is None]
    for child in alive:
        child.dismiss()
    _await_exits(alive)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        _await_exits(alive)
    for child in alive:
        child.process.wait()
        if child.process.stdout is not None:
            child.process.stdout.close()


def tail(log: Path) -> str:
    """Returns the last lines of a log, indented."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"  (no log: {error})"
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  (empty)"


class ChildProcesses:
    """Owns the processes of one benchmark: leaving the `with` ends them all, the whole within about 10 s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []
        self._adopted: list[tuple[Callable[[], object], Callable[[], object]]] = []

    def start(
        self,
        name: str,
        role: str,
        spec: Mapping[str, object],
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts `benchmarks.worker ROLE` with its spec; `threads` is what its numeric libraries may use."""
        command = [sys.executable, "-m", "benchmarks.worker", role, json.dumps(spec)]
        paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        needed = thread_environment(threads) | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {})
        child = Child(name, command, self.folder / f"{name}.log", needed)
        self._children.append(child)
        return child

    def adopt(self, dismiss: Callable[[], object], end: Callable[[], object]) -> None:
        """Adds processes started elsewhere. dismiss: asks them to end, without waiting. end: makes sure of it."""
        self._adopted.append((dismiss, end))

    def close(self) -> None:
        """Asks all processes to end, then makes sure that they do."""
        adopted, self._adopted = self._adopted, []
        children, self._children = self._children, []
        for dismiss, _ in adopted:
            dismiss()
        end_children(children)
        for _, end in adopted:
            end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def thread_environment(threads: int) -> dict[str, str]:
    """Returns the environment that limits the threads of OpenMP and MKL."""
    count = str(threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Context manager: inside, SIGTERM becomes KeyboardInterrupt, so that it ends the children as Ctrl-C does.

    While the children are being ended, a further signal of the two kinds ends the process, as it does by default.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _await_exits(children: Sequence[Child]) -> None:
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and not all(_exited(child.pid) for child in children):
        time.sleep(0.02)


def _exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
