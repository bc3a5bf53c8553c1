"""AdamW or NAdam over one stage's flat weights: mean over tokens, clipping, the step; non-finite sums refused.

Knows: the manifest's optimizer section, flat tensors. Must not know: microbatches, versions, peers, clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from agora_protocol.manifest import OptimizerSection
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.nadam import nadam

from agora.train.schedule import learning_rate

MOMENTUM_DECAY = 4e-3
"""Of NAdam, torch's own default."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that was taken: its learning rate, and the norm of the mean gradient before clipping."""

    learning_rate: float
    gradient_norm: float


class StageOptimizer:
    """The optimizer of one stage. Its moments stay here; the weights may move to another tensor between steps.

    `mean` and `square` are the moments, flat like the weights; `updates` counts the steps that changed them, which are
    fewer than the stage's steps where this peer had nothing to add to some. Clipping: the manifest's `clip` is meant
    for the gradient of the whole model, which no peer sees; a stage clips at clip / sqrt(stages), which is the same
    bound when all stages have equal norms. 0 switches it off.
    """

    def __init__(self, section: OptimizerSection, stage_count: int, decayed: int, gradient: Tensor) -> None:
        """gradient: the stage's flat gradient sum; only its first `decayed` elements get weight decay."""
        self.mean = torch.zeros_like(gradient)
        self.square = torch.zeros_like(gradient)
        self.updates = 0
        self._section = section
        self._gradient = gradient
        self._clip = section.clip / math.sqrt(stage_count)
        self._parts = [part for part in (slice(0, decayed), slice(decayed, gradient.numel())) if part.start < part.stop]
        self._moments = [
            _Moments.of(section, self.mean[part], self.square[part], part.start < decayed) for part in self._parts
        ]

    def step(self, weights: Tensor, number: int, tokens: int) -> StepDone | None:
        """Changes `weights` in place by step `number` (0 the first) over `tokens`, and zeroes the gradient sum.

        None when the sum is not finite: the weights and the moments are untouched, the sum is zeroed all the same.
        """
        done = self.step_along(weights, self._gradient, number, tokens)
        self._gradient.zero_()
        return done

    def step_along(self, weights: Tensor, gradient: Tensor, number: int, tokens: int = 1) -> StepDone | None:
        """The same with another sum than this stage's own, or at `tokens` 1 with a mean; `gradient` is overwritten."""
        norm = float(torch.linalg.vector_norm(gradient)) / tokens
        if not math.isfinite(norm):
            return None
        scale = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        gradient.mul_(scale / tokens)
        rate = learning_rate(number, self._section)
        self._apply(weights, gradient, rate)
        return StepDone(rate, norm)

    @torch.no_grad()
    def load(self, updates: int, mean: Tensor, square: Tensor) -> None:
        """Goes on from these moments, copied, as if the `updates` that made them had been taken here."""
        self.updates = updates
        self.mean.copy_(mean)
        self.square.copy_(square)
        for moments in self._moments:
            moments.step.fill_(updates)
            moments.momentum.fill_(momentum_product(self._section.beta1, updates))

    @torch.no_grad()
    def _apply(self, weights: Tensor, gradient: Tensor, rate: float) -> None:
        for moments, part in zip(self._moments, self._parts, strict=True):
            moments.apply(self._section, weights[part], gradient[part], rate)
        self.updates += 1
        # The fused kernels change memory without telling autograd; a graph that still needs these weights must raise.
        torch.autograd.graph.increment_version(weights)


def momentum_product(beta1: float, updates: int) -> float:
    """NAdam's product of its momenta over `updates`, rounded to float32 after each, as torch's own running product."""
    product = np.float32(1.0)
    for update in range(1, updates + 1):
        product *= np.float32(beta1 * (1.0 - 0.5 * 0.96 ** (update * MOMENTUM_DECAY)))
        if product == 0.0:
            break
    return float(product)


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
    def of(cls, section: OptimizerSection, mean: Tensor, square: Tensor, decayed: bool) -> _Moments:
        """Before the first step; `mean` and `square` are that part of the moments."""
        decay = section.weight_decay if decayed else 0.0
        # The fused kernel wants its step count on the device; nadam's scalars stay on the CPU, as its class has them.
        step = torch.zeros((), device=mean.device if section.name == "adamw" else "cpu")
        return cls(decay, mean, square, step, torch.ones(()))

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
                momentum_decay=MOMENTUM_DECAY,
                **common,
            )
        else:
            adamw(
                [weights], [gradient], [self.mean], [self.square], [], [self.step], fused=True, amsgrad=False, **common
            )
