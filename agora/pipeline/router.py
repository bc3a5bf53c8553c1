"""Sends a microbatch to the next stage and stays with it until somebody answers or the deadline passes.

Knows calls, siblings, back-off and what each call teaches. Must not know how choices are made (routing.py decides)
nor how tensors are computed or sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_DEADLINE_MS, MAX_HINTS
from agora_protocol.messages import Advance, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.calls import Caller, OnProgress, Reply
from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.pipeline import routing
from agora.pipeline.credit import Pace
from agora.pipeline.deadline import LEAST_S, attempt_deadline, deadline_to_send
from agora.pipeline.interfaces import HopAnswer, WireShapes
from agora.pipeline.routing import Choice, Link, PathHint, PeerCost
from agora.pipeline.signal import Signal
from agora.swarm.conduct import Offence, ReportOffence
from agora.swarm.view import PeerView, View

MOST_REASONS = 8
NEWS_PER_STAGE = 8
"""An attempt brings word of a seat for every stage that it passes, more where calls were repeated; beyond so many it is
dropped, since every caller before us would have to pass it on.
"""
UNAVAILABLE_FAILURES = 3
"""A peer that could not get further downstream is left alone for a second at most: it may not be its fault."""

RoundTrip = Callable[[PeerId], "float | None"]


@dataclass(slots=True)
class Trip:
    """One microbatch on its way through `send`: what it carries, and what its attempts have taught.

    path: who was seen to hold a stage, at first by the caller's hint; told: whom of them those who asked us heard of.
    """

    process: Process
    tensors: Sequence[WireTensor]
    deadline: float
    on_progress: OnProgress
    payload_bytes: int
    path: dict[int, PeerId] = field(default_factory=dict)
    told: dict[int, PeerId] = field(default_factory=dict)
    finished: set[PeerId] = field(default_factory=set)
    reasons: dict[PeerId, str] = field(default_factory=dict)

    @property
    def hint(self) -> PathHint:
        """For the next choice."""
        return PathHint(self.path, frozenset(self.finished))

    def heard(self, news: Advance, callee: PeerId) -> bool:
        """The newest peer seen to hold a stage is the one that a retry should reach; its own stage is the callee's.

        Whether it is news to those who asked us, all of whom hear the same.
        """
        own = news.stage == self.process.stage
        if not (news.peer == callee if own else news.stage > self.process.stage):
            return False
        if own and news.what == "finished":
            self.finished.add(callee)
        known = self.told.get(news.stage) == news.peer
        self.path[news.stage] = self.told[news.stage] = news.peer
        return not known

    def failed(self, peer: PeerId, reason: str) -> None:
        """Remembers why. Who holds the result is worth a second call; nobody else is hinted at again for this stage."""
        if peer not in self.finished or peer in self.reasons:
            self.finished.discard(peer)
            if self.path.get(self.process.stage) == peer:
                del self.path[self.process.stage]
        self.reasons[peer] = reason

    def request(self, deadline_ms: int) -> Process:
        """The message of one attempt; it hints at the nearest stages first, as far as a message may."""
        ahead = sorted((stage, peer) for stage, peer in self.path.items() if stage > self.process.stage)
        return replace(self.process, deadline_ms=deadline_ms, hint=tuple(ahead[:MAX_HINTS]))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One call of a trip: whom, since when, until when, and what it was charged."""

    peer: PeerId
    started: float
    until: float
    charge_s: float


class Router:
    """The way to the stages after ours, over the live claims in the view."""

    def __init__(
        self,
        caller: Caller,
        view_of: Callable[[], View],
        *,
        me: PeerId,
        stage_count: int,
        shapes: WireShapes,
        report: Report,
        report_offence: ReportOffence,
        is_shut_out: Callable[[PeerId], bool],
        round_trip_s: RoundTrip = lambda peer: None,
    ) -> None:
        self._caller = caller
        self._view_of = view_of
        self._me = me
        self._stage_count = stage_count
        self._shapes = shapes
        self._report = report
        self._report_offence = report_offence
        self._is_shut_out = is_shut_out
        self._round_trip_s = round_trip_s
        self._changed = Signal()
        self._costs: dict[int, dict[PeerId, PeerCost]] = {}
        self._stuck: dict[int, bool] = {}
        self._view = View()
        self._replicas: dict[int, dict[PeerId, PeerView]] = {}
        self._pace = Pace()
        self.rerouted = 0

    def view_changed(self) -> None:
        """Wakes every microbatch that waits for a peer; call it whenever the membership view changed."""
        self._changed.notify()

    async def send(
        self, process: Process, tensors: Sequence[WireTensor], deadline: float, on_progress: OnProgress
    ) -> HopAnswer:
        """The answer of some peer of `process.stage`: `tensors` are [boundary, tokens], `deadline` on the loop's clock.

        Tries siblings until the deadline, and waits for one when the view knows none. In the answer, `path_ms` begins
        here: the link to that peer is part of it. Raises Unavailable.
        """
        payload = sum(tensor.nbytes for tensor in tensors)
        trip = Trip(process, tensors, deadline, on_progress, payload, dict(process.hint))
        while True:
            attempt = await self._next(trip)
            answer = await self._try(trip, attempt)
            if answer is not None:
                return answer

    async def _next(self, trip: Trip) -> _Attempt:
        """The next peer to try, charged; waits while nobody can be asked. Raises Unavailable at the deadline."""
        while True:
            now = loop_time()
            choice = self._choose(now, trip)
            if trip.deadline - now < LEAST_S:
                raise Unavailable(trip.process.stage, self._why(trip, choice))
            if choice.peer is not None:
                return self._charge(now, trip, choice.peer)
            await self._changed.wait(min(trip.deadline, choice.look_again_at))

    def _choose(self, now: float, trip: Trip) -> Choice:
        stage = trip.process.stage
        costs = self._refreshed(stage)
        candidates = routing.candidates_of(now, costs, trip.payload_bytes)
        choice = routing.choose_next(now, trip.process.microbatch, stage, candidates, trip.hint)
        stuck = not candidates
        if self._stuck.get(stage, False) != stuck:
            self._stuck[stage] = stuck
            self._report(events.RouteChanged(stage, choice.peer or "", choice.reason))
        return choice

    def _refreshed(self, stage: int) -> dict[PeerId, PeerCost]:
        """The costs of the peers that claim `stage` now; newcomers enter, those gone are forgotten."""
        costs = self._costs.setdefault(stage, {})
        live = {peer: seen for peer, seen in self._live(stage).items() if not self._is_shut_out(peer)}
        for gone in [peer for peer, cost in costs.items() if peer not in live and not cost.calls]:
            del costs[gone]
        known = {peer: cost for peer, cost in costs.items() if peer in live}
        for peer, view in live.items():
            if peer not in costs:
                costs[peer] = routing.newcomer(known.values(), view.incarnation, view.capacity)
            elif view.incarnation > costs[peer].incarnation:
                costs[peer] = routing.reborn(costs[peer], view.incarnation)
        return {peer: costs[peer] for peer in live}

    def _live(self, stage: int) -> dict[PeerId, PeerView]:
        """Who serves `stage`, remembered for as long as the view stays the same object."""
        view = self._view_of()
        if view is not self._view:
            self._view, self._replicas = view, {}
        if stage not in self._replicas:
            self._replicas[stage] = {seen.peer: seen for seen in view.replicas(stage) if seen.peer != self._me}
        return self._replicas[stage]

    def _charge(self, now: float, trip: Trip, peer: PeerId) -> _Attempt:
        stage = trip.process.stage
        costs = self._refreshed(stage)
        cost = costs[peer]
        charge = cost.occupies_s(trip.payload_bytes)
        floor = routing.virtual_floor(costs.values(), trip.payload_bytes)
        self._costs[stage][peer] = routing.sent(cost, floor, charge)
        others = sum(1 for sibling, c in costs.items() if sibling != peer and not c.failures)
        depth = self._stage_count - stage
        return _Attempt(peer, now, attempt_deadline(now, trip.deadline, cost.call_s, others, depth), charge)

    async def _try(self, trip: Trip, attempt: _Attempt) -> HopAnswer | None:
        """One call. None when it failed and another peer, or the same one later, should be tried."""
        stage, learnt = trip.process.stage, False
        try:
            answer = await self._call(trip, attempt)
            path_s = self._learn_answer(trip, attempt, answer)
            learnt = True
            return replace(answer, message=replace(answer.message, path_ms=1000.0 * path_s))
        except Busy as refusal:
            self._learn(
                stage, attempt, routing.was_busy, loop_time(), attempt.charge_s, refusal.retry_after_ms / 1000.0
            )
            learnt = True
            trip.reasons[attempt.peer] = "busy"
        except AgoraError as error:
            self._learn_failure(trip, attempt, error)
            learnt = True
        finally:
            if not learnt:
                self._learn(stage, attempt, routing.left, attempt.charge_s)
            self._changed.notify()
        return None

    async def _call(self, trip: Trip, attempt: _Attempt) -> HopAnswer:
        stage, peer = trip.process.stage, attempt.peer
        most, counts = NEWS_PER_STAGE * (self._stage_count - stage), Counter[str]()

        def heard(news: Advance) -> None:
            counts[news.what] += 1
            if counts[news.what] > most:
                return
            new = trip.heard(news, peer)
            if news.peer == peer and news.stage == stage and news.what == "accepted":
                link = Link(trip.payload_bytes, self._round_trip_s(peer))
                waited = loop_time() - attempt.started
                self._learn(stage, attempt, routing.accepted, loop_time(), min(news.queue, 1 << 20), waited, link)
            if new:
                trip.on_progress(news)

        cost = self._costs[stage][peer]
        deadline_ms = deadline_to_send(attempt.started, attempt.until, 2.0 * cost.round_trip_s, MAX_DEADLINE_MS)
        reply = await self._caller.call(
            peer, trip.request(deadline_ms), trip.tensors, deadline=attempt.until, on_progress=heard
        )
        return self._checked(trip, peer, reply)

    def _checked(self, trip: Trip, peer: PeerId, reply: Reply) -> HopAnswer:
        """The reply as an answer to what was asked. Raises ProtocolError, and reports the offence, when it is none."""
        message, tensors = reply.message, list(reply.tensors)
        wanted = 1 if trip.process.purpose == "train" else 0
        problem = None
        if not isinstance(message, Processed):
            problem = ProtocolError("bad-message", f"answered process with {type(message).__name__}")
        elif len(tensors) != wanted:
            problem = ProtocolError("bad-message", f"sent {len(tensors)} tensors where {wanted} belong")
        elif tensors and not self._shapes.fits_gradient(tensors[0]):
            problem = ProtocolError("bad-tensor", f"sent a gradient of {tensors[0].dtype} {tensors[0].shape}")
        elif not math.isfinite(message.loss_sum) or message.tokens > math.prod(self._shapes.tokens_shape):
            problem = ProtocolError("bad-message", f"sent the loss {message.loss_sum} over {message.tokens} tokens")
        else:
            return HopAnswer(message, tensors, peer)
        self._report_offence(peer, Offence.BAD_ANSWER, f"{problem.code}: {problem}")
        raise problem

    def _learn_answer(self, trip: Trip, attempt: _Attempt, answer: HopAnswer) -> float:
        """What the answer teaches; returns the seconds that it would have taken to come if nothing had waited."""
        stage, took = trip.process.stage, loop_time() - attempt.started
        self._learn(stage, attempt, routing.answered, answer.message.busy_ms / 1000.0, took)
        self._pace = self._pace.completed(loop_time())
        cost = self._costs[stage].get(attempt.peer, PeerCost())
        crossing = cost.crossing_s(trip.payload_bytes, answer.nbytes, self._pace.period_s or math.inf)
        return min(answer.message.path_ms / 1000.0 + crossing, took)

    def _learn_failure(self, trip: Trip, attempt: _Attempt, error: AgoraError) -> None:
        process, reason = trip.process, f"{error.code}: {error}"
        most, wasted_s = 64, loop_time() - attempt.started
        if isinstance(error, Unavailable):
            most, wasted_s = UNAVAILABLE_FAILURES, 0.0
        self._learn(process.stage, attempt, routing.failed, loop_time(), attempt.charge_s, most, wasted_s)
        trip.failed(attempt.peer, reason)
        self.rerouted += 1
        self._report(events.MicrobatchRerouted(process.microbatch.hex(), process.stage, attempt.peer, reason))

    def _learn(self, stage: int, attempt: _Attempt, update: Callable[..., PeerCost], *args: object) -> None:
        costs = self._costs.get(stage, {})
        if attempt.peer in costs:
            costs[attempt.peer] = update(costs[attempt.peer], *args)

    def blame(self, stage: int, peer: PeerId, error: ProtocolError) -> None:
        """A peer's answer had the right form but could not be used: an offence, and siblings are asked instead."""
        self._report_offence(peer, Offence.USELESS_GRADIENT, f"{error.code}: {error}")
        costs = self._costs.get(stage, {})
        if peer in costs:
            costs[peer] = routing.failed(replace(costs[peer], calls=costs[peer].calls + 1), loop_time(), 0.0)

    def _why(self, trip: Trip, choice: Choice) -> list[str]:
        reasons = [f"{peer[-8:]} {reason}" for peer, reason in trip.reasons.items()][-MOST_REASONS:]
        return reasons or [choice.reason]

    def costs(self, stage: int) -> dict[PeerId, PeerCost]:
        """What is known of each peer of `stage` (for status and tests)."""
        return dict(self._costs.get(stage, {}))
