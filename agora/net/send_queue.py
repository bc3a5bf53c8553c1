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


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """One frame in the queue. `call`: the call that it belongs to, 0 for none."""

    buffers: Buffers
    size: int
    call: int


class SendQueue:
    """The frames of one stream that have not begun to be written."""

    def __init__(self) -> None:
        self._small: deque[QueuedFrame] = deque()
        self._bulk: deque[QueuedFrame] = deque()
        self._bulk_shrank = asyncio.Event()
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
        queue = self._small or self._bulk
        return self._take(queue, queue[0]) if queue else None

    def withdraw(self, call: int) -> bool:
        """Takes a frame of `call` back. Returns False when none waits."""
        for queue in (self._small, self._bulk):
            for frame in queue:
                if frame.call == call:
                    self._take(queue, frame)
                    return True
        return False

    async def wait_for_room(self, size: int) -> None:
        """Waits until a bulk frame of `size` bytes may be queued, or `drop_bulk` was called."""
        while self.bulk_bytes and self.bulk_bytes + size > MAX_BULK_BYTES:
            self._bulk_shrank.clear()
            await self._bulk_shrank.wait()

    def drop_bulk(self) -> None:
        """Forgets all bulk frames, and ends every wait for room."""
        self._bulk.clear()
        self.bulk_bytes = 0
        self._bulk_shrank.set()

    def _take(self, queue: deque[QueuedFrame], frame: QueuedFrame) -> QueuedFrame:
        """Removes a frame from its queue, and returns it."""
        queue.remove(frame)
        if queue is self._small:
            self.small_bytes -= frame.size
        else:
            self.bulk_bytes -= frame.size
            self._bulk_shrank.set()
        return frame
