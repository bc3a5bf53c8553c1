"""Load balancing: chooses the peer of the next stage that gets a microbatch, and by when it must answer. Deterministic.

Three decisions, in this order. `choose_callees`: a subset of the stage's peers, by weighted rendezvous hashing.
`list_candidates`: when each of these may be called (back-off) and how soon it would be done. `choose_next`: weighted
round robin by virtual runtime (SWARM parallelism, arXiv 2301.11913, section 3.2) plus the least expected finish.
docs/understand/routing.md explains them; docs/notes/routing.md has the figures and the differences from SWARM.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median, median_high, median_low
from typing import NamedTuple

from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.limits import MAX_DEADLINE_MS

from agora.core.moving_average import MovingAverage
from agora.swarm.view import PeerView

# A caller calls at most this many peers of one stage, and in addition those whose last call failed. If it called
# hundreds, each would answer it only every few minutes, and it would know nothing of their queues. With 8 it learns the
# length of each queue about as often as that queue is served.
MAX_CALLEES = 8
# A claimed capacity counts within these bounds, in medians of its stage. The lower bound gives a slow peer few callers
# rather than none.
MIN_TIMES_MEDIAN, MAX_TIMES_MEDIAN = 0.5, 16.0
UNMEASURED_SERVICE_S = 0.25  # assumed device seconds of a microbatch until a peer of the stage has been measured
FIRST_BACKOFF_S = 0.25  # least pause after a peer's first failure; it doubles with each further failure in a row
MAX_BACKOFF_S = 60.0
MAX_BACKOFF_IF_ALL_FAIL_S = 4.0  # while every peer of the stage fails there is nobody else to ask
ACCEPTANCE_WAITS = 128  # of each peer this many latest waits are kept, from sending to acceptance
# A peer that has never answered gets at most this many open calls, once another peer of its stage has answered.
NEWCOMER_CALLS = 2
# At a peer that is reached through a relay a microbatch counts as this many times as long: others share that link.
RELAYED_FACTOR = 1.5
# A peer counts as at most this many times as fast as usual in its stage. Peers report their own service times, and the
# shorter its time, the more work a peer gets: one that reports 0 ms would get all of it.
MAX_SPEED_RATIO = 16.0
MEASURED_CALLS = 32  # the caller infers from this many latest answered calls how long a peer's work took at least
# Other peers' calls spend some time elsewhere than on that peer's device. What a peer's calls take beyond this many
# times as long is its own device's time.
ELSEWHERE_FACTOR = 1.02
# In usual service times. While other peers' calls spend less than this elsewhere, a late call counts as waiting.
MAX_ELSEWHERE = 2.5
AVERAGE_WEIGHT = 0.1  # of the newest sample in the moving averages of PeerStats
MAX_FAILURES = 64  # failures in a row beyond which none is counted
MIN_BUSY_S, MAX_BUSY_S = 0.01, 5.0  # bounds of the pause after Busy, whatever the answer asks for
USUAL_CALLS = 4.0  # an attempt gets at least the time of this many usual calls: a full queue is not a failure
MAX_OWN_FRACTION = 0.25  # a caller reserves at most this fraction of its remaining time for its own work


@dataclass(slots=True)
class PeerStats:
    """What a caller knows about one peer of a later stage: work charged, times measured, open calls, failures.

    Times are on the clock whose `now` is given to the LoadBalancer.
    """

    virtual_s: float = 0.0  # seconds of work that were charged to the peer so far (virtual runtime)
    # Mean device seconds per microbatch (queueing theory: service time), as the peer reports them, and the least that
    # they can be by what this caller measured.
    service_s: float = UNMEASURED_SERVICE_S
    least_service_s: float = 0.0
    round_trip_s: float = 0.0  # mean round trip of the link, as far as it can be separated from the transfer
    bytes_per_s: float = math.inf  # mean rate of the link; infinite until a transfer was measured
    call_s: float = 0.0  # mean length of a whole call, everything downstream included
    answers: int = 0  # how often the peer has answered
    acceptances: int = 0  # how often the peer has accepted a microbatch, that is, given it a slot
    open_calls: int = 0  # this caller's open calls to the peer
    call_limit: float = math.inf  # how many open calls the peer accepts of this caller, learnt from Busy
    queue: int = 0  # microbatches at the peer's device, as the peer reported at `queue_at`
    queue_at: float = 0.0  # when the peer last reported `queue`
    sent_since: int = 0  # microbatches that this caller has sent since `queue_at`
    failures: int = 0  # failed calls in a row
    failed_at: float = 0.0  # when the last counted failure happened
    wasted_s: float = 0.0  # the longest time that one of these failures took
    busy_until: float = 0.0  # before this time the peer is not called, because it answered Busy
    is_relayed: bool = False  # whether the peer is reached through a relay
    incarnation: int = 0  # of the peer's claim; a higher one means that its daemon was restarted or has moved
    acceptance_waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=ACCEPTANCE_WAITS))  # since sending
    # Of the latest calls: seconds from acceptance to answer, and what of them the peer says its device did not need.
    worked_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_CALLS))
    off_device_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_CALLS))
    work_lower_quartile_s: float = 0.0  # the lower quartile of worked_s: few of these calls have waited
    unqueued_call_s: float = math.inf  # from acceptance, how long a call takes if it need not wait
    off_device_upper_quartile_s: float = 0.0  # the upper quartile of off_device_s
    sent_at: list[float] = field(default_factory=list)  # when each open call was made, in order

    @property
    def device_s(self) -> float:
        return max(self.service_s, self.least_service_s)

    def queue_now(self, now: float) -> float:
        """Expected microbatches ahead of a new one at the peer's device; not rounded.

        It is at least the number of this caller's open calls there that have lasted longer than a call without a wait.
        """
        # The reported queue drains at a quarter of the peer's speed: other callers keep filling it between our calls.
        waiting = self.queue - 0.25 * (now - self.queue_at) / max(self.device_s, 1e-6) if self.queue else 0.0
        reported = waiting + self.sent_since if waiting > 0.0 else float(self.sent_since)
        late = bisect_left(self.sent_at, now - self.round_trip_s - self.unqueued_call_s)
        return max(reported, float(late))

    def idle_finish_s(self, payload_bytes: int) -> float:
        """Seconds from sending a microbatch to the end of its device work if nothing else waits there."""
        return self.round_trip_s + payload_bytes / self.bytes_per_s + self.device_s

    def crossing_s(self, bytes_there: int, bytes_back: int, period_s: float) -> float:
        """A microbatch's seconds on the link, both ways, without waiting: a round trip and two transfers.

        bytes_there, bytes_back: sizes of request and answer. period_s: time between two microbatches on this link.
        """
        # The shortest of the latest waits is the one without a queue, as BBR knows a path (Cardwell et al., 2016).
        least = min(self.acceptance_waits_s, default=self.round_trip_s)
        round_trip = min(self.round_trip_s, least)
        transfer = (least - round_trip) * (1.0 + bytes_back / max(1, bytes_there))
        # A link that carries a microbatch every period_s cannot be occupied by one for longer: the rest is queueing.
        return round_trip + min(transfer, period_s)

    def count_failure(self, now: float, wasted_s: float, max_failures: int = MAX_FAILURES) -> None:
        """Counts a failed call that took `wasted_s`, unless `max_failures` in a row are counted already."""
        self.wasted_s = max(self.wasted_s, wasted_s)
        # A failure within FIRST_BACKOFF_S of the last one does not count: one broken connection fails all of its calls.
        if not self.failures or now >= self.failed_at + FIRST_BACKOFF_S:
            self.failures = min(self.failures + 1, max(max_failures, self.failures))
            self.failed_at = now

    def record_work(self, worked_s: float, reported_s: float) -> None:
        """Records how long an answered call took on the peer and behind it, and the device seconds that it reports."""
        self.worked_s.append(worked_s)
        self.off_device_s.append(max(0.0, worked_s - reported_s))
        self.work_lower_quartile_s = sorted(self.worked_s)[len(self.worked_s) // 4]
        self.off_device_upper_quartile_s = sorted(self.off_device_s)[3 * len(self.off_device_s) // 4]

    def restart(self, incarnation: int) -> None:
        """The peer's daemon was restarted: forgives failures, forgets queue and limits, keeps the measured speed."""
        self.incarnation = incarnation
        self.failures, self.wasted_s = 0, 0.0
        self.busy_until = 0.0
        self.call_limit = math.inf
        self.queue, self.sent_since = 0, 0
        self.sent_at.clear()


@dataclass(slots=True)
class RouteHint:
    """Where one microbatch was last seen; updated in place.

    peer_by_stage: stage at which it entered a peer -> that peer. finished: peers that hold its result.
    """

    peer_by_stage: dict[int, PeerId] = field(default_factory=dict)
    finished: set[PeerId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Choice:
    """The peer to ask, or None to wait, and the reason in words.

    look_again_at: when to choose again even if nothing has changed; infinite if only an answer or a new view can help.
    """

    peer: PeerId | None
    reason: str
    look_again_at: float = math.inf


class Candidate(NamedTuple):
    """One peer that may get a microbatch, as choose_next compares it with others."""

    peer: PeerId
    ready_at: float  # from when it may be called; infinite when only an answer of this peer can make it ready
    lead_s: float  # seconds of work charged to it beyond the least charged peer of the stage
    finish_s: float  # expected seconds until it has computed the microbatch
    obstacle: str = ""  # why it is not ready, in words


@dataclass(slots=True)
class Attempt:
    """One call that sends a microbatch to one peer."""

    stage: int
    peer: PeerId
    stats: PeerStats  # the peer's entry in the table
    started: float  # when the microbatch was sent
    until: float  # when the caller stops waiting
    deadline_ms: int  # milliseconds that the peer is given, a little less than to `until`
    payload_bytes: int
    charge_s: float  # virtual runtime that the peer was charged for the microbatch
    accepted_at: float | None = None  # when the peer said that it had begun; None: it has not


@dataclass(frozen=True, slots=True)
class StagePeers:
    """The peers of one stage as of the last LoadBalancer.update; only `callees` changes in between."""

    replicas: Sequence[PeerView] = ()
    suspended: Collection[PeerId] = ()
    live: Mapping[PeerId, PeerView] = field(default_factory=dict)  # `replicas` but this peer and the suspended ones
    rendezvous_keys: Mapping[PeerId, float] = field(default_factory=dict)  # one for each of `live`
    callees: dict[PeerId, PeerStats] = field(default_factory=dict)  # those of `live` that this peer calls
    former_callees: Mapping[PeerId, PeerStats] = field(default_factory=dict)  # others to which calls are still open


class LoadBalancer:
    """Holds a PeerStats for each peer of the later stages that may be called, and chooses among these peers.

    It changes only by the calls below. Call `update` before each choice. `record_sent` begins an attempt; exactly one
    of `record_answered`, `record_busy`, `record_failed` and `record_abandoned` must end it.
    """

    def __init__(self, me: PeerId, stage_count: int) -> None:
        self._me = me
        self._stage_count = stage_count
        self._stages: defaultdict[int, StagePeers] = defaultdict(StagePeers)

    def callees(self, stage: int) -> dict[PeerId, PeerStats]:
        """Returns the peers of `stage` that may be called, as of the last `update`."""
        return self._stages[stage].callees

    def update(
        self,
        stage: int,
        replicas: Sequence[PeerView],
        suspended: Collection[PeerId] = frozenset(),
        own_reachability: str = "unknown",
    ) -> None:
        """Sets which peers of `stage` may be called: choose_callees of `replicas`, without this peer and `suspended`.

        own_reachability: what this peer claims; decides with a peer's claim whether that one is reached by a relay.
        """
        known = self._stages[stage]
        if known.replicas is replicas and known.suspended == suspended:
            return  # the same view as at the last microbatch
        live = {view.peer: view for view in replicas if view.peer != self._me and view.peer not in suspended}
        keys = {peer: known.rendezvous_keys.get(peer) or rendezvous_key(self._me, peer) for peer in live}
        chosen = choose_callees(live, keys, {peer for peer, stats in known.callees.items() if stats.failures})
        former = {peer: stats for peer, stats in {**known.former_callees, **known.callees}.items() if stats.open_calls}
        callees = {peer: stats for peer, stats in {**former, **known.callees}.items() if peer in chosen}
        former = {peer: stats for peer, stats in former.items() if peer not in chosen}
        self._stages[stage] = StagePeers(replicas, suspended, live, keys, callees, former)
        others = list(callees.values())
        for peer, view in ((peer, view) for peer, view in live.items() if peer in chosen):
            if peer not in callees:
                callees[peer] = newcomer_stats(others, view.incarnation, view.capacity)
            elif view.incarnation > callees[peer].incarnation:
                callees[peer].restart(view.incarnation)
            callees[peer].is_relayed = must_use_relay(own_reachability, view.reachability)

    def choose(self, now: float, microbatch: MicrobatchId, stage: int, payload_bytes: int, hint: RouteHint) -> Choice:
        """Chooses one of `callees(stage)` to send a microbatch to; peer None if none can be asked now. Charges nothing.

        The peer that `hint` names for the stage becomes a callee until the next `update`, if it is live.
        """
        peers = self._stages[stage]
        hinted = hint.peer_by_stage.get(stage)
        if hinted is not None and hinted not in peers.callees and hinted in peers.live:
            view = peers.live[hinted]
            peers.callees[hinted] = peers.former_callees.get(hinted) or newcomer_stats(
                peers.callees.values(), view.incarnation, view.capacity
            )
        if not peers.callees and peers.suspended:
            return Choice(None, f"every live peer of stage {stage} is suspended for its conduct")
        return choose_next(now, microbatch, stage, list_candidates(now, peers.callees, payload_bytes), hint)

    def record_sent(self, now: float, stage: int, peer: PeerId, payload_bytes: int, deadline: float) -> Attempt:
        """Begins an attempt: charges `peer`, one of `callees(stage)`, for a microbatch that is sent to it now.

        The charge is how long the microbatch occupies the slower of the peer's device and link.
        """
        callees = self.callees(stage)
        stats = callees[peer]
        charge_s = max(stats.device_s, payload_bytes / stats.bytes_per_s)
        charge_s *= RELAYED_FACTOR if stats.is_relayed else 1.0
        stats.virtual_s = max(stats.virtual_s, virtual_floor(callees.values(), payload_bytes)) + charge_s
        stats.open_calls += 1
        stats.sent_at.append(now)
        stats.sent_since += 1
        others = len([True for other in callees.values() if other is not stats and not other.failures])
        until = attempt_deadline(now, deadline, stats.call_s, others, self._stage_count - stage)
        deadline_ms = deadline_to_send(now, until, 2.0 * stats.round_trip_s)
        return Attempt(stage, peer, stats, now, until, deadline_ms, payload_bytes, charge_s)

    def record_accepted(self, now: float, attempt: Attempt, queue: int, ping_s: float | None) -> None:
        """Records that the peer accepted the microbatch, and has `queue` microbatches at its device.

        ping_s: the idle link's round trip, None if unknown. The wait beyond it counts as transfer; without it, the
        whole wait counts as round trip.
        """
        stats = attempt.stats
        waited_s = now - attempt.started
        round_trip = waited_s if ping_s is None else min(waited_s, ping_s)
        if waited_s > round_trip and attempt.payload_bytes > 0:
            # The average is over seconds per byte: times add up, rates do not.
            known = 0.0 if math.isinf(stats.bytes_per_s) else 1.0 / stats.bytes_per_s
            stats.bytes_per_s = 1.0 / _average(
                known, (waited_s - round_trip) / attempt.payload_bytes, stats.acceptances
            )
        stats.round_trip_s = _average(stats.round_trip_s, round_trip, stats.acceptances)
        stats.acceptances += 1
        attempt.accepted_at = now
        stats.acceptance_waits_s.append(waited_s)
        self.record_queue(now, attempt, queue)

    def record_queue(self, now: float, attempt: Attempt, queue: int) -> None:
        """Records that the attempt's peer has `queue` microbatches at its device, as its progress messages report."""
        stats = attempt.stats
        stats.queue, stats.queue_at = queue, now
        stats.sent_since = 0  # those sent earlier are counted in `queue` now

    def record_answered(
        self, now: float, attempt: Attempt, service_s: float, answer_bytes: int, period_s: float
    ) -> float:
        """Records an answer, which ends the attempt; returns the seconds on the link, see PeerStats.crossing_s.

        service_s: seconds on the peer's device, as the peer reports; it counts up to the time of the whole call.
        period_s: time between two answers to this caller.
        """
        stats = attempt.stats
        call_s = now - attempt.started
        stats.service_s = _average(stats.service_s, max(1e-6, min(service_s, call_s)), stats.answers)
        accepted_at = attempt.started if attempt.accepted_at is None else attempt.accepted_at
        stats.record_work(max(0.0, now - accepted_at - answer_bytes / stats.bytes_per_s), service_s)
        stats.call_s = _average(stats.call_s, call_s, stats.answers)
        stats.answers += 1
        stats.open_calls -= 1
        _forget_sent(stats, attempt)
        stats.failures, stats.wasted_s = 0, 0.0
        # Additive increase, as TCP: Busy sets the limit back to what the peer has just accepted.
        stats.call_limit += 0.5 / max(1.0, stats.call_limit)
        _bound_service_times(self.callees(attempt.stage).values())
        return stats.crossing_s(attempt.payload_bytes, answer_bytes, period_s)

    def record_abandoned(self, attempt: Attempt) -> None:
        """Ends an attempt that the caller gave up, or that did no work: takes back the charge and measures nothing."""
        stats = attempt.stats
        stats.virtual_s -= attempt.charge_s
        stats.open_calls -= 1
        _forget_sent(stats, attempt)
        stats.sent_since = max(0, stats.sent_since - 1)

    def record_busy(self, now: float, attempt: Attempt, retry_after_s: float) -> None:
        """Ends an attempt that the peer refused as Busy, which is no failure. retry_after_s: as the peer asked."""
        self.record_abandoned(attempt)
        stats = attempt.stats
        stats.call_limit = float(max(1, stats.open_calls))
        stats.busy_until = max(stats.busy_until, now + min(max(retry_after_s, MIN_BUSY_S), MAX_BUSY_S))

    def record_failed(self, now: float, attempt: Attempt, wasted_s: float, max_failures: int = MAX_FAILURES) -> None:
        """Ends an attempt that failed; see PeerStats.count_failure."""
        self.record_abandoned(attempt)
        attempt.stats.count_failure(now, wasted_s, max_failures)

    def record_rejected(self, now: float, stage: int, peer: PeerId) -> None:
        """Counts a failure of `peer`, whose answer was recorded by `record_answered` but could not be used."""
        peers = self._stages[stage]
        if stats := peers.callees.get(peer) or peers.former_callees.get(peer):
            stats.count_failure(now, 0.0)


def choose_callees(
    live: Mapping[PeerId, PeerView], rendezvous_keys: Mapping[PeerId, float], failing: Collection[PeerId]
) -> set[PeerId]:
    """Returns the subset of a stage's peers that one caller calls: all of `live` if they are at most MAX_CALLEES.

    By weighted rendezvous hashing: the callers of a stage are spread over its peers by capacity, and when a peer
    leaves, only that one is replaced. rendezvous_keys: of each live peer, for this caller. failing: whose last call
    failed.
    """
    if len(live) <= MAX_CALLEES:
        return set(live)
    median_capacity = median_low([view.capacity for view in live.values() if view.capacity > 0] or [1.0])
    weights = {peer: _capacity_weight(view.capacity, median_capacity) for peer, view in live.items()}
    ranked = sorted([(rendezvous_keys[peer] / weight, peer) for peer, weight in weights.items()])
    chosen = set()
    healthy = 0
    for _, peer in ranked:
        chosen.add(peer)  # failing ones on the way too, so that they are tried again
        healthy += peer not in failing
        if healthy == MAX_CALLEES:
            break
    return chosen


@lru_cache(maxsize=4096)
def _capacity_weight(capacity: float, median_capacity: float) -> float:
    if capacity <= 0.0:
        return 1.0
    # Rounded to a power of two: the choice of callees stays the same while capacities change a little.
    ratio = min(max(capacity / median_capacity, MIN_TIMES_MEDIAN), MAX_TIMES_MEDIAN)
    return 2.0 ** round(math.log2(ratio))


def rendezvous_key(me: PeerId, peer: PeerId) -> float:
    """The sort key of weighted rendezvous hashing, before division by the peer's weight; lowest first.

    It is the hash of caller and peer as an exponential variate of mean 1.
    """
    digest = hashlib.blake2b(f"agora callee 1\0{me}\0{peer}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / 2**64)


def choose_next(
    now: float, microbatch: MicrobatchId, stage: int, candidates: Sequence[Candidate], hint: RouteHint
) -> Choice:
    """Chooses the ready peer of `stage` to ask: the one that `hint` names for it, otherwise least lead_s + finish_s.

    The peer is None when none is ready, and when the one that holds the result will be ready within FIRST_BACKOFF_S.
    """
    held_by = hint.peer_by_stage.get(stage)
    hinted = next((each for each in candidates if each.peer == held_by), None) if held_by is not None else None
    if hinted is not None and hinted.ready_at <= now:
        verb = "already holds the result of" if hinted.peer in hint.finished else "already works on"
        return Choice(hinted.peer, f"{verb} this microbatch")
    if hinted is not None and hinted.peer in hint.finished and hinted.ready_at <= now + FIRST_BACKOFF_S:
        # Its connection broke just before the answer: any other peer would count the microbatch a second time.
        return Choice(None, f"the peer that holds the result is {hinted.obstacle}", hinted.ready_at)
    ready = [candidate for candidate in candidates if candidate.ready_at <= now]
    if not candidates:
        return Choice(None, f"no live peer holds stage {stage}")
    if not ready:
        soonest = min(candidate.ready_at for candidate in candidates)
        obstacles = ", ".join(sorted({candidate.obstacle for candidate in candidates if candidate.obstacle}))
        when = f"; next in {soonest - now:.2f} s" if soonest < math.inf else ""
        return Choice(None, f"all {len(candidates)} peers of stage {stage} are not ready ({obstacles}){when}", soonest)
    least_s = min([candidate.lead_s + candidate.finish_s for candidate in ready])
    equals = [candidate for candidate in ready if candidate.lead_s + candidate.finish_s == least_s]
    # A hash of the microbatch chooses among equal peers, so that callers do not herd.
    best = min(equals, key=lambda candidate: (zlib.crc32(microbatch + candidate.peer.encode()), candidate.peer))
    times = f"finishes in {best.finish_s:.3f} s, with {best.lead_s:.3f} s charged ahead"
    return Choice(best.peer, f"{times}: the least sum of {len(ready)} ready peers")


def list_candidates(now: float, callees: Mapping[PeerId, PeerStats], payload_bytes: int) -> list[Candidate]:
    """Returns a Candidate for each of `callees`, the peers of one stage, for a microbatch of `payload_bytes`."""
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
        finish = stats.queue_now(now) * stats.device_s + idle
        if stats.is_relayed:
            finish *= RELAYED_FACTOR
        candidates.append(Candidate(peer, ready_at, lead, finish, obstacle if ready_at > now else ""))
    return candidates


def _ready_at(stats: PeerStats, is_any_healthy: bool, is_any_measured: bool) -> tuple[float, str]:
    # The first row that holds decides. A time in the past means ready, whatever the obstacle.
    #
    # | the peer                                                           | from when         | obstacle    |
    # |--------------------------------------------------------------------|-------------------|-------------|
    # | has failures and an open call; another has no failures             | infinite          | on trial    |
    # | has failures                                                       | failed_at + pause | backing off |
    # | has never answered, another has; NEWCOMER_CALLS calls are open     | infinite          | new         |
    # | has as many open calls as call_limit allows                        | infinite          | busy        |
    # | always                                                             | busy_until        | busy        |
    if stats.failures:
        if stats.open_calls and is_any_healthy:
            return math.inf, "on trial"
        longest = MAX_BACKOFF_S if is_any_healthy else MAX_BACKOFF_IF_ALL_FAIL_S
        backoff_s = min(longest, max(FIRST_BACKOFF_S, stats.wasted_s) * 2.0 ** min(stats.failures - 1, 30))
        return stats.failed_at + backoff_s, "backing off"
    if is_any_measured and not stats.answers and stats.open_calls >= NEWCOMER_CALLS:
        return math.inf, "new"
    if stats.open_calls and stats.open_calls + 1 > stats.call_limit:
        return math.inf, "busy"
    return stats.busy_until, "busy"


def virtual_floor(callees: Iterable[PeerStats], payload_bytes: int) -> float:
    """The lowest virtual runtime that counts in a stage: the highest one - 2 * the longest idle_finish_s.

    A peer with less counts as having this much; otherwise a peer that was idle for long would get all microbatches
    until it caught up.
    """
    callees = list(callees)
    return _floor([stats.virtual_s for stats in callees], [stats.idle_finish_s(payload_bytes) for stats in callees])


def _floor(charged_s: Sequence[float], idle_s: Sequence[float]) -> float:
    return max(charged_s) - 2.0 * max(idle_s)


def newcomer_stats(others: Iterable[PeerStats], incarnation: int, capacity: float = 0.0) -> PeerStats:
    """Returns the PeerStats of a new peer: medians over `others`, its stage's other peers, of charged time and speed.

    capacity: microbatches per second that the peer claims, 0 for unknown.
    """
    others = list(others)
    measured = [stats for stats in others if stats.answers]
    service = median(stats.device_s for stats in measured) if measured else UNMEASURED_SERVICE_S
    if capacity > 0:  # a claim may only lengthen the time: otherwise a peer could claim itself a flood of work
        service = max(1.0 / capacity, service if measured else UNMEASURED_SERVICE_S / MAX_SPEED_RATIO)
    return PeerStats(
        virtual_s=median(stats.virtual_s for stats in others) if others else 0.0,
        service_s=service,
        round_trip_s=median(stats.round_trip_s for stats in measured) if measured else 0.0,
        call_s=median(stats.call_s for stats in measured) if measured else 0.0,
        incarnation=incarnation,
    )


def _forget_sent(stats: PeerStats, attempt: Attempt) -> None:
    at = bisect_left(stats.sent_at, attempt.started)
    if at < len(stats.sent_at):
        del stats.sent_at[at]


def _bound_service_times(peers: Iterable[PeerStats]) -> None:
    # A peer reports its own service time, and gets less work the more it reports. So this caller bounds the reported
    # time by what it has measured: no less than a fraction of the stage's usual time, and no less than what the peer's
    # calls took beyond the time that the other peers' calls spent elsewhere. A peer that attracts more work by a lie
    # than it can compute must let it wait, and the wait counts as its work. If the peer does not compute it at all,
    # those find out who check answers.
    known = list(peers)
    measured = [stats for stats in known if stats.answers]
    if len(measured) == 1 and len(known) > 1:  # until another is measured too, this one counts as no faster than those
        measured[0].least_service_s = UNMEASURED_SERVICE_S
    if len(measured) < 2:
        return
    usual_s = median_high([stats.service_s for stats in measured])
    elsewhere = sorted(stats.off_device_upper_quartile_s for stats in measured)
    for stats in measured:
        of_others_s = elsewhere[-2] if stats.off_device_upper_quartile_s == elsewhere[-1] else elsewhere[-1]
        # At most the usual time: what the peer has let wait for longer counts as its queue, not as its work.
        own_s = min(stats.work_lower_quartile_s - ELSEWHERE_FACTOR * of_others_s, usual_s)
        stats.least_service_s = max(usual_s / MAX_SPEED_RATIO, own_s)
        # Where most of the time is spent elsewhere, a late call shows nothing about the peer's own queue.
        is_own = of_others_s <= MAX_ELSEWHERE * usual_s
        unqueued_call_s = min(stats.work_lower_quartile_s, of_others_s + max(stats.service_s, usual_s))
        stats.unqueued_call_s = unqueued_call_s if is_own else math.inf


def _average(value: float, sample: float, samples: int) -> float:
    # Without samples, `value` is an assumption, and the first sample replaces it.
    return MovingAverage(AVERAGE_WEIGHT, value, samples).with_sample(sample).value or 0.0


def must_use_relay(mine: str, theirs: str) -> bool:
    """Returns whether two peers that claim these reachabilities can connect only through a relay."""
    return "public" not in (mine, theirs) and not {mine, theirs}.isdisjoint({"relayed", "unreachable"})


def attempt_deadline(now: float, deadline: float, expected_s: float, others: int, depth: int = 1) -> float:
    """Returns when to leave a callee and ask another peer, on the clock of `now`; at the latest `deadline`.

    That is after depth / (depth + 1) of the remaining time, so that every caller on the path keeps an equal part for a
    retry. expected_s: the usual seconds of a call. others: number of other peers to ask. depth: number of stages from
    the callee's to the last.
    """
    remaining = deadline - now
    if others <= 0 or remaining <= 0:
        return deadline
    return now + min(max(remaining * depth / (depth + 1), USUAL_CALLS * expected_s), remaining)


def deadline_for_others(now: float, deadline: float, own_s: float) -> float:
    """Returns when the peers that a caller asks must be done: `deadline` less the `own_s` that it needs itself."""
    return deadline - min(own_s, MAX_OWN_FRACTION * max(0.0, deadline - now))


def deadline_to_send(now: float, until: float, return_s: float) -> int:
    """Returns the milliseconds that a callee is given: until - now, less `return_s` for its answer to return."""
    left = deadline_for_others(now, until, return_s) - now
    return max(1, min(MAX_DEADLINE_MS, int(left * 1000.0)))
