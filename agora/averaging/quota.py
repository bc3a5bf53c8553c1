"""Divides an optimizer step among the replicas of a stage: how many tokens each counts for its share. Deterministic.

Knows: how many tokens each replica has counted, and when. Must not know: gradients, calls, the clock.

A step has m = target / microbatch_tokens microbatches. With the replicas in the order of their ids, and R_i the sum of
the first i rates over the sum of all, replica i counts microbatches round(m * R_(i-1)) to round(m * R_i). So the quotas
of replicas that know the same rates add up to the target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.ids import PeerId

from agora.moving_average import MovingAverage

RATE_DECAY_S: Final = 10.0
"""Seconds after which a counted token weighs 1/e of one counted now."""
MIN_MEASURED_S: Final = 1.0
"""Seconds of measurement, older ones decayed, from which a replica's rate counts as known."""
MAX_MEAN_WAIT_FRACTION: Final = 0.5
"""Largest fraction of a step that origins wait for its mean gradient; if it usually takes longer, they do not wait."""
PROBE_EVERY: Final = 32
"""At every 32nd step origins wait for the mean in any case, to measure whether it comes sooner now."""
MAX_CORRECTION: Final = 0.5
"""Fraction of the target by which a step may be made smaller or larger to correct earlier ones."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How fast a replica counts tokens; immutable. Both sums, tokens and seconds, decay by exp(-t / RATE_DECAY_S)."""

    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, tokens: int, seconds: float) -> TokenRate:
        """Returns the rate after a further `seconds`, in which the replica counted `tokens`."""
        decay = math.exp(-seconds / RATE_DECAY_S)
        return TokenRate(self.tokens * decay + tokens, self.seconds * decay + seconds)

    @property
    def per_second(self) -> float | None:
        """Tokens per second; None until MIN_MEASURED_S seconds have been measured."""
        return self.tokens / self.seconds if self.seconds >= MIN_MEASURED_S else None


def own_quota(rates: Mapping[PeerId, float | None], me: PeerId, target: int, microbatch_tokens: int) -> int:
    """Returns how many tokens of a step replica `me`, which is in `rates`, counts before it closes its share.

    rates: tokens per second of the replicas that take part; None, unknown, counts as the median of the known rates.
    When all are 0, the quotas are equal. target: tokens of the step. microbatch_tokens: tokens of one microbatch. A
    quota is a multiple of microbatch_tokens, possibly 0. The quotas of all replicas add up to the target, rounded to
    whole microbatches, at least one.
    """
    known = [rate for rate in rates.values() if rate is not None]
    median = statistics.median(known) if known else 1.0
    filled = {peer: median if rate is None else rate for peer, rate in rates.items()}
    if not any(filled.values()):
        filled = dict.fromkeys(filled, 1.0)
    microbatches, total = max(1, round(target / microbatch_tokens)), sum(filled.values())
    start = sum(rate for peer, rate in filled.items() if peer < me)
    first, end = (math.floor(microbatches * rate / total + 0.5) for rate in (start, start + filled[me]))
    return (end - first) * microbatch_tokens


@dataclass(frozen=True, slots=True)
class StepSize:
    """Plans the sizes of steps so that they average `target` tokens; immutable.

    surplus: tokens by which the steps so far exceeded `target` in all, limited to +-MAX_CORRECTION * target.
    """

    target: int
    surplus: float = 0.0

    @property
    def next_target(self) -> int:
        """Number of tokens for the next step: target - surplus, rounded."""
        return round(self.target - self.surplus)

    def after_step(self, tokens: float) -> StepSize:
        """Returns the plan after a step of `tokens` tokens, with surplus + tokens - target, limited as said above."""
        bound = MAX_CORRECTION * self.target
        return StepSize(self.target, min(max(self.surplus + tokens - self.target, -bound), bound))


@dataclass(slots=True)
class StepMeter:
    """Measures a stage's steps: their tokens and durations, and this replica's token rate.

    size: plans the tokens of the next step. step_s: average duration of a step. `now` in seconds on any one clock.
    """

    microbatch_tokens: int
    size: StepSize
    rate: TokenRate = field(default_factory=TokenRate)
    step_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    mean_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    """Average seconds from the closing of a share to the step along its mean gradient."""
    quota_now: int = 0
    """Tokens at which this replica closes its share of the present step; 0 where there is no other replica."""
    expected_s: float = 0.0
    """Seconds in which all replicas together count the target of a step, at their last known rates; 0 while a rate is
    unknown. Not the measured duration of steps: shares are closed early because of this figure, so that the measured
    duration would fall further and further."""
    _closed_at: float | None = None
    _steps: int = 0
    _measured: tuple[float, int] | None = None
    _stepped_at: float | None = None
    _uncorrected_quota: int = 0

    def measure(self, now: float, tokens_counted: int) -> None:
        """Updates this replica's rate. tokens_counted: all tokens that it has counted since it started."""
        if self._measured is not None and now > self._measured[0]:
            self.rate = self.rate.after(max(0, tokens_counted - self._measured[1]), now - self._measured[0])
        self._measured = now, tokens_counted

    def update_quota(self, me: PeerId, others: Mapping[PeerId, float | None]) -> int:
        """Returns the tokens at which this replica closes its share of the next step; sets quota_now and expected_s.

        others: rates of the other live replicas in tokens per second, None where unknown.
        """
        rates = {**others, me: self.rate.per_second}
        self._uncorrected_quota = own_quota(rates, me, self.size.target, self.microbatch_tokens)
        known = [rate for rate in rates.values() if rate is not None]
        self.expected_s = self.size.target / sum(known) if len(known) == len(rates) and any(known) else 0.0
        quota = own_quota(rates, me, self.size.next_target, self.microbatch_tokens)
        self.quota_now = quota if others else 0
        return quota

    def record_local_step(self, tokens: int) -> None:
        """Corrects `size` after a local step, in which this replica counted `tokens`; changes nothing without a quota.

        The step's tokens at all replicas are estimated as target * tokens / this replica's quota of the target.
        """
        if self._uncorrected_quota > 0:
            self.size = self.size.after_step(self.size.target * tokens / self._uncorrected_quota)

    def on_share_closed(self, now: float) -> None:
        """Begins to measure `mean_s`, unless it is being measured for an earlier share."""
        self._closed_at = now if self._closed_at is None else self._closed_at

    def should_hold_origins(self, now: float) -> bool:
        """Returns whether origins should open no microbatch until the stage has stepped along the share's mean.

        They then compute on the newer weights. They wait at most MAX_MEAN_WAIT_FRACTION * expected_s seconds, and only
        if means usually take no longer than that, or at every PROBE_EVERY-th step.
        """
        max_wait_s = MAX_MEAN_WAIT_FRACTION * self.expected_s
        is_worthwhile = self._steps % PROBE_EVERY == 0 or (self.mean_s.value or 0.0) <= max_wait_s
        return is_worthwhile and (self._closed_at is None or now - self._closed_at < max_wait_s)

    def on_stepped(self, now: float) -> None:
        """Records that a step was taken now: updates step_s, and mean_s if a share was closed since the last step."""
        if self._closed_at is not None:
            average = MovingAverage(0.2) if self._steps % PROBE_EVERY == 0 else self.mean_s
            self.mean_s = average.with_sample(now - self._closed_at)
        self._closed_at, self._steps = None, self._steps + 1
        if self._stepped_at is not None:
            self.step_s = self.step_s.with_sample(now - self._stepped_at)
        self._stepped_at = now
