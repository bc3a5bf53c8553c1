"""Named points of the program at which tests kill, freeze or delay a real daemon, or make it send wrong values.

Without AGORA_FAULTS a point costs one comparison. `nth` counts arrivals from 1 (the default); `3+` stands for
the third and every later one. A line is appended to the file AGORA_FAULTS_LOG before each fault acts, so that a test
can count them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import DeviceError, InputError, LocalError

# Every point, and what holds when the program reaches it.
POINTS: Final = {
    "hop.accepted": "a slot is taken, nothing is computed",
    "hop.forwarded": "this span's forward pass is done, its backward pass is not",
    "hop.before-answer": "everything is counted, the answer is not sent",
    "device.job": "a job of the device thread begins",
    "state.giving": "a joiner's request for state is understood, nothing is answered",
    "averaging.sending": "a member is about to send a shard",
    "averaging.received": "a reducer has a member's shard and has not averaged it",
    "averaging.answered": "a reducer has averaged a shard and not yet answered this member",
    "daemon.started": "the process has begun and has not read a clock yet",
    "daemon.leaving": "the daemon has said that it leaves, and has done nothing else of it",
    "clock.asked": "the other peers' clocks are about to be asked",
    "page.look": "the page's feed is about to ask how the run is, for those who have it open",
    "gossip.step": "the other replicas are told how many steps this one has taken",
    "averaging.scale": "the values of a shard are multiplied by this before they are sent: 1",
}
# The points at which a number is sent to peers: "say" is the only action at these points, and at no other point.
FALSIFIED_POINTS: Final = ("gossip.step", "averaging.scale")
# Every action of a fault, and what it does.
ACTIONS: Final = {
    "kill": "SIGKILL to this process",
    "hang": "this task, or this thread, waits without end; the rest of the process runs on",
    "stop": "SIGSTOP: the whole process freezes",
    "fail": "what is done here fails as if the device had failed",
    "exit": "this thread ends; the rest of the process runs on",
    "sleep": "sleep=SECONDS: this task, or this thread, waits that long",
    "shift": "shift=SECONDS: the wall clock of this process is set forward, back if negative",
    "say": "say=NUMBER: the others are told this in place of the true number",
}
HANG_S: Final = 1e8
_SECONDS_PATTERN: Final = r"[0-9]{1,6}(\.[0-9]{1,6})?"
# The actions that take a number, and its pattern.
ACTIONS_WITH_NUMBER: Final = {
    "sleep": re.compile(_SECONDS_PATTERN),
    "shift": re.compile("-?" + _SECONDS_PATTERN),
    "say": re.compile(r"-?[0-9]{1,12}(e[0-9]{1,2})?"),
}
_ARRIVAL: Final = re.compile(r"([1-9][0-9]{0,8})(\+?)")

# Type of a function that is awaited with a point's name when the program reaches it; `inject_fault` outside of tests.
InjectFault = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of AGORA_FAULTS: `action` happens at the `nth` arrival at `point`."""

    point: str
    action: str
    number: float  # the seconds of a "sleep" or a "shift", or what "say" sends in place of the truth; otherwise 0
    nth: int  # counted from 1
    repeats: bool  # whether the fault happens at every later arrival, too


def parse(text: str) -> tuple[Fault, ...]:
    """ "point:action[=number][:nth[+]][,...]". Raises InputError, also for an action that the point does not have."""
    return tuple(_parse_fault(entry) for part in text.split(",") if (entry := part.strip()))


def _parse_fault(entry: str) -> Fault:
    point, _, rest = entry.partition(":")
    action_text, has_arrival, nth = rest.partition(":")
    action, has_number, number = action_text.partition("=")
    if point not in POINTS:
        raise InputError(f"AGORA_FAULTS names the point {point!r}; known are {', '.join(POINTS)}.")
    if action not in ACTIONS:
        raise InputError(f"AGORA_FAULTS asks for {action!r} at {point}; known are {', '.join(ACTIONS)}.")
    if (action == "say") != (point in FALSIFIED_POINTS):
        raise InputError(
            f"AGORA_FAULTS asks for {action!r} at {point}; "
            f"say is for {', '.join(FALSIFIED_POINTS)}, and they have only say."
        )
    arrival = _ARRIVAL.fullmatch(nth if has_arrival else "1")
    pattern = ACTIONS_WITH_NUMBER.get(action)
    is_number_right = bool(pattern.fullmatch(number)) if pattern else not has_number
    if arrival is None or not is_number_right:
        raise InputError(f"AGORA_FAULTS has a malformed number in {entry!r}; write it like sleep=0.5:2 or kill:3+.")
    return Fault(point, action, float(number or 0.0), int(arrival[1]), bool(arrival[2]))


class Faults:
    """Counts how often each point of this process is reached, and carries out the planned faults. Thread-safe."""

    def __init__(self, plan: tuple[Fault, ...], log_path: str | None) -> None:
        """log_path: the file to which a line is appended before each fault acts, or None."""
        self._plan = plan
        self._log_path = log_path
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def act(self, point: str) -> float:
        """Returns the seconds that the caller must wait. Raises DeviceError for "fail", SystemExit for "exit"."""
        fault = self._find_due(point)
        if fault is None:
            return 0.0
        if fault.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        if fault.action == "fail":
            raise DeviceError("The device failed, as a test had planned; start the daemon again.")
        if fault.action == "exit":
            raise SystemExit
        if fault.action == "shift":
            _shift_wall_clock(fault.number)
            return 0.0
        return HANG_S if fault.action == "hang" else fault.number

    def falsify(self, point: str, truth: float) -> float:
        """Counts an arrival at `point`; returns the number of the fault that is due there; without one, `truth`."""
        fault = self._find_due(point)
        return truth if fault is None else fault.number

    def _find_due(self, point: str) -> Fault | None:
        with self._lock:
            self._counts[point] += 1
            count = self._counts[point]
        for fault in self._plan:
            if fault.point == point and (count == fault.nth or (fault.repeats and count > fault.nth)):
                break
        else:
            return None
        if self._log_path:
            with open(self._log_path, "a", encoding="utf-8") as log:
                log.write(f"{os.getpid()} {point} {fault.action} {count} {time.time():.6f}\n")
        return fault


def _shift_wall_clock(seconds: float) -> None:
    # Repeated shifts add up.
    unix, unix_ns = time.time, time.time_ns
    time.time = lambda: unix() + seconds
    time.time_ns = lambda: unix_ns() + int(seconds * 1e9)


def from_environment() -> Faults | None:
    """Returns the faults of AGORA_FAULTS, None if it is unset. Raises LocalError if it is malformed."""
    text = os.environ.get("AGORA_FAULTS", "")
    try:
        return Faults(parse(text), os.environ.get("AGORA_FAULTS_LOG")) if text else None
    except InputError as error:
        raise LocalError(f"{error} Correct it, or unset AGORA_FAULTS.") from None


_active: Faults | None = None


def set_active_faults(faults: Faults | None) -> None:
    global _active
    _active = faults


async def inject_fault(point: str) -> None:
    """Injects the fault that is due when a coroutine arrives at `point`, if any: only this task waits; see Faults."""
    if _active is not None and (wait_s := _active.act(point)):
        await asyncio.sleep(wait_s)


def inject_fault_blocking(point: str) -> None:
    """Injects the fault that is due when a thread arrives at `point`, if any: the thread blocks. See Faults.act."""
    if _active is not None and (wait_s := _active.act(point)):
        time.sleep(wait_s)


def falsify(point: str, truth: float) -> float:
    """Counts an arrival at `point`; returns what to send to peers: `truth`, or the number of a fault that is due."""
    return truth if _active is None else _active.falsify(point, truth)
