"""What follows the stage's step: the learning rate, and how fast the average of a replica's drift forgets.

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
    return highest * (floor + (1.0 - floor) * _half_cosine(progress))


DRIFT_FIRST, DRIFT_LAST, DRIFT_STEPS = 0.5, 0.01, 1000


def drift_share(step: int, optimizer: OptimizerSection) -> float:
    """The share of a new drift in the average of drifts (`averaging.rule = "ema"`) at optimizer step `step`.

    0.5 for the first 1000 steps, then half a cosine down to 0.01 at `total_steps`. Source: AsyncMesh
    (arXiv 2601.22442), the schedule of lambda.
    """
    progress = (step - DRIFT_STEPS) / max(optimizer.total_steps - DRIFT_STEPS, 1)
    return DRIFT_LAST + (DRIFT_FIRST - DRIFT_LAST) * _half_cosine(min(max(progress, 0.0), 1.0))


def _half_cosine(progress: float) -> float:
    """From 1 at progress 0 down to 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
