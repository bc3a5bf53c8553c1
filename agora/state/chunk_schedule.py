"""Decides which chunk of a state to ask which source for next. Deterministic: `now` is an argument, nothing is sent."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Callable
from typing import Final

from agora_protocol.ids import PeerId

DUPLICATE_FACTOR: Final = 2.0  # a chunk that takes this many times the median is asked of another source as well
DUPLICATE_AFTER_S: Final = 0.5  # but never sooner than this
ASSUMED_CHUNK_S: Final = 2.5  # the median time of a chunk before the first one has arrived
REMEMBERED_CHUNKS: Final = 32


class ChunkSchedule:
    """Assigns the chunks 0 to count - 1 of one transfer to sources, until all of them have arrived.

    A source gets the lowest missing chunk: one that has not arrived and has no open call. If none is missing, it gets a
    chunk that another source is asked for, if that call lasts unusually long, so that a slow or hung source delays the
    end by one chunk, not by all of its chunks.
    """

    def __init__(self, count: int) -> None:
        self.restart(count)

    def restart(self, count: int) -> None:
        """Forgets everything: the transfer has `count` chunks, and none has arrived."""
        self.count = count
        self.arrived_chunks: set[int] = set()
        self.refetched = 0  # chunks that had to be asked for again because every call for them failed
        self.duplicated = 0  # calls for a chunk for which another source had an open call
        self._missing = list(range(count))  # a heap of the chunks that have not arrived and have no open call
        self._open: dict[int, dict[PeerId, float]] = {}  # chunk -> peer that is asked for it -> when its call began
        self._durations: deque[float] = deque(maxlen=REMEMBERED_CHUNKS)

    @property
    def is_complete(self) -> bool:
        return len(self.arrived_chunks) == self.count

    def take(self, peer: PeerId, now: float, has: Callable[[int], bool] = lambda chunk: True) -> int | None:
        """Chooses a chunk to ask `peer` for, records that the call begins `now`, and returns the chunk; None if none.

        has(chunk): whether the peer has that chunk. It chooses the lowest missing chunk that the peer has. If there is
        none, it chooses among the chunks that are asked of other peers but not of this one: the chunk whose latest call
        began longest ago, if that call has lasted longer than max(DUPLICATE_AFTER_S, DUPLICATE_FACTOR * median_s()).
        """
        if (chunk := self._take_missing(has)) is None:
            open_calls = ((max(calls.values()), n) for n, calls in self._open.items() if peer not in calls and has(n))
            started_at, chunk = min(open_calls, default=(now, -1))
            if now - started_at <= max(DUPLICATE_AFTER_S, DUPLICATE_FACTOR * self.median_s()):
                return None
            self.duplicated += 1
        self._open.setdefault(chunk, {})[peer] = now
        return chunk

    def _take_missing(self, has: Callable[[int], bool]) -> int | None:
        if self._missing and has(self._missing[0]):
            return heapq.heappop(self._missing)
        if (chunk := min(filter(has, self._missing), default=None)) is not None:
            self._missing.remove(chunk)
            heapq.heapify(self._missing)
        return chunk

    def record_arrival(self, chunk: int, peer: PeerId, now: float) -> list[PeerId]:
        """Records that `peer` gave the chunk; returns the other peers with an open call for it, to be cancelled."""
        calls = self._open.pop(chunk, {})
        if (started_at := calls.pop(peer, None)) is not None:
            self._durations.append(now - started_at)
        self.arrived_chunks.add(chunk)
        return list(calls)

    def record_call_end(self, chunk: int, peer: PeerId) -> None:
        """Records that the call to `peer` for `chunk` ended, with or without the chunk.

        If the chunk has not arrived and no other call for it is open, it is missing again and counted in `refetched`.
        """
        calls = self._open.get(chunk, {})
        calls.pop(peer, None)
        if not calls and self._open.pop(chunk, None) is not None and chunk not in self.arrived_chunks:
            self.refetched += 1
            heapq.heappush(self._missing, chunk)

    def discard(self, chunk: int) -> None:
        """Makes a chunk that has arrived missing again, so that it is fetched again. KeyError if it has not arrived."""
        self.arrived_chunks.remove(chunk)
        heapq.heappush(self._missing, chunk)

    def median_s(self) -> float:
        """Median seconds of the last REMEMBERED_CHUNKS chunks; ASSUMED_CHUNK_S before the first."""
        return statistics.median(self._durations) if self._durations else ASSUMED_CHUNK_S
