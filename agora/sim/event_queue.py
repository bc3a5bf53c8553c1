"""Simulated time: events in order of time, and deadlines that are nearly always removed before they pass.

Knows: times, functions to call. Must not know: what happens in them, or any real clock. Two events of one time happen
in the order in which they were added, so that a simulation is the same at each run.
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
        """How many events have happened."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def at(self, time: float, function: Callable[..., None], *args: Any) -> None:
        """Has `function(*args)` called at `time`, or at once after the present event when that has passed."""
        self._added += 1
        heapq.heappush(self._heap, (max(time, self.now), self._added, function, args))

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Has `function(*args)` called in so many seconds."""
        self.at(self.now + seconds, function, *args)

    def run(self, until: float) -> None:
        """Lets everything happen that is due before or at `until`; then `now` is `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, function, args = heapq.heappop(heap)
            self.happened += 1
            function(*args)
        self.now = until


class DeadlineWheel(Generic[K]):
    """Calls `passed(key)` when a key's deadline passes, unless it was removed before; to within `grain_s` seconds.

    Most deadlines of a swarm are removed. A key that is removed leaves nothing behind, unlike an event of the queue.
    """

    def __init__(self, queue: EventQueue, passed: Callable[[K], None], grain_s: float = 0.25) -> None:
        self._queue = queue
        self._passed = passed
        self._grain_s = grain_s
        self._slots: dict[int, dict[K, None]] = {}
        self._slot_of: dict[K, int] = {}

    def add(self, key: K, deadline: float) -> None:
        """Adds a key that is not there yet; its deadline is rounded up to the next grain."""
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
        """Takes the keys of one slot out, one after the other, and tells of each; one may remove another."""
        keys = self._slots[slot]
        while keys:
            key = next(iter(keys))
            self.remove(key)
            self._passed(key)
        del self._slots[slot]
