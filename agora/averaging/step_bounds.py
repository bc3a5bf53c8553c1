"""Judges the steps that other replicas report by the time since this one's last step, and reports impossible ones.

Knows: this replica's stages and how long their steps last, the clocks. Must not know: calls, or how gossip travels; the
rule is in plausible_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from agora_protocol.ids import PeerId, Span

from agora.averaging.next_action import ActionConfig
from agora.averaging.plausible_steps import JOIN_S, LEAD, LOCAL_LEAD, OwnPace
from agora.clock import loop_time, slept_s
from agora.swarm.conduct import Offence, ReportOffence


class SteppingStages(Protocol):
    """Protocol: this peer's stages; part of ReplicatedStages.

    step_of: returns the optimizer steps that a stage has taken.
    """

    @property
    def span(self) -> Span: ...
    def step_of(self, stage: int) -> int: ...


class StepBounds:
    """Says which steps of other replicas are plausible now, for each stage of the span.

    Every question also updates what is remembered of this replica's own steps; ask at least once in each step.
    """

    def __init__(
        self,
        stages: SteppingStages,
        step_s: Callable[[int], float | None],
        furthest: Callable[[int], int],
        config: ActionConfig,
        report_offence: ReportOffence,
    ) -> None:
        """step_s: returns how many seconds the steps of a stage take on average, None if unknown.

        furthest: returns the most steps that another replica of a stage has reported and that were believed.
        """
        self._stages = stages
        self._step_s = step_s
        self._furthest = furthest
        self._config = config
        self._report_offence = report_offence
        since = _time_with_suspend() - JOIN_S
        steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._paces = {stage: OwnPace(step, since, step) for stage, step in steps.items()}

    def highest(self, stage: int) -> int:
        """Returns the highest step that another replica of a stage can have taken by now.

        Updates the pace of this replica, from which it is computed, see OwnPace.
        """
        now = _time_with_suspend()
        step, furthest = self._stages.step_of(stage), self._furthest(stage)
        pace = self._paces[stage].at_step(step, now, self._step_s(stage), furthest)
        self._paces[stage], lead = pace, LEAD if self._config.is_exact(step) else LOCAL_LEAD
        return pace.highest_plausible_step(now, self._config.target_tokens, lead)

    def is_plausible(self, stage: int, step: int) -> bool:
        """Returns whether another replica of a stage can have taken `step` steps by now."""
        return step <= self.highest(stage)

    def report(self, stage: int, peer: PeerId, step: int) -> None:
        """Reports the offence that `peer` claims an impossible step of a stage; it counts once in each minute."""
        text = f"says that it is at step {step} of stage {stage}; {self.highest(stage)} is the most that time allows"
        occasion = f"stage {stage}, minute {loop_time() // 60:.0f}"
        self._report_offence(peer, Offence.IMPLAUSIBLE_STEP, text, occasion)

    def plausible_of_run(self, steps_of_run: Collection[Collection[int]]) -> list[list[int]]:
        """Returns `steps_of_run` without the steps that are impossible, for each stage of the run.

        All stages are held to the highest step plausible in any stage of the span, since all step together.
        """
        highest = max(self.highest(stage) for stage in self._paces)
        return [[step for step in steps if step <= highest] for steps in steps_of_run]


def _time_with_suspend() -> float:
    """Returns the loop's time, with the time for which this machine was suspended added to it."""
    return loop_time() + slept_s()
