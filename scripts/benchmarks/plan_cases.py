"""Random runs and machines, small and uneven, some of them short of memory.

For the benchmark and the tests of plans.
"""

from __future__ import annotations

import random

from agora_protocol.ids import Span

from agora.cost.run_cost import Machine, RunCost, StageCost


def random_run(rng: random.Random, stages: int) -> RunCost:
    """A run with a heavy last stage, or with stages that differ at random; light or heavy boundaries."""
    costs = [StageCost(1e12, 1e12, 4e8, 1e7, 2e7, 1e6, 1e8)] * stages
    if rng.random() < 0.5:
        costs[-1] = StageCost(0.0, rng.uniform(1e12, 6e12), rng.uniform(4e8, 2e9), 1e7, 2e7, 1e6, 2e8)
    else:
        costs = [random_stage(rng) for _ in range(stages)]
    size = rng.choice([0.0, 1e5, 1e6, 4e6])
    return RunCost(costs, forward_bytes=size, backward_bytes=1.2 * size, tokens=2048, in_flight=8)


def random_stage(rng: random.Random) -> StageCost:
    """A stage of any size, with or without much optimizer state."""
    flops = rng.uniform(0.5e12, 2e12)
    return StageCost(flops, 2 * flops, rng.uniform(2e8, 8e8), 1e7, rng.choice([0.0, 3e8]), 1e6, 1e8)


def random_machines(rng: random.Random, cost: RunCost, count: int) -> list[Machine]:
    """Machines of which the smallest hold a seventh of the model, the largest all of it."""
    whole = cost.memory(Span(0, cost.stage_count - 1)).device
    return [
        Machine(
            f"machine{number}",
            10 ** rng.uniform(13, 14.5),
            rng.uniform(0.15, 1.2) * whole,
            host_memory=rng.choice([0.0, whole]),
            upload=10 ** rng.uniform(7, 8.1),
            download=10 ** rng.uniform(7, 8.3),
        )
        for number in range(count)
    ]
