"""How fast a stage's replicas count, how much of a step each counts, how large the next step is. Deterministic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

from agora.core.moving_average import MovingAverage
from agora.replica.trust import believed_rates, believed_step_tokens

RATE_DECAY_S: Final = 10.0  # seconds after which a counted token weighs 1/e of one counted now
# Seconds of measurement, older ones decayed, from which a replica's rate counts as known: after about a second.
MIN_MEASURED_S: Final = 0.9
MIN_SHARE: Final = 0.5  # microbatches of a step, below which a slow replica's share is rounded to none
SPARE_AHEAD: Final = 2  # microbatches of the next share that are under way when the mean comes, see tokens_ahead
MAX_MEAN_WAIT_FRACTION: Final = 0.5  # largest fraction of a step for which origins wait for a mean gradient
# Seconds that a step is assumed to take, for MAX_MEAN_WAIT_FRACTION, while the rate of a replica is unknown.
ASSUMED_STEP_S: Final = 2.0
# Maximum number of steps without a wait after means that came too late; then origins wait again, to see whether means
# come sooner now.
MAX_SKIPPED_WAITS: Final = 32
# Fraction of the target by which a step may be made smaller or larger to correct earlier ones.
MAX_CORRECTION: Final = 0.5


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How fast a replica counts tokens: two sums, tokens and seconds, that decay by exp(-t / RATE_DECAY_S)."""

    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, tokens: int, seconds: float) -> TokenRate:
        """Returns the rate after a further `seconds`, in which the replica counted `tokens`, at a constant rate."""
        if seconds <= 0:
            return self
        decay = math.exp(-seconds / RATE_DECAY_S)
        added_s = RATE_DECAY_S * (1 - decay)
        return TokenRate(self.tokens * decay + tokens * added_s / seconds, self.seconds * decay + added_s)

    @property
    def per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds >= MIN_MEASURED_S else None


@dataclass(frozen=True, slots=True)
class RateMeter:
    """Measures how fast a replica counts tokens while nothing holds it, from its counts at some times.

    A replica whose share is closed may be held until the mean is there. If that time were measured, one with a small
    quota would wait for most of each step, count little in it, and be given a small quota again. Nor is the time before
    its first tokens measured, in which it may have waited for others to begin.

    | it has | what it counts is measured |
    |---|---|
    | no closed share | at once |
    | one | when it closes the next one, if most of that was counted meanwhile: then nothing held it |
    | two | not at all: it may count nothing until the first of their means comes |

    Until its rate is known, all is measured in which it counts something.
    """

    rate: TokenRate = field(default_factory=TokenRate)
    tokens_counted: int = 0  # at the last count
    counted_at: float = -math.inf  # when that was, -inf before the first count
    open_step: int = 0  # at the last count
    closed_shares: int = 0  # at the last count: shares whose means were not there yet
    # Since a share was closed last: tokens that were measured, and tokens and seconds that were not yet.
    measured_tokens: int = 0
    waiting_tokens: int = 0
    waiting_s: float = 0.0

    @property
    def per_second(self) -> float | None:
        return self.rate.per_second

    def after(self, now: float, tokens_counted: int, *, step: int, open_step: int) -> RateMeter:
        """Returns the meter after a count of all its tokens; the rate is unknown again if these have become fewer.

        step, open_step: see ReplicaCounts.
        """
        tokens, seconds = tokens_counted - self.tokens_counted, now - self.counted_at
        if tokens < 0 or seconds == math.inf:
            return RateMeter(TokenRate(), tokens_counted, now, open_step, open_step - step)
        rate = TokenRate() if tokens and not self.tokens_counted else self.rate
        measured_tokens, waiting_tokens, waiting_s = self.measured_tokens, self.waiting_tokens, self.waiting_s
        is_known = rate.per_second is not None
        if not self.closed_shares or (tokens and not is_known):
            rate, measured_tokens = rate.after(tokens, seconds), measured_tokens + tokens
        elif self.closed_shares == 1:
            waiting_tokens, waiting_s = waiting_tokens + tokens, waiting_s + seconds
        if open_step > self.open_step:
            if waiting_tokens > measured_tokens:
                rate = rate.after(waiting_tokens, waiting_s)
            measured_tokens, waiting_tokens, waiting_s = 0, 0, 0.0
        return RateMeter(
            rate,
            tokens_counted,
            now,
            open_step,
            open_step - step,
            measured_tokens=measured_tokens,
            waiting_tokens=waiting_tokens,
            waiting_s=waiting_s,
        )


def own_quota(rates: Mapping[PeerId, float | None], me: PeerId, target: int, microbatch_tokens: int) -> int:
    """Returns how many tokens of a step replica `me`, which is in `rates`, counts before it closes its share.

    A step has m = target / microbatch_tokens microbatches. With the replicas in the order of their ids, and R_i the sum
    of the first i rates over the sum of all, replica i counts microbatches round(m * R_(i-1)) to round(m * R_i). So the
    quotas of replicas that know the same rates add up to the target. One whose part is less than MIN_SHARE of a
    microbatch, and whose rate is less than half of the median, is left out of the division.

    rates: tokens per second of the replicas that take part; None, unknown, counts as the median of the known rates.
    When all are 0, the quotas are equal. target: tokens of the step. microbatch_tokens: tokens of one microbatch. A
    quota is a multiple of microbatch_tokens, possibly 0. The quotas of all replicas add up to the target, rounded to
    whole microbatches, at least one.
    """
    microbatches = max(1, round(target / microbatch_tokens))
    counted = rates_of_parts(rates, microbatches)
    total = sum(counted.values())
    start = sum(rate for peer, rate in counted.items() if peer < me)
    first, end = (math.floor(microbatches * rate / total + 0.5) for rate in (start, start + counted[me]))
    return (end - first) * microbatch_tokens


def rates_of_parts(rates: Mapping[PeerId, float | None], microbatches: int) -> dict[PeerId, float]:
    """Returns the rates in proportion to which a step of so many microbatches is divided: 0 for whom has no part."""
    known = [rate for rate in rates.values() if rate is not None]
    median = statistics.median(known) if known else 1.0
    filled = {peer: median if rate is None else rate for peer, rate in rates.items()}
    if not any(filled.values()):
        filled = dict.fromkeys(filled, 1.0)
    # The others would wait for a slow one's only microbatch, which takes it longer than the step takes them.
    least = MIN_SHARE / microbatches * sum(filled.values())
    return {peer: 0.0 if rate < min(least, 0.5 * median) else rate for peer, rate in filled.items()}


@dataclass(frozen=True, slots=True)
class BatchSizeCorrection:
    """Corrects the global batch size: how many tokens the next step has, so that steps have `target` on average.

    surplus: tokens by which the steps so far exceeded `target` in all, limited to +-MAX_CORRECTION * target.
    """

    target: int
    surplus: float = 0.0

    @property
    def next_target(self) -> int:
        return round(self.target - self.surplus)

    def after_step(self, tokens: float) -> BatchSizeCorrection:
        """Returns the correction after a step of `tokens` tokens, with the surplus + tokens - target, limited."""
        bound = MAX_CORRECTION * self.target
        return BatchSizeCorrection(self.target, min(max(self.surplus + tokens - self.target, -bound), bound))


class Shares(NamedTuple):
    """How many tokens of a step of target size each replica counts: this one by its rate, others by believed ones."""

    own: float
    others: Mapping[PeerId, float]
    microbatch_tokens: int


@dataclass(slots=True)
class StepPacing:
    """Measures a stage's steps and this replica's token rate; computes its quota, and whether origins wait for means.

    microbatch_tokens: tokens of one microbatch, of which quotas are multiples.
    batch_size: from which the tokens of the next step follow.
    meter: how fast this replica counts tokens.
    step_s: average duration of a step.
    mean_wait_s: average time from the closing of this replica's share to the step.
    now (an argument of the methods): seconds, always on the same clock.
    """

    microbatch_tokens: int
    batch_size: BatchSizeCorrection
    meter: RateMeter = field(default_factory=RateMeter)
    step_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    mean_wait_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    # Tokens at which this replica closes its share of the present step; 0 without another replica, and where its part
    # of the step rounds to no microbatch.
    quota_now: int = 0
    # Seconds in which all replicas together count the target of a step, at their last known rates; 0 while a rate is
    # unknown. Not the measured duration: shares are closed early by this figure, which would shorten the measured one
    # again and again.
    expected_s: float = 0.0
    # The sum of the believed rates, of which unknown ones count as the median; 0 while all are unknown.
    total_rate: float = 0.0
    shares: Shares | None = None  # None before the first update_quota
    believed_rates: Mapping[PeerId, float] = field(default_factory=dict)  # the rates of all replicas as far as believed
    without_part: frozenset[PeerId] = frozenset()  # replicas too slow for a part of the step, see own_quota
    _are_rates_known: bool = False  # of most replicas
    _open: tuple[int, float] = (-1, -math.inf)  # the open step, and since when it is open
    _closed_at: float | None = None  # when this replica closed the share whose mean it awaits
    _all_closed_at: float | None = None  # when all other replicas had closed theirs as well
    _steps: int = 0
    _wait_again_at_step: int = 0  # the step from which origins wait for means
    _skipped_waits: int = 0  # steps without a wait after the last mean that came too late, halved by each in time
    _stepped_at: float | None = None
    _uncorrected_quota: int = 0

    def set_target(self, target: int) -> None:
        """Sets the tokens that a step should have on average; an amendment may have changed them."""
        if target != self.batch_size.target:
            self.batch_size = BatchSizeCorrection(target).after_step(target + self.batch_size.surplus)

    def measure(self, now: float, tokens_counted: int, *, step: int, open_step: int) -> None:
        """Updates this replica's `meter`, and since when its share is open.

        tokens_counted: all tokens that this replica has counted since it started. step: steps that it has taken.
        open_step: for whose share it counts.
        """
        if open_step != self._open[0]:
            self._open = open_step, now
        self.meter = self.meter.after(now, tokens_counted, step=step, open_step=open_step)

    def update_quota(self, me: PeerId, others: Mapping[PeerId, float | None]) -> int:
        """Returns the tokens at which this replica closes its open share, by all rates; sets what follows from them.

        others: rates of the other live replicas in tokens per second, None where unknown. Without others it returns the
        tokens of a whole step, and sets quota_now to 0. See own_quota; the step has batch_size.next_target tokens.
        """
        own, target = self.meter.per_second, self.batch_size.target
        reported = {**others, me: own}
        self.believed_rates = rates = believed_rates(reported)
        total = sum(rates.values()) or 1.0
        is_known = None not in reported.values() and any(reported.values())
        self.expected_s = target / total if is_known else 0.0
        self.total_rate = total if any(reported.values()) else 0.0
        # Most suffices: a single replica whose rate stays unknown must not switch the check off.
        self._are_rates_known = 2 * sum(bool(rate) for rate in reported.values()) > len(reported)
        # The others may not believe this replica's rate. It then counts more than the quota that they expect, in
        # proportion to its true rate.
        times = own / rates[me] if own and rates[me] else 1.0
        shares = {peer: target * rate / total for peer, rate in rates.items() if peer != me}
        self.shares = Shares(times * target * rates[me] / total, shares, self.microbatch_tokens)
        self._uncorrected_quota = self._quota(rates, me, target, times)
        quota = self._quota(rates, me, self.batch_size.next_target, times)
        self.quota_now = quota if others else 0
        parts = rates_of_parts(rates, max(1, round(target / self.microbatch_tokens)))
        self.without_part = frozenset(peer for peer, rate in parts.items() if not rate)
        return quota

    def _quota(self, rates: Mapping[PeerId, float], me: PeerId, target: int, times: float) -> int:
        quota = own_quota(rates, me, target, self.microbatch_tokens)
        return round(times * quota / self.microbatch_tokens) * self.microbatch_tokens

    def open_fraction(self, now: float) -> float:
        """Returns for what part of the step's expected duration this replica's share has been open."""
        step_s = self.batch_size.next_target / self.total_rate if self.total_rate else ASSUMED_STEP_S
        return (now - self._open[1]) / step_s

    def tokens_ahead(self, fraction: float) -> int:
        """Returns how many tokens of the next share may begin before the awaited mean is applied.

        They keep the devices busy meanwhile: what this replica counts until the mean usually comes, and SPARE_AHEAD
        microbatches, which are on their way; at most `fraction` of its quota, or SPARE_AHEAD microbatches if these are
        no more than twice that; in whole microbatches, at least one.
        """
        quota = self.quota_now / self.microbatch_tokens
        ceiling = max(round(fraction * quota), min(SPARE_AHEAD, round(2 * fraction * quota)))
        rate, wait_s = self.meter.per_second, self.mean_wait_s.value
        if rate is not None and wait_s is not None:
            ceiling = min(ceiling, math.ceil(rate * wait_s / self.microbatch_tokens) + SPARE_AHEAD)
        return max(1, ceiling) * self.microbatch_tokens

    def record_step(self, tokens: float) -> None:
        """Corrects `batch_size` by the tokens that an all-reduced step had beyond the target, or lacked."""
        self.batch_size = self.batch_size.after_step(tokens)

    def record_reported_step(self, reported_total: float, own_tokens: int, reported: Mapping[PeerId, int]) -> None:
        """Corrects `batch_size` after an all-reduce by its tokens, as far as they are believed.

        reported_total: by its reducers. own_tokens: of this replica in the step. reported: by the live replicas. See
        believed_step_tokens.
        """
        if self.shares is not None and self._are_rates_known:
            reported_total = believed_step_tokens(
                reported_total, reported, self.shares.others, own_tokens, self.shares.own, self.microbatch_tokens
            )
        self.record_step(reported_total)

    def record_inner_step(self, tokens: int) -> None:
        """Corrects `batch_size` by the tokens that an inner step had beyond the target, or lacked.

        tokens: counted by this replica in the step. The tokens of all replicas are estimated as target * tokens
        / the quota that this replica has of an uncorrected step. Changes nothing before the first update_quota.
        """
        if self._uncorrected_quota > 0:
            self.record_step(self.batch_size.target * tokens / self._uncorrected_quota)

    def on_share_closed(self, now: float) -> None:
        """Records that this replica closed a share now, unless an earlier one still awaits its mean."""
        self._closed_at = now if self._closed_at is None else self._closed_at

    def on_all_shares_closed(self, now: float) -> None:
        """Records that all replicas have closed their shares of the step: from `now` on only the mean is awaited."""
        self._all_closed_at = now if self._all_closed_at is None else self._all_closed_at

    def should_origins_wait(self, now: float) -> bool:
        """Returns whether origins should wait for the mean of the share that was closed last, or that is closed next.

        Waiting origins open no more than the open share lacks and, where weights are predicted, tokens_ahead tokens of
        the next one. They wait at most MAX_MEAN_WAIT_FRACTION of a step after the closing. If one mean comes later
        than that after all replicas have closed their shares, they skip the next wait; if means stay late, the next 2,
        4, 8 ... MAX_SKIPPED_WAITS. Time in which another replica still counts delays no mean: this one's quota is then
        too small. If its origins did not wait for that reason, they would have few microbatches in flight, and it would
        be measured as slow and keep the small quota.
        """
        may_wait = self._steps >= self._wait_again_at_step
        return may_wait and (self._closed_at is None or now - self._closed_at < self._max_wait_s)

    @property
    def _max_wait_s(self) -> float:
        return MAX_MEAN_WAIT_FRACTION * (self.expected_s or ASSUMED_STEP_S)

    def on_stepped(self, now: float) -> None:
        """Records that a step was taken now, so that no closed share awaits its mean; updates the average step_s.

        If origins waited for this step's mean and the mean came too late, sets for how many steps they do not wait; a
        mean in time halves that number for the next time.
        """
        waited = self._steps >= self._wait_again_at_step
        self._steps += 1
        if self._closed_at is not None:
            self.mean_wait_s = self.mean_wait_s.with_sample(now - self._closed_at)
        if self._closed_at is not None and waited:
            since = self._closed_at if self._all_closed_at is None else self._all_closed_at
            if now - since > self._max_wait_s:
                self._skipped_waits = min(max(1, 2 * self._skipped_waits), MAX_SKIPPED_WAITS)
                self._wait_again_at_step = self._steps + self._skipped_waits
            else:
                self._skipped_waits //= 2
        self._closed_at = self._all_closed_at = None
        if self._stepped_at is not None:
            self.step_s = self.step_s.with_sample(now - self._stepped_at)
        self._stepped_at = now
