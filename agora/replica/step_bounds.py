"""Judges the steps that other replicas report by the time since this one's last step, and reports impossible ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from agora_protocol.ids import PeerId, Span

from agora.core.clock import loop_time, slept_s
from agora.core.sync_mode import StepPlan
from agora.replica.next_action import ActionConfig
from agora.replica.plausible_steps import JOIN_S, LEAD, LOCAL_LEAD, OwnPace
from agora.swarm.peer_score import ReportViolation, Violation


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
        occasion = f"stage {stage}, minute {loop_time() // 60:.0f}"
        self._report_violation(peer, Violation.IMPLAUSIBLE_STEP, text, occasion)

    def plausible_of_run(self, steps_of_run: Collection[Collection[int]]) -> list[list[int]]:
        """Returns `steps_of_run` (for each stage of the run, its replicas' steps) without the implausible steps.

        The bound for all stages is the highest step plausible in any stage of the span, since all step together.
        """
        highest = max(self.highest_plausible(stage) for stage in self._paces)
        return [[step for step in steps if step <= highest] for steps in steps_of_run]


def _time_with_suspend() -> float:
    return loop_time() + slept_s()
