"""A microbatch's way through simulated peers: origins that open them, and the calls of hop and router, as events.

The decisions are those of pipeline/flow_control.py and load_balancer.py; hops, retries and time-outs follow
pipeline/hop.py, router.py and origin.py. Only the jitter of links is drawn at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from agora_protocol import limits
from agora_protocol.ids import microbatch_id

from agora.pipeline import flow_control
from agora.pipeline.flow_control import SendInputs
from agora.pipeline.hop import is_hopeless
from agora.pipeline.load_balancer import MAX_FAILURES, deadline_for_others
from agora.pipeline.origin import MAX_RETRY_S, MAX_TIMEOUT_S, MIN_TIMEOUT_S, RETRY_S, TIMEOUT_FACTOR
from agora.pipeline.router import MIN_ATTEMPT_S, UNAVAILABLE_FAILURES
from agora.pipeline.work_ledger import CLOSED_RETRY_MS, MAX_RETRY_MS, MIN_RETRY_MS
from agora.planning.simulator.event_queue import EventQueue, TimingWheel
from agora.planning.simulator.measurements import Measurements
from agora.planning.simulator.simulated_machine import JobOrder, Workload
from agora.planning.simulator.simulated_peer import (
    Call,
    OriginState,
    Presence,
    SimulatedMicrobatch,
    SimulatedPeer,
    Visit,
)

KEPT_ANSWERS = 1024  # maximum number of answers that a peer keeps for repeats
SILENCE_TIMEOUT_S = float(limits.PING_AFTER_SILENCE_S + limits.PING_ANSWER_S)  # then a hung peer's connections break


class HopSimulation:
    """The way of all microbatches from peer to peer, as events in `events`.

    find: returns the peer with an id. root: the origins, told of the end of each attempt.
    """

    def __init__(
        self,
        events: EventQueue,
        workload: Workload,
        measurements: Measurements,
        find: Callable[[str], SimulatedPeer],
        rng: random.Random,
        root: OriginSimulation,
    ) -> None:
        self._events = events
        self._workload = workload
        self._measurements = measurements
        self._find = find
        self._rng = rng
        self._deadlines: TimingWheel[Call] = TimingWheel(events, self._on_deadline)
        self._origin_simulation = root

    # --- a visit begins

    def enter(self, microbatch: SimulatedMicrobatch, deadline: float) -> None:
        """Begins an attempt at the origin's own hop. deadline: in simulated seconds."""
        peer = microbatch.origin
        kept = peer.answers.get((microbatch.id, 0))
        if kept is not None:
            kept.is_at_origin = True
            self._report_completed(kept)
            return
        visit = Visit(microbatch, peer, 0, deadline)
        visit.is_at_origin = True
        if (retry_s := self._refusal_s(peer)) is not None:
            self._origin_simulation.on_unfinished(visit, retry_s, False)
        else:
            self._begin(visit)

    def _arrive(self, call: Call) -> None:
        peer, microbatch, stage = call.callee, call.caller.microbatch, call.attempt.stage
        if peer.presence is Presence.HUNG:
            # A hung peer's connection stays open: the caller notices nothing before the pings go unanswered.
            self._events.after(SILENCE_TIMEOUT_S, self._on_failed, call)
        if call.ended or not peer.is_up:
            return  # the caller learns it from the end of the connection
        key = (microbatch.id, stage)
        if (kept := peer.answers.get(key)) is not None:  # as the work ledger: a repeat is answered, not counted twice
            call.visit = kept
            self._send_answer(kept, call)
            return
        visit = peer.visits.get(key)
        if visit is None:
            if peer.has_state and (peer.span is None or stage not in peer.span):
                self._reply(call, self._on_failed, call)
                return
            if (retry_s := self._refusal_s(peer)) is not None:
                self._reply(call, self._on_busy, call, retry_s)
                return
            visit = Visit(microbatch, peer, stage, self._events.now + call.attempt.deadline_ms / 1000.0)
            if is_hopeless(visit.deadline - self._events.now, peer.busy_s.value or 0.0):
                self._reply(call, self._on_failed, call, True)
                return
            self._begin(visit)
        visit.callers.append(call)
        call.visit = visit
        self._reply(call, self._on_accepted, call, peer.device.queue_length)

    def _refusal_s(self, peer: SimulatedPeer) -> float | None:
        if peer.presence is not Presence.SERVING:
            return CLOSED_RETRY_MS / 1000.0
        if len(peer.visits) < self._workload.slots:
            return None
        # One of the slots should be free after a mean visit's share; within the limits of the work ledger's answer.
        free_in_ms = 1000.0 * (peer.slot_s.value or 0.0) / self._workload.slots
        return min(max(free_in_ms, MIN_RETRY_MS), MAX_RETRY_MS) / 1000.0

    def _begin(self, visit: Visit) -> None:
        peer, workload = visit.peer, self._workload
        peer.visits[visit.key] = visit
        visit.started = self._events.now
        visit.microbatch.path.peer_by_stage[visit.entry_stage] = peer.id
        seconds = workload.seconds(visit.entry_stage, visit.last, peer.equipment.speed)
        if visit.last == workload.stages - 1:
            visit.committed = True  # forward and backward are one job, which nothing stops once it is queued
            peer.device.submit(JobOrder.FORWARD, seconds, self._on_finished, visit)
        else:
            peer.device.submit(JobOrder.FORWARD, seconds * workload.forward_share, self._on_forward_done, visit)

    # --- on to the next stage

    def _on_forward_done(self, visit: Visit) -> None:
        if visit.state == "forward":
            visit.state = "routing"
            self._route(visit)

    def _route(self, visit: Visit) -> bool:
        # True: it was sent on or has ended. False: it waits until the balancer says to look again.
        peer, now, stage = visit.peer, self._events.now, visit.last + 1
        until = deadline_for_others(now, visit.deadline, 1.5 * (peer.backward_s.value or 0.0))
        if until - now < MIN_ATTEMPT_S:
            self._give_up(visit)
            return True
        payload = int(self._workload.boundary_bytes)
        peer.balancer.update(stage, peer.replicas)
        choice = peer.balancer.choose(now, visit.microbatch.id, stage, payload, visit.microbatch.path)
        if choice.peer is not None:
            self._call(visit, self._find(choice.peer), payload, until)
            return True
        peer.waiting.append(visit)
        wake_at = min(until, choice.look_again_at)
        # One wake-up for all that wait here: one for each would be quadratic in the length of the queue.
        if wake_at < peer.wakes_at:
            peer.wakes_at = wake_at
            self._events.at(wake_at, self._wake, peer, wake_at)
        return False

    def _wake(self, peer: SimulatedPeer, wakes_at: float) -> None:
        if peer.wakes_at == wakes_at:
            peer.wakes_at = math.inf
            self.route_waiting(peer)

    def route_waiting(self, peer: SimulatedPeer) -> None:
        """Routes the visits that wait at a peer, in order, until one still has to wait; none if the peer is not up."""
        for _ in range(len(peer.waiting) if peer.is_up else 0):
            visit = peer.waiting.popleft()
            if visit.state == "routing" and visit.call is None and not self._route(visit):
                peer.waiting.rotate(1)  # it stays the first
                return

    def _call(self, visit: Visit, callee: SimulatedPeer, payload: int, until: float) -> None:
        now, peer = self._events.now, visit.peer
        attempt = peer.balancer.record_sent(now, visit.last + 1, callee.id, payload, until)
        call = Call(visit, callee, attempt)
        visit.call, visit.state = call, "downstream"
        self._deadlines.add(call, attempt.until)
        self._measurements.messages += 1
        arrival = peer.equipment.link.send(callee.equipment.link, payload, now, self._rng)
        if callee.presence is Presence.GONE:  # no process listens there any more
            self._events.after(peer.equipment.link.round_trip_to(callee.equipment.link), self._on_failed, call)
            return
        callee.calls_in[call] = None
        self._events.at(arrival, self._arrive, call)

    # --- what comes back

    def _reply(self, call: Call, then: Callable[..., None], *args: object) -> None:
        self._measurements.messages += 1
        self._events.after(call.callee.equipment.link.outward_delay_s(), then, *args)

    def _on_accepted(self, call: Call, queue: int) -> None:
        visit = call.caller
        if call.ended or not visit.peer.is_up:
            return
        ping_s = visit.peer.equipment.link.round_trip_to(call.callee.equipment.link)
        visit.peer.balancer.record_accepted(self._events.now, call.attempt, queue, ping_s)
        self._measurements.messages += sum(stage < visit.entry_stage for stage in visit.microbatch.path.peer_by_stage)

    def _on_busy(self, call: Call, retry_s: float) -> None:
        if self._end(call):
            call.caller.peer.balancer.record_busy(self._events.now, call.attempt, retry_s)
            self._reroute(call)

    def _on_failed(self, call: Call, is_unavailable: bool = False) -> None:
        if self._end(call):
            now, attempt = self._events.now, call.attempt
            # Unavailable may not be the callee's fault: no time counts as wasted, and its back-off stays short.
            wasted_s = 0.0 if is_unavailable else now - attempt.started
            most = UNAVAILABLE_FAILURES if is_unavailable else MAX_FAILURES
            call.caller.peer.balancer.record_failed(now, attempt, wasted_s, most)
            path = call.caller.microbatch.path.peer_by_stage
            if path.get(attempt.stage) == call.callee.id:  # a later attempt must not be sent there first
                del path[attempt.stage]
            self._measurements.rerouted += 1
            self._reroute(call)

    def _on_deadline(self, call: Call) -> None:
        if not call.ended and call.caller.peer.is_up:
            callee_visit = call.visit
            self._on_failed(call)
            self._forget_caller(callee_visit, call)

    def _end(self, call: Call) -> bool:
        if call.ended:
            return False
        call.ended = True
        self._deadlines.remove(call)
        call.callee.calls_in.pop(call, None)
        return call.caller.peer.is_up and call.caller.state == "downstream" and call.caller.call is call

    def _reroute(self, call: Call) -> None:
        visit = call.caller
        visit.call, visit.state = None, "routing"
        self._route(visit)
        self.route_waiting(visit.peer)

    def _on_answered(self, call: Call, queue: int) -> None:
        if not self._end(call):
            return
        now, visit, callee, peer = self._events.now, call.caller, call.visit, call.caller.peer
        assert callee is not None, "an answer comes from a visit"
        callee_s = self._workload.seconds(callee.entry_stage, callee.last, callee.peer.equipment.speed)
        service_s = callee_s * callee.peer.device.slowdown
        peer.pace = peer.pace.after_completion(now)
        period_s = peer.pace.period_s.value or math.inf
        peer.balancer.record_queue(now, call.attempt, queue)
        nbytes = int(self._workload.gradient_bytes)
        crossing_s = peer.balancer.record_answered(now, call.attempt, service_s, nbytes, period_s)
        # The way without queues, but never longer than what was really measured.
        visit.downstream_latency_s = min(callee.latency_s + crossing_s, now - call.attempt.started)
        visit.state, visit.committed, visit.queued_at = "backward", True, now
        seconds = self._workload.seconds(visit.entry_stage, visit.last, peer.equipment.speed)
        seconds *= 1.0 - self._workload.forward_share
        peer.device.submit(JobOrder.BACKWARD, seconds, self._on_backward_done, visit)
        self.route_waiting(peer)

    def _on_backward_done(self, visit: Visit) -> None:
        visit.peer.backward_s = visit.peer.backward_s.with_sample(self._events.now - visit.queued_at)
        self._on_finished(visit)

    def _on_finished(self, visit: Visit) -> None:
        if visit.state == "cancelled":
            return
        peer, now = visit.peer, self._events.now
        own_s = self._workload.seconds(visit.entry_stage, visit.last, peer.equipment.speed) * peer.device.slowdown
        visit.latency_s, visit.state = own_s + visit.downstream_latency_s, "answered"
        peer.busy_s = peer.busy_s.with_sample(own_s)
        peer.latencies_s.append(visit.latency_s)
        peer.slot_s = peer.slot_s.with_sample(now - visit.started)
        self._measurements.record_visit(visit)
        peer.visits.pop(visit.key, None)
        self._keep_answer(visit)
        callers, visit.callers, visit.call = visit.callers, [], None  # no cycles, so that memory is freed now
        for call in callers:
            self._send_answer(visit, call)
        if visit.is_at_origin:
            self._report_completed(visit)

    def _keep_answer(self, visit: Visit) -> None:
        answers = visit.peer.answers
        answers[visit.key] = visit
        visit.microbatch.kept.append(visit)
        if len(answers) > KEPT_ANSWERS:
            del answers[next(iter(answers))]

    def _send_answer(self, visit: Visit, call: Call) -> None:
        if call.ended:
            return
        self._measurements.messages += 2  # "finished" plus the answer
        link, to = visit.peer.equipment.link, call.caller.peer.equipment.link
        arrival = link.send(to, self._workload.gradient_bytes, self._events.now, self._rng)
        self._events.at(arrival, self._on_answered, call, visit.peer.device.queue_length)

    # --- visits that end without an answer

    def _give_up(self, visit: Visit) -> None:
        callers = list(visit.callers)
        self._cancel(visit)
        for call in callers:
            self._reply(call, self._on_failed, call, True)
        if visit.is_at_origin:
            self._origin_simulation.on_unfinished(visit, 0.0, True)

    def _cancel(self, visit: Visit) -> None:
        visit.peer.visits.pop(visit.key, None)
        if visit.state == "forward":
            visit.peer.device.discard(visit)
        visit.state = "cancelled"
        call, visit.call = visit.call, None
        if call is not None and not call.ended:
            call.ended = True
            self._deadlines.remove(call)
            call.callee.calls_in.pop(call, None)
            if visit.peer.is_up:
                visit.peer.balancer.record_abandoned(call.attempt)
            self._forget_caller(call.visit, call)

    def _forget_caller(self, visit: Visit | None, call: Call) -> None:
        if visit is None or call not in visit.callers:
            return
        visit.callers.remove(call)
        if not visit.callers and not visit.committed and not visit.is_at_origin and visit.state != "answered":
            self._cancel(visit)

    def hand_back(self, peer: SimulatedPeer) -> None:
        """Ends all visits of a peer that leaves or moves; their callers get Unavailable."""
        for visit in list(peer.visits.values()):
            self._give_up(visit)
        peer.waiting.clear()

    def break_connections(self, peer: SimulatedPeer) -> None:
        """Fails every call to a peer that has gone, one delay of its link later; cancels its visits, and work done for
        no other caller.
        """
        for call in list(peer.calls_in):
            self._events.after(peer.equipment.link.outward_delay_s(), self._on_failed, call)
        for visit in list(peer.visits.values()):
            self._cancel(visit)
        peer.waiting.clear()

    def _report_completed(self, visit: Visit) -> None:
        kept, visit.microbatch.kept = visit.microbatch.kept, []
        for answered in kept:
            answered.peer.answers.pop(answered.key, None)
        self._origin_simulation.on_completed(visit)


# The time for an attempt, and the time before it, double at most this often, so that no number overflows.
MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class OriginRules:
    """The settings of all origins, the peers that hold stage 0 and open microbatches.

    stages: number of stages of the run.
    slots: maximum number of microbatches that an origin has in flight.
    max_in_flight: the manifest's; 0 to measure it.
    staleness: the manifest's bound on what all origins have in flight, in steps; 0 for no bound.
    step_microbatches: a step's size in microbatches; with 0 `staleness` is no bound.
    first_timeout_s: the time limit of an attempt before any attempt was measured.
    traffic: whether microbatches are opened at all.
    """

    stages: int
    slots: int
    max_in_flight: int = 0
    staleness: float = 0.0
    step_microbatches: int = 0
    first_timeout_s: float = MAX_TIMEOUT_S
    traffic: bool = True


class OriginSimulation:
    """The origins of a simulation: opens microbatches at every peer that serves stage 0, and sends them into `hops`.

    find: returns the peer with an id. rng: for the jitter of links. origins: returns how many peers serve stage 0.
    """

    def __init__(
        self,
        events: EventQueue,
        workload: Workload,
        rules: OriginRules,
        measurements: Measurements,
        find: Callable[[str], SimulatedPeer],
        rng: random.Random,
        origins: Callable[[], int],
    ) -> None:
        self._events = events
        self.hops = HopSimulation(events, workload, measurements, find, rng, self)
        self._rules = rules
        self._measurements = measurements
        self._origins = origins

    def begin(self, peer: SimulatedPeer) -> None:
        peer.origin = OriginState(flow_control.MIN_PER_STAGE * self._rules.stages)
        if self._rules.traffic:
            self._open(peer)

    def _open(self, peer: SimulatedPeer) -> None:
        state = peer.origin
        while state is not None and peer.presence is Presence.SERVING:
            now = self._events.now
            inputs = SendInputs(
                latency_s=median(peer.latencies_s) if peer.latencies_s else None,
                staleness=self._staleness_ceiling(peer),
            )
            state.window = self._window(state, inputs)
            decision = flow_control.next_send(now, state.allotment, state.window, inputs, state.open_count)
            if decision.action != "open":
                return
            state.open_count += 1
            identity = microbatch_id(peer.number.to_bytes(8, "big"), state.next_number)
            state.next_number += 1
            self._attempt(SimulatedMicrobatch(identity, peer, now))

    def _window(self, state: OriginState, inputs: SendInputs) -> flow_control.SendWindow:
        rules = self._rules
        if rules.max_in_flight:
            limit = min(rules.max_in_flight, rules.slots)
            return flow_control.SendWindow(limit, f"{limit}: schedule.max_in_flight")
        ceiling = min(state.window_ceiling, rules.slots)
        return flow_control.measured_window(
            inputs.latency_s, state.pace.period_s.value, rules.stages, ceiling, inputs.staleness
        )

    def _staleness_ceiling(self, peer: SimulatedPeer) -> flow_control.StalenessCeiling:
        rules = self._rules
        if not rules.staleness or not rules.step_microbatches:
            return flow_control.NO_CEILING
        origins = max(1, self._origins())
        position = peer.number % origins
        return flow_control.staleness_ceiling(
            rules.staleness, rules.step_microbatches, position, origins, predicts=True
        )

    def _attempt(self, microbatch: SimulatedMicrobatch) -> None:
        peer = microbatch.origin
        if peer.origin is None or not peer.is_up:
            return
        usual_s = peer.origin.attempt_s.value
        backoff_factor = 2.0 ** min(microbatch.attempts, MAX_DOUBLINGS)
        first_timeout_s = self._rules.first_timeout_s
        if usual_s is not None:
            first_timeout_s = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * usual_s)
        microbatch.attempts += 1
        self.hops.enter(microbatch, self._events.now + min(MAX_TIMEOUT_S, first_timeout_s * backoff_factor))

    def on_completed(self, visit: Visit) -> None:
        """Opens further ones there; the ceiling of the window rises by 1, to at most twice the window."""
        peer = visit.peer
        state = peer.origin
        now = self._events.now
        self._measurements.completed += 1
        if state is None:
            return
        state.open_count -= 1
        state.attempt_s = state.attempt_s.with_sample(now - visit.started)
        state.pace = state.pace.after_completion(now)
        state.window_ceiling = min(state.window_ceiling + 1, 2 * state.window.limit)
        self._open(peer)

    def on_unfinished(self, visit: Visit, retry_s: float, is_failure: bool) -> None:
        """Another attempt after the longer of `retry_s` and RETRY_S doubled with each, at most MAX_RETRY_S."""
        peer, microbatch = visit.peer, visit.microbatch
        state = peer.origin
        if state is None or peer.presence is not Presence.SERVING:
            self._measurements.dropped += 1
            return
        if is_failure:
            state.pace = state.pace.after_interruption()
            self._measurements.rerouted += 1
        wait_s = max(retry_s, RETRY_S * 2.0 ** min(microbatch.attempts - 1, MAX_DOUBLINGS))
        self._events.after(min(wait_s, MAX_RETRY_S), self._attempt, microbatch)
