"""Fetches a stage's state chunk by chunk, from several replicas concurrently; sources may die.

Hang or send bad data.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetChunk, GetState, StateIndex

from agora.core.calls import Caller
from agora.core.clock import loop_time
from agora.core.sync_mode import ChangeRule
from agora.state.chunk_schedule import ChunkSchedule
from agora.state.chunk_source import CHUNK_S, FAILURES, PAUSE_S, SLOW_S, SOURCES, TICK_S, ChunkSource, cancel_and_await
from agora.state.layout import Layout, StageState
from agora.state.offers import CorruptStateError, Offer, check_chunk, check_offer, milliseconds_until, mixing_key
from agora.state.partial_state import ArrivedChunk, PartialState
from agora.state.sample_check import ChunkSample, find_corrupt_sources
from agora.swarm.peer_score import ReportViolation, Violation

OFFER_S: Final = 30.0  # seconds a source may take to make its snapshot
GATHER_S: Final = 1.0  # seconds to wait after the first offer for a newer one, before chunks are asked for
STALL_S: Final = 60.0  # seconds without a chunk from any chosen source, before other snapshots are chosen


@dataclass(slots=True)
class _Source(ChunkSource[int | None]):
    """A replica that the state is fetched from. given_up: the replica is not asked again; last_error is the reason.

    calls: the key is the chunk's number, or None for the call that asks for an offer. offer: the replica's latest
    offer; None before the first, and when the replica is to be asked for another.
    """

    offer: Offer | None = None
    given_up: bool = False


class StateFetch:
    """Fetches one stage's state from several replicas concurrently, in chunks checked against their sources' offers.

    An offer is a snapshot that a source can give; chunks of snapshots with the same mixing key (see offers.mixing_key)
    form one state. One key is chosen: that of the arrived chunks if an offer has it, otherwise the newest offer's.

    | a source's offer                  | what follows                                                              |
    |-----------------------------------|---------------------------------------------------------------------------|
    | has the chosen key                | its chunks are fetched; arrived chunks with another key are dropped       |
    | has another key and is older      | the source is asked for a new offer: it may have caught up by then        |
    | has another key and is not older  | the source waits; it is asked again when no chosen source is left         |

    A source that fails is asked again or given up. When all chunks have arrived, samples are compared (sample_check),
    and the chunks of sources that do not pass are fetched from others. When `run` fails, the chunks that arrived stay
    for the next `run`.
    """

    def __init__(
        self,
        caller: Caller,
        stage: int,
        layout: Layout,
        report_violation: ReportViolation,
        change_rule: ChangeRule,
        *,
        highest_plausible_step: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """layout: of the stage during exact steps. report_violation: called for sources that send corrupt data.

        change_rule: of the run; offers whose step plan it does not allow are corrupt.
        highest_plausible_step: offers above the step that it returns are not used.
        """
        self._caller = caller
        self._stage = stage
        self._exact_layout = layout
        self._partial = PartialState(layout)
        self._report_violation = report_violation
        self._change_rule = change_rule
        self._highest_plausible_step = highest_plausible_step
        self._sources: list[_Source] = []
        self._deadline = 0.0
        self._lowest_step = 0  # the lowest step to accept
        self._first_offer_at: float | None = None
        self._chosen: StateIndex | None = None  # only chunks of snapshots with its mixing key are asked for
        self._last_arrival = 0.0

    @property
    def schedule(self) -> ChunkSchedule:
        return self._partial.schedule

    async def run(self, sources: Sequence[PeerId], *, deadline: float, at_least: int = 0) -> StageState:
        """Fetches the missing chunks from several of `sources` concurrently, earlier ones first; returns the state.

        No chunk is of a step below `at_least`, and all have the same mixing key; see PartialState.whole_state. Raises
        Unavailable, with each source's last error, when no source is left or `deadline` (loop time) has passed.
        """
        self._sources = [_Source(peer) for peer in dict.fromkeys(sources)]
        self._deadline = deadline
        self._lowest_step = at_least
        self._first_offer_at = self._chosen = None
        self._partial.drop_unless(lambda index: index.step >= at_least)
        try:
            while not self.schedule.is_complete:
                while not self.schedule.is_complete:
                    await self._advance()
                await self._drop_corrupt_chunks()
        finally:
            await cancel_and_await([task for source in self._sources for task, _ in source.calls.values()])
            self._remove_ended_calls()
        return self._partial.whole_state(self._stage)

    async def _advance(self) -> None:
        now = loop_time()
        is_late = now >= self._deadline
        if not is_late:
            self._reconsider_mixing_key(now)
            self._ask_for_offers(now)
            if self._chosen is None:
                self._choose_mixing_key(now)
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
        for source in self._sources:
            for chunk, task in source.take_ended_calls():
                if chunk is not None:
                    self.schedule.record_call_end(chunk, source.peer)
                if not task.cancelled():
                    task.result()

    # --- choosing a mixing key

    def _choose_mixing_key(self, now: float) -> None:
        offers = [source.offer for source in self._sources if source.offer]
        others_pending = any(None in source.calls for source in self._sources)
        if not offers or (others_pending and now < (self._first_offer_at or now) + GATHER_S):
            return
        arrived = {mixing_key(chunk.index) for chunk in self._partial.arrived.values()}
        chosen = max(offers, key=lambda offer: (offer.mixing_key in arrived, offer.index.agreed, offer.index.step))
        self._chosen = chosen.index
        self._last_arrival = now
        if chosen.layout.nbytes != self._partial.layout.nbytes:
            self._partial = PartialState(chosen.layout)
        self._partial.drop_unless(lambda index: mixing_key(index) == chosen.mixing_key)
        chosen_steps = chosen.index.agreed, chosen.index.step
        for source in self._sources:
            if source.offer and not self._has_chosen_key(source.offer):
                index = source.offer.index
                if (index.agreed, index.step) < chosen_steps:
                    source.offer = None
                    source.not_before = now + PAUSE_S

    def _reconsider_mixing_key(self, now: float) -> None:
        # The other sources' offers are then dropped, so that new ones are asked for.
        if self._chosen is None:
            return
        fetched_from = [source for source in self._sources if self._has_chosen_key(source.offer)]
        others = [source for source in self._sources if source not in fetched_from and not source.given_up]
        if others and now > self._last_arrival + STALL_S:
            for source in fetched_from:
                self._give_up(source, f"no chunk came within {STALL_S:.0f} s")
            fetched_from = []
        if others and not fetched_from:
            self._chosen = self._first_offer_at = None
            for source in others:
                source.offer = None

    def _has_chosen_key(self, offer: Offer | None) -> bool:
        # Returns whether `offer` has the chosen mixing key, so that its chunks may go into the state.
        if offer is None or self._chosen is None or offer.layout.nbytes != self._partial.layout.nbytes:
            return False
        return offer.mixing_key == mixing_key(self._chosen)

    # --- starting calls

    def _ask_for_offers(self, now: float) -> None:
        usable = [source for source in self._sources if not source.given_up]
        engaged = [s for s in usable if None in s.calls or (s.offer and not s.failures)]
        not_slow = sum(1 for s in engaged if not self._is_slow(s, now))
        idle = [s for s in usable if not (s.offer or None in s.calls) and now >= s.not_before]
        for source in idle[: max(SOURCES - not_slow, 0)]:
            source.calls[None] = (asyncio.create_task(self._fetch_offer(source)), now)

    def _is_slow(self, source: _Source, now: float) -> bool:
        # Returns whether the source's oldest open call lasts unusually long, so that another source is asked, too.
        return source.is_slow(now, max(SLOW_S, 4 * self.schedule.median_s()) if source.offer else SLOW_S)

    def _ask_for_chunks(self, now: float) -> None:
        free = [source for source in self._sources if self._has_chosen_key(source.offer) and now >= source.not_before]
        while free:  # one chunk each in turn, so that all sources have work
            free = [source for source in free if self._start_chunk(source, now)]

    def _start_chunk(self, source: _Source, now: float) -> bool:
        if source.offer is None or len(source.calls) >= source.window:
            return False
        if (chunk := self.schedule.take(source.peer, now)) is None:
            return False
        source.calls[chunk] = (asyncio.create_task(self._fetch_chunk(source, source.offer, chunk)), now)
        return True

    # --- calls; each runs as a task of its own

    async def _fetch_offer(self, source: _Source) -> None:
        call_deadline = min(self._deadline, loop_time() + OFFER_S)
        at_least = self._chosen.step if self._chosen else self._lowest_step
        request = GetState(self._stage, at_least, milliseconds_until(call_deadline))
        try:
            reply = await self._caller.call(source.peer, request, deadline=call_deadline)
            offer = check_offer(reply, self._exact_layout, self._change_rule)
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
        started_at = loop_time()
        call_deadline = min(self._deadline, started_at + CHUNK_S)
        request = GetChunk(offer.index.snapshot, chunk, milliseconds_until(call_deadline))
        try:
            reply = await self._caller.call(source.peer, request, deadline=call_deadline)
            values = await asyncio.to_thread(check_chunk, reply, offer.hash_of(chunk), offer.layout, chunk)
        except AgoraError as error:
            self._handle_failure(source, error, offer)
            return
        source.record_chunk(loop_time() - started_at)
        if not self._has_chosen_key(offer):
            return  # another mixing key has been chosen meanwhile
        self._last_arrival = loop_time()
        self._partial.store(chunk, ArrivedChunk(offer.index, source.peer, offer.hash_of(chunk)), values)
        peers_to_cancel = self.schedule.record_arrival(chunk, source.peer, loop_time())
        for other in [other for other in self._sources if other.peer in peers_to_cancel]:
            other.calls[chunk][0].cancel()

    # --- samples

    async def _drop_corrupt_chunks(self) -> None:
        chunks_of = self._partial.chunks_by_peer()
        usable = [source for source in self._sources if not source.given_up]
        usable.sort(key=lambda source: source.offer is None)  # those whose offer is known first
        verdicts = await find_corrupt_sources(
            chunks_of, [source.peer for source in usable], self._read_sample, random.Random()
        )
        for peer, verdict in verdicts.items():
            reason = "its chunks are not near those of other sources, as replicas' are"
            if verdict == "corrupt":
                self._report_violation(peer, Violation.FALSE_STATE, reason)
            for source in self._sources:
                if source.peer == peer:
                    self._give_up(source, reason)
            self._partial.drop(chunks_of[peer])

    async def _read_sample(self, peer: PeerId, chunk: int) -> ChunkSample | None:
        # If the arrived chunk came from this source, or has the same hash in the source's offer, the arrived weights
        # are returned; otherwise the source is asked for the chunk.
        arrived = self._partial.arrived[chunk]
        if arrived.peer == peer:
            return ChunkSample(self._partial.weights_of(chunk), arrived.index.step)
        source = next(source for source in self._sources if source.peer == peer)
        call_deadline = min(self._deadline, loop_time() + CHUNK_S)
        try:
            if source.offer is None:
                await self._fetch_offer(source)
            if (offer := source.offer) is None or offer.layout.nbytes != self._partial.layout.nbytes:
                return None
            if offer.hash_of(chunk) == arrived.digest:
                return ChunkSample(self._partial.weights_of(chunk), offer.index.step)
            request = GetChunk(offer.index.snapshot, chunk, milliseconds_until(call_deadline))
            reply = await self._caller.call(peer, request, deadline=call_deadline)
            weights, *_ = await asyncio.to_thread(check_chunk, reply, offer.hash_of(chunk), offer.layout, chunk)
            return ChunkSample(weights, offer.index.step)
        except AgoraError as error:
            self._handle_failure(source, error, source.offer)
            return None

    # --- failures

    def _handle_failure(self, source: _Source, error: AgoraError, offer: Offer | None) -> None:
        if source.given_up:
            return
        if isinstance(error, CorruptStateError):
            self._report_violation(source.peer, Violation.FALSE_STATE, f"{error.code}: {error}")
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
        # Marks the source so that it is not asked again, drops its offer, and cancels its calls; arrived chunks stay.
        # reason: becomes the source's last_error.
        source.given_up = True
        source.last_error = reason
        source.offer = None
        source.cancel_calls()
