"""Frames that wait to be written: small ones before bulk, and bulk in bounded amounts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

SMALL_BYTES: Final = 16_384  # frames up to this size go before bulk, but interrupt none that is being written
MAX_SMALL_BYTES: Final = 8_388_608  # when more bytes of small frames wait, the peer has stopped reading
DROPPABLE_BYTES: Final = 65_536  # when this many bytes of small frames wait, new progress messages are dropped
MAX_BULK_BYTES: Final = 67_108_864  # when more bytes of bulk frames wait, their senders wait

Buffers = Sequence[bytes | memoryview]


def _do_nothing() -> None:
    """Does nothing: the `on_released` of a frame for which the caller gave none."""


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """One frame that waits to be written.

    on_released: called at most once: when the transport has passed on most of the frame, or it is withdrawn or dropped.
    """

    buffers: Buffers
    size: int  # bytes of all buffers
    call: int  # the number of its call; 0 for none
    on_released: Callable[[], None] = _do_nothing


class SendQueue:
    """The frames of one stream that wait to be written: small ones go first, senders of bulk wait for room.

    Small are frames of at most SMALL_BYTES, bulk are larger ones. small_bytes, bulk_bytes: what waits of each kind.
    """

    def __init__(self) -> None:
        self._small: deque[QueuedFrame] = deque()
        self._bulk: deque[QueuedFrame] = deque()
        self._bulk_shrank = asyncio.Event()
        self.small_bytes = 0
        self.bulk_bytes = 0

    def add(self, frame: QueuedFrame) -> bool:
        """Queues a frame behind those of its kind; returns whether it did.

        False, and nothing queued, if a small frame would make more than MAX_SMALL_BYTES of small ones wait. Bulk always
        fits.
        """
        if frame.size > SMALL_BYTES:
            self._bulk.append(frame)
            self.bulk_bytes += frame.size
        elif self.small_bytes + frame.size <= MAX_SMALL_BYTES:
            self._small.append(frame)
            self.small_bytes += frame.size
        else:
            return False
        return True

    def pop(self) -> QueuedFrame | None:
        """Removes and returns the next frame to write: the oldest small one, else the oldest bulk one, else None."""
        queue = self._small or self._bulk
        return self._take(queue, queue[0]) if queue else None

    def withdraw(self, call: int) -> bool:
        """Removes the first waiting frame of `call`, and calls its `on_released`. Returns False if none waits."""
        for queue in (self._small, self._bulk):
            for frame in queue:
                if frame.call == call:
                    self._take(queue, frame).on_released()
                    return True
        return False

    async def wait_for_room(self, size: int) -> None:
        """Waits until a bulk frame of `size` bytes fits into MAX_BULK_BYTES, or no bulk waits.

        A small one never waits.
        """
        while size > SMALL_BYTES and self.bulk_bytes and self.bulk_bytes + size > MAX_BULK_BYTES:
            self._bulk_shrank.clear()
            await self._bulk_shrank.wait()

    def drop_bulk(self) -> None:
        """Forgets all bulk frames, ends every wait for room, and calls each frame's `on_released`."""
        dropped = list(self._bulk)
        self._bulk.clear()
        self.bulk_bytes = 0
        self._bulk_shrank.set()
        for frame in dropped:
            frame.on_released()

    def _take(self, queue: deque[QueuedFrame], frame: QueuedFrame) -> QueuedFrame:
        queue.remove(frame)
        if queue is self._small:
            self.small_bytes -= frame.size
        else:
            self.bulk_bytes -= frame.size
            self._bulk_shrank.set()
        return frame
