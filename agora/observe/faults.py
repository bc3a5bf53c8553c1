"""Named fault points: what the tests use to kill, freeze or delay a real daemon at an exact place of the protocol.

Knows: AGORA_FAULTS ("point:action:nth[,...]") and AGORA_FAULTS_LOG. Must not know: what happens at the points. Without
AGORA_FAULTS a point costs one comparison. Actions: `kill` (SIGKILL to this process), `hang` (this task, or this thread,
never goes on; the rest of the process lives), `stop` (SIGSTOP: the whole process freezes), `sleep=SECONDS`. `nth`
counts from 1 (the default); `3+` fires at the third time and every time after. Each firing is appended to the file
named by AGORA_FAULTS_LOG before it acts, so that a test can count what really fired.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

POINTS = (
    "hop.accepted",
    "hop.forwarded",
    "hop.before-answer",
    "device.job",
    "state.giving",
    "averaging.sending",
    "averaging.received",
    "averaging.gathered",
    "averaging.answered",
)
"""hop.accepted: a seat is taken, nothing computed; hop.forwarded: this span's forward is done, its backward is not;
hop.before-answer: everything is counted, the answer not sent; device.job: at the start of each job of the compute
thread; state.giving: a joiner's request for state is understood, nothing answered; averaging.sending: before a member
sends a part; averaging.received: an owner has a member's part and has not averaged it; averaging.gathered: an owner has
averaged a part and not answered this member; averaging.answered: its answer to one member is ready to leave."""
ACTIONS = ("kill", "hang", "stop", "sleep")

ReachFault = Callable[[str], Awaitable[None]]
"""Called with a point's name when the program reaches it; `reach` outside of tests."""


class FaultSpecError(ValueError):
    """AGORA_FAULTS does not say what to do where."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of AGORA_FAULTS."""

    point: str
    action: str
    seconds: float
    nth: int
    onward: bool

    def fires(self, count: int) -> bool:
        """Whether the `count`-th time (from 1) at the point is meant."""
        return count >= self.nth if self.onward else count == self.nth


def parse(text: str) -> tuple[Fault, ...]:
    """Reads "point:action[:nth][,...]"; raises FaultSpecError naming what is wrong."""
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(text: str) -> Fault:
    point, _, rest = text.partition(":")
    action, _, nth = rest.partition(":")
    action, _, seconds = action.partition("=")
    if point not in POINTS:
        raise FaultSpecError(f"AGORA_FAULTS names the point {point!r}; known are {', '.join(POINTS)}")
    if action not in ACTIONS:
        raise FaultSpecError(f"AGORA_FAULTS asks for {action!r} at {point}; known are {', '.join(ACTIONS)}")
    try:
        return Fault(point, action, float(seconds or 0.0), int(nth.rstrip("+") or 1), nth.endswith("+"))
    except ValueError:
        raise FaultSpecError(f"AGORA_FAULTS has a malformed number in {text!r}") from None


class Faults:
    """The plan of one process and how often each point was reached. `reach` and `reach_blocking` are thread-safe."""

    def __init__(self, plan: tuple[Fault, ...], log_path: str | None) -> None:
        self._plan = plan
        self._log_path = log_path
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def due(self, point: str) -> Fault | None:
        """Counts one arrival at `point`; the fault that fires now, already written to the log."""
        with self._lock:
            count = self._counts[point] = self._counts.get(point, 0) + 1
        fault = next((f for f in self._plan if f.point == point and f.fires(count)), None)
        if fault is not None:
            self._write(f"{os.getpid()} {point} {fault.action} {count} {time.time():.6f}\n")
        return fault

    def _write(self, line: str) -> None:
        if self._log_path:
            handle = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)


def from_environment() -> Faults | None:
    """The plan of AGORA_FAULTS, None when it is empty; raises FaultSpecError."""
    text = os.environ.get("AGORA_FAULTS", "")
    return Faults(parse(text), os.environ.get("AGORA_FAULTS_LOG")) if text else None


_active: Faults | None = None


def activate(faults: Faults | None) -> None:
    """Installs a plan for this process (the daemon does so once at its start; tests restore None)."""
    global _active
    _active = faults


async def reach(point: str) -> None:
    """A fault point inside a coroutine."""
    if _active is None:
        return
    fault = _active.due(point)
    if fault is None:
        return
    if fault.action == "sleep":
        await asyncio.sleep(fault.seconds)
    elif fault.action == "hang":
        await asyncio.Event().wait()
    else:
        _signal_self(fault)


def reach_blocking(point: str) -> None:
    """A fault point on a thread that is not the event loop's."""
    if _active is None:
        return
    fault = _active.due(point)
    if fault is None:
        return
    if fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "hang":
        threading.Event().wait()
    else:
        _signal_self(fault)


def _signal_self(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
