"""Simulated peers that join, serve, move, leave, hang and die, and that read the directory.

The daemon's own placement and rebalancing choose their stages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from agora_protocol.ids import PeerId, Span

from agora.planning.simulator.directory_model import DirectoryModel, SimulatedReader
from agora.planning.simulator.event_queue import EventQueue
from agora.planning.simulator.measurements import Measurements
from agora.planning.simulator.pipeline_simulation import SILENCE_TIMEOUT_S, OriginSimulation
from agora.planning.simulator.scenario import SimulatedModel
from agora.planning.simulator.simulated_machine import SimulatedDevice
from agora.planning.simulator.simulated_peer import Equipment, Presence, SimulatedFetch, SimulatedPeer
from agora.swarm.membership import LIFETIME_S
from agora.swarm.placement import choose_placement
from agora.swarm.rebalancing import judge_move, rebalance_interval_s
from agora.swarm.stage_capacity import MachineCapacity, StageNeeds
from agora.swarm.view import View

VERDICT_TTL_S = 2.0  # simulated seconds for which a verdict is reused: whether machines of one span and kind may move


# A random generator that draws 0 each time: with it, judge_move returns a move if any draw could lead to one.
class _ZeroDraws(random.Random):
    def random(self) -> float:
        return 0.0


class DaemonPlacement:
    """The daemon's own placement and rebalancing for simulated machines.

    model: the stages' costs. rebalancing: whether machines that serve ever move. Remembers for VERDICT_TTL_S, by span
    and kind of machine, whether any random draw could lead to a move: an approximation, since machines' views differ in
    large runs.
    """

    def __init__(self, model: SimulatedModel, rebalancing: bool, rng: random.Random) -> None:
        self._mean_work = sum(model.work) / model.stages
        work = tuple(amount / self._mean_work for amount in model.work)
        self._needs = StageNeeds(work, max(model.boundary_bytes, model.gradient_bytes), model.state_bytes)
        self._rebalancing = rebalancing
        self._rng = rng
        self._may_move: dict[tuple[Span, str], tuple[float, bool]] = {}

    def choose(self, view: View, peer: SimulatedPeer) -> Span | None:
        return choose_placement(view, self._needs, self._machine_capacity(peer.equipment), self._rng).span

    def reconsider(self, now: float, peer: SimulatedPeer, view: Callable[[], View]) -> Span | None:
        """None: it stays. `view` is not called while no draw could move a machine of this span and kind. now: simulated
        seconds.
        """
        if not self._rebalancing or peer.span is None:
            return None
        span_and_kind = (peer.span, peer.equipment.kind)
        judged_at, may_move = self._may_move.get(span_and_kind, (-math.inf, False))
        if now - judged_at > VERDICT_TTL_S:
            may_move = self._move_target(view(), peer, _ZeroDraws(), math.inf) is not None
            self._may_move[span_and_kind] = now, may_move
        return self._move_target(view(), peer, self._rng, now - peer.serving_since) if may_move else None

    def rebalance_interval_s(self) -> float:
        return rebalance_interval_s(self._rng)

    def _move_target(self, view: View, peer: SimulatedPeer, rng: random.Random, served_s: float) -> Span | None:
        placement = judge_move(view, peer.id, self._needs, self._machine_capacity(peer.equipment), rng, served_s)
        return None if placement is None else placement.span

    def _machine_capacity(self, equipment: Equipment) -> MachineCapacity:
        return MachineCapacity(equipment.speed / self._mean_work, equipment.link.spec.rate, equipment.max_span_lengths)


DRAIN_TIMEOUT_S = 60.0  # seconds after which a peer that moves or leaves gives up the work that it has not finished
DRAIN_POLL_S = 1.0  # seconds between two checks whether a peer that moves or leaves has finished
HANG_TIMEOUT_S = 60.0  # seconds after which a peer that hangs is ended, by its watchdog or its owner

# Seconds for which a peer that has gone is remembered: longer than its claim may be in any other peer's view.
DEPARTED_KEPT_S = LIFETIME_S + 600.0


class FleetSimulation:
    """The peers of a simulation: adds, moves and removes them, and schedules their actions in `events`.

    rules: decide which spans peers hold. state_bytes: by stage, the bytes that a newcomer fetches. startup_s: seconds
    from a peer's start to its first choice of a span.
    """

    def __init__(
        self,
        events: EventQueue,
        directory: DirectoryModel,
        rules: DaemonPlacement,
        measurements: Measurements,
        rng: random.Random,
        origins: OriginSimulation,
        *,
        state_bytes: tuple[float, ...],
        startup_s: float = 5.0,
    ) -> None:
        self._events = events
        self._directory = directory
        self._rules = rules
        self._measurements = measurements
        self._rng = rng
        self._state_bytes = state_bytes
        self._startup_s = startup_s
        self._last_number = 0
        self.stages = len(state_bytes)
        self._readers: dict[PeerId, SimulatedReader] = {}
        self.peers: dict[PeerId, SimulatedPeer] = {}  # the peers that have not gone, hung ones included
        self._departed: dict[PeerId, SimulatedPeer] = {}
        self._origins, self._hops = origins, origins.hops

    def find(self, peer: str) -> SimulatedPeer:
        """Also one that went less than DEPARTED_KEPT_S ago. Raises KeyError for any other id."""
        return self.peers.get(PeerId(peer)) or self._departed[PeerId(peer)]

    # --- coming

    def add(self, equipment: Equipment) -> SimulatedPeer:
        self._last_number += 1
        name = PeerId(f"peer-{self._last_number:06d}")
        peer = SimulatedPeer(name, self._last_number, equipment, SimulatedDevice(self._events), self.stages)
        self.peers[name] = peer
        self._readers[name] = SimulatedReader(name, self._directory, self._measurements, self._rng)
        return peer

    def place(self, peer: SimulatedPeer, span: Span) -> None:
        """Makes a peer serve `span` without fetching its state, and stores its claim; `start_after` must follow."""
        peer.span = span
        peer.presence = Presence.SERVING
        peer.serving_since = self._events.now
        peer.incarnation += 1
        self._directory.claim(peer, span, "serving")

    def start_after(self, peer: SimulatedPeer, after_s: float) -> None:
        """Makes a placed peer read the directory now, and begin its work and further reads `after_s` from now."""
        self._read_directory(peer)
        self._events.after(after_s, self._enter_service, peer)

    def _enter_service(self, peer: SimulatedPeer) -> None:
        if peer.presence is Presence.SERVING:
            self._begin_training(peer)
            self._watch(peer)

    def join(self, equipment: Equipment) -> SimulatedPeer:
        """After `startup_s` the new peer chooses a span or stands by."""
        self._measurements.joins += 1
        peer = self.add(equipment)
        self._events.after(self._startup_s, self._choose, peer)
        self._watch(peer)
        return peer

    def _watch(self, peer: SimulatedPeer) -> None:
        read_s = self._readers[peer.id].interval_s()
        self._events.after(read_s, self._read, peer)
        self._events.after(read_s + self._rules.rebalance_interval_s(), self._judge_placement, peer)

    def _choose(self, peer: SimulatedPeer) -> None:
        if peer.presence is Presence.STANDBY:
            reader = self._readers[peer.id]
            reader.read(None, self._events.now)
            span = self._rules.choose(reader.view(None), peer)
            if span is not None:
                self._claim_and_fetch(peer, span)

    def _claim_and_fetch(self, peer: SimulatedPeer, span: Span) -> None:
        peer.span = span
        peer.presence = Presence.JOINING
        peer.incarnation += 1
        self._directory.claim(peer, span, "joining")
        donors = {
            donor.id: donor
            for stage in span.stages
            for view in self._directory.sample_servers(stage)
            if (donor := self.find(view.peer)).has_state
        }
        size = sum(self._state_bytes[stage] for stage in span.stages)
        SimulatedFetch(self._events, peer, size, self._rng, self._serve).start(list(donors.values()))

    def _serve(self, peer: SimulatedPeer) -> None:
        if peer.presence is not Presence.JOINING or peer.span is None:
            return
        peer.presence = Presence.SERVING
        peer.serving_since = self._events.now
        self._directory.claim(peer, peer.span, "serving")
        self._begin_training(peer)

    def _begin_training(self, peer: SimulatedPeer) -> None:
        self._read_directory(peer)
        if peer.span is not None and peer.span.first == 0:
            self._origins.begin(peer)

    # --- staying

    def _read(self, peer: SimulatedPeer) -> None:
        if not peer.is_up:
            return
        if self._read_directory(peer):
            self._hops.route_waiting(peer)
        reader = self._readers[peer.id]
        interval_s = reader.interval_s()
        self._measurements.directory_stored += reader.records_published_per_s(peer.span) * interval_s
        self._events.after(interval_s, self._read, peer)

    def _read_directory(self, peer: SimulatedPeer) -> bool:
        reader = self._readers[peer.id]
        if not reader.read(peer.span, self._events.now) or peer.span is None or peer.span.last + 1 >= self.stages:
            return False
        replicas = reader.replicas(peer.span.last + 1)
        if replicas == peer.replicas:
            return False
        peer.replicas = replicas
        return True

    def _judge_placement(self, peer: SimulatedPeer) -> None:
        if not peer.is_up:
            return
        if peer.presence is Presence.STANDBY:
            self._choose(peer)
        elif peer.presence is Presence.SERVING:
            span = self._reconsider(peer)
            if span is not None:
                # Others may have moved there meanwhile: two verdicts keep a crowd from following one gap.
                self._read_directory(peer)
                span = self._reconsider(peer)  # again, on a view as fresh as the daemon's
            if span is not None and span != peer.span:
                self._measurements.moves += 1
                self._drain(peer, lambda: self._claim_and_fetch(peer, span))
        self._events.after(self._rules.rebalance_interval_s(), self._judge_placement, peer)

    def _reconsider(self, peer: SimulatedPeer) -> Span | None:
        reader = self._readers[peer.id]
        return self._rules.reconsider(self._events.now, peer, lambda: reader.view(peer.span))

    def _drain(self, peer: SimulatedPeer, then: Callable[[], None]) -> None:
        peer.presence = Presence.LEAVING
        if peer.span is not None:
            self._directory.claim(peer, peer.span, "leaving")
        self._wait_for_drain(peer, self._events.now + DRAIN_TIMEOUT_S, then)

    def _wait_for_drain(self, peer: SimulatedPeer, until: float, then: Callable[[], None]) -> None:
        if peer.presence is not Presence.LEAVING:
            return
        if peer.visits and self._events.now < until:
            self._events.after(DRAIN_POLL_S, self._wait_for_drain, peer, until, then)
            return
        self._hops.hand_back(peer)
        peer.origin = None
        peer.replicas = ()
        peer.latencies_s.clear()
        then()

    # --- departure

    def leave(self, peer: SimulatedPeer) -> None:
        self._measurements.leaves += 1
        self._drain(peer, lambda: self._go(peer))

    def _go(self, peer: SimulatedPeer) -> None:
        self._directory.withdraw(peer.id)
        self._end(peer)

    def kill(self, peer: SimulatedPeer) -> None:
        self._measurements.kills += 1
        self._vanish(peer)

    def hang(self, peer: SimulatedPeer) -> None:
        """Its connections break after SILENCE_TIMEOUT_S; it is ended after HANG_TIMEOUT_S."""
        self._measurements.hangs += 1
        peer.presence = Presence.HUNG
        peer.device.stop()
        self._expire_claim_later(peer)
        self._events.after(SILENCE_TIMEOUT_S, self._hops.break_connections, peer)
        self._events.after(HANG_TIMEOUT_S, self._end, peer)

    def _vanish(self, peer: SimulatedPeer) -> None:
        self._expire_claim_later(peer)  # nobody withdraws the claim of a peer that was killed
        self._end(peer)

    def _expire_claim_later(self, peer: SimulatedPeer) -> None:
        self._events.after(self._directory.seconds_to_end(), self._end_claim, peer.id, peer.incarnation)

    def _end_claim(self, peer: PeerId, incarnation: int) -> None:
        if self._directory.is_current(peer, incarnation):
            self._directory.withdraw(peer)

    def _end(self, peer: SimulatedPeer) -> None:
        if self.peers.pop(peer.id, None) is None:
            return
        if peer.origin is not None:
            self._measurements.lost += peer.origin.open_count
        del self._readers[peer.id]
        peer.presence = Presence.GONE
        peer.device.stop()
        self._departed[peer.id] = peer
        self._events.after(DEPARTED_KEPT_S, self._forget, peer.id)
        self._hops.break_connections(peer)

    def _forget(self, peer: PeerId) -> None:
        # Only now: until here a view may still name it, and a call to it must fail like any other.
        del self._departed[peer]

    def pick(self, count: int) -> list[SimulatedPeer]:
        """Returns `count` peers, drawn at random from those that are up and not leaving; all of these if fewer."""
        up = [p for p in self.peers.values() if p.is_up and p.presence is not Presence.LEAVING]
        return self._rng.sample(up, min(count, len(up)))
