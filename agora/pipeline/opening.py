"""Decides when an origin opens its next microbatch, and how many it keeps in flight. Pure.

Knows: measured times, bounds, the shares of a step. Must not know: who measured them, or a clock (`now` is passed in).

By Little's law a pipeline that finishes one microbatch every `period` holds x = round trip / period of them when
nothing ever waits. Exactly x starves the slowest stage at every hiccup, so 4 * sqrt(x) are added, the square-root
staffing rule (Halfin and Whitt, "Heavy-traffic limits for queues with many exponential servers", 1981).

The round trip must be free of queueing, because more credit makes longer queues, and an origin that counted them would
ask for still more. So each link is known by its shortest waits, as BBR knows a path (Cardwell et al., "BBR:
Congestion-based congestion control", 2016).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from agora.moving_average import MovingAverage

SAFETY = 4.0
PER_STAGE = 2
"""At the start, and at least: for each stage one microbatch that is computed and one that travels."""
MAX_GAP_PERIODS = 10.0
GRACE_S = 3.0
"""How long an origin of a synchronous run waits, with nothing open, before it opens what the step still lacks."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The number of microbatches that an origin may have in flight, and the reason for it in words."""

    limit: int
    reason: str


def measured_credit(round_trip_s: float | None, period_s: float | None, stages: int, ceiling: int) -> Credit:
    """Returns x + 4 * sqrt(x) for x = round trip / period: at least two for each stage, at most `ceiling` (memory).

    round_trip_s: of a microbatch that never waits; period_s: between two completions. Either is None before measured.
    """
    ceiling = max(1, ceiling)
    least = min(PER_STAGE * stages, ceiling)
    if not round_trip_s or not period_s or round_trip_s <= 0 or period_s <= 0:
        return Credit(least, f"{least}: {PER_STAGE} per stage until the round trip is measured")
    load = round_trip_s / period_s
    wanted = math.ceil(min(load + SAFETY * math.sqrt(load), 1e9))
    limit = max(least, min(wanted, ceiling))
    reason = (
        f"round trip {round_trip_s:.3f} s / period {period_s:.3f} s = {load:.1f}, and {SAFETY:g} times its square root"
    )
    return Credit(limit, f"{limit}: {reason}" + (f", bounded by {ceiling}" if wanted > ceiling else ""))


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean time between two completions, without the gaps that a stall or a pause makes."""

    period: MovingAverage = field(default_factory=lambda: MovingAverage(0.03))
    last: float | None = None

    @property
    def period_s(self) -> float | None:
        """Mean seconds between two completions; None before the second one."""
        return self.period.value

    def completed(self, now: float) -> Pace:
        """Returns the pace after a completion at `now`. One gap counts as at most MAX_GAP_PERIODS periods."""
        if self.last is None:
            return replace(self, last=now)
        gap, known = now - self.last, self.period.value
        if known is not None:
            gap = min(gap, MAX_GAP_PERIODS * known + 1e-6)
        return Pace(self.period.updated(gap), now)

    def interrupted(self) -> Pace:
        """Returns the pace after a pause or a stall: the gap to the next completion is not counted."""
        return replace(self, last=None)


@dataclass(frozen=True, slots=True)
class Share:
    """An origin's place among those that share a synchronous step: number `rank`, from 0, of `origins`."""

    rank: int = 0
    origins: int = 1


def step_share(microbatches: int, share: Share) -> int:
    """Returns how many of a step's `microbatches` this origin opens: an equal part, one more if rank < remainder."""
    base, rest = divmod(microbatches, max(1, share.origins))
    return base + (1 if share.rank < rest else 0)


@dataclass(frozen=True, slots=True)
class StepState:
    """Stage 0 in a synchronous run: its present step, the microbatches of that step, and how many it still lacks."""

    step: int
    microbatches: int
    lacking: int
    share: Share


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an origin sees around it before it decides whether to open a microbatch.

    ready: enough replicas serve the run. step: None in an asynchronous run. path_s: seconds of a microbatch to the last
    stage and back when nothing waits, None until measured.
    """

    ready: bool = True
    step: StepState | None = None
    path_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepQuota:
    """How many microbatches of `step` this origin still opens. `idle_since`: when it had none left and none open."""

    step: int = -1
    left: int = 0
    idle_since: float | None = None

    def renewed(self, now: float, state: StepState) -> StepQuota:
        """Returns the next quota, once nothing is left of this one and all opened microbatches are back.

        | stage 0                                      | the quota                                  |
        |----------------------------------------------|--------------------------------------------|
        | is at a new step                             | this origin's share of the step            |
        | is at the same step, for less than GRACE_S   | still 0                                    |
        | is at the same step, for GRACE_S             | this origin's part of what the step lacks  |

        The last rule covers shares that do not add up, because origins come and go.
        """
        if state.step != self.step:
            return StepQuota(state.step, step_share(state.microbatches, state.share))
        if self.idle_since is None:
            return replace(self, idle_since=now)
        if now - self.idle_since < GRACE_S:
            return self
        return StepQuota(self.step, math.ceil(state.lacking / state.share.origins))


@dataclass(frozen=True, slots=True)
class OriginState:
    """The state of an origin from which next_opening decides. open_count: microbatches in flight."""

    credit: Credit
    seen: Surroundings = Surroundings()
    open_count: int = 0
    leaving: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """The decision of next_opening: open a microbatch, wait or stop, and why; `quota` is the quota after it."""

    action: Literal["open", "wait", "stop"]
    reason: str
    quota: StepQuota


def next_opening(now: float, state: OriginState, quota: StepQuota) -> Opening:
    """Decides whether an origin opens a microbatch now, waits, or (when leaving) stops.

    It waits while too few replicas serve the run, while paused, when its share of a synchronous step is opened, and
    while as many microbatches are open as its credit allows. The first of these that holds is the reason.
    """
    if state.leaving:
        return Opening("stop", "this peer is leaving", quota)
    if not state.seen.ready:
        return Opening("wait", "too few replicas serve the run", quota)
    if state.paused:
        return Opening("wait", "paused by its owner", quota)
    step = state.seen.step
    if step is not None and not quota.left and not state.open_count:
        quota = quota.renewed(now, step)
    if step is not None and not quota.left:
        return Opening("wait", f"this origin's share of step {quota.step} is opened", quota)
    if state.open_count >= state.credit.limit:
        return Opening("wait", f"{state.open_count} microbatches are open; credit {state.credit.reason}", quota)
    left = max(0, quota.left - 1)
    return Opening("open", state.credit.reason, replace(quota, left=left, idle_since=None))
