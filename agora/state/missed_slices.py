"""Gives and fetches the slices that were averaged while a state was on its way, each as the replicas have it now.

Knows: rounds by number and the size of their slices. Must not know: which elements a slice has, or what becomes of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.errors import AgoraError, Busy, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.limits import SLICE_BLOCK, STATE_CHUNK_BYTES
from agora_protocol.messages import GetSlice, Slice
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray

from agora.calls import Caller, Reply
from agora.clock import loop_time
from agora.state.answers import FalseStateError, check_slice
from agora.state.layout import Flat
from agora.state.stages import OnOffence
from agora.state.transfer import milliseconds_until

SLICE_CHUNK: Final = STATE_CHUNK_BYTES // 4  # elements of a slice that one call brings
CALLS_AT_ONCE: Final = 4
CALL_S: Final = 30.0  # for one answer
PAUSE_S: Final = 0.2  # at least, before a peer that was busy is asked again

PutSlice = Callable[[int, Flat], Awaitable[None]]
"""Takes a round and the values of its slice, float32 [n]."""


def chunk_blocks(blocks: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Returns the block ids of one chunk of a slice. Raises ProtocolError when the slice has no such chunk."""
    size = SLICE_CHUNK // SLICE_BLOCK
    if chunk * size >= len(blocks):
        raise ProtocolError("bad-message", f"The slice has {-(-len(blocks) // size)} chunks; ask for one of them.")
    return blocks[chunk * size : (chunk + 1) * size]


def slice_reply(values: Flat, step: int) -> Reply:
    """Returns the answer to GetSlice. values: of the blocks asked for, float32 [n]; step: the step that they are of."""
    data = np.ascontiguousarray(values, "<f4")
    return Reply(Slice(step), [WireTensor("float32", data.shape, data.data.cast("B"))])


async def fetch_slices(
    caller: Caller,
    stage: int,
    sources: Sequence[PeerId],
    sizes: Mapping[int, int],
    put: PutSlice,
    *,
    deadline: float,
    on_offence: OnOffence = lambda _peer, _error: None,
) -> list[int]:
    """Fetches the slices of the rounds in `sizes` (round -> elements) and hands each to `put` when it is whole.

    The sources take turns. One that fails, refuses or sends false values is not asked again. Returns the rounds whose
    slices nobody gave before `deadline` (loop time).
    """
    fetch = _SliceFetch(caller, stage, sources, sizes, put, deadline, on_offence)
    workers = [asyncio.create_task(fetch.work()) for _ in range(CALLS_AT_ONCE)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return sorted(fetch.missing)


@dataclass(slots=True)
class _PartialSlice:
    """A slice of which `chunks_left` chunks are still to come."""

    values: Flat
    chunks_left: int


class _SliceFetch:
    """What the workers of one `fetch_slices` share. missing: the rounds whose slices are not whole yet."""

    def __init__(
        self,
        caller: Caller,
        stage: int,
        sources: Sequence[PeerId],
        sizes: Mapping[int, int],
        put: PutSlice,
        deadline: float,
        on_offence: OnOffence,
    ) -> None:
        self.missing = set(sizes)
        self._caller = caller
        self._stage = stage
        self._sources = deque(dict.fromkeys(sources))  # the next to ask is the first
        self._sizes = sizes
        self._put = put
        self._deadline = deadline
        self._on_offence = on_offence
        self._partial: dict[int, _PartialSlice] = {}
        self._queue = deque((number, first) for number, size in sizes.items() for first in range(0, size, SLICE_CHUNK))

    async def work(self) -> None:
        """Fetches one chunk after the other until the queue is empty; does nothing once no source is left."""
        while self._queue:
            number, first = self._queue.popleft()
            size = min(SLICE_CHUNK, self._sizes[number] - first)
            values = await self._fetch_chunk(number, first // SLICE_CHUNK, size)
            if values is not None:
                await self._store_chunk(number, first, values)

    async def _store_chunk(self, number: int, first: int, values: Flat) -> None:
        """Adds a chunk that begins at element `first` to its slice; hands the slice on when it is whole."""
        size = self._sizes[number]
        partial = self._partial.setdefault(number, _PartialSlice(np.empty(size, np.float32), -(-size // SLICE_CHUNK)))
        partial.values[first : first + SLICE_CHUNK] = values
        partial.chunks_left -= 1
        if partial.chunks_left == 0:
            del self._partial[number]
            await self._put(number, partial.values)
            self.missing.remove(number)

    async def _fetch_chunk(self, number: int, chunk: int, size: int) -> Flat | None:
        """Returns `size` values of the slice of round `number`; None when no source gives them before the deadline."""
        while self._sources and loop_time() < self._deadline:
            peer = self._sources[0]
            self._sources.rotate(-1)
            ends = min(self._deadline, loop_time() + CALL_S)
            request = GetSlice(self._stage, number, chunk, milliseconds_until(ends))
            try:
                return check_slice(await self._caller.call(peer, request, deadline=ends), size)
            except Busy as error:
                pause_s = max(error.retry_after_ms / 1000, PAUSE_S)
                await asyncio.sleep(min(pause_s, max(self._deadline - loop_time(), 0)))
            except AgoraError as error:
                self._drop_source(peer, error)
        return None

    def _drop_source(self, peer: PeerId, error: AgoraError) -> None:
        """Asks the peer no more, and reports it when what it sent was false."""
        if peer in self._sources:
            self._sources.remove(peer)
            if isinstance(error, FalseStateError):
                self._on_offence(peer, error)
