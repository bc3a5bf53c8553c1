"""Decides which peer of a later stage gets a microbatch, and by when it must answer. Deterministic.

Knows: what was measured of every peer that serves a stage. Must not know: how peers are compared (peer_choice.py); a
clock (`now` is an argument), the network, or randomness. The functions are pure; a RoutingTable changes only itself,
and only by the calls to it. The rule is weighted round robin by virtual runtime (SWARM parallelism, arXiv 2301.11913,
section 3.2) plus the least expected finish time; docs/routing.md explains it, and docs/notes/routing.md lists the
differences from SWARM.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high

from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.limits import MAX_DEADLINE_MS

from agora.moving_average import MovingAverage
from agora.pipeline.callees import choose_callees, place_of
from agora.pipeline.peer_choice import (
    BACKOFF_S,
    RELAYED_FACTOR,
    UNMEASURED_SERVICE_S,
    Choice,
    PathHint,
    PeerCost,
    candidates_of,
    choose_next,
    virtual_floor,
)
from agora.swarm.view import PeerView

MAX_SPEED_RATIO = 16.0
"""A peer counts as at most this many times as fast as usual in its stage; it bounds its share of the work."""
AVERAGE_WEIGHT = 0.1
"""The weight of the newest sample in the moving averages of PeerCost."""
MAX_FAILURES = 64
"""Maximum number of failures in a row that are counted of one peer."""
MIN_BUSY_S, MAX_BUSY_S = 0.01, 5.0
"""Minimum and maximum seconds that a peer is not called after it answered BUSY, whatever its answer asks for."""
USUAL_CALLS = 4.0
"""An attempt gets at least the time of this many usual calls, or all that is left: a full queue is not a failure."""
MAX_OWN_FRACTION = 0.25
"""Largest part of its remaining time that a caller keeps for itself, so that a wrong estimate leaves others enough."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of a microbatch to one peer; immutable.

    cost: the peer's entry in the table. until: the time at which the caller stops waiting. deadline_ms: the time that
    the peer is given, a little less, see deadline_to_send. charge_s: virtual runtime that the peer was charged for it.
    """

    stage: int
    peer: PeerId
    cost: PeerCost
    started: float
    until: float
    deadline_ms: int
    payload_bytes: int
    charge_s: float


def must_use_relay(mine: str, theirs: str) -> bool:
    """Returns whether two peers that claim these reachabilities can connect only through a relay.

    They need none if one of them is public, or if both are reached through punched holes.
    """
    return "public" not in (mine, theirs) and not {mine, theirs}.isdisjoint({"relayed", "unreachable"})


@dataclass(frozen=True, slots=True)
class StagePeers:
    """The peers of one stage at the last RoutingTable.update; immutable except for the costs.

    live: the replicas other than this peer and those shut out. places: theirs, see callees.place_of. costs: of those of
    them that are called, see callees.choose_callees. former: the costs of other peers while calls to them are open.
    """

    replicas: Sequence[PeerView] = ()
    shut_out: Collection[PeerId] = ()
    live: Mapping[PeerId, PeerView] = field(default_factory=dict)
    places: Mapping[PeerId, float] = field(default_factory=dict)
    costs: dict[PeerId, PeerCost] = field(default_factory=dict)
    former: Mapping[PeerId, PeerCost] = field(default_factory=dict)


class RoutingTable:
    """The costs of all peers of the later stages, from which the router chooses. It changes only by the calls below.

    Call `update` before each choice. `record_sent` begins an attempt; exactly one of `record_answered`, `record_busy`,
    `record_failed` and `record_abandoned` must end it.
    """

    def __init__(self, me: PeerId, stage_count: int) -> None:
        self._me = me
        self._stage_count = stage_count
        self._stages: defaultdict[int, StagePeers] = defaultdict(StagePeers)

    def costs(self, stage: int) -> dict[PeerId, PeerCost]:
        """Returns the cost, by id, of each peer of `stage` that may be called, as of the last `update`."""
        return self._stages[stage].costs

    def update(
        self,
        stage: int,
        replicas: Sequence[PeerView],
        shut_out: Collection[PeerId] = frozenset(),
        own_reachability: str = "unknown",
    ) -> None:
        """Sets which peers serve `stage`: adds new ones, drops those gone or shut out, forgives restarted ones.

        Of many it keeps only those that choose_callees returns. own_reachability: of this peer, by its claim.
        """
        known = self._stages[stage]
        if known.replicas is replicas and known.shut_out == shut_out:
            return  # the same view as at the last microbatch
        live = {view.peer: view for view in replicas if view.peer != self._me and view.peer not in shut_out}
        places = {peer: known.places.get(peer) or place_of(self._me, peer) for peer in live}
        callees = choose_callees(live, places, {peer for peer, cost in known.costs.items() if cost.failures})
        former = {peer: cost for peer, cost in {**known.former, **known.costs}.items() if cost.open_calls}
        costs = {peer: cost for peer, cost in {**former, **known.costs}.items() if peer in callees}
        former = {peer: cost for peer, cost in former.items() if peer not in callees}
        self._stages[stage] = StagePeers(replicas, shut_out, live, places, costs, former)
        siblings = list(costs.values())
        for peer, view in ((peer, view) for peer, view in live.items() if peer in callees):
            if peer not in costs:
                costs[peer] = newcomer(siblings, view.incarnation, view.capacity)
            elif view.incarnation > costs[peer].incarnation:
                cost = costs[peer]  # its daemon was restarted: its speed is as before
                cost.incarnation, cost.failures, cost.wasted_s = view.incarnation, 0, 0.0
                cost.busy_until, cost.call_limit, cost.queue, cost.sent_since = 0.0, math.inf, 0, 0
            costs[peer].is_relayed = must_use_relay(own_reachability, view.reachability)

    def choose(self, now: float, microbatch: MicrobatchId, stage: int, payload_bytes: int, hint: PathHint) -> Choice:
        """Chooses the peer of `stage` to ask for a microbatch, see choose_next; None if none can be asked now."""
        self._admit_hinted(stage, hint)
        costs = self.costs(stage)
        if not costs and self._stages[stage].shut_out:
            return Choice(None, f"every live peer of stage {stage} is shut out for its conduct")
        return choose_next(now, microbatch, stage, candidates_of(now, costs, payload_bytes), hint)

    def _admit_hinted(self, stage: int, hint: PathHint) -> None:
        """Makes the live peer of `stage` that holds a microbatch a callee until the next `update`, if it is none."""
        peers, hinted = self._stages[stage], hint.peers.get(stage)
        if hinted is None or hinted in peers.costs or hinted not in peers.live:
            return
        view, siblings = peers.live[hinted], peers.costs.values()
        peers.costs[hinted] = peers.former.get(hinted) or newcomer(siblings, view.incarnation, view.capacity)

    def record_sent(self, now: float, stage: int, peer: PeerId, payload_bytes: int, deadline: float) -> Attempt:
        """Charges `peer` for a microbatch that will be sent to it; returns the attempt, which ends by `deadline`.

        Sends nothing itself. `peer` must be one of `costs(stage)`.
        """
        costs = self.costs(stage)
        cost = costs[peer]
        charge_s = max(cost.service_s, payload_bytes / cost.bytes_per_s)  # it occupies the slower of device and link
        charge_s *= RELAYED_FACTOR if cost.is_relayed else 1.0
        cost.virtual_s = max(cost.virtual_s, virtual_floor(costs.values(), payload_bytes)) + charge_s
        cost.open_calls += 1
        cost.sent_since += 1
        others = len([True for sibling in costs.values() if sibling is not cost and not sibling.failures])
        until = attempt_deadline(now, deadline, cost.call_s, others, self._stage_count - stage)
        deadline_ms = deadline_to_send(now, until, 2.0 * cost.round_trip_s)
        return Attempt(stage, peer, cost, now, until, deadline_ms, payload_bytes, charge_s)

    def record_accepted(self, now: float, attempt: Attempt, queue: int, ping_s: float | None) -> None:
        """Records that the peer gave the microbatch a seat, and has `queue` microbatches at its device.

        Of the time since sending, ping_s (the idle link's round trip, None if unknown) counts as round trip and the
        rest as transfer.
        """
        cost, waited_s = attempt.cost, now - attempt.started
        round_trip = waited_s if ping_s is None else min(waited_s, ping_s)
        if waited_s > round_trip and attempt.payload_bytes > 0:
            known = 0.0 if math.isinf(cost.bytes_per_s) else 1.0 / cost.bytes_per_s
            cost.bytes_per_s = 1.0 / _average(known, (waited_s - round_trip) / attempt.payload_bytes, cost.seats)
        cost.round_trip_s = _average(cost.round_trip_s, round_trip, cost.seats)
        cost.seats += 1
        cost.seat_waits_s.append(waited_s)
        self.record_queue(now, attempt, queue)

    def record_queue(self, now: float, attempt: Attempt, queue: int) -> None:
        """Records that the peer has `queue` microbatches at its device, as it says when it accepts or finishes one."""
        cost = attempt.cost
        cost.queue, cost.queue_at, cost.sent_since = queue, now, 0

    def record_answered(
        self, now: float, attempt: Attempt, service_s: float, answer_bytes: int, period_s: float
    ) -> float:
        """Records an answer, clears the peer's failures, and returns the seconds on the link, see PeerCost.crossing_s.

        service_s: seconds on the peer's device, as the peer says. answer_bytes: bytes of the answer's tensors.
        period_s: time between two answers to this caller.
        """
        cost, call_s = attempt.cost, now - attempt.started
        cost.service_s = _average(cost.service_s, max(1e-6, min(service_s, call_s)), cost.answers)
        cost.call_s = _average(cost.call_s, call_s, cost.answers)
        cost.answers += 1
        cost.open_calls -= 1
        cost.failures, cost.wasted_s = 0, 0.0
        cost.call_limit += 0.5 / max(1.0, cost.call_limit)
        _bound_shares(self.costs(attempt.stage).values())
        return cost.crossing_s(attempt.payload_bytes, answer_bytes, period_s)

    def record_abandoned(self, attempt: Attempt) -> None:
        """Records that the caller gave up, or that no work was done: takes back the charge, measures nothing."""
        cost = attempt.cost
        cost.virtual_s -= attempt.charge_s
        cost.open_calls -= 1
        cost.sent_since = max(0, cost.sent_since - 1)

    def record_busy(self, now: float, attempt: Attempt, retry_after_s: float) -> None:
        """Records BUSY: takes back the charge, allows no more open calls than now, and no new one for `retry_after_s`.

        retry_after_s: seconds that the peer asked for, bounded to MIN_BUSY_S to MAX_BUSY_S.
        """
        self.record_abandoned(attempt)
        cost = attempt.cost
        cost.call_limit = float(max(1, cost.open_calls))
        cost.busy_until = max(cost.busy_until, now + min(max(retry_after_s, MIN_BUSY_S), MAX_BUSY_S))

    def record_failed(self, now: float, attempt: Attempt, wasted_s: float, max_failures: int = MAX_FAILURES) -> None:
        """Takes back the charge and counts a failure, up to `max_failures` in a row. wasted_s: seconds of the call."""
        self.record_abandoned(attempt)
        _count_failure(attempt.cost, now, wasted_s, max_failures)

    def record_rejected(self, now: float, stage: int, peer: PeerId) -> None:
        """Counts a failure of `peer` after `record_answered`: its answer had the right form, but could not be used."""
        peers = self._stages[stage]
        if cost := peers.costs.get(peer) or peers.former.get(peer):
            _count_failure(cost, now, 0.0, MAX_FAILURES)


def _count_failure(cost: PeerCost, now: float, wasted_s: float, max_failures: int) -> None:
    """Counts a failure in `cost`. Failures within BACKOFF_S count once: one broken connection fails all its calls."""
    cost.wasted_s = max(cost.wasted_s, wasted_s)
    if not cost.failures or now >= cost.failed_at + BACKOFF_S:
        cost.failures = min(cost.failures + 1, max(max_failures, cost.failures))
        cost.failed_at = now


def newcomer(siblings: Iterable[PeerCost], incarnation: int, capacity: float = 0.0) -> PeerCost:
    """Returns the PeerCost of a new peer: medians over its stage's other peers, `siblings`, of charged time and speed.

    capacity: microbatches per second that the peer claims, 0 for unknown. Where siblings were measured, the claim may
    only lower the expected speed.
    """
    siblings = list(siblings)
    measured = [cost for cost in siblings if cost.answers]
    service = median(cost.service_s for cost in measured) if measured else UNMEASURED_SERVICE_S
    if capacity > 0:
        service = max(1.0 / capacity, service if measured else UNMEASURED_SERVICE_S / MAX_SPEED_RATIO)
    return PeerCost(
        virtual_s=median(cost.virtual_s for cost in siblings) if siblings else 0.0,
        service_s=service,
        round_trip_s=median(cost.round_trip_s for cost in measured) if measured else 0.0,
        call_s=median(cost.call_s for cost in measured) if measured else 0.0,
        incarnation=incarnation,
    )


def _bound_shares(siblings: Iterable[PeerCost]) -> None:
    """Raises service times that are shorter than the usual one, the upper median, by more than MAX_SPEED_RATIO.

    Peers report their own service times, and work is divided by them: a peer that reports 0 ms would get all of it.
    """
    measured = [cost for cost in siblings if cost.answers]
    if len(measured) > 1:
        least_s = median_high(cost.service_s for cost in measured) / MAX_SPEED_RATIO
        for cost in measured:
            cost.service_s = max(cost.service_s, least_s)


def _average(value: float, sample: float, samples: int) -> float:
    """Returns the moving average after a further `sample`.

    value: the average of the `samples` before; if there were none, an assumption that the sample replaces.
    """
    return MovingAverage(AVERAGE_WEIGHT, value, samples).with_sample(sample).value or 0.0


def attempt_deadline(now: float, deadline: float, expected_s: float, others: int, depth: int = 1) -> float:
    """Returns when to leave a callee and ask another peer, on the clock of `now`; `deadline` if `others` is 0.

    It is after depth / (depth + 1) of the remaining time, so that every caller keeps an equal part for a retry; but not
    before USUAL_CALLS * expected_s. others: number of other peers to ask. depth: number of stages from the callee to
    the last.
    """
    remaining = deadline - now
    if others <= 0 or remaining <= 0:
        return deadline
    return now + min(max(remaining * depth / (depth + 1), USUAL_CALLS * expected_s), remaining)


def deadline_for_others(now: float, deadline: float, own_s: float) -> float:
    """Returns when others must be done: min(own_s, MAX_OWN_FRACTION of the remaining time) before `deadline`."""
    return deadline - min(own_s, MAX_OWN_FRACTION * max(0.0, deadline - now))


def deadline_to_send(now: float, until: float, return_s: float) -> int:
    """Returns the milliseconds that a callee is given: until `until`, less `return_s` seconds for its answer."""
    left = deadline_for_others(now, until, return_s) - now
    return max(1, min(MAX_DEADLINE_MS, int(left * 1000.0)))
