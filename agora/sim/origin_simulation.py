"""The peers that hold stage 0 of a simulation, and the microbatches that they open, as pipeline/opening.py decides.

Knows: when to open a microbatch, and how long an attempt may take. Must not know: how a microbatch travels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from agora_protocol.ids import microbatch_id

from agora.pipeline import opening
from agora.pipeline.opening import OpeningInputs
from agora.pipeline.origin import MAX_PATIENCE_S, MAX_RETRY_S, MIN_PATIENCE_S, PATIENCE_FACTOR, RETRY_S
from agora.sim.event_queue import EventQueue
from agora.sim.hop_simulation import HopSimulation
from agora.sim.measurements import Measurements
from agora.sim.simulated_peer import OriginState, Presence, SimulatedMicrobatch, SimulatedPeer, Visit


@dataclass(frozen=True, slots=True)
class OriginRules:
    """The settings of origins. stages: of the run. seats: the most microbatches that an origin has in flight.

    max_in_flight: the manifest's; 0 to measure it. staleness, step_microbatches: the manifest's bound on what all
    origins have in flight, in steps, and a step's size; 0 for no bound. first_patience_s: the time limit of an attempt
    before any attempt was measured. traffic: whether microbatches are opened at all.
    """

    stages: int
    seats: int
    max_in_flight: int = 0
    staleness: float = 0.0
    step_microbatches: int = 0
    first_patience_s: float = MAX_PATIENCE_S
    traffic: bool = True


class OriginSimulation:
    """Opens microbatches at every peer that serves stage 0. origins: returns the number of such peers."""

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
        """Makes a peer that has begun to serve stage 0 an origin, and opens its first microbatches."""
        peer.origin = OriginState(opening.PER_STAGE * self._rules.stages)
        if self._rules.traffic:
            self._open(peer)

    def _open(self, peer: SimulatedPeer) -> None:
        """Opens microbatches at a peer until next_opening decides otherwise, or the peer does not serve."""
        state = peer.origin
        while state is not None and peer.presence is Presence.SERVING:
            now = self._events.now
            seen = OpeningInputs(
                path_s=median(peer.paths_s) if peer.paths_s else None, staleness_ceiling=self._staleness_ceiling(peer)
            )
            state.credit = self._credit(state, seen)
            decision = opening.next_opening(now, state.quota, state.credit, seen, state.open_count)
            if decision.action != "open":
                return
            state.open_count += 1
            identity = microbatch_id(peer.number.to_bytes(8, "big"), state.next_number)
            state.next_number += 1
            self._attempt(SimulatedMicrobatch(identity, peer, now))

    def _credit(self, state: OriginState, seen: OpeningInputs) -> opening.Credit:
        """Returns how many microbatches an origin may have in flight, by the same rule as pipeline/origin.py."""
        rules = self._rules
        if rules.max_in_flight:
            limit = min(rules.max_in_flight, rules.seats)
            return opening.Credit(limit, f"{limit}: schedule.max_in_flight")
        ceiling = min(state.credit_ceiling, rules.seats)
        return opening.measured_credit(
            seen.path_s, state.pace.period_s.value, rules.stages, ceiling, seen.staleness_ceiling
        )

    def _staleness_ceiling(self, peer: SimulatedPeer) -> int:
        """Returns the most microbatches that this origin may have in flight by schedule.staleness; 2**31 if unbound."""
        rules = self._rules
        if not rules.staleness or not rules.step_microbatches:
            return 2**31
        origins = max(1, self._origins())
        return opening.staleness_limit(rules.staleness, rules.step_microbatches, peer.number % origins, origins)

    def _attempt(self, microbatch: SimulatedMicrobatch) -> None:
        """Sends a microbatch into its origin's own hop; each further attempt gets twice the time.

        Does nothing if the peer is not up or is an origin no longer.
        """
        peer = microbatch.origin
        if peer.origin is None or not peer.is_up:
            return
        usual_s, doubled = peer.origin.attempt_s.value, 2.0 ** min(microbatch.attempts, 16)
        first = self._rules.first_patience_s if usual_s is None else max(MIN_PATIENCE_S, PATIENCE_FACTOR * usual_s)
        microbatch.attempts += 1
        self._hops.enter(microbatch, self._events.now + min(MAX_PATIENCE_S, first * doubled))

    def on_completed(self, visit: Visit) -> None:
        """Records an answered microbatch, and opens further ones at its origin."""
        peer, now = visit.peer, self._events.now
        state = peer.origin
        self._measurements.completed += 1
        if state is None:
            return
        state.open_count -= 1
        state.attempt_s = state.attempt_s.with_sample(now - visit.started)
        state.pace = state.pace.after_completion(now)
        state.credit_ceiling = min(state.credit_ceiling + 1, 2 * state.credit.limit)
        self._open(peer)

    def on_unfinished(self, visit: Visit, retry_s: float, is_failure: bool) -> None:
        """Schedules another attempt of the microbatch, or drops it if its origin no longer serves."""
        peer, microbatch = visit.peer, visit.microbatch
        state = peer.origin
        if state is None or peer.presence is not Presence.SERVING:
            self._measurements.dropped += 1
            return
        if is_failure:
            state.pace = state.pace.after_interruption()
            self._measurements.rerouted += 1
        rest_s = max(retry_s, RETRY_S * 2.0 ** min(microbatch.attempts - 1, 16))
        self._events.after(min(rest_s, MAX_RETRY_S), self._attempt, microbatch)
