"""Fetching a stage's state from replicas: several at once, chunk by chunk, checked, whoever dies or lies meanwhile.

Knows: what to ask which peer, and what an answer must be. Must not know: how calls travel, who the replicas are, what
becomes of the state.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import Chunk, GetChunk, GetState, StateIndex

from agora.calls import Caller, Reply
from agora.clock import loop_time
from agora.state.board import Board
from agora.state.layout import (
    CHUNK_ELEMENTS,
    ELEMENT_BYTES,
    Flat,
    StageState,
    chunk_bytes,
    chunk_count,
    chunk_range,
    unpack_chunk,
)

TICK_S: Final = 0.05  # how often a slow source is looked at when nothing arrives
HASH_BYTES: Final = 32
MAX_PAUSE_S: Final = 10.0


Lied = Callable[[PeerId, ProtocolError], None]
"""Hears of a source that sent what cannot be true; must not block or raise."""


@dataclass(frozen=True, slots=True)
class TransferTerms:
    """How much at once, and how patiently. The defaults fill 200 Mbit/s at 50 ms from one source, and hold 48 MiB."""

    sources: int = 4  # asked for chunks at once; the others wait to replace them
    window: int = 3  # chunks asked of one source at once, if it gives one in less than `quick_s`; else one at a time
    quick_s: float = 4.0
    max_lag: int = 100  # steps behind the newest offer at which a source is not used
    offer_s: float = 30.0  # for a source to make its snapshot
    gather_s: float = 1.0  # after the first offer, before chunks are asked for: time for a newer one to come
    chunk_s: float = 120.0  # for one chunk; a source that needs more counts as failed
    failures: int = 4  # of one source in a row, before it is given up
    pause_s: float = 0.5  # after its first failure; doubles with each
    slow_s: float = 5.0  # and four usual times without an answer: a waiting source joins in


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is: bytes, sources in use, chunks that had to be asked for again."""

    bytes_here: int
    bytes_all: int
    sources: int
    fetched_again: int


class Untrue(ProtocolError):
    """What a source sent cannot be what was asked for: a lie, or a fault that no network makes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a source can give, and the SHA-256 of each of its chunks."""

    index: StateIndex
    hashes: bytes

    def hash_of(self, chunk: int) -> bytes:
        """SHA-256 of a chunk."""
        return self.hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]


Arrays = tuple[Flat, Flat, Flat]


@dataclass(frozen=True, slots=True)
class _Call:
    """One open call: for a chunk of an offer, or for the offer itself."""

    began: float
    offer: Offer | None = None
    chunk: int = -1


@dataclass(slots=True)
class _Source:
    peer: PeerId
    offer: Offer | None = None
    calls: dict[asyncio.Task[Offer | Arrays], _Call] = field(default_factory=dict)
    failures: int = 0
    not_before: float = 0.0
    took_s: float = math.inf  # its last chunk
    trouble: str = ""
    over: bool = False

    @property
    def asking(self) -> bool:
        """Whether it is being asked for its offer."""
        return any(call.offer is None for call in self.calls.values())


class StateFetch:
    """One state on its way here. What has arrived stays when a run ends early; the next run asks for the rest only.

    Chunks may come from snapshots of different replicas: these are near one another, and a chunk carries an element's
    weight together with its moments. `most` says which step a source can be at most; one that offers a later one is not
    used. `lied` hears of each source whose bytes were not what it had announced, or cannot be a state: the network
    should strike it. `progress` is told after every chunk. None of them may block or raise.
    """

    def __init__(
        self,
        caller: Caller,
        stage: int,
        numel: int,
        *,
        terms: TransferTerms | None = None,
        most: Callable[[], float] = lambda: math.inf,
        progress: Callable[[TransferProgress], None] = lambda _: None,
        lied: Lied = lambda _peer, _error: None,
    ) -> None:
        self.board = Board(chunk_count(numel))
        self._caller = caller
        self._stage = stage
        self._numel = numel
        self._terms = terms or TransferTerms()
        self._most = most
        self._progress = progress
        self._lied = lied
        self._arrays: Arrays = (_empty(numel), _empty(numel), _empty(numel))
        self._origin: dict[int, tuple[int, int]] = {}  # steps and updates behind each chunk that is here
        self._sources: list[_Source] = []
        self._deadline = 0.0
        self._floor = 0  # the least step that is used; known better once the first offers are in
        self._first_offer: float | None = None
        self._open = False  # the first offers are in: chunks may be asked for

    @property
    def newest(self) -> int:
        """The latest step of which a chunk has come."""
        return max((step for step, _ in self._origin.values()), default=0)

    async def run(self, sources: Sequence[PeerId], *, deadline: float, at_least: int = 0) -> StageState:
        """Fetches what is still missing from `sources`, best first, none of them below step `at_least`.

        The state's step and updates are the least of those behind its chunks; its tokens are unknown (0). Raises
        Unavailable, with a reason for each source, when none of them can go on or `deadline` (loop time) has come.
        """
        self._sources = [_Source(peer) for peer in dict.fromkeys(sources)]
        self._deadline, self._floor, self._first_offer, self._open = deadline, at_least, None, False
        self._forget_below(at_least)
        try:
            while not self.board.complete:
                await self._one_round()
        finally:
            await self._stop()
        step, updates = (min(values) for values in zip(*self._origin.values(), strict=True))
        return StageState(self._stage, step, updates, 0, *self._arrays)

    def _forget_below(self, step: int) -> None:
        for chunk in [chunk for chunk, (of_step, _) in self._origin.items() if of_step < step]:
            self.board.forget(chunk)
            del self._origin[chunk]

    # --- one round: hand out what can be handed out, wait until something happens

    async def _one_round(self) -> None:
        now = loop_time()
        here = f"{len(self.board.here)} of {self.board.count} chunks"
        if now >= self._deadline:
            raise self._unavailable(f"{here} came before the deadline")
        self._ask_for_offers(now)
        self._ask_for_chunks(now)
        calls = [call for source in self._sources for call in source.calls]
        wait = min(TICK_S, self._deadline - now)
        if calls:
            await asyncio.wait(calls, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        elif all(source.over for source in self._sources):
            raise self._unavailable(f"{here} came, and no source is left")
        else:
            await asyncio.sleep(wait)
        for source in self._sources:
            for call in [call for call in source.calls if call.done()]:
                self._ended(source, call, source.calls.pop(call))

    def _ask_for_offers(self, now: float) -> None:
        usable = [source for source in self._sources if not source.over]
        at_work = sum(1 for s in usable if (s.offer or s.asking) and not self._is_slow(s, now))
        waiting = [s for s in usable if not (s.offer or s.asking) and now >= s.not_before]
        for source in waiting[: max(self._terms.sources - at_work, 0)]:
            self._start(source, self._fetch_offer(source.peer), _Call(now))

    def _ask_for_chunks(self, now: float) -> None:
        if not self._open:
            self._open = self._offers_are_in(now)
            self._floor = max(self._floor, self._newest() - self._terms.max_lag)
        if not self._open:
            return
        for source in self._sources:
            if source.offer and source.offer.index.step < self._floor:
                self._give_up(source, f"is at step {source.offer.index.step}, and {self._floor} is the least of use")
        free = [s for s in self._sources if s.offer and not s.over and now >= s.not_before]
        while free:  # one chunk each in turn, so that all of them have work
            free = [s for s in free if len(s.calls) < self._window(s) and self._start_chunk(s, now)]

    def _window(self, source: _Source) -> int:
        return self._terms.window if source.took_s < self._terms.quick_s else 1

    def _offers_are_in(self, now: float) -> bool:
        """Whether nobody is being asked for an offer any more, or the first one has waited long enough for others."""
        if self._first_offer is None:
            return False
        return now >= self._first_offer + self._terms.gather_s or not any(s.asking for s in self._sources)

    def _newest(self) -> int:
        return max((source.offer.index.step for source in self._sources if source.offer), default=0)

    def _start_chunk(self, source: _Source, now: float) -> bool:
        if source.offer is None or (chunk := self.board.take(source.peer, now)) is None:
            return False
        self._start(source, self._fetch_chunk(source.peer, source.offer, chunk), _Call(now, source.offer, chunk))
        return True

    def _start(self, source: _Source, work: Coroutine[Any, Any, Offer | Arrays], call: _Call) -> None:
        source.calls[asyncio.create_task(work, name=f"state from {source.peer}")] = call

    def _is_slow(self, source: _Source, now: float) -> bool:
        patience = self._terms.slow_s if source.offer is None else max(self._terms.slow_s, 4 * self.board.usual_s())
        return now - min((call.began for call in source.calls.values()), default=now) > patience

    # --- what came of a call

    def _ended(self, source: _Source, task: asyncio.Task[Offer | Arrays], call: _Call) -> None:
        try:
            result = task.result()
        except asyncio.CancelledError:  # by us: another source was faster, or this one is given up
            self.board.failed(call.chunk, source.peer)
        except AgoraError as error:
            self.board.failed(call.chunk, source.peer)
            self._failed(source, error, call)
        else:
            if isinstance(result, Offer) and result.index.step > self._most():
                self._give_up(source, f"offers step {result.index.step}, where no other replica can be")
            elif isinstance(result, Offer):
                source.offer = result
                self._first_offer = self._first_offer or loop_time()
            else:
                source.failures = 0
                self._arrived(source, call, result)

    def _arrived(self, source: _Source, call: _Call, arrays: Arrays) -> None:
        now = loop_time()
        source.took_s = now - call.began
        needless = self.board.arrived(call.chunk, source.peer, now)
        for other in self._sources:
            for task, theirs in other.calls.items():
                if other.peer in needless and theirs.chunk == call.chunk:
                    task.cancel()
        elements = chunk_range(call.chunk, self._numel)
        for mine, fetched in zip(self._arrays, arrays, strict=True):
            mine[elements] = fetched
        if call.offer:
            self._origin[call.chunk] = (call.offer.index.step, call.offer.index.updates)
        self._progress(self._how_far())

    def _failed(self, source: _Source, error: AgoraError, call: _Call) -> None:
        if source.over:
            return
        source.trouble = str(error)
        if isinstance(error, Untrue):
            self._lied(source.peer, error)
            self._give_up(source, str(error))
        elif isinstance(error, Busy):
            source.not_before = loop_time() + min(max(error.retry_after_ms / 1000, self._terms.pause_s), MAX_PAUSE_S)
        elif isinstance(error, ProtocolError) or (isinstance(error, Refused) and call.offer is None):
            self._give_up(source, str(error))
        else:
            self._pause(source)
            if call.offer is source.offer:
                source.offer = None  # before it is given chunks again, it says whether its snapshot is still there

    def _pause(self, source: _Source) -> None:
        now = loop_time()
        if now < source.not_before:  # its other calls broke with the same stream: one failure, not several
            return
        source.failures += 1
        source.not_before = now + self._terms.pause_s * 2 ** (source.failures - 1)
        if source.failures >= self._terms.failures:
            self._give_up(source, source.trouble)

    def _give_up(self, source: _Source, why: str) -> None:
        source.over, source.trouble, source.offer = True, why, None
        for task in source.calls:
            task.cancel()

    async def _stop(self) -> None:
        """Ends every call; what they were for is missing again."""
        tasks = [task for source in self._sources for task in source.calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in self._sources:
            for call in source.calls.values():
                self.board.failed(call.chunk, source.peer)
            source.calls.clear()

    # --- calls

    async def _fetch_offer(self, peer: PeerId) -> Offer:
        ends = min(self._deadline, loop_time() + self._terms.offer_s)
        reply = await self._caller.call(
            peer, GetState(self._stage, self._floor, milliseconds_to(ends)), (), deadline=ends
        )
        return check_offer(reply, self._numel)

    async def _fetch_chunk(self, peer: PeerId, offer: Offer, chunk: int) -> Arrays:
        ends = min(self._deadline, loop_time() + self._terms.chunk_s)
        request = GetChunk(offer.index.snapshot, chunk, milliseconds_to(ends))
        reply = await self._caller.call(peer, request, (), deadline=ends)
        return await asyncio.to_thread(check_chunk, reply, offer.hash_of(chunk), chunk_bytes(chunk, self._numel))

    # --- words

    def _how_far(self) -> TransferProgress:
        return TransferProgress(
            ELEMENT_BYTES * min(len(self.board.here) * CHUNK_ELEMENTS, self._numel),
            ELEMENT_BYTES * self._numel,
            sum(1 for source in self._sources if source.offer and not source.over),
            self.board.fetched_again,
        )

    def _unavailable(self, what: str) -> Unavailable:
        return Unavailable(self._stage, [what, *(f"{s.peer}: {s.trouble}" for s in self._sources if s.trouble)])


def check_offer(reply: Reply, numel: int) -> Offer:
    """What a source offers for a stage of `numel` elements. Raises Refused when it has nothing, Untrue when it lies."""
    index = reply.message
    if not isinstance(index, StateIndex):
        raise Untrue("bad-message", f"GetState was answered by {type(index).__name__}.")
    if index.size == 0:
        raise Refused("has no snapshot of this stage to give")
    if index.size != ELEMENT_BYTES * numel:
        raise Untrue("bad-tensor", f"The snapshot has {index.size} bytes; the stage has {ELEMENT_BYTES * numel}.")
    tensor = reply.tensors[0] if reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("uint8", (chunk_count(numel), HASH_BYTES)):
        raise Untrue("bad-tensor", f"The snapshot's index is not {chunk_count(numel)} hashes.")
    hashes = bytes(tensor.data)
    if hashlib.sha256(hashes).digest() != index.snapshot:
        raise Untrue("bad-tensor", "The snapshot is not named by its chunks' hashes.")
    return Offer(index, hashes)


def check_chunk(reply: Reply, expected: bytes, nbytes: int) -> Arrays:
    """The weights, means and squares in a chunk of `nbytes`. Raises Untrue when it is not the one that hashes so."""
    tensor = reply.tensors[0] if isinstance(reply.message, Chunk) and reply.tensors else None
    if tensor is None or tensor.dtype != "uint8" or tensor.nbytes != nbytes:
        raise Untrue("bad-tensor", f"A chunk is not uint8 [{nbytes}].")
    if (found := hashlib.sha256(tensor.data).digest()) != expected:
        raise Untrue("bad-tensor", f"A chunk's SHA-256 should be {expected.hex()}, and is {found.hex()}.")
    arrays = unpack_chunk(tensor.data)
    if not all(np.isfinite(array).all() for array in arrays) or arrays[2].min() < 0:
        raise Untrue("bad-tensor", "A chunk holds values that no optimizer leaves: not finite, or a negative square.")
    return arrays


def _empty(numel: int) -> Flat:
    return np.empty(numel, np.float32)


def milliseconds_to(moment: float) -> int:
    """What to say as a request's deadline."""
    return min(max(int((moment - loop_time()) * 1000), 1), MAX_DEADLINE_MS)
