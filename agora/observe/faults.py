"""Named points of the program at which tests kill, freeze or delay a real daemon.

Knows: AGORA_FAULTS ("point:action[:nth][,...]"), AGORA_FAULTS_LOG. Must not know: what happens at the points. Without
AGORA_FAULTS a point costs one comparison. `nth` counts arrivals from 1 (the default); `3+` stands for the third and
every later one. Each fault is appended to the file AGORA_FAULTS_LOG before it acts, so that a test can count them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agora_protocol.errors import DeviceError, LocalError

POINTS = {
    "hop.accepted": "a seat is taken, nothing is computed",
    "hop.forwarded": "this span's forward is done, its backward is not",
    "hop.before-answer": "everything is counted, the answer is not sent",
    "device.job": "a job of the compute thread begins",
    "state.giving": "a joiner's request for state is understood, nothing is answered",
    "averaging.sending": "a member is about to send a part",
    "averaging.received": "an owner has a member's part and has not averaged it",
    "averaging.gathered": "an owner has averaged a part and not answered this member",
    "averaging.answered": "an owner's answer to one member is ready to leave",
    "daemon.started": "the process has begun and has read no clock",
    "clock.asked": "the other peers' clocks are about to be asked",
}
ACTIONS = {
    "kill": "SIGKILL to this process",
    "hang": "this task, or this thread, never goes on; the rest of the process lives",
    "stop": "SIGSTOP: the whole process freezes",
    "fail": "what is done here fails as if the device had failed",
    "exit": "this thread ends; the rest of the process lives",
    "sleep": "as sleep=SECONDS: this task, or this thread, goes on later",
    "shift": "as shift=SECONDS: the wall clock of this process is set forward, back if negative",
}
HANG_S = 1e8

ReachFault = Callable[[str], Awaitable[None]]
"""Called with a point's name when the program reaches it; `reach` outside of tests."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of AGORA_FAULTS: `action` is due at the `nth` arrival at `point`, if `onward` at every later one too.

    seconds: how long a "sleep" lasts, how far a "shift" goes; other actions ignore it.
    """

    point: str
    action: str
    seconds: float
    nth: int
    onward: bool


def parse(text: str) -> tuple[Fault, ...]:
    """Returns the faults of "point:action[=seconds][:nth[+]][,...]", the text of AGORA_FAULTS.

    seconds: 0 by default. nth: the time at which the point is reached, by default the first; with "+" all later ones
    too. Raises ValueError for an unknown point or action and a malformed number.
    """
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        point, _, rest = entry.partition(":")
        action, _, nth = rest.partition(":")
        action, _, seconds = action.partition("=")
        if point not in POINTS:
            raise ValueError(f"AGORA_FAULTS names the point {point!r}; known are {', '.join(POINTS)}")
        if action not in ACTIONS:
            raise ValueError(f"AGORA_FAULTS asks for {action!r} at {point}; known are {', '.join(ACTIONS)}")
        try:
            faults.append(Fault(point, action, float(seconds or 0.0), int(nth.rstrip("+") or 1), nth.endswith("+")))
        except ValueError:
            raise ValueError(f"AGORA_FAULTS has a malformed number in {entry!r}") from None
    return tuple(faults)


class Faults:
    """Counts how often each point of this process is reached; kills, freezes or delays where planned. Thread-safe."""

    def __init__(self, plan: tuple[Fault, ...], log_path: str | None) -> None:
        self._plan, self._log_path = plan, log_path
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def act(self, point: str) -> float:
        """Counts an arrival at `point`; kills, freezes, or returns the seconds to wait for, as is due; else 0.0.

        Raises DeviceError or SystemExit where that is due.
        """
        with self._lock:
            self._counts[point] += 1
            count = self._counts[point]
        for fault in self._plan:
            if fault.point == point and (count == fault.nth or (fault.onward and count > fault.nth)):
                break
        else:
            return 0.0
        if self._log_path:
            with open(self._log_path, "a", encoding="utf-8") as log:
                log.write(f"{os.getpid()} {point} {fault.action} {count} {time.time():.6f}\n")
        if fault.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        if fault.action == "fail":
            raise DeviceError("the device failed, as a test had planned; restart this daemon")
        if fault.action == "exit":
            raise SystemExit
        if fault.action == "shift":
            _shift_wall_clock(fault.seconds)
            return 0.0
        return HANG_S if fault.action == "hang" else fault.seconds


def _shift_wall_clock(seconds: float) -> None:
    """Sets time.time and time.time_ns of this process forward by `seconds`."""
    unix, unix_ns = time.time, time.time_ns
    time.time = lambda: unix() + seconds
    time.time_ns = lambda: unix_ns() + int(seconds * 1e9)


def from_environment() -> Faults | None:
    """Returns the faults of AGORA_FAULTS, None when it is empty. Raises LocalError when it is malformed."""
    text = os.environ.get("AGORA_FAULTS", "")
    try:
        return Faults(parse(text), os.environ.get("AGORA_FAULTS_LOG")) if text else None
    except ValueError as error:
        raise LocalError(f"{error}; correct it, or unset AGORA_FAULTS.") from None


_active: Faults | None = None


def activate(faults: Faults | None) -> None:
    """Sets the plan that `reach` and `reach_blocking` follow in this process; None: they do nothing."""
    global _active
    _active = faults


async def reach(point: str) -> None:
    """Called by coroutines at `point`: a fault that is due there kills or freezes the process, or delays this task."""
    if _active is not None and (wait_s := _active.act(point)):
        await asyncio.sleep(wait_s)


def reach_blocking(point: str) -> None:
    """Called by other threads at `point`: a fault that is due kills or freezes the process, or delays the thread."""
    if _active is not None and (wait_s := _active.act(point)):
        time.sleep(wait_s)
