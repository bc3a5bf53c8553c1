"""Divides an optimizer step among the replicas of a stage: how many tokens each counts for its share. Deterministic.

Knows: how many tokens each replica has counted, and when. Must not know: gradients, calls, who measured.

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
"""A token counted so many seconds ago weighs 1/e of one counted now."""
MIN_MEASURED_S: Final = 1.0
"""Seconds for which a replica is measured before its rate is known."""
MAX_MEAN_WAIT_FRACTION: Final = 0.5
"""Fraction of a step for which origins wait for its mean gradient; they do not if it usually takes longer."""
PROBE_EVERY: Final = 32
"""In every so many-th step origins wait for the mean in any case, to measure whether it comes sooner now."""
MAX_CORRECTION: Final = 0.5
"""Fraction of the target by which a step may be made smaller or larger to correct earlier ones."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How many tokens a replica counts per second: tokens / seconds, two sums that decay by exp(-t / RATE_DECAY_S)."""

    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, tokens: int, seconds: float) -> TokenRate:
        """Returns the rate after `seconds` more, in which `tokens` were counted."""
        decay = math.exp(-seconds / RATE_DECAY_S)
        return TokenRate(self.tokens * decay + tokens, self.seconds * decay + seconds)

    @property
    def value(self) -> float | None:
        """Tokens per second; None before MIN_MEASURED_S of measurements."""
        return self.tokens / self.seconds if self.seconds >= MIN_MEASURED_S else None


def own_quota(rates: Mapping[PeerId, float | None], me: PeerId, target: int, microbatch_tokens: int) -> int:
    """Returns the tokens of a step that replica `me`, which is in `rates`, counts before it closes its share.

    rates: tokens per second of the replicas that take part; an unknown one counts as the median of the known. When all
    are 0, the quotas are equal. target: tokens of the step. microbatch_tokens: tokens of one microbatch. A quota is a
    number of whole microbatches, possibly 0; all together make the target rounded to microbatches, at least one.
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
    """Keeps steps at `target` tokens on average. surplus: tokens that the steps so far held beyond `target` each."""

    target: int
    surplus: float = 0.0

    @property
    def next_target(self) -> int:
        """Tokens that the next step should hold: target - surplus."""
        return round(self.target - self.surplus)

    def after_step(self, tokens: float) -> StepSize:
        """Returns the size after a step that held `tokens`; the surplus stays within MAX_CORRECTION of the target."""
        bound = MAX_CORRECTION * self.target
        return StepSize(self.target, min(max(self.surplus + tokens - self.target, -bound), bound))


@dataclass(slots=True)
class StepMeter:
    """Measures a stage's steps, their tokens and durations, and this replica's token rate. `now` in seconds."""

    microbatch_tokens: int
    size: StepSize
    rate: TokenRate = field(default_factory=TokenRate)
    step_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    mean_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    """Seconds from closing a share to the mean gradient of its step."""
    quota_now: int = 0
    """Tokens at which this replica closes its share of the present step; 0 where there is no other replica."""
    expected_s: float = 0.0
    """Seconds in which all replicas count a step's target, by the rates last given; 0 while one is unknown.

    Not what steps last: if shares were closed early because of that, it would fall ever further."""
    _closed_at: float | None = None
    _steps: int = 0
    _measured: tuple[float, int] | None = None
    _stepped_at: float | None = None
    _uncorrected_quota: int = 0

    def measure(self, now: float, tokens_counted: int) -> None:
        """Measures this replica's rate. tokens_counted: those since it started."""
        if self._measured is not None and now > self._measured[0]:
            self.rate = self.rate.after(max(0, tokens_counted - self._measured[1]), now - self._measured[0])
        self._measured = now, tokens_counted

    def update_quota(self, me: PeerId, others: Mapping[PeerId, float | None]) -> int:
        """Computes anew and returns the tokens at which this replica closes its share of the next step.

        others: their rates in tokens per second, None where unknown. Sets quota_now and expected_s.
        """
        rates = {**others, me: self.rate.value}
        self._uncorrected_quota = own_quota(rates, me, self.size.target, self.microbatch_tokens)
        known = [rate for rate in rates.values() if rate is not None]
        self.expected_s = self.size.target / sum(known) if len(known) == len(rates) and any(known) else 0.0
        quota = own_quota(rates, me, self.size.next_target, self.microbatch_tokens)
        self.quota_now = quota if others else 0
        return quota

    def record_local_step(self, tokens: int) -> None:
        """Estimates a local step's tokens at all replicas: target * `tokens`, this replica's, / its quota of target."""
        if self._uncorrected_quota > 0:
            self.size = self.size.after_step(self.size.target * tokens / self._uncorrected_quota)

    def on_share_closed(self, now: float) -> None:
        """Starts the clock of `mean_s`, unless it runs for an earlier share."""
        self._closed_at = now if self._closed_at is None else self._closed_at

    def should_hold_origins(self, now: float) -> bool:
        """Returns whether origins wait for the mean of the share just closed, so as to compute on the weights with it.

        They wait for up to MAX_MEAN_WAIT_FRACTION * expected_s, if means usually take no longer, or at every
        PROBE_EVERY-th step.
        """
        max_wait_s = MAX_MEAN_WAIT_FRACTION * self.expected_s
        is_worthwhile = self._steps % PROBE_EVERY == 0 or (self.mean_s.value or 0.0) <= max_wait_s
        return is_worthwhile and (self._closed_at is None or now - self._closed_at < max_wait_s)

    def on_stepped(self, now: float) -> None:
        """Measures the duration of the step that has just been taken, and how long its mean took."""
        if self._closed_at is not None:
            average = MovingAverage(0.2) if self._steps % PROBE_EVERY == 0 else self.mean_s
            self.mean_s = average.updated(now - self._closed_at)
        self._closed_at, self._steps = None, self._steps + 1
        if self._stepped_at is not None:
            self.step_s = self.step_s.updated(now - self._stepped_at)
        self._stepped_at = now
