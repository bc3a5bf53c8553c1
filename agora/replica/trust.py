"""What is not believed of other replicas: sizes of means, numbers of steps, histories. Pure."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

NEW_WEIGHT: Final = 0.3  # weight of a new magnitude in the moving averages
# A mean may be this many times as large as the average of earlier means, or as the peer's own values.
MAX_RATIO: Final = 4.0
FIRST_RATIO: Final = 8.0  # as much before the first mean is known: few values of one replica say little
# The average of earlier means counts up to this many times the average of the peer's own values: what others sent is
# not believed because they have sent as much before.
MAX_OWN_RATIO: Final = 2.0
# Steps by which others may lead at any time where all take each step together: two closed shares, and one step.
LEAD: Final = 3
# Steps by which others may lead where each takes inner steps; a replica further behind fetches their state.
LOCAL_LEAD: Final = 20
STEPS_TO_LOSE_ONE: Final = 100  # steps in which a stage of a synchronous run may lose the microbatches of one
MAX_SPEED_UP: Final = 4.0  # how many times as fast as before others may go on stepping without this replica
# Seconds for which a busy machine may stand still without noticing it, while honest replicas go on.
SLACK_S: Final = 10.0
# Maximum tokens per second that a stage's replicas can plausibly count together, until a step was measured here.
FASTEST_TOKENS_PER_S: Final = 1e6
MIN_RATES: Final = 3  # minimum number of known rates for one to be called too high: of two, either could be right
# A contribution counts up to this many times the tokens that its sender's rate gives it: it may hold a late one too.
MAX_QUOTAS: Final = 3.0
JOIN_S: Final = 1800.0  # maximum age, in seconds, of the state with which a newcomer starts: no transfer takes longer
# Seconds after an implausible report for which nothing that its sender reports of the stage counts.
FORGIVE_S: Final = 10.0


# --- what peers say of themselves
#
# A claim counts as it is up to MAX_TIMES_MEDIAN times the median of all claims; beyond, the less the larger it is, and
# from twice that on as the median itself. So the more a liar says the less it gets; and two peers that know slightly
# different claims still compute nearly the same, which a sharp limit would not give.

MAX_TIMES_MEDIAN: Final = 4.0


def believed_claim(claim: float, median: float) -> float:
    """Returns as what a claim counts, if the claims of all peers of its kind have the `median`, above 0.

    | claim / median | it counts as |
    |---|---|
    | up to c = MAX_TIMES_MEDIAN | the claim |
    | r, above c | max(1, c (c / r)^2) * median, which is the median from r = 2 c on |
    """
    most = MAX_TIMES_MEDIAN * median
    return claim if claim <= most else max(median, most * (most / claim) ** 2)


def believed_bandwidths(claims: Mapping[PeerId, float], networks: Mapping[PeerId, str]) -> dict[PeerId, float]:
    """Returns as what claimed bandwidths count where shards are apportioned to reducers: see believed_claim.

    claims: 0 means unknown, and stays 0; others count as at least 1 / MAX_TIMES_MEDIAN of the median. networks: the
    network of a peer's address, "" or left out if unknown. The median is the lower one over the networks, each with the
    lower median of its peers' claims: ids are free, networks are not. A peer of an unknown network is one of its own.
    """
    by_network: defaultdict[str, list[float]] = defaultdict(list)
    for peer, claim in claims.items():
        if claim > 0:
            by_network[networks.get(peer) or f"of {peer}"].append(claim)
    if not by_network:
        return dict(claims)
    median = statistics.median_low(map(statistics.median_low, by_network.values()))
    return {
        peer: max(believed_claim(claim, median), median / MAX_TIMES_MEDIAN) if claim > 0 else 0.0
        for peer, claim in claims.items()
    }


# --- weights of contributions


def token_bounds(rates: Mapping[PeerId, float | None], target: int, microbatch_tokens: int) -> dict[PeerId, float]:
    """Returns for each replica the most tokens that count as behind its share of a step, whatever it says itself.

    rates: tokens per second of all replicas, None if unknown. Without MIN_RATES known rates nobody has a bound.
    """
    known = [rate for rate in rates.values() if rate]
    if len(known) < MIN_RATES or None in rates.values():
        return {}
    median = statistics.median_high(known)
    believed = {peer: believed_claim(rate or 0.0, median) for peer, rate in rates.items()}
    total = sum(believed.values())
    return {peer: MAX_QUOTAS * max(target * rate / total, microbatch_tokens) for peer, rate in believed.items()}


# --- tokens of others
#
# How fast a replica counts tokens, and how many it has counted, it says itself. Both only divide the work: a replica's
# share of a step, and the moment at which the step is complete. So the division follows the others' medians, and each
# replica computes all of its own share by its own clock: a lie changes the size of a step by at most
# (n - 1 + MAX_TIMES_MEDIAN) / n of n replicas, and one of 2 MAX_TIMES_MEDIAN times the median or more does not at all.

# Where there are only two rates, one is believed up to this many times the other: nobody else could say which is right.
MAX_TIMES_OF_TWO: Final = 64.0
MAX_WAY_AHEAD: Final = 1.1
# Fraction by which what a round says of its tokens may differ from what the replicas have reported of them.
MAX_TOLD_DEVIATION: Final = 0.1


def believed_rates(rates: Mapping[PeerId, float | None]) -> dict[PeerId, float]:
    """Returns as what the replicas' rates count, in tokens per second, where a step is divided among them.

    rates: as reported, this peer's own included; None, unknown, counts as the median of the believed ones.

    | positive rates | a rate counts |
    |---|---|
    | three or more | as believed_claim says, by their upper median |
    | two | up to MAX_TIMES_OF_TWO times the smaller; beyond that, as the smaller |
    | none | as 1, like all others |
    """
    positive = sorted(rate for rate in rates.values() if rate)
    if not positive:
        return dict.fromkeys(rates, 1.0)
    if len(positive) == 2:
        most = MAX_TIMES_OF_TWO * positive[0]
        known = {peer: rate if rate <= most else positive[0] for peer, rate in rates.items() if rate is not None}
    else:
        median = statistics.median_high(positive)
        known = {peer: believed_claim(rate, median) for peer, rate in rates.items() if rate is not None}
    return {peer: known.get(peer, statistics.median(known.values())) for peer in rates}


def believed_tokens(
    reported: Mapping[PeerId, int], shares: Mapping[PeerId, float], own: int, own_share: float
) -> dict[PeerId, int]:
    """Returns as what the tokens that others have counted for a step count.

    A replica that has counted t tokens of a share of s has come t / s of the way. Each counts at most as far on its way
    as the lower median of all, `own` included, or as its whole share: so one that is slow in a step is made up for by
    the others, and one that says it has everything completes no step.

    reported: tokens by replica. shares: what each is expected to count, by its believed rate; own_share: of this peer.
    """
    ways = [tokens / shares[peer] for peer, tokens in reported.items() if shares[peer] > 0]
    ways += [own / own_share] if own_share > 0 else []
    furthest = max(1.0, statistics.median_low(ways)) if ways else 1.0
    return {peer: min(tokens, math.ceil(furthest * shares[peer])) for peer, tokens in reported.items()}


def tokens_of_all(reported: Mapping[PeerId, int], shares: Mapping[PeerId, float], own: int, own_share: float) -> float:
    """Returns how many tokens a step had in all: this replica's `own`, and what others say to have counted.

    The furthest way (see believed_tokens) counts as at most MAX_WAY_AHEAD times the second one, and the way of one of
    whose tokens nothing is known (0) as the median: so no single one changes the size of the next steps.
    """
    ways = {peer: reported[peer] / share for peer, share in shares.items() if share > 0 and reported.get(peer)}
    known = sorted([*ways.values(), *([own / own_share] if own_share > 0 else [])])
    most = MAX_WAY_AHEAD * known[-2] if len(known) > 1 else math.inf
    usual = statistics.median(min(way, most) for way in known) if known else 1.0
    return own + sum(min(ways.get(peer, usual), most) * share for peer, share in shares.items())


def believed_lead(steps: Mapping[PeerId, int], own: int) -> dict[PeerId, int]:
    """Returns as what the steps that others say to have taken count: of three or more, the furthest as the second.

    own: this peer's step, which may be the second. So no single one of three can be followed.
    """
    if len(steps) < 3:
        return dict(steps)
    second = sorted([*steps.values(), own])[-2]
    return {peer: min(step, second) for peer, step in steps.items()}


# --- sizes of means


@dataclass(frozen=True, slots=True)
class MagnitudeBound:
    """Bounds the magnitude of a region's next mean by the region's earlier means and this peer's own values.

    average, own_average: moving averages of the accepted means' magnitudes (root mean squares) and of this peer's own
    in the rounds in which it had any; None before the first.
    """

    average: float | None = None
    own_average: float | None = None

    def limit(self, own: float) -> float:
        """Returns the largest plausible magnitude; infinity while nothing is known to compare with.

        own: magnitude of this peer's own values; 0 where it has none, as when it replays a step.
        """
        if self.average is None or self.own_average is None:
            return FIRST_RATIO * own or math.inf
        usual = min(self.average, MAX_OWN_RATIO * self.own_average)
        return MAX_RATIO * max(usual, own)

    def why_implausible(self, mean: float, own: float) -> str:
        """Returns why a mean of magnitude `mean` must be rejected, or "" if it is finite and within `limit`."""
        limit = self.limit(own)
        why = f"the mean has a root mean square of {mean:.3g}; at most {limit:.3g} is plausible"
        return "" if math.isfinite(mean) and mean <= limit else why

    def after_accepted_mean(self, mean: float, own: float) -> MagnitudeBound:
        """Returns the bound after a mean of magnitude `mean` was accepted; unchanged where `own` is 0."""
        if not own:
            return self
        own_average = _moved(self.own_average, own)
        return MagnitudeBound(_moved(self.average, min(mean, MAX_OWN_RATIO * own_average)), own_average)


def _moved(average: float | None, value: float) -> float:
    # MovingAverage is not used: it would give the second value a weight of one half.
    return value if average is None else average + NEW_WEIGHT * (value - average)


# --- numbers of steps
#
# All replicas of a stage take its steps together, so a replica that takes part knows how fast they come. A report of
# more steps than MAX_SPEED_UP times as many as that pace allows is implausible, however many tokens it claims:
#
#     highest plausible step = own step + lead + MAX_SPEED_UP * (SLACK_S + seconds since that step) / step_s
#
# step_s is how long this replica's own steps last, `own step` the last one that it took itself, level with the others.
# Step numbers that it took over from them since then, by catching up or fetching a state, do not raise the bound. A
# replica that was away, or whose machine slept, accepts the others' steps again once enough time has passed here too.


@dataclass(frozen=True, slots=True)
class OwnPace:
    """How far this replica is with a stage, and how fast it steps; bounds what other replicas can have reached.

    own_step: the last step that this replica took itself while it was level with the others (at most LEAD behind).
    own_step_at: the time in seconds when it took that step.
    present_step: the step that it is at now, which it may have taken over from another replica.
    step_s: average duration of its steps in seconds, None if unknown.
    """

    own_step: int
    own_step_at: float
    present_step: int
    step_s: float | None = None

    def with_step(self, step: int, now: float, step_s: float | None, furthest_step: int) -> OwnPace:
        """Returns the pace after this replica was seen at `step` at time `now`: with present_step and step_s replaced.

        own_step and own_step_at become `step` and `now` only if this replica took exactly one step and is level with
        the others (at most LEAD behind): one that replays takes many steps quickly, which must not raise the bound.
        furthest_step: the highest plausible step that another replica has reported.
        """
        if step == self.present_step + 1 and furthest_step <= step + LEAD:
            return OwnPace(step, now, step, step_s)
        return OwnPace(self.own_step, self.own_step_at, step, step_s)

    def highest_plausible_step(self, now: float, target_tokens: int, lead: int) -> int:
        """Returns the highest step that another replica can have taken by now.

        That is max(present_step + 1, own_step + lead + n), with n = MAX_SPEED_UP * (SLACK_S + now - own_step_at) /
        step_s, rounded down. lead: LEAD or LOCAL_LEAD. target_tokens: tokens of a step; while step_s is unknown,
        target_tokens / FASTEST_TOKENS_PER_S stands for step_s / MAX_SPEED_UP.
        """
        least_s = self.step_s / MAX_SPEED_UP if self.step_s else target_tokens / FASTEST_TOKENS_PER_S
        most_steps = int((SLACK_S + max(0.0, now - self.own_step_at)) / least_s)
        return max(self.present_step + 1, self.own_step + lead + most_steps)


class LeadBudget(NamedTuple):
    """How far another stage of a synchronous run may lead this one: all microbatches pass through all stages.

    So another stage leads only where it began so, or where steps' microbatches were lost on their way through this one.
    A stage of one replica says its steps alone; with this budget it cannot make the others skip theirs.

    level_at: the step at which this stage first was level with the leading one, or took over its number; None before.
    skipped: steps that this stage has skipped since, in order to follow.
    """

    level_at: int | None = None
    skipped: int = 0

    def highest(self, step: int, plausible: int) -> int:
        """Returns the highest step of another stage that counts. plausible: see OwnPace.highest_plausible_step."""
        if self.level_at is None:
            return plausible
        own_steps = step - self.level_at - self.skipped
        return min(plausible, step + max(0, LEAD + own_steps // STEPS_TO_LOSE_ONE - self.skipped))

    def when_level(self, step: int) -> LeadBudget:
        """Returns the budget after this stage was seen not to be behind at `step`."""
        return self if self.level_at is not None else LeadBudget(step)

    def after_skip(self, step: int, leading: int) -> LeadBudget:
        """Returns the budget after this stage went from `step` to the step `leading` of another one."""
        return LeadBudget(leading) if self.level_at is None else self._replace(skipped=self.skipped + leading - step)


# --- histories
#
# Replicas that have applied other means have other history hashes; some then fetch the state of others. Peer ids are
# free, so ids do not vote: only replicas that this one has seen to share its history for a while do.

VOTE_STEPS: Final = 50  # number of steps with this replica's history after which another replica has a vote
# Steps after this replica's own start within which others that share its history were there before it: they vote too.
START_STEPS: Final = 10


class HistoryReport(NamedTuple):
    """What a replica last reported itself: the digest of all means that it has applied up to `step`, 0 if unknown."""

    step: int
    digest: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What this replica has measured of another one. Times are in seconds.

    first: the first step at which both had the same history. steps: the number of such steps. last: the last one.
    """

    first: int
    steps: int
    last: int
    equal_at: float  # when both were last seen to have the same history
    away_at: float = -math.inf  # when it was last silent

    def has_vote(self, start_step: int) -> bool:
        return self.steps >= VOTE_STEPS or self.first <= start_step + START_STEPS

    @property
    def was_away(self) -> bool:
        """Whether it has been silent since both had the same history."""
        return self.away_at > self.equal_at


def with_reports(
    standings: Mapping[PeerId, Standing],
    history: Mapping[int, int],
    reports: Mapping[PeerId, HistoryReport],
    away: Collection[PeerId],
    now: float,
) -> dict[PeerId, Standing]:
    """Returns the standings after reports of live replicas, and while others are `away`: silent.

    history: of this replica, digests of all means applied up to a step, by the number of that step.
    """
    changed = dict(standings)
    for peer, report in reports.items():
        if not report.digest or history.get(report.step) != report.digest:
            continue
        known = changed.get(peer)
        if known is None:
            changed[peer] = Standing(report.step, 1, report.step, now)
        else:
            steps = known.steps + (report.step > known.last)
            changed[peer] = replace(known, steps=steps, last=max(known.last, report.step), equal_at=now)
    for peer in away:
        if peer in changed:
            changed[peer] = replace(changed[peer], away_at=now)
    return changed


class Divergence(NamedTuple):
    """Replicas with another history. fetch_from: whose state is right, sorted; undecided: who is as many as this side.

    Both are empty where this replica's own history is right.
    """

    fetch_from: tuple[PeerId, ...] = ()
    undecided: tuple[PeerId, ...] = ()


def find_divergence(
    history: Mapping[int, int],
    me: PeerId,
    reports: Mapping[PeerId, HistoryReport],
    standings: Mapping[PeerId, Standing],
    *,
    start_step: int,
    run: str,
) -> Divergence:
    """Returns whose history is right, by the votes of the replicas that this one knows to have shared its history.

    Replicas with the same digest at the same step form a group. One at a later step than `history` reaches is in this
    replica's group; one that reports no digest, or is at a step for which `history` has none, is ignored.

    | the other group with most votes has | result |
    |---|---|
    | more votes than this replica's group | its voters are right |
    | as many, and all of its voters were away since they shared this history: the stage was split | see below |
    | as many, but some were here all the time: one of both sides lies | undecided: each trains on |
    | fewer, or no vote | this replica's group is right |

    Both halves of a split stage must choose the same one: that with the least hash of run and voter's id.
    This replica has a vote, unless it has started from another's state or a checkpoint (start_step > 0) and nobody
    shares its history; then all others have one.
    """
    own_side = {me}
    groups: defaultdict[HistoryReport, set[PeerId]] = defaultdict(set)
    for peer, report in reports.items():
        if not report.digest:
            continue
        if report.step > max(history, default=0):
            own_side.add(peer)
        elif own_digest := history.get(report.step, 0):
            (own_side if report.digest == own_digest else groups[report]).add(peer)
    is_new = start_step > 0 and not standings
    voters = {peer for peer, standing in standings.items() if standing.has_vote(start_step)}
    voters = set(reports) if is_new else voters | {me}
    own_votes = own_side & voters
    largest = max(
        (sorted(group & voters) for group in groups.values()), key=lambda votes: (len(votes), votes), default=[]
    )
    if not largest or len(largest) < len(own_votes):
        return Divergence()
    if len(largest) > len(own_votes):
        return Divergence(fetch_from=tuple(largest))
    if not all(standings[peer].was_away for peer in largest if peer in standings) or is_new:
        return Divergence(undecided=tuple(largest))

    def hashed(peer: PeerId) -> bytes:
        return hashlib.sha256(f"agora half 1\0{run}\0{peer}".encode()).digest()

    yields = min(map(hashed, largest)) < min(map(hashed, own_votes))
    return Divergence(fetch_from=tuple(largest)) if yields else Divergence()
