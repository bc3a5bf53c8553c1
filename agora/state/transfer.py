"""Fetches a stage's state from several replicas at once, chunk by chunk; sources may die, hang or send false data.

Knows: what to ask which peer for. Must not know: how calls travel, who the replicas are, what becomes of the state.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetChunk, GetState, StateIndex

from agora.calls import Caller
from agora.clock import loop_time
from agora.state.chunk_schedule import ChunkSchedule
from agora.state.chunk_source import (
    CHUNK_S,
    FAILURES,
    PAUSE_S,
    SLOW_S,
    SOURCES,
    TICK_S,
    ChunkSource,
    cancel_and_await,
)
from agora.state.layout import Layout, StageState
from agora.state.offers import FalseStateError, Offer, check_chunk, check_offer, milliseconds_until, mixing_key
from agora.state.sample_check import ChunkSample, find_false
from agora.swarm.conduct import Offence, ReportOffence

OFFER_S: Final = 30.0  # for a source to make its snapshot
GATHER_S: Final = 1.0  # after the first offer, before chunks are asked for: time for a newer one to come
STALL_S: Final = 60.0  # without a chunk from all sources that are fetched from, before other snapshots are chosen


@dataclass(slots=True)
class _Source(ChunkSource[int | None]):
    """A replica that the state is fetched from; its calls are by chunk, None: the call for the offer.

    given_up: it is not asked any more; last_error says why.
    """

    offer: Offer | None = None
    given_up: bool = False


class StateFetch:
    """Fetches one stage's state from several replicas at once, in chunks, each checked against its source's offer.

    | a source's offer has the mixing key of  | what follows                                                         |
    |-----------------------------------------|----------------------------------------------------------------------|
    | chunks that have arrived                | it is fetched                                                        |
    | the newest offer, as none has the above | it is fetched; chunks of other snapshots are dropped, never mixed in |
    | else, and is older                      | the source is asked once more: it may have caught up by then         |
    | else                                    | it waits; when no source is left to fetch from, all are asked anew   |

    A source that fails is asked again or given up. When `run` fails, the chunks that arrived stay for the next `run`.
    """

    def __init__(
        self,
        caller: Caller,
        stage: int,
        layout: Layout,
        report_offence: ReportOffence,
        *,
        highest_plausible_step: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """highest_plausible_step: returns the step above which a source's state is not used."""
        self.schedule = ChunkSchedule(layout.chunk_count)
        self._caller = caller
        self._stage = stage
        self._layout = layout
        self._report_offence = report_offence
        self._highest_plausible_step = highest_plausible_step
        self._weights = np.empty(layout.numel, np.float32)
        self._moments = {moment.name: np.empty(moment.numel, np.float32) for moment in layout.moments}
        self._chunk_snapshots: dict[int, StateIndex] = {}  # the snapshot of each chunk that has arrived
        self._chunk_peers: dict[int, PeerId] = {}  # who gave it
        self._chunk_hashes: dict[int, bytes] = {}
        self._sources: list[_Source] = []
        self._deadline = 0.0
        self._lowest_step = 0  # that is used
        self._first_offer_at: float | None = None
        self._chosen: StateIndex | None = None  # chunks of snapshots with its mixing key are asked for
        self._last_arrival = 0.0

    async def run(self, sources: Sequence[PeerId], *, deadline: float, at_least: int = 0) -> StageState:
        """Fetches what is still missing from `sources`, the best first, and returns the state.

        No chunk is of a step below `at_least`, and all are of one agreed step and lineage; the state's step and updates
        are the lowest of them. Raises Unavailable, with a reason for each source, when none can go on or `deadline`
        (loop time) has passed.
        """
        self._sources = [_Source(peer) for peer in dict.fromkeys(sources)]
        self._deadline, self._lowest_step = deadline, at_least
        self._first_offer_at = self._chosen = None
        self._keep_chunks(lambda index: index.step >= at_least)
        try:
            while not self.schedule.complete:
                while not self.schedule.complete:
                    await self._advance()
                await self._drop_false_chunks()
        finally:
            await cancel_and_await([task for source in self._sources for task, _ in source.calls.values()])
            self._remove_ended_calls()
        indexes = self._chunk_snapshots.values()
        step, updates = min(index.step for index in indexes), min(index.updates for index in indexes)
        ((agreed, lineage, _),) = {mixing_key(index) for index in indexes}
        return StageState(self._stage, step, updates, 0, self._layout, self._weights, self._moments, agreed, lineage)

    async def _advance(self) -> None:
        """Starts due calls and waits up to TICK_S until one ends. Raises Unavailable when late or without sources."""
        now = loop_time()
        is_late = now >= self._deadline
        if not is_late:
            self._choose_again_if_needed(now)
            self._ask_for_offers(now)
            if self._chosen is None:
                self._choose_snapshots(now)
            self._ask_for_chunks(now)
        calls = [task for source in self._sources for task, _ in source.calls.values()]
        if is_late or not (calls or any(not source.given_up for source in self._sources)):
            arrived = f"{len(self.schedule.arrived_chunks)} of {self.schedule.count} chunks came"
            ending = " before the deadline" if is_late else ", and no source is left"
            errors = [f"{source.peer}: {source.last_error}" for source in self._sources if source.last_error]
            raise Unavailable(self._stage, [arrived + ending, *errors])
        wait_s = min(TICK_S, self._deadline - now)
        if calls:
            await asyncio.wait(calls, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(wait_s)
        self._remove_ended_calls()

    def _remove_ended_calls(self) -> None:
        """Removes ended calls; a chunk that they did not bring is missing again. Raises the exception of a call."""
        for source in self._sources:
            for chunk, task in source.take_ended_calls():
                if chunk is not None:
                    self.schedule.record_end(chunk, source.peer)
                if not task.cancelled():
                    task.result()

    # --- choosing snapshots

    def _choose_snapshots(self, now: float) -> None:
        """Once the first offers are in, chooses the mixing key to fetch, and drops the chunks with another.

        It is that of the chunks that have arrived, if an offer has it, else that of the newest offer.
        """
        offers = [source.offer for source in self._sources if source.offer]
        others_pending = any(None in source.calls for source in self._sources)
        if not offers or (others_pending and now < (self._first_offer_at or now) + GATHER_S):
            return
        arrived = {mixing_key(index) for index in self._chunk_snapshots.values()}
        chosen = max(offers, key=lambda offer: (offer.mixing_key in arrived, offer.index.agreed, offer.index.step))
        self._chosen, self._last_arrival = chosen.index, now
        self._keep_chunks(lambda index: mixing_key(index) == chosen.mixing_key)
        chosen_steps = chosen.index.agreed, chosen.index.step
        for source in self._sources:
            if source.offer and not self._is_chosen(source.offer):
                index = source.offer.index
                if (index.agreed, index.step) < chosen_steps:
                    source.offer, source.not_before = None, now + PAUSE_S

    def _choose_again_if_needed(self, now: float) -> None:
        """Drops the offers of the other sources, so that they are asked anew, when none is left to fetch from.

        Before that, sources are given up if no chunk has come for STALL_S and there are others.
        """
        if self._chosen is None:
            return
        fetched_from = [source for source in self._sources if self._is_chosen(source.offer)]
        others = [source for source in self._sources if source not in fetched_from and not source.given_up]
        if others and now > self._last_arrival + STALL_S:
            for source in fetched_from:
                self._give_up(source, f"no chunk came within {STALL_S:.0f} s")
            fetched_from = []
        if others and not fetched_from:
            self._chosen = self._first_offer_at = None
            for source in others:
                source.offer = None

    def _is_chosen(self, offer: Offer | None) -> bool:
        """Returns whether chunks of the offered snapshot go into the state."""
        return offer is not None and self._chosen is not None and offer.mixing_key == mixing_key(self._chosen)

    def _keep_chunks(self, fits: Callable[[StateIndex], bool]) -> None:
        """Drops the chunks that have arrived from snapshots that do not fit; they are missing again."""
        self._drop_chunks([chunk for chunk, index in self._chunk_snapshots.items() if not fits(index)])

    def _drop_chunks(self, chunks: Sequence[int]) -> None:
        """Drops chunks that have arrived; they are missing again."""
        for chunk in chunks:
            self.schedule.discard(chunk)
            del self._chunk_snapshots[chunk], self._chunk_peers[chunk], self._chunk_hashes[chunk]

    # --- starting calls

    def _ask_for_offers(self, now: float) -> None:
        """Asks idle sources for an offer until SOURCES of them, without slow ones, have made one or are asked."""
        usable = [source for source in self._sources if not source.given_up]
        engaged = [s for s in usable if None in s.calls or (s.offer and not s.failures)]
        not_slow = sum(1 for s in engaged if not self._is_slow(s, now))
        idle = [s for s in usable if not (s.offer or None in s.calls) and now >= s.not_before]
        for source in idle[: max(SOURCES - not_slow, 0)]:
            source.calls[None] = (asyncio.create_task(self._fetch_offer(source)), now)

    def _is_slow(self, source: _Source, now: float) -> bool:
        """Returns whether the source's oldest open call lasts unusually long; an idle source is then asked as well."""
        return source.is_slow(now, max(SLOW_S, 4 * self.schedule.median_s()) if source.offer else SLOW_S)

    def _ask_for_chunks(self, now: float) -> None:
        """Fills the windows of the sources that are fetched from with calls."""
        free = [source for source in self._sources if self._is_chosen(source.offer) and now >= source.not_before]
        while free:  # one chunk each in turn, so that all of them have work
            free = [source for source in free if self._start_chunk(source, now)]

    def _start_chunk(self, source: _Source, now: float) -> bool:
        """Starts a call for the source's next chunk. Returns False if its window is full or there is no chunk."""
        if source.offer is None or len(source.calls) >= source.window:
            return False
        if (chunk := self.schedule.take(source.peer, now)) is None:
            return False
        source.calls[chunk] = (asyncio.create_task(self._fetch_chunk(source, source.offer, chunk)), now)
        return True

    # --- calls; each runs as a task of its own

    async def _fetch_offer(self, source: _Source) -> None:
        """Asks the source for its newest snapshot; keeps the offer, or at an implausible step gives the source up."""
        call_deadline = min(self._deadline, loop_time() + OFFER_S)
        at_least = self._chosen.step if self._chosen else self._lowest_step
        request = GetState(self._stage, at_least, milliseconds_until(call_deadline))
        try:
            offer = check_offer(await self._caller.call(source.peer, request, deadline=call_deadline), self._layout)
        except AgoraError as error:
            self._handle_failure(source, error, None)
            return
        step = offer.index.step
        if (claimed := max(step, offer.index.agreed)) > self._highest_plausible_step():
            self._give_up(source, f"offers step {claimed}, which is implausible beside the other replicas")
        elif step < self._lowest_step:
            self._give_up(source, f"is at step {step}; the lowest step that is used is {self._lowest_step}")
        else:
            source.offer = offer
            self._first_offer_at = self._first_offer_at or loop_time()

    async def _fetch_chunk(self, source: _Source, offer: Offer, chunk: int) -> None:
        """Asks the source for a chunk, checks it in a thread, stores it, and cancels other calls for the same chunk."""
        started_at = loop_time()
        call_deadline = min(self._deadline, started_at + CHUNK_S)
        request = GetChunk(offer.index.snapshot, chunk, milliseconds_until(call_deadline))
        try:
            reply = await self._caller.call(source.peer, request, deadline=call_deadline)
            values = await asyncio.to_thread(check_chunk, reply, offer.hash_of(chunk), self._layout, chunk)
        except AgoraError as error:
            self._handle_failure(source, error, offer)
            return
        source.record_chunk(loop_time() - started_at)
        if not self._is_chosen(offer):
            return  # other snapshots have been chosen meanwhile
        self._chunk_snapshots[chunk], self._last_arrival = offer.index, loop_time()
        self._chunk_peers[chunk], self._chunk_hashes[chunk] = source.peer, offer.hash_of(chunk)
        arrays = [self._weights, *self._moments.values()]
        for array, place, part in zip(arrays, self._layout.chunk_places(chunk), values, strict=True):
            array[place] = part
        peers_to_cancel = self.schedule.record_arrival(chunk, source.peer, loop_time())
        for other in [other for other in self._sources if other.peer in peers_to_cancel]:
            other.calls[chunk][0].cancel()

    # --- samples

    async def _drop_false_chunks(self) -> None:
        """Compares samples of each source's chunks with other sources', see sample_check; drops those of false ones."""
        chunks_of: dict[PeerId, list[int]] = {}
        for chunk, peer in self._chunk_peers.items():
            chunks_of.setdefault(peer, []).append(chunk)
        usable = [source for source in self._sources if not source.given_up]
        usable.sort(key=lambda source: source.offer is None)  # those whose offer is known first
        verdicts = await find_false(chunks_of, [source.peer for source in usable], self._read_sample, random.Random())
        for peer, verdict in verdicts.items():
            reason = "its chunks are not near those of other sources, as replicas' are"
            if verdict == "false":
                self._report_offence(peer, Offence.FALSE_STATE, reason)
            for source in self._sources:
                if source.peer == peer:
                    self._give_up(source, reason)
            self._drop_chunks(chunks_of[peer])

    async def _read_sample(self, peer: PeerId, chunk: int) -> ChunkSample | None:
        """Returns a source's weights of a chunk: as they arrived, if from it, else asked for; None if it has none."""
        place = self._layout.chunk_places(chunk)[0]
        if self._chunk_peers.get(chunk) == peer:
            return ChunkSample(self._weights[place], self._chunk_snapshots[chunk].step)
        source = next(source for source in self._sources if source.peer == peer)
        call_deadline = min(self._deadline, loop_time() + CHUNK_S)
        try:
            if source.offer is None:
                await self._fetch_offer(source)
            if (offer := source.offer) is None:
                return None
            if offer.hash_of(chunk) == self._chunk_hashes[chunk]:
                return ChunkSample(self._weights[place], offer.index.step)
            request = GetChunk(offer.index.snapshot, chunk, milliseconds_until(call_deadline))
            reply = await self._caller.call(peer, request, deadline=call_deadline)
            weights, *_ = await asyncio.to_thread(check_chunk, reply, offer.hash_of(chunk), self._layout, chunk)
            return ChunkSample(weights, offer.index.step)
        except AgoraError as error:
            self._handle_failure(source, error, source.offer)
            return None

    # --- failures

    def _handle_failure(self, source: _Source, error: AgoraError, offer: Offer | None) -> None:
        """Lets a source whose call failed pause, or gives it up, by the table in docs/state.md; reports false states.

        offer: the one that a chunk was asked of; None: the call was for an offer.
        """
        if source.given_up:
            return
        if isinstance(error, FalseStateError):
            self._report_offence(source.peer, Offence.FALSE_STATE, f"{error.code}: {error}")
        is_refusal = isinstance(error, Refused) and not isinstance(error, Busy)
        if isinstance(error, ProtocolError) or (is_refusal and offer is None):
            self._give_up(source, str(error))
            return
        source.record_failure(error, loop_time())
        if is_refusal and offer is source.offer:
            source.offer = None  # after any other failure the source may still keep the snapshot
        if source.failures >= FAILURES:
            self._give_up(source, source.last_error)

    def _give_up(self, source: _Source, reason: str) -> None:
        """Marks the source so that it is asked for nothing more, records `reason`, and cancels its open calls."""
        source.given_up, source.last_error, source.offer = True, reason, None
        source.cancel_calls()
