"""Simulated machines that join, serve, move, leave, hang and die, and that read the directory.

Knows: that placement rules decide which span each machine holds. Must not know: how microbatches travel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from agora_protocol.ids import PeerId, Span

from agora.sim.directory_model import DirectoryModel
from agora.sim.event_queue import EventQueue
from agora.sim.hop_simulation import SILENCE_S, HopSimulation
from agora.sim.measurements import Measurements
from agora.sim.origin_simulation import OriginSimulation
from agora.sim.simulated_device import SimulatedDevice
from agora.sim.simulated_peer import Equipment, Presence, SimulatedPeer
from agora.sim.simulated_reader import SimulatedReader
from agora.sim.state_fetch import SimulatedFetch
from agora.swarm.membership import LIFETIME_S
from agora.swarm.view import View

DRAIN_S = 60.0
"""Seconds within which a peer that moves or leaves finishes what it holds."""
DRAIN_LOOK_S = 1.0
"""Seconds between two checks whether a machine that moves or leaves has finished."""
HANG_S = 60.0
"""Seconds after which a machine that hangs is ended, by its watchdog or its owner."""

DEPARTED_KEPT_S = LIFETIME_S + 600.0
"""Seconds for which a machine that has gone is remembered: longer than its claim may be in any peer's view."""


class PlacementRules(Protocol):
    """Interface: decides which stages each machine holds, and how often a machine reconsiders its span."""

    def choose(self, view: View, peer: SimulatedPeer) -> Span | None:
        """Returns the span that a newcomer should hold; None: it stands by."""

    def reconsider(self, now: float, peer: SimulatedPeer, view: Callable[[], View]) -> Span | None:
        """Returns the span to which a serving peer should move; None: it stays. view: returns what the peer knows."""

    def next_look_s(self) -> float | None:
        """Returns the seconds until a peer judges its place again; None: never."""


class FleetSimulation:
    """All machines of a simulation. It schedules their actions in `events`; whoever owns that queue runs them.

    state_bytes: by stage, the bytes that a newcomer fetches. startup_s: the seconds from a machine's start to its first
    choice of a span.
    """

    def __init__(
        self,
        events: EventQueue,
        directory: DirectoryModel,
        rules: PlacementRules,
        measurements: Measurements,
        rng: random.Random,
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
        self._numbers = 0
        self.stages = len(state_bytes)
        self._readers: dict[PeerId, SimulatedReader] = {}
        self.peers: dict[PeerId, SimulatedPeer] = {}
        """The machines that have not gone, hung ones included."""
        self._departed: dict[PeerId, SimulatedPeer] = {}
        self.hops: HopSimulation
        self.origins: OriginSimulation

    def connect(self, hops: HopSimulation, origins: OriginSimulation) -> None:
        """Sets the two other parts of the simulation; must be called before any event happens."""
        self.hops, self.origins = hops, origins

    def find(self, peer: str) -> SimulatedPeer:
        """Returns the machine with this id, also one that has gone but may still be in a peer's view."""
        return self.peers.get(PeerId(peer)) or self._departed[PeerId(peer)]

    # --- coming

    def add(self, equipment: Equipment) -> SimulatedPeer:
        """Adds a machine that holds nothing yet, and returns it."""
        self._numbers += 1
        name = PeerId(f"peer-{self._numbers:06d}")
        peer = SimulatedPeer(name, self._numbers, equipment, SimulatedDevice(self._events), self.stages)
        self.peers[name] = peer
        self._readers[name] = SimulatedReader(name, self._directory, self._measurements, self._rng)
        return peer

    def place(self, peer: SimulatedPeer, span: Span) -> None:
        """Puts the claim of a machine that serves a span from the start into the directory; call `start` afterwards."""
        peer.span, peer.presence = span, Presence.SERVING
        peer.incarnation += 1
        self._directory.claim(peer, span, "serving")

    def start(self, peer: SimulatedPeer, after_s: float) -> None:
        """Lets a placed machine read the directory now, and begin its work and further reads after so many seconds."""
        self._read_directory(peer)
        self._events.after(after_s, self._start_work, peer)

    def _start_work(self, peer: SimulatedPeer) -> None:
        """Lets a placed machine begin its work, unless it has gone since."""
        if peer.presence is Presence.SERVING:
            self._begin_work(peer)
            self._watch(peer)

    def join(self, equipment: Equipment) -> SimulatedPeer:
        """Adds a machine and returns it at once, without a span; after `startup_s` it chooses one or stands by."""
        self._measurements.joins += 1
        peer = self.add(equipment)
        self._events.after(self._startup_s, self._choose, peer)
        self._watch(peer)
        return peer

    def _watch(self, peer: SimulatedPeer) -> None:
        """Schedules a machine's first read of the directory and its first judgement of its own place."""
        read_s = self._readers[peer.id].interval_s()
        self._events.after(read_s, self._read, peer)
        if (look_s := self._rules.next_look_s()) is not None:
            self._events.after(read_s + look_s, self._look, peer)

    def _choose(self, peer: SimulatedPeer) -> None:
        """Lets a standing-by machine read the directory and choose a span; with one, it begins to fetch its state."""
        if peer.presence is Presence.STANDBY:
            reader = self._readers[peer.id]
            reader.read(None, self._events.now)
            span = self._rules.choose(reader.view(None), peer)
            if span is not None:
                self._fetch(peer, span)

    def _fetch(self, peer: SimulatedPeer, span: Span) -> None:
        """Claims a span as joining, and fetches the state of its stages from peers that serve them."""
        peer.span, peer.presence = span, Presence.JOINING
        peer.incarnation += 1
        self._directory.claim(peer, span, "joining")
        donors = {
            donor.id: donor
            for stage in span.stages
            for view in self._directory.sample_servers(stage)
            if (donor := self.find(view.peer)).has_room
        }
        size = sum(self._state_bytes[stage] for stage in span.stages)
        SimulatedFetch(self._events, peer, size, list(donors.values()), self._rng, self._serve)

    def _serve(self, peer: SimulatedPeer) -> None:
        """Called when a machine has its stages' state: claims the span as serving, and makes it an origin at stage 0.

        Does nothing if the machine is no longer joining.
        """
        if peer.presence is not Presence.JOINING or peer.span is None:
            return
        peer.presence = Presence.SERVING
        self._directory.claim(peer, peer.span, "serving")
        self._begin_work(peer)

    def _begin_work(self, peer: SimulatedPeer) -> None:
        """Lets a machine that serves read the directory, and makes it an origin at stage 0."""
        self._read_directory(peer)
        if peer.span is not None and peer.span.first == 0:
            self.origins.begin(peer)

    # --- staying

    def _read(self, peer: SimulatedPeer) -> None:
        """Refreshes a machine's sample of its next stage's servers, and schedules its next read.

        If the sample has changed, routes the microbatches that wait for a peer. Does nothing once the machine is down.
        """
        if not peer.is_up:
            return
        if self._read_directory(peer):
            self.hops.route_waiting(peer)
        reader = self._readers[peer.id]
        interval_s = reader.interval_s()
        self._measurements.directory_stored += reader.records_published_per_s(peer.span) * interval_s
        self._events.after(interval_s, self._read, peer)

    def _read_directory(self, peer: SimulatedPeer) -> bool:
        """Reads what is due for a machine, and sets its `replicas` to those that serve the stage after its span.

        Returns whether these have changed.
        """
        reader = self._readers[peer.id]
        if not reader.read(peer.span, self._events.now) or peer.span is None or peer.span.last + 1 >= self.stages:
            return False
        replicas = reader.replicas(peer.span.last + 1)
        if replicas == peer.replicas:
            return False
        peer.replicas = replicas
        return True

    def _look(self, peer: SimulatedPeer) -> None:
        """Moves a machine that serves if the rules say so, lets one that stands by choose; schedules the next check."""
        if not peer.is_up:
            return
        if peer.presence is Presence.STANDBY:
            self._choose(peer)
        elif peer.presence is Presence.SERVING:
            span = self._reconsider(peer)
            if span is not None:
                self._read_directory(peer)
                span = self._reconsider(peer)  # again, on a view as fresh as the daemon's
            if span is not None and span != peer.span:
                self._measurements.moves += 1
                self._drain(peer, lambda: self._fetch(peer, span))
        if (look_s := self._rules.next_look_s()) is not None:
            self._events.after(look_s, self._look, peer)

    def _reconsider(self, peer: SimulatedPeer) -> Span | None:
        """Returns the span to which a machine should move, by its own view; None: it stays."""
        reader = self._readers[peer.id]
        return self._rules.reconsider(self._events.now, peer, lambda: reader.view(peer.span))

    def _drain(self, peer: SimulatedPeer, then: Callable[[], None]) -> None:
        """Stops new work for a machine, lets it finish what it holds, for at most DRAIN_S, then calls `then`."""
        peer.presence = Presence.LEAVING
        if peer.span is not None:
            self._directory.claim(peer, peer.span, "leaving")
        self._wait_for_drain(peer, self._events.now + DRAIN_S, then)

    def _wait_for_drain(self, peer: SimulatedPeer, until: float, then: Callable[[], None]) -> None:
        """Calls `then` as soon as a leaving machine holds no more work; at `until` it hands the rest back first.

        Forgets what the machine knew as an origin and of its next stage. Does nothing if it is no longer leaving.
        """
        if peer.presence is not Presence.LEAVING:
            return
        if peer.visits and self._events.now < until:
            self._events.after(DRAIN_LOOK_S, self._wait_for_drain, peer, until, then)
            return
        self.hops.hand_back(peer)
        peer.origin, peer.replicas = None, ()
        peer.paths_s.clear()
        then()

    # --- going

    def leave(self, peer: SimulatedPeer) -> None:
        """Makes a machine claim that it leaves, finish what it holds, and go."""
        self._measurements.leaves += 1
        self._drain(peer, lambda: self._go(peer))

    def _go(self, peer: SimulatedPeer) -> None:
        """Removes the claim of a machine that has finished what it held, and the machine."""
        self._directory.withdraw(peer.id)
        self._end(peer)

    def kill(self, peer: SimulatedPeer) -> None:
        """Makes a machine vanish; its claim stays in the directory until it expires."""
        self._measurements.kills += 1
        self._vanish(peer)

    def hang(self, peer: SimulatedPeer) -> None:
        """Makes a machine stop with its connections open; it is ended after HANG_S."""
        self._measurements.hangs += 1
        peer.presence = Presence.HUNG
        peer.device.stop()
        self._end_claim_later(peer)
        self._events.after(SILENCE_S, self.hops.break_connections, peer)
        self._events.after(HANG_S, self._end, peer)

    def _vanish(self, peer: SimulatedPeer) -> None:
        """Ends a machine now, and its claim when that expires."""
        self._end_claim_later(peer)
        self._end(peer)

    def _end_claim_later(self, peer: SimulatedPeer) -> None:
        """Schedules the end of the claim, a lifetime after it was last published."""
        self._events.after(self._directory.seconds_to_end(), self._end_claim, peer.id, peer.incarnation)

    def _end_claim(self, peer: PeerId, incarnation: int) -> None:
        """Removes a peer's claim if it is still of this incarnation."""
        if self._directory.is_current(peer, incarnation):
            self._directory.withdraw(peer)

    def _end(self, peer: SimulatedPeer) -> None:
        """Takes a machine out of the simulation and breaks its connections; does nothing if it has gone already."""
        if self.peers.pop(peer.id, None) is None:
            return
        if peer.origin is not None:
            self._measurements.lost += peer.origin.open_count
        del self._readers[peer.id]
        peer.presence = Presence.GONE
        peer.device.stop()
        self._departed[peer.id] = peer
        self._events.after(DEPARTED_KEPT_S, self._forget, peer.id)
        self.hops.break_connections(peer)

    def _forget(self, peer: PeerId) -> None:
        """Forgets a machine that has gone; called when no peer's view can name it any more."""
        del self._departed[peer]

    def pick(self, count: int) -> list[SimulatedPeer]:
        """Returns `count` of the machines that are up and not leaving, drawn at random; all if there are fewer."""
        up = [p for p in self.peers.values() if p.is_up and p.presence is not Presence.LEAVING]
        return self._rng.sample(up, min(count, len(up)))
