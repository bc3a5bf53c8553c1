"""Decides when an origin opens its next microbatch, and how many it keeps in flight. Pure.

By Little's law x = round trip / period microbatches fill a pipeline in which nothing waits. 4 * sqrt(x) more, by the
square-root staffing rule (Halfin and Whitt, 1981), keep its slowest stage busy although times vary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from agora.core.rates import MovingAverage

SAFETY = 4.0  # x + SAFETY * sqrt(x) microbatches are in flight, x as in the module docstring
# Minimum microbatches in flight for each stage, and the number at the start: one is computed while one travels.
PER_STAGE = 2
MAX_GAP_PERIODS = 10.0  # one gap between two completions counts as at most this number of mean periods
# Where weights are predicted, so many times schedule.staleness may be in flight if the round trip needs it.
PREDICTED_FACTOR = 2
# Seconds that an origin of a synchronous run waits with nothing open before it opens what the step still lacks.
GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class SendWindow:
    """How many microbatches an origin may have in flight at most (`limit`). reason: in words, why so many.

    shortage: if schedule.staleness keeps the limit below what the round trip would use, a sentence about it for
    users; "" otherwise.
    correction: if the limit is above schedule.staleness, because gradients are corrected, a sentence; "" otherwise.
    """

    limit: int
    reason: str
    shortage: str = ""
    correction: str = ""


@dataclass(frozen=True, slots=True)
class StalenessCeiling:
    """How many microbatches schedule.staleness lets an origin have in flight.

    usual: at any time. at_most: if the round trip needs them, since their gradients are taken at predicted weights.
    """

    usual: int = 2**31
    at_most: int = 2**31


NO_CEILING = StalenessCeiling()


def measured_window(
    round_trip_s: float | None,
    period_s: float | None,
    stages: int,
    ceiling: int,
    staleness: StalenessCeiling = NO_CEILING,
) -> SendWindow:
    """Returns a credit of x + SAFETY * sqrt(x) microbatches, rounded up; x = round_trip_s / period_s.

    The limit is at least PER_STAGE for each stage. It is at most `ceiling`, and at most `staleness.usual`, or if x is
    more, x and at most `staleness.at_most`; even if those are lower than PER_STAGE for each stage, but never below 1.
    round_trip_s: seconds that a microbatch takes if it never waits. period_s: mean seconds between two completions.
    While one of these two is None or not above 0, the limit is the lowest that is allowed.
    """
    is_stale_beyond = staleness.usual <= ceiling
    slots, ceiling = ceiling, max(1, min(ceiling, staleness.usual))
    setting = " by schedule.staleness" if is_stale_beyond else ""
    least = min(PER_STAGE * stages, ceiling)
    if not round_trip_s or not period_s or round_trip_s <= 0 or period_s <= 0:
        bound = f", bounded by {ceiling}{setting}" if least < PER_STAGE * stages else ""
        return SendWindow(least, f"{least}: {PER_STAGE} per stage until the round trip is measured{bound}")
    load = round_trip_s / period_s
    wanted = math.ceil(min(load + SAFETY * math.sqrt(load), 1e9))
    limit = max(least, min(wanted, ceiling))
    reason = (
        f"round trip {round_trip_s:.3f} s / period {period_s:.3f} s = {load:.1f}, and {SAFETY:g} times its square root"
    )
    if wanted <= ceiling:
        return SendWindow(limit, f"{limit}: {reason}")
    needed = min(math.ceil(load), slots)
    corrected = max(limit, min(needed, staleness.at_most))
    trip = f"its round trip ({round_trip_s:.2f} s, one microbatch completed every {period_s:.2f} s)"
    correction = ""
    if corrected > limit:
        correction = (
            f"{trip} needs {needed} in flight; it has {corrected}, more than schedule.staleness ({ceiling}), since "
            "gradients are computed at predicted weights"
        )
    shortage = (
        f"{trip} would use {wanted} in flight, schedule.staleness allows it {corrected}; a larger schedule.staleness "
        "or optimizer.target_tokens, in the manifest of a new run, allows more"
    )
    reason = f"{corrected}: {reason}, bounded by {corrected}{setting}"
    return SendWindow(corrected, reason, shortage if is_stale_beyond else "", correction)


def staleness_ceiling(
    staleness: float, microbatches: int, rank: int, origins: int, *, predicts: bool
) -> StalenessCeiling:
    """Returns how many microbatches the origin of number `rank` among `origins` may have in flight, at least 1.

    All origins together may have staleness * microbatches, rounded; each has an equal part, see equal_quota. If weights
    are predicted (`predicts`), PREDICTED_FACTOR times as many at most. microbatches: those of one step. staleness: the
    manifest's schedule.staleness.
    """
    usual, at_most = (
        max(1, equal_quota(max(1, round(share * microbatches)), rank, origins))
        for share in (staleness, (PREDICTED_FACTOR if predicts else 1) * staleness)
    )
    return StalenessCeiling(usual, at_most)


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean time between two completed microbatches (`period_s`, a moving average), without stalls and pauses.

    last_at: when the last completion was, in seconds; None at the start and after an interruption.
    """

    period_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.03))
    last_at: float | None = None

    def after_completion(self, now: float) -> Pace:
        """Returns the pace after a completion at `now`: the gap since the last one is added to the average.

        One gap counts as at most MAX_GAP_PERIODS mean periods. If there is no last completion, only records `now`.
        """
        if self.last_at is None:
            return replace(self, last_at=now)
        gap = now - self.last_at
        known = self.period_s.value
        if known is not None:
            gap = min(gap, MAX_GAP_PERIODS * known + 1e-6)
        return Pace(self.period_s.with_sample(gap), now)

    def after_interruption(self) -> Pace:
        """Returns the pace after a pause or a stall: the gap from the last to the next completion will not count."""
        return replace(self, last_at=None)


def equal_quota(microbatches: int, rank: int, origins: int) -> int:
    """Returns how many of `microbatches` the origin `rank` (counted from 0) of `origins` opens: an equal part.

    The remainder of the division goes to the first origins, one each. With 0 origins, 0 is treated as 1.
    """
    base, rest = divmod(microbatches, max(1, origins))
    return base + (1 if rank < rest else 0)


@dataclass(frozen=True, slots=True)
class StepState:
    """How far stage 0 is in its present `step` of a synchronous run, and which of the origins this one is.

    microbatches: how many a step needs. lacking: how many of these are not counted yet. origins: how many origins open
    them; this origin is number `rank` of those, counted from 0.
    """

    step: int
    microbatches: int
    lacking: int
    rank: int = 0
    origins: int = 1


@dataclass(frozen=True, slots=True)
class SendInputs:
    """What an origin sees around itself before it decides whether to open a microbatch; the inputs of next_send.

    ready: whether enough replicas serve the run.
    step: how far stage 0 is in its step; None in an asynchronous run.
    path_s: seconds of the path to the last stage and back, see Hop.path_s.
    staleness: how many may be in flight by schedule.staleness.
    before_mean: how many microbatches may be open until the mean gradient, to which this peer gives its share of a
    step, is applied; more would be computed on weights without that mean. None where origins do not wait for means.
    """

    ready: bool = True
    step: StepState | None = None
    path_s: float | None = None
    staleness: StalenessCeiling = NO_CEILING
    before_mean: int | None = None


@dataclass(frozen=True, slots=True)
class StepQuota:
    """How many microbatches of a synchronous run's `step` this origin still has to open (`left`).

    idle_since: when this origin was first seen with none left and none open; None while it has some.
    """

    step: int = -1
    left: int = 0
    idle_since: float | None = None

    def next_quota(self, now: float, state: StepState) -> StepQuota:
        """Returns the next quota; to be called when nothing is left of this one and no microbatch is open.

        | stage 0                                      | `left` of the returned quota               |
        |----------------------------------------------|--------------------------------------------|
        | is at a new step                             | equal_quota of the step                    |
        | is at the same step, for less than GRACE_S   | still 0                                    |
        | is at the same step, for GRACE_S             | lacking / origins, rounded up              |

        GRACE_S begins at the first call with the same step. The last rule completes steps whose quotas do not add up,
        because origins come and go.
        """
        if state.step != self.step:
            return StepQuota(state.step, equal_quota(state.microbatches, state.rank, state.origins))
        if self.idle_since is None:
            return replace(self, idle_since=now)
        if now - self.idle_since < GRACE_S:
            return self
        return StepQuota(self.step, math.ceil(state.lacking / state.origins))


@dataclass(frozen=True, slots=True)
class SendDecision:
    """The decision of next_send and its reason in words. quota: the origin's quota after the decision."""

    action: Literal["open", "wait", "stop"]
    reason: str
    quota: StepQuota


def next_send(
    now: float,
    quota: StepQuota,
    credit: SendWindow,
    seen: SendInputs,
    open_count: int,
    *,
    leaving: bool = False,
    paused: bool = False,
) -> SendDecision:
    """Decides whether an origin with `open_count` microbatches in flight opens one now, waits, or (when leaving) stops.

    It waits, for the first of these reasons that holds: too few replicas serve the run; the origin is paused; its quota
    of a synchronous step is opened; as many are open as may be before a mean; as many are open as its credit allows.
    With nothing left and nothing open, the quota first becomes next_quota. "open" reduces what is left by one. The
    decision has the new quota; `quota` itself is not changed.
    """
    if leaving:
        return SendDecision("stop", "this peer is leaving", quota)
    if not seen.ready:
        return SendDecision("wait", "too few replicas serve the run", quota)
    if paused:
        return SendDecision("wait", "paused by its owner", quota)
    if seen.step is not None and not quota.left and not open_count:
        quota = quota.next_quota(now, seen.step)
    if seen.step is not None and not quota.left:
        return SendDecision("wait", f"this origin's quota of step {quota.step} is opened", quota)
    if seen.before_mean is not None and open_count >= seen.before_mean:
        return SendDecision("wait", "its share of a step is opened, and the mean gradient awaited", quota)
    if open_count >= credit.limit:
        return SendDecision("wait", f"{open_count} microbatches are open; credit {credit.reason}", quota)
    return SendDecision("open", credit.reason, replace(quota, left=max(0, quota.left - 1), idle_since=None))
