"""The peers that hold stage 0 of a simulation, and the microbatches that they open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from agora_protocol.ids import microbatch_id

from agora.pipeline import flow_control
from agora.pipeline.flow_control import SendInputs
from agora.pipeline.origin import MAX_RETRY_S, MAX_TIMEOUT_S, MIN_TIMEOUT_S, RETRY_S, TIMEOUT_FACTOR
from agora.planning.simulator.event_queue import EventQueue
from agora.planning.simulator.hop_simulation import HopSimulation
from agora.planning.simulator.measurements import Measurements
from agora.planning.simulator.simulated_peer import OriginState, Presence, SimulatedMicrobatch, SimulatedPeer, Visit

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

    It makes itself the `root` of `hops`. origins: returns how many peers serve stage 0.
    """

    def __init__(
        self,
        events: EventQueue,
        hops: HopSimulation,
        rules: OriginRules,
        measurements: Measurements,
        origins: Callable[[], int],
    ) -> None:
        self._events = events
        self._hops = hops
        self._rules = rules
        self._measurements = measurements
        self._origins = origins
        hops.root = self

    def begin(self, peer: SimulatedPeer) -> None:
        """Makes a peer that has begun to serve stage 0 an origin; if rules.traffic, opens its first microbatches."""
        peer.origin = OriginState(flow_control.PER_STAGE * self._rules.stages)
        if self._rules.traffic:
            self._open(peer)

    def _open(self, peer: SimulatedPeer) -> None:
        # Opens microbatches at a peer, one after the other, until flow_control.next_send decides otherwise.
        state = peer.origin
        while state is not None and peer.presence is Presence.SERVING:
            now = self._events.now
            inputs = SendInputs(
                path_s=median(peer.paths_s) if peer.paths_s else None, staleness=self._staleness_ceiling(peer)
            )
            state.credit = self._credit(state, inputs)
            decision = flow_control.next_send(now, state.quota, state.credit, inputs, state.open_count)
            if decision.action != "open":
                return
            state.open_count += 1
            identity = microbatch_id(peer.number.to_bytes(8, "big"), state.next_number)
            state.next_number += 1
            self._attempt(SimulatedMicrobatch(identity, peer, now))

    def _credit(self, state: OriginState, inputs: SendInputs) -> flow_control.SendWindow:
        rules = self._rules
        if rules.max_in_flight:
            limit = min(rules.max_in_flight, rules.slots)
            return flow_control.SendWindow(limit, f"{limit}: schedule.max_in_flight")
        ceiling = min(state.credit_ceiling, rules.slots)
        return flow_control.measured_window(
            inputs.path_s, state.pace.period_s.value, rules.stages, ceiling, inputs.staleness
        )

    def _staleness_ceiling(self, peer: SimulatedPeer) -> flow_control.StalenessCeiling:
        rules = self._rules
        if not rules.staleness or not rules.step_microbatches:
            return flow_control.NO_CEILING
        origins = max(1, self._origins())
        rank = peer.number % origins
        return flow_control.staleness_ceiling(rules.staleness, rules.step_microbatches, rank, origins, predicts=True)

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
        self._hops.enter(microbatch, self._events.now + min(MAX_TIMEOUT_S, first_timeout_s * backoff_factor))

    def on_completed(self, visit: Visit) -> None:
        """Counts an answered microbatch, records its seconds and the origin's pace, and opens further ones there.

        Increases the ceiling of the origin's credit by 1, to at most twice the credit. If the peer is no longer an
        origin, only counts the microbatch.
        """
        peer = visit.peer
        state = peer.origin
        now = self._events.now
        self._measurements.completed += 1
        if state is None:
            return
        state.open_count -= 1
        state.attempt_s = state.attempt_s.with_sample(now - visit.started)
        state.pace = state.pace.after_completion(now)
        state.credit_ceiling = min(state.credit_ceiling + 1, 2 * state.credit.limit)
        self._open(peer)

    def on_unfinished(self, visit: Visit, retry_s: float, is_failure: bool) -> None:
        """Schedules another attempt of the microbatch; if its origin no longer serves, drops and counts it instead.

        The attempt begins after the longer of `retry_s` and RETRY_S doubled with each attempt, at most MAX_RETRY_S. A
        failure also counts as rerouted, and as an interruption of the origin's pace.
        """
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
