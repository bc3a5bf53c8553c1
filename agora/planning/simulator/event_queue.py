"""Simulated time: events in order of time, and deadlines that are nearly always removed before they pass.

Two events at the same time happen in the order in which they were added, so that a simulation is the same at each run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EventQueue:
    """Function calls in order of their simulated times. now: of the present event, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def at(self, time: float, function: Callable[..., None], *args: Any) -> None:
        """In the past counts as now; of equal times the first scheduled comes first."""
        self._added += 1
        heapq.heappush(self._heap, (max(time, self.now), self._added, function, args))

    def after(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, function, *args)

    def run(self, until: float) -> None:
        """Calls all functions due at `until` or earlier, any added while it runs included; sets `now` to `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, function, args = heapq.heappop(heap)
            function(*args)
        self.now = until


class TimingWheel(Generic[K]):
    """Deadlines by key: calls `on_expired(key)` at a key's deadline or up to `grain_s` later, unless it is removed.

    Each key is removed before its call. Most deadlines of a swarm are removed in time: a removed key takes no memory
    any more, whereas an event of an EventQueue cannot be removed.
    """

    def __init__(self, queue: EventQueue, on_expired: Callable[[K], None], grain_s: float = 0.25) -> None:
        self._queue = queue
        self._on_expired = on_expired
        self._grain_s = grain_s
        self._slots: dict[int, dict[K, None]] = {}
        self._slot_of: dict[K, int] = {}

    def add(self, key: K, deadline: float) -> None:
        """Adds a key, which must not be there yet; rounds its deadline up to a multiple of `grain_s`."""
        slot = math.ceil(deadline / self._grain_s)
        if slot not in self._slots:
            self._slots[slot] = {}
            self._queue.at(slot * self._grain_s, self._pass_slot, slot)
        self._slots[slot][key] = None
        self._slot_of[key] = slot

    def remove(self, key: K) -> None:
        """Removes a key; does nothing when it is not there."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._slots[slot][key]

    def _pass_slot(self, slot: int) -> None:
        keys = self._slots[slot]
        while keys:
            key = next(iter(keys))
            self.remove(key)
            self._on_expired(key)
        del self._slots[slot]
