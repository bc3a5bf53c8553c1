"""What really crosses boundaries, and what it costs to change it: a small model trained in stages, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from agora_protocol.codec_names import Direction
from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.core.span_work import ForwardKey
from agora.core.step_instructions import StepInstructions
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import ByteTokenizer
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork

ORIGIN: Final = PeerId("samples")
HELD_OUT: Final = 8

# Returns what arrives of a boundary [b, s, k] or its gradient, given direction, microbatch and the stage entered.
Crossing = Callable[[Tensor, Direction, MicrobatchId, int], Tensor]


@dataclass(slots=True)
class Samples:
    """The boundaries that went forward and the gradients that came back in the last microbatches, float32 [b, s, k]."""

    forward: list[Tensor] = field(default_factory=list)
    backward: list[Tensor] = field(default_factory=list)


def cross_unchanged(tensor: Tensor, direction: Direction, microbatch: MicrobatchId, stage: int) -> Tensor:
    """Returns the tensor as it is: a crossing that changes nothing."""
    return tensor


class Stages:
    """All stages of a model, one after the other; every step is one microbatch."""

    def __init__(self, manifest: Manifest, folder: Path, crossing: Crossing = cross_unchanged) -> None:
        corpus = open_corpus(manifest.data.corpus, ByteTokenizer(), cache_dir=folder)
        self._sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        self._manifest, self._crossing = manifest, crossing
        self._stages = [_trainer(manifest, number) for number in range(manifest.stage_count)]

    def learn(self, step: int, into: Samples | None = None) -> None:
        """Takes one training step; `into` collects what crosses, before the crossing changes it."""
        size = self._manifest.schedule.microbatch
        ids = [sample_id(ORIGIN, counter) for counter in range(step * size, (step + 1) * size)]
        tokens = torch.from_numpy(self._sampler.batch(ids)).long()
        name, into = MicrobatchId(step.to_bytes(16, "big")), into or Samples()
        batch = TokenBatch.from_wire(tokens, has_marks=False)
        entry, *inner = batch.inputs, *self._stages[:-1]
        for number, stage in enumerate(inner):
            boundary, _ = stage.forward(DecodedWork(name, number, entry, batch, "train"))
            into.forward.append(boundary)
            entry = self._crossing(boundary, "forward", name, number + 1).clone()
        gradient = self._stages[-1].run_last_stages(DecodedWork(name, len(inner), entry, batch, "train")).gradient
        for number, stage in reversed(list(enumerate(inner))):
            if gradient is None:
                raise ValueError("a stage that a boundary enters has its gradient")
            into.backward.append(gradient)
            gradient, _ = stage.backward(
                ForwardKey(name, number), self._crossing(gradient, "backward", name, number + 1)
            )
        for stage in self._stages:
            stage.take_due_steps()

    def loss(self, batches: int = HELD_OUT) -> float:
        """Returns the mean loss per held-out token in nats over so many microbatches, crossing as in training."""
        loss_sum, tokens = 0.0, 0
        name = MicrobatchId(bytes(16))
        for windows in self._sampler.heldout_batches(self._manifest.schedule.microbatch, limit=batches):
            batch = TokenBatch.from_wire(torch.from_numpy(windows).long(), has_marks=False)
            entry = batch.inputs
            for number, stage in enumerate(self._stages[:-1]):
                boundary, _ = stage.forward(DecodedWork(name, number, entry, batch, "evaluate"))
                entry = self._crossing(boundary, "forward", name, number + 1)
            done = self._stages[-1].run_last_stages(DecodedWork(name, len(self._stages) - 1, entry, batch, "evaluate"))
            loss_sum, tokens = loss_sum + done.loss_sum, tokens + done.tokens
        return loss_sum / tokens


def boundary_samples(manifest: Manifest, steps: int, keep: int, folder: Path) -> Samples:
    """Trains `steps` steps with exact boundaries and returns what crossed in the last `keep` of them."""
    stages, found = Stages(manifest, folder), Samples()
    for step in range(steps):
        stages.learn(step, found if step >= steps - keep else None)
    return found


def _trainer(manifest: Manifest, number: int) -> SpanTrainer:
    trainer = SpanTrainer(manifest, Span(number, number), torch.device("cpu"), report=lambda event: None, in_flight=1)
    trainer.stages[number].set_instructions(StepInstructions(manifest.tokens_per_microbatch))
    return trainer
