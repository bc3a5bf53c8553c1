"""All that is known of one stage: its own counts, what the other replicas report. Pure.

| a replica is | when | what follows |
|---|---|---|
| listed | the directory's view names it as a replica of the stage | it is gossiped to |
| silent | no report for SILENCE_TIMEOUT_S, or connections broke for GONE_AFTER_S since | it is in no step or round |
| suspected | it is not silent, and a call to it failed after its last report | its tokens do not count |
| unreachable | it is silent or suspected | no shard of a round waits for it |
| live | somebody reported it, and it is not unreachable | its tokens count, and others catch up with it |

A new report ends silent, suspected and unreachable.
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
from agora_protocol.messages import GossipEntry

from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule
from agora.replica.divergence import HistoryReport
from agora.replica.pacing import RateMeter, Shares
from agora.replica.trust import believed_tokens

SILENCE_TIMEOUT_S: Final = 6.0  # seconds without a report after which a replica is silent
# Seconds between the first and the latest broken connection to a replica, with no report between, that make it silent:
# its process has ended, so that nothing accepts connections. Only SILENCE_TIMEOUT_S notices a process that hangs.
GONE_AFTER_S: Final = 1.0
# Maximum number of other replicas of which all are gossiped to; of more, GOSSIP_FANOUT are chosen at random.
MAX_DIRECT_TARGETS: Final = 8
GOSSIP_FANOUT: Final = 4  # number of random replicas that are gossiped to if there are more than MAX_DIRECT_TARGETS
# A replica whose open step leads this one's by more is not asked when it closed its share.
MAX_CLOSING_LEAD: Final = 10
# Number of steps in which a new replica reduces no shard: others learn of it one by one, but must agree on the
# reducers.
NEWCOMER_STEPS: Final = 3


# --- what replicas report


class ReplicaCounts(NamedTuple):
    """How far a replica is with a stage, in the form in which it gossips that."""

    step: int = 0  # optimizer steps taken
    # The step for whose share it counts now: `step` + its closed shares whose means are not known yet (0 to 2).
    open_step: int = 0
    tokens: int = 0  # tokens counted for `open_step`
    tokens_counted: int = 0  # all tokens counted since the replica started
    agreed_step: int = 0  # steps it had taken at the last mean, of gradients or of a fragment, that it has applied
    history_hash: int = 0  # a digest of all means up to `agreed_step`, 0 when unknown
    start_step: int = 0  # steps of the state that it started with
    carried: int = 0  # 1 + thousandths of a byte that its uplink carries for each value and step; 0: it is never full

    @classmethod
    def from_entry(cls, entry: GossipEntry) -> ReplicaCounts:
        _, step, open_step, tokens, tokens_counted, agreed_step, history_hash, start_step, carried, _ = entry
        return cls(
            step=step,
            open_step=open_step,
            tokens=tokens,
            tokens_counted=tokens_counted,
            agreed_step=agreed_step,
            history_hash=history_hash,
            start_step=start_step,
            carried=carried,
        )

    @property
    def bytes_carried(self) -> float:
        # Bytes that its uplink carries for each value and step; infinite if it is never full.
        return (self.carried - 1) / 1000 if self.carried else math.inf


@dataclass(frozen=True, slots=True)
class DirectReport:
    """What a replica last reported of itself to this peer, not what other replicas reported of it.

    For the fields without a comment see ReplicaCounts. `step` and `open_step` are -1 before the first report.
    """

    step: int = -1
    open_step: int = -1
    tokens_counted: int = 0
    at: float = -math.inf  # when it reported, -inf before its first report
    open_since: float = -math.inf  # when it first reported `open_step`
    meter: RateMeter = field(default_factory=RateMeter)  # how fast it counts tokens
    agreed_step: int = 0
    history_hash: int = 0
    start_step: int = 0

    @property
    def history(self) -> HistoryReport:
        return HistoryReport(self.agreed_step, self.history_hash, self.start_step)

    def after_report(self, counts: ReplicaCounts, now: float) -> DirectReport:
        """Returns the replica's next report, with `counts` at time `now`."""
        open_since = self.open_since if counts.open_step == self.open_step else now
        return DirectReport(
            counts.step,
            counts.open_step,
            counts.tokens_counted,
            at=now,
            open_since=open_since,
            meter=self.meter.after(now, counts.tokens_counted, step=counts.step, open_step=counts.open_step),
            agreed_step=counts.agreed_step,
            history_hash=counts.history_hash,
            start_step=counts.start_step,
        )


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """What is known of one other replica of a stage, first-hand or relayed by others. Times are in seconds."""

    counts: ReplicaCounts  # its latest known counts
    reported_at: float  # when it reported them, to this peer or another
    closed_tokens: int = 0  # tokens of its share of step `counts.open_step` - 1, 0 when unknown
    failed_at: float = -math.inf  # when a call to it last failed
    broken_since: float = math.inf  # the first time since `reported_at` that a connection to it broke
    broken_at: float = -math.inf  # the last such time
    direct: DirectReport = field(default_factory=DirectReport)  # its own last report
    listed: bool = False  # whether the view has named it since the first report of it

    def is_silent(self, now: float) -> bool:
        """Returns whether it has not reported for SILENCE_TIMEOUT_S, or is gone.

        Gone: GONE_AFTER_S lie between the first and the last broken connection since its last report.
        """
        return now - self.reported_at > SILENCE_TIMEOUT_S or self.broken_at - self.broken_since >= GONE_AFTER_S

    def is_live(self, now: float) -> bool:
        """Returns whether it is neither silent (see is_silent) nor suspected (a call failed since its last report)."""
        return not self.is_silent(now) and self.reported_at > self.failed_at

    def tokens_of(self, step: int) -> int:
        """Returns the tokens of its share of `step`, open or closed; 0 if `step` is none of these two."""
        ahead = self.counts.open_step - step
        return self.counts.tokens if ahead == 0 else self.closed_tokens if ahead == 1 else 0

    def with_tokens_of(self, step: int, tokens: int) -> ReplicaProgress:
        """Returns a copy in which its share of `step`, open or closed, has `tokens`."""
        if tokens == self.tokens_of(step):
            return self
        if self.counts.open_step == step:
            return replace(self, counts=self.counts._replace(tokens=tokens))
        return replace(self, closed_tokens=tokens)

    def with_counts(self, counts: ReplicaCounts, reported_at: float) -> ReplicaProgress:
        """Returns a copy with newer counts, reported at `reported_at`, and without broken times before that.

        | open_step has grown by | closed_tokens becomes |
        |---|---|
        | 0 | unchanged; 0 if `tokens` fell, as after a restart |
        | 1 | the tokens of the share that was open before |
        | any other number | 0, which means unknown |
        """
        old = self.counts
        if counts.open_step == old.open_step:
            closed = self.closed_tokens if counts.tokens >= old.tokens else 0
        else:
            before_share, after_share = old.tokens_counted - old.tokens, counts.tokens_counted - counts.tokens
            closed = max(0, after_share - before_share) if counts.open_step == old.open_step + 1 else 0
        newer = replace(self, counts=counts, closed_tokens=closed, reported_at=reported_at)
        return newer if reported_at <= self.broken_at else replace(newer, broken_since=math.inf, broken_at=-math.inf)

    def with_failure(self, now: float, *, broken: bool) -> ReplicaProgress:
        """Returns a copy in which a call to the replica failed at `now`.

        broken: whether the connection broke or did not open; then broken_since and broken_at are set too.
        """
        if not broken:
            return replace(self, failed_at=now)
        return replace(self, failed_at=now, broken_since=min(now, self.broken_since), broken_at=now)


KnownReplicas = Mapping[PeerId, ReplicaProgress]  # what is known of the other replicas of one stage, by id


@dataclass(frozen=True, slots=True)
class Membership:
    """Which other replicas take part in a stage's step at one moment."""

    # What the other replicas reported; zeros of one to which only a call has failed.
    known: KnownReplicas = field(default_factory=dict)
    listed: Collection[PeerId] = ()  # the other replicas that this peer's view of the run names
    members: Collection[PeerId] = frozenset()  # those that belong to the step and its rounds, see round_members
    live: KnownReplicas = field(default_factory=dict)  # the members that are live
    suspected: Collection[PeerId] = frozenset()  # the members to which a call failed after their last report

    @classmethod
    def of(cls, known: KnownReplicas, listed: Collection[PeerId], now: float) -> Membership:
        members = round_members(known, listed, now)
        live = live_replicas(known, members, now)
        return cls(known, listed, members, live, unreachable_replicas(known, members, now))

    @property
    def listed_live(self) -> KnownReplicas:
        return {peer: progress for peer, progress in self.live.items() if peer in self.listed}


@dataclass(frozen=True, slots=True)
class StageView:
    """What this peer knows of one of its stages at one moment; all that `decide` sees."""

    counts: ReplicaCounts  # how far this replica is
    membership: Membership = field(default_factory=Membership)
    leading_step: int = 0  # steps taken by the stage of the run that has taken the most
    # Which of the stage's steps are inner steps; all others are all-reduces.
    sync_schedule: SyncSchedule = ONLY_ALL_REDUCE
    # Tokens at which its share of a step is closed. 0: none is, because its part of a step rounds to no microbatch.
    quota: int = 0
    stops_at: int = 0  # how many steps the stage takes at most, because the run then ends; 0: no end
    shares: Shares | None = None  # the shares that bound the tokens which others report; None: they are not bounded
    step_s: float = 0.0  # seconds in which all replicas count a step's tokens, 0 when unknown
    open_fraction: float = 1.0  # the part of a step for which its share has been open, see StepPacing.open_fraction
    is_leaving: bool = False  # whether this peer is leaving the run
    is_busy: bool = False  # whether a step, a fetch or a catch-up is running
    sync_due: int | None = None  # the fragment sync to begin, None if none is due
    # When the stage fell behind the run's leading stage, on the loop's clock; None if it is not behind.
    behind_since: float | None = None
    # Replicas to fetch the state from, because this one has applied other means, see replicas_to_fetch_from; or ().
    diverged_from: tuple[PeerId, ...] = ()
    # Other replicas with which this one catches up, see Electorate.others_to_follow; None: all.
    voters: Collection[PeerId] | None = None
    in_progress: int = 0  # number of microbatches in progress here that belong to the open share


# --- changes of what is known


def merge_gossip(
    known: KnownReplicas, entries: Iterable[GossipEntry], sender: PeerId, me: PeerId, now: float
) -> dict[PeerId, ReplicaProgress]:
    """Returns a copy of `known` after `sender` reported `entries` about itself and about other replicas.

    Adds replicas that are not known yet.

    | an entry is about | it is used when |
    |---|---|
    | the sender | always: a replica that has restarted reports lower numbers |
    | another replica | it is younger than SILENCE_TIMEOUT_S; and its counts are not less, or it is not live |
    | this peer (`me`) | never |

    Counts are compared in order. An entry that is used replaces the replica's counts; one about the sender also becomes
    its direct report.
    """
    merged = dict(known)
    for entry in entries:
        peer, *_, age_ms = entry
        counts = ReplicaCounts.from_entry(entry)
        reported_at = now if peer == sender else now - age_ms / 1000
        if peer == me or now - reported_at > SILENCE_TIMEOUT_S:
            continue
        progress = merged.get(peer) or ReplicaProgress(counts, reported_at)
        if peer == sender or counts >= progress.counts or not progress.is_live(now):
            progress = progress.with_counts(counts, max(reported_at, progress.reported_at))
        if peer == sender:
            progress = replace(progress, direct=progress.direct.after_report(counts, now))
        merged[peer] = progress
    return merged


def record_failure(
    known: KnownReplicas, peer: PeerId, now: float, *, broken: bool = False
) -> dict[PeerId, ReplicaProgress]:
    """Returns a copy of `known` in which a call to `peer` failed at time `now`, see ReplicaProgress.with_failure.

    A peer that is not in `known` is added with counts of 0, reported_at `now`, and no direct report: it is suspected
    immediately, and silent after SILENCE_TIMEOUT_S. broken: whether the connection to the peer broke or could not be
    opened, so that the peer may be gone.
    """
    progress = known.get(peer) or ReplicaProgress(ReplicaCounts(), now)
    return dict(known) | {peer: progress.with_failure(now, broken=broken)}


def record_view(known: KnownReplicas, listed: Collection[PeerId], now: float) -> dict[PeerId, ReplicaProgress]:
    """Returns a copy of `known` after a read of the view, which names the replicas `listed`.

    Marks known replicas as listed if they are; adds no replica. Drops those that are neither listed nor live.
    """
    return {
        peer: replace(progress, listed=True) if peer in listed and not progress.listed else progress
        for peer, progress in known.items()
        if peer in listed or progress.is_live(now)
    }


# --- who takes part


def unreachable_replicas(known: KnownReplicas, peers: Collection[PeerId], now: float) -> set[PeerId]:
    """Returns those of `peers` that are silent or suspected. A peer that is not in `known` is not among them."""
    return {peer for peer in peers if peer in known and not known[peer].is_live(now)}


def lagging_replicas(known: KnownReplicas, peers: Collection[PeerId], step: int) -> set[PeerId]:
    """Returns those of `peers` whose own last report has an open step before `step` - 1.

    Such replicas fetch a state or replay steps. A peer that has not reported itself is not among them.
    """
    return {peer for peer in peers if peer in known and 0 <= known[peer].direct.open_step < step - 1}


def newcomers(known: KnownReplicas, peers: Collection[PeerId], step: int) -> set[PeerId]:
    """Returns those of `peers` that must reduce no shard of `step`, because other replicas may not know of them yet.

    Newcomers are peers that may not sign, see may_sign, and after the first step those that have not reported.
    """
    reports = {peer: known[peer].direct for peer in peers if peer in known}
    unheard = {peer for peer in peers if peer not in reports or reports[peer].step < 0} if step else set()
    return unheard | {peer for peer, report in reports.items() if not may_sign(step, report.start_step)}


def may_sign(step: int, start_step: int) -> bool:
    """Returns whether a replica that began with a state of `start_step` steps may sign means of a round of `step`.

    It must not if it may have signed a different mean of that round before it restarted: in its first NEWCOMER_STEPS
    steps, unless it has been there since the run's first one.
    """
    # By the round's number, as its members choose reducers, and not by the step that the replica is at by now.
    return start_step <= max(step - NEWCOMER_STEPS, 0)


def suspected_replicas(known: KnownReplicas, listed: Collection[PeerId], now: float) -> set[PeerId]:
    """Returns the `listed` replicas to which a call failed after their last report, and that are not yet silent."""
    return {peer for peer in unreachable_replicas(known, listed, now) if not known[peer].is_silent(now)}


def lagging_or_unheard_replicas(known: KnownReplicas, peers: Collection[PeerId], step: int) -> set[PeerId]:
    """Returns the lagging ones of `peers`, see lagging_replicas, and those that have not reported themselves yet."""
    return {peer for peer in peers if peer not in known or known[peer].direct.open_step < step - 1}


def live_replicas(known: KnownReplicas, listed: Collection[PeerId], now: float) -> dict[PeerId, ReplicaProgress]:
    """Returns the entries of `known` whose replicas are both in `listed` and live."""
    return {peer: progress for peer, progress in known.items() if peer in listed and progress.is_live(now)}


def round_members(known: KnownReplicas, listed: Collection[PeerId], now: float) -> set[PeerId]:
    """Returns the other replicas that belong to a step and its rounds: all that may be alive.

    See docs/understand/averaging.md.

    These are the listed replicas that are not silent, including suspected ones and ones that are not in `known`; and
    live replicas that have reported themselves but were never listed.
    """
    silent = {peer for peer in listed if peer in known and known[peer].is_silent(now)}
    heard = {peer for peer, progress in known.items() if progress.direct.step >= 0 and progress.is_live(now)}
    return (set(listed) | {peer for peer in heard if not known[peer].listed}) - silent


# --- how far they are


def cap_reported_tokens(others: KnownReplicas, own: ReplicaCounts, shares: Shares | None) -> KnownReplicas:
    """Returns `others` with the tokens of this replica's open step as far as they are believed, see believed_tokens.

    own: how far this replica is. shares: None: tokens count as reported.
    """
    if shares is None:
        return others
    step = own.open_step
    reported = {peer: progress.tokens_of(step) for peer, progress in others.items()}
    expected = {peer: shares.others.get(peer, shares.own) for peer in reported}
    tokens = believed_tokens(reported, expected, own.tokens, shares.own, shares.microbatch_tokens)
    return {peer: progress.with_tokens_of(step, tokens[peer]) for peer, progress in others.items()}


def count_tokens(others: KnownReplicas, step: int) -> int:
    """Returns how many tokens `others` have counted for `step` together, in open shares and in closed ones.

    A replica counts as 0 if its open step is before `step`, or later than `step` + 1.
    """
    return sum(progress.tokens_of(step) for progress in others.values())


def closing_times(others: KnownReplicas, step: int) -> list[float]:
    """Returns, sorted, when those of `others` that have closed their shares of `step` began their open steps.

    For a replica that is at `step` + 1, that is when it reported its share of `step` as closed; for one further ahead
    it is later. Ignores a replica that leads by more than MAX_CLOSING_LEAD: no honest one can while this one's share
    is open.
    """
    ahead = range(step + 1, step + MAX_CLOSING_LEAD + 1)
    reports = [progress.direct for progress in others.values()]
    return sorted(report.open_since for report in reports if report.open_step in ahead)


def missing_tokens(others: KnownReplicas, step: int, target: int) -> int:
    """Returns how many tokens this replica must count for `step`: `target` less those of `others`, but at least 1.

    See count_tokens.
    """
    return max(1, target - count_tokens(others, step))


def reached_step(others: KnownReplicas, reachable: int, step: int, own_tokens: int, target: int) -> int:
    """Returns the step that the other replicas have reached, or this replica's own, `step`, when it is not behind.

    others: the live replicas; their steps count as each reported of itself.
    reachable: number of members of the step that are not unreachable, including those of which nothing is known.
    own_tokens: counted here for `step`.
    target: tokens of a step.

    | reported | result |
    |---|---|
    | half of `reachable` are beyond `step` | the step that half of them have reached |
    | a quarter of `reachable` is at step + 1; a quarter of `target` is known to be counted for `step` | step + 1 |
    | anything else | step |
    """
    steps = sorted((progress.direct.step for progress in others.values()), reverse=True)
    half = math.ceil(reachable / 2)
    if 0 < half <= len(steps) and steps[half - 1] > step:
        return steps[half - 1]
    ahead = sum(progress.direct.step == step + 1 for progress in others.values())
    tokens = own_tokens + count_tokens(others, step)
    return step + 1 if ahead and ahead >= math.ceil(reachable / 4) and 4 * tokens >= target else step


def leading_step(steps: Collection[Collection[int]]) -> int:
    """Returns the step of the run's furthest stage: the largest of the stages' lower medians.

    steps: for each stage, the steps that its replicas have taken. Returns 0 if no stage has replicas.
    """
    return max((statistics.median_low(replica_steps) for replica_steps in steps if replica_steps), default=0)


# --- what to tell whom


def choose_targets(listed: Collection[PeerId], me: PeerId, rng: random.Random) -> list[PeerId]:
    """Returns the replicas to gossip to now: all `listed` ones without `me`, sorted by id.

    If there are more than MAX_DIRECT_TARGETS, returns GOSSIP_FANOUT random ones, in random order.
    """
    others = sorted(set(listed) - {me})
    return others if len(others) <= MAX_DIRECT_TARGETS else rng.sample(others, GOSSIP_FANOUT)


def compose_gossip(
    known: KnownReplicas, me: PeerId, own: ReplicaCounts, listed: Collection[PeerId], now: float
) -> tuple[GossipEntry, ...]:
    """Returns the entries to send, up to MAX_GOSSIPED_REPLICAS: this peer's `own` counts, then those of other replicas.

    Of the others, the latest known counts of those that are live and listed are sent, the newest report first.
    """
    others = sorted(live_replicas(known, listed, now).items(), key=lambda item: -item[1].reported_at)
    entries = ((peer, *progress.counts, round(1000 * (now - progress.reported_at))) for peer, progress in others)
    return ((me, *own, 0), *entries)[:MAX_GOSSIPED_REPLICAS]
