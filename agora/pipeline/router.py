"""Sends a microbatch to a peer of the next stage: tries one after another, until one answers or the deadline passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_HINTS
from agora_protocol.messages import CallProgress

from agora.core.calls import PeerCaller
from agora.core.clock import loop_time
from agora.core.tasks import ChangeNotifier
from agora.observe import events
from agora.pipeline.flow_control import CompletionPace
from agora.pipeline.load_balancer import Attempt, Choice, LoadBalancer, RouteHint
from agora.pipeline.process_call import HopAnswer, ProcessCall, WireRules
from agora.swarm.peer_score import PeerScore, Violation
from agora.swarm.view import View

MIN_ATTEMPT_S = 0.001  # the router asks no peer when fewer seconds than this are left
MAX_REASONS = 8  # an Unavailable names the reasons of at most this many peers, the last ones
# An attempt passes on at most this many progress messages of one kind for each stage that is left, in all. One is
# usual, more come where calls were repeated. The rest are dropped, because every requester upstream would have to pass
# them on.
MAX_PROGRESS_PER_STAGE = 8
# A peer that answered Unavailable counts at most this many failures in a row: the fault may lie downstream of it. With
# three failures it is not called for a second.
UNAVAILABLE_FAILURES = 3


@dataclass(slots=True)
class RoutedCall:
    """One microbatch in `Router.send`, and what its attempts have shown."""

    call: ProcessCall
    hint: RouteHint  # which peers hold the microbatch; at first those named in the request
    payload_bytes: int = 0  # of all its tensors
    # Stage -> the peer that was last reported upstream.
    reported_upstream: dict[int, PeerId] = field(default_factory=dict)
    reasons: dict[PeerId, str] = field(default_factory=dict)  # peer -> why it last failed or was busy
    failed: set[PeerId] = field(default_factory=set)  # the peers that have failed

    def record_progress(self, call_progress: CallProgress, callee: PeerId, view: View) -> bool:
        """Records which peer holds the microbatch, by `callee`'s message; returns whether that is news upstream.

        A callee may report itself at the request's stage, and at a later stage a peer that holds that stage in `view`.
        All else is ignored. A caller prefers the peers that it is told of, so a liar could steer it to any peer.
        """
        stage = call_progress.stage
        is_own = stage == self.call.request.stage
        if is_own and call_progress.peer != callee:
            return False
        if not is_own and not (
            stage > self.call.request.stage and any(seen.peer == call_progress.peer for seen in view.replicas(stage))
        ):
            return False
        if is_own and call_progress.event == "finished":
            self.hint.finished.add(callee)
        is_new = self.reported_upstream.get(call_progress.stage) != call_progress.peer
        self.hint.peer_by_stage[call_progress.stage] = self.reported_upstream[call_progress.stage] = call_progress.peer
        return is_new

    def record_failure(self, peer: PeerId, reason: str) -> None:
        """Records that and why `peer` failed, and drops it from the hint, so that it is no longer preferred."""
        # A peer that holds the result is dropped only at its second failure: the first may be a broken connection.
        if peer not in self.hint.finished or peer in self.failed:
            self.hint.finished.discard(peer)
            if self.hint.peer_by_stage.get(self.call.request.stage) == peer:
                del self.hint.peer_by_stage[self.call.request.stage]
        self.failed.add(peer)
        self.reasons[peer] = reason


class Router:
    """Sends microbatches to peers of later stages: chooses a peer, calls it, tries another when it fails or is busy.

    peer_score: records bad answers, and knows which peers are suspended. round_trip_s: the seconds measured on the idle
    link to a peer, None when unknown. balancer: what was measured of every peer.
    """

    def __init__(
        self,
        peer_caller: PeerCaller,
        current_view: Callable[[], View],
        *,
        me: PeerId,
        stage_count: int,
        wire_rules: WireRules,
        report: events.Report,
        peer_score: PeerScore,
        round_trip_s: Callable[[PeerId], float | None] = lambda peer: None,
    ) -> None:
        self.balancer = LoadBalancer(me, stage_count)
        self._me = me
        self._peer_caller = peer_caller
        self._current_view = current_view
        self.stage_count = stage_count
        self.wire_rules = wire_rules
        self._report = report
        self._peer_score = peer_score
        self._round_trip_s = round_trip_s
        self._changed = ChangeNotifier()
        self._empty_stages: set[int] = set()
        self._pace = CompletionPace()

    def on_view_changed(self) -> None:
        """Makes every microbatch that waits for a peer choose again; call it whenever the view has changed."""
        self._changed.notify()

    async def send(self, call: ProcessCall) -> HopAnswer:
        """Sends a microbatch to a peer of stage `call.request.stage`, and returns the checked answer.

        Tries one peer after another, never two at a time, and waits while none can be asked. Raises Unavailable at the
        deadline. The answer's `peer` is the one that was called, and its `path_ms` includes the time on that link.
        """
        payload_bytes = sum(tensor.nbytes for tensor in call.tensors)
        routed = RoutedCall(call, RouteHint(dict(call.request.hint)), payload_bytes)
        while True:
            attempt = await self._next_attempt(routed)
            try:
                answer = await self._call(routed, attempt)
            except Busy as refusal:
                self.balancer.record_busy(loop_time(), attempt, refusal.retry_after_ms / 1000.0)
                routed.reasons[attempt.peer] = "busy"
            except AgoraError as error:
                self._record_failure(routed, attempt, error)
            except BaseException:  # this side gives the call up
                self.balancer.record_abandoned(attempt)
                raise
            else:
                return self._record_answer(attempt, answer)
            finally:
                self._changed.notify()

    async def _next_attempt(self, routed: RoutedCall) -> Attempt:
        stage, deadline = routed.call.request.stage, routed.call.deadline
        while True:
            now = loop_time()
            choice = self._choose(now, routed)
            if deadline - now < MIN_ATTEMPT_S:
                reasons = [f"{peer[-8:]} {reason}" for peer, reason in routed.reasons.items()][-MAX_REASONS:]
                raise Unavailable(stage, reasons or [choice.reason])
            if choice.peer is not None:
                return self.balancer.record_sent(now, stage, choice.peer, routed.payload_bytes, deadline)
            await self._changed.wait(min(deadline, choice.look_again_at))

    def _choose(self, now: float, routed: RoutedCall) -> Choice:
        stage = routed.call.request.stage
        view = self._current_view()
        replicas = view.replicas(stage)
        me = view.peers.get(self._me)
        waits_s = {replica.peer: self._peer_score.suspended_s(replica.peer) for replica in replicas}
        suspended_s = {peer: wait_s for peer, wait_s in waits_s.items() if wait_s > 0.0}
        self.balancer.update(stage, replicas, suspended_s.keys(), me.reachability if me is not None else "unknown")
        choice = self.balancer.choose(now, routed.call.request.microbatch, stage, routed.payload_bytes, routed.hint)
        if suspended_s:  # the end of a suspension brings a candidate, as a change of the view does
            choice = replace(choice, look_again_at=min(choice.look_again_at, now + min(suspended_s.values())))
        is_empty = not self.balancer.callees(stage)
        if is_empty != (stage in self._empty_stages):
            self._empty_stages ^= {stage}
            self._report(events.RouteChanged(stage, is_empty, choice.peer or "", choice.reason))
        return choice

    async def _call(self, routed: RoutedCall, attempt: Attempt) -> HopAnswer:
        stage, peer = attempt.stage, attempt.peer
        limit = MAX_PROGRESS_PER_STAGE * (self.stage_count - stage)
        counts = Counter[str]()

        def on_progress(call_progress: CallProgress) -> None:
            counts[call_progress.event] += 1
            if counts[call_progress.event] > limit:
                return
            is_new = routed.record_progress(call_progress, peer, self._current_view())
            if call_progress.peer == peer and call_progress.stage == stage:
                now, queue = loop_time(), min(call_progress.queue, 1 << 20)
                if call_progress.event == "accepted":
                    self.balancer.record_accepted(now, attempt, queue, self._round_trip_s(peer))
                elif call_progress.event == "finished":
                    self.balancer.record_queue(now, attempt, queue)
            if is_new:
                routed.call.on_progress(call_progress)

        holders_ahead = sorted((later, holder) for later, holder in routed.hint.peer_by_stage.items() if later > stage)
        request = replace(routed.call.request, deadline_ms=attempt.deadline_ms, hint=tuple(holders_ahead[:MAX_HINTS]))
        tensors = routed.call.tensors
        reply = await self._peer_caller.call(peer, request, tensors, deadline=attempt.until, on_progress=on_progress)
        try:
            return self.wire_rules.check_answer(reply, request.purpose, peer, request.codec)
        except ProtocolError as problem:
            self._peer_score.report_violation(peer, Violation.BAD_ANSWER, f"{problem.code}: {problem}")
            raise

    def _record_answer(self, attempt: Attempt, answer: HopAnswer) -> HopAnswer:
        now = loop_time()
        self._pace = self._pace.after_completion(now)
        period_s = self._pace.period_s.value or math.inf
        service_s = answer.message.busy_ms / 1000.0
        crossing_s = self.balancer.record_answered(now, attempt, service_s, answer.nbytes, period_s)
        # The peer itself reports the path behind it. That counts up to the time that the whole call took.
        latency_s = min(answer.message.path_ms / 1000.0 + crossing_s, now - attempt.started)
        return replace(answer, message=replace(answer.message, path_ms=1000.0 * latency_s), wire_s=crossing_s)

    def _record_failure(self, routed: RoutedCall, attempt: Attempt, error: AgoraError) -> None:
        now = loop_time()
        reason = f"{error.code}: {error}"
        if isinstance(error, Unavailable):
            self.balancer.record_failed(now, attempt, 0.0, UNAVAILABLE_FAILURES)
        else:
            self.balancer.record_failed(now, attempt, now - attempt.started)
        routed.record_failure(attempt.peer, reason)
        name = routed.call.request.microbatch.hex()
        self._report(events.MicrobatchRerouted(name, attempt.stage, attempt.peer, reason))

    def report_unusable_gradient(self, stage: int, peer: PeerId, error: ProtocolError) -> None:
        """Records that `peer` sent a useless gradient, so that the router asks other peers of `stage` next."""
        self._peer_score.report_violation(peer, Violation.USELESS_GRADIENT, f"{error.code}: {error}")
        self.balancer.record_rejected(loop_time(), stage, peer)
