"""Says, from what the replicas of a stage report of their progress, who is there and when the stage steps. Pure.

Knows: what each replica last reported. Must not know: calls, threads, weights, any clock or source of randomness.

| a replica is | when | what follows |
|---|---|---|
| listed | the directory's view names it as a replica of the stage | it is gossiped to |
| silent | its last report is older than SILENT_S, or it is gone | it belongs to no step and no round |
| gone | for GONE_S, every connection to it has broken or could not be opened | it is silent; a report brings it back |
| gone | for GONE_S connections to it, but not to others, broke or could not be opened | it is silent |
| unreachable | a call to it failed after its last report | its tokens do not count |
| live | it is neither silent nor unreachable | its tokens count, it is followed |
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_GOSSIPED_REPLICAS

from agora.averaging.quota import TokenRate

SILENT_S: Final = 6.0
"""Seconds without a report after which a replica counts as gone. It may then come back with lower numbers."""
GONE_S: Final = 1.0
"""Seconds from the first broken connection to a replica to a later one, with no report between, after which it counts
as gone: its process has ended. One that hangs keeps its connections, and is silent after SILENT_S."""
MOST_DIRECT_TARGETS: Final = 8
"""Up to so many other replicas are all gossiped to; of more, GOSSIP_FANOUT chosen at random."""
CLOSED_AHEAD: Final = 10
"""Parts by which a replica may be further than this one, and be believed that it has closed this one's."""
GOSSIP_FANOUT: Final = 4
NEWCOMER_STEPS: Final = 3
"""For so many steps a new replica owns no part, so that all agree on who does, though they hear of it one by one."""


class Counts(NamedTuple):
    """How far a replica is with a stage. step: optimizer steps taken. part: number of the step that it now counts for.

    part is step + the number of its closed parts whose means are not known yet (0 to 2). tokens: those that it has
    counted for `part`. counted: all since it started, from which others measure its rate. agreed: the last step whose
    mean it has taken in, of gradients or of a slice. lineage: a digest of all means up to that, 0 when unknown. began:
    steps that the state had with which it started.
    """

    step: int = 0
    part: int = 0
    tokens: int = 0
    counted: int = 0
    agreed: int = 0
    lineage: int = 0
    began: int = 0


@dataclass(frozen=True, slots=True)
class OwnReport:
    """What a replica last reported itself, at time `at`. part_since: when it first reported `part`. rate: its speed.

    agreed, lineage, began: see Counts.
    """

    step: int = -1
    part: int = -1
    counted: int = 0
    at: float = -math.inf
    part_since: float = -math.inf
    rate: TokenRate = field(default_factory=TokenRate)
    agreed: int = 0
    lineage: int = 0
    began: int = 0

    def after(self, counts: Counts, now: float) -> OwnReport:
        """Returns the report that follows this one. A replica that counts from 0 again has restarted: no rate yet."""
        since = self.part_since if counts.part == self.part else now
        rate = TokenRate()
        if self.counted <= counts.counted and self.at > -math.inf:
            rate = self.rate.after(counts.counted - self.counted, now - self.at)
        agreed = counts.agreed, counts.lineage, counts.began
        return OwnReport(counts.step, counts.part, counts.counted, now, since, rate, *agreed)


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """What is known of one other replica of a stage.

    closed_tokens: what its part of step `counts.part` - 1 held, 0 when unknown. heard_at: when it last reported to
    anybody. failed_at: when a call to it last failed. broken_since, broken_at: the first and the last time that a
    connection to it broke since then. reported: what it said itself. listed: whether the view has named it since it was
    first heard of. Times in seconds.
    """

    counts: Counts
    heard_at: float
    closed_tokens: int = 0
    failed_at: float = -math.inf
    broken_since: float = math.inf
    broken_at: float = -math.inf
    reported: OwnReport = field(default_factory=OwnReport)
    listed: bool = False

    def is_silent(self, now: float) -> bool:
        """Returns whether its last report is older than SILENT_S, or connections to it have been broken for GONE_S."""
        return now - self.heard_at > SILENT_S or self.broken_at - self.broken_since >= GONE_S

    def is_live(self, now: float) -> bool:
        """Returns whether it has reported lately, and no call to it has failed since."""
        return not self.is_silent(now) and self.heard_at > self.failed_at

    def advanced(self, counts: Counts, heard_at: float) -> ReplicaProgress:
        """Returns a copy with newer counts.

        closed_tokens becomes what the former part held when the replica is exactly one part further. It stays as it is
        at the same part. It becomes 0 after a jump, or when the same part has fewer tokens, as after a restart.
        """
        old = self.counts
        if counts.part == old.part:
            closed = self.closed_tokens if counts.tokens >= old.tokens else 0
        else:
            began, ended = old.counted - old.tokens, counts.counted - counts.tokens
            closed = max(0, ended - began) if counts.part == old.part + 1 else 0
        newer = replace(self, counts=counts, closed_tokens=closed, heard_at=heard_at)
        return newer if heard_at <= self.broken_at else replace(newer, broken_since=math.inf, broken_at=-math.inf)

    def failed(self, now: float, *, broken: bool) -> ReplicaProgress:
        """Returns a copy after a call to it failed now; broken: because a connection broke or could not be opened."""
        if not broken:
            return replace(self, failed_at=now)
        return replace(self, failed_at=now, broken_since=min(now, self.broken_since), broken_at=now)


KnownReplicas = Mapping[PeerId, ReplicaProgress]
"""What is known of the other replicas of one stage."""
GossipEntry = tuple[PeerId, int, int, int, int, int, int, int, int]
"""A replica's id, its Counts, and the age of that report in milliseconds."""


def merge_gossip(
    known: KnownReplicas, entries: Iterable[GossipEntry], sender: PeerId, me: PeerId, now: float
) -> dict[PeerId, ReplicaProgress]:
    """Returns what is known after `sender` reported `entries` about itself and about others.

    | an entry is about | it is taken when |
    |---|---|
    | the sender | always: a replica that has restarted reports lower numbers |
    | another replica | it is not older than SILENT_S, and it is further, or nothing live is known of that replica |
    | this peer | never |
    """
    merged = dict(known)
    for peer, *numbers, age_ms in entries:
        counts, heard_at = Counts(*numbers), now if peer == sender else now - age_ms / 1000
        if peer == me or now - heard_at > SILENT_S:
            continue
        last = merged.get(peer) or ReplicaProgress(counts, heard_at)
        if peer == sender or counts >= last.counts or not last.is_live(now):
            last = last.advanced(counts, max(heard_at, last.heard_at))
        merged[peer] = replace(last, reported=last.reported.after(counts, now)) if peer == sender else last
    return merged


def record_failure(
    known: KnownReplicas, peer: PeerId, now: float, *, broken: bool = False
) -> dict[PeerId, ReplicaProgress]:
    """Returns `known` after a call to `peer` failed now; one never heard of is added as heard now, at step 0."""
    last = known.get(peer) or ReplicaProgress(Counts(), now)
    return dict(known) | {peer: last.failed(now, broken=broken)}


def record_view(known: KnownReplicas, listed: Collection[PeerId], now: float) -> dict[PeerId, ReplicaProgress]:
    """Returns `known` with the listed replicas marked as `listed`, without those that are neither listed nor live."""
    return {
        peer: replace(last, listed=True) if peer in listed and not last.listed else last
        for peer, last in known.items()
        if peer in listed or last.is_live(now)
    }


def unreachable_replicas(known: KnownReplicas, peers: Collection[PeerId], now: float) -> set[PeerId]:
    """Returns those of `peers` that are silent, or to which a call failed since their report; none never heard of."""
    return {peer for peer in peers if peer in known and not known[peer].is_live(now)}


def lagging_replicas(known: KnownReplicas, peers: Collection[PeerId], step: int) -> set[PeerId]:
    """Returns those of `peers` that have reported to count for a step before `step` - 1: they fetch or replay."""
    return {peer for peer in peers if peer in known and 0 <= known[peer].reported.part < step - 1}


def newcomers(known: KnownReplicas, peers: Collection[PeerId], step: int) -> set[PeerId]:
    """Returns those of `peers` that own no part of step `step`, since other replicas may not know of them yet.

    They have reported to have begun later than NEWCOMER_STEPS before, or nothing at all. In the first NEWCOMER_STEPS
    steps there are none.
    """
    latest = step - NEWCOMER_STEPS
    if latest < 0:
        return set()
    own = {peer: known[peer].reported for peer in peers if peer in known}
    return {peer for peer in peers if peer not in own or own[peer].step < 0 or own[peer].began > latest}


def doubtful_replicas(known: KnownReplicas, listed: Collection[PeerId], now: float) -> set[PeerId]:
    """Returns the listed replicas that may be alive, although a call to them failed after their last report."""
    return {peer for peer in unreachable_replicas(known, listed, now) if not known[peer].is_silent(now)}


def replicas_behind(known: KnownReplicas, peers: Collection[PeerId], step: int) -> set[PeerId]:
    """Returns those of `peers` that have not reported to count for step `step` or the one before: newcomers, mostly."""
    return {peer for peer in peers if peer not in known or known[peer].reported.part < step - 1}


def live_replicas(known: KnownReplicas, listed: Collection[PeerId], now: float) -> dict[PeerId, ReplicaProgress]:
    """Returns those entries of `known` whose replicas are both listed and live: heard lately, no failed call since."""
    return {peer: last for peer, last in known.items() if peer in listed and last.is_live(now)}


def round_members(known: KnownReplicas, listed: Collection[PeerId], now: float) -> set[PeerId]:
    """Returns the other replicas that belong to a step and its rounds: all that may be alive, see docs/averaging.md.

    Those are the listed ones that are not silent, even if a call to them failed or they were never heard, and live ones
    that have reported themselves but were never listed.
    """
    silent = {peer for peer in listed if peer in known and known[peer].is_silent(now)}
    unlisted = {p for p, last in known.items() if last.reported.step >= 0 and not last.listed and last.is_live(now)}
    return (set(listed) | unlisted) - silent


def count_tokens(others: KnownReplicas, step: int) -> int:
    """Returns the tokens counted for step `step`: `tokens` of those counting for it, `closed_tokens` of the next."""
    return sum(
        last.counts.tokens if last.counts.part == step else last.closed_tokens if last.counts.part == step + 1 else 0
        for last in others.values()
    )


def closed_since(others: KnownReplicas, step: int) -> float | None:
    """Returns when the first other replica reported itself that its part of step `step` is closed; None before.

    Who is more than CLOSED_AHEAD parts further is not believed: nobody can be while this one counts for the step.
    """
    ahead = range(step + 1, step + CLOSED_AHEAD + 1)
    return min((last.reported.part_since for last in others.values() if last.reported.part in ahead), default=None)


def tokens_to_go(others: KnownReplicas, step: int, target: int) -> int:
    """Returns how many tokens this replica must count for step number `step`: `target` less the others', at least 1."""
    return max(1, target - count_tokens(others, step))


def step_to_follow(others: KnownReplicas, present: int, step: int, own_tokens: int, target: int) -> int:
    """Returns which step this replica should follow the others to; `step`, its own, when it is not behind.

    others: the live ones. present: how many other replicas are listed and not unreachable, also those never heard.
    Only what a replica reported of itself counts.

    | reported | result |
    |---|---|
    | half of `present` are beyond `step` | the step that half of them have reached |
    | a quarter of `present` is at step + 1; a quarter of `target` is known to be counted for `step` | step + 1 |
    | else | step |
    """
    reached = sorted((last.reported.step for last in others.values()), reverse=True)
    half = math.ceil(present / 2)
    if 0 < half <= len(reached) and reached[half - 1] > step:
        return reached[half - 1]
    ahead = sum(last.reported.step == step + 1 for last in others.values())
    tokens = own_tokens + count_tokens(others, step)
    return step + 1 if ahead and ahead >= math.ceil(present / 4) and 4 * tokens >= target else step


def choose_targets(listed: Collection[PeerId], me: PeerId, rng: random.Random) -> list[PeerId]:
    """Returns whom to gossip to: all other replicas, or GOSSIP_FANOUT at random of more than MOST_DIRECT_TARGETS."""
    others = sorted(set(listed) - {me})
    return others if len(others) <= MOST_DIRECT_TARGETS else rng.sample(others, GOSSIP_FANOUT)


def compose_gossip(
    known: KnownReplicas, me: PeerId, own: Counts, listed: Collection[PeerId], now: float
) -> tuple[GossipEntry, ...]:
    """Returns the entries to send: this peer's `own` counts, then live listed others, freshest first, up to a limit."""
    others = sorted(live_replicas(known, listed, now).items(), key=lambda item: -item[1].heard_at)
    entries = ((peer, *last.counts, round(1000 * (now - last.heard_at))) for peer, last in others)
    return ((me, *own, 0), *entries)[:MAX_GOSSIPED_REPLICAS]


def leading_step(steps: Collection[Collection[int]]) -> int:
    """Returns the step of the run's furthest stage: each stage counts as the lower median of its replicas' `steps`."""
    return max((statistics.median_low(of_stage) for of_stage in steps if of_stage), default=0)
