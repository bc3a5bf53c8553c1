"""Divides an optimizer step among the replicas of a stage: how many tokens each counts before it closes its part. Pure.

Knows: how many tokens each replica has counted, and when. Must not know: gradients, calls, who measured.

A step holds `target` tokens, in whole microbatches of `unit` tokens. Laid end to end in the order of the replicas' ids,
their shares rate / sum of rates divide the step's microbatches; each share ends at the nearest whole one. Replicas that
know the same rates so compute quotas that add up to the target exactly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.ids import PeerId

from agora.moving_average import MovingAverage

RATE_MEMORY_S: Final = 10.0
"""A token counted so many seconds ago weighs 1/e of one counted now."""
LEAST_MEASURED_S: Final = 1.0
"""Seconds that a replica was watched before its rate is known."""
MOST_WAIT: Final = 0.5
"""Share of a step's duration for which origins wait for its mean, if that is how long it usually takes at most."""
TRIED_AGAIN: Final = 32
"""Every so many steps the mean is waited for in any case: by then it may have become faster."""
MOST_CORRECTION: Final = 0.5
"""A step is made at most this share of the target smaller or larger to correct earlier ones."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How many tokens a replica counts per second, decayed by age. tokens, seconds: both sums decay alike."""

    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, tokens: int, seconds: float) -> TokenRate:
        """Returns the rate after `seconds` more, in which `tokens` were counted."""
        decay = math.exp(-seconds / RATE_MEMORY_S)
        return TokenRate(self.tokens * decay + tokens, self.seconds * decay + seconds)

    @property
    def value(self) -> float | None:
        """Tokens per second; None while the replica was watched for less than LEAST_MEASURED_S."""
        return self.tokens / self.seconds if self.seconds >= LEAST_MEASURED_S else None


def own_quota(rates: Mapping[PeerId, float | None], me: PeerId, target: int, unit: int) -> int:
    """Returns the tokens of a step that replica `me`, which is in `rates`, counts before it closes its part.

    rates: tokens per second of the replicas that take part; one not known yet counts as the median of the known. When
    none counts anything, all get equal shares. target: tokens of the step; unit: of a microbatch.
    """
    known = [rate for rate in rates.values() if rate is not None]
    usual = statistics.median(known) if known else 1.0
    filled = {peer: usual if rate is None else rate for peer, rate in rates.items()}
    if not any(filled.values()):
        filled = dict.fromkeys(filled, 1.0)
    microbatches, total = max(1, round(target / unit)), sum(filled.values())
    before = sum(rate for peer, rate in filled.items() if peer < me)
    first, last = (math.floor(microbatches * end / total + 0.5) for end in (before, before + filled[me]))
    return (last - first) * unit


@dataclass(frozen=True, slots=True)
class StepSize:
    """Keeps steps at `target` tokens in the mean. surplus: tokens that the steps so far held beyond their targets."""

    target: int
    surplus: float = 0.0

    @property
    def next_target(self) -> int:
        """Tokens that the next step should hold: target - surplus."""
        return round(self.target - self.surplus)

    def after_step(self, tokens: float) -> StepSize:
        """Returns the size after a step that held `tokens`; the surplus stays within MOST_CORRECTION of the target."""
        most = MOST_CORRECTION * self.target
        return StepSize(self.target, min(max(self.surplus + tokens - self.target, -most), most))


@dataclass(slots=True)
class StepPace:
    """How large the steps of a stage are and how long they take, and how fast this replica counts. `now` in seconds.

    unit: tokens of a microbatch.
    """

    unit: int
    size: StepSize
    rate: TokenRate = field(default_factory=TokenRate)
    step_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    mean_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    """Seconds from closing a part to its mean."""
    quota_now: int = 0
    """Tokens at which this replica closes its part of the present step; 0 where there is no other replica."""
    _closed_at: float | None = None
    _steps: int = 0
    _measured: tuple[float, int] | None = None
    _stepped_at: float | None = None
    _fair_quota: int = 0
    _expected_s: float = 0.0

    def measure(self, now: float, counted: int) -> None:
        """Measures this replica's rate. counted: tokens since it started."""
        if self._measured is not None and now > self._measured[0]:
            self.rate = self.rate.after(max(0, counted - self._measured[1]), now - self._measured[0])
        self._measured = now, counted

    def quota(self, me: PeerId, others: Mapping[PeerId, float | None]) -> int:
        """Returns the tokens at which this replica closes its part of the next step; others: the other rates."""
        rates = {**others, me: self.rate.value}
        self._fair_quota = own_quota(rates, me, self.size.target, self.unit)
        known = [rate for rate in rates.values() if rate is not None]
        self._expected_s = self.size.target / sum(known) if len(known) == len(rates) and any(known) else 0.0
        return own_quota(rates, me, self.size.next_target, self.unit)

    @property
    def expected_s(self) -> float:
        """The seconds in which all replicas count a step's target, by the rates last given; 0 while one is unknown.

        It is not what steps last: if those were cut short because of it, it would be ever shorter.
        """
        return self._expected_s

    def note_local_step(self, tokens: int) -> None:
        """Takes the tokens of this replica's part of a local step for as much of the whole as its quota was."""
        if self._fair_quota > 0:
            self.size = self.size.after_step(self.size.target * tokens / self._fair_quota)

    def part_closed(self, now: float) -> None:
        """Notes that a part was closed here: its mean is awaited from now on, if none was before."""
        self._closed_at = now if self._closed_at is None else self._closed_at

    def waits_for_mean(self, now: float) -> bool:
        """Returns whether origins wait for the mean of the present part, lest they compute on weights without it.

        They do for MOST_WAIT of a step, where means usually come so fast; else they compute on, and in every
        TRIED_AGAIN-th step they look whether that is still so.
        """
        most_s = MOST_WAIT * self._expected_s
        is_tried = self._steps % TRIED_AGAIN == 0 or (self.mean_s.value or 0.0) <= most_s
        return is_tried and (self._closed_at is None or now - self._closed_at < most_s)

    def stepped(self, now: float) -> None:
        """Measures the duration of the step that has just been taken, and how long its mean took."""
        if self._closed_at is not None:
            before = MovingAverage(0.2) if self._steps % TRIED_AGAIN == 0 else self.mean_s
            self.mean_s = before.updated(now - self._closed_at)
        self._closed_at, self._steps = None, self._steps + 1
        if self._stepped_at is not None:
            self.step_s = self.step_s.updated(now - self._stepped_at)
        self._stepped_at = now
