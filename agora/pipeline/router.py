"""Sends a microbatch to the next stage, and tries other peers until one answers or the deadline passes.

Knows: calls to peers, and when each event of a call happens. Must not know: how peers are compared (peer_choice.py
decides, routing.py remembers), or how tensors are computed or sent.
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
from agora.pipeline.peer_choice import Choice, PathHint
from agora.pipeline.routing import Attempt, RoutingTable
from agora.swarm.conduct import Offence
from agora.swarm.offences import OffenceLog
from agora.swarm.view import View

MIN_ATTEMPT_S = 0.001
"""Seconds: with less time left, no peer is asked."""
MAX_REASONS = 8
"""Number of peers whose reasons an Unavailable names; the last ones."""
NEWS_PER_STAGE = 8
"""Maximum number of progress messages of one kind passed on per stage in an attempt. One is usual, more come where
calls were repeated; the rest are dropped, because every caller upstream would have to pass them on."""
UNAVAILABLE_FAILURES = 3
"""Maximum number of failures in a row that count of a peer that found no peer downstream, which may not be its fault.
With three failures it is not called for a second."""


@dataclass(slots=True)
class RoutedCall:
    """One microbatch in `Router.send`: its request and tensors, and what its attempts have shown.

    hint: which peers hold it; at first those that the caller names. passed_on: by stage, the peer of which upstream has
    heard. reasons: why each peer failed or was busy, by id. failed: those that failed.
    """

    process: Process
    tensors: Sequence[WireTensor]
    deadline: float
    on_progress: OnProgress
    hint: PathHint
    passed_on: dict[int, PeerId] = field(default_factory=dict)
    reasons: dict[PeerId, str] = field(default_factory=dict)
    failed: set[PeerId] = field(default_factory=set)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def record_progress(self, news: Advance, callee: PeerId) -> bool:
        """Records a progress message of `callee` in the hint.

        Returns whether upstream has not yet heard of this peer at that stage. A callee may report itself at its own
        stage, and any peer at later stages; anything else is ignored, with False.
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
        """Records why `peer` failed and drops it from the hint; one that holds the result, only if it failed before."""
        if peer not in self.hint.finished or peer in self.failed:
            self.hint.finished.discard(peer)
            if self.hint.peers.get(self.process.stage) == peer:
                del self.hint.peers[self.process.stage]
        self.failed.add(peer)
        self.reasons[peer] = reason

    def request(self, deadline_ms: int) -> Process:
        """Returns the Process message of one attempt, with hints for the nearest MAX_HINTS later stages."""
        ahead = sorted((stage, peer) for stage, peer in self.hint.peers.items() if stage > self.process.stage)
        return replace(self.process, deadline_ms=deadline_ms, hint=tuple(ahead[:MAX_HINTS]))


class Router:
    """Sends microbatches to peers of later stages: chooses a peer, calls it, tries another when it fails or is busy.

    offences: records bad answers, and says which peers must not be called. round_trip_s(peer): returns the seconds
    measured on the idle link, None when unknown. table: what was measured of every peer.
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

    def on_view_changed(self) -> None:
        """Wakes every microbatch that waits for a peer; must be called whenever the membership view has changed."""
        self._changed.notify()

    async def send(
        self, process: Process, tensors: Sequence[WireTensor], deadline: float, on_progress: OnProgress
    ) -> HopAnswer:
        """Sends a microbatch to a peer of stage `process.stage`, and returns the answer of the peer that computed it.

        tensors: [boundary, tokens]. Tries one peer after another, and waits while no peer serves the stage. Raises
        Unavailable at the loop time `deadline`. The answer's `path_ms` includes the time on the link to that peer.
        """
        routed = RoutedCall(process, tensors, deadline, on_progress, PathHint(dict(process.hint)))
        while True:
            attempt = await self._next_attempt(routed)
            if (answer := await self._try(routed, attempt)) is not None:
                return answer

    async def _next_attempt(self, routed: RoutedCall) -> Attempt:
        """Waits until a peer is ready, charges it and returns the attempt. Raises Unavailable at the deadline."""
        stage = routed.process.stage
        while True:
            now = loop_time()
            choice = self._choose(now, routed)
            if routed.deadline - now < MIN_ATTEMPT_S:
                reasons = [f"{peer[-8:]} {reason}" for peer, reason in routed.reasons.items()][-MAX_REASONS:]
                raise Unavailable(stage, reasons or [choice.reason])
            if choice.peer is not None:
                return self.table.record_sent(now, stage, choice.peer, routed.payload_bytes, routed.deadline)
            await self._changed.wait(min(routed.deadline, choice.look_again_at))

    def _choose(self, now: float, routed: RoutedCall) -> Choice:
        """Chooses a peer of the stage that is not shut out. Updates the table from the view first.

        Reports RouteChanged when the last peer of the stage is gone, and when there is one again.
        """
        stage = routed.process.stage
        view = self._view_of()
        replicas, me = view.replicas(stage), view.peers.get(self._me)
        shut_out = {seen.peer: s for seen in replicas if (s := self._offences.shut_out_s(seen.peer)) > 0.0}
        self.table.update(stage, replicas, shut_out.keys(), me.reachability if me is not None else "unknown")
        choice = self.table.choose(now, routed.process.microbatch, stage, routed.payload_bytes, routed.hint)
        if shut_out:  # the end of a shut-out brings a candidate, as a change of the view does
            choice = replace(choice, look_again_at=min(choice.look_again_at, now + min(shut_out.values())))
        is_empty = not self.table.costs(stage)
        if is_empty != (stage in self._empty_stages):
            self._empty_stages ^= {stage}
            self._report(events.RouteChanged(stage, is_empty, choice.peer or "", choice.reason))
        return choice

    async def _try(self, routed: RoutedCall, attempt: Attempt) -> HopAnswer | None:
        """Makes one call and records its outcome in the table; returns the answer, or None after Busy or a failure.

        A cancelled call is recorded as abandoned. Wakes the microbatches that wait for a peer in any case.
        """
        try:
            answer = self._check_reply(routed, attempt.peer, await self._call(routed, attempt))
        except Busy as refusal:
            self.table.record_busy(loop_time(), attempt, refusal.retry_after_ms / 1000.0)
            routed.reasons[attempt.peer] = "busy"
        except AgoraError as error:
            self._record_failure(routed, attempt, error)
        except BaseException:  # this side leaves the call
            self.table.record_abandoned(attempt)
            raise
        else:
            return self._record_answer(attempt, answer)
        finally:
            self._changed.notify()
        return None

    async def _call(self, routed: RoutedCall, attempt: Attempt) -> Reply:
        """Calls the attempt's peer and returns its reply; passes its progress messages on to this peer's callers."""
        stage, peer = attempt.stage, attempt.peer
        limit, counts = NEWS_PER_STAGE * (self.stage_count - stage), Counter[str]()

        def on_progress(news: Advance) -> None:
            """Records one progress message and passes it on if it is new upstream; ignores those beyond `limit`."""
            counts[news.event] += 1
            if counts[news.event] > limit:
                return
            is_new = routed.record_progress(news, peer)
            if news.peer == peer and news.stage == stage:
                self._record_news(attempt, news)
            if is_new:
                routed.on_progress(news)

        request = routed.request(attempt.deadline_ms)
        return await self._caller.call(peer, request, routed.tensors, deadline=attempt.until, on_progress=on_progress)

    def _record_news(self, attempt: Attempt, news: Advance) -> None:
        """Records in the table what a peer says of its own work and queue; other progress changes nothing."""
        now, queue = loop_time(), min(news.queue, 1 << 20)
        if news.event == "accepted":
            self.table.record_accepted(now, attempt, queue, self._round_trip_s(attempt.peer))
        elif news.event == "finished":
            self.table.record_queue(now, attempt, queue)

    def _check_reply(self, routed: RoutedCall, peer: PeerId, reply: Reply) -> HopAnswer:
        """Returns a well-formed reply as a HopAnswer; for any other reports BAD_ANSWER and raises ProtocolError."""
        message, tensors = reply.message, list(reply.tensors)
        purpose = routed.process.purpose
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
        """Records an answer's times in the table; returns the answer with the time on the link added to `path_ms`."""
        now = loop_time()
        self._pace = self._pace.after_completion(now)
        service_s, period_s = answer.message.busy_ms / 1000.0, self._pace.period_s.value or math.inf
        crossing_s = self.table.record_answered(now, attempt, service_s, answer.nbytes, period_s)
        path_s = min(answer.message.path_ms / 1000.0 + crossing_s, now - attempt.started)
        return replace(answer, message=replace(answer.message, path_ms=1000.0 * path_s))

    def _record_failure(self, routed: RoutedCall, attempt: Attempt, error: AgoraError) -> None:
        """Records a failed call in the table and in `routed`, and reports MicrobatchRerouted."""
        now, reason = loop_time(), f"{error.code}: {error}"
        if isinstance(error, Unavailable):
            self.table.record_failed(now, attempt, 0.0, UNAVAILABLE_FAILURES)
        else:
            self.table.record_failed(now, attempt, now - attempt.started)
        routed.record_failure(attempt.peer, reason)
        self._report(events.MicrobatchRerouted(routed.process.microbatch.hex(), attempt.stage, attempt.peer, reason))

    def report_unusable_gradient(self, stage: int, peer: PeerId, error: ProtocolError) -> None:
        """Reports a USELESS_GRADIENT of `peer`, and counts a failure in the table, so that other replicas are asked."""
        self._offences.report_offence(peer, Offence.USELESS_GRADIENT, f"{error.code}: {error}")
        self.table.record_rejected(loop_time(), stage, peer)
