"""The learning rate as a function of the step: linear warm-up, then a cosine down to a floor.

Knows: the manifest's optimizer section. Must not know: torch, clocks, stages.
"""

from __future__ import annotations

import math

from agora_protocol.manifest import OptimizerSection


def learning_rate(step: int, optimizer: OptimizerSection) -> float:
    """The rate of optimizer step number `step` (0 is the first).

    Rises linearly over `warmup_steps` (step 0 already moves, by rate / warmup_steps), is highest at the end of the
    warm-up, follows half a cosine until `total_steps`, and stays at `minimum_ratio` of the highest rate from there on.
    Source: Loshchilov and Hutter, SGDR (arXiv 1608.03983), equation 5, one period.
    """
    highest = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return highest * (step + 1) / optimizer.warmup_steps
    decay_steps = max(optimizer.total_steps - optimizer.warmup_steps, 1)
    progress = min((step - optimizer.warmup_steps) / decay_steps, 1.0)
    floor = optimizer.minimum_ratio
    return highest * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
