"""The work that every contender of the pipeline benchmark does: one model, one corpus, one optimizer, one cadence.

Imports torch: only child processes import this module; `manifest_for` lives apart, in `task.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from agora_protocol.manifest import Manifest
from torch import Tensor, nn

from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler
from agora.data.tokenizer import ByteTokenizer
from agora.model import family_of
from agora.train.objectives import stage_loss
from agora.train.optimizer import learning_rate
from benchmarks.task import MICROBATCHES_PER_STEP


class Work:
    """The task as a child process needs it; made from the JSON spec that the parent sends (see `task.spec`)."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.manifest = Manifest.from_toml(spec["manifest"], "the benchmark's manifest")
        self.sequences = self.manifest.schedule.microbatch
        self.context = self.manifest.model.context
        self.tokens_per_microbatch = self.manifest.tokens_per_microbatch
        self.tokens_per_step = self.tokens_per_microbatch * MICROBATCHES_PER_STEP
        corpus = open_corpus(self.manifest.data.corpus, ByteTokenizer(), Path(spec["cache"]))
        self._sampler = Sampler(corpus, self.context, self.manifest.data.heldout, self.manifest.seed)
        torch.set_num_threads(int(spec["threads"]))

    def microbatch(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets of a microbatch, both int64 [b, s]; they are the same for every contender."""
        first = index * self.sequences
        tokens_bs = torch.from_numpy(self._sampler.batch(range(first, first + self.sequences))).long()
        return tokens_bs[:, :-1].contiguous(), tokens_bs[:, 1:].contiguous()

    def step_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets of a whole step, both int64 [16 * b, s]."""
        first = step * MICROBATCHES_PER_STEP
        pairs = [self.microbatch(index) for index in range(first, first + MICROBATCHES_PER_STEP)]
        return torch.cat([tokens for tokens, _ in pairs]), torch.cat([targets for _, targets in pairs])

    def stage(self, stage: int) -> nn.Module:
        """Returns a stage with its seeded initial weights, which takes [b, s] tokens or [b, s, width] hidden states."""
        layers = self.manifest.layers_of(stage)
        return Plain(family_of(self.manifest.model).build_stage(layers, self.manifest.seed))

    def optimizer(self, module: nn.Module) -> torch.optim.AdamW:
        """Returns the manifest's AdamW (weight decay on matrices only), fused, which is the fastest that torch has."""
        section = self.manifest.optimizer
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        decays = [(matrices, section.weight_decay), (others, 0.0)]
        return torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in decays if group],
            lr=section.learning_rate,
            betas=(section.beta1, section.beta2),
            eps=section.epsilon,
            fused=True,
        )

    def take_step(self, step: int, module: nn.Module, optimizer: torch.optim.AdamW) -> None:
        """Takes one optimizer step with the manifest's schedule and clipping; gradients are means over the step."""
        section = self.manifest.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, section)
        if section.clip > 0:
            bound = section.clip / self.manifest.stage_count**0.5
            nn.utils.clip_grad_norm_(module.parameters(), bound, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Plain(nn.Module):
    """A stage as a module of one argument, which is what the other systems expect."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, entering: Tensor) -> Tensor:
        """Computes hidden states [b, s, width], or logits at the last stage, from tokens [b, s] or hidden states."""
        result: Tensor = self.stage(entering)
        return result


def loss_sum(leaving: Tensor, targets_bs: Tensor) -> Tensor:
    """Returns the sum of the token losses, a float32 scalar."""
    return stage_loss(leaving, targets_bs)
