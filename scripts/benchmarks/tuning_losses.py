"""A loss run: a pretrained model tuned with LoRA in one process, cut into stages, boundaries crossing by one codec.

A microbatch is finished, and its step taken, before the next begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.codec import BoundaryCodec
from agora.core.span_work import ForwardKey
from agora.core.step_instructions import StepInstructions
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import ByteTokenizer
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from benchmarks.codec_samples import ORIGIN, Crossing, cross_unchanged
from benchmarks.codecs import crossing
from benchmarks.worker import Channel


class TunedStages:
    """All stages of a run that begins with a base model; every step is one microbatch."""

    def __init__(self, manifest: Manifest, base_model: Path, cache: Path) -> None:
        corpus = open_corpus(manifest.data.corpus, ByteTokenizer(), cache)
        self._sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        self._size = manifest.schedule.microbatch
        self._stages = [_trainer(manifest, number, base_model) for number in range(manifest.stage_count)]

    def learn(self, step: int, cross: Crossing) -> None:
        """Takes one training step, in which every boundary, and its gradient, arrives as `cross` returns it."""
        ids = [sample_id(ORIGIN, counter) for counter in range(step * self._size, (step + 1) * self._size)]
        name = MicrobatchId((step + 1).to_bytes(16, "big"))
        batch = TokenBatch.from_wire(torch.from_numpy(self._sampler.batch(ids)).long(), has_marks=False)
        last = len(self._stages) - 1
        entry = self._run_forward(name, batch, "train", cross)
        gradient = self._stages[last].run_last_stages(DecodedWork(name, last, entry, batch, "train")).gradient
        for number in range(last - 1, -1, -1):
            if gradient is None:
                raise ValueError("a stage that a boundary enters has its gradient")
            arrived = cross(gradient, "backward", name, number + 1)
            gradient, _ = self._stages[number].backward(ForwardKey(name, number), arrived)
        for stage in self._stages:
            stage.take_due_steps()

    def loss(self, batches: int, cross: Crossing) -> float:
        """Returns the mean loss per held-out token, in nats, over so many microbatches."""
        loss_sum, tokens, last = 0.0, 0, len(self._stages) - 1
        for number, windows in enumerate(self._sampler.heldout_batches(self._size, limit=batches)):
            name = MicrobatchId(b"held out" + number.to_bytes(8, "big"))
            batch = TokenBatch.from_wire(torch.from_numpy(windows).long(), has_marks=False)
            entry = self._run_forward(name, batch, "evaluate", cross)
            done = self._stages[last].run_last_stages(DecodedWork(name, last, entry, batch, "evaluate"))
            loss_sum, tokens = loss_sum + done.loss_sum, tokens + done.tokens
        return loss_sum / tokens

    def _run_forward(self, name: MicrobatchId, batch: TokenBatch, purpose: str, cross: Crossing) -> Tensor:
        entry = batch.inputs
        for number, stage in enumerate(self._stages[:-1]):
            boundary, _ = stage.forward(DecodedWork(name, number, entry, batch, purpose))
            entry = cross(boundary, "forward", name, number + 1).clone()
        return entry


def tune(manifest: Manifest, base_model: Path, cache: Path, steps: int, batches: int) -> tuple[float, float]:
    """Tunes the base model through the manifest's codec; returns two held-out losses over so many microbatches.

    The first is what the swarm reports: boundaries cross by the codec. The second is that of the exported adapter,
    beside which there are no boundaries. With 0 steps both are the base model's.
    """
    stages = TunedStages(manifest, base_model, cache)
    cross = crossing(BoundaryCodec(manifest.boundary.codec, manifest.seed))
    for step in range(steps):
        stages.learn(step, cross)
    return stages.loss(batches, cross), stages.loss(batches, cross_unchanged)


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """{"manifest": file, "base": folder of its base model, "steps": n} answers {"loss", "exported_loss"}, see tune."""
    torch.set_num_threads(int(spec["threads"]))
    keep_freed_memory()
    cache, heldout = Path(spec["cache"]), int(spec["heldout"])
    for order in channel.orders():
        manifest = Manifest.from_toml(Path(order["manifest"]).read_text(encoding="utf-8"), order["manifest"])
        loss, exported = tune(manifest, Path(order["base"]), cache, order["steps"], heldout)
        channel.say({"loss": loss, "exported_loss": exported})


def _trainer(manifest: Manifest, number: int, base_model: Path) -> SpanTrainer:
    trainer = SpanTrainer(
        manifest,
        Span(number, number),
        torch.device("cpu"),
        report=lambda event: None,
        in_flight=1,
        base_model=base_model,
    )
    trainer.stages[number].set_instructions(StepInstructions(manifest.tokens_per_microbatch))
    return trainer
