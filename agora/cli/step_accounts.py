"""What the optimizer steps of a stage held, from the events of all its replicas. Deterministic.

Knows: steps, their tokens, the age of gradients. Must not know: journals, peers, which run it is. Tokens are counted
when their gradient went into a step:

| an event says that                                         | of its tokens are counted                             |
|------------------------------------------------------------|-------------------------------------------------------|
| the step was taken along this replica's own gradient       | all, beside those of other replicas at the same step  |
| it was taken along the mean gradient of all replicas       | those in that mean, `step_tokens` of all, once        |
| only its number passed: there was no gradient to step along| none; it is no step                                   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agora.observe.events import RoundDone, StepTaken


@dataclass
class StageSteps:
    """The optimizer steps that one stage has taken in all its replicas; one that several took together is one.

    Tokens by step number: `_along_own` of replicas that stepped along their own gradients, `_in_mean` of all replicas
    in the mean gradient, those that came too late for the step before included. missed: tokens that replicas brought to
    the means of steps, and that came too late for the next one as well.
    """

    missed: float = 0.0

    _along_own: Counter[int] = field(default_factory=Counter)
    _in_mean: Counter[int] = field(default_factory=Counter)
    _age: float = 0.0  # the sum over tokens of the age of their gradients, in steps, as is the number of these tokens
    _aged: int = 0

    def add(self, taken: StepTaken) -> None:
        """Adds the event of one replica."""
        if taken.gradient_norm is None:
            return
        if taken.step_tokens is None:
            self._along_own[taken.step] += taken.tokens
        else:
            self._in_mean[taken.step] = max(self._in_mean[taken.step], taken.step_tokens)
        self._age += taken.tokens * taken.staleness
        self._aged += taken.tokens

    def add_round(self, done: RoundDone) -> None:
        """Adds the end of a round of gradients at one replica."""
        self.missed += done.lost

    @property
    def tokens(self) -> Mapping[int, int]:
        """The tokens that each step holds, by its number."""
        numbers = sorted({*self._along_own, *self._in_mean})
        return {number: self._along_own[number] + self._in_mean[number] for number in numbers}

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return len({*self._along_own, *self._in_mean})

    @property
    def counted(self) -> int:
        """Tokens whose gradient went into a step."""
        return self._along_own.total() + self._in_mean.total()

    @property
    def tokens_per_step(self) -> float | None:
        """The mean tokens of a step; None before the first one."""
        return self.counted / self.steps if self.steps else None

    @property
    def staleness(self) -> float | None:
        """The mean age of the gradients in steps, over their tokens; None before the first step."""
        return self._age / self._aged if self._aged else None
