"""Decides what is not believed of other replicas: sizes of means, step numbers, histories."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from agora_protocol.ids import PeerId, Span

from agora.core.clock import loop_time, slept_s
from agora.core.sync_mode import StepPlan
from agora.replica.view import ActionConfig, KnownReplicas
from agora.swarm.peer_score import ReportViolation, Violation

# --- plausibility

# Decides by their magnitudes whether means are plausible. Deterministic.

NEW_WEIGHT: Final = 0.3  # weight of a new magnitude in the moving average
# A mean may be this many times as large as the average of earlier means, or as the peer's own values.
MAX_RATIO: Final = 8.0


@dataclass(frozen=True, slots=True)
class MagnitudeBound:
    """Bounds the magnitude of a region's next mean by the region's earlier means and this peer's own values.

    average: moving average of the accepted means' magnitudes (root mean squares); None before the first.
    """

    average: float | None = None

    def limit(self, own: float) -> float:
        """Returns the largest plausible magnitude, MAX_RATIO * max(average, own), with an unknown average taken as 0.

        own: magnitude of this peer's own values. Returns infinity if that maximum is 0.
        """
        largest = max(self.average or 0.0, own)
        return MAX_RATIO * largest if largest else math.inf

    def why_implausible(self, mean: float, own: float) -> str:
        """Returns why a mean of magnitude `mean` must be rejected, or "" if it is plausible: finite and within `limit`.

        own: magnitude of this peer's own values.
        """
        limit = self.limit(own)
        why = f"the mean has a root mean square of {mean:.3g}; at most {limit:.3g} is plausible"
        return "" if math.isfinite(mean) and mean <= limit else why

    def after_accepted_mean(self, mean: float, own: float) -> MagnitudeBound:
        """Returns the bound after a mean of magnitude `mean` was accepted: average + NEW_WEIGHT * (mean - average).

        The first average is min(mean, own), or None if `own` is 0. MovingAverage is not used: it would give the second
        mean a weight of one half.
        """
        if self.average is None:
            return MagnitudeBound(min(mean, own) if own else None)
        return MagnitudeBound(self.average + NEW_WEIGHT * (mean - self.average))


# --- plausible_steps

# Decides which step numbers that other replicas report are plausible: those possible since this peer's last step.
#
# Deterministic.
#
# All replicas of a stage take its steps together, so a replica that takes part knows how fast they come. A report of
# more
# steps than MAX_SPEED_UP times as many as that pace allows is implausible, however many tokens it claims to have
# counted:
#
#     highest plausible step = own step + lead + MAX_SPEED_UP * (SLACK_S + seconds since that step) / step_s
#
# where step_s is how long its own steps last.
#
# `own step` is the last one that this replica took itself, level with the others. Step numbers that it took over from
# them since then, by catching up or fetching a state, do not raise the bound.
#
# A replica that was away, or whose machine slept, accepts the others' steps again once enough time has passed here too.

# Steps by which others may lead at any time where all take each step together: two closed shares, and one step.
LEAD: Final = 3
# Steps by which others may lead where each takes local steps; a replica further behind fetches their state.
LOCAL_LEAD: Final = 20
MAX_SPEED_UP: Final = 4.0  # how many times as fast as before others may go on stepping without this replica
# Seconds for which a busy machine may stand still without noticing it, while honest replicas go on.
SLACK_S: Final = 10.0
# Maximum tokens per second that a stage's replicas can plausibly count together, until a step was measured here.
FASTEST_TOKENS_PER_S: Final = 1e6
JOIN_S: Final = 1800.0  # maximum age, in seconds, of the state with which a newcomer starts: no transfer takes longer
# Seconds after an implausible report for which nothing that its sender reports of the stage counts.
FORGIVE_S: Final = 10.0


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


# --- step_bounds

# Judges the steps that other replicas report by the time since this one's last step, and reports impossible ones.


class StagesWithSteps(Protocol):
    """Protocol: which stages this peer holds, and at which step each is; part of ReplicatedStages."""

    @property
    def span(self) -> Span:
        """The stages held."""

    def step_of(self, stage: int) -> int:
        """Returns how many optimizer steps a stage has taken."""

    def step_plan(self, stage: int) -> StepPlan:
        """Returns which steps of a stage are local."""


class StepBounds:
    """Decides which steps of other replicas are plausible now, for each stage of the span.

    Every method also updates, from the stage's present step, how fast this replica steps; call one at least once in
    each step.
    """

    def __init__(
        self,
        stages: StagesWithSteps,
        step_s: Callable[[int], float | None],
        furthest_step: Callable[[int], int],
        config: ActionConfig,
        report_violation: ReportViolation,
    ) -> None:
        """step_s: returns how many seconds the steps of a stage take on average, None if unknown.

        furthest_step: returns the most steps that another replica of a stage has reported and that were plausible.
        """
        self._stages = stages
        self._step_s = step_s
        self._furthest_step = furthest_step
        self._config = config
        self._report_violation = report_violation
        since = _time_with_suspend() - JOIN_S
        steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._paces = {stage: OwnPace(step, since, step) for stage, step in steps.items()}

    def highest_plausible(self, stage: int) -> int:
        """Returns the highest step that another replica of a stage can have taken by now, see OwnPace.

        First updates the stage's OwnPace with the step that this replica is at now.
        """
        now = _time_with_suspend()
        step = self._stages.step_of(stage)
        pace = self._paces[stage].with_step(step, now, self._step_s(stage), self._furthest_step(stage))
        self._paces[stage] = pace
        lead = LOCAL_LEAD if self._stages.step_plan(stage).is_local(step) else LEAD
        return pace.highest_plausible_step(now, self._config.target_tokens, lead)

    def is_plausible(self, stage: int, step: int) -> bool:
        """Returns whether another replica of a stage can have taken `step` steps by now."""
        return step <= self.highest_plausible(stage)

    def report(self, stage: int, peer: PeerId, step: int) -> None:
        """Reports as an offence that `peer` claims to have taken `step` steps of a stage, which is implausible.

        However often it is reported, the offence counts once per peer, stage and minute.
        """
        highest = self.highest_plausible(stage)
        text = f"says that it is at step {step} of stage {stage}; {highest} is the most that time allows"
        dedup_key = f"stage {stage}, minute {loop_time() // 60:.0f}"
        self._report_violation(peer, Violation.IMPLAUSIBLE_STEP, text, dedup_key)

    def plausible_of_run(self, steps_of_run: Collection[Collection[int]]) -> list[list[int]]:
        """Returns `steps_of_run` (for each stage of the run, its replicas' steps) without the implausible steps.

        The bound for all stages is the highest step plausible in any stage of the span, since all step together.
        """
        highest = max(self.highest_plausible(stage) for stage in self._paces)
        return [[step for step in steps if step <= highest] for steps in steps_of_run]


def _time_with_suspend() -> float:
    return loop_time() + slept_s()


# --- divergence

# Finds out whether replicas that should be equal have diverged, and which of them are right. Deterministic.


def replicas_to_fetch_from(lineages: Mapping[int, int], me: PeerId, live: KnownReplicas) -> tuple[PeerId, ...]:
    """Returns the sorted ids of the replicas whose state is right, for this one to fetch, because its own is wrong.

    lineages: of this replica, digests of all means applied up to a step, by the number of that step. live: the other
    replicas, each with one step and its lineage. Replicas with the same lineage at the same step form a group. The
    largest group is right; among groups of equal size, the one that has the least id. A replica at a later step than
    `lineages` reach joins this replica's group; one that reports no lineage (0), or is at a step for which `lineages`
    has none, is ignored. Returns () when this replica's own group is right.
    """
    equal = [me]
    groups: defaultdict[tuple[int, int], list[PeerId]] = defaultdict(list)
    for peer, progress in live.items():
        step, their_lineage = progress.direct.agreed, progress.direct.lineage
        if not their_lineage:
            continue
        if step > max(lineages, default=0):
            equal.append(peer)
        elif own_lineage := lineages.get(step, 0):
            (equal if their_lineage == own_lineage else groups[step, their_lineage]).append(peer)
    majority = min([equal, *groups.values()], key=lambda group: (-len(group), min(group)))
    return () if majority is equal else tuple(sorted(majority))
