"""Simulated time: events in order of time, and deadlines that are nearly always removed before they pass.

Knows: times, functions to call. Must not know: what the functions do, or any real clock. Two events at the same time
happen in the order in which they were added, so that a simulation is the same at each run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EventQueue:
    """Calls functions at their simulated times, the earliest first. now: the time of the present event, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happened = 0
        """How many events were run."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def at(self, time: float, function: Callable[..., None], *args: Any) -> None:
        """Schedules `function(*args)` for simulated second `time`; if that has passed, for now, after this event."""
        self._added += 1
        heapq.heappush(self._heap, (max(time, self.now), self._added, function, args))

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Schedules `function(*args)` for `seconds` from now, in simulated time."""
        self.at(self.now + seconds, function, *args)

    def run(self, until: float) -> None:
        """Calls all functions that are due at `until` or earlier, then sets `now` to `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, function, args = heapq.heappop(heap)
            self.happened += 1
            function(*args)
        self.now = until


class DeadlineWheel(Generic[K]):
    """Calls `passed(key)` at a key's deadline, or up to `grain_s` seconds later, unless the key was removed before.

    Most deadlines of a swarm are removed. A removed key takes no memory, whereas an event of the queue cannot be
    removed.
    """

    def __init__(self, queue: EventQueue, passed: Callable[[K], None], grain_s: float = 0.25) -> None:
        self._queue = queue
        self._passed = passed
        self._grain_s = grain_s
        self._slots: dict[int, dict[K, None]] = {}
        self._slot_of: dict[K, int] = {}

    def add(self, key: K, deadline: float) -> None:
        """Adds a key that is not there yet; its deadline is rounded up to a multiple of `grain_s`."""
        slot = math.ceil(deadline / self._grain_s)
        if slot not in self._slots:
            self._slots[slot] = {}
            self._queue.at(slot * self._grain_s, self._pass, slot)
        self._slots[slot][key] = None
        self._slot_of[key] = slot

    def remove(self, key: K) -> None:
        """Removes a key; does nothing when it is not there."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._slots[slot][key]

    def _pass(self, slot: int) -> None:
        """Removes the keys of one slot one by one and calls `passed` for each; such a call may remove other keys."""
        keys = self._slots[slot]
        while keys:
            key = next(iter(keys))
            self.remove(key)
            self._passed(key)
        del self._slots[slot]
