"""Explains in words what limits the rate of a plan, and computes what one more machine would add. Pure.

Knows: plans and the search. Must not know: files, the terminal, peers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agora.plan.assignment import Plan
from agora.plan.cost import Limit, RunCost
from agora.plan.machine import Machine
from agora.plan.search import make_plan

REMEDIES: Final[Mapping[Limit, str]] = {
    "compute": "a machine more, or a faster one, helps",
    "upload": "machines with more upload, or a boundary codec with fewer bytes, help",
    "download": "machines with more download, or a boundary codec with fewer bytes, help",
    "memory": "nobody fits them; a machine with more memory helps",
}
"""What helps against each limit, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class MachineGain:
    """What one more machine adds: microbatches per second of the whole swarm without it and with it. Immutable."""

    machine: Machine
    rate_without: float
    rate_with: float

    @property
    def factor(self) -> float:
        """How many times as fast the swarm is with the machine; 1 if it adds nothing."""
        return self.rate_with / self.rate_without


def explain_bottleneck(cost: RunCost, plan: Plan) -> str:
    """Returns a sentence that names the slowest stages, their rate in tokens per second, what limits it, what helps."""
    stages, limit = plan.bottleneck.stages, plan.bottleneck.limit
    holders = [found for found in plan.assignments if found.span is not None and stages.first in found.span]
    limited = sum(found.rate.microbatches for found in holders if found.rate.limit == limit)
    of_rate = limited / plan.rate if plan.rate > 0 else 1.0
    machines = "1 machine" if len(holders) == 1 else f"{len(holders)} machines"
    noun = "stage" if len(stages) == 1 else "stages"
    return (
        f"{noun} {stages} with {machines}: {plan.rate * cost.tokens:,.0f} tokens/s, {of_rate:.0%} of it limited by "
        f"{limit}; {REMEDIES[limit]}."
    )


def gain_of_one_more(cost: RunCost, plan: Plan, machine: Machine, rng: random.Random) -> MachineGain:
    """Returns what `machine` would add if it joined the machines of `plan`, all of them placed again; never a loss."""
    machines = [found.machine for found in plan.assignments]
    with_it = make_plan(cost, [*machines, machine], rng, start=plan)
    return MachineGain(machine, plan.rate, max(plan.rate, with_it.rate))
