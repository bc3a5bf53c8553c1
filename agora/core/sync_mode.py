"""Which optimizer steps of a stage are exact and which local, in how many slices, and when that changes. Pure.

In an exact step all replicas step along the mean of their gradients. In a local step each steps along its own, and one
of n slices of the weights is averaged afterwards: all weights in n steps. Fewer slices learn more, and send more.

Every owner of a part answers how many slices it wants; if all owners of a round want something else than now, all
replicas that apply its means change at the same later step. So no replica has to ask, and no single owner of several
can force a change. An owner asks for a change only once it has wanted one of that kind for WISH_S seconds: rates that
are measured over some seconds are wrong for as long after a stall or a join.

| the stage takes | an owner wants, if most uplinks carry b bytes for each value and step | from which step on |
|---|---|---|
| exact steps | local steps, if b < NEEDED; in NEEDED / b slices, at least MIN_SLICES | NOTICE_STEPS after the round's |
| local steps | exact ones, if b >= RETURN_FACTOR * NEEDED | NOTICE_PASSES passes over all slices later |
| local steps | NEEDED / b slices, if that is CHANGE_FACTOR times as many or as few as now | the same |

NEEDED: the bytes of a value in the fewest bits. Most uplinks: those of replicas with all but MAX_SLOW_SHARE of the
tokens that all replicas count per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import ALL_STEPS
from agora_protocol.parts import slice_count

EXACT: Final = 0  # as a number of slices: steps are exact, and no slices are averaged
# Minimum number of slices of local steps: in one slice they would send as much as exact steps, and learn less.
MIN_SLICES: Final = 2
# Steps from an exact step to the first local one that its round may decide: two later shares may be closed already.
NOTICE_STEPS: Final = 3
# Passes over all slices from a slice round to the change that it may decide: replicas may be a pass apart.
NOTICE_PASSES: Final = 2
# Minimum number of steps from one change to the next, if one is to exact steps: replicas fetch a whole state then.
MIN_STEPS_BETWEEN: Final = 100


class StepPlan(NamedTuple):
    """How a stage takes its steps: before step number `change_at` (counted from 0) in one way, from it on in another.

    slices, later_slices: the number of slices of local steps, or EXACT. Equal at all replicas, and part of their state.
    """

    slices: int = EXACT
    change_at: int = ALL_STEPS
    later_slices: int = EXACT

    def slices_at(self, step: int) -> int:
        """Returns the number of slices if step number `step` is local, EXACT if it is exact."""
        return self.slices if step < self.change_at else self.later_slices

    def is_local(self, step: int) -> bool:
        """Returns whether step number `step` is local."""
        return self.slices_at(step) != EXACT


ALL_EXACT: Final = StepPlan()


def first_step_plan(manifest: Manifest) -> StepPlan:
    """Returns the plan with which a run begins: local steps after the manifest's exact ones; none if synchronous."""
    if manifest.exact_steps == ALL_STEPS:
        return ALL_EXACT
    return StepPlan(EXACT, manifest.exact_steps, slice_count(manifest.averaging.fraction))


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """When a stage's step plan changes, by the means that its replicas apply: equal at all of them.

    may_change: whether it may at all: in asynchronous runs whose manifest leaves it to the links. every: local steps
    from one slice round to the next. most_slices: the manifest's number of slices. first: the run's first plan.
    """

    may_change: bool
    every: int
    most_slices: int
    first: StepPlan = ALL_EXACT

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> ChangeRule:
        """Returns the rule of a run."""
        section = manifest.averaging
        most_slices = slice_count(section.fraction)
        is_free = section.exact_steps == ALL_STEPS and section.local_steps == "auto" and most_slices >= MIN_SLICES
        may_change = is_free and manifest.schedule.kind == "asynchronous"
        return cls(may_change, section.every, most_slices, first_step_plan(manifest))

    def is_possible(self, plan: StepPlan, step: int) -> bool:
        """Returns whether a stage of this run that has taken `step` steps can have `plan`.

        It has the first plan, or one whose numbers of slices the rule allows, and whose change came or is near.
        """
        notice = max(NOTICE_STEPS, NOTICE_PASSES * self.every * max(plan.slices, 1))
        is_change = plan.slices != plan.later_slices and 0 < plan.change_at <= step + notice
        return plan == self.first or (is_change and all(map(self._may_become, (plan.slices, plan.later_slices))))

    def after_exact_step(self, plan: StepPlan, step: int, wanted: int) -> StepPlan:
        """Returns the plan after the means of exact step `step` were applied, all of which want `wanted` slices.

        It stays as it is if the stage may not change so, if a change is to come already, and within MIN_STEPS_BETWEEN
        steps of the last one.
        """
        is_settled = plan == ALL_EXACT or step >= plan.change_at + MIN_STEPS_BETWEEN
        if wanted == EXACT or not self._may_become(wanted) or not is_settled:
            return plan
        return StepPlan(EXACT, step + NOTICE_STEPS, wanted)

    def after_slice_round(self, plan: StepPlan, step: int, wanted: int) -> StepPlan:
        """Returns the plan after the means of the slice round due after `step` steps were applied.

        wanted: the number of slices that all of these means want, or EXACT. The plan stays as it is if the stage may
        not change so, or if a change is to come already or came lately: within MIN_STEPS_BETWEEN steps before a change
        to exact steps, within NOTICE_PASSES passes before any other.
        """
        present = plan.slices_at(step - 1)
        notice = NOTICE_PASSES * self.every * present
        pause = MIN_STEPS_BETWEEN if wanted == EXACT else notice
        if wanted == present or not self._may_become(wanted) or step < plan.change_at + pause:
            return plan
        return StepPlan(present, step + notice, wanted)

    def _may_become(self, wanted: int) -> bool:
        return self.may_change and (wanted == EXACT or MIN_SLICES <= wanted <= self.most_slices)


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """When the device thread takes a stage's step along its gradient sum, or closes its share of a step for the mean.

    `own_tokens`, `alone` and `closes_share` hold for step number `step` only (counted from 0). The stage may be at a
    later step by now: for it the last column holds, which never counts too few tokens and closes no share.

    | question                                 | step `step`                             | any other step      |
    |------------------------------------------|-----------------------------------------|---------------------|
    | own tokens needed                        | own_tokens                              | target_tokens       |
    | uses the mean gradient of all replicas   | if exact and averages, unless `alone`   | if exact, averages  |
    | closes its share when it has the tokens  | closes_share, if it uses the mean       | no                  |

    Whether a step is exact or local says the stage's StepPlan, which changes on the device thread.
    """

    target_tokens: int  # how many all replicas together count for one step
    averages: bool = False  # whether replicas average their gradients; False until a group of replicas says so
    step: int = -1  # the number for which the next three fields hold; -1: they hold for none
    own_tokens: int = 0  # how many this replica must count so that all reach `target_tokens`, with those it has counted
    alone: bool = False  # no other replica holds the stage
    closes_share: bool = False

    def tokens_needed(self, step: int) -> int:
        """Returns how many tokens this replica must count for step `step` before it steps or closes its share.

        `own_tokens` at the policy's own step, else `target_tokens`.
        """
        return self.own_tokens if step == self.step else self.target_tokens

    def uses_mean_gradient(self, step: int, plan: StepPlan) -> bool:
        """Returns whether step `step` is taken along the mean gradient of all replicas.

        True if `averages`, unless the step is local by `plan`, or is the policy's own step and the replica is `alone`.
        """
        return self.averages and not plan.is_local(step) and not (self.alone and step == self.step)

    def must_close(self, step: int, plan: StepPlan) -> bool:
        """Returns whether the device thread is to close the share of step `step` once it has `tokens_needed(step)`.

        True only if `closes_share`, at the policy's own step, and if that step uses the mean gradient.
        """
        return self.closes_share and step == self.step and self.uses_mean_gradient(step, plan)


@dataclass(frozen=True, slots=True)
class StageStepped:
    """Event: a stage has taken an optimizer step, and `step` in all. own_tokens: this replica's tokens in this one."""

    stage: int
    step: int
    own_tokens: int


@dataclass(frozen=True, slots=True)
class ShareClosed:
    """Event: a stage has closed its share of step `step` (counted from 0), over `tokens`, and opened the next."""

    stage: int
    step: int
    tokens: int


StepEvent = StageStepped | ShareClosed
