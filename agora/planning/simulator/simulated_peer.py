"""A simulated peer: its machine, its open work, and how it fetches a state as a newcomer."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from agora_protocol.ids import MicrobatchId, PeerId, Span

from agora.core.moving_average import MovingAverage
from agora.pipeline.flow_control import CompletionPace, SendWindow, StepAllotment
from agora.pipeline.hop import LATENCY_SAMPLES
from agora.pipeline.load_balancer import Attempt, LoadBalancer, RouteHint
from agora.planning.simulator.event_queue import EventQueue
from agora.planning.simulator.simulated_machine import SimulatedDevice, SimulatedLink
from agora.swarm.view import PeerView


class Presence(Enum):
    STANDBY = "holds no stage"
    JOINING = "fetches its stages' state"
    SERVING = "serves"
    LEAVING = "finishes what it holds"
    HUNG = "stopped, its connections still open"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Equipment:
    kind: str  # name of its MachineGroup
    speed: float  # work per second, in the unit of stages' work
    link: SimulatedLink  # its own network link
    max_span_lengths: tuple[int, ...]  # for each first stage, how many stages the machine can hold from there on


@dataclass(slots=True)
class OriginState:
    """What a peer that holds stage 0 remembers of the microbatches that it opens; see pipeline/origin.py."""

    window_ceiling: int  # the most that a measured window can be
    open_count: int = 0  # how many microbatches are in flight
    pace: CompletionPace = field(default_factory=CompletionPace)  # how often a microbatch is completed
    # How many microbatches the origin may open for the present step.
    allotment: StepAllotment = field(default_factory=StepAllotment)
    # How many microbatches the origin may have in flight.
    window: SendWindow = field(default_factory=lambda: SendWindow(1, "not measured yet"))
    # Mean seconds of the attempts that were completed.
    attempt_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    next_number: int = 0  # the number of the next microbatch


class SimulatedPeer:
    """One machine with its daemon's own state. Compared by identity."""

    def __init__(self, peer: PeerId, number: int, equipment: Equipment, device: SimulatedDevice, stages: int) -> None:
        self.id = peer
        self.number = number
        self.equipment = equipment
        self.device = device
        self.presence = Presence.STANDBY
        self.span: Span | None = None
        self.serving_since = 0.0  # simulated second since which it has served its span
        self.incarnation = 0
        self.balancer = LoadBalancer(peer, stages)  # what it knows of the peers that it calls
        self.pace = CompletionPace()  # how often its calls are answered
        self.busy_s = MovingAverage(0.1)  # mean seconds of a visit's own work
        self.backward_s = MovingAverage(0.1)  # mean seconds of a backward pass, its wait at the device included
        self.slot_s = MovingAverage(0.1)  # mean seconds of a whole visit
        # Seconds of work of its last visits, the work at later stages included.
        self.latencies_s: deque[float] = deque(maxlen=LATENCY_SAMPLES)
        self.visits: dict[tuple[MicrobatchId, int], Visit] = {}  # its unfinished work, by microbatch and entry stage
        # Finished visits, whose answers are kept, by the same key.
        self.answers: dict[tuple[MicrobatchId, int], Visit] = {}
        self.waiting: deque[Visit] = deque()  # visits for which no peer of the next stage can be called now
        self.wakes_at = math.inf  # when the next routing of `waiting` is scheduled
        self.calls_in: dict[Call, None] = {}  # open calls to this peer
        self.replicas: tuple[PeerView, ...] = ()  # the peers known to serve its next stage
        self.origin: OriginState | None = None  # none unless it holds stage 0

    @property
    def is_up(self) -> bool:
        return self.presence not in (Presence.GONE, Presence.HUNG)

    @property
    def has_state(self) -> bool:
        return self.presence in (Presence.SERVING, Presence.LEAVING)


class SimulatedMicrobatch:
    """One microbatch of an origin. opened: simulated second at which it was opened."""

    __slots__ = ("attempts", "counted", "id", "kept", "opened", "origin", "path")

    def __init__(self, identity: MicrobatchId, origin: SimulatedPeer, opened: float) -> None:
        self.id = identity
        self.origin = origin
        self.opened = opened
        self.attempts = 0  # how many were begun
        self.path = RouteHint()  # by entry stage, the peer last known to hold the microbatch
        self.counted = 0  # an integer with a bit for each stage at which its gradient was counted
        self.kept: list[Visit] = []  # its visits whose answers peers keep


# downstream: a peer of the next stage has been called, and its answer is awaited.
VisitState = Literal["forward", "routing", "downstream", "backward", "answered", "cancelled"]


class Visit:
    """A peer's work on one microbatch, at the stages from `entry_stage` to `last`; the daemon's is a RunningWork.

    Times are simulated seconds.
    """

    __slots__ = (
        "call",
        "callers",
        "committed",
        "deadline",
        "downstream_latency_s",
        "entry_stage",
        "is_at_origin",
        "last",
        "latency_s",
        "microbatch",
        "peer",
        "queued_at",
        "started",
        "state",
    )

    def __init__(self, microbatch: SimulatedMicrobatch, peer: SimulatedPeer, entry_stage: int, deadline: float) -> None:
        assert peer.span is not None, "only a peer that holds stages gets a visit"
        self.microbatch = microbatch
        self.peer = peer
        self.entry_stage = entry_stage
        self.last = peer.span.last
        self.deadline = deadline
        self.callers: list[Call] = []  # the open calls that wait for its answer; none at the origin
        self.call: Call | None = None  # its own open call to the next stage
        self.is_at_origin = False  # whether it is at the origin's own hop
        self.committed = False  # whether it goes on even if all its callers go away
        self.state: VisitState = "forward"
        self.started = 0.0  # when it took its slot
        self.queued_at = 0.0  # when its backward was queued
        self.latency_s = 0.0  # seconds of work of this visit and of the later stages
        self.downstream_latency_s = 0.0  # seconds of work of the later stages alone

    @property
    def key(self) -> tuple[MicrobatchId, int]:
        return self.microbatch.id, self.entry_stage


class Call:
    """One call of the visit `caller` to a peer of the next stage. attempt: its entry in the caller's routing table."""

    __slots__ = ("attempt", "callee", "caller", "ended", "visit")

    def __init__(self, caller: Visit, callee: SimulatedPeer, attempt: Attempt) -> None:
        self.caller = caller
        self.callee = callee
        self.attempt = attempt
        self.visit: Visit | None = None  # the callee's work for the call; None until that has begun
        self.ended = False  # whether the caller no longer waits for the answer


MAX_SOURCES = 4  # maximum number of replicas from which a newcomer fetches at the same time
# Seconds that one piece takes on the donor's link, so that boundaries need not wait for the whole state.
PIECE_DURATION_S = 0.25


class SimulatedFetch:
    """Concurrent, from several replicas. When all donors have gone, the rest counts as fetched from a checkpoint,
    without delay. `done` is never called if the peer goes or fetches another state.
    """

    __slots__ = ("_done", "_events", "_incarnation", "_left", "_open", "_peer", "_rng")

    def __init__(
        self,
        events: EventQueue,
        peer: SimulatedPeer,
        size: float,
        rng: random.Random,
        done: Callable[[SimulatedPeer], None],
    ) -> None:
        self._events = events
        self._peer = peer
        self._incarnation = peer.incarnation
        self._left = size
        self._rng = rng
        self._done = done
        self._open = 0

    def start(self, donors: Sequence[SimulatedPeer]) -> None:
        """From at most MAX_SOURCES of `donors`, at random; without any, calls `done` now."""
        chosen = donors if len(donors) <= MAX_SOURCES else self._rng.sample(list(donors), MAX_SOURCES)
        for donor in chosen:
            self._open += 1
            self._next_piece(donor)
        if not chosen:
            self._done(self._peer)

    def _next_piece(self, donor: SimulatedPeer) -> None:
        if self._peer.presence is not Presence.JOINING or self._peer.incarnation != self._incarnation:
            return  # the peer is gone, or fetches other stages by now
        if self._left <= 0.0 or not donor.is_up:
            self._open -= 1
            if self._open == 0:
                self._done(self._peer)
            return
        link = donor.equipment.link
        size = min(self._left, PIECE_DURATION_S * link.spec.rate)
        self._left -= size
        arrival = link.send(self._peer.equipment.link, size, self._events.now, self._rng)
        self._events.at(arrival, self._next_piece, donor)
