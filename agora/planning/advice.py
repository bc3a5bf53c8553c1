"""Explains in words what limits the rate of a plan, and computes what one more machine would add. Deterministic."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agora.cost.run_cost import Limit, Machine, RunCost
from agora.planning.assignment import Plan
from agora.planning.search import make_plan

# What helps against each limit, as the end of a sentence.
REMEDIES: Final[Mapping[Limit, str]] = {
    "compute": "one more machine, or a faster one, helps",
    "upload": "machines with more upload, or a boundary codec with fewer bytes, help",
    "download": "machines with more download, or a boundary codec with fewer bytes, help",
    "memory": "no machine can hold them; one with more memory helps",
}


@dataclass(frozen=True, slots=True)
class MachineGain:
    """What one more machine adds: microbatches per second of the whole swarm without it and with it. Immutable.

    machine: the added one. rate_with is never below rate_without.
    """

    machine: Machine
    rate_without: float
    rate_with: float

    @property
    def factor(self) -> float:
        # How many times as fast the swarm is with the machine: rate_with / rate_without, which must not be 0.
        return self.rate_with / self.rate_without


def explain_bottleneck(cost: RunCost, plan: Plan) -> str:
    """Returns a sentence about the plan's bottleneck: stages, their machines, the plan's tokens per second, a remedy.

    The sentence also says what limits the rate, and which part of the rate, in percent, has that limit. That part is
    100 % if the rate is 0. If the bottleneck has several stages, the machines are those that hold the first of them.
    """
    stages, limit = plan.bottleneck.stages, plan.bottleneck.limit
    holders = [entry for entry in plan.assignments if entry.span is not None and stages.first in entry.span]
    limited = sum(holder.rate.microbatches for holder in holders if holder.rate.limit == limit)
    of_rate = limited / plan.rate if plan.rate > 0 else 1.0
    machines = "1 machine" if len(holders) == 1 else f"{len(holders)} machines"
    noun = "stage" if len(stages) == 1 else "stages"
    return (
        f"{noun} {stages} with {machines}: {plan.rate * cost.tokens:,.0f} tokens/s, {of_rate:.0%} of it limited by "
        f"{limit}; {REMEDIES[limit]}."
    )


def gain_of_one_more(cost: RunCost, plan: Plan, machine: Machine, rng: random.Random) -> MachineGain:
    """Returns the rate of `plan`, and the rate after `machine` joins and make_plan places all machines again.

    That search begins from `plan` and draws from `rng`. If the plan that it finds is slower, the rate of `plan` is
    returned as both. Raises OutOfMemory if no way is found in which the machines hold the model.
    """
    machines = [assignment.machine for assignment in plan.assignments]
    extended = make_plan(cost, [*machines, machine], rng, start=plan)
    return MachineGain(machine, plan.rate, max(plan.rate, extended.rate))
