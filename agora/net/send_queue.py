"""Frames that wait to be written: small ones before bulk, and bulk in bounded amounts.

Knows: frames' sizes and the calls that they belong to. Must not know: their bytes' meaning, transports.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SMALL_BYTES: Final = 16_384
"""Frames up to this size go before bulk. A bulk frame that is being written is never interrupted."""
MAX_SMALL_BYTES: Final = 8_388_608
"""More small frames than this waiting: the peer has stopped reading."""
NEWS_BYTES: Final = 65_536
"""More small frames than this waiting: news, which nobody depends on, is dropped."""
MAX_BULK_BYTES: Final = 67_108_864
"""More bulk frames than this waiting: their senders wait."""

Buffers = Sequence[bytes | memoryview]


@dataclass(slots=True)
class QueuedFrame:
    """One frame in the queue. `call`: the call that it belongs to, 0 for none."""

    buffers: Buffers
    size: int
    call: int

    @property
    def is_small(self) -> bool:
        """Whether it goes before bulk."""
        return self.size <= SMALL_BYTES


class SendQueue:
    """The frames of one stream that have not begun to be written."""

    def __init__(self) -> None:
        self._small: deque[QueuedFrame] = deque()
        self._bulk: deque[QueuedFrame] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False
        self.small_bytes = 0
        self.bulk_bytes = 0

    def add_small(self, frame: QueuedFrame) -> bool:
        """Queues a frame ahead of all bulk, whatever its size. Returns False, queueing nothing, when too many wait."""
        if self.small_bytes + frame.size > MAX_SMALL_BYTES:
            return False
        self._small.append(frame)
        self.small_bytes += frame.size
        return True

    def add_bulk(self, frame: QueuedFrame) -> None:
        """Queues a frame behind all others. The caller has waited for room before."""
        self._bulk.append(frame)
        self.bulk_bytes += frame.size

    def pop(self) -> QueuedFrame | None:
        """Returns the next frame to write, None when nothing waits."""
        if self._small:
            frame = self._small.popleft()
            self.small_bytes -= frame.size
            return frame
        if self._bulk:
            frame = self._bulk.popleft()
            self._shrink_bulk(frame)
            return frame
        return None

    def withdraw(self, call: int) -> bool:
        """Takes a frame of `call` back. Returns False when none waits."""
        for frame in self._small:
            if frame.call == call:
                self._small.remove(frame)
                self.small_bytes -= frame.size
                return True
        for frame in self._bulk:
            if frame.call == call:
                self._bulk.remove(frame)
                self._shrink_bulk(frame)
                return True
        return False

    async def wait_for_room(self, size: int) -> None:
        """Waits until a bulk frame of `size` bytes may be queued, or the queue is closed."""
        while self.bulk_bytes and self.bulk_bytes + size > MAX_BULK_BYTES and not self._is_closed:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake_one()  # the room that this one was woken for, if it was, is somebody else's
                raise

    def drop_bulk(self) -> None:
        """Forgets all bulk frames, and ends every wait for room."""
        self._bulk.clear()
        self.bulk_bytes = 0
        while self._waiting:
            self._wake_one()

    def close(self) -> None:
        """Forgets everything, and ends every wait for room."""
        self._is_closed = True
        self._small.clear()
        self.drop_bulk()

    def _shrink_bulk(self, frame: QueuedFrame) -> None:
        """Takes a bulk frame's bytes off, which makes room for another."""
        self.bulk_bytes -= frame.size
        self._wake_one()

    def _wake_one(self) -> None:
        """Wakes the sender that has waited longest for room."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
