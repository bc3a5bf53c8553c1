"""Named points of the program at which tests kill, freeze or delay a real daemon, or make it send false values.

Knows: AGORA_FAULTS ("point:action[=number][:nth[+]][,...]"), AGORA_FAULTS_LOG. Must not know: what happens at the
points. Without AGORA_FAULTS a point costs one comparison. `nth` counts arrivals from 1 (the default); `3+` stands for
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
    "gossip.step": "the other replicas are told how many steps this one has taken",
    "averaging.scale": "the values of a part are multiplied by this before they are sent: 1",
}
ACTIONS = {
    "kill": "SIGKILL to this process",
    "hang": "this task, or this thread, waits without end; the rest of the process runs on",
    "stop": "SIGSTOP: the whole process freezes",
    "fail": "what is done here fails as if the device had failed",
    "exit": "this thread ends; the rest of the process runs on",
    "sleep": "sleep=SECONDS: this task, or this thread, waits that long",
    "shift": "shift=SECONDS: the wall clock of this process is set forward, back if negative",
    "say": "say=NUMBER: the others are told this in place of the true number",
}
HANG_S = 1e8
_SECONDS_PATTERN: Final = r"[0-9]{1,6}(\.[0-9]{1,6})?"
ACTIONS_WITH_NUMBER: Final = {
    "sleep": re.compile(_SECONDS_PATTERN),
    "shift": re.compile("-?" + _SECONDS_PATTERN),
    "say": re.compile(r"-?[0-9]{1,12}(e[0-9]{1,2})?"),
}
"""The actions that take a number, and its pattern."""
_ARRIVAL: Final = re.compile(r"([1-9][0-9]{0,8})(\+?)")

ReachFault = Callable[[str], Awaitable[None]]
"""Called with a point's name when the program reaches it; `reach` outside of tests."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of AGORA_FAULTS: `action` acts at the `nth` arrival at `point`, the first one being 1.

    number: how long a "sleep" lasts and how far a "shift" goes, in seconds; what "say" tells; 0 for other actions.
    repeats: whether it acts at every later arrival, too.
    """

    point: str
    action: str
    number: float
    nth: int
    repeats: bool


def parse(text: str) -> tuple[Fault, ...]:
    """Returns the faults of "point:action[=number][:nth[+]][,...]", the text of AGORA_FAULTS.

    number: for "sleep", "shift" and "say", and only for these. nth: the visit to the point on which it acts, from 1, by
    default the first; with "+" at all later ones, too. Raises InputError for an unknown point or action and for a
    malformed number.
    """
    return tuple(_parse_fault(entry) for part in text.split(",") if (entry := part.strip()))


def _parse_fault(entry: str) -> Fault:
    """Returns the fault of one entry of AGORA_FAULTS. Raises InputError as `parse` does."""
    point, _, rest = entry.partition(":")
    what, has_arrival, nth = rest.partition(":")
    action, has_number, number = what.partition("=")
    if point not in POINTS:
        raise InputError(f"AGORA_FAULTS names the point {point!r}; known are {', '.join(POINTS)}")
    if action not in ACTIONS:
        raise InputError(f"AGORA_FAULTS asks for {action!r} at {point}; known are {', '.join(ACTIONS)}")
    arrival = _ARRIVAL.fullmatch(nth if has_arrival else "1")
    wanted = ACTIONS_WITH_NUMBER.get(action)
    is_number_right = bool(wanted.fullmatch(number)) if wanted else not has_number
    if arrival is None or not is_number_right:
        raise InputError(f"AGORA_FAULTS has a malformed number in {entry!r}; write it like sleep=0.5:2 or kill:3+")
    return Fault(point, action, float(number or 0.0), int(arrival[1]), bool(arrival[2]))


class Faults:
    """Counts how often each point of this process is reached, and carries out the planned faults. Thread-safe."""

    def __init__(self, plan: tuple[Fault, ...], log_path: str | None) -> None:
        """log_path: the file to which a line is appended before each fault acts, or None."""
        self._plan, self._log_path = plan, log_path
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def act(self, point: str) -> float:
        """Counts an arrival at `point`, and carries out the first planned fault that is due there.

        "kill" and "stop" send a signal to this process, "shift" sets its wall clock, "fail" raises DeviceError and
        "exit" SystemExit. Returns the seconds that the caller must wait, for "hang" and "sleep"; otherwise 0.0.
        """
        fault = self._due(point)
        if fault is None:
            return 0.0
        if fault.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        if fault.action == "fail":
            raise DeviceError("the device failed, as a test had planned; restart this daemon")
        if fault.action == "exit":
            raise SystemExit
        if fault.action == "shift":
            _shift_wall_clock(fault.number)
            return 0.0
        return HANG_S if fault.action == "hang" else fault.number

    def say(self, point: str, truth: float) -> float:
        """Counts an arrival at `point`; returns the number of a planned "say" that is due there, else `truth`."""
        fault = self._due(point)
        return truth if fault is None else fault.number

    def _due(self, point: str) -> Fault | None:
        """Counts an arrival at `point`; returns the first planned fault that is due there, once it is on record."""
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
    """Replaces time.time and time.time_ns of this process by functions that are `seconds` ahead of them."""
    unix, unix_ns = time.time, time.time_ns
    time.time = lambda: unix() + seconds
    time.time_ns = lambda: unix_ns() + int(seconds * 1e9)


def from_environment() -> Faults | None:
    """Returns the faults of AGORA_FAULTS, None when it is empty. Raises LocalError when it is malformed."""
    text = os.environ.get("AGORA_FAULTS", "")
    try:
        return Faults(parse(text), os.environ.get("AGORA_FAULTS_LOG")) if text else None
    except InputError as error:
        raise LocalError(f"{error}; correct it, or unset AGORA_FAULTS.") from None


_active: Faults | None = None


def activate(faults: Faults | None) -> None:
    """Sets the faults that `reach` and `reach_blocking` carry out in this process; with None they do nothing."""
    global _active
    _active = faults


async def reach(point: str) -> None:
    """Carries out a fault that is due at `point`; coroutines call it there. A delay makes only this task wait.

    Raises DeviceError or SystemExit as Faults.act does.
    """
    if _active is not None and (wait_s := _active.act(point)):
        await asyncio.sleep(wait_s)


def reach_blocking(point: str) -> None:
    """Carries out a fault that is due at `point`; threads other than the event loop's call it. A delay blocks them.

    Raises DeviceError or SystemExit as Faults.act does.
    """
    if _active is not None and (wait_s := _active.act(point)):
        time.sleep(wait_s)


def say(point: str, truth: float) -> float:
    """Returns what to tell other peers at `point`: `truth`, or the number of a "say" that is due there."""
    return truth if _active is None else _active.say(point, truth)
