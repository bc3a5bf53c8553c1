"""Seats: how many microbatches may be between their acceptance and their answer at this peer.

Knows seats, and how long they are taken. Must not know what happens on a seat. A seat is taken before anything is
decoded or computed, because BUSY promises that no work was done, and because memory is what seats bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from agora_protocol.errors import Busy

from agora.pipeline.signal import Signal

CLOSED_RETRY_MS = 2000
LEAST_RETRY_MS, MOST_RETRY_MS = 10, 2000


class Admission:
    """`max_seats` seats; `pause` and `close` refuse newcomers and let those inside finish."""

    def __init__(self, max_seats: int) -> None:
        self.max_seats = max(1, max_seats)
        self.taken = 0
        self.refused = 0
        self._closed_for = ""
        self._held_s = 0.0
        self._freed = Signal()

    @contextmanager
    def enter(self, now: float) -> Iterator[None]:
        """A seat until the context ends. Raises Busy at once, before any work, when there is none."""
        if self._closed_for:
            self.refused += 1
            raise Busy(f"this peer is {self._closed_for}; ask another", CLOSED_RETRY_MS)
        if self.taken >= self.max_seats:
            self.refused += 1
            raise Busy(f"all {self.max_seats} seats are taken", self.retry_after_ms())
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._freed.notify()

    def held(self, seconds: float) -> None:
        """Teaches how long a seat is held, for what BUSY says."""
        self._held_s += 0.1 * (seconds - self._held_s) if self._held_s else seconds

    def retry_after_ms(self) -> int:
        """About when the next seat becomes free: one of `max_seats` that are each held for a while."""
        return int(min(max(1000.0 * self._held_s / self.max_seats, LEAST_RETRY_MS), MOST_RETRY_MS))

    def close(self, reason: str) -> None:
        """No newcomers from now on; `reason` completes "this peer is ..."."""
        self._closed_for = reason

    def open(self) -> None:
        """Newcomers are welcome again."""
        self._closed_for = ""

    async def drained(self, until: float) -> bool:
        """Waits until nobody is seated, at most to `until` on the loop's clock; whether that was reached."""
        while self.taken and asyncio.get_running_loop().time() < until:
            await self._freed.wait(until)
        return not self.taken
