"""The stages of one span: forward, loss, backward, gradient sums. Everything here runs on the device thread."""

from __future__ import annotations

import hashlib
import math
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

from agora.core.sync_mode import StepEvent
from agora.model import RunLayer, StageModule, family_of, keep_graph
from agora.observe.events import MicrobatchCounted, Report
from agora.train import memory
from agora.train.activation_checkpointing import GraphBudget, GraphMeasure, checkpoint, measure_saved_bytes
from agora.train.device import has_native_bf16
from agora.train.objectives import TokenBatch, objective_of, row_log_probabilities
from agora.train.optimizer_offload import OptimizerOffload
from agora.train.stage import Stage
from agora.train.weight_prediction import predicts_weights
from agora.train.weight_versions import LIMIT_FACTOR, StashedForward, StashedForwards, WeightVersion

MAX_LOSS_SUM = 1e30  # A larger sum of losses counts as not finite: the message Processed cannot carry it


class NonFinite(LocalError):
    """Raised when this peer's own computation gives NaN or infinity from finite input; no gradient sum was changed."""

    code = "non-finite"


@dataclass(frozen=True, slots=True)
class FinishedMicrobatch:
    """The result of a microbatch that has passed the model's last stage.

    loss_sum: the summed loss; 0 for the purpose "reference".
    tokens: the microbatch's weight in a step.
    gradient: of loss_sum with respect to the boundary that entered [b, s, k]; None at stage 0 and when not trained.
    metrics: sums, see agora.core.metrics.
    log_probabilities: the sum over each row's supervised tokens, for the purpose "reference" only.
    """

    loss_sum: float
    tokens: int
    gradient: Tensor | None = None
    metrics: tuple[float, ...] = ()
    log_probabilities: tuple[float, ...] = ()


class SpanTrainer:
    """The stages of a span in training: runs forwards and backwards through them. A microbatch may enter at any stage.

    stages: the stages by number. stashed: the forward passes that wait for their backward pass.

    Optimizer steps may be taken between a forward and its backward. The manifest's `schedule.activations` decides which
    weights the backward then uses:

    | activations | kept of a forward      | gradient of the backward                                                  |
    |-------------|------------------------|---------------------------------------------------------------------------|
    | recompute   | its entry              | of a second forward, on the weights at the time of the backward           |
    | keep        | its entry, its graph   | of the first forward, on its weights; see weight_versions for the limit   |
    | auto        | as keep while the graphs of all microbatches in flight fit into memory, else as recompute          |

    A backward that follows its forward immediately uses a graph of all layers with "keep", and with "auto" if one such
    graph fits into memory. Otherwise autograd keeps one layer's graph at a time, and the backward runs each layer once
    more, see activation_checkpointing.

    The gradients of all parameters are computed and checked before any is added: an error never leaves a part of them
    in the sums.
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
        state_in_host: bool = False,
    ) -> None:
        """Builds the span's stages with their initial weights. Matrix products are in bf16 if has_native_bf16(device).

        in_flight: maximum number of microbatches that are usually between forward and backward; a forward beyond
        LIMIT_FACTOR times as many is refused. on_step: called with each step event, on the device thread. base_model:
        the folder of the base model, if the run has one. state_in_host: the optimizer's state is in host memory.
        Raises ManifestError for a model config that cannot be built, LocalError when this machine lacks a package or
        cannot read the weights.
        """
        self.span = span
        self.device = device
        self.objective = objective_of(manifest.objective)
        self._dropout = manifest.model.dropout
        self._report = report
        self._bf16 = has_native_bf16(device)
        self.graphs = GraphBudget(manifest.schedule.activations, device, in_flight)
        self.stashed = StashedForwards(LIMIT_FACTOR * in_flight)
        self.stages: dict[int, Stage] = {}
        family = family_of(manifest.model)
        for number in span.stages:
            module = family.build_stage(manifest.layers_of(number), manifest.seed, base_model)
            place = OptimizerOffload(device, state_in_host)
            self.stages[number] = Stage(number, module, place, manifest, self.stashed, report, on_step)
        weights_bytes = sum(stage.weights.current.flat.nbytes for stage in self.stages.values())
        self.predicts_weights = predicts_weights(manifest, weights_bytes, memory.available_bytes(device))
        if self.predicts_weights:
            for stage in self.stages.values():
                stage.predict_weights()

    def stage(self, number: int) -> Stage:
        """Returns stage `number`. Raises NotMyStage if it is not in this span."""
        if number not in self.stages:
            raise NotMyStage(f"stage {number} is not held here; this peer holds {self.span}")
        return self.stages[number]

    def take_due_steps(self) -> None:
        """Takes the step, or closes the share, of every stage for which that is due, see Stage.step_if_due."""
        for stage in self.stages.values():
            stage.step_if_due()

    # --- what a microbatch needs: forward, loss, backward

    def forward(
        self, microbatch: MicrobatchId, entry_stage: int, entry: Tensor, batch: TokenBatch, purpose: str
    ) -> tuple[Tensor, StashedForward | None]:
        """Runs stages `entry_stage` to the span's last; returns the boundary [b, s, k] that leaves the span, detached.

        entry: float32 [b, s, k], k values for each token, or token ids [b, s] at stage 0. purpose: as in the message
        Process; decides which weights are used, see `_run`. With "train", stashes the forward for the backward and
        returns it, too (otherwise None); raises Busy when too many are stashed, and NonFinite for a boundary that is
        not finite, whose microbatch is counted as refused.
        """
        if purpose != "train":
            with torch.no_grad():
                return self._run(microbatch, entry_stage, entry, batch, purpose), None
        self.stashed.require_room(microbatch, entry_stage)
        output, versions = self._run_for_training(microbatch, entry_stage, entry, batch)
        boundary = output.detach()
        self._require_finite(
            float(torch.linalg.vector_norm(boundary)), entry_stage, microbatch, "the boundary it computed"
        )
        graph = output if versions else None
        tokens, steps = self.objective.loss_weight(batch), self._steps_from(entry_stage)
        forward = StashedForward(entry_stage, entry, batch, tokens, steps, 0.0, graph, versions)
        self.stashed.add(microbatch, forward)
        return boundary, forward

    def run_last_stages(
        self,
        microbatch: MicrobatchId,
        entry_stage: int,
        entry: Tensor,
        batch: TokenBatch,
        purpose: str,
        references: Sequence[float] = (),
    ) -> FinishedMicrobatch:
        """Runs stages `entry_stage` to the model's last, and the loss; with the purpose "train" also the backward.

        The backward adds the microbatch's gradients to the sums, and counts the microbatch. With "reference" there is
        no loss, but the log-probability of each row. entry: float32 [b, s, k], or token ids [b, s] at stage 0. purpose,
        references: as in the message Process. Raises NonFinite for a loss or gradient that is not finite, or a loss
        above MAX_LOSS_SUM, and counts the microbatch as refused; raises ProtocolError for references that the objective
        does not take. After an error nothing was added.
        """
        tokens = self.objective.loss_weight(batch)
        trains = purpose == "train"
        run_layer = self._run_layer_for_gradients(microbatch, entry_stage, entry, batch) if trains else keep_graph
        versions = self._versions_from(entry_stage) if trains else ()
        with torch.set_grad_enabled(trains):
            logits = self._run(microbatch, entry_stage, entry, batch, purpose, run_layer, versions)
            if purpose == "reference":
                return self._reference(microbatch, entry_stage, logits, batch)
            loss, metrics = self.objective.loss(logits, batch, references)
            del logits  # the loss does not need them, and their gradient is as large as they are
        loss_sum = float(loss.detach())
        self._require_finite(
            loss_sum if abs(loss_sum) <= MAX_LOSS_SUM else math.inf, entry_stage, microbatch, "the loss"
        )
        if not trains:
            return FinishedMicrobatch(loss_sum, tokens, metrics=metrics)
        steps = self._steps_from(entry_stage)
        forward = StashedForward(entry_stage, entry, batch, tokens, steps, 0.0, loss, versions)
        gradient = self._add_gradients(microbatch, forward, loss, None, loss_sum)
        return FinishedMicrobatch(loss_sum, tokens, gradient, metrics)

    def _reference(
        self, microbatch: MicrobatchId, entry_stage: int, logits: Tensor, batch: TokenBatch
    ) -> FinishedMicrobatch:
        rows = tuple(row_log_probabilities(logits, batch.targets).tolist())
        self._require_finite(sum(rows), entry_stage, microbatch, "the reference's log-probability")
        return FinishedMicrobatch(0.0, self.objective.loss_weight(batch), log_probabilities=rows)

    def backward(
        self, microbatch: MicrobatchId, entry_stage: int, gradient: Tensor
    ) -> tuple[Tensor | None, StashedForward]:
        """Runs the backward of a stashed forward, adds its gradients to the sums, and counts the microbatch.

        If no graph was kept, runs the forward again first, on the current weights. gradient: of the loss sum with
        respect to the boundary that `forward` returned, float32 [b, s, k], finite. Returns the gradient with respect to
        the entry (None at stage 0), and the forward. Raises LocalError when no forward is stashed, NonFinite when a
        computed gradient is not finite; then nothing was added. The forward is not stashed any more, even after an
        error.
        """
        forward = self.stashed.take(microbatch, entry_stage)
        output = forward.output
        if output is None:
            run_layer = self._run_layer_for_gradients(microbatch, entry_stage, forward.entry, forward.batch)
            forward.versions = self._versions_from(entry_stage)
            again = microbatch, entry_stage, forward.entry, forward.batch, "train", run_layer, forward.versions
            with torch.enable_grad():
                output = self._run(*again)
        return self._add_gradients(microbatch, forward, output, gradient.to(output.dtype)), forward

    def _stages_from(self, entry_stage: int) -> list[Stage]:
        return [self.stages[number] for number in range(entry_stage, self.span.last + 1)]

    def _steps_from(self, entry_stage: int) -> tuple[int, ...]:
        return tuple(stage.step for stage in self._stages_from(entry_stage))

    def _versions_from(self, entry_stage: int, *, is_stashed: bool = False) -> tuple[WeightVersion, ...]:
        return tuple(
            stage.training_version(self.stashed.tokens_in(stage.number) if is_stashed else 0)
            for stage in self._stages_from(entry_stage)
        )

    def _run(
        self,
        microbatch: MicrobatchId,
        entry_stage: int,
        entry: Tensor,
        batch: TokenBatch,
        purpose: str,
        run_layer: RunLayer = keep_graph,
        versions: Sequence[WeightVersion] = (),
    ) -> Tensor:
        if entry_stage > 0 and torch.is_grad_enabled():
            entry.requires_grad_()
        hidden = entry
        stages = self._stages_from(entry_stage)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            for stage, version in zip(stages, versions or (stage.evaluated for stage in stages), strict=True):
                with self._mode_for(version.module, purpose, microbatch, stage.number):
                    hidden = version.module(hidden, batch.inputs, batch.segments, run_layer)
        return hidden

    @contextmanager
    def _mode_for(self, module: StageModule, purpose: str, microbatch: MicrobatchId, stage: int) -> Iterator[None]:
        # Dropout's random seed is a hash of microbatch and stage, so that a second forward drops the same values.
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
        self, microbatch: MicrobatchId, entry_stage: int, entry: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, tuple[WeightVersion, ...]]:
        versions = self._versions_from(entry_stage, is_stashed=True)
        if self.graphs.must_measure(entry_stage):
            return self._measure_graph(microbatch, entry_stage, entry, batch, versions), ()
        without_second = [stage.weights for stage in self.stages.values() if stage.weights.previous is None]
        second_version = sum(weights.current.flat.nbytes for weights in without_second)
        keeps_graph = self.graphs.keeps_another(entry_stage, self.stashed.count_graphs(), second_version)
        with torch.set_grad_enabled(keeps_graph):
            output = self._run(microbatch, entry_stage, entry, batch, "train", keep_graph, versions)
        return output, versions if keeps_graph else ()

    def _measure_graph(
        self,
        microbatch: MicrobatchId,
        entry_stage: int,
        entry: Tensor,
        batch: TokenBatch,
        versions: Sequence[WeightVersion],
    ) -> Tensor:
        weights = {p.untyped_storage().data_ptr() for version in versions for p in version.module.parameters()}
        measure = GraphMeasure(weights)
        output, others = measure_saved_bytes(
            lambda: self._run(microbatch, entry_stage, entry, batch, "train", measure.run_layer, versions), weights
        )
        self.graphs.bytes_by_entry[entry_stage] = sum(measure.layer_bytes) + others
        return output.detach()

    def _run_layer_for_gradients(
        self, microbatch: MicrobatchId, entry_stage: int, entry: Tensor, batch: TokenBatch
    ) -> RunLayer:
        if self.graphs.must_measure(entry_stage):
            self._measure_graph(microbatch, entry_stage, entry, batch, self._versions_from(entry_stage))
        return keep_graph if self.graphs.keeps_one(entry_stage) else checkpoint

    def _add_gradients(
        self,
        microbatch: MicrobatchId,
        forward: StashedForward,
        output: Tensor,
        gradient: Tensor | None,
        loss_sum: float = 0.0,
    ) -> Tensor | None:
        entry_stage, name = forward.entry_stage, microbatch.hex()
        stages = self._stages_from(entry_stage)
        parameters = [parameter for version in forward.versions for parameter in version.parameters]
        inputs = [forward.entry, *parameters] if entry_stage > 0 else parameters
        computed = list(torch.autograd.grad([output], inputs, None if gradient is None else [gradient]))
        norm = get_total_norm(computed, foreach=True)
        self._require_finite(float(norm), entry_stage, microbatch, "the gradient it computed")
        entry_gradient = computed.pop(0) if entry_stage > 0 else None
        torch._foreach_add_([tensor for stage in stages for tensor in stage.sum.tensors], computed)
        for stage, step, version in zip(stages, forward.steps, forward.versions, strict=True):
            predicted = stage.prediction is not None and stage.prediction.owns(version)
            stage.record_microbatch(name, forward.tokens, loss_sum, step, is_predicted=predicted)
        self._report(MicrobatchCounted(name, tuple(stage.number for stage in stages), forward.tokens))
        return entry_gradient

    def _require_finite(self, value: float, entry_stage: int, microbatch: MicrobatchId, what: str) -> None:
        if not math.isfinite(value):
            self.stages[entry_stage].record_refusal(microbatch.hex(), f"{what} is not finite")
            raise NonFinite(
                f"{what} from stage {entry_stage} on is not finite; a lower optimizer.learning_rate may help"
            )
