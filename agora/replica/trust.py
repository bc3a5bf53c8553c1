"""How far a replica believes what the others report: rates, tokens, weights, magnitudes of means, and steps. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

from agora.replica.divergence import SharedHistory

SMOOTHING: Final = 0.3  # the fraction by which a new value moves a moving average
# A mean may be this many times as large as the average of earlier means, or as the peer's own values.
MAX_MEAN_RATIO: Final = 4.0
# The same ratio in synchronous runs, where a rejected mean costs a step and a mean of honest gradients cannot be
# shortened. In one step of a thousand, most often an early one, honest gradients are 4 times as large as before. A mean
# is clipped before its step (`optimizer.clip`), so that one that is 32 times as large moves the weights no further.
MAX_MEAN_RATIO_SYNCHRONOUS: Final = 32.0
# A reducer makes no mean larger than this many times what is usual, or what nearly all of its contributors sent, so
# that they accept it. The rest up to MAX_MEAN_RATIO is what the number formats, and usual sizes, differ by.
MAX_SENT_RATIO: Final = 3.0
# A rejected mean is called false only where it is this many times as large as what would still have been accepted. Less
# may come from a contribution of another member, which this one has not seen.
FALSE_TIMES: Final = 4.0
# MAX_MEAN_RATIO before the first mean is known, when there are only this replica's own values to compare with.
FIRST_RATIO: Final = 8.0
# The average of earlier means counts up to this many times the average of the peer's own values: that others have sent
# large means before is no reason to believe the next one.
MAX_OWN_RATIO: Final = 2.0
# Steps by which others may lead at any time where all take each step together: two closed shares, and one step.
MAX_LEAD: Final = 3
# Steps by which others may lead during inner steps. A replica that is further behind fetches a state.
MAX_INNER_LEAD: Final = 20
MAX_SPEED_UP: Final = 4.0  # how many times as fast as before others may go on stepping without this replica
# Seconds for which a busy machine may stand still without noticing it, while honest replicas go on.
STALL_ALLOWANCE_S: Final = 10.0
# Maximum tokens per second that a stage's replicas can plausibly count together, until a step was measured here.
FASTEST_TOKENS_PER_S: Final = 1e6
MIN_RATES: Final = 3  # minimum number of known rates for one to be called too high: of two, either could be right
# A contribution counts up to this many times the tokens that its sender's rate gives it: it may hold a late one too.
MAX_QUOTAS: Final = 3.0
# The weights of a shard are plausible if their sum is at most this many times the planned tokens.
MAX_SURPLUS: Final = 1.25
MAX_STATE_AGE_S: Final = (
    1800.0  # maximum age, in seconds, of the state with which a newcomer starts: no transfer takes longer
)
# Seconds for which a replica counts as absent after an implausible report, unless a plausible one comes before.
ABSENCE_S: Final = 10.0


# --- what peers say of themselves
#
# A claim counts as it is up to some multiple of the median of all claims; beyond, the less the larger it is, down to
# the median itself. So a peer that overstates more gets less. Two peers that know slightly different claims still
# compute nearly the same, which they would not with a sharp limit.

MAX_TIMES_MEDIAN: Final = 4.0


def believed_claim(claim: float, median: float, most_times: float = MAX_TIMES_MEDIAN) -> float:
    """Returns the value that a claim counts as, if the claims of all peers of its kind have the `median`, above 0.

    | claim / median | it counts as |
    |---|---|
    | up to c = most_times | the claim |
    | r, above c | max(1, c (c / r)^2) * median: falls to c / 2 medians at 1.4 c, and is the median from c^1.5 on |
    """
    most = most_times * median
    return claim if claim <= most else max(median, most * (most / claim) ** 2)


def believed_bandwidths(claims: Mapping[PeerId, float], networks: Mapping[PeerId, str]) -> dict[PeerId, float]:
    """Returns the bandwidths by which shards are apportioned to reducers: `claims`, as far as they are believed.

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

    rates: tokens per second of all replicas, None if unknown. Nobody has a bound while one is unknown, or while fewer
    than MIN_RATES are above 0.
    """
    known = [rate for rate in rates.values() if rate]
    if len(known) < MIN_RATES or None in rates.values():
        return {}
    median = statistics.median_high(known)
    believed = {peer: believed_claim(rate or 0.0, median) for peer, rate in rates.items()}
    total = sum(believed.values())
    return {peer: MAX_QUOTAS * max(target * rate / total, microbatch_tokens) for peer, rate in believed.items()}


def believed_weights(
    claimed: Mapping[PeerId, float], planned: float, bounds: Mapping[PeerId, float], accepted: Mapping[PeerId, float]
) -> dict[PeerId, float]:
    """Returns how many tokens each contribution to one shard counts as. claimed: what their senders claim.

    planned: tokens that they should have together. bounds: see token_bounds; a replica without one has
    none. accepted: see `update_accepted_fractions`.

    | the sum of the claimed weights is | each counts |
    |---|---|
    | at most MAX_SURPLUS * planned | as claimed |
    | more | up to its bound, or to what was accepted of this replica before, if that is more |
    """
    if sum(claimed.values()) <= MAX_SURPLUS * planned:
        return dict(claimed)
    # A machine far faster than the median has a bound below its true weight. What it had while all weights together
    # were right needs no second proof: somebody else's lie must not take it away.
    return {
        peer: min(weight, max(bounds.get(peer, math.inf), accepted.get(peer, 0.0) * planned))
        for peer, weight in claimed.items()
    }


def update_accepted_fractions(
    accepted: Mapping[PeerId, float], claimed: Mapping[PeerId, float], planned: float
) -> dict[PeerId, float]:
    """Returns the average fractions of `planned` that contributors had, after a round in which they `claimed` theirs.

    A round whose claimed weights exceed the planned ones changes nothing.
    """
    if not claimed or sum(claimed.values()) > MAX_SURPLUS * planned or math.isinf(planned):
        return dict(accepted)
    return {peer: _moving_average(accepted.get(peer), weight / planned) for peer, weight in claimed.items()}


# --- tokens of others
#
# A replica itself reports how fast it counts tokens and how many it has counted. Both only divide the work: a replica's
# share of a step, and the moment at which the step is complete. The bounds below let no single report complete a step,
# and no share be larger than that of the fastest machine that may take part beside the others. With a smaller bound,
# steps would exceed their target where an honest machine is that fast. Weights that exceed a step's tokens are bounded
# in any case, see believed_weights.

MAX_TIMES_RATE: Final = 64.0
# Replicas that know each other's rates differ at most by this factor in the fraction of their share that they have
# counted. A reducer's reported weight is believed within it.
MAX_PROGRESS_RATIO: Final = 1.1


def believed_rates(rates: Mapping[PeerId, float | None]) -> dict[PeerId, float]:
    """Returns the rates, in tokens per second, by which a step is divided among replicas that report `rates`.

    rates: as reported, this peer's own included; None, unknown, counts as the median of the believed ones.

    | positive rates | a rate counts |
    |---|---|
    | one, or three and more | as believed_claim says, by their upper median and MAX_TIMES_RATE |
    | two | up to MAX_TIMES_RATE times the smaller; beyond that, as the smaller |
    | none | as 1, like all others |
    """
    positive = sorted(rate for rate in rates.values() if rate)
    if not positive:
        return dict.fromkeys(rates, 1.0)
    if len(positive) == 2:
        most = MAX_TIMES_RATE * positive[0]
        known = {peer: rate if rate <= most else positive[0] for peer, rate in rates.items() if rate is not None}
    else:
        median = statistics.median_high(positive)
        known = {peer: believed_claim(rate, median, MAX_TIMES_RATE) for peer, rate in rates.items() if rate is not None}
    return {peer: known.get(peer, statistics.median(known.values())) for peer in rates}


def believed_tokens(
    reported: Mapping[PeerId, int],
    shares: Mapping[PeerId, float],
    own: int,
    own_share: float,
    microbatch_tokens: int,
) -> dict[PeerId, int]:
    """Returns the tokens of a step that others are believed to have counted.

    A replica that has counted t tokens of a share of s has counted the fraction t / s. At most the lower median of all
    fractions, `own` included, is believed of each, or its whole share if that is more; and one microbatch beyond, since
    shares are rounded. So the others make up for a replica that is slow in a step, and one that claims all tokens of a
    step does not complete it.

    reported: tokens by replica. shares: what each is expected to count, by its believed rate; own_share: of this peer.
    """
    fractions_counted = [tokens / shares[peer] for peer, tokens in reported.items() if shares[peer] > 0]
    fractions_counted += [own / own_share] if own_share > 0 else []
    furthest = max(1.0, statistics.median_low(fractions_counted)) if fractions_counted else 1.0
    return {
        peer: min(tokens, math.ceil(furthest * shares[peer]) + microbatch_tokens) for peer, tokens in reported.items()
    }


def believed_step_tokens(
    claimed: float,
    reported: Mapping[PeerId, int],
    shares: Mapping[PeerId, float],
    own: int,
    own_share: float,
    slack: int,
) -> float:
    """Returns the tokens of a step to which the sizes of the next ones are adapted.

    Each of the others should have counted the same fraction of its share as the lower median of all (see
    believed_tokens), within MAX_PROGRESS_RATIO and `slack` tokens. Its reported tokens count within these limits; if
    they are 0 or unknown, that fraction of its share counts. The claimed number is returned if it is within
    MAX_PROGRESS_RATIO of the sum over all replicas, or if fewer than two others are known: of two differing reports,
    either could be right. Otherwise the sum is returned.

    claimed: tokens of the step, as its reducers reported them. reported: by the other replicas, of themselves.
    shares: tokens of a step of target size that each of them should count.
    own: tokens of this replica in the step. slack: tokens of a microbatch.
    """
    if len(shares) < 2 or own_share <= 0:
        return claimed
    fractions_counted = [reported.get(peer, 0) / share for peer, share in shares.items() if share > 0]
    fraction_counted = statistics.median_low([own / own_share, *(each for each in fractions_counted if each > 0)])
    counted = float(own)
    for peer, share in shares.items():
        expected = fraction_counted * share
        least, most = expected / MAX_PROGRESS_RATIO - slack, expected * MAX_PROGRESS_RATIO + slack
        counted += min(max(reported.get(peer) or expected, least), most)
    return claimed if counted / MAX_PROGRESS_RATIO <= claimed <= counted * MAX_PROGRESS_RATIO else counted


# --- sizes of means


def fair_size(own: float, tokens: float, planned: float, members: int) -> float:
    """Returns the magnitude that a replica's values would have over an equal part of `planned` tokens: own * sqrt(t).

    t = tokens * members / planned, between 1 and `members`. own: their magnitude over `tokens` tokens.
    """
    # The noise of a gradient is proportional to 1 / sqrt(tokens). No weight counts for much more than an equal part of
    # a mean. So where one machine has counted nearly all tokens, the mean has the noise of the others' few tokens.
    return own * math.sqrt(min(max(1.0, tokens * members / planned), float(members)))


@dataclass(frozen=True, slots=True)
class MagnitudeBound:
    """Bounds the magnitude of a region's next mean by the region's earlier means and this peer's own values.

    average, own_average: moving averages of the root mean squares of accepted means, and of this peer's own values in
    rounds where it had any; None before the first. max_ratio: MAX_MEAN_RATIO, or MAX_MEAN_RATIO_SYNCHRONOUS.
    """

    average: float | None = None
    own_average: float | None = None
    max_ratio: float = MAX_MEAN_RATIO

    @property
    def usual(self) -> float:
        """The usual magnitude of means, as far as this peer's own values confirm it; 0 before the first mean."""
        if self.average is None or self.own_average is None:
            return 0.0
        return min(self.average, MAX_OWN_RATIO * self.own_average)

    def limit(self, own: float) -> float:
        """Returns the largest plausible magnitude; infinity while nothing is known to compare with.

        own: magnitude of this peer's own values; 0 where it has none, as when it replays a step.
        """
        if self.average is None or self.own_average is None:
            return max(FIRST_RATIO, self.max_ratio) * own or math.inf
        return self.max_ratio * max(self.usual, own)

    def is_false(self, mean: float, own: float) -> bool:
        """Returns whether no honest reducer makes a mean of magnitude `mean`, see largest_to_send.

        False before the first mean.
        """
        return self.average is not None and mean > FALSE_TIMES * self.limit(own)

    def largest_to_send(self, contributions: Sequence[float]) -> float:
        """Returns the largest magnitude of a mean that an honest reducer answers; infinity for one that it cannot tell.

        | contributions | most, unless what is usual here is more |
        |---|---|
        | 2 | MAX_SENT_RATIO times the smaller |
        | 3 and more | as many times the second smallest: a single one of 0 lowers nothing |

        contributions: their magnitudes. Every contributor but the one of the smallest accepts such a mean, and that one
        where it is not far below what is usual: whatever one of them has sent, nobody takes the reducer for a liar.
        """
        if len(contributions) < 2 or not self.usual:
            return math.inf
        nearly_all = sorted(contributions)[0 if len(contributions) == 2 else 1]
        return MAX_SENT_RATIO * max(self.usual, nearly_all)

    def why_implausible(self, mean: float, own: float) -> str:
        """Returns why a mean of magnitude `mean` must be rejected, or "" if it is finite and within `limit`."""
        limit = self.limit(own)
        why = f"the mean has a root mean square of {mean:.3g}; at most {limit:.3g} is plausible"
        return "" if math.isfinite(mean) and mean <= limit else why

    def after_accepted_mean(self, mean: float, own: float) -> MagnitudeBound:
        """Returns the bound after a mean of magnitude `mean` was accepted; unchanged where `own` is 0."""
        if not own:
            return self
        own_average = _moving_average(self.own_average, own)
        average = _moving_average(self.average, min(mean, MAX_OWN_RATIO * own_average))
        return replace(self, average=average, own_average=own_average)


def _moving_average(average: float | None, value: float) -> float:
    # MovingAverage is not used: it would give the second value a weight of one half.
    return value if average is None else average + SMOOTHING * (value - average)


# --- numbers of steps
#
# All replicas of a stage take its steps together, so a replica that takes part knows how fast they come. A report of
# more steps than MAX_SPEED_UP times as many as that pace allows is implausible, however many tokens it claims:
#
#     highest plausible step = level step + lead + MAX_SPEED_UP * (STALL_ALLOWANCE_S + seconds since that step) / step_s
#
# step_s is how long this replica's own steps last, `level step` the last one that it took itself, level with the
# others. Step numbers that it took over from them since then, by catching up or fetching a state, do not raise the
# bound. A replica that was away, or whose machine slept, accepts the others' steps again once enough time has passed
# here too. Where a stage is split, each half goes on at its own pace, the larger one faster: so any replica may also be
# as far as the last step that one of them shared allows, at the shorter step_s of then and now. Any, since one of this
# half may have fetched the other half's state before this replica knows of it.


class LevelStep(NamedTuple):
    """The last step that a replica took itself while it was level with the others (at most MAX_LEAD behind).

    at: the time in seconds when it took that step.
    """

    step: int
    at: float

    def after_step(self, step: int, now: float, furthest_step: int) -> LevelStep:
        """Returns the level step after this replica took `step` at time `now`.

        A replica that replays takes many steps quickly, which must not raise the bound: they are not level.
        furthest_step: the highest plausible step that another replica has reported.
        """
        return LevelStep(step, now) if furthest_step <= step + MAX_LEAD else self


@dataclass(frozen=True, slots=True)
class StepPace:
    """How fast a stage's steps can follow one another.

    step_s: average duration of this replica's steps in seconds, None if unknown. target_tokens: tokens of a step; while
    step_s is unknown, target_tokens / FASTEST_TOKENS_PER_S stands for step_s / MAX_SPEED_UP. lead: MAX_LEAD or
    MAX_INNER_LEAD.
    """

    step_s: float | None
    target_tokens: int
    lead: int = MAX_LEAD

    def highest_after(self, step: int, seconds: float, step_s: float | None = None) -> int:
        """Returns the highest step that others can have reached who were at `step` so many seconds ago.

        step_s: how long a step lasted then, if that was less than now.
        """
        shortest = min(filter(None, (self.step_s, step_s)), default=None)
        least_s = shortest / MAX_SPEED_UP if shortest else self.target_tokens / FASTEST_TOKENS_PER_S
        return step + self.lead + int((STALL_ALLOWANCE_S + max(0.0, seconds)) / least_s)


def highest_plausible_step(
    present_step: int, level: LevelStep, shared_histories: Iterable[SharedHistory], pace: StepPace, now: float
) -> int:
    """Returns the highest step that another replica can have taken by now: present_step + 1, or what time allows.

    present_step: the step that this replica is at, which it may have taken over from another one. shared_histories:
    with each of the other replicas.
    """
    return max(
        present_step + 1,
        pace.highest_after(level.step, now - level.at),
        *(pace.highest_after(shared.last, now - shared.at, shared.step_s) for shared in shared_histories),
    )
