"""Compares the peers of one stage, and chooses the one that gets a microbatch. Pure.

Knows: what was measured of each peer, in a PeerCost. Must not know: how it was measured, or which peers there are
(routing.py does); a clock (`now` is an argument), the network, or randomness. docs/routing.md explains the rule.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agora_protocol.ids import MicrobatchId, PeerId

UNMEASURED_SERVICE_S = 0.25
"""Device seconds that a microbatch is assumed to take until a peer of the stage has been measured."""
BACKOFF_S = 0.25
"""Minimum seconds that a peer is not called after its first failure; they double with each further failure in a row."""
MAX_BACKOFF_S = 60.0
"""Maximum seconds that a failing peer is not called."""
MAX_BACKOFF_WITHOUT_SIBLING_S = 4.0
"""The same maximum while every peer of the stage fails."""
SEAT_WAITS = 128
"""Number of latest times from sending to a seat that are kept of a peer."""
NEWCOMER_CALLS = 2
"""Maximum number of open calls to a peer that has never answered, once another peer of its stage has."""
RELAYED_FACTOR = 1.5
"""How many times as long a microbatch counts at a peer that is reached through a relay: others share that link."""


@dataclass(slots=True)
class PeerCost:
    """What a caller knows about one peer of a later stage; only RoutingTable changes it."""

    virtual_s: float = 0.0  # seconds of work that were charged to the peer so far
    service_s: float = UNMEASURED_SERVICE_S  # its mean device time per microbatch
    round_trip_s: float = 0.0  # mean round trip of the link, as far as it can be separated from the transfer
    bytes_per_s: float = math.inf  # mean rate of the link; infinite until a transfer was measured
    call_s: float = 0.0  # mean length of a whole call, everything downstream included
    answers: int = 0  # how often the peer has answered
    seats: int = 0  # how often it has given a microbatch a seat
    open_calls: int = 0  # this caller's calls to it that are open
    call_limit: float = math.inf  # how many open calls it accepts of this caller, learnt from BUSY
    queue: int = 0  # microbatches at its device, as it reported at `queue_at`
    queue_at: float = 0.0  # when it last gave a seat
    sent_since: int = 0  # microbatches that this caller has sent since `queue_at`
    failures: int = 0  # failed calls in a row
    failed_at: float = 0.0  # when the last counted failure happened
    wasted_s: float = 0.0  # the longest time that one of these failures took
    busy_until: float = 0.0  # before this time it is not called, because it said BUSY
    is_relayed: bool = False  # whether it is reached through a relay, see `must_use_relay`
    incarnation: int = 0  # of its claim; a higher one means that its daemon was restarted or has moved
    seat_waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEAT_WAITS))  # from sending to a seat

    def queue_now(self, now: float) -> float:
        """Returns how many microbatches are expected ahead of a new one.

        That is the queue that the peer reported, less those that it has served since, plus those sent to it since.
        """
        # at a quarter of the peer's speed, because other callers keep filling the queue between our calls
        waiting = self.queue - 0.25 * (now - self.queue_at) / max(self.service_s, 1e-6) if self.queue else 0.0
        return waiting + self.sent_since if waiting > 0.0 else float(self.sent_since)

    def idle_finish_s(self, payload_bytes: int) -> float:
        """Returns the seconds from sending a microbatch to the end of its device work if nothing else waits there."""
        return self.round_trip_s + payload_bytes / self.bytes_per_s + self.service_s

    def crossing_s(self, bytes_there: int, bytes_back: int, period_s: float) -> float:
        """Returns a microbatch's seconds on the link, both ways, without waiting: a round trip and two transfers.

        The transfers count as at most `period_s`, the time between two microbatches on this link: anything more is
        time in a queue. bytes_there, bytes_back: sizes of request and answer.
        """
        least = min(self.seat_waits_s, default=self.round_trip_s)
        round_trip = min(self.round_trip_s, least)
        transfer = (least - round_trip) * (1.0 + bytes_back / max(1, bytes_there))
        return round_trip + min(transfer, period_s)


@dataclass(frozen=True, slots=True)
class PathHint:
    """Which peers were last seen to hold a microbatch.

    peers: by the stage at which it enters them. finished: those that hold its result. Both are updated in place.
    """

    peers: dict[int, PeerId] = field(default_factory=dict)
    finished: set[PeerId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Choice:
    """The peer to ask, or None to wait, and why. Immutable.

    look_again_at: time at which a choice of None may change although nothing was recorded; infinite if it cannot.
    """

    peer: PeerId | None
    reason: str
    look_again_at: float = math.inf


class Candidate(NamedTuple):
    """One peer as choose_next sees it; immutable.

    ready_at: when it may be called; infinite when only an answer of that peer can make it ready. lead_s: seconds of
    work charged to it beyond the least charged peer. finish_s: expected seconds until it has computed the microbatch.
    obstacle: why it is not ready, in words; "" if it is.
    """

    peer: PeerId
    ready_at: float
    lead_s: float
    finish_s: float
    obstacle: str = ""


def choose_next(
    now: float, microbatch: MicrobatchId, stage: int, candidates: Sequence[Candidate], hint: PathHint
) -> Choice:
    """Returns the peer of `stage` to ask: the hinted one if it is ready, or the ready one of least lead_s + finish_s.

    The peer is None when none is ready, and when the hinted one holds the result and will be ready within BACKOFF_S.
    """
    held_by = hint.peers.get(stage)
    hinted = next((c for c in candidates if c.peer == held_by), None) if held_by is not None else None
    if hinted is not None and hinted.ready_at <= now:
        verb = "already holds the result of" if hinted.peer in hint.finished else "already works on"
        return Choice(hinted.peer, f"{verb} this microbatch")
    if hinted is not None and hinted.peer in hint.finished and hinted.ready_at <= now + BACKOFF_S:
        # its connection broke just before the answer: any other peer would count the microbatch a second time
        return Choice(None, f"the peer that holds the result is {hinted.obstacle}", hinted.ready_at)
    ready = [c for c in candidates if c.ready_at <= now]
    if not candidates:
        return Choice(None, f"no live peer holds stage {stage}")
    if not ready:
        soonest = min(c.ready_at for c in candidates)
        obstacles = ", ".join(sorted({c.obstacle for c in candidates if c.obstacle}))
        when = f"; next in {soonest - now:.2f} s" if soonest < math.inf else ""
        return Choice(None, f"all {len(candidates)} peers of stage {stage} are not ready ({obstacles}){when}", soonest)
    least = min([c.lead_s + c.finish_s for c in ready])
    alike = [c for c in ready if c.lead_s + c.finish_s == least]
    best = min(alike, key=lambda c: (zlib.crc32(microbatch + c.peer.encode()), c.peer))
    return Choice(best.peer, f"expected to finish in {best.finish_s:.3f} s, least of {len(ready)} ready peers")


def candidates_of(now: float, costs: Mapping[PeerId, PeerCost], payload_bytes: int) -> list[Candidate]:
    """Returns a Candidate for each peer in `costs`, the peers of one stage, for a microbatch of `payload_bytes`.

    Each says when the peer may be called, when it would finish, and how far its charges lead those of the others.
    """
    if not costs:
        return []
    idle_s = [cost.round_trip_s + payload_bytes / cost.bytes_per_s + cost.service_s for cost in costs.values()]
    charged_s = [cost.virtual_s for cost in costs.values()]
    floor = _floor(charged_s, idle_s)
    least = max(min(charged_s), floor)
    is_any_healthy = is_any_measured = False
    for cost in costs.values():
        is_any_healthy |= not cost.failures
        is_any_measured |= cost.answers > 0
    ranked: list[Candidate] = []
    for (peer, cost), idle, charged in zip(costs.items(), idle_s, charged_s, strict=True):
        ready_at, obstacle = _ready_at(cost, is_any_healthy, is_any_measured)
        lead = charged - least if charged > floor else floor - least
        finish = cost.queue_now(now) * cost.service_s + idle
        if cost.is_relayed:
            finish *= RELAYED_FACTOR
        ranked.append(Candidate(peer, ready_at, lead, finish, obstacle if ready_at > now else ""))
    return ranked


def _ready_at(cost: PeerCost, is_any_healthy: bool, is_any_measured: bool) -> tuple[float, str]:
    """Returns when a peer may be called, and the obstacle until then in words.

    The time is infinite if only an answer of that peer can end the obstacle. is_any_healthy: whether any peer of its
    stage has no failures. is_any_measured: whether any has answered.
    """
    if cost.failures:
        if cost.open_calls and is_any_healthy:
            return math.inf, "on trial"
        longest = MAX_BACKOFF_S if is_any_healthy else MAX_BACKOFF_WITHOUT_SIBLING_S
        backoff_s = min(longest, max(BACKOFF_S, cost.wasted_s) * 2.0 ** min(cost.failures - 1, 30))
        return cost.failed_at + backoff_s, "backing off"
    if is_any_measured and not cost.answers and cost.open_calls >= NEWCOMER_CALLS:
        return math.inf, "new"
    if cost.open_calls and cost.open_calls + 1 > cost.call_limit:
        return math.inf, "busy"
    return cost.busy_until, "busy"


def virtual_floor(costs: Iterable[PeerCost], payload_bytes: int) -> float:
    """Returns the least virtual runtime that counts: the largest less twice the longest idle finish time.

    So a peer that was idle for long does not get all microbatches until it has caught up.
    """
    costs = list(costs)
    return _floor([cost.virtual_s for cost in costs], [cost.idle_finish_s(payload_bytes) for cost in costs])


def _floor(charged_s: Sequence[float], idle_s: Sequence[float]) -> float:
    """Returns virtual_floor of peers by the seconds charged to each and the idle finish time of each."""
    return max(charged_s) - 2.0 * max(idle_s)
