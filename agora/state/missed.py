"""The slices that were averaged while a state was on its way: each as the replicas have it now.

Knows: rounds by number and the size of their slices. Must not know: which elements a slice has, or what becomes of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from agora.state.snapshot import Given
from agora.state.transfer import Lied, Untrue, milliseconds_to

CHUNK: Final = STATE_CHUNK_BYTES // 4  # elements of a slice that one call brings
AT_ONCE: Final = 4  # calls
CALL_S: Final = 30.0  # for one answer
PAUSE_S: Final = 0.2  # at least, before a peer that was busy is asked again

Apply = Callable[[int, Flat, int], Awaitable[None]]
"""Takes a round, its slice's values float32 [n], and the least step that they are of."""


def chunk_blocks(blocks: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Of the block ids of a slice those that GetSlice asks for. Raises ProtocolError when there is no such chunk."""
    size = CHUNK // SLICE_BLOCK
    if chunk * size >= len(blocks):
        raise ProtocolError("bad-message", f"The slice has {-(-len(blocks) // size)} chunks; ask for one of them.")
    return blocks[chunk * size : (chunk + 1) * size]


def give_slice(values: Flat, step: int) -> Given:
    """The answer to GetSlice: the values of the blocks asked for, as they are at `step`, float32 [n]."""
    data = np.ascontiguousarray(values, "<f4")
    return Given(Slice(step), [WireTensor("float32", data.shape, data.data.cast("B"))])


async def fetch_slices(
    caller: Caller,
    stage: int,
    sources: Sequence[PeerId],
    sizes: Mapping[int, int],
    apply: Apply,
    *,
    deadline: float,
    lied: Lied = lambda _peer, _error: None,
) -> list[int]:
    """Fetches the slices of the rounds in `sizes` (round -> elements), in order, and hands each to `apply` when whole.

    The sources take turns; one that fails, refuses or lies is not asked again, and the next takes over. The answer
    names the rounds that nobody gave before `deadline` (loop time): their elements stay as the snapshot had them.
    """
    catching_up = _CatchingUp(caller, stage, sources, sizes, apply, deadline, lied)
    workers = [asyncio.create_task(catching_up.work()) for _ in range(AT_ONCE)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return sorted(catching_up.missing)


@dataclass(slots=True)
class _Round:
    """A slice on its way."""

    values: Flat
    left: int
    step: int | None = None


@dataclass
class _CatchingUp:
    caller: Caller
    stage: int
    sources: Sequence[PeerId]
    sizes: Mapping[int, int]
    apply: Apply
    deadline: float
    lied: Lied
    missing: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = set(self.sizes)
        self._usable = list(dict.fromkeys(self.sources))
        self._turn = 0
        self._rounds: dict[int, _Round] = {}
        chunks = [(round_, first) for round_, size in self.sizes.items() for first in range(0, size, CHUNK)]
        self._queue = deque(chunks)

    async def work(self) -> None:
        """Fetches chunks until there are none, or nobody to ask."""
        while self._queue:
            round_, first = self._queue.popleft()
            size = min(CHUNK, self.sizes[round_] - first)
            got = await self._fetch(GetSlice(self.stage, round_, first // CHUNK), size)
            if got is not None:
                await self._arrived(round_, first, *got)

    async def _arrived(self, round_: int, first: int, values: Flat, step: int) -> None:
        size = self.sizes[round_]
        slice_ = self._rounds.setdefault(round_, _Round(np.empty(size, np.float32), -(-size // CHUNK)))
        slice_.values[first : first + CHUNK] = values
        slice_.left -= 1
        slice_.step = step if slice_.step is None else min(step, slice_.step)
        if slice_.left == 0:
            del self._rounds[round_]
            await self.apply(round_, slice_.values, slice_.step)
            self.missing.remove(round_)

    async def _fetch(self, request: GetSlice, size: int) -> tuple[Flat, int] | None:
        while self._usable and loop_time() < self.deadline:
            self._turn += 1
            peer = self._usable[self._turn % len(self._usable)]
            ends = min(self.deadline, loop_time() + CALL_S)
            asked = GetSlice(request.stage, request.round, request.chunk, milliseconds_to(ends))
            try:
                return check_slice(await self.caller.call(peer, asked, (), deadline=ends), size)
            except Busy as error:
                await asyncio.sleep(min(max(error.retry_after_ms / 1000, PAUSE_S), max(self.deadline - loop_time(), 0)))
            except AgoraError as error:
                self._remove(peer, error)
        return None

    def _remove(self, peer: PeerId, error: AgoraError) -> None:
        if peer in self._usable:
            self._usable.remove(peer)
            if isinstance(error, Untrue):
                self.lied(peer, error)


def check_slice(reply: Reply, size: int) -> tuple[Flat, int]:
    """The values and the step of `size` elements of a slice. Raises Untrue when it is none."""
    tensor = reply.tensors[0] if reply.tensors else None
    if not isinstance(reply.message, Slice) or tensor is None:
        raise Untrue("bad-message", f"GetSlice was answered by {type(reply.message).__name__}.")
    if (tensor.dtype, tensor.shape) != ("float32", (size,)):
        raise Untrue("bad-tensor", f"A chunk of a slice is {tensor.dtype} {tensor.shape}, not float32 [{size}].")
    values = np.frombuffer(tensor.data, "<f4")
    if not np.isfinite(values).all():
        raise Untrue("bad-tensor", "A slice holds values that are not finite.")
    return values, reply.message.step
