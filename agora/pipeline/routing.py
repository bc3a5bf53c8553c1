"""Which peer of the next stage gets a microbatch: pure decisions over measured costs.

Knows what one caller has learnt about each peer of a stage. Must not know clocks, sockets or randomness: `now` is
passed in.

The rule is virtual-runtime weighted round robin (SWARM parallelism, arXiv 2301.11913, section 3.2) with least expected
finish on top. A choice charges the peer's virtual runtime with the time for which the microbatch occupies the peer, so
that shares follow measured speeds at any load. The rank of a peer is what it was charged beyond the others (its lead)
plus the expected finish: queue x service + service + round trip + bytes / bandwidth. Lead is bounded by twice the
largest cost of an idle peer: beyond that a queue made by other callers decides, and a peer that was away owes nothing.
Where this differs from SWARM's code: a charge is taken back when no work was done, BUSY is no failure, a newcomer
enters at the median of its siblings instead of the least (an old swarm's least can be hours behind), and it has at
most two microbatches until its first answer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from agora_protocol.ids import MicrobatchId, PeerId

from agora.pipeline.credit import Least

UNMEASURED_SERVICE_S = 0.25
"""What a peer is thought to need before anybody of its stage was measured."""
NEWCOMER_CALLS = 2
EMA_WEIGHT = 0.1
BACKOFF_S = 0.25
BACKOFF_MOST_S = 60.0
BACKOFF_MOST_WITHOUT_SIBLING_S = 4.0
BUSY_LEAST_S, BUSY_MOST_S = 0.01, 5.0
NEVER_WAITED = Least()


@dataclass(frozen=True, slots=True)
class PeerCost:
    """What a caller knows of one peer of the next stage.

    `virtual_s`: seconds of work charged so far. `service_s`: device time per microbatch. `round_trip_s`,
    `bytes_per_s`: of the link, as far as they can be told apart. `call_s`: how long a whole call takes, everything
    downstream included. `calls`: ours that are open; `limit`: how many the peer lets us have, learnt from BUSY.
    `queue` was in the peer's hands at `queue_at`; `sent` of ours have followed since. `wait`: from sending a microbatch
    to hearing of its seat.
    """

    virtual_s: float = 0.0
    service_s: float = UNMEASURED_SERVICE_S
    round_trip_s: float = 0.0
    bytes_per_s: float = math.inf
    call_s: float = 0.0
    samples: int = 0
    links: int = 0
    calls: int = 0
    limit: float = math.inf
    queue: int = 0
    queue_at: float = 0.0
    sent: int = 0
    failures: int = 0
    failed_at: float = 0.0
    wasted_s: float = 0.0
    busy_until: float = 0.0
    incarnation: int = 0
    wait: Least = NEVER_WAITED

    def queue_now(self, now: float) -> float:
        """How many microbatches are thought to be before ours: what was reported, fading at a quarter of its speed.

        At its full speed a queue that other callers keep filling would be believed empty between any two of ours.
        """
        served = 0.25 * (now - self.queue_at) / max(self.service_s, 1e-6)
        return max(0.0, self.queue - served) + self.sent

    def occupies_s(self, payload_bytes: int) -> float:
        """For how long one microbatch occupies the peer: its device or its link, whichever is the slower."""
        return max(self.service_s, payload_bytes / self.bytes_per_s)

    def idle_finish_s(self, payload_bytes: int) -> float:
        """From sending to the end of its service, when nothing waits there."""
        return self.round_trip_s + payload_bytes / self.bytes_per_s + self.service_s

    def crossing_s(self, bytes_there: int, bytes_back: int, period_s: float) -> float:
        """A microbatch's time on the link, both ways, when nothing waits for it: a round trip and two transfers.

        A link that carries one microbatch every `period_s` needs no longer than that for its bytes: so what the
        shortest waits still contain of a queue that never empties cannot make it longer.
        """
        if math.isinf(self.wait.value):
            return self.round_trip_s
        round_trip = min(self.round_trip_s, self.wait.value)
        transfer = (self.wait.value - round_trip) * (1.0 + bytes_back / max(1, bytes_there))
        return round_trip + min(transfer, period_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One peer as `choose_next` sees it. `ready_at` is infinite when only an answer of that peer can make it ready."""

    peer: PeerId
    ready_at: float
    lead_s: float
    finish_s: float
    why: str = ""

    @property
    def rank_s(self) -> float:
        """What the choice minimises, in seconds."""
        return self.lead_s + self.finish_s


@dataclass(frozen=True, slots=True)
class PathHint:
    """Who has already taken this microbatch in an earlier attempt, by entry stage; `finished` hold its result."""

    peers: Mapping[int, PeerId] = field(default_factory=dict)
    finished: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask, and why; with no peer, `look_again_at` is when the answer may differ without anything happening."""

    peer: PeerId | None
    reason: str
    look_again_at: float = math.inf


def choose_next(
    now: float, microbatch: MicrobatchId, stage: int, candidates: Sequence[Candidate], hint: PathHint
) -> Choice:
    """The peer of `stage` to ask next: one that already has the microbatch, else the least rank among the ready."""
    ready = [c for c in candidates if c.ready_at <= now]
    hinted = next((c for c in candidates if c.peer == hint.peers.get(stage)), None)
    if hinted is not None and hinted.ready_at <= now:
        done = "already holds the result of" if hinted.peer in hint.finished else "already works on"
        return Choice(hinted.peer, f"{done} this microbatch")
    if hinted is not None and hinted.peer in hint.finished and hinted.ready_at <= now + BACKOFF_S:
        # a connection that broke just before the answer: anybody else would count the microbatch a second time
        return Choice(None, f"the peer that holds the result is {hinted.why}", hinted.ready_at)
    if not ready:
        return _nobody(now, stage, candidates)
    best = min(ready, key=lambda c: (c.rank_s, zlib.crc32(microbatch + c.peer.encode()), c.peer))
    return Choice(best.peer, f"expected to finish in {best.finish_s:.3f} s, least of {len(ready)} ready peers")


def _nobody(now: float, stage: int, candidates: Sequence[Candidate]) -> Choice:
    if not candidates:
        return Choice(None, f"no live peer holds stage {stage}")
    soonest = min(c.ready_at for c in candidates)
    whys = ", ".join(sorted({c.why for c in candidates if c.why}))
    when = f"; next in {soonest - now:.2f} s" if soonest < math.inf else ""
    return Choice(None, f"all {len(candidates)} peers of stage {stage} are not ready ({whys}){when}", soonest)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What ranking one peer needs to know of its siblings."""

    floor_s: float  # nobody's virtual runtime counts as less
    least_s: float
    healthy: bool  # somebody is not backing off
    measured: bool  # somebody has answered before
    payload_bytes: int


def candidates_of(now: float, costs: Mapping[PeerId, PeerCost], payload_bytes: int) -> list[Candidate]:
    """All peers of a stage as candidates for one microbatch of `payload_bytes`."""
    if not costs:
        return []
    floor = virtual_floor(costs.values(), payload_bytes)
    stage = _Stage(
        floor,
        min(max(cost.virtual_s, floor) for cost in costs.values()),
        any(cost.failures == 0 for cost in costs.values()),
        any(cost.samples for cost in costs.values()),
        payload_bytes,
    )
    return [_candidate(now, peer, cost, stage) for peer, cost in costs.items()]


def _candidate(now: float, peer: PeerId, cost: PeerCost, stage: _Stage) -> Candidate:
    ready_at, why = _ready(cost, stage)
    lead = max(cost.virtual_s, stage.floor_s) - stage.least_s
    finish = cost.queue_now(now) * cost.service_s + cost.idle_finish_s(stage.payload_bytes)
    return Candidate(peer, ready_at, lead, finish, why if ready_at > now else "")


def _ready(cost: PeerCost, stage: _Stage) -> tuple[float, str]:
    if cost.failures:
        if cost.calls and stage.healthy:
            return math.inf, "on trial"
        return cost.failed_at + backoff_s(cost.failures, stage.healthy, cost.wasted_s), "backing off"
    if stage.measured and not cost.samples and cost.calls >= NEWCOMER_CALLS:
        return math.inf, "new"
    if cost.calls and cost.calls + 1 > cost.limit:
        return math.inf, "busy"
    return cost.busy_until, "busy"


def virtual_floor(costs: Iterable[PeerCost], payload_bytes: int) -> float:
    """Virtual runtimes below this count as this: nobody may catch up on more than a few microbatches at once."""
    costs = list(costs)
    horizon = 2.0 * max(cost.idle_finish_s(payload_bytes) for cost in costs)
    return max(cost.virtual_s for cost in costs) - horizon


def backoff_s(failures: int, healthy_siblings: bool, wasted_s: float = 0.0) -> float:
    """How long to leave a peer alone after so many failures in a row; not for long when there is nobody else.

    At least as long as a failed call kept us waiting: a peer that hangs until our deadline costs more than one that
    breaks at once, so it is asked as much more rarely. After the pause it gets one call at a time until it answers.
    """
    most = BACKOFF_MOST_S if healthy_siblings else BACKOFF_MOST_WITHOUT_SIBLING_S
    return min(most, max(BACKOFF_S, wasted_s) * 2.0 ** min(failures - 1, 30))


def newcomer(siblings: Iterable[PeerCost], incarnation: int, capacity: float = 0.0) -> PeerCost:
    """A peer just seen: at the median of its siblings in runtime, and in speed unless it claims less.

    `capacity`, microbatches per second by the peer's own word, may only lower what is expected of it: nobody gets more
    work for boasting.
    """
    siblings = list(siblings)
    measured = [cost for cost in siblings if cost.samples]
    service = median(cost.service_s for cost in measured) if measured else UNMEASURED_SERVICE_S
    if capacity > 0:
        service = max(service, 1.0 / capacity) if measured else 1.0 / capacity
    return PeerCost(
        virtual_s=median(cost.virtual_s for cost in siblings) if siblings else 0.0,
        service_s=service,
        round_trip_s=median(cost.round_trip_s for cost in measured) if measured else 0.0,
        call_s=median(cost.call_s for cost in measured) if measured else 0.0,
        incarnation=incarnation,
    )


def sent(cost: PeerCost, floor_s: float, charge_s: float) -> PeerCost:
    """A microbatch goes to the peer: its runtime is charged at once, so that the next choice sees it."""
    virtual = max(cost.virtual_s, floor_s) + charge_s
    return replace(cost, virtual_s=virtual, calls=cost.calls + 1, sent=cost.sent + 1)


def accepted(cost: PeerCost, now: float, queue: int, waited_s: float, link: Link) -> PeerCost:
    """The peer took a seat for our microbatch, `waited_s` after it was sent."""
    link_cost = link.learnt(cost, waited_s)
    wait = cost.wait.seen(waited_s)
    return replace(link_cost, queue=queue, queue_at=now, sent=0, links=cost.links + 1, wait=wait)


@dataclass(frozen=True, slots=True)
class Link:
    """How to split the time until a seat into round trip and transfer; without a measured round trip it is all that."""

    payload_bytes: int
    round_trip_s: float | None = None

    def learnt(self, cost: PeerCost, waited_s: float) -> PeerCost:
        """The link's costs after one more observation."""
        round_trip = waited_s if self.round_trip_s is None else min(waited_s, self.round_trip_s)
        learnt = replace(cost, round_trip_s=_mean(cost.round_trip_s, round_trip, cost.links))
        transfer = waited_s - round_trip
        if transfer <= 0 or self.payload_bytes <= 0:
            return learnt
        seen = 0.0 if math.isinf(cost.bytes_per_s) else 1.0 / cost.bytes_per_s
        return replace(learnt, bytes_per_s=1.0 / _mean(seen, transfer / self.payload_bytes, cost.links))


def answered(cost: PeerCost, service_s: float, call_s: float) -> PeerCost:
    """The peer answered after `call_s`, of which it computed for `service_s`. The peer's word is bounded by our
    clock.
    """
    return replace(
        cost,
        service_s=_mean(cost.service_s, max(1e-6, min(service_s, call_s)), cost.samples),
        call_s=_mean(cost.call_s, call_s, cost.samples),
        samples=cost.samples + 1,
        calls=cost.calls - 1,
        failures=0,
        wasted_s=0.0,
        limit=cost.limit + 0.5 / max(1.0, cost.limit),
    )


def was_busy(cost: PeerCost, now: float, charge_s: float, retry_after_s: float) -> PeerCost:
    """The peer had no seat: a short wait, no failure, and no more calls at a time than it has just had of ours."""
    calls = cost.calls - 1
    wait = min(max(retry_after_s, BUSY_LEAST_S), BUSY_MOST_S)
    refunded = replace(cost, virtual_s=cost.virtual_s - charge_s, calls=calls, sent=max(0, cost.sent - 1))
    return replace(refunded, limit=float(max(1, calls)), busy_until=max(cost.busy_until, now + wait))


def failed(cost: PeerCost, now: float, charge_s: float, most_failures: int = 64, wasted_s: float = 0.0) -> PeerCost:
    """A call failed after `wasted_s`. Failures of calls that were open together count once: one broken connection fails
    them all.
    """
    counts = cost.failures == 0 or now >= cost.failed_at + BACKOFF_S
    failures = min(cost.failures + 1, max(most_failures, cost.failures)) if counts else cost.failures
    refunded = replace(cost, virtual_s=cost.virtual_s - charge_s, calls=cost.calls - 1, sent=max(0, cost.sent - 1))
    wasted = max(cost.wasted_s, wasted_s)
    return replace(refunded, failures=failures, failed_at=now if counts else cost.failed_at, wasted_s=wasted)


def left(cost: PeerCost, charge_s: float) -> PeerCost:
    """We left the call ourselves: nothing is learnt, nothing is owed."""
    return replace(cost, virtual_s=cost.virtual_s - charge_s, calls=cost.calls - 1, sent=max(0, cost.sent - 1))


def reborn(cost: PeerCost, incarnation: int) -> PeerCost:
    """The peer's daemon started anew: what it was guilty of is forgotten, what it cost is kept as an estimate."""
    return replace(
        cost, incarnation=incarnation, failures=0, wasted_s=0.0, busy_until=0.0, limit=math.inf, queue=0, sent=0
    )


def _mean(old: float, new: float, samples: int) -> float:
    """An exponential mean that begins as a plain one."""
    weight = max(EMA_WEIGHT, 1.0 / (samples + 1))
    return old + weight * (new - old)
