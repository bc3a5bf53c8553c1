"""What a simulated swarm consists of: peers, the microbatches in flight, and the calls between peers.

Knows: each peer's own routing table, pace and averages, of the daemon's classes. Must not know: what happens next
(hop_simulation.py, origin_simulation.py and fleet_simulation.py do).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from agora_protocol.ids import MicrobatchId, PeerId, Span

from agora.moving_average import MovingAverage
from agora.pipeline.hop import PATH_SAMPLES
from agora.pipeline.opening import Credit, Pace, StepQuota
from agora.pipeline.peer_choice import PathHint
from agora.pipeline.routing import Attempt, RoutingTable
from agora.sim.simulated_device import SimulatedDevice
from agora.sim.simulated_link import SimulatedLink
from agora.swarm.view import PeerView


class Presence(Enum):
    """What a simulated machine is doing for the swarm."""

    STANDBY = "holds no stage"
    JOINING = "fetches its stages' state"
    SERVING = "serves"
    LEAVING = "finishes what it holds"
    HUNG = "stopped, its connections still open"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a machine can do. kind: the name of its kind. speed: work per second, in the unit of the stages' work.

    longest: for each first stage, how many stages the machine can hold from there on.
    """

    kind: str
    speed: float
    link: SimulatedLink
    longest: tuple[int, ...]


@dataclass(slots=True)
class OriginState:
    """What a peer that holds stage 0 remembers of the microbatches that it opens; see pipeline/origin.py."""

    credit_ceiling: int
    open_count: int = 0
    pace: Pace = field(default_factory=Pace)
    quota: StepQuota = field(default_factory=StepQuota)
    credit: Credit = field(default_factory=lambda: Credit(1, "not measured yet"))
    attempt_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    next_number: int = 0


class SimulatedPeer:
    """One machine with its daemon's own state. Compared by identity.

    visits: its unfinished work, and answers: the kept answers, both by microbatch and entry stage. waiting: visits for
    which no peer of the next stage can be called now; wakes_at: when they are routed again. calls_in: open calls to
    this machine. paths_s: seconds of its last visits, including those at later stages. origin: None unless it holds
    stage 0.
    """

    def __init__(self, peer: PeerId, number: int, equipment: Equipment, device: SimulatedDevice, stages: int) -> None:
        self.id = peer
        self.number = number
        self.equipment = equipment
        self.device = device
        self.presence = Presence.STANDBY
        self.span: Span | None = None
        self.incarnation = 0
        self.table = RoutingTable(peer, stages)
        self.pace = Pace()
        self.busy_s = MovingAverage(0.1)
        self.backward_s = MovingAverage(0.1)
        self.seat_s = MovingAverage(0.1)
        self.paths_s: deque[float] = deque(maxlen=PATH_SAMPLES)
        self.visits: dict[tuple[MicrobatchId, int], Visit] = {}
        self.answers: dict[tuple[MicrobatchId, int], Visit] = {}
        self.waiting: deque[Visit] = deque()
        self.wakes_at = math.inf
        self.calls_in: dict[Call, None] = {}
        self.replicas: tuple[PeerView, ...] = ()
        self.origin: OriginState | None = None

    @property
    def is_up(self) -> bool:
        """Whether its process runs and answers."""
        return self.presence not in (Presence.GONE, Presence.HUNG)

    @property
    def has_room(self) -> bool:
        """Whether it answers calls for microbatches of its span."""
        return self.presence in (Presence.SERVING, Presence.LEAVING)


class SimulatedMicrobatch:
    """One microbatch of an origin. opened: simulated second at which it was opened. attempts: how often it was sent.

    path: the peer last known to hold it, by entry stage. counted: an integer with a bit for each stage at which its
    gradient was counted. kept: its visits whose answers peers keep.
    """

    __slots__ = ("attempts", "counted", "id", "kept", "opened", "origin", "path")

    def __init__(self, identity: MicrobatchId, origin: SimulatedPeer, opened: float) -> None:
        self.id = identity
        self.origin = origin
        self.opened = opened
        self.attempts = 0
        self.path = PathHint()
        self.counted = 0
        self.kept: list[Visit] = []


VisitState = Literal["forward", "routing", "below", "backward", "answered", "cancelled"]


class Visit:
    """A peer's work on one microbatch, from the stage `entry` on; see pipeline/hop.py.

    callers: the open calls that wait for its answer; none at the origin. call: its own open call to the next stage.
    is_root: whether it is the origin's own hop. committed: whether it is completed even if its callers go away. path_s:
    seconds of its own work and of the later stages'; below_path_s: those of the later stages alone.
    """

    __slots__ = (
        "below_path_s",
        "call",
        "callers",
        "committed",
        "deadline",
        "entry",
        "is_root",
        "last",
        "microbatch",
        "path_s",
        "peer",
        "queued_at",
        "started",
        "state",
    )

    def __init__(self, microbatch: SimulatedMicrobatch, peer: SimulatedPeer, entry: int, deadline: float) -> None:
        assert peer.span is not None, "only a peer that holds stages gets a visit"
        self.microbatch = microbatch
        self.peer = peer
        self.entry = entry
        self.last = peer.span.last
        self.deadline = deadline
        self.callers: list[Call] = []
        self.call: Call | None = None
        self.is_root = False
        self.committed = False
        self.state: VisitState = "forward"
        self.started = self.queued_at = 0.0
        self.below_path_s = self.path_s = 0.0

    @property
    def key(self) -> tuple[MicrobatchId, int]:
        """The key of the visit at its peer: the microbatch, and the stage at which it entered."""
        return self.microbatch.id, self.entry


class Call:
    """One call of the visit `caller` to a peer of the next stage.

    attempt: its entry in the caller's routing table. visit: the callee's work on it, None until that has begun. ended:
    whether the caller waits for it no longer.
    """

    __slots__ = ("attempt", "callee", "caller", "ended", "visit")

    def __init__(self, caller: Visit, callee: SimulatedPeer, attempt: Attempt) -> None:
        self.caller = caller
        self.callee = callee
        self.attempt = attempt
        self.visit: Visit | None = None
        self.ended = False
