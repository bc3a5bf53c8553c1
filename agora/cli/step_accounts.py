"""Counts the tokens that went into the optimizer steps of a stage, from the events of all its replicas. Deterministic.

Knows: steps, their tokens, the age of gradients. Must not know: journals, peers, which run it is. Tokens are counted
when their gradient went into a step:

| an event says that                                         | tokens counted for the step                           |
|------------------------------------------------------------|-------------------------------------------------------|
| the step was taken along this replica's own gradient       | its tokens, added to those of other replicas          |
| it was taken along the mean gradient of all replicas       | `step_tokens`, those in the mean, once for all events |
| the number was skipped: there was no gradient to step along| none; it is not a step                                |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agora.observe.events import RoundDone, StepTaken


@dataclass
class StageSteps:
    """The optimizer steps that one stage has taken in all its replicas; a step that several took counts once.

    Tokens by step number: `_along_own` of replicas that stepped along their own gradients, `_in_mean` of all replicas
    in the mean gradient, including those that were too late for the step before. missed: tokens that were contributed
    to a mean too late for its step, and for the next one too.
    """

    missed: float = 0.0

    _along_own: Counter[int] = field(default_factory=Counter)
    _in_mean: Counter[int] = field(default_factory=Counter)
    _age_sum: float = 0.0  # sum of tokens * gradient age in steps
    _aged_tokens: int = 0  # tokens in that sum

    def add(self, taken: StepTaken) -> None:
        """Adds the event that one replica has taken a step; ignores a step without a gradient."""
        if taken.gradient_norm is None:
            return
        if taken.step_tokens is None:
            self._along_own[taken.step] += taken.tokens
        else:
            self._in_mean[taken.step] = max(self._in_mean[taken.step], taken.step_tokens)
        self._age_sum += taken.tokens * taken.staleness
        self._aged_tokens += taken.tokens

    def add_round(self, done: RoundDone) -> None:
        """Adds the event that a round of gradients has ended at one replica: its lost tokens."""
        self.missed += done.lost

    @property
    def tokens(self) -> Mapping[int, int]:
        """By step number: the tokens, of all replicas, whose gradient went into that step."""
        numbers = sorted({*self._along_own, *self._in_mean})
        return {number: self._along_own[number] + self._in_mean[number] for number in numbers}

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return len({*self._along_own, *self._in_mean})

    @property
    def counted_tokens(self) -> int:
        """Number of tokens whose gradient went into a step."""
        return self._along_own.total() + self._in_mean.total()

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens counted for a step; None before the first one."""
        return self.counted_tokens / self.steps if self.steps else None

    @property
    def staleness(self) -> float | None:
        """Mean age of the gradients in steps, weighted by tokens; None before the first step."""
        return self._age_sum / self._aged_tokens if self._aged_tokens else None
