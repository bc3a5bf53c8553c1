"""Trains a span for some microbatches and counts what torch allocates for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import torch
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import BEGINS, SUPERVISED
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from agora.core.span_work import ForwardKey
from agora.cost.run_cost import Activations
from agora.train.activation_checkpointing import GraphBudget, Kept
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork

CPU: Final = torch.device("cpu")
# The manifest's schedule.activations of each way to keep graphs, see `budget_of`.
SETTINGS: Final[Mapping[Activations, str]] = {
    "keep": "keep",
    "recompute": "auto",
    "inputs": "recompute",
    "layers": "recompute",
}
Result = TypeVar("Result")


def allocated_bytes(work: Callable[[], Result], device: torch.device = CPU) -> tuple[Result, int, int]:
    """Returns what `work` returns, the bytes of the tensors on `device` that it leaves, and the most that it had."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        left, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return result, left - before, most - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        result = work()
    held = peak = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return result, held, peak


class InputsKept(GraphBudget):
    """Keeps the inputs of layers, whatever memory there is."""

    def __init__(self) -> None:
        super().__init__("recompute", CPU)

    def choose(self, entry_stage: int, kept_bytes: int, version_bytes: int) -> Kept:
        return Kept.INPUTS


def budget_of(way: Activations) -> GraphBudget | None:
    """Returns what takes the place of a trainer's budget, so that it keeps what the plan calls `way`.

    None: its own does, if the manifest's schedule.activations is that of SETTINGS.
    """
    return InputsKept() if way == "inputs" else None


def random_boundary(manifest: Manifest, device: torch.device) -> Tensor:
    """Returns values of a boundary, or of its gradient, float32 [b, s, k] on `device`."""
    return torch.randn(manifest.boundary_shape()).to(device)


def random_tokens(manifest: Manifest) -> Tensor:
    """Returns the ids of a microbatch, as they are sent.

    In a run with marks each row has two sequences, all of them supervised.
    """
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
            batch = TokenBatch.from_wire(random_tokens(manifest), has_marks=manifest.has_marks, device=trainer.device)
            entry = batch.inputs if span.first == 0 else random_boundary(manifest, trainer.device)
            if span.last == manifest.stage_count - 1:
                trainer.run_last_stages(DecodedWork(name, span.first, entry, batch, "train"))
            else:
                trainer.forward(DecodedWork(name, span.first, entry, batch, "train"))
                if not keeps:
                    trainer.stashed.drop_graphs()
        while trainer.stashed.count_graphs() or len(trainer.stashed):
            trainer.backward(ForwardKey(names.pop(), span.first), random_boundary(manifest, trainer.device))
        trainer.take_due_steps()


def measured_peak(
    manifest: Manifest,
    span: Span,
    in_flight: int,
    base_model: Path | None = None,
    *,
    way: Activations = "keep",
    device: torch.device = CPU,
) -> int:
    """Returns the most bytes that torch had on the device for a span in training, its weights included.

    way: of keeping graphs; the manifest must have its setting, see SETTINGS.
    """

    def make() -> SpanTrainer:
        """Builds the stages with their weights, gradient sums and moments."""
        trainer = SpanTrainer(
            manifest, span, device, report=lambda event: None, in_flight=in_flight, base_model=base_model
        )
        trainer.graphs = budget_of(way) or trainer.graphs
        return trainer

    trainer, held, _ = allocated_bytes(make, device)
    _, _, peak = allocated_bytes(lambda: train(trainer, manifest, in_flight, keeps=way in ("keep", "inputs")), device)
    return held + peak
