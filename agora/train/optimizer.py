"""AdamW or NAdam over one stage's flat weights: mean over tokens, clipping, the step; non-finite sums refused.

Knows: the manifest's optimizer section, flat tensors. Must not know: microbatches, versions, peers, clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from agora_protocol.manifest import OptimizerSection
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.nadam import nadam

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
        self._moments = [_Moments.of(section, gradient[part], part.start < decayed) for part in self._parts]

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
        for moments, part in zip(self._moments, self._parts, strict=True):
            moments.apply(self._section, weights[part], self._gradient[part], rate)
        # The fused kernels change memory without telling autograd; a graph that still needs these weights must raise.
        torch.autograd.graph.increment_version(weights)


@dataclass(slots=True)
class _Moments:
    """The optimizer's state for one part of the weights.

    torch's optimizers as functions: their classes import torch._dynamo, which nothing here needs and which costs half
    of a daemon's start.
    """

    decay: float
    mean: Tensor
    square: Tensor
    step: Tensor
    momentum: Tensor

    @classmethod
    def of(cls, section: OptimizerSection, gradient: Tensor, decayed: bool) -> _Moments:
        """Before the first step."""
        decay = section.weight_decay if decayed else 0.0
        # The fused kernel wants its step count on the device; nadam's scalars stay on the CPU, as its class has them.
        step = torch.zeros((), device=gradient.device if section.name == "adamw" else "cpu")
        return cls(decay, torch.zeros_like(gradient), torch.zeros_like(gradient), step, torch.ones(()))

    def apply(self, section: OptimizerSection, weights: Tensor, gradient: Tensor, rate: float) -> None:
        """One step, in place."""
        common: dict[str, Any] = {"beta1": section.beta1, "beta2": section.beta2, "eps": section.epsilon, "lr": rate}
        common |= {"weight_decay": self.decay, "maximize": False}
        if section.name == "nadam":
            step = self.step
            nadam(
                [weights],
                [gradient],
                [self.mean],
                [self.square],
                [self.momentum],
                [step],
                foreach=True,
                decoupled_weight_decay=True,
                momentum_decay=4e-3,
                **common,
            )
        else:
            adamw(
                [weights], [gradient], [self.mean], [self.square], [], [self.step], fused=True, amsgrad=False, **common
            )
