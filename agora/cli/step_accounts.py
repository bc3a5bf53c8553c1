"""Counts the tokens that went into the optimizer steps of a stage, from the events of all its replicas. Deterministic.

Tokens are counted
when their gradient went into a step:

| an event says that                                         | tokens counted for the step                           |
|------------------------------------------------------------|-------------------------------------------------------|
| the step was taken with this replica's own gradient        | its tokens, added to those of other replicas          |
| it was taken with the mean gradient of all replicas        | `step_tokens`, those in the mean, once for all events |
| the number was skipped: there was no gradient to step with | none; it is not a step                                |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agora.observe.events import RoundDone, StepTaken


@dataclass
class StageSteps:
    """The optimizer steps that one stage has taken in all its replicas, and their tokens.

    A step that several replicas took counts once. Tokens are counted by step number: `_with_own` those of replicas that
    stepped with their own gradients, `_in_mean` those of all replicas in the mean gradient, including tokens that were
    too late for the step before. missed: tokens that were too late for the mean gradient of their step and of the next.
    """

    missed: float = 0.0

    _with_own: Counter[int] = field(default_factory=Counter)
    _in_mean: Counter[int] = field(default_factory=Counter)
    _age_sum: float = 0.0  # sum of tokens * gradient age in steps
    _aged_tokens: int = 0  # tokens in `_age_sum`

    def add(self, taken: StepTaken) -> None:
        """Adds the event that one replica has taken a step: its tokens, and the age of its gradients.

        Ignores an event without a gradient, by which the replica only set its step number. If several events are about
        one mean gradient, the largest `step_tokens` counts.
        """
        if taken.gradient_norm is None:
            return
        if taken.step_tokens is None:
            self._with_own[taken.step] += taken.tokens
        else:
            self._in_mean[taken.step] = max(self._in_mean[taken.step], taken.step_tokens)
        self._age_sum += taken.tokens * taken.staleness
        self._aged_tokens += taken.tokens

    def add_round(self, done: RoundDone) -> None:
        """Adds the tokens that one replica lost in a round of averaging gradients to `missed`."""
        self.missed += done.lost

    @property
    def tokens(self) -> Mapping[int, int]:
        numbers = sorted({*self._with_own, *self._in_mean})
        return {number: self._with_own[number] + self._in_mean[number] for number in numbers}

    @property
    def steps(self) -> int:
        return len({*self._with_own, *self._in_mean})

    @property
    def counted_tokens(self) -> int:
        return self._with_own.total() + self._in_mean.total()

    @property
    def tokens_per_step(self) -> float | None:
        return self.counted_tokens / self.steps if self.steps else None

    @property
    def staleness(self) -> float | None:
        return self._age_sum / self._aged_tokens if self._aged_tokens else None
