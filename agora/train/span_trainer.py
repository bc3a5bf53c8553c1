"""The stages of one span: forward, loss, backward, gradient sums. Everything here runs on the device thread.

Knows: modules, weights, microbatches by id. Must not know: codecs, queues, event loops, peers.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from agora_protocol.errors import LocalError, NotMyStage
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor
from torch.nn.utils import get_total_norm

from agora.model import RunLayer, Stage, family_of, keep_graph
from agora.observe.events import MicrobatchCounted, Report
from agora.stepping import StepEvent
from agora.train import memory
from agora.train.device import has_native_bf16
from agora.train.layer_graphs import GraphMeasure, repeat_in_backward
from agora.train.objectives import TokenBatch, objective_of, row_log_probabilities
from agora.train.stage_replica import StageReplica
from agora.train.weight_versions import LIMIT_PER_SEAT, StashedForward, StashedForwards, WeightVersion

MEASURE_MEMORY_S = 1.0
"""Seconds for which a measurement of the available memory is used."""


MAX_LOSS_SUM = 1e30
"""A larger sum of losses counts as not finite: the message Processed cannot carry it."""


class NonFinite(LocalError):
    """Raised when this peer's own computation gives NaN or infinity from finite input; no gradient sum was changed."""

    code = "non-finite"


@dataclass(frozen=True, slots=True)
class FinishedMicrobatch:
    """The result of a microbatch that has passed the model's last stage.

    loss_sum, tokens: the summed loss, and the microbatch's weight in a step. gradient: of loss_sum with respect to the
    boundary that entered [b, s, k]; None at stage 0 and when not trained. metrics: sums, see agora.metrics.
    log_probabilities: of each row's supervised tokens, for the purpose "reference" only, whose loss is 0.
    """

    loss_sum: float
    tokens: int
    gradient: Tensor | None = None
    metrics: tuple[float, ...] = ()
    log_probabilities: tuple[float, ...] = ()


class SpanTrainer:
    """Trains the stages of a span. A microbatch may enter at any of them.

    Optimizer steps may be taken between a forward and its backward. The manifest's `schedule.activations` says which
    weights the backward then uses:

    | activations | kept of a forward      | gradient of the backward                                                  |
    |-------------|------------------------|---------------------------------------------------------------------------|
    | recompute   | its entry              | of a second forward, on the weights at the time of the backward           |
    | keep        | its entry, its graph   | of the first forward, on its weights; see weight_versions for the limit   |
    | auto        | as keep while the graphs of all microbatches in flight fit into memory, else as recompute          |

    A backward that follows its forward at once uses a graph of all layers with "keep", and with "auto" if one such
    graph fits into memory. Otherwise autograd keeps one layer's graph at a time, and the backward runs each layer once
    more, see layer_graphs.

    The gradients of all parameters are computed and checked before any is added: an error never leaves half of them.
    """

    def __init__(
        self,
        manifest: Manifest,
        span: Span,
        device: torch.device,
        *,
        report: Report,
        in_flight: int,
        on_step: Callable[[StepEvent], None] = lambda event: None,
        base_model: Path | None = None,
    ) -> None:
        """Builds the span's stages with their initial weights. Matrix products are in bf16 if the device has it.

        in_flight: the most microbatches that are usually between forward and backward; from LIMIT_PER_SEAT times that
        many on, forwards are refused. on_step: called with each step event, on the device thread. base_model: the
        folder of the base model. Raises what Family.build_stage raises.
        """
        self.span = span
        self.device = device
        self.objective = objective_of(manifest.objective)
        self._dropout = manifest.model.dropout
        self._report = report
        self._bf16 = has_native_bf16(device)
        self._activations = manifest.schedule.activations
        self._in_flight = in_flight
        self._available_bytes, self._measured_at = 0, -MEASURE_MEMORY_S
        self.activation_bytes: dict[int, int] = {}
        """Bytes of one microbatch's graph, by the stage that it entered, as measured on the first one ("auto" only)."""
        self.stashed = StashedForwards(LIMIT_PER_SEAT * in_flight)
        self.stages: dict[int, StageReplica] = {}
        for number in span.stages:
            module = family_of(manifest.model).build_stage(manifest.layers_of(number), manifest.seed, base_model)
            self.stages[number] = StageReplica(number, module, device, manifest, self.stashed, report, on_step)

    def stage(self, number: int) -> StageReplica:
        """Returns a stage of this span. Raises NotMyStage for another one."""
        if number not in self.stages:
            raise NotMyStage(f"stage {number} is not held here; this peer holds {self.span}")
        return self.stages[number]

    def take_due_steps(self) -> None:
        """Takes the optimizer step of every stage for which one is due, see TrainedStage.step_if_due."""
        for stage in self.stages.values():
            stage.step_if_due()

    # --- what a microbatch needs: forward, loss, backward

    def forward(
        self, microbatch: MicrobatchId, first: int, entry: Tensor, batch: TokenBatch, purpose: str
    ) -> tuple[Tensor, StashedForward | None]:
        """Runs stages `first` to the span's last. Returns the boundary [b, s, k] that leaves it, without a graph.

        entry: float32 [b, s, k], or token ids [b, s] at stage 0. purpose: as in the message Process. With "train", it
        stashes the forward for the backward and returns it, too; raises Busy when too many are stashed, and NonFinite
        for a boundary that is not finite.
        """
        if purpose != "train":
            with torch.no_grad():
                return self._run(microbatch, first, entry, batch, purpose), None
        self.stashed.require_room(microbatch, first)
        output, versions = self._run_for_training(microbatch, first, entry, batch)
        boundary = output.detach()
        self._require_finite(float(torch.linalg.vector_norm(boundary)), first, microbatch, "the boundary it computed")
        graph = output if versions else None
        tokens, steps = self.objective.count_tokens(batch), self._steps_from(first)
        forward = StashedForward(first, entry, batch, tokens, steps, 0.0, graph, versions)
        self.stashed.add(microbatch, forward)
        return boundary, forward

    def finish(
        self,
        microbatch: MicrobatchId,
        first: int,
        entry: Tensor,
        batch: TokenBatch,
        purpose: str,
        references: Sequence[float] = (),
    ) -> FinishedMicrobatch:
        """Runs stages `first` to the model's last, and the loss; with the purpose "train" also the backward.

        The backward adds the microbatch's gradients to the sums. entry: as for `forward`. purpose, references: as in
        the message Process. Raises NonFinite, and ProtocolError for references that the objective does not take; then
        nothing was added.
        """
        tokens = self.objective.count_tokens(batch)
        run_layer = self._run_layer_for_gradients(microbatch, first, entry, batch) if purpose == "train" else keep_graph
        with torch.set_grad_enabled(purpose == "train"):
            logits = self._run(microbatch, first, entry, batch, purpose, run_layer)
            if purpose == "reference":
                return self._reference(microbatch, first, logits, batch)
            loss, metrics = self.objective.loss(logits, batch, references)
            del logits  # the loss does not need them, and their gradient is as large as they are
        loss_sum = float(loss.detach())
        self._require_finite(loss_sum if abs(loss_sum) <= MAX_LOSS_SUM else math.inf, first, microbatch, "the loss")
        if purpose != "train":
            return FinishedMicrobatch(loss_sum, tokens, metrics=metrics)
        versions, steps = self._versions_from(first), self._steps_from(first)
        forward = StashedForward(first, entry, batch, tokens, steps, 0.0, loss, versions)
        gradient = self._add_gradients(microbatch, forward, loss, None, loss_sum)
        return FinishedMicrobatch(loss_sum, tokens, gradient, metrics)

    def _reference(self, microbatch: MicrobatchId, first: int, logits: Tensor, batch: TokenBatch) -> FinishedMicrobatch:
        """Returns the log-probabilities of the rows' supervised tokens, from the reference's logits [b, s, v]."""
        rows = tuple(row_log_probabilities(logits, batch.targets).tolist())
        self._require_finite(sum(rows), first, microbatch, "the reference's log-probability")
        return FinishedMicrobatch(0.0, self.objective.count_tokens(batch), log_probabilities=rows)

    def backward(self, microbatch: MicrobatchId, first: int, gradient: Tensor) -> tuple[Tensor | None, StashedForward]:
        """Runs the backward of a stashed forward, and adds its gradients to the sums.

        gradient: of the loss sum with respect to the boundary that `forward` returned, float32 [b, s, k], finite.
        Returns the gradient with respect to the entry (None at stage 0), and the forward, which is stashed no longer.
        Raises LocalError when no forward is stashed, NonFinite when a computed gradient is not finite; then nothing was
        added.
        """
        forward = self.stashed.take(microbatch, first)
        output = forward.output
        if output is None:
            run_layer = self._run_layer_for_gradients(microbatch, first, forward.entry, forward.batch)
            with torch.enable_grad():
                output = self._run(microbatch, first, forward.entry, forward.batch, "train", run_layer)
                forward.versions = self._versions_from(first)
        return self._add_gradients(microbatch, forward, output, gradient.to(output.dtype)), forward

    def _stages_from(self, first: int) -> list[StageReplica]:
        """Returns the span's stages from `first` on."""
        return [self.stages[number] for number in range(first, self.span.last + 1)]

    def _steps_from(self, first: int) -> tuple[int, ...]:
        """Returns the steps that the stages from `first` on have taken."""
        return tuple(stage.step for stage in self._stages_from(first))

    def _versions_from(self, first: int) -> tuple[WeightVersion, ...]:
        """Returns the current weights of the stages from `first` on."""
        return tuple(stage.weights.current for stage in self._stages_from(first))

    def _run(
        self,
        microbatch: MicrobatchId,
        first: int,
        entry: Tensor,
        batch: TokenBatch,
        purpose: str,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        """Runs stages `first` to the span's last; returns their output, a boundary or the logits.

        | purpose   | weights                                     |
        |-----------|---------------------------------------------|
        | train     | the current ones                            |
        | evaluate  | those of TrainedStage.evaluated             |
        | reference | the same, with adapters switched off        |
        """
        if first > 0 and torch.is_grad_enabled():
            entry.requires_grad_()
        hidden = entry
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            for stage in self._stages_from(first):
                version = stage.weights.current if purpose == "train" else stage.evaluated
                with self._mode_for(version.module, purpose, microbatch, stage.number):
                    hidden = version.module(hidden, batch.inputs, batch.segments, run_layer)
        return hidden

    @contextmanager
    def _mode_for(self, module: Stage, purpose: str, microbatch: MicrobatchId, stage: int) -> Iterator[None]:
        """Context manager: sets `module` up for `purpose`: dropout only for "train", no adapters for "reference".

        Dropout's random seed is a hash of microbatch and stage, so that a second forward drops the same values.
        """
        with ExitStack() as stack:
            if purpose == "reference":
                stack.enter_context(module.without_adapters())
            if self._dropout:
                module.train(purpose == "train")
                stack.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
                digest = hashlib.sha256(b"agora dropout 1\0" + microbatch + stage.to_bytes(4, "big")).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            yield

    def _run_for_training(
        self, microbatch: MicrobatchId, first: int, entry: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, tuple[WeightVersion, ...]]:
        """Calls `_run` for a later backward; returns the output, and the weights of its graph, () without a graph."""
        if self._activations == "auto" and first not in self.activation_bytes:
            return self._measure_graph(microbatch, first, entry, batch), ()
        versions = self._versions_from(first)
        keeps_graph = self._must_keep_graph(first)
        with torch.set_grad_enabled(keeps_graph):
            return self._run(microbatch, first, entry, batch, "train"), versions if keeps_graph else ()

    def _measure_graph(self, microbatch: MicrobatchId, first: int, entry: Tensor, batch: TokenBatch) -> Tensor:
        """Calls `_run` with one layer's graph at a time, and records the bytes of all graphs in activation_bytes.

        Returns its output without a graph.
        """
        versions = self._versions_from(first)
        weights = {p.untyped_storage().data_ptr() for version in versions for p in version.module.parameters()}
        measure = GraphMeasure(weights)
        output, others = memory.measure_saved_bytes(
            lambda: self._run(microbatch, first, entry, batch, "train", measure.run_layer), weights
        )
        self.activation_bytes[first] = sum(measure.layer_bytes) + others
        return output.detach()

    def _run_layer_for_gradients(
        self, microbatch: MicrobatchId, first: int, entry: Tensor, batch: TokenBatch
    ) -> RunLayer:
        """Returns the RunLayer for a forward whose backward follows at once: keep_graph if the graph fits into memory,
        otherwise repeat_in_backward. With "auto", it measures the graph first if that was not done yet.
        """
        if self._activations == "auto" and first not in self.activation_bytes:
            self._measure_graph(microbatch, first, entry, batch)
        if self._activations == "auto":
            fits = memory.graphs_fit(self.activation_bytes[first], 1, 0, self._available_memory())
        else:
            fits = self._activations == "keep"
        return keep_graph if fits else repeat_in_backward

    def _must_keep_graph(self, first: int) -> bool:
        """Returns whether to keep the graph of a forward that enters at `first`, rather than recompute it.

        With "keep" always; with "auto" if memory suffices for the graphs of all microbatches in flight.
        """
        if self._activations != "auto":
            return self._activations == "keep"
        graphs_to_come = max(self._in_flight - self.stashed.graph_count(), 1)
        weights = [stage.weights for stage in self.stages.values()]
        second_version = sum(w.current.flat.nbytes for w in weights if w.previous is None)
        available = self._available_memory()
        return memory.graphs_fit(self.activation_bytes[first], graphs_to_come, second_version, available)

    def _available_memory(self) -> int:
        """Returns the device's available bytes, as measured at most MEASURE_MEMORY_S ago."""
        now = time.monotonic()
        if now - self._measured_at >= MEASURE_MEMORY_S:
            self._available_bytes, self._measured_at = memory.available_bytes(self.device), now
        return self._available_bytes

    def _add_gradients(
        self,
        microbatch: MicrobatchId,
        forward: StashedForward,
        output: Tensor,
        gradient: Tensor | None,
        loss_sum: float = 0.0,
    ) -> Tensor | None:
        """Computes a microbatch's gradients, adds them to the sums, counts the microbatch in its stages and reports it.

        output: the output of the graph. gradient: of the loss sum with respect to `output`; None if `output` is the
        loss sum. Returns the gradient with respect to the entry, None at stage 0. Raises NonFinite, and adds nothing
        then.
        """
        first, stages, name = forward.first, self._stages_from(forward.first), microbatch.hex()
        parameters = [parameter for version in forward.versions for parameter in version.parameters]
        inputs = [forward.entry, *parameters] if first > 0 else parameters
        computed = list(torch.autograd.grad([output], inputs, None if gradient is None else [gradient]))
        norm = get_total_norm(computed, foreach=True)
        self._require_finite(float(norm), first, microbatch, "the gradient it computed")
        entry_gradient = computed.pop(0) if first > 0 else None
        torch._foreach_add_([tensor for stage in stages for tensor in stage.sum.tensors], computed)
        for stage, step_at_forward in zip(stages, forward.steps, strict=True):
            stage.count_microbatch(name, forward.tokens, loss_sum, step_at_forward)
        self._report(MicrobatchCounted(name, tuple(stage.number for stage in stages), forward.tokens))
        return entry_gradient

    def _require_finite(self, value: float, first: int, microbatch: MicrobatchId, what: str) -> None:
        """Raises NonFinite, and counts the microbatch as refused at stage `first`, when `value` is not finite.

        what: names the value in the texts.
        """
        if not math.isfinite(value):
            self.stages[first].count_refused(microbatch.hex(), f"{what} is not finite")
            raise NonFinite(f"{what} from stage {first} on is not finite; a lower optimizer.learning_rate may help")
