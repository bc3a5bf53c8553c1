"""Decides when an origin opens its next microbatch, and how many it keeps in flight. Pure.

Knows: measured times, bounds, quotas of a step. Must not know: who measured them, or a clock (`now` is passed in).

By Little's law x = round trip / period microbatches fill a pipeline in which nothing waits. 4 * sqrt(x) more, by the
square-root staffing rule (Halfin and Whitt, 1981), keep its slowest stage busy although times vary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from agora.moving_average import MovingAverage

SAFETY = 4.0
"""x + SAFETY * sqrt(x) microbatches are in flight, x as in the module docstring."""
PER_STAGE = 2
"""Minimum microbatches in flight for each stage, and the number at the start: one is computed while one travels."""
MAX_GAP_PERIODS = 10.0
"""One gap between two completions counts as at most this number of mean periods."""
GRACE_S = 3.0
"""Seconds that an origin of a synchronous run waits with nothing open before it opens what the step still lacks."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The number of microbatches that an origin may have in flight (`limit`), and the reason in words. Immutable.

    shortage: if a setting keeps the limit below what the round trip would use, a sentence for users that says which;
    "" otherwise.
    """

    limit: int
    reason: str
    shortage: str = ""


def measured_credit(
    round_trip_s: float | None, period_s: float | None, stages: int, ceiling: int, staleness_ceiling: int = 2**31
) -> Credit:
    """Returns a credit of x + 4 * sqrt(x), x = round_trip_s / period_s; at least two for each stage, at most `ceiling`.

    round_trip_s: seconds that a microbatch takes if it never waits. period_s: the mean seconds between two completions.
    Either is None before it was measured. staleness_ceiling: a second upper bound, from schedule.staleness.
    """
    is_stale_beyond, ceiling = staleness_ceiling <= ceiling, max(1, min(ceiling, staleness_ceiling))
    setting = " by schedule.staleness" if is_stale_beyond else ""
    least = min(PER_STAGE * stages, ceiling)
    if not round_trip_s or not period_s or round_trip_s <= 0 or period_s <= 0:
        bound = f", bounded by {ceiling}{setting}" if least < PER_STAGE * stages else ""
        return Credit(least, f"{least}: {PER_STAGE} per stage until the round trip is measured{bound}")
    load = round_trip_s / period_s
    wanted = math.ceil(min(load + SAFETY * math.sqrt(load), 1e9))
    limit = max(least, min(wanted, ceiling))
    reason = (
        f"round trip {round_trip_s:.3f} s / period {period_s:.3f} s = {load:.1f}, and {SAFETY:g} times its square root"
    )
    if wanted <= ceiling:
        return Credit(limit, f"{limit}: {reason}")
    shortage = (
        f"its round trip ({round_trip_s:.2f} s, one microbatch completed every {period_s:.2f} s) would use {wanted} in "
        f"flight, schedule.staleness allows it {ceiling}; a larger schedule.staleness or optimizer.target_tokens, in "
        "the manifest of a new run, allows more"
    )
    return Credit(limit, f"{limit}: {reason}, bounded by {ceiling}{setting}", shortage if is_stale_beyond else "")


def staleness_limit(staleness: float, microbatches: int, rank: int, origins: int) -> int:
    """Returns how many microbatches origin `rank` of `origins` may have in flight; at least 1.

    All origins together may have staleness * `microbatches` in flight, `microbatches` being those of a step: each of
    them is computed on weights that are older than the step into which its gradient goes. See equal_quota.
    """
    return max(1, equal_quota(max(1, round(staleness * microbatches)), rank, origins))


@dataclass(frozen=True, slots=True)
class Pace:
    """Measures the mean time between two completions, without the gaps that a stall or a pause makes. Immutable.

    last_at: when the last completion was; None at the start and after an interruption.
    """

    period_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.03))
    last_at: float | None = None

    def after_completion(self, now: float) -> Pace:
        """Returns the pace after a completion at `now`. One gap counts as at most MAX_GAP_PERIODS mean periods."""
        if self.last_at is None:
            return replace(self, last_at=now)
        gap, known = now - self.last_at, self.period_s.value
        if known is not None:
            gap = min(gap, MAX_GAP_PERIODS * known + 1e-6)
        return Pace(self.period_s.with_sample(gap), now)

    def after_interruption(self) -> Pace:
        """Returns the pace after a pause or a stall: the gap until the next completion will not count."""
        return replace(self, last_at=None)


def equal_quota(microbatches: int, rank: int, origins: int) -> int:
    """Returns how many of `microbatches` origin `rank` (from 0) of `origins` opens; the first ones open one more."""
    base, rest = divmod(microbatches, max(1, origins))
    return base + (1 if rank < rest else 0)


@dataclass(frozen=True, slots=True)
class StepState:
    """How far stage 0 is in a synchronous run, and this origin's part in opening microbatches. Immutable.

    step: its present step. microbatches: number of those of a step. lacking: how many of them are not counted yet. This
    origin is number `rank`, from 0, of the `origins` that open them.
    """

    step: int
    microbatches: int
    lacking: int
    rank: int = 0
    origins: int = 1


@dataclass(frozen=True, slots=True)
class OpeningInputs:
    """What an origin sees around it before it decides whether to open a microbatch. Immutable.

    ready: whether enough replicas serve the run. step: None in an asynchronous run. path_s: see Hop.path_s.
    staleness_ceiling: see staleness_limit. before_mean: how many microbatches may be open until the mean of this peer's
    share of a step is applied; more would be computed on weights without it. None where origins do not wait for means.
    """

    ready: bool = True
    step: StepState | None = None
    path_s: float | None = None
    staleness_ceiling: int = 2**31
    before_mean: int | None = None


@dataclass(frozen=True, slots=True)
class StepQuota:
    """How many microbatches of a synchronous `step` this origin still has to open (`left`). Immutable.

    idle_since: when this origin first had none left and none open; None if it has.
    """

    step: int = -1
    left: int = 0
    idle_since: float | None = None

    def next_quota(self, now: float, state: StepState) -> StepQuota:
        """Returns the next quota; to be called when nothing is left of this one and no microbatch is open.

        | stage 0                                      | the quota                                  |
        |----------------------------------------------|--------------------------------------------|
        | is at a new step                             | equal_quota of the step                    |
        | is at the same step, for less than GRACE_S   | still 0                                    |
        | is at the same step, for GRACE_S             | an equal part of what the step lacks       |

        The last rule completes steps whose quotas do not add up, because origins come and go.
        """
        if state.step != self.step:
            return StepQuota(state.step, equal_quota(state.microbatches, state.rank, state.origins))
        if self.idle_since is None:
            return replace(self, idle_since=now)
        if now - self.idle_since < GRACE_S:
            return self
        return StepQuota(self.step, math.ceil(state.lacking / state.origins))


@dataclass(frozen=True, slots=True)
class OpeningDecision:
    """The decision of next_opening and its reason in words; `quota` is the quota after it. Immutable."""

    action: Literal["open", "wait", "stop"]
    reason: str
    quota: StepQuota


def next_opening(
    now: float,
    quota: StepQuota,
    credit: Credit,
    seen: OpeningInputs,
    open_count: int,
    *,
    leaving: bool = False,
    paused: bool = False,
) -> OpeningDecision:
    """Decides whether an origin with `open_count` microbatches in flight opens one now, waits, or (when leaving) stops.

    It waits, for the first of these reasons that holds: too few replicas serve the run; it is paused; its quota of a
    synchronous step is opened; as many are open as may be before a mean; as many are open as its credit allows.
    """
    if leaving:
        return OpeningDecision("stop", "this peer is leaving", quota)
    if not seen.ready:
        return OpeningDecision("wait", "too few replicas serve the run", quota)
    if paused:
        return OpeningDecision("wait", "paused by its owner", quota)
    if seen.step is not None and not quota.left and not open_count:
        quota = quota.next_quota(now, seen.step)
    if seen.step is not None and not quota.left:
        return OpeningDecision("wait", f"this origin's quota of step {quota.step} is opened", quota)
    if seen.before_mean is not None and open_count >= seen.before_mean:
        return OpeningDecision("wait", "its share of a step is opened, and the mean gradient awaited", quota)
    if open_count >= credit.limit:
        return OpeningDecision("wait", f"{open_count} microbatches are open; credit {credit.reason}", quota)
    return OpeningDecision("open", credit.reason, replace(quota, left=max(0, quota.left - 1), idle_since=None))
