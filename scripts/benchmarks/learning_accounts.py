"""What became of a swarm's tokens, from the journals of all its daemons, those that were killed included. Pure.

A token is computed when its microbatch has come home to its origin. Each stage then counts it in an optimizer step
(agora.cli.demo_totals has the rules), or loses it:

| tokens that are lost | why |
|---|---|
| missed | the replica brought them to the mean of a step too late, and to that of the next one, too |
| the others | dropped, since the replicas were further; not finite; in no step at the end, or when it was killed |
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agora.cli.demo_totals import StageSteps
from agora.observe import events
from agora.observe.journal import from_json

Journal = Sequence[Mapping[str, Any]]  # the events of one daemon, in order


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a swarm did with its tokens. target: tokens of a step. computed: of completed training microbatches."""

    target: int
    computed: int
    stages: tuple[StageSteps, ...]

    @property
    def steps(self) -> list[int]:
        return [stage.steps for stage in self.stages]

    @property
    def steps_per_token(self) -> float:
        return min(self.steps) * self.target / self.computed

    @property
    def counted(self) -> float:
        return min(stage.counted_tokens for stage in self.stages) / self.computed

    @property
    def missed(self) -> float:
        return max(stage.missed for stage in self.stages) / self.computed

    @property
    def staleness(self) -> float:
        return max(stage.staleness or 0.0 for stage in self.stages)

    @property
    def fills(self) -> list[float]:
        return [tokens / self.target for stage in self.stages for tokens in stage.tokens.values()]

    @property
    def spread(self) -> float:
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
    stages = tuple(StageSteps() for _ in range(stage_count))
    for event in map(from_json, (line for journal in journals for line in journal)):
        if isinstance(event, events.StepTaken):
            stages[event.stage].add(event)
        elif isinstance(event, events.RoundDone) and event.what == "gradient":
            stages[event.stage].add_round(event)
    return Accounts(target, computed, stages)
