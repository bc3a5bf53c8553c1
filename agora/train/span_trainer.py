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
from agora.train.state_place import StatePlace
from agora.train.weight_prediction import predicts_weights
from agora.train.weight_versions import LIMIT_FACTOR, StashedForward, StashedForwards, WeightVersion

MEASURE_MEMORY_S = 1.0  # for which a measurement of the available memory is used
MAX_LOSS_SUM = 1e30
"""A larger sum of losses counts as not finite: the message Processed cannot carry it."""


class NonFinite(LocalError):
    """Raised when this peer's own computation gives NaN or infinity from finite input; no gradient sum was changed."""

    code = "non-finite"


@dataclass(frozen=True, slots=True)
class FinishedMicrobatch:
    """The result of a microbatch that has passed the model's last stage.

    loss_sum: the summed loss; 0 for the purpose "reference".
    tokens: the microbatch's weight in a step.
    gradient: of loss_sum with respect to the boundary that entered [b, s, k]; None at stage 0 and when not trained.
    metrics: sums, see agora.metrics.
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
    more, see layer_graphs.

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
        self._activations = manifest.schedule.activations
        self._in_flight = in_flight
        self._available_bytes, self._measured_at = 0, -MEASURE_MEMORY_S
        self.activation_bytes: dict[int, int] = {}
        """Bytes of one microbatch's graph, by the stage that it entered, as measured on the first one ("auto" only)."""
        self.stashed = StashedForwards(LIMIT_FACTOR * in_flight)
        self.stages: dict[int, StageReplica] = {}
        family = family_of(manifest.model)
        for number in span.stages:
            module = family.build_stage(manifest.layers_of(number), manifest.seed, base_model)
            place = StatePlace(device, state_in_host)
            self.stages[number] = StageReplica(number, module, place, manifest, self.stashed, report, on_step)
        weights_bytes = sum(stage.weights.current.flat.nbytes for stage in self.stages.values())
        if predicts_weights(manifest, weights_bytes, memory.available_bytes(device)):
            for stage in self.stages.values():
                stage.predict_weights()

    def stage(self, number: int) -> StageReplica:
        """Returns stage `number`. Raises NotMyStage if it is not in this span."""
        if number not in self.stages:
            raise NotMyStage(f"stage {number} is not held here; this peer holds {self.span}")
        return self.stages[number]

    def take_due_steps(self) -> None:
        """Takes the step, or closes the share, of every stage for which that is due, see TrainedStage.step_if_due."""
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
        run_layer = (
            self._run_layer_for_gradients(microbatch, entry_stage, entry, batch) if purpose == "train" else keep_graph
        )
        with torch.set_grad_enabled(purpose == "train"):
            logits = self._run(microbatch, entry_stage, entry, batch, purpose, run_layer)
            if purpose == "reference":
                return self._reference(microbatch, entry_stage, logits, batch)
            loss, metrics = self.objective.loss(logits, batch, references)
            del logits  # the loss does not need them, and their gradient is as large as they are
        loss_sum = float(loss.detach())
        self._require_finite(
            loss_sum if abs(loss_sum) <= MAX_LOSS_SUM else math.inf, entry_stage, microbatch, "the loss"
        )
        if purpose != "train":
            return FinishedMicrobatch(loss_sum, tokens, metrics=metrics)
        versions = self._versions_from(entry_stage)
        steps = self._steps_from(entry_stage)
        forward = StashedForward(entry_stage, entry, batch, tokens, steps, 0.0, loss, versions)
        gradient = self._add_gradients(microbatch, forward, loss, None, loss_sum)
        return FinishedMicrobatch(loss_sum, tokens, gradient, metrics)

    def _reference(
        self, microbatch: MicrobatchId, entry_stage: int, logits: Tensor, batch: TokenBatch
    ) -> FinishedMicrobatch:
        """Returns the result for the purpose "reference": the summed log-probability of each row's supervised tokens.

        logits: of the reference model [b, s, v]. Raises NonFinite.
        """
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
            with torch.enable_grad():
                output = self._run(microbatch, entry_stage, forward.entry, forward.batch, "train", run_layer)
                forward.versions = self._versions_from(entry_stage)
        return self._add_gradients(microbatch, forward, output, gradient.to(output.dtype)), forward

    def _stages_from(self, entry_stage: int) -> list[StageReplica]:
        """Returns the span's stages from `entry_stage` on."""
        return [self.stages[number] for number in range(entry_stage, self.span.last + 1)]

    def _steps_from(self, entry_stage: int) -> tuple[int, ...]:
        """Returns how many steps each of the span's stages from `entry_stage` on has taken."""
        return tuple(stage.step for stage in self._stages_from(entry_stage))

    def _versions_from(self, entry_stage: int) -> tuple[WeightVersion, ...]:
        """Returns the weights on which each of the span's stages from `entry_stage` on trains now."""
        return tuple(stage.training_version for stage in self._stages_from(entry_stage))

    def _run(
        self,
        microbatch: MicrobatchId,
        entry_stage: int,
        entry: Tensor,
        batch: TokenBatch,
        purpose: str,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        """Runs stages `entry_stage` to the span's last; returns their output: a boundary, or the logits.

        | purpose   | weights                                     |
        |-----------|---------------------------------------------|
        | train     | those of TrainedStage.training_version      |
        | evaluate  | those of TrainedStage.evaluated             |
        | reference | those of evaluate, but adapters are off     |

        With gradients enabled, an `entry` that is a boundary is set to require a gradient.
        """
        if entry_stage > 0 and torch.is_grad_enabled():
            entry.requires_grad_()
        hidden = entry
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            for stage in self._stages_from(entry_stage):
                version = stage.training_version if purpose == "train" else stage.evaluated
                with self._mode_for(version.module, purpose, microbatch, stage.number):
                    hidden = version.module(hidden, batch.inputs, batch.segments, run_layer)
        return hidden

    @contextmanager
    def _mode_for(self, module: Stage, purpose: str, microbatch: MicrobatchId, stage: int) -> Iterator[None]:
        """Context manager: sets `module` up for `purpose`: dropout only for "train", no adapters for "reference".

        Dropout's random seed is a hash of microbatch and stage, so that a second forward drops the same values. At the
        end torch's random state is what it was before, and adapters are on again; the training flag stays.
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
        self, microbatch: MicrobatchId, entry_stage: int, entry: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, tuple[WeightVersion, ...]]:
        """Calls `_run` for a later backward; returns the output, and the weights of its graph, () without a graph.

        Keeps the graph or not, by the class's table. With "auto", the first forward that enters at `entry_stage`
        measures the graph's bytes and keeps no graph.
        """
        if self._activations == "auto" and entry_stage not in self.activation_bytes:
            return self._measure_graph(microbatch, entry_stage, entry, batch), ()
        versions = self._versions_from(entry_stage)
        keeps_graph = self._must_keep_graph(entry_stage)
        with torch.set_grad_enabled(keeps_graph):
            return self._run(microbatch, entry_stage, entry, batch, "train"), versions if keeps_graph else ()

    def _measure_graph(self, microbatch: MicrobatchId, entry_stage: int, entry: Tensor, batch: TokenBatch) -> Tensor:
        """Calls `_run` with one layer's graph at a time; returns the output without a graph.

        Records the bytes of all these graphs together in activation_bytes[entry_stage], without those of the weights.
        """
        versions = self._versions_from(entry_stage)
        weights = {p.untyped_storage().data_ptr() for version in versions for p in version.module.parameters()}
        measure = GraphMeasure(weights)
        output, others = memory.measure_saved_bytes(
            lambda: self._run(microbatch, entry_stage, entry, batch, "train", measure.run_layer), weights
        )
        self.activation_bytes[entry_stage] = sum(measure.layer_bytes) + others
        return output.detach()

    def _run_layer_for_gradients(
        self, microbatch: MicrobatchId, entry_stage: int, entry: Tensor, batch: TokenBatch
    ) -> RunLayer:
        """Returns the RunLayer for a forward with an immediate backward: keep_graph or repeat_in_backward.

        That is keep_graph with "keep", and with "auto" if the graph fits into memory. With "auto", first runs the
        forward once more to measure the graph, if none was measured for `entry_stage` yet.
        """
        if self._activations == "auto" and entry_stage not in self.activation_bytes:
            self._measure_graph(microbatch, entry_stage, entry, batch)
        if self._activations == "auto":
            fits = memory.graphs_fit(self.activation_bytes[entry_stage], 1, 0, self._available_memory())
        else:
            fits = self._activations == "keep"
        return keep_graph if fits else repeat_in_backward

    def _must_keep_graph(self, entry_stage: int) -> bool:
        """Returns whether to keep the graph of a forward that enters at `entry_stage`, rather than recompute it.

        With "keep" always, with "recompute" never; with "auto" if memory suffices for the graphs of all microbatches in
        flight that are not kept yet, at least one, and for a second version of the weights of each stage that has none.
        "auto" needs activation_bytes[entry_stage].
        """
        if self._activations != "auto":
            return self._activations == "keep"
        graphs_to_come = max(self._in_flight - self.stashed.count_graphs(), 1)
        without_second = [stage.weights for stage in self.stages.values() if stage.weights.previous is None]
        second_version = sum(weights.current.flat.nbytes for weights in without_second)
        graph_bytes, available = self.activation_bytes[entry_stage], self._available_memory()
        return memory.graphs_fit(graph_bytes, graphs_to_come, second_version, available)

    def _available_memory(self) -> int:
        """Returns how many bytes the device has available, as measured at most MEASURE_MEMORY_S ago."""
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
        """Computes a microbatch's gradients, adds them to the sums, and counts the microbatch in each of its stages.

        Then reports MicrobatchCounted. forward: its entry, weights and steps are used. output: of the forward's graph.
        gradient: of the loss sum with respect to `output`; None if `output` is the loss sum. loss_sum: for the counts.
        Returns the gradient with respect to the entry, None at stage 0. Raises NonFinite if a gradient is not finite,
        and then adds nothing and counts the microbatch as refused.
        """
        entry_stage, name = forward.entry_stage, microbatch.hex()
        stages = self._stages_from(entry_stage)
        parameters = [parameter for version in forward.versions for parameter in version.parameters]
        inputs = [forward.entry, *parameters] if entry_stage > 0 else parameters
        computed = list(torch.autograd.grad([output], inputs, None if gradient is None else [gradient]))
        norm = get_total_norm(computed, foreach=True)
        self._require_finite(float(norm), entry_stage, microbatch, "the gradient it computed")
        entry_gradient = computed.pop(0) if entry_stage > 0 else None
        torch._foreach_add_([tensor for stage in stages for tensor in stage.sum.tensors], computed)
        for stage, step_at_forward in zip(stages, forward.steps, strict=True):
            stage.record_microbatch(name, forward.tokens, loss_sum, step_at_forward)
        self._report(MicrobatchCounted(name, tuple(stage.number for stage in stages), forward.tokens))
        return entry_gradient

    def _require_finite(self, value: float, entry_stage: int, microbatch: MicrobatchId, what: str) -> None:
        """Raises NonFinite, and counts the microbatch as refused at stage `entry_stage`, when `value` is not finite.

        what: the value's name in the event and the error.
        """
        if not math.isfinite(value):
            self.stages[entry_stage].record_refusal(microbatch.hex(), f"{what} is not finite")
            raise NonFinite(
                f"{what} from stage {entry_stage} on is not finite; a lower optimizer.learning_rate may help"
            )
