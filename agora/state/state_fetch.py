"""Fetches a stage's state from several replicas at the same time, and checks what they send before anything is used.

An offer is a snapshot that a source can give. Chunks of snapshots with one mixing key form one state. One key is
chosen: that of the arrived chunks if an offer has it, otherwise the newest offer's.

| a source's offer                  | what follows                                                              |
|-----------------------------------|---------------------------------------------------------------------------|
| has the chosen key                | its chunks are fetched; arrived chunks with another key are dropped       |
| has another key and is older      | the source is asked for a new offer: it may have caught up by then        |
| has another key and is not older  | the source waits; it is asked again when no chosen source is left         |

Bytes on which most sources with the chosen key agree come first. When all chunks have arrived, those on which no two
sources agree are compared by sketches (comparison.py), and the chunks of sources that do not pass are fetched from
others.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_SKETCHED_CHUNKS, SALT_BYTES, SKETCH_SUMS
from agora_protocol.messages import Chunk, GetChunk, GetSketches, GetState, Sketches, StateIndex
from numpy.typing import NDArray

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.core.step_schedule import ALL_REDUCE, SyncChangeRule, SyncSchedule
from agora.state.chunk_fetch import (
    CHUNK_TIMEOUT_S,
    FIRST_PAUSE_S,
    INDEX_TIMEOUT_S,
    MAX_SOURCE_FAILURES,
    TICK_INTERVAL_S,
    ChunkFetch,
    Source,
    call_until,
)
from agora.state.chunk_schedule import ChunkSchedule
from agora.state.comparison import (
    LEAST_SQUARE,
    MAX_WITNESSES,
    MIN_VOTES,
    SketchedState,
    Verdict,
    believed_hashes,
    judge_source,
    sketch_chunk,
)
from agora.state.layout import HASH_BYTES, VALUE_BYTES, Flat, Layout, MomentSpec, StageState, unpack_chunk
from agora.state.rules import CLAIM_LAG
from agora.swarm.peer_score import ReportViolation, Violation

OFFERS_WINDOW_S: Final = 1.0  # seconds to wait after the first offer for a newer one, before chunks are asked for
ROOT_SLACK: Final = 1.01  # for what float32 rounds away, see MomentSpec
STALL_TIMEOUT_S: Final = 60.0  # seconds without a chunk from any chosen source, before other snapshots are chosen


class MixingKey(NamedTuple):
    """Chunks of snapshots with equal keys may be mixed in one state. step: 0 if the history hash is known."""

    agreed_step: int
    history_hash: int
    step: int
    sync_schedule: SyncSchedule


class CorruptStateError(ProtocolError):
    """Raised when a source's answer to GetState or GetChunk cannot be true: malformed, wrong hash, impossible values.

    No network fault causes such an answer: it is a violation.
    """


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a source can give: its name and steps, the SHA-256 of its chunks in order, and its layout."""

    index: StateIndex
    hashes: bytes
    layout: Layout

    def hash_of(self, chunk: int) -> bytes:
        return self.hashes[HASH_BYTES * chunk :][:HASH_BYTES]

    @property
    def mixing_key(self) -> MixingKey:
        return mixing_key(self.index)

    @property
    def is_inner_step(self) -> bool:
        return sync_schedule_of(self.index).is_inner(self.index.step)


def mixing_key(index: StateIndex) -> MixingKey:
    # Replicas of one history have applied the same means up to `agreed_step`; each may have taken inner steps since.
    step = 0 if index.lineage else index.step
    return MixingKey(index.agreed, index.lineage, step, sync_schedule_of(index))


def sketched(index: StateIndex, sums: NDArray[np.float64]) -> SketchedState:
    return SketchedState(sums, index.step, index.agreed, sync_schedule_of(index).is_inner(index.step))


def sync_schedule_of(index: StateIndex) -> SyncSchedule:
    return SyncSchedule(index.slices, index.change_at, index.later_slices)


class StateFetch:
    """Fetches one stage's state; see the module's text. When `run` fails, arrived chunks stay for the next `run`.

    is_compared: whether each chunk of the state that `run` returned was compared with another source's.
    """

    def __init__(
        self,
        peer_caller: PeerCaller,
        stage: int,
        layout: Layout,
        report_violation: ReportViolation,
        change_rule: SyncChangeRule,
        *,
        highest_plausible_step: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """layout: of the stage during all-reduce steps. report_violation: called for sources that send corrupt data.

        change_rule: of the run; offers whose sync schedule it does not allow are corrupt.
        highest_plausible_step: offers above the step that it returns are not used.
        """
        self._peer_caller = peer_caller
        self._stage = stage
        self._all_reduce_layout = layout
        self._report_violation = report_violation
        self._change_rule = change_rule
        self._highest_plausible_step = highest_plausible_step
        self._chunks = ChunkFetch[Offer](
            self._ask_for_offer, self._fetch_chunk, can_give=self._is_believed, is_usable=self._has_chosen_key
        )
        self._partial = PartialState(layout, self._chunks.schedule)
        self._deadline = 0.0
        self._lowest_step = 0  # the lowest step to accept
        self._first_offer_at: float | None = None
        self._chosen: StateIndex | None = None  # only chunks of snapshots with its mixing key are asked for
        self._last_arrival = 0.0
        self._believed: list[bytes | None] = []  # the hash of each chunk that most sources with the chosen key offer
        self.is_compared = False

    @property
    def schedule(self) -> ChunkSchedule:
        return self._chunks.schedule

    async def run(self, sources: Sequence[PeerId], *, deadline: float, at_least: int = 0) -> StageState:
        """Fetches the missing chunks from several of `sources` concurrently, earlier ones first; returns the state.

        No chunk is of a step below `at_least`; see PartialState.whole_state. Raises Unavailable, with each source's
        last error, when no source is left or `deadline` (loop time) has passed.
        """
        self._chunks.begin(sources)
        self._deadline = deadline
        self._lowest_step = at_least
        self._first_offer_at = self._chosen = None
        self._partial.drop_unless(lambda index: index.step >= at_least)
        try:
            while not self.schedule.is_complete:
                while not self.schedule.is_complete:
                    await self._advance()
                await self._compare_sources()
        finally:
            await self._chunks.close()
        return self._partial.whole_state(self._stage)

    async def _advance(self) -> None:
        now = loop_time()
        is_late = now >= self._deadline
        if not is_late:
            self._reconsider_mixing_key(now)
            self._chunks.ask_for_indexes(now)
            if self._chosen is None:
                self._choose_mixing_key(now)
            self._believe_hashes()
            self._chunks.ask_for_chunks(now)
        if is_late or not (self._chunks.calls or self._chunks.usable_sources):
            arrived = f"{len(self.schedule.arrived_chunks)} of {self.schedule.count} chunks came"
            ending = " before the deadline" if is_late else ", and no source is left"
            sources = self._chunks.sources.values()
            errors = [f"{source.peer}: {source.last_error}" for source in sources if source.last_error]
            raise Unavailable(self._stage, [arrived + ending, *errors])
        await self._chunks.wait(min(TICK_INTERVAL_S, self._deadline - now))

    # --- choosing a mixing key

    def _choose_mixing_key(self, now: float) -> None:
        sources = self._chunks.sources.values()
        offers = [source.offer for source in sources if source.offer]
        others_pending = any(None in source.calls for source in sources)
        if not offers or (others_pending and now < (self._first_offer_at or now) + OFFERS_WINDOW_S):
            return
        arrived = {mixing_key(chunk.index) for chunk in self._partial.arrived.values()}
        offered = Counter(offer.mixing_key for offer in offers)
        newest = max(offer.index.step for offer in offers)

        def rank(offer: Offer) -> tuple[bool, bool, int, int]:
            # A key of which chunks are here goes before a newer one, since those need not be sent again. A key that
            # several sources have goes before that of a single one, which may have lied about its step.
            is_backed = offered[offer.mixing_key] >= MIN_VOTES and offer.index.step >= newest - CLAIM_LAG
            return offer.mixing_key in arrived, is_backed, offer.index.agreed, offer.index.step

        chosen = max(offers, key=rank)
        self._chosen = chosen.index
        self._last_arrival = now
        if chosen.layout.nbytes != self._partial.layout.nbytes:
            self._partial = PartialState(chosen.layout, self.schedule)
        self._partial.drop_unless(lambda index: mixing_key(index) == chosen.mixing_key)
        chosen_steps = chosen.index.agreed, chosen.index.step
        for source in sources:
            if source.offer and not self._has_chosen_key(source.offer):
                index = source.offer.index
                if (index.agreed, index.step) < chosen_steps:
                    source.offer = None
                    source.not_before = now + FIRST_PAUSE_S

    def _reconsider_mixing_key(self, now: float) -> None:
        if self._chosen is None:
            return
        sources = self._chunks.sources.values()
        fetched_from = [source for source in sources if source.offer and self._has_chosen_key(source.offer)]
        others = [source for source in sources if source not in fetched_from and not source.given_up]
        if others and now > self._last_arrival + STALL_TIMEOUT_S:
            for source in fetched_from:
                source.give_up(f"no chunk came within {STALL_TIMEOUT_S:.0f} s")
            fetched_from = []
        if others and not fetched_from:
            self._chosen = self._first_offer_at = None
            for source in others:
                source.offer = None  # so that it is asked for another: this one may be minutes old

    def _has_chosen_key(self, offer: Offer) -> bool:
        if self._chosen is None or offer.layout.nbytes != self._partial.layout.nbytes:
            return False
        return offer.mixing_key == mixing_key(self._chosen)

    # --- calls

    async def _ask_for_offer(self, source: Source[Offer]) -> None:
        at_least = self._chosen.step if self._chosen else self._lowest_step
        deadline = min(self._deadline, loop_time() + INDEX_TIMEOUT_S)
        try:
            reply = await call_until(self._peer_caller, source.peer, partial(GetState, self._stage, at_least), deadline)
            offer = check_offer(reply, self._all_reduce_layout, self._change_rule)
        except AgoraError as error:
            self._handle_failure(source, error, None)
            return
        step = offer.index.step
        if (claimed := max(step, offer.index.agreed)) > self._highest_plausible_step():
            source.give_up(f"offers step {claimed}, which is implausible beside the other replicas")
        elif step < self._lowest_step:
            source.give_up(f"is at step {step}; the lowest step that is used is {self._lowest_step}")
        else:
            source.offer = offer
            self._first_offer_at = self._first_offer_at or loop_time()

    async def _fetch_chunk(self, source: Source[Offer], offer: Offer, chunk: int) -> None:
        started_at = loop_time()
        try:
            values = await self._get_chunk(source.peer, offer, chunk)
        except AgoraError as error:
            self._handle_failure(source, error, offer)
            return
        source.record_chunk(loop_time() - started_at)
        if not self._has_chosen_key(offer):
            return  # another mixing key has been chosen meanwhile
        self._last_arrival = loop_time()
        self._partial.store(chunk, ArrivedChunk(offer.index, source.peer, offer.hash_of(chunk)), values)
        self._chunks.record_arrival(source, chunk)

    async def _get_chunk(self, peer: PeerId, offer: Offer, chunk: int) -> list[Flat]:
        deadline = min(self._deadline, loop_time() + CHUNK_TIMEOUT_S)
        reply = await call_until(self._peer_caller, peer, partial(GetChunk, offer.index.snapshot, chunk), deadline)
        # This runs in a thread: hashing a chunk would hold up the event loop.
        return await asyncio.to_thread(check_chunk, reply, offer.hash_of(chunk), offer.layout, chunk)

    # --- comparing

    def _believe_hashes(self) -> None:
        offers = [source.offer for source in self._chunks.sources.values() if source.offer]
        offers = [offer for offer in offers if self._has_chosen_key(offer)]
        self._believed = believed_hashes([offer.hashes for offer in offers], self._partial.layout.chunk_count)

    def _is_believed(self, offer: Offer, chunk: int) -> bool:
        return self._believed[chunk] in (None, offer.hash_of(chunk))

    def _unsure_chunks(self) -> list[int]:
        self._believe_hashes()
        return [chunk for chunk, arrived in self._partial.arrived.items() if arrived.digest != self._believed[chunk]]

    async def _compare_sources(self) -> None:
        self.is_compared = True
        if self._unsure_chunks():
            await self._ask_for_more_offers()
        if unsure := self._unsure_chunks():
            for peer, (verdict, chunks) in (await self._compare_by_sketch(unsure)).items():
                reason = "its chunks are not near those of other sources, as replicas' are"
                if verdict == "corrupt":
                    self._report_violation(peer, Violation.FALSE_STATE, reason)
                if source := self._chunks.sources.get(peer):  # chunks may be of an earlier run's source
                    source.give_up(reason)
                self._partial.drop(chunks)
        if self.schedule.is_complete:
            await self._judge_outvoted_sources()

    async def _ask_for_more_offers(self) -> None:
        until = min(self._deadline, loop_time() + INDEX_TIMEOUT_S)
        while (now := loop_time()) < until:
            usable = self._chunks.usable_sources
            if sum(1 for source in usable if source.offer) > MIN_VOTES or all(source.offer for source in usable):
                return
            self._chunks.ask_for_indexes(now)
            await self._chunks.wait(TICK_INTERVAL_S)

    async def _compare_by_sketch(self, chunks: Sequence[int]) -> dict[PeerId, tuple[Verdict, list[int]]]:
        layout, arrived = self._partial.layout, self._partial.arrived
        seed, witnesses = await self._ask_for_sketches(chunks)
        own = await asyncio.to_thread(
            lambda: np.stack([sketch_chunk(self._partial.values_of(chunk), layout, chunk, seed) for chunk in chunks])
        )
        rows_of: dict[tuple[PeerId, bytes], list[int]] = {}
        for row, chunk in enumerate(chunks):
            rows_of.setdefault((arrived[chunk].peer, arrived[chunk].index.snapshot), []).append(row)
        found: dict[PeerId, tuple[Verdict, list[int]]] = {}
        for (peer, _), rows in rows_of.items():
            index, their_chunks = arrived[chunks[rows[0]]].index, [chunks[row] for row in rows]
            others = [replace(state, sums=state.sums[rows]) for other, state in witnesses.items() if other != peer]
            self.is_compared = self.is_compared and bool(others)
            verdict = judge_source(sketched(index, own[rows]), others, layout, their_chunks)
            if verdict == "corrupt" or (verdict == "undecided" and index.step >= others[0].step):
                found[peer] = verdict, [chunk for chunk, each in arrived.items() if each.peer == peer]
        return found

    async def _ask_for_sketches(self, chunks: Sequence[int]) -> tuple[bytes, dict[PeerId, SketchedState]]:
        givers = {self._partial.arrived[chunk].peer for chunk in chunks}
        for _ in range(2):  # the second time because a snapshot that nobody fetched from is not kept for long
            sources = [source for source in self._chunks.usable_sources if givers != {source.peer}]
            offers = [(source, source.offer) for source in sources if source.offer]
            offers = [(source, offer) for source, offer in offers if offer.layout.nbytes == self._partial.layout.nbytes]
            offers = sorted(offers, key=lambda pair: not self._has_chosen_key(pair[1]))[:MAX_WITNESSES]
            seed = secrets.token_bytes(SALT_BYTES)  # only now: offers that were made with it in mind could not be told
            answers = await asyncio.gather(*(self._get_sketches(*pair, chunks, seed) for pair in offers))
            witnesses = {source.peer: state for (source, _), state in zip(offers, answers, strict=True) if state}
            if len(witnesses) == len(offers):
                break
            await self._ask_for_more_offers()
        return seed, witnesses

    async def _get_sketches(
        self, source: Source[Offer], offer: Offer, chunks: Sequence[int], seed: bytes
    ) -> SketchedState | None:
        arrays = 1 + len(offer.layout.moments)
        sums = np.empty((len(chunks), arrays, SKETCH_SUMS))
        blocks: dict[int, list[int]] = {}
        for row, chunk in enumerate(chunks):
            blocks.setdefault(chunk // MAX_SKETCHED_CHUNKS, []).append(row)
        try:
            for rows in blocks.values():
                wanted = [chunks[row] for row in rows]
                first, count = min(wanted), max(wanted) - min(wanted) + 1
                make = partial(GetSketches, offer.index.snapshot, seed, first, count)
                reply = await call_until(
                    self._peer_caller, source.peer, make, min(self._deadline, loop_time() + CHUNK_TIMEOUT_S)
                )
                sums[rows] = check_sketches(reply, (count, arrays, SKETCH_SUMS))[[chunk - first for chunk in wanted]]
        except AgoraError as error:
            self._handle_failure(source, error, offer)
            return None
        return sketched(offer.index, sums)

    async def _judge_outvoted_sources(self) -> None:
        # Nothing of theirs was taken. But whoever offers other bytes than most has to show that it only rounds
        # differently, and whoever alone offers a later step, that it is of this run.
        arrived = self._partial.arrived
        believed = [chunk for chunk in arrived if arrived[chunk].digest == self._believed[chunk]]
        for source in list(self._chunks.usable_sources):
            offer = source.offer
            if offer is None or offer.layout.nbytes != self._partial.layout.nbytes or offer.is_inner_step:
                continue
            is_chosen = self._has_chosen_key(offer)
            doubted = [chunk for chunk in believed if not (is_chosen and self._is_believed(offer, chunk))]
            if not doubted or (not is_chosen and offer.index.step <= arrived[doubted[0]].index.step):
                continue
            chunk, seed = random.choice(doubted), secrets.token_bytes(SALT_BYTES)
            if is_chosen:
                theirs = await self._sketch_chunk_of(source, offer, chunk, seed)
            else:
                theirs = await self._get_sketches(source, offer, [chunk], seed)
            right = sketch_chunk(self._partial.values_of(chunk), offer.layout, chunk, seed)[np.newaxis]
            others = [sketched(arrived[chunk].index, right)] * MIN_VOTES
            if theirs is not None and judge_source(theirs, others, offer.layout, [chunk]) == "corrupt":
                reason = "it offers a chunk that is not near what most sources have"
                self._report_violation(source.peer, Violation.FALSE_STATE, reason)
                source.give_up(reason)

    async def _sketch_chunk_of(
        self, source: Source[Offer], offer: Offer, chunk: int, seed: bytes
    ) -> SketchedState | None:
        try:
            values = await self._get_chunk(source.peer, offer, chunk)
        except AgoraError as error:
            self._handle_failure(source, error, offer)
            return None
        return sketched(offer.index, sketch_chunk(values, offer.layout, chunk, seed)[np.newaxis])

    # --- failures

    # | error | what follows |
    # |---|---|
    # | CorruptStateError | a violation is reported, and the source given up |
    # | another ProtocolError; Refused when asked for an offer | the source is given up |
    # | Refused a chunk of its present offer | as any other; the offer is dropped, and a new one asked for |
    # | Busy | a pause as long as the source asks for, within bounds |
    # | any other | a pause, longer each time; given up after MAX_SOURCE_FAILURES in a row |
    def _handle_failure(self, source: Source[Offer], error: AgoraError, offer: Offer | None) -> None:
        if source.given_up:
            return
        if isinstance(error, CorruptStateError):
            self._report_violation(source.peer, Violation.FALSE_STATE, f"{error.code}: {error}")
        is_refusal = isinstance(error, Refused) and not isinstance(error, Busy)
        if isinstance(error, ProtocolError) or (is_refusal and offer is None):
            source.give_up(str(error))
            return
        source.record_failure(error, loop_time())
        if is_refusal and offer is source.offer:
            source.offer = None  # after any other failure the source may still keep the snapshot
        if source.failures >= MAX_SOURCE_FAILURES:
            source.give_up(source.last_error)


# --- the state as it arrives


@dataclass(frozen=True, slots=True)
class ArrivedChunk:
    """Where a chunk came from: the snapshot, the source, and the chunk's SHA-256."""

    index: StateIndex
    peer: PeerId
    digest: bytes


class PartialState:
    """The arrays of a state of one layout, filled by chunks in any order. arrived: the chunks that are filled."""

    def __init__(self, layout: Layout, schedule: ChunkSchedule) -> None:
        """schedule: is restarted for this layout; learns which chunks are dropped."""
        self.layout = layout
        self.arrived: dict[int, ArrivedChunk] = {}
        self._schedule = schedule
        self._schedule.restart(layout.chunk_count)
        self._weights = np.empty(layout.numel, np.float32)
        self._moments = {moment.name: np.empty(moment.numel, np.float32) for moment in layout.moments}

    def store(self, chunk: int, arrived: ArrivedChunk, values: Sequence[Flat]) -> None:
        self.arrived[chunk] = arrived
        for array, part in zip(self.values_of(chunk), values, strict=True):
            array[:] = part

    def values_of(self, chunk: int) -> list[Flat]:
        """Returns what has arrived of a chunk's weights and moments: views."""
        arrays = [self._weights, *self._moments.values()]
        return [array[place] for array, place in zip(arrays, self.layout.chunk_places(chunk), strict=True)]

    def drop_unless(self, fits: Callable[[StateIndex], bool]) -> None:
        """Drops the arrived chunks whose snapshot does not satisfy `fits`; they are missing again."""
        self.drop([chunk for chunk, arrived in self.arrived.items() if not fits(arrived.index)])

    def drop(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._schedule.discard(chunk)
            del self.arrived[chunk]

    def whole_state(self, stage: int) -> StageState:
        """Returns the state; its arrays are not copied. All chunks must have arrived, with one mixing key.

        It has the lowest step and updates of the chunks' snapshots, and tokens_total 0, which means unknown.
        """
        indexes = [arrived.index for arrived in self.arrived.values()]
        (key,) = {mixing_key(index) for index in indexes}
        return StageState(
            stage=stage,
            step=min(index.step for index in indexes),
            updates=min(index.updates for index in indexes),
            tokens_total=0,
            layout=self.layout,
            weights=self._weights,
            moments=self._moments,
            agreed_step=key.agreed_step,
            history_hash=key.history_hash,
            sync_schedule=key.sync_schedule,
        )


# --- checks of answers


def check_offer(reply: Reply, all_reduce_layout: Layout, change_rule: SyncChangeRule) -> Offer:
    """Returns the offer in an answer to GetState. all_reduce_layout: that of the stage during all-reduce steps.

    Raises Refused if the source has no snapshot, or none that takes part in inner steps since they began.
    Raises CorruptStateError for another message and for an offer whose size or number of hashes does not fit the stage,
    whose name is not the hash of the hashes, whose moments have more updates than steps were taken, or whose sync
    schedule no stage of the run can have. It does not check whether the steps themselves are plausible.
    """
    index = reply.message
    if not isinstance(index, StateIndex):
        raise CorruptStateError("bad-message", f"GetState was answered by {type(index).__name__}.")
    if index.size == 0:
        raise Refused("has no snapshot of this stage to give")
    sync_schedule = sync_schedule_of(index)
    if not change_rule.is_possible(sync_schedule, index.step):
        raise CorruptStateError(
            "bad-message", f"No stage of this run has the sync schedule {tuple(sync_schedule)} at step {index.step}."
        )
    if (
        sync_schedule.fragments == ALL_REDUCE
        and sync_schedule.is_inner(index.step)
        and index.agreed < sync_schedule.change_at
    ):
        raise Refused("has a snapshot without the weights at which its inner steps began")
    layout = all_reduce_layout.at_step(index.step, sync_schedule)
    if index.size != layout.nbytes:
        raise CorruptStateError("bad-tensor", f"The snapshot has {index.size} bytes, not {layout.nbytes}.")
    if index.updates > index.step:
        raise CorruptStateError("bad-message", f"The snapshot has {index.updates} updates in {index.step} steps.")
    tensor = reply.tensors[0] if reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("uint8", (layout.chunk_count, HASH_BYTES)):
        raise CorruptStateError("bad-tensor", f"The snapshot's index is not {layout.chunk_count} hashes.")
    hashes = bytes(tensor.data)
    if hashlib.sha256(hashes).digest() != index.snapshot:
        raise CorruptStateError("bad-tensor", "The snapshot's name is not the hash of its chunks' hashes.")
    return Offer(index, hashes, layout)


def check_sketches(reply: Reply, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """Returns the sketches in an answer to GetSketches. Raises CorruptStateError unless they have this shape."""
    tensor = reply.tensors[0] if isinstance(reply.message, Sketches) and reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("float32", shape):
        raise CorruptStateError("bad-tensor", f"Sketches are not float32 {list(shape)}.")
    with np.errstate(invalid="ignore"):  # a signalling NaN: no reason for a warning of numpy's
        sums = np.frombuffer(tensor.data, "<f4").reshape(shape).astype(np.float64)
    if np.isnan(sums).any():
        raise CorruptStateError("bad-tensor", "A sketch has a sum that is no number.")
    return sums


def check_chunk(reply: Reply, expected: bytes, layout: Layout, chunk: int) -> list[Flat]:
    """Returns the weights and each moment's values in an answer to GetChunk: views of its bytes, see `unpack_chunk`.

    expected: the chunk's SHA-256. Raises CorruptStateError for another message, another size or hash, NaN, infinity,
    a negative value in a moment that is_square, and a mean beyond its root_bound.
    """
    nbytes = VALUE_BYTES * sum(place.stop - place.start for place in layout.chunk_places(chunk))
    tensor = reply.tensors[0] if isinstance(reply.message, Chunk) and reply.tensors else None
    if tensor is None or tensor.dtype != "uint8" or tensor.nbytes != nbytes:
        raise CorruptStateError("bad-tensor", f"A chunk is not uint8 [{nbytes}].")
    if (digest := hashlib.sha256(tensor.data).digest()) != expected:
        raise CorruptStateError("bad-tensor", f"A chunk's SHA-256 should be {expected.hex()}, and is {digest.hex()}.")
    _, *moments = values = unpack_chunk(tensor.data, layout, chunk)
    negative = any(moment.is_square and (part < 0).any() for moment, part in zip(layout.moments, moments, strict=True))
    if negative or not all(np.isfinite(part).all() for part in values):
        raise CorruptStateError("bad-tensor", "A chunk holds values that are not finite, or a negative square.")
    elements, *_ = layout.chunk_places(chunk)
    for moment, squares in zip(layout.moments, moments, strict=True):
        if math.isfinite(moment.root_bound) and not _are_means_of(moments[0], elements, squares, moment):
            problem = "A chunk holds a mean that is too large for the mean of its squares."
            raise CorruptStateError("bad-tensor", problem)
    return values


def _are_means_of(means: Flat, elements: slice, squares: Flat, moment: MomentSpec) -> bool:
    # means: of `elements`; squares: of those of them that have one. A step is as long as a mean's ratio to the root.
    bounds = ROOT_SLACK * moment.root_bound * np.sqrt(squares + np.float32(LEAST_SQUARE))
    at = 0
    for part in moment.ranges:
        start, stop = (min(max(end, elements.start), elements.stop) - elements.start for end in (part.start, part.stop))
        if (np.abs(means[start:stop]) > bounds[at : at + stop - start]).any():
            return False
        at += stop - start
    return True
