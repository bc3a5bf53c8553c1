"""What every schedule, cut and transport is measured against: the run of a manifest as a plain PyTorch loop.

One process, one autograd graph through all stages, torch's own AdamW and clipping, Muon and the learning rate written
down a second time. It shares with the product only how a stage is built and what the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import OptimizerSection
from torch import Tensor, nn

from agora.model import family_of
from agora.train.objectives import stage_loss

Batches = Sequence[Sequence[np.ndarray]]
"""Of each step, its microbatches: int32 [b, s + 1]."""


@dataclass(frozen=True)
class PlainRun:
    """losses[i]: mean loss per supervised token of step i, before its update; weights[k]: stage k's tensors by name."""

    losses: list[float]
    weights: list[dict[str, np.ndarray]]


def run_plain_loop(manifest: Manifest, batches: Batches, between: Callable[[Tensor], Tensor] = lambda x: x) -> PlainRun:
    """Trains the manifest's model on `batches`, one optimizer step for each of them.

    between: what becomes of a boundary [b, s, k] between two stages, within the graph.
    """
    stages = [
        family_of(manifest.model).build_stage(manifest.layers_of(k), manifest.seed) for k in range(manifest.stage_count)
    ]
    optimizers = [_optimizer(stage, manifest.optimizer) for stage in stages]
    losses = []
    for step, microbatches in enumerate(batches):
        loss_sum, tokens = 0.0, 0
        for microbatch in microbatches:
            ids = torch.from_numpy(microbatch)
            loss = _loss(stages, ids, between)
            loss.backward()
            loss_sum += loss.item()
            tokens += int((ids[:, 1:] >= 0).sum())
        losses.append(loss_sum / tokens)
        for stage, optimizer in zip(stages, optimizers, strict=True):
            _take_step(stage, optimizer, manifest, step, tokens)
    return PlainRun(losses, [{n: p.detach().numpy().copy() for n, p in stage.named_parameters()} for stage in stages])


def _loss(stages: Sequence[nn.Module], ids: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
    inputs = ids[:, :-1]
    hidden = stages[0](inputs)
    for stage in stages[1:]:
        hidden = stage(between(hidden), inputs)
    return stage_loss(hidden, ids[:, 1:])


class PlainMuon(torch.optim.Optimizer):
    """Muon for the matrices inside the layers, one after another in float64; AdamW for all other parameters."""

    def __init__(self, stage: nn.Module, section: OptimizerSection) -> None:
        hidden = [p for name, p in stage.named_parameters() if name.startswith("layers.") and p.dim() == 2]
        others = [p for p in stage.parameters() if all(p is not one for one in hidden)]
        super().__init__(hidden or [torch.zeros(1)], {"lr": 0.0})
        self.section = section
        self.hidden = [(p, torch.zeros_like(p)) for p in hidden]
        decays = [(2, section.weight_decay), (1, 0.0)]
        groups = [{"params": [p for p in others if p.dim() == n], "weight_decay": decay} for n, decay in decays]
        self.adamw = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.epsilon)
        self.param_groups += self.adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.adamw.step()
        rate, keep = self.param_groups[0]["lr"], self.section.momentum
        for parameter, mean in self.hidden:
            mean.mul_(keep).add_(parameter.grad, alpha=1 - keep)
            x = (keep * mean + (1 - keep) * parameter.grad).double()
            x /= x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            parameter.mul_(1 - rate * self.section.weight_decay)
            parameter.sub_((rate * 0.2 * max(x.shape) ** 0.5 * x).float())


def _optimizer(stage: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    matrices = [p for p in stage.parameters() if p.dim() >= 2]
    vectors = [p for p in stage.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (section.beta1, section.beta2)
    if section.name == "muon":
        return PlainMuon(stage, section)
    if section.name == "nadam":
        return torch.optim.NAdam(groups, betas=betas, eps=section.epsilon, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, betas=betas, eps=section.epsilon)


def _take_step(stage: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest, step: int, tokens: int) -> None:
    for parameter in stage.parameters():
        parameter.grad /= tokens
    if manifest.optimizer.clip > 0:
        nn.utils.clip_grad_norm_(stage.parameters(), manifest.optimizer.clip / math.sqrt(manifest.stage_count))
    for group in optimizer.param_groups:
        group["lr"] = plain_learning_rate(manifest.optimizer, step)
    optimizer.step()
    optimizer.zero_grad()


def plain_learning_rate(section: OptimizerSection, step: int) -> float:
    """Linear warm-up, then half a cosine down to minimum_ratio at total_steps."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    share = min(1.0, (step - section.warmup_steps) / max(1, section.total_steps - section.warmup_steps))
    lowest = section.minimum_ratio * section.learning_rate
    return lowest + (section.learning_rate - lowest) * (1 + math.cos(math.pi * share)) / 2


def relative_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in the Euclidean norm, computed in float64."""
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))
