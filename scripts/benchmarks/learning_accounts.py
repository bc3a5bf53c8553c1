"""What became of a swarm's tokens, from the journals of all its daemons, those that were killed included. Pure.

Knows: the journal's events. Must not know: processes, files, losses. A token is computed when its microbatch has come
home to its origin. Each stage then counts it in an optimizer step, or does not:

| the journals say of a replica's tokens                           | they are        |
|------------------------------------------------------------------|-----------------|
| a step was taken along a gradient, in whose round it had weight  | counted         |
| a step was taken along a gradient, in whose round it weighed 0   | lost, newcomer's|
| the step's number was taken over, with no gradient               | lost            |
| they were dropped, because the others were further               | lost            |
| no step held them when the run ended, or the replica was killed  | lost            |
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Journal = Sequence[Mapping[str, Any]]
"""The events of one daemon, in order."""


@dataclass(frozen=True, slots=True)
class StageAccount:
    """What one stage did, all its replicas together.

    step_tokens: the tokens that each optimizer step holds, by its number, those with weight 0 included. newcomers: the
    tokens with weight 0. staleness: mean age of the counted gradients, in steps.
    """

    step_tokens: Mapping[int, int]
    newcomers: int
    staleness: float

    @property
    def counted(self) -> int:
        """Tokens whose gradient went into a step."""
        return sum(self.step_tokens.values()) - self.newcomers


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a swarm did with its tokens. target: tokens of a step. computed: of completed training microbatches."""

    target: int
    computed: int
    stages: tuple[StageAccount, ...]

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each stage has taken; one that several replicas took together is one."""
        return [len(stage.step_tokens) for stage in self.stages]

    @property
    def steps_per_token(self) -> float:
        """Steps taken, of the stage with the fewest, times the target / tokens computed."""
        return min(self.steps) * self.target / self.computed

    @property
    def counted(self) -> float:
        """Share of the computed tokens that went into a step, of the stage with the least."""
        return min(stage.counted for stage in self.stages) / self.computed

    @property
    def lost_by_newcomers(self) -> float:
        """Share of the computed tokens that replicas added with weight 0, of the stage with the most."""
        return max(stage.newcomers for stage in self.stages) / self.computed

    @property
    def staleness(self) -> float:
        """Mean age of the counted gradients in steps, of the stage where it is highest."""
        return max(stage.staleness for stage in self.stages)

    @property
    def fills(self) -> list[float]:
        """Tokens that each step of each stage holds, by the target; those with weight 0 are held, too."""
        return [tokens / self.target for stage in self.stages for tokens in stage.step_tokens.values()]

    @property
    def spread(self) -> float:
        """Standard deviation of `fills`; 0 for one step or none."""
        return statistics.stdev(self.fills) if len(self.fills) > 1 else 0.0


def accounts_of(journals: Sequence[Journal], stage_count: int, target: int) -> Accounts:
    """Returns the accounts of a swarm. journals: of each of its daemons. Raises ValueError when nothing was trained."""
    computed = sum(
        event["tokens"]
        for journal in journals
        for event in journal
        if event["event"] == "MicrobatchCompleted" and event["purpose"] == "train"
    )
    if not computed:
        raise ValueError("no microbatch was completed")
    return Accounts(target, computed, tuple(stage_account(journals, stage) for stage in range(stage_count)))


def stage_account(journals: Sequence[Journal], stage: int) -> StageAccount:
    """Returns the account of one stage, from the journals of all daemons."""
    step_tokens: Counter[int] = Counter()
    newcomers, age = 0, 0.0
    for journal in journals:
        weights = _weights_in_rounds(journal, stage)
        for event in journal:
            if event["event"] != "StepTaken" or event["stage"] != stage or event["gradient_norm"] is None:
                continue
            step, tokens = event["step"], event["tokens"]
            step_tokens[step] += tokens
            if weights.get(step, 1.0) > 0:
                age += tokens * event["staleness"]
            else:
                newcomers += tokens
    return StageAccount(step_tokens, newcomers, age / max(step_tokens.total() - newcomers, 1))


def _weights_in_rounds(journal: Journal, stage: int) -> dict[int, float]:
    """Returns the weight that a daemon's gradient had, by the number that the step has once it is taken."""
    return {
        event["round"] + 1: event["weight"]
        for event in journal
        if event["event"] == "RoundDone" and event["what"] == "gradient" and event["stage"] == stage
    }
