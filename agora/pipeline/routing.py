"""Decides which peer of a later stage gets a microbatch, and by when it must answer. Pure.

Knows: the PeerCost of every peer that serves a stage. Must not know: a clock (`now` is an argument), the network, or
randomness. docs/routing.md explains the rule.

The rule is weighted round robin by virtual runtime (SWARM parallelism, arXiv 2301.11913, section 3.2) plus the least
expected finish time. `rank = lead + finish`, in seconds:

    lead   = seconds charged to the peer beyond the sibling that was charged least
    finish = queue * service + service + round trip + bytes / bandwidth

Differences from SWARM's code: a charge is taken back when no work was done; BUSY is no failure; a newcomer starts at
the median of its siblings instead of the least (which can be hours behind), and has at most two calls until its first
answer; the lead is bounded by twice the largest cost of an idle peer, so that a peer that was away owes nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.limits import MAX_DEADLINE_MS

from agora.pipeline.peer_cost import BACKOFF_S, PeerCost, newcomer
from agora.swarm.view import PeerView

NEWCOMER_CALLS = 2
MAX_OWN_SHARE = 0.25
"""No caller keeps more than this share of its remaining time for itself: a wrong estimate must not starve the rest."""


@dataclass(frozen=True, slots=True)
class PathHint:
    """The peers that took this microbatch before, by entry stage; those in `finished` hold its result."""

    peers: Mapping[int, PeerId] = field(default_factory=dict)
    finished: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """The peer to ask, and why. When it is None, `look_again_at` is when the answer may differ by itself."""

    peer: PeerId | None
    reason: str
    look_again_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call of a microbatch to one peer, with its deadlines and its charge.

    until: when we stop waiting. deadline_ms: what the peer is told, a little less, so that its answer or refusal still
    arrives in time. charge_s: virtual runtime that it was charged.
    """

    stage: int
    peer: PeerId
    started: float
    until: float
    deadline_ms: int
    payload_bytes: int
    charge_s: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One peer as `choose_next` sees it. `ready_at` is infinite when only an answer of that peer can make it ready."""

    peer: PeerId
    ready_at: float
    lead_s: float
    finish_s: float
    obstacle: str = ""

    @property
    def rank_s(self) -> float:
        """What the choice minimises, in seconds."""
        return self.lead_s + self.finish_s


def choose_next(
    now: float, microbatch: MicrobatchId, stage: int, candidates: Sequence[Candidate], hint: PathHint
) -> Choice:
    """Chooses the peer of `stage` to ask: one that already has the microbatch, else the ready one of the least rank."""
    hinted = next((c for c in candidates if c.peer == hint.peers.get(stage)), None)
    if hinted is not None and hinted.ready_at <= now:
        verb = "already holds the result of" if hinted.peer in hint.finished else "already works on"
        return Choice(hinted.peer, f"{verb} this microbatch")
    if hinted is not None and hinted.peer in hint.finished and hinted.ready_at <= now + BACKOFF_S:
        # a connection that broke just before the answer: anybody else would count the microbatch a second time
        return Choice(None, f"the peer that holds the result is {hinted.obstacle}", hinted.ready_at)
    ready = [c for c in candidates if c.ready_at <= now]
    if not ready:
        return _choose_nobody(now, stage, candidates)
    best = min(ready, key=lambda c: (c.rank_s, zlib.crc32(microbatch + c.peer.encode()), c.peer))
    return Choice(best.peer, f"expected to finish in {best.finish_s:.3f} s, least of {len(ready)} ready peers")


def _choose_nobody(now: float, stage: int, candidates: Sequence[Candidate]) -> Choice:
    """Returns the choice of no peer, with the reasons and when the first peer becomes ready."""
    if not candidates:
        return Choice(None, f"no live peer holds stage {stage}")
    soonest = min(c.ready_at for c in candidates)
    obstacles = ", ".join(sorted({c.obstacle for c in candidates if c.obstacle}))
    when = f"; next in {soonest - now:.2f} s" if soonest < math.inf else ""
    return Choice(None, f"all {len(candidates)} peers of stage {stage} are not ready ({obstacles}){when}", soonest)


def candidates_of(now: float, costs: Mapping[PeerId, PeerCost], payload_bytes: int) -> list[Candidate]:
    """Ranks all peers of a stage for one microbatch of `payload_bytes`."""
    if not costs:
        return []
    floor = virtual_floor(costs.values(), payload_bytes)
    least = min(max(cost.virtual_s, floor) for cost in costs.values())
    healthy = any(cost.failures == 0 for cost in costs.values())
    measured = any(cost.answers for cost in costs.values())
    ranked = []
    for peer, cost in costs.items():
        ready_at, obstacle = _ready_at(cost, healthy, measured)
        finish = cost.queue_now(now) * cost.service_s + cost.idle_finish_s(payload_bytes)
        lead = max(cost.virtual_s, floor) - least
        ranked.append(Candidate(peer, ready_at, lead, finish, obstacle if ready_at > now else ""))
    return ranked


def _ready_at(cost: PeerCost, healthy: bool, measured: bool) -> tuple[float, str]:
    """Returns when a peer may be called, and what it waits for until then.

    healthy: some peer of the stage has no failures. measured: some peer of the stage has answered before.
    """
    if cost.failures:
        if cost.open_calls and healthy:
            return math.inf, "on trial"
        return cost.failed_at + cost.backoff_s(healthy), "backing off"
    if measured and not cost.answers and cost.open_calls >= NEWCOMER_CALLS:
        return math.inf, "new"
    if cost.open_calls and cost.open_calls + 1 > cost.call_limit:
        return math.inf, "busy"
    return cost.busy_until, "busy"


def virtual_floor(costs: Iterable[PeerCost], payload_bytes: int) -> float:
    """Returns the least virtual runtime that counts: the largest one minus twice the longest idle finish time.

    A peer below it was away or is new; it may not catch up on more than a few microbatches at once.
    """
    costs = list(costs)
    horizon = 2.0 * max(cost.idle_finish_s(payload_bytes) for cost in costs)
    return max(cost.virtual_s for cost in costs) - horizon


class RoutingTable:
    """The costs of all peers of the later stages, from which the router chooses. It changes only by the calls below.

    | call                                      | when                                                           |
    |-------------------------------------------|----------------------------------------------------------------|
    | `update`                                  | before each choice: who serves the stage now                   |
    | `choose`                                  | a microbatch needs a peer                                      |
    | `sent`                                    | it is sent: charges the peer, sets the attempt's deadline      |
    | `accepted`                                | the peer took a seat                                           |
    | `answered`, `busy`, `failed`, `abandoned` | the call ended (abandoned: by us); exactly one of them         |
    | `rejected`                                | an answer could not be used                                    |
    """

    def __init__(self, me: PeerId, stage_count: int) -> None:
        self._me = me
        self._stage_count = stage_count
        self._costs: dict[int, dict[PeerId, PeerCost]] = {}  # peers that have gone too, while calls to them are open
        self._live: dict[int, tuple[Sequence[PeerView], Collection[PeerId], set[PeerId]]] = {}

    def costs(self, stage: int) -> dict[PeerId, PeerCost]:
        """Returns what is known of each peer that serves `stage`."""
        live = self._live.get(stage)
        costs = self._costs.get(stage, {})
        return {peer: costs[peer] for peer in costs if live and peer in live[2]}

    def update(self, stage: int, replicas: Sequence[PeerView], shut_out: Collection[PeerId] = frozenset()) -> None:
        """Sets which peers serve `stage`: newcomers enter, those gone or shut out are forgotten, restarts are forgiven.

        Costs nothing while `replicas` is the object of the call before and the same peers are shut out.
        """
        known = self._live.get(stage)
        if known is not None and known[0] is replicas and known[1] == shut_out:
            return
        live = {view.peer: view for view in replicas if view.peer != self._me and view.peer not in shut_out}
        self._live[stage] = (replicas, shut_out, set(live))
        costs = self._costs.setdefault(stage, {})
        for peer in [peer for peer, cost in costs.items() if peer not in live and not cost.open_calls]:
            del costs[peer]
        siblings = [cost for peer, cost in costs.items() if peer in live]
        for peer, view in live.items():
            if peer not in costs:
                costs[peer] = newcomer(siblings, view.incarnation, view.capacity)
            elif view.incarnation > costs[peer].incarnation:
                costs[peer] = costs[peer].after_restart(view.incarnation)

    def choose(self, now: float, microbatch: MicrobatchId, stage: int, payload_bytes: int, hint: PathHint) -> Choice:
        """Chooses a peer of `stage` for a microbatch; none, with a reason, when nobody can be asked now."""
        costs, shut_out = self.costs(stage), self._live[stage][1]
        if not costs and shut_out:
            return Choice(None, f"every live peer of stage {stage} is shut out for its conduct")
        return choose_next(now, microbatch, stage, candidates_of(now, costs, payload_bytes), hint)

    def sent(self, now: float, stage: int, peer: PeerId, payload_bytes: int, deadline: float) -> Attempt:
        """Charges `peer` for one microbatch and returns the attempt, which ends at `deadline` or before."""
        costs = self.costs(stage)
        cost = costs[peer]
        charge_s = cost.occupies_s(payload_bytes)
        self._costs[stage][peer] = cost.after_sending(virtual_floor(costs.values(), payload_bytes), charge_s)
        others = sum(1 for sibling, known in costs.items() if sibling != peer and not known.failures)
        until = attempt_deadline(now, deadline, cost.call_s, others, self._stage_count - stage)
        deadline_ms = deadline_to_send(now, until, 2.0 * cost.round_trip_s)
        return Attempt(stage, peer, now, until, deadline_ms, payload_bytes, charge_s)

    def accepted(self, now: float, attempt: Attempt, queue: int, ping_s: float | None) -> None:
        """Records that the peer took a seat, with a queue of `queue` microbatches. ping_s: idle round trip."""
        waited_s, payload = now - attempt.started, attempt.payload_bytes
        self._learn(attempt, lambda cost: cost.after_seat(now, queue, waited_s, payload, ping_s))

    def answered(self, now: float, attempt: Attempt, service_s: float, answer_bytes: int, period_s: float) -> float:
        """Records that the peer answered, after `service_s` on its device by its own word.

        Returns the seconds that the microbatch and its answer needed on the link if nothing had waited; period_s: time
        between two answers to this caller.
        """
        cost = self._learn(attempt, lambda cost: cost.after_answer(service_s, now - attempt.started))
        return cost.crossing_s(attempt.payload_bytes, answer_bytes, period_s) if cost else 0.0

    def busy(self, now: float, attempt: Attempt, retry_after_s: float) -> None:
        """Records that the peer refused the microbatch because all its seats were taken."""
        self._learn(attempt, lambda cost: cost.after_busy(now, attempt.charge_s, retry_after_s))

    def failed(self, now: float, attempt: Attempt, wasted_s: float, max_failures: int = 64) -> None:
        """Records that the call failed after costing us `wasted_s`; see PeerCost.after_failure."""
        charge_s = attempt.charge_s
        self._learn(attempt, lambda cost: cost.after_no_work(charge_s).after_failure(now, wasted_s, max_failures))

    def abandoned(self, attempt: Attempt) -> None:
        """Records that we left the call ourselves: the charge is taken back and nothing is learnt."""
        self._learn(attempt, lambda cost: cost.after_no_work(attempt.charge_s))

    def rejected(self, now: float, stage: int, peer: PeerId) -> None:
        """Records as a failure that the peer's answer had the right form but could not be used."""
        costs = self._costs.get(stage, {})
        if peer in costs:
            costs[peer] = costs[peer].after_failure(now)

    def _learn(self, attempt: Attempt, change: Callable[[PeerCost], PeerCost]) -> PeerCost | None:
        """Changes what is known of the attempt's peer, and forgets a peer that has gone when its last call has ended.

        Returns the new cost; None when the peer was forgotten before.
        """
        costs = self._costs.get(attempt.stage, {})
        if attempt.peer not in costs:
            return None
        cost = costs[attempt.peer] = change(costs[attempt.peer])
        if not cost.open_calls and attempt.peer not in self._live[attempt.stage][2]:
            del costs[attempt.peer]
        return cost


def attempt_deadline(now: float, deadline: float, expected_s: float, others: int, depth: int = 1) -> float:
    """Returns when to leave a callee and ask a sibling, as a time on the clock of `now`.

    depth: stages from the callee to the last. The attempt gets depth / (depth + 1) of the remaining time, but at least
    twice `expected_s`, the time that such a call usually takes; all of it when there are no `others` to ask. So the
    last callee and the reserve of each caller get equal parts of a microbatch's time: the shares telescope. A fixed
    share per call, one half say, would shrink exponentially.
    """
    remaining = deadline - now
    if others <= 0 or remaining <= 0:
        return deadline
    return now + min(max(remaining * depth / (depth + 1), 2.0 * expected_s), remaining)


def deadline_to_send(now: float, until: float, return_s: float) -> int:
    """Returns the milliseconds that a callee is told: less than we wait, so that its answer still reaches us."""
    remaining = max(0.0, until - now)
    left = remaining - min(return_s, MAX_OWN_SHARE * remaining)
    return max(1, min(MAX_DEADLINE_MS, int(left * 1000.0)))
