"""The slices that were averaged while a state was on its way: each as one replica has it now.

Knows: rounds by number and the size of their slices. Must not know: which elements a slice has, or what becomes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import numpy as np
from agora_protocol.errors import AgoraError, Busy
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetSlice, Slice

from agora.pipeline.seams import Caller, Reply
from agora.state.layout import Flat
from agora.state.transfer import Lied, Untrue, milliseconds_to

AT_ONCE: Final = 3
SLICE_S: Final = 30.0  # for one answer
PAUSE_S: Final = 0.2  # at least, before a peer that was busy is asked again

Apply = Callable[[int, Flat, int], Awaitable[None]]
"""Takes a round, its slice's values float32 [n], and the step they are of."""


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
    """Fetches the slices of the rounds in `sizes` (round -> elements) and hands each to `apply`, a few at once.

    The sources take turns; one that fails, refuses or lies is not asked again, and the next takes over. The answer
    names the rounds that nobody gave before `deadline` (loop time): their elements stay as the snapshot had them.
    """
    usable = list(dict.fromkeys(sources))
    seats = asyncio.Semaphore(AT_ONCE)

    async def fetch(turn: int, round_: int) -> bool:
        async with seats:
            while usable and _now() < deadline:
                peer = usable[turn % len(usable)]
                try:
                    values, step = await _fetch_slice(caller, peer, stage, round_, sizes[round_], deadline)
                except Busy as error:
                    await asyncio.sleep(min(max(error.retry_after_ms / 1000, PAUSE_S), max(deadline - _now(), 0)))
                    continue
                except AgoraError as error:
                    _remove(usable, peer, error, lied)
                    continue
                await apply(round_, values, step)
                return True
        return False

    tasks = [asyncio.create_task(fetch(turn, round_)) for turn, round_ in enumerate(sizes)]
    try:
        applied = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [round_ for round_, done in zip(sizes, applied, strict=True) if not done]


def _remove(usable: list[PeerId], peer: PeerId, error: AgoraError, lied: Lied) -> None:
    if peer in usable:
        usable.remove(peer)
        if isinstance(error, Untrue):
            lied(peer, error)


async def _fetch_slice(
    caller: Caller, peer: PeerId, stage: int, round_: int, numel: int, deadline: float
) -> tuple[Flat, int]:
    ends = min(deadline, _now() + SLICE_S)
    request = GetSlice(stage, round_, milliseconds_to(ends))
    return check_slice(await caller.call(peer, request, (), deadline=ends), numel)


def check_slice(reply: Reply, numel: int) -> tuple[Flat, int]:
    """The values and the step of a slice of `numel` elements. Raises Untrue when it is none."""
    tensor = reply.tensors[0] if reply.tensors else None
    if not isinstance(reply.message, Slice) or tensor is None:
        raise Untrue("bad-message", f"GetSlice was answered by {type(reply.message).__name__}.")
    if (tensor.dtype, tensor.shape) != ("float32", (numel,)):
        raise Untrue("bad-tensor", f"A slice is {tensor.dtype} {tensor.shape}; the round's has float32 [{numel}].")
    values = np.frombuffer(tensor.data, "<f4")
    if not np.isfinite(values).all():
        raise Untrue("bad-tensor", "A slice holds values that are not finite.")
    return values, reply.message.step


def _now() -> float:
    return asyncio.get_running_loop().time()
