"""Sends a microbatch to the next stage, and tries other peers until one answers or the deadline passes.

Knows: calls to peers, and when each event of a call happens. Must not know: how peers are compared (routing.py decides
and remembers), or how tensors are computed or sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_HINTS
from agora_protocol.messages import Advance, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.calls import Caller, OnProgress, Reply
from agora.clock import loop_time
from agora.observe import events
from agora.pipeline.barrier import ChangeNotifier
from agora.pipeline.interfaces import HopAnswer, WireShapes
from agora.pipeline.opening import Pace
from agora.pipeline.routing import Attempt, Choice, PathHint, RoutingTable
from agora.swarm.conduct import Offence
from agora.swarm.offences import OffenceLog
from agora.swarm.view import View

MIN_ATTEMPT_S = 0.001
"""Seconds: with less time left, no peer is asked."""
MAX_REASONS = 8
"""How many peers' reasons an Unavailable names: the last ones."""
NEWS_PER_STAGE = 8
"""An attempt brings one progress message for every stage that it passes, more where calls were repeated; more than this
are dropped, because every caller before us would have to pass them on."""
UNAVAILABLE_FAILURES = 3
"""Failures in a row that are counted, at most, of a peer that could not get further downstream: with three it is not
called for a second. It may not be its fault."""


@dataclass(slots=True)
class Trip:
    """One microbatch in `Router.send`: its request and tensors, and what its attempts have taught.

    hint: who has it, at first as the caller says. passed_on: the peer of each stage that our own callers have heard of.
    reasons: why each peer failed.
    """

    process: Process
    tensors: Sequence[WireTensor]
    deadline: float
    on_progress: OnProgress
    hint: PathHint
    passed_on: dict[int, PeerId] = field(default_factory=dict)
    reasons: dict[PeerId, str] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def record_progress(self, news: Advance, callee: PeerId) -> bool:
        """Records a progress message of `callee` in the hint; returns whether it is new to our own callers.

        A callee may speak of itself at its own stage, and of any peer at later stages; anything else is ignored.
        """
        own = news.stage == self.process.stage
        if not (news.peer == callee if own else news.stage > self.process.stage):
            return False
        if own and news.event == "finished":
            self.hint.finished.add(callee)
        is_new = self.passed_on.get(news.stage) != news.peer
        self.hint.peers[news.stage] = self.passed_on[news.stage] = news.peer
        return is_new

    def record_failure(self, peer: PeerId, reason: str) -> None:
        """Records why `peer` failed and removes it from the hint; if it holds the result, at its second failure."""
        if peer not in self.hint.finished or peer in self.reasons:
            self.hint.finished.discard(peer)
            if self.hint.peers.get(self.process.stage) == peer:
                del self.hint.peers[self.process.stage]
        self.reasons[peer] = reason

    def request(self, deadline_ms: int) -> Process:
        """Returns the message of one attempt, with a hint of the nearest stages."""
        ahead = sorted((stage, peer) for stage, peer in self.hint.peers.items() if stage > self.process.stage)
        return replace(self.process, deadline_ms=deadline_ms, hint=tuple(ahead[:MAX_HINTS]))


class Router:
    """Sends microbatches to peers of later stages: chooses each, calls it, and tries another when it fails or is busy.

    offences: records bad answers, and says who must not be called. round_trip_s(peer): returns the seconds measured on
    the idle link, None when unknown.
    """

    def __init__(
        self,
        caller: Caller,
        view_of: Callable[[], View],
        *,
        me: PeerId,
        stage_count: int,
        shapes: WireShapes,
        report: events.Report,
        offences: OffenceLog,
        round_trip_s: Callable[[PeerId], float | None] = lambda peer: None,
    ) -> None:
        self.table = RoutingTable(me, stage_count)
        self._me = me
        self._caller = caller
        self._view_of = view_of
        self.stage_count = stage_count
        self.shapes = shapes
        self._report = report
        self._offences = offences
        self._round_trip_s = round_trip_s
        self._changed = ChangeNotifier()
        self._empty_stages: set[int] = set()
        self._pace = Pace()

    def view_changed(self) -> None:
        """Wakes every microbatch that waits for a peer; call it whenever the membership view has changed."""
        self._changed.notify()

    async def send(
        self, process: Process, tensors: Sequence[WireTensor], deadline: float, on_progress: OnProgress
    ) -> HopAnswer:
        """Sends a microbatch to stage `process.stage` and returns the answer of the peer that computed it.

        tensors: [boundary, tokens]. Tries one peer after another, and waits while no peer serves the stage, until
        `deadline` on the loop's clock; then raises Unavailable. The answer's `path_ms` includes the link to that peer.
        """
        trip = Trip(process, tensors, deadline, on_progress, PathHint(dict(process.hint)))
        while True:
            attempt = await self._next_attempt(trip)
            if (answer := await self._try(trip, attempt)) is not None:
                return answer

    async def _next_attempt(self, trip: Trip) -> Attempt:
        """Chooses the next peer and charges it; waits while none is ready. Raises Unavailable at the deadline."""
        stage = trip.process.stage
        while True:
            now = loop_time()
            choice = self._choose(now, trip)
            if trip.deadline - now < MIN_ATTEMPT_S:
                reasons = [f"{peer[-8:]} {reason}" for peer, reason in trip.reasons.items()][-MAX_REASONS:]
                raise Unavailable(stage, reasons or [choice.reason])
            if choice.peer is not None:
                return self.table.sent(now, stage, choice.peer, trip.payload_bytes, trip.deadline)
            await self._changed.wait(min(trip.deadline, choice.look_again_at))

    def _choose(self, now: float, trip: Trip) -> Choice:
        """Chooses a peer of the stage that is not shut out; reports RouteChanged when none or the first serves it."""
        stage = trip.process.stage
        view = self._view_of()
        replicas, me = view.replicas(stage), view.peers.get(self._me)
        shut_out = {seen.peer: s for seen in replicas if (s := self._offences.shut_out_s(seen.peer)) > 0.0}
        self.table.update(stage, replicas, shut_out.keys(), me.reachability if me is not None else "unknown")
        choice = self.table.choose(now, trip.process.microbatch, stage, trip.payload_bytes, trip.hint)
        if shut_out:  # the end of a shut-out brings a candidate, as a change of the view does
            choice = replace(choice, look_again_at=min(choice.look_again_at, now + min(shut_out.values())))
        is_empty = not self.table.costs(stage)
        if is_empty != (stage in self._empty_stages):
            self._empty_stages ^= {stage}
            self._report(events.RouteChanged(stage, choice.peer or "", choice.reason))
        return choice

    async def _try(self, trip: Trip, attempt: Attempt) -> HopAnswer | None:
        """Makes one call and records its outcome in the table. Returns the answer; None after Busy or a failure."""
        try:
            answer = self._checked(trip, attempt.peer, await self._call(trip, attempt))
        except Busy as refusal:
            self.table.busy(loop_time(), attempt, refusal.retry_after_ms / 1000.0)
            trip.reasons[attempt.peer] = "busy"
        except AgoraError as error:
            self._record_failure(trip, attempt, error)
        except BaseException:  # we leave the call
            self.table.abandoned(attempt)
            raise
        else:
            return self._record_answer(attempt, answer)
        finally:
            self._changed.notify()
        return None

    async def _call(self, trip: Trip, attempt: Attempt) -> Reply:
        """Calls the attempt's peer and returns its reply; passes its progress on to those who called us."""
        stage, peer = attempt.stage, attempt.peer
        limit, counts = NEWS_PER_STAGE * (self.stage_count - stage), Counter[str]()

        def on_progress(news: Advance) -> None:
            """Records one progress message and passes it on if it is new to our callers; ignores it beyond `limit`."""
            counts[news.event] += 1
            if counts[news.event] > limit:
                return
            is_new = trip.record_progress(news, peer)
            if news.peer == peer and news.stage == stage and news.event == "accepted":
                self.table.accepted(loop_time(), attempt, min(news.queue, 1 << 20), self._round_trip_s(peer))
            if is_new:
                trip.on_progress(news)

        request = trip.request(attempt.deadline_ms)
        return await self._caller.call(peer, request, trip.tensors, deadline=attempt.until, on_progress=on_progress)

    def _checked(self, trip: Trip, peer: PeerId, reply: Reply) -> HopAnswer:
        """Returns the reply if it is a well-formed answer; else reports a BAD_ANSWER and raises ProtocolError."""
        message, tensors = reply.message, list(reply.tensors)
        purpose = trip.process.purpose
        expected = 1 if purpose == "train" else 0
        if not isinstance(message, Processed):
            problem = ProtocolError("bad-message", f"answered process with {type(message).__name__}")
        elif len(tensors) != expected:
            problem = ProtocolError("bad-message", f"sent {len(tensors)} tensors where {expected} belong")
        elif tensors and (tensors[0].dtype, tensors[0].shape) != self.shapes.gradient:
            problem = ProtocolError("bad-tensor", f"sent a gradient of {tensors[0].dtype} {tensors[0].shape}")
        elif (wrong := self.shapes.find_problem(message, purpose)) is not None:
            problem = ProtocolError("bad-message", wrong)
        else:
            return HopAnswer(message, tensors, peer)
        self._offences.report_offence(peer, Offence.BAD_ANSWER, f"{problem.code}: {problem}")
        raise problem

    def _record_answer(self, attempt: Attempt, answer: HopAnswer) -> HopAnswer:
        """Records an answer's times in the table; returns the answer with the time on the link added to its path_ms."""
        now = loop_time()
        self._pace = self._pace.completed(now)
        service_s, period_s = answer.message.busy_ms / 1000.0, self._pace.period_s.value or math.inf
        crossing_s = self.table.answered(now, attempt, service_s, answer.nbytes, period_s)
        path_s = min(answer.message.path_ms / 1000.0 + crossing_s, now - attempt.started)
        return replace(answer, message=replace(answer.message, path_ms=1000.0 * path_s))

    def _record_failure(self, trip: Trip, attempt: Attempt, error: AgoraError) -> None:
        """Records a failed call in the table and the trip, and reports MicrobatchRerouted."""
        now, reason = loop_time(), f"{error.code}: {error}"
        if isinstance(error, Unavailable):
            self.table.failed(now, attempt, 0.0, UNAVAILABLE_FAILURES)
        else:
            self.table.failed(now, attempt, now - attempt.started)
        trip.record_failure(attempt.peer, reason)
        self._report(events.MicrobatchRerouted(trip.process.microbatch.hex(), attempt.stage, attempt.peer, reason))

    def report_useless_gradient(self, stage: int, peer: PeerId, error: ProtocolError) -> None:
        """Reports a USELESS_GRADIENT of `peer`, and counts a failure in the table, so that its siblings are asked."""
        self._offences.report_offence(peer, Offence.USELESS_GRADIENT, f"{error.code}: {error}")
        self.table.rejected(loop_time(), stage, peer)
