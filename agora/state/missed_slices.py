"""Gives and fetches the slices that were averaged while a state was on its way, each as the replicas have it now.

Knows: rounds by number and the size of their slices. Must not know: what becomes of the values.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from agora.state.layout import Flat
from agora.state.transfer import FalseStateError, milliseconds_until
from agora.swarm.conduct import Offence, ReportOffence

SLICE_CHUNK: Final = STATE_CHUNK_BYTES // 4  # elements of a slice that one call brings
CALLS_AT_ONCE: Final = 4
CALL_S: Final = 30.0  # for one answer
PAUSE_S: Final = 0.2  # at least, before a peer that was busy is asked again


def chunk_blocks(blocks: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Returns those of a slice's block ids that its chunk number `chunk` carries. Raises ProtocolError if none."""
    size = SLICE_CHUNK // SLICE_BLOCK
    if chunk * size >= len(blocks):
        raise ProtocolError("bad-message", f"The slice has {-(-len(blocks) // size)} chunks; ask for one of them.")
    return blocks[chunk * size : (chunk + 1) * size]


def slice_reply(values: Flat, step: int) -> Reply:
    """Returns the answer to GetSlice. values: the weights of the blocks asked for, float32 [n], as of step `step`."""
    data = np.ascontiguousarray(values, "<f4")
    return Reply(Slice(step), [WireTensor("float32", data.shape, data.data.cast("B"))])


def check_slice(reply: Reply, size: int) -> Flat:
    """Returns the `size` values in the answer to GetSlice. Raises FalseStateError unless all are there and finite."""
    tensor = reply.tensors[0] if isinstance(reply.message, Slice) and reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("float32", (size,)):
        raise FalseStateError("bad-tensor", f"A chunk of a slice is not a Slice of float32 [{size}].")
    values = np.frombuffer(tensor.data, "<f4")
    if not np.isfinite(values).all():
        raise FalseStateError("bad-tensor", "A slice holds values that are not finite.")
    return values


class SliceFetch:
    """Fetches slices of one stage from sources in turn, CALLS_AT_ONCE calls at a time.

    A busy source is asked again after a pause. One that fails or refuses is asked no more; one that sends false values
    is also reported as an offence.
    """

    def __init__(
        self, caller: Caller, stage: int, sources: Sequence[PeerId], deadline: float, report_offence: ReportOffence
    ) -> None:
        """deadline: loop time after which nobody is asked any more."""
        self._caller = caller
        self._stage = stage
        self._sources = deque(dict.fromkeys(sources))  # the next to ask is the first
        self._deadline = deadline
        self._report_offence = report_offence
        self._free_calls = asyncio.Semaphore(CALLS_AT_ONCE)

    async def run(self, sizes: Mapping[int, int], put: Callable[[int, Flat], Awaitable[None]]) -> list[int]:
        """Fetches the slices of the rounds in `sizes` (round -> elements); awaits put(round, values) for each.

        Returns the rounds whose slices nobody gave before the deadline.
        """
        missing = set(sizes)

        async def fetch_and_put(number: int, size: int) -> None:
            """Fetches all chunks of round `number`'s slice; if all come, awaits `put` and removes it from `missing`."""
            firsts = enumerate(range(0, size, SLICE_CHUNK))
            calls = [self._fetch_chunk(number, chunk, min(SLICE_CHUNK, size - first)) for chunk, first in firsts]
            chunks = await asyncio.gather(*calls)
            arrived = [chunk for chunk in chunks if chunk is not None]
            if len(arrived) == len(chunks):
                await put(number, np.concatenate(arrived))
                missing.remove(number)

        tasks = [asyncio.create_task(fetch_and_put(number, size)) for number, size in sizes.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return sorted(missing)

    async def _fetch_chunk(self, number: int, chunk: int, size: int) -> Flat | None:
        """Asks one source after another for a chunk of round `number`'s slice. None if nobody gives it in time."""
        async with self._free_calls:
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
                    if peer in self._sources:
                        self._sources.remove(peer)
                        if isinstance(error, FalseStateError):
                            self._report_offence(peer, Offence.FALSE_STATE, f"{error.code}: {error}")
        return None
