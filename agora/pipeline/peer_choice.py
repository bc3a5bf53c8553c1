"""Compares the peers of one stage, and chooses the one that gets a microbatch. Deterministic."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agora_protocol.ids import MicrobatchId, PeerId

# Device seconds that a microbatch is assumed to take until a peer of the stage has been measured.
UNMEASURED_SERVICE_S = 0.25
# Minimum seconds that a peer is not called after its first failure; they double with each further failure in a row.
BACKOFF_S = 0.25
MAX_BACKOFF_S = 60.0  # maximum seconds that a failing peer is not called
MAX_BACKOFF_IF_ALL_FAIL_S = 4.0  # maximum seconds that a failing peer is not called while every peer of its stage fails
ACCEPTANCE_WAITS = 128  # number of latest times from sending to acceptance that are kept of a peer
NEWCOMER_CALLS = 2  # maximum number of open calls to a peer that has never answered, once another peer of its stage has
# How many times as long a microbatch counts at a peer that is reached through a relay: others share that link.
RELAYED_FACTOR = 1.5


@dataclass(slots=True)
class PeerStats:
    """What a caller records about one peer of a later stage: work charged, times measured, open calls, failures.

    Only routing.py changes it. Times are on the clock whose `now` is given to the RoutingTable.
    """

    virtual_s: float = 0.0  # seconds of work that were charged to the peer so far (virtual runtime)
    service_s: float = UNMEASURED_SERVICE_S  # mean device seconds per microbatch (queueing theory: service time)
    round_trip_s: float = 0.0  # mean round trip of the link, as far as it can be separated from the transfer
    bytes_per_s: float = math.inf  # mean rate of the link; infinite until a transfer was measured
    call_s: float = 0.0  # mean length of a whole call, everything downstream included
    answers: int = 0  # how often the peer has answered
    acceptances: int = 0  # how often the peer has accepted a microbatch, that is, given it a slot
    open_calls: int = 0  # this caller's open calls to the peer
    call_limit: float = math.inf  # how many open calls the peer accepts of this caller, learnt from BUSY
    queue: int = 0  # microbatches at the peer's device, as the peer reported at `queue_at`
    queue_at: float = 0.0  # when the peer last reported `queue`
    sent_since: int = 0  # microbatches that this caller has sent since `queue_at`
    failures: int = 0  # failed calls in a row
    failed_at: float = 0.0  # when the last counted failure happened
    wasted_s: float = 0.0  # the longest time that one of these failures took
    busy_until: float = 0.0  # before this time the peer is not called, because it answered BUSY
    is_relayed: bool = False  # whether the peer is reached through a relay, see `must_use_relay`
    incarnation: int = 0  # of the peer's claim; a higher one means that its daemon was restarted or has moved
    acceptance_waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=ACCEPTANCE_WAITS))  # since sending

    def queue_now(self, now: float) -> float:
        """Returns how many microbatches are expected to be ahead of a new one at the peer's device; not rounded.

        That is max(0, queue - 0.25 * seconds since the peer reported `queue` / service_s) + sent_since.
        """
        # at a quarter of the peer's speed, because other callers keep filling the queue between our calls
        waiting = self.queue - 0.25 * (now - self.queue_at) / max(self.service_s, 1e-6) if self.queue else 0.0
        return waiting + self.sent_since if waiting > 0.0 else float(self.sent_since)

    def idle_finish_s(self, payload_bytes: int) -> float:
        """Returns the seconds from sending a microbatch to the end of its device work if nothing else waits there.

        That is round_trip_s + payload_bytes / bytes_per_s + service_s; what is unmeasured has its default.
        """
        return self.round_trip_s + payload_bytes / self.bytes_per_s + self.service_s

    def crossing_s(self, bytes_there: int, bytes_back: int, period_s: float) -> float:
        """Returns a microbatch's seconds on the link, both ways, without waiting: a round trip and two transfers.

        Round trip and request take the shortest kept acceptance wait; the answer's transfer is in proportion to its
        size. Both transfers together count as at most `period_s`, the time between two microbatches on this link:
        anything more is time in a queue. bytes_there, bytes_back: sizes of request and answer.
        """
        least = min(self.acceptance_waits_s, default=self.round_trip_s)
        round_trip = min(self.round_trip_s, least)
        transfer = (least - round_trip) * (1.0 + bytes_back / max(1, bytes_there))
        return round_trip + min(transfer, period_s)


@dataclass(slots=True)
class PathHint:
    """Where one microbatch was last seen. peer_by_stage: stage at which it entered a peer -> that one peer.

    finished: peers that have finished the microbatch and hold its result. Both are updated in place.
    """

    peer_by_stage: dict[int, PeerId] = field(default_factory=dict)
    finished: set[PeerId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Choice:
    """The peer to ask, or None to wait, and the reason in words.

    look_again_at: if the peer is None, the time at which to choose again even if nothing has changed by then; infinite
    if only a record in the RoutingTable or a change of the view can help.
    """

    peer: PeerId | None
    reason: str
    look_again_at: float = math.inf


class Candidate(NamedTuple):
    """One peer that may get a microbatch, as choose_next compares it with others.

    ready_at: time from which the peer may be called; infinite when only an answer of this peer can make it ready.
    lead_s: seconds of work charged to the peer beyond the least charged peer of the stage.
    finish_s: expected seconds until the peer has computed the microbatch.
    obstacle: why the peer is not ready, in words; "" if it is ready.
    """

    peer: PeerId
    ready_at: float
    lead_s: float
    finish_s: float
    obstacle: str = ""


def choose_next(
    now: float, microbatch: MicrobatchId, stage: int, candidates: Sequence[Candidate], hint: PathHint
) -> Choice:
    """Chooses the peer of `stage` to ask: the one that `hint` names for it, if ready; else least lead_s + finish_s.

    Only ready candidates are chosen. The peer is None when none is ready, and when the hinted one holds the result and
    will be ready within BACKOFF_S. Between equal sums, a hash of `microbatch` and the peer's id decides.
    """
    held_by = hint.peer_by_stage.get(stage)
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


def list_candidates(now: float, callees: Mapping[PeerId, PeerStats], payload_bytes: int) -> list[Candidate]:
    """Returns a Candidate for each peer in `callees`, the peers of one stage, for a microbatch of `payload_bytes`.

    Charged time below virtual_floor counts as the floor. Expected finish: queue_now * service_s + idle_finish_s, times
    RELAYED_FACTOR for a peer behind a relay. `callees` is not changed.
    """
    if not callees:
        return []
    idle_s = [stats.idle_finish_s(payload_bytes) for stats in callees.values()]
    charged_s = [stats.virtual_s for stats in callees.values()]
    floor = _floor(charged_s, idle_s)
    least = max(min(charged_s), floor)
    is_any_healthy = is_any_measured = False
    for stats in callees.values():
        is_any_healthy |= not stats.failures
        is_any_measured |= stats.answers > 0
    candidates: list[Candidate] = []
    for (peer, stats), idle, charged in zip(callees.items(), idle_s, charged_s, strict=True):
        ready_at, obstacle = _ready_at(stats, is_any_healthy, is_any_measured)
        lead = charged - least if charged > floor else floor - least
        finish = stats.queue_now(now) * stats.service_s + idle
        if stats.is_relayed:
            finish *= RELAYED_FACTOR
        candidates.append(Candidate(peer, ready_at, lead, finish, obstacle if ready_at > now else ""))
    return candidates


def _ready_at(stats: PeerStats, is_any_healthy: bool, is_any_measured: bool) -> tuple[float, str]:
    # Returns from when a peer may be called, and the obstacle until then in words. | the first that holds | from when |
    # obstacle | |-------------------------------------------------------------------|-------------------|-------------|
    # | the peer has failures and an open call; another has no failures | infinite | on trial | | the peer has failures
    # | failed_at + pause | backing off | | it has never answered, another has;
    if stats.failures:
        if stats.open_calls and is_any_healthy:
            return math.inf, "on trial"
        longest = MAX_BACKOFF_S if is_any_healthy else MAX_BACKOFF_IF_ALL_FAIL_S
        backoff_s = min(longest, max(BACKOFF_S, stats.wasted_s) * 2.0 ** min(stats.failures - 1, 30))
        return stats.failed_at + backoff_s, "backing off"
    if is_any_measured and not stats.answers and stats.open_calls >= NEWCOMER_CALLS:
        return math.inf, "new"
    if stats.open_calls and stats.open_calls + 1 > stats.call_limit:
        return math.inf, "busy"
    return stats.busy_until, "busy"


def virtual_floor(callees: Iterable[PeerStats], payload_bytes: int) -> float:
    """Returns the lowest virtual runtime that counts in a stage: the highest one - 2 * the longest idle_finish_s.

    A peer with less counts as having this much; otherwise a peer that was idle for long would get all microbatches
    until it caught up. callees: all that are called of one stage, at least one.
    """
    callees = list(callees)
    return _floor([stats.virtual_s for stats in callees], [stats.idle_finish_s(payload_bytes) for stats in callees])


def _floor(charged_s: Sequence[float], idle_s: Sequence[float]) -> float:
    return max(charged_s) - 2.0 * max(idle_s)
