"""Trains a span for some microbatches and counts what torch allocates, as cost/manifest_cost.py says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import BEGINS, SUPERVISED
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from agora.core.span_work import ForwardKey
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork


def allocated_bytes(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `work` returns, the bytes of the tensors that it leaves, and the most that it had at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        result = work()
    held = peak = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return result, held, peak


def random_tokens(manifest: Manifest) -> Tensor:
    """Ids of a microbatch as they are sent; in a run with marks each row has two sequences, all of them supervised."""
    ids = torch.randint(0, manifest.model.vocabulary, manifest.tokens_shape())
    if manifest.has_marks:
        ids[1] = SUPERVISED
        ids[1, :, :: manifest.model.context // 2] |= BEGINS
    return ids


def train(trainer: SpanTrainer, manifest: Manifest, in_flight: int, *, keeps: bool = True) -> None:
    """Takes `in_flight` microbatches through their forwards, then through their backwards, and steps; twice.

    keeps: False: no graph waits for its backward, as where memory has no room for any.
    """
    span = trainer.span
    for turn in range(2):
        names = [MicrobatchId(bytes([turn, number]) * 8) for number in range(in_flight)]
        for name in names:
            batch = TokenBatch.from_wire(random_tokens(manifest), has_marks=manifest.has_marks)
            entry = batch.inputs if span.first == 0 else torch.randn(manifest.boundary_shape())
            if span.last == manifest.stage_count - 1:
                trainer.run_last_stages(DecodedWork(name, span.first, entry, batch, "train"))
            else:
                trainer.forward(DecodedWork(name, span.first, entry, batch, "train"))
                if not keeps:
                    trainer.stashed.drop_graphs()
        while trainer.stashed.count_graphs() or len(trainer.stashed):
            trainer.backward(ForwardKey(names.pop(), span.first), torch.randn(manifest.boundary_shape()))
        trainer.take_due_steps()


def measured_peak(
    manifest: Manifest, span: Span, in_flight: int, base_model: Path | None = None, *, keeps: bool = True
) -> int:
    """The most bytes that torch had for a span in training, its weights included.

    keeps: as in `train`.
    """

    def make() -> SpanTrainer:
        """Builds the stages with their weights, gradient sums and moments."""
        cpu = torch.device("cpu")
        return SpanTrainer(manifest, span, cpu, report=lambda event: None, in_flight=in_flight, base_model=base_model)

    trainer, held, _ = allocated_bytes(make)
    _, _, peak = allocated_bytes(lambda: train(trainer, manifest, in_flight, keeps=keeps))
    return held + peak
