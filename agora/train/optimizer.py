"""AdamW or NAdam over one stage's flat weights: mean over tokens, clipping, the step; non-finite sums refused.

Knows: the manifest's optimizer section, flat tensors. Must not know: microbatches, versions, peers, clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from agora_protocol.manifest import OptimizerSection
from torch import Tensor, nn

from agora.train.schedule import learning_rate


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that was taken: its learning rate, and the norm of the mean gradient before clipping."""

    learning_rate: float
    gradient_norm: float


class StageOptimizer:
    """The optimizer of one stage. Its moments stay here; the weights may move to another tensor between steps.

    Clipping: the manifest's `clip` is meant for the gradient of the whole model, which no peer sees; a stage clips at
    clip / sqrt(stages), which is the same bound when all stages have equal norms. 0 switches it off.
    """

    def __init__(self, section: OptimizerSection, stage_count: int, decayed: int, gradient: Tensor) -> None:
        """gradient: the stage's flat gradient sum; only its first `decayed` elements get weight decay."""
        self._section = section
        self._gradient = gradient
        self._clip = section.clip / math.sqrt(stage_count)
        self._parts = [part for part in (slice(0, decayed), slice(decayed, gradient.numel())) if part.start < part.stop]
        self._handles = [nn.Parameter(gradient[part]) for part in self._parts]  # bound to weights at each step
        for handle, part in zip(self._handles, self._parts, strict=True):
            handle.grad = gradient[part]
        decays = [section.weight_decay if part.start < decayed else 0.0 for part in self._parts]
        self._optimizer = _build(section, self._handles, decays)

    def step(self, weights: Tensor, number: int, tokens: int) -> StepDone | None:
        """Changes `weights` in place by step `number` (0 the first) over `tokens`, and zeroes the gradient sum.

        None when the sum is not finite: the weights and the moments are untouched, the sum is zeroed all the same.
        """
        norm = float(torch.linalg.vector_norm(self._gradient)) / tokens
        if not math.isfinite(norm):
            self._gradient.zero_()
            return None
        scale = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        self._gradient.mul_(scale / tokens)
        rate = learning_rate(number, self._section)
        self._apply(weights, rate)
        self._gradient.zero_()
        return StepDone(rate, norm)

    @torch.no_grad()
    def _apply(self, weights: Tensor, rate: float) -> None:
        for handle, part in zip(self._handles, self._parts, strict=True):
            handle.data = weights[part]
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        # The fused kernels change memory without telling autograd; a graph that still needs these weights must raise.
        torch.autograd.graph.increment_version(weights)


def _build(section: OptimizerSection, handles: list[nn.Parameter], decays: list[float]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [handle], "weight_decay": decay} for handle, decay in zip(handles, decays, strict=True)
    ]
    betas = (section.beta1, section.beta2)
    if section.name == "nadam":
        return torch.optim.NAdam(groups, betas=betas, eps=section.epsilon, decoupled_weight_decay=True, foreach=True)
    return torch.optim.AdamW(groups, betas=betas, eps=section.epsilon, fused=True)
