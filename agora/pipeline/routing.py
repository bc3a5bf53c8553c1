"""Decides which peer of a later stage gets a microbatch, and by when it must answer. Deterministic.

A RoutingTable and its PeerStats change only by the calls to
the table. The rule is weighted round robin by virtual runtime (SWARM parallelism, arXiv 2301.11913, section 3.2) plus
the least expected finish time; docs/understand/routing.md explains it, and
docs/notes/routing.md lists the differences from SWARM.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high

from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.limits import MAX_DEADLINE_MS

from agora.core.moving_average import MovingAverage
from agora.pipeline.callees import choose_callees, rendezvous_key
from agora.pipeline.peer_choice import (
    BACKOFF_S,
    RELAYED_FACTOR,
    UNMEASURED_SERVICE_S,
    Choice,
    PathHint,
    PeerStats,
    choose_next,
    list_candidates,
    virtual_floor,
)
from agora.swarm.view import PeerView

# A peer counts as at most this many times as fast as usual in its stage; it bounds its share of the work.
MAX_SPEED_RATIO = 16.0
AVERAGE_WEIGHT = 0.1  # the weight of the newest sample in the moving averages of PeerStats
MAX_FAILURES = 64  # maximum number of failures in a row that are counted of one peer
# Minimum and maximum seconds that a peer is not called after it answered BUSY, whatever its answer asks for.
MIN_BUSY_S, MAX_BUSY_S = 0.01, 5.0
# An attempt gets at least the time of this many usual calls, or all that is left: a full queue is not a failure.
USUAL_CALLS = 4.0
# Largest part of its remaining time that a caller reserves for its own work, however long it expects that to take.
MAX_OWN_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call that sends a microbatch to one peer."""

    stage: int
    peer: PeerId
    stats: PeerStats  # the peer's entry in the table
    started: float  # when the microbatch was sent
    until: float  # when the caller stops waiting
    deadline_ms: int  # milliseconds that the peer is given, a little less than to `until`, see deadline_to_send
    payload_bytes: int
    charge_s: float  # virtual runtime that the peer was charged for the microbatch


def must_use_relay(mine: str, theirs: str) -> bool:
    """Returns whether two peers that claim these reachabilities can connect only through a relay.

    That is so if neither is "public" and at least one is "relayed" or "unreachable".
    """
    return "public" not in (mine, theirs) and not {mine, theirs}.isdisjoint({"relayed", "unreachable"})


@dataclass(frozen=True, slots=True)
class StagePeers:
    """The peers of one stage as of the last RoutingTable.update; only `callees` changes in between.

    replicas, suspended: as given to `update`.
    """

    replicas: Sequence[PeerView] = ()
    suspended: Collection[PeerId] = ()
    # `replicas` without this peer and without the suspended ones.
    live: Mapping[PeerId, PeerView] = field(default_factory=dict)
    # One for each of `live`, see callees.rendezvous_key.
    rendezvous_keys: Mapping[PeerId, float] = field(default_factory=dict)
    # The records about those of `live` that this peer calls, see callees.choose_callees; changed in place.
    callees: dict[PeerId, PeerStats] = field(default_factory=dict)
    # The records about other peers to which calls are still open.
    former_callees: Mapping[PeerId, PeerStats] = field(default_factory=dict)


class RoutingTable:
    """Holds a PeerStats for each peer of the later stages that may be called, and chooses among these peers.

    It changes only by the calls below. Call `update` before each choice. `record_sent` begins an attempt; exactly one
    of `record_answered`, `record_busy`, `record_failed` and `record_abandoned` must end the attempt.
    """

    def __init__(self, me: PeerId, stage_count: int) -> None:
        self._me = me
        self._stage_count = stage_count
        self._stages: defaultdict[int, StagePeers] = defaultdict(StagePeers)

    def callees(self, stage: int) -> dict[PeerId, PeerStats]:
        """Returns the PeerStats, by id, of each peer of `stage` that may be called, as of the last `update`."""
        return self._stages[stage].callees

    def update(
        self,
        stage: int,
        replicas: Sequence[PeerView],
        suspended: Collection[PeerId] = frozenset(),
        own_reachability: str = "unknown",
    ) -> None:
        """Sets which peers of `stage` may be called: choose_callees of `replicas`, without this peer and `suspended`.

        A new peer gets newcomer_stats. A peer with a higher incarnation (restarted) loses failures, queue and limits,
        but not the measured speed. Other peers are dropped; their stats are forgotten once no call to them is open.
        Also sets which peers need a relay, from own_reachability, which this peer claims. Does nothing if `replicas` is
        the same object as at the last call, and `suspended` equal.
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
                stats = callees[peer]  # its daemon was restarted: its speed is as before
                stats.incarnation = view.incarnation
                stats.failures, stats.wasted_s = 0, 0.0
                stats.busy_until = 0.0
                stats.call_limit = math.inf
                stats.queue, stats.sent_since = 0, 0
            callees[peer].is_relayed = must_use_relay(own_reachability, view.reachability)

    def choose(self, now: float, microbatch: MicrobatchId, stage: int, payload_bytes: int, hint: PathHint) -> Choice:
        """Chooses one of `callees(stage)` to send a microbatch to, see choose_next; peer None if none can be asked now.

        First adds the peer that `hint` names for the stage to `callees(stage)`, if it is live. Charges nothing.
        """
        self._admit_hinted(stage, hint)
        callees = self.callees(stage)
        if not callees and self._stages[stage].suspended:
            return Choice(None, f"every live peer of stage {stage} is suspended for its conduct")
        return choose_next(now, microbatch, stage, list_candidates(now, callees, payload_bytes), hint)

    def _admit_hinted(self, stage: int, hint: PathHint) -> None:
        peers = self._stages[stage]
        hinted = hint.peer_by_stage.get(stage)
        if hinted is None or hinted in peers.callees or hinted not in peers.live:
            return
        stats = peers.former_callees.get(hinted)
        if stats is None:
            view = peers.live[hinted]
            stats = newcomer_stats(peers.callees.values(), view.incarnation, view.capacity)
        peers.callees[hinted] = stats

    def record_sent(self, now: float, stage: int, peer: PeerId, payload_bytes: int, deadline: float) -> Attempt:
        """Charges `peer` for a microbatch that will be sent to it now; returns the attempt, which ends by `deadline`.

        The charge is the longer of service time and transfer, times RELAYED_FACTOR behind a relay; it is added to the
        virtual runtime, which is first raised to virtual_floor. Also counts an open call. Sends nothing itself. `peer`
        must be one of `callees(stage)`.
        """
        callees = self.callees(stage)
        stats = callees[peer]
        charge_s = max(stats.service_s, payload_bytes / stats.bytes_per_s)  # occupies the slower of device and link
        charge_s *= RELAYED_FACTOR if stats.is_relayed else 1.0
        stats.virtual_s = max(stats.virtual_s, virtual_floor(callees.values(), payload_bytes)) + charge_s
        stats.open_calls += 1
        stats.sent_since += 1
        others = len([True for other in callees.values() if other is not stats and not other.failures])
        until = attempt_deadline(now, deadline, stats.call_s, others, self._stage_count - stage)
        deadline_ms = deadline_to_send(now, until, 2.0 * stats.round_trip_s)
        return Attempt(stage, peer, stats, now, until, deadline_ms, payload_bytes, charge_s)

    def record_accepted(self, now: float, attempt: Attempt, queue: int, ping_s: float | None) -> None:
        """Records that the peer accepted the microbatch, and has `queue` microbatches at its device.

        Of the time since sending, ping_s (the idle link's round trip, None if unknown) counts as round trip and the
        rest as transfer; both are averaged. Without ping_s, all of the time counts as round trip.
        """
        stats = attempt.stats
        waited_s = now - attempt.started
        round_trip = waited_s if ping_s is None else min(waited_s, ping_s)
        if waited_s > round_trip and attempt.payload_bytes > 0:
            known = 0.0 if math.isinf(stats.bytes_per_s) else 1.0 / stats.bytes_per_s
            stats.bytes_per_s = 1.0 / _average(
                known, (waited_s - round_trip) / attempt.payload_bytes, stats.acceptances
            )
        stats.round_trip_s = _average(stats.round_trip_s, round_trip, stats.acceptances)
        stats.acceptances += 1
        stats.acceptance_waits_s.append(waited_s)
        self.record_queue(now, attempt, queue)

    def record_queue(self, now: float, attempt: Attempt, queue: int) -> None:
        """Records that the attempt's peer has `queue` microbatches at its device, as its progress messages report.

        Sets `sent_since` to 0: microbatches sent to the peer earlier are counted in `queue` now.
        """
        stats = attempt.stats
        stats.queue, stats.queue_at = queue, now
        stats.sent_since = 0

    def record_answered(
        self, now: float, attempt: Attempt, service_s: float, answer_bytes: int, period_s: float
    ) -> float:
        """Records an answer, which ends the attempt; returns the seconds on the link, see PeerStats.crossing_s.

        Averages service time and length of the call, clears the peer's failures, adds 0.5 / call_limit to its
        call_limit, and applies _bound_service_times to the stage. service_s: seconds on the peer's device, as the peer
        reports. answer_bytes: bytes of the answer's tensors. period_s: time between two answers to this caller.
        """
        stats = attempt.stats
        call_s = now - attempt.started
        stats.service_s = _average(stats.service_s, max(1e-6, min(service_s, call_s)), stats.answers)
        stats.call_s = _average(stats.call_s, call_s, stats.answers)
        stats.answers += 1
        stats.open_calls -= 1
        stats.failures, stats.wasted_s = 0, 0.0
        stats.call_limit += 0.5 / max(1.0, stats.call_limit)
        _bound_service_times(self.callees(attempt.stage).values())
        return stats.crossing_s(attempt.payload_bytes, answer_bytes, period_s)

    def record_abandoned(self, attempt: Attempt) -> None:
        """Ends an attempt that the caller gave up, or that did no work; measures nothing.

        Takes back the charge, the open call, and one microbatch of `sent_since`.
        """
        stats = attempt.stats
        stats.virtual_s -= attempt.charge_s
        stats.open_calls -= 1
        stats.sent_since = max(0, stats.sent_since - 1)

    def record_busy(self, now: float, attempt: Attempt, retry_after_s: float) -> None:
        """Ends an attempt that the peer refused as BUSY: takes back the charge, and limits further calls to the peer.

        The number of calls to it that stay open, at least 1, becomes its limit of open calls. No call is made for
        retry_after_s, the seconds that the peer asked for, clamped to MIN_BUSY_S and MAX_BUSY_S.
        """
        self.record_abandoned(attempt)
        stats = attempt.stats
        stats.call_limit = float(max(1, stats.open_calls))
        stats.busy_until = max(stats.busy_until, now + min(max(retry_after_s, MIN_BUSY_S), MAX_BUSY_S))

    def record_failed(self, now: float, attempt: Attempt, wasted_s: float, max_failures: int = MAX_FAILURES) -> None:
        """Ends an attempt that failed: takes back the charge and counts a failure of the peer, see _count_failure.

        wasted_s: seconds that the call took, which lengthen the pause before the next one. max_failures: failures in a
        row beyond which this one is not counted.
        """
        self.record_abandoned(attempt)
        _count_failure(attempt.stats, now, wasted_s, max_failures)

    def record_rejected(self, now: float, stage: int, peer: PeerId) -> None:
        """Counts a failure of `peer` whose answer was recorded by `record_answered`, but could not be used.

        Takes back no charge. Does nothing if the table has forgotten the peer.
        """
        peers = self._stages[stage]
        if stats := peers.callees.get(peer) or peers.former_callees.get(peer):
            _count_failure(stats, now, 0.0, MAX_FAILURES)


def _count_failure(stats: PeerStats, now: float, wasted_s: float, max_failures: int) -> None:
    # Otherwise failed_at becomes `now`. wasted_s: seconds that the failed call took; `stats` keeps the longest.
    stats.wasted_s = max(stats.wasted_s, wasted_s)
    if not stats.failures or now >= stats.failed_at + BACKOFF_S:
        stats.failures = min(stats.failures + 1, max(max_failures, stats.failures))
        stats.failed_at = now


def newcomer_stats(others: Iterable[PeerStats], incarnation: int, capacity: float = 0.0) -> PeerStats:
    """Returns the PeerStats of a new peer: medians over `others`, its stage's other peers, of charged time and speed.

    capacity: microbatches per second that the peer claims, 0 for unknown. Service time, round trip and call time are
    medians of the others that have answered; the claimed capacity may only lengthen the service time. Without
    others the charged time is 0; without measured ones a microbatch is assumed to take 1 / capacity seconds (but at
    least UNMEASURED_SERVICE_S / MAX_SPEED_RATIO), or UNMEASURED_SERVICE_S for an unknown capacity.
    """
    others = list(others)
    measured = [stats for stats in others if stats.answers]
    service = median(stats.service_s for stats in measured) if measured else UNMEASURED_SERVICE_S
    if capacity > 0:
        service = max(1.0 / capacity, service if measured else UNMEASURED_SERVICE_S / MAX_SPEED_RATIO)
    return PeerStats(
        virtual_s=median(stats.virtual_s for stats in others) if others else 0.0,
        service_s=service,
        round_trip_s=median(stats.round_trip_s for stats in measured) if measured else 0.0,
        call_s=median(stats.call_s for stats in measured) if measured else 0.0,
        incarnation=incarnation,
    )


def _bound_service_times(peers: Iterable[PeerStats]) -> None:
    # Peers report their own service times, and the shorter its time, the more work a peer gets: one that reports 0 ms
    # would get all of it.
    measured = [stats for stats in peers if stats.answers]
    if len(measured) > 1:
        least_s = median_high(stats.service_s for stats in measured) / MAX_SPEED_RATIO
        for stats in measured:
            stats.service_s = max(stats.service_s, least_s)


def _average(value: float, sample: float, samples: int) -> float:
    return MovingAverage(AVERAGE_WEIGHT, value, samples).with_sample(sample).value or 0.0


def attempt_deadline(now: float, deadline: float, expected_s: float, others: int, depth: int = 1) -> float:
    """Returns when to leave a callee and ask another peer, on the clock of `now`; at the latest `deadline`.

    That is after depth / (depth + 1) of the remaining time, so that every caller keeps an equal part for a retry, but
    not before USUAL_CALLS * expected_s, the usual seconds of a call. others: number of other peers to ask; with 0 the
    result is `deadline`. depth: number of stages from the callee's to the last.
    """
    remaining = deadline - now
    if others <= 0 or remaining <= 0:
        return deadline
    return now + min(max(remaining * depth / (depth + 1), USUAL_CALLS * expected_s), remaining)


def deadline_for_others(now: float, deadline: float, own_s: float) -> float:
    """Returns when the peers that a caller asks must be done: `deadline` less the time that the caller needs itself.

    That time is min(own_s, MAX_OWN_FRACTION * the remaining time). All times are on the clock of `now`.
    """
    return deadline - min(own_s, MAX_OWN_FRACTION * max(0.0, deadline - now))


def deadline_to_send(now: float, until: float, return_s: float) -> int:
    """Returns the milliseconds that a callee is given: until - now, less `return_s` seconds for its answer to return.

    The deduction is at most MAX_OWN_FRACTION of until - now; the result is between 1 and MAX_DEADLINE_MS.
    """
    left = deadline_for_others(now, until, return_s) - now
    return max(1, min(MAX_DEADLINE_MS, int(left * 1000.0)))
