"""Decides when an origin opens its next microbatch, and how many it keeps in flight. Pure.

By Little's law x = round trip / period microbatches fill a pipeline in which nothing waits. 4 * sqrt(x) more, by the
square-root staffing rule (Halfin and Whitt, 1981), keep its slowest stage busy although times vary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from agora_protocol.manifest_sections import PREDICTED_FACTOR

from agora.core.moving_average import MovingAverage

SQUARE_ROOT_FACTOR = 4.0  # x + SQUARE_ROOT_FACTOR * sqrt(x) microbatches are in flight
MIN_PER_STAGE = 2  # at least this many are in flight for each stage: one is computed while one travels
MAX_GAP_PERIODS = 10.0  # a longer gap between two completions is a stall, not a pace
# An origin of a synchronous run that has had nothing open for this many seconds opens its part of what the step lacks.
TOP_UP_AFTER_S = 3.0
# Seconds after which an origin whose stage 0 has taken the run's last step believes that another stage still lacks
# tokens for it: the directory needs about as long to show that a stage has taken its last step.
LACKS_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class SendWindow:
    """How many microbatches an origin may have in flight, and why; the sentences are for users."""

    limit: int
    reason: str
    shortage: str = ""  # what to change, if schedule.staleness keeps the limit below what the round trip would use
    correction: str = ""  # why the limit is above schedule.staleness, if it is: weights are predicted


@dataclass(frozen=True, slots=True)
class StalenessCeiling:
    """How many microbatches schedule.staleness lets an origin have in flight."""

    usual: int = 2**31
    at_most: int = 2**31  # if the round trip needs them, since their gradients are taken at predicted weights


NO_CEILING = StalenessCeiling()


def measured_window(
    round_trip_s: float | None,
    period_s: float | None,
    stages: int,
    ceiling: int,
    staleness: StalenessCeiling = NO_CEILING,
) -> SendWindow:
    """Returns a window of x + SQUARE_ROOT_FACTOR * sqrt(x) microbatches, rounded up; x = round_trip_s / period_s.

    Bounds, the strongest first: at least 1; at most `ceiling`; at most `staleness.usual`, or, if x is more than that,
    at most x and `staleness.at_most`; at least MIN_PER_STAGE for each stage. round_trip_s: seconds that a microbatch
    takes if it never waits. period_s: mean seconds between two completions. Until both are measured, the window is
    MIN_PER_STAGE for each stage, within these bounds.
    """
    slots, ceiling = ceiling, max(1, min(ceiling, staleness.usual))
    is_bounded_by_staleness = staleness.usual <= slots
    setting = " by schedule.staleness" if is_bounded_by_staleness else ""
    least = min(MIN_PER_STAGE * stages, ceiling)
    if not round_trip_s or not period_s or round_trip_s <= 0 or period_s <= 0:
        bound = f", limited to {ceiling}{setting}" if least < MIN_PER_STAGE * stages else ""
        return SendWindow(least, f"{least}: {MIN_PER_STAGE} per stage until the round trip is measured{bound}")
    load = round_trip_s / period_s
    wanted = math.ceil(min(load + SQUARE_ROOT_FACTOR * math.sqrt(load), 1e9))
    reason = (
        f"round trip {round_trip_s:.3f} s / period {period_s:.3f} s = {load:.1f}, "
        f"and {SQUARE_ROOT_FACTOR:g} times its square root"
    )
    if wanted <= ceiling:
        limit = max(least, wanted)
        return SendWindow(limit, f"{limit}: {reason}")
    needed = min(math.ceil(load), slots)
    limit = max(ceiling, min(needed, staleness.at_most))
    reason = f"{limit}: {reason}, limited to {limit}{setting}"
    if not is_bounded_by_staleness:
        return SendWindow(limit, reason)
    trip = f"its round trip ({round_trip_s:.2f} s, one microbatch completed every {period_s:.2f} s)"
    return SendWindow(limit, reason, _shortage(trip, wanted, limit), _correction(trip, needed, limit, ceiling))


def _shortage(trip: str, wanted: int, limit: int) -> str:
    return (
        f"{trip} would use {wanted} in flight, schedule.staleness allows it {limit}; a larger schedule.staleness "
        "or optimizer.target_tokens, which the founder can amend, allows more"
    )


def _correction(trip: str, needed: int, limit: int, staleness_limit: int) -> str:
    if limit <= staleness_limit:
        return ""
    return (
        f"{trip} needs {needed} in flight; it has {limit}, more than schedule.staleness ({staleness_limit}), since "
        "gradients are computed at predicted weights"
    )


def staleness_ceiling(
    staleness: float, microbatches: int, position: int, origins: int, *, predicts: bool
) -> StalenessCeiling:
    """Returns how many microbatches the origin of number `position` among `origins` may have in flight, at least 1.

    All origins together may have staleness * microbatches. microbatches: those of one step. staleness: the manifest's
    schedule.staleness. predicts: whether weights are predicted.
    """
    usual, at_most = (
        max(1, equal_part(max(1, round(fraction * microbatches)), position, origins))
        for fraction in (staleness, (PREDICTED_FACTOR if predicts else 1) * staleness)
    )
    return StalenessCeiling(usual, at_most)


@dataclass(frozen=True, slots=True)
class CompletionPace:
    """The mean time between two completed microbatches, without stalls and pauses."""

    period_s: MovingAverage = field(default_factory=lambda: MovingAverage(0.03))
    last_at: float | None = None  # when the last completion was; None at the start and after an interruption

    def after_completion(self, now: float) -> CompletionPace:
        """Returns the pace after a completion at `now`."""
        if self.last_at is None:
            return replace(self, last_at=now)
        gap = now - self.last_at
        known = self.period_s.value
        if known is not None:
            gap = min(gap, MAX_GAP_PERIODS * known + 1e-6)
        return CompletionPace(self.period_s.with_sample(gap), now)

    def after_interruption(self) -> CompletionPace:
        """Returns the pace after a pause or a stall: the gap to the next completion will not count."""
        return replace(self, last_at=None)


def equal_part(microbatches: int, position: int, origins: int) -> int:
    """Returns how many of `microbatches` the origin of number `position`, from 0, opens.

    All open the same number; where that leaves a rest, the first origins open one more each.
    """
    base, rest = divmod(microbatches, max(1, origins))
    return base + (1 if position < rest else 0)


@dataclass(frozen=True, slots=True)
class StepState:
    """How far stage 0 is in its present `step` of a synchronous run, and which of the origins this one is."""

    step: int
    microbatches: int  # how many a step needs
    lacking: int  # how many of these are not counted yet
    position: int = 0  # of this origin, from 0
    origins: int = 1


@dataclass(frozen=True, slots=True)
class SendInputs:
    """What an origin knows of the run and of its own stage when it decides whether to open a microbatch."""

    has_enough_replicas: bool = True  # at each stage: schedule.least_replicas
    step: StepState | None = None  # None in an asynchronous run
    latency_s: float | None = None  # seconds to the last stage and back, see Hop.latency_s
    staleness: StalenessCeiling = NO_CEILING
    # How many microbatches may be open until the awaited mean is applied: what the share lacks, plus what may begin
    # early at predicted weights. None where origins do not wait for means.
    max_open_before_mean: int | None = None
    # Whether stage 0 has taken the run's last step: "last" while other stages have not, "over" once all have.
    end: Literal["", "last", "over"] = ""


@dataclass(frozen=True, slots=True)
class StepAllotment:
    """How many microbatches of a synchronous run's `step`, or after the run's end, this origin still has to open."""

    step: int = -1
    left: int = 0
    idle_since: float | None = None  # when this origin was first seen with none left and none open
    opens_next: int = 0  # how many it opens next after the run's end, if a stage still lacks them; 0: no end was seen

    def next_allotment(self, now: float, state: StepState) -> StepAllotment:
        """Returns the next allotment; to be called when nothing is left of this one and no microbatch is open."""
        if state.step != self.step:
            return StepAllotment(state.step, equal_part(state.microbatches, state.position, state.origins))
        if self.idle_since is None:
            return replace(self, idle_since=now)
        if now - self.idle_since < TOP_UP_AFTER_S:
            return self
        # Origins that come and go make the allotments add up to more or less than a step. Then each opens an equal part
        # of what is missing.
        return StepAllotment(self.step, math.ceil(state.lacking / state.origins))

    def after_end(self, now: float) -> StepAllotment:
        """Returns the next allotment after stage 0 has taken the run's last step; to be called while none is open.

        How many tokens another stage lacks is not known, so each allotment has twice as many as the one before.
        """
        if not self.opens_next:
            return StepAllotment(self.step, 0, now, opens_next=1)
        if self.left:
            return self
        if self.idle_since is None:
            return replace(self, idle_since=now)
        if now - self.idle_since < LACKS_AFTER_S:
            return self
        return StepAllotment(self.step, self.opens_next, opens_next=2 * self.opens_next)


@dataclass(frozen=True, slots=True)
class SendDecision:
    """The decision of next_send and its reason in words. allotment: what the origin has left after it."""

    action: Literal["open", "wait", "stop"]
    reason: str
    allotment: StepAllotment
    awaits_mean: bool = False  # whether it waits until the replicas' mean, or a synchronous run's step, is applied


def next_send(
    now: float,
    allotment: StepAllotment,
    window: SendWindow,
    inputs: SendInputs,
    open_count: int,
    *,
    leaving: bool = False,
    draining: bool = False,
) -> SendDecision:
    """Decides whether an origin with `open_count` microbatches in flight opens one now, waits, or stops.

    The first rule that holds decides. The decision has the allotment that follows.
    """
    if leaving:
        return SendDecision("stop", "this peer is leaving", allotment)
    if not inputs.has_enough_replicas:
        return SendDecision("wait", "too few replicas serve the run", allotment)
    if draining:
        return SendDecision("wait", "draining: it opens nothing until `refill`", allotment)
    if inputs.end == "over":
        return SendDecision("wait", "the run has taken its total_steps", allotment)
    if inputs.end == "last":
        allotment = allotment if open_count else allotment.after_end(now)
        if not allotment.left or not allotment.opens_next:
            reason = "stage 0 has taken the run's last step; it waits for the other stages to take theirs"
            return SendDecision("wait", reason, allotment)
    elif allotment.opens_next:  # an amendment has the run go on
        allotment = replace(allotment, opens_next=0)
    if inputs.step is not None and not allotment.left and not open_count:
        allotment = allotment.next_allotment(now, inputs.step)
    if inputs.step is not None and not allotment.left:
        return SendDecision(
            "wait", f"this origin has opened its allotment of step {allotment.step}", allotment, awaits_mean=True
        )
    if inputs.max_open_before_mean is not None and open_count >= inputs.max_open_before_mean:
        reason = "all that may begin before the awaited mean is open"
        return SendDecision("wait", reason, allotment, awaits_mean=True)
    if open_count >= window.limit:
        return SendDecision("wait", f"{open_count} microbatches are open; send window {window.reason}", allotment)
    return SendDecision("open", window.reason, replace(allotment, left=max(0, allotment.left - 1), idle_since=None))
