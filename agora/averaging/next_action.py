"""Decides what a stage does next together with its replicas. Pure.

Knows: how far this replica and the others are, and the run's configuration. Must not know: calls, tensors, any clock.
docs/averaging.md has the rules as a table. ReplicaGroup carries out what is decided.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest

from agora.averaging.agreement import (
    KnownReplicas,
    count_tokens,
    exact_members,
    live_replicas,
    step_to_follow,
    unreachable_replicas,
)

LOST_COVERS: Final = 0.5
"""A stage that is so many covers of the slice rounds behind, and LEAST_LOST steps, fetches the others' state."""
LEAST_LOST: Final = 20
RESUME_S: Final = 15.0
"""Seconds for which a synchronous stage is behind the leading stage before it takes that one's step number."""


@dataclass(frozen=True, slots=True)
class Wait:
    """An action: the stage does nothing now."""


@dataclass(frozen=True, slots=True)
class BeginSliceRound:
    """An action: the stage averages slice `number` of its weights with the other replicas, in the background."""

    number: int


@dataclass(frozen=True, slots=True)
class Follow:
    """An action: the stage takes over the number of steps that its other replicas have taken.

    One step behind, it takes that step along its own gradient; further behind, its gradient is dropped.
    """

    step: int


@dataclass(frozen=True, slots=True)
class TakeStep:
    """An action: the stage takes its step, whose tokens are all counted, along this replica's own gradient."""


@dataclass(frozen=True, slots=True)
class StepTogether:
    """An action: the stage takes step number `step` along the mean gradient of all replicas, in a gradient round."""

    step: int


@dataclass(frozen=True, slots=True)
class Recover:
    """An action: fetches the state of a replica with at least `at_least` steps; the other replicas are at `reached`."""

    at_least: int
    reached: int


Action = Wait | BeginSliceRound | Follow | TakeStep | StepTogether | Recover


@dataclass(frozen=True, slots=True)
class ActionConfig:
    """What the manifest says about stepping.

    exact_steps: number of first steps that are taken along the mean gradient of all replicas. slice_every: steps
    between two slice rounds. most_behind: steps behind the others beyond which only their state helps.
    """

    target_tokens: int
    synchronous: bool
    exact_steps: int
    slice_every: int
    most_behind: int

    @classmethod
    def of(cls, manifest: Manifest) -> ActionConfig:
        """Returns what the manifest says; in a synchronous run every step is exact, and two steps behind is too far."""
        averaging, target = manifest.averaging, manifest.optimizer.target_tokens
        if manifest.schedule.kind == "synchronous":
            return cls(target, True, sys.maxsize, averaging.every, most_behind=1)
        most_behind = max(LEAST_LOST, round(LOST_COVERS * averaging.every / averaging.fraction))
        return cls(target, False, averaging.exact_steps, averaging.every, most_behind)

    def is_exact(self, step: int) -> bool:
        """Returns whether step number `step` is taken along the mean gradient of all replicas."""
        return step < self.exact_steps


@dataclass(frozen=True, slots=True)
class OwnStage:
    """This replica of a stage: steps taken, tokens counted since, and what it is doing.

    busy: whether an exact step, a fetch or a catch-up is running. slice_due: the slice round that the step just taken
    has made due, None without one. behind_since: when it fell behind the run's leading stage, None when it is not.
    """

    step: int
    tokens: int
    leaving: bool = False
    busy: bool = False
    slice_due: int | None = None
    behind_since: float | None = None


@dataclass(frozen=True, slots=True)
class OtherReplicas:
    """The other replicas of a stage. listed: those in the view. leading_step: steps of the run's furthest stage."""

    known: KnownReplicas
    listed: Collection[PeerId]
    leading_step: int = 0


def next_action(now: float, own: OwnStage, others: OtherReplicas, config: ActionConfig) -> tuple[Action, str]:
    """Returns what the stage does next, and why: the first rule that applies. now: on the clock of `others.known`."""
    if own.leaving:
        return Wait(), "this peer is leaving"
    if own.slice_due is not None and set(others.listed) - unreachable_replicas(others.known, others.listed, now):
        return BeginSliceRound(own.slice_due), f"step {own.step} is a multiple of {config.slice_every}"
    if own.busy:
        return Wait(), "a step or a fetch is running"
    replicas = counting_replicas(now, own.step, others, config)
    live, unreachable = live_replicas(others.known, replicas, now), unreachable_replicas(others.known, replicas, now)
    present = len(replicas) - len(unreachable)
    reached = step_to_follow(live, present, own.step, own.tokens, config.target_tokens)
    behind = reached - own.step
    if behind > config.most_behind:
        return Recover(reached if config.synchronous else own.step + 1, reached), f"{behind} steps behind the others"
    if behind > 1 or (behind == 1 and not config.is_exact(own.step)):
        return Follow(reached), f"the others have taken step {reached}"
    if own.behind_since is not None and now - own.behind_since >= RESUME_S:
        return Follow(others.leading_step), f"another stage of the run is at step {others.leading_step}"
    missing = config.target_tokens - own.tokens - count_tokens(live, own.step)
    if behind == 0 and missing > 0:
        return Wait(), f"{missing} tokens are missing"
    if not config.is_exact(own.step) or not replicas:
        if own.tokens == 0:
            return Wait(), "nothing was counted here; the others take the step"
        return TakeStep(), "all tokens are counted"
    if present == 0:
        return Wait(), f"{', '.join(sorted(replicas))} did not answer, and may still be alive"
    return StepTogether(own.step), f"all tokens of step {own.step} are counted"


def counting_replicas(now: float, step: int, others: OtherReplicas, config: ActionConfig) -> set[PeerId]:
    """Returns the replicas whose tokens count for step number `step`: of an exact step its members, else the listed."""
    return exact_members(others.known, others.listed, now) if config.is_exact(step) else set(others.listed)
