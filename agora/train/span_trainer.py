"""The stages of one span: forward, loss, backward, gradient sums. Computes on the device thread."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch
from agora_protocol.errors import LocalError, NotMyStage, ProtocolError
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from agora.core.live_manifest import LiveManifest
from agora.core.span_work import ForwardKey
from agora.core.step_instructions import StepEvent
from agora.model import RunLayer, StageModule, family_of, keep_graph
from agora.observe.events import MicrobatchCounted, Report
from agora.train import memory
from agora.train.activation_checkpointing import (
    GraphBudget,
    GraphMeasure,
    Kept,
    checkpoint,
    measure_saved_bytes,
    replay,
)
from agora.train.compiled_layers import LayerCompiler
from agora.train.device import is_out_of_memory, product_dtype
from agora.train.gradients import LossScale, add_gradients
from agora.train.objectives import Head, objective_of, row_log_probabilities
from agora.train.optimizer_offload import OptimizerOffload
from agora.train.stage import Stage
from agora.train.weight_prediction import predicts_weights
from agora.train.weight_versions import MAX_TIMES_IN_FLIGHT, DecodedWork, StashedForward, StashedForwards, WeightVersion

R = TypeVar("R")

MAX_LOSS_SUM = 1e30  # A larger sum of losses counts as not finite: the message Processed cannot carry it


class NonFinite(LocalError):
    """This peer's own computation gave NaN or infinity from finite input; no gradient sum was changed."""

    code = "non-finite"


@dataclass(frozen=True, slots=True)
class FinishedMicrobatch:
    """The result of a microbatch that has passed the model's last stage."""

    loss_sum: float  # 0 for the purpose "reference"
    tokens: int  # the microbatch's weight in a step
    gradient: Tensor | None = None  # of loss_sum, for the boundary that entered [b, s, k]; None at stage 0 or untrained
    metrics: tuple[float, ...] = ()  # sums, see agora.core.metrics
    log_probabilities: tuple[float, ...] = ()  # of each row's supervised tokens; for "reference" only


@dataclass(frozen=True, slots=True)
class LaunchedPass(Generic[R]):
    """A pass that the device still computes.

    output: what leaves the span, [b, s, k]: the boundary, or the gradient for the one that entered; None at its ends.
    values: float32 [n] on the device, which decide whether the pass counts; None: it does.
    finish: called with `values` as the host reads them; returns the result. Before it nothing is added to any sum.
    give_up: to be called instead if the device has failed.
    """

    output: Tensor | None
    values: Tensor | None
    finish: Callable[[Sequence[float]], R]
    give_up: Callable[[], None] = lambda: None

    def wait(self) -> R:
        """Returns the result once the device has computed it."""
        return self.finish([] if self.values is None else self.values.tolist())


class _Gradients(NamedTuple):
    # Of one microbatch, not yet added to the sums.
    forward: StashedForward
    are_predicted: tuple[bool, ...]  # for each stage, whether they are at predicted weights
    of_entry: Tensor | None  # [b, s, k]; None at stage 0
    of_parameters: list[Tensor]
    norm: Tensor  # of all of them, a scalar
    scale: float = 1.0  # those by parameters are multiplied by it


def _keep_outputs_in(outputs: list[Tensor]) -> RunLayer:
    def run_layer(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        outputs.append(compute(hidden))
        return outputs[-1]

    return run_layer


class StagesByNumber(dict[int, Stage]):
    """The stages of a span by number. Looking up another one raises NotMyStage."""

    def __missing__(self, number: int) -> NoReturn:
        raise NotMyStage(f"stage {number} is not held here; this peer holds {Span(min(self), max(self))}")


class SpanTrainer:
    """The stages of a span in training: runs forwards and backwards through them. A microbatch may enter at any stage.

    stages: by number. stashed: the forward passes that wait for their backward pass.

    Optimizer steps may be taken between a forward and its backward. The manifest's `schedule.activations` decides which
    weights the backward then uses:

    | activations | kept of a forward      | gradient of the backward                                                  |
    |-------------|------------------------|---------------------------------------------------------------------------|
    | recompute   | its entry              | of a second forward, on the weights at the time of the backward           |
    | keep        | its entry, its graph   | of the first forward, on its weights; see weight_versions for the limit   |
    | auto        | as keep for as many    | as keep for these, as recompute for the others                            |
    |             | microbatches as fit    |                                                                           |

    With "auto", where the memory has no room for a graph of all layers, the inputs of the layers are kept in its place,
    on the weights of the forward; each layer runs again in the backward. With dropout they are not: a layer would need
    the random state of its first run, too.
    With "auto", when memory falls short, the newest graphs are given up, whose backwards come last: these run the
    forward again. A backward that follows its forward immediately uses a graph of all layers with "keep", and with
    "auto" if one more such graph fits into memory. Otherwise autograd keeps one layer's graph at a time, and the
    backward runs each layer once more, see activation_checkpointing; but not the last one of a second forward, whose
    graph is the first to be needed.
    When memory has not sufficed, kept graphs are dropped, see free_memory.
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
        compiler: LayerCompiler | None = None,
        live: LiveManifest | None = None,
        draws: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Builds the span's stages with their initial weights.

        in_flight: microbatches that are usually between forward and backward; a forward beyond MAX_TIMES_IN_FLIGHT
        times as many is refused. on_step: called with each step event, on the device thread. compiler: None: layers are
        not compiled; nor are those with dropout. live: the manifest in force at each step; None: `manifest` at every
        step. draws: False leaves the weights zeros until `draw_initial_weights`, or until a state is loaded. dtype: in
        which matrix products are computed; None: as product_dtype says.

        Raises ManifestError for a model config that cannot be built, LocalError when this machine lacks a package or
        cannot read the weights.
        """
        leaf = torch.zeros((), requires_grad=True)
        self._oldest_graph = (leaf, leaf.view(()), torch.zeros(()))
        self.span = span
        self.device = device
        self.objective = objective_of(manifest.objective)
        self._vocabulary = manifest.model.vocabulary
        self._dropout = manifest.model.dropout
        self.compiler = None if manifest.model.dropout else compiler
        self._report = report
        self.dtype = dtype or product_dtype(device)
        self.loss_scale = LossScale(self.dtype)
        self.graphs = GraphBudget(manifest.schedule.activations, device)
        self.stashed = StashedForwards(MAX_TIMES_IN_FLIGHT * in_flight)
        self.stages = StagesByNumber()
        self._layer_counts = {number: len(manifest.layers_of(number)) for number in span.stages}
        family = family_of(manifest.model)
        self._fill_trained = partial(family.fill_trained, seed=manifest.seed, base_model=base_model)
        for number in span.stages:
            layers, needs_values = manifest.layers_of(number), manifest.objective.kind == "dpo"
            build = family.build_stage if needs_values else family.build_empty_stage
            module = build(layers, manifest.seed, base_model)
            if needs_values:
                module.keep_reference()
            offload = OptimizerOffload(device, state_in_host)
            self.stages[number] = Stage(
                number, module, offload, manifest, self.stashed, report, on_step, self.dtype, live
            )
            if draws:
                self.draw_initial_weights(number)
        weights_bytes = sum(stage.weights.current.flat.nbytes for stage in self.stages.values())
        self.predicts_weights = predicts_weights(manifest, weights_bytes, memory.available_bytes(device))
        if self.predicts_weights:
            for stage in self.stages.values():
                stage.enable_prediction()

    def draw_initial_weights(self, stage: int) -> None:
        """Gives a held stage the weights with which the run began; does nothing if it was built with them.

        Raises LocalError when this machine cannot read them.
        """
        self.stages[stage].draw_initial_weights(self._fill_trained)

    def take_due_steps(self) -> None:
        """Calls Stage.step_or_close_share on every stage."""
        for stage in self.stages.values():
            stage.step_or_close_share()

    # --- what a microbatch needs: forward, loss, backward

    def forward(self, work: DecodedWork) -> tuple[Tensor, StashedForward | None]:
        """Runs the stages from `work.entry_stage` to the span's last; returns the boundary [b, s, k] that leaves them.

        For training, stashes the forward for the backward and returns it, too (otherwise None); raises Busy when too
        many are stashed, and NonFinite for a boundary that is not finite, whose microbatch is counted as refused.
        """
        return self.launch_forward(work).wait()

    def launch_forward(self, work: DecodedWork) -> LaunchedPass[tuple[Tensor, StashedForward | None]]:
        """As `forward`, which waits for the result. The forward is stashed already: steps must not forget it."""
        if not work.is_training:
            with torch.no_grad():
                evaluated = self._run(work)
            return LaunchedPass(evaluated, None, lambda values: (evaluated, None))
        self.stashed.require_room(work.key)
        stages, outputs = self._stages_of(work), list[Tensor]()
        # Its backward comes after those of the microbatches that are stashed already.
        versions = tuple(stage.training_version(self.stashed.tokens_in(stage.number)) for stage in stages)
        if self.graphs.must_measure(work.entry_stage):
            output, kept = self._measure_graph(work, versions), Kept.NOTHING
        else:
            # Of the stages without a second version of their weights, which a step before the backward would make.
            single = [stage.weights.current for stage in self.stages.values() if stage.weights.previous is None]
            version_bytes = sum(version.own_bytes for version in single)
            kept_bytes = self._give_up_graphs_beyond_limit()
            kept = self.graphs.choose(work.entry_stage, kept_bytes, version_bytes)
            run_layer = _keep_outputs_in(outputs) if kept is Kept.INPUTS else keep_graph
            with torch.set_grad_enabled(kept is Kept.GRAPH):
                output = self._run(work, run_layer, versions)
        boundary = output.detach()
        norm = torch.linalg.vector_norm(boundary, dtype=torch.float32).reshape(1)
        forward = StashedForward(
            work,
            self.objective.loss_weight(work.batch),
            steps=tuple(stage.step for stage in stages),
            output=output if kept is Kept.GRAPH else None,
            versions=() if kept is Kept.NOTHING else versions,
            layer_outputs=tuple(outputs[:-1]),
            graph_bytes=self.graphs.bytes_of(work.entry_stage, kept),
        )
        self.stashed.add(forward)

        def finish(values: Sequence[float]) -> tuple[Tensor, StashedForward]:
            if not math.isfinite(values[0]):
                self.stashed.forget(work.key, only=forward)
            self._require_finite(values[0], work, "the boundary it computed")
            return boundary, forward

        return LaunchedPass(boundary, norm, finish, partial(self.stashed.forget, work.key, only=forward))

    def run_last_stages(
        self, work: DecodedWork, before_adding: Callable[[Tensor | None], None] = lambda gradient: None
    ) -> FinishedMicrobatch:
        """Runs the stages from `work.entry_stage` to the model's last, the loss, and for training also the backward.

        The backward adds the microbatch's gradients to the sums, and counts the microbatch. For "reference" there is no
        loss, but the log-probability of each row. Raises NonFinite for a loss or gradient that is not finite, or a loss
        above MAX_LOSS_SUM, and counts the microbatch as refused; raises ProtocolError for references that the objective
        does not take. before_adding: called with the gradient for the boundary that entered, before the gradients are
        added. After an error, also of before_adding, nothing was added.
        """
        launched = self.launch_last_stages(work)
        before_adding(launched.output)
        return launched.wait()

    def launch_last_stages(self, work: DecodedWork) -> LaunchedPass[FinishedMicrobatch]:
        """As `run_last_stages`, which waits for the result; nothing was added yet."""
        tokens = self.objective.loss_weight(work.batch)
        if work.purpose == "reference":
            return self._launch_reference(work, tokens)
        if not work.is_training:
            with torch.no_grad():
                loss, metrics, _ = self._run_to_loss(work)

            def finish_evaluation(values: Sequence[float]) -> FinishedMicrobatch:
                loss_sum, *sums = values
                self._require_plausible_loss(loss_sum, work)
                return FinishedMicrobatch(loss_sum, tokens, metrics=tuple(sums))

            return LaunchedPass(None, torch.stack([loss, *metrics]), finish_evaluation)
        steps = tuple(stage.step for stage in self._stages_of(work))
        while True:
            loss, metrics, versions = self._run_to_loss(work)
            gradients = self._compute_gradients(StashedForward(work, tokens, steps, loss, versions))
            results = [loss.detach(), *metrics]
            if self.loss_scale.accepts(gradients.norm):
                break
            del gradients, loss
        gradients.forward.drop_graph()

        def finish(values: Sequence[float]) -> FinishedMicrobatch:
            loss_sum, *sums, norm = values
            self._require_plausible_loss(loss_sum, work)
            self._add(gradients, norm, loss_sum)
            return FinishedMicrobatch(loss_sum, tokens, gradients.of_entry, tuple(sums))

        return LaunchedPass(gradients.of_entry, torch.stack([*results, gradients.norm]), finish)

    def _launch_reference(self, work: DecodedWork, tokens: int) -> LaunchedPass[FinishedMicrobatch]:
        with torch.no_grad():
            hidden = self._run(work)
            with self._head_for(work, ()) as head:
                rows = row_log_probabilities(head, hidden, work.batch)

        def finish(values: Sequence[float]) -> FinishedMicrobatch:
            self._require_finite(sum(values), work, "the reference's log-probability")
            return FinishedMicrobatch(0.0, tokens, log_probabilities=tuple(values))

        return LaunchedPass(None, rows, finish)

    def _run_to_loss(self, work: DecodedWork) -> tuple[Tensor, tuple[Tensor, ...], tuple[WeightVersion, ...]]:
        with torch.set_grad_enabled(work.is_training):
            hidden, versions = self._run_for_gradients(work) if work.is_training else (self._run(work), ())
            with self._head_for(work, versions) as head:
                loss, metrics = self.objective.loss(head, hidden, work.batch, work.references)
        return loss, metrics, versions

    def backward(
        self,
        key: ForwardKey,
        gradient: Tensor,
        before_adding: Callable[[Tensor | None], None] = lambda gradient: None,
        check_received: Callable[[float], None] = lambda norm: None,
    ) -> tuple[Tensor | None, StashedForward]:
        """Runs the backward of a stashed forward, adds its gradients to the sums, and counts the microbatch.

        If no graph was kept, runs the forward again first, on the current weights. gradient: of the loss sum with
        respect to the boundary that `forward` returned, float32 [b, s, k], finite. Returns the gradient with respect to
        the entry (None at stage 0), and the forward. before_adding: called with that gradient before any is added.
        check_received: called with the norm of `gradient` before any is added; raises ProtocolError to refuse it.
        Raises LocalError when no forward is stashed, NonFinite when a computed gradient is not finite; after an error,
        also of the callbacks, nothing was added. The forward is not stashed any more, even after an error, except when
        memory has not sufficed or the gradient was refused: it then waits without a graph for another call.
        """
        launched = self.launch_backward(key, gradient, before_adding, check_received)
        return launched.output, launched.wait()

    def launch_backward(
        self,
        key: ForwardKey,
        gradient: Tensor,
        before_adding: Callable[[Tensor | None], None],
        check_received: Callable[[float], None],
    ) -> LaunchedPass[StashedForward]:
        """As `backward`, which waits for the result; nothing was added yet. The result is the forward.

        It stays stashed until then, but its graph is used up.
        """
        forward = self.stashed.find(key)
        with self._for_another_call(key, forward):
            if forward.output is None:
                with torch.enable_grad():
                    if forward.layer_outputs:
                        forward.output = self._replay(forward)
                    else:
                        forward.output, forward.versions = self._run_for_gradients(forward.work, keeps_last_layer=True)
            gradients = self._compute_gradients(forward, gradient)
            while not self.loss_scale.accepts(gradients.norm):
                gradients = self._compute_gradients(forward, gradient)
            before_adding(gradients.of_entry)
            values = torch.stack([torch.linalg.vector_norm(gradient), gradients.norm])
        forward.drop_graph()

        def finish(values: Sequence[float]) -> StashedForward:
            with self._for_another_call(key, forward):
                received, norm = values
                check_received(received)
                self._add(gradients, norm)
            self.stashed.forget(key, only=forward)
            return forward

        return LaunchedPass(gradients.of_entry, values, finish, partial(self.stashed.forget, key, only=forward))

    @contextmanager
    def _for_another_call(self, key: ForwardKey, forward: StashedForward) -> Iterator[None]:
        # What becomes of a stashed forward whose backward fails.
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, ProtocolError):
                forward.drop_graph()  # the failed backward may have freed a part of it
            else:
                self.stashed.forget(key, only=forward)
            raise

    def free_memory(self, everything: bool) -> None:
        """Drops the newer half of the kept graphs, or with `everything` all, and gives freed memory to the device.

        Their backwards run the forward again.
        """
        self.graphs.record_shortage(self.stashed.graph_bytes)
        kept = self.stashed.count_graphs()
        self.stashed.drop_graphs(kept if everything else (kept + 1) // 2)
        # A backward that failed on the CPU leaves its next nodes, with what they saved, in autograd's queue of this
        # thread, behind all newer ones. A backward of the oldest graph comes after them, and so clears the queue.
        leaf, output, gradient = self._oldest_graph
        torch.autograd.grad([output], [leaf], [gradient], retain_graph=True)
        for stage in self.stages.values():
            stage.free_memory()
        memory.give_back_freed_memory()

    def _give_up_graphs_beyond_limit(self) -> int:
        # Returns how many bytes the graphs take that are kept.
        kept_bytes = self.stashed.graph_bytes
        if (excess := self.graphs.excess_bytes(kept_bytes)) <= 0:
            return kept_bytes
        self.stashed.drop_graph_bytes(excess)
        return self.stashed.graph_bytes

    def _stages_of(self, work: DecodedWork) -> list[Stage]:
        return [self.stages[number] for number in range(work.entry_stage, self.span.last + 1)]

    def _run(
        self, work: DecodedWork, run_layer: RunLayer = keep_graph, versions: Sequence[WeightVersion] = ()
    ) -> Tensor:
        if work.entry_stage > 0 and torch.is_grad_enabled():
            work.entry.requires_grad_()
        hidden = work.entry
        stages = self._stages_of(work)
        if self.compiler is not None:
            run_layer = self.compiler.wrap(run_layer)
        with self._autocast():
            # Without versions, the weights that evaluations use: the moving average, where the run keeps one.
            for stage, version in zip(stages, versions or (stage.evaluation_weights for stage in stages), strict=True):
                with self._mode_for(version.module, work, stage.number):
                    hidden = version.module.run_layers(hidden, work.batch.inputs, work.batch.segments, run_layer)
        return hidden

    def _autocast(self) -> torch.autocast:
        # It converts what layers compute; the weights are of that dtype already.
        is_on = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if is_on else None, enabled=is_on)

    @contextmanager
    def _head_for(self, work: DecodedWork, versions: Sequence[WeightVersion]) -> Iterator[Head]:
        # Of the weights that the last stage's layers have run on.
        stage = self.stages[self.span.last]
        module = (versions[-1] if versions else stage.evaluation_weights).module
        with self._autocast(), self._mode_for(module, work, stage.number):
            yield Head(module.logits, module.head_modules(), self._vocabulary, self.loss_scale.value)

    @contextmanager
    def _mode_for(self, module: StageModule, work: DecodedWork, stage: int) -> Iterator[None]:
        with ExitStack() as stack:
            if work.purpose == "reference":
                stack.enter_context(module.as_reference())
            if self._dropout:
                module.train(work.is_training)
                stack.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
                # Seeded by microbatch and stage, so that a second forward drops the same values.
                digest = hashlib.sha256(b"agora dropout 1\0" + work.microbatch + stage.to_bytes(4, "big")).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            yield

    def _run_for_gradients(
        self, work: DecodedWork, *, keeps_last_layer: bool = False
    ) -> tuple[Tensor, tuple[WeightVersion, ...]]:
        # A run whose backward follows at once: its output, and the weights that it used. keeps_last_layer: the last
        # layer's graph is kept in any case; not where a loss follows, which takes memory beside it.
        versions = tuple(stage.training_version() for stage in self._stages_of(work))
        if self.graphs.must_measure(work.entry_stage):
            self._measure_graph(work, versions)
        if self.graphs.keeps_one(work.entry_stage, self._give_up_graphs_beyond_limit()):
            return self._run(work, keep_graph, versions), versions
        layers_left = sum(self._layer_counts[stage.number] for stage in self._stages_of(work))

        def run_layer(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            nonlocal layers_left
            layers_left -= 1
            is_kept = keeps_last_layer and layers_left == 0
            return (keep_graph if is_kept else checkpoint)(layer, compute, hidden)

        return self._run(work, run_layer, versions), versions

    def _replay(self, forward: StashedForward) -> Tensor:
        # A run of which only the last layer is computed, whose backward comes first; see Kept.INPUTS.
        outputs = iter(forward.layer_outputs)

        def run_layer(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            output = next(outputs, None)
            return compute(hidden) if output is None else replay(layer, compute, hidden, output)

        return self._run(forward.work, run_layer, forward.versions)

    def _measure_graph(self, work: DecodedWork, versions: Sequence[WeightVersion]) -> Tensor:
        # Layer by layer, so that measuring never takes more memory than one layer's graph.
        weights = {p.untyped_storage().data_ptr() for version in versions for p in version.module.parameters()}
        measure = GraphMeasure(weights)
        output, others = measure_saved_bytes(lambda: self._run(work, measure.run_layer, versions), weights)
        inputs = 0 if self._dropout else sum(measure.output_bytes[:-1])
        layer_bytes = max(measure.layer_bytes, default=0) + others
        self.graphs.record_measured(work.entry_stage, sum(measure.layer_bytes) + others, inputs, layer_bytes)
        return output.detach()

    def _compute_gradients(self, forward: StashedForward, gradient: Tensor | None = None) -> _Gradients:
        # Without `gradient`, the forward's output is the loss itself.
        work, output = forward.work, forward.output
        assert output is not None
        parameters = [parameter for version in forward.versions for parameter in version.parameters]
        inputs = [work.entry, *parameters] if work.entry_stage > 0 else parameters
        if self.loss_scale.is_used:
            return self._compute_scaled(forward, torch.ones_like(output) if gradient is None else gradient, inputs)
        received = None if gradient is None else [gradient.to(output.dtype)]
        computed = list(torch.autograd.grad([output], inputs, received))
        norm = get_total_norm(computed, foreach=True)
        of_entry = computed.pop(0) if work.entry_stage > 0 else None
        return _Gradients(forward, self._are_predicted(forward), of_entry, computed, norm)

    def _compute_scaled(self, forward: StashedForward, gradient: Tensor, inputs: Sequence[Tensor]) -> _Gradients:
        # In fp16. The gradients by parameters are still multiplied by the scale. The graph is kept, to be gone through
        # once more should they have overflowed; whoever has it drops it with `forward`.
        scale, output = self.loss_scale.value, forward.output
        assert output is not None
        received = gradient.to(output.dtype) * scale
        computed = list(torch.autograd.grad([output], inputs, [received], retain_graph=True))
        norms = [torch.linalg.vector_norm(found, dtype=torch.float32) for found in computed]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / scale
        of_entry = computed.pop(0).div_(scale) if forward.work.entry_stage > 0 else None
        return _Gradients(forward, self._are_predicted(forward), of_entry, computed, norm, scale)

    def _are_predicted(self, forward: StashedForward) -> tuple[bool, ...]:
        return tuple(
            stage.prediction is not None and stage.prediction.owns(version)
            for stage, version in zip(self._stages_of(forward.work), forward.versions, strict=True)
        )

    def _add(self, gradients: _Gradients, norm: float, loss_sum: float = 0.0) -> None:
        forward, work = gradients.forward, gradients.forward.work
        # Before any is added: an error must not leave a part of them in the sums.
        self._require_finite(norm, work, "the gradient it computed")
        stages = self._stages_of(work)
        add_gradients(
            [tensor for stage in stages for tensor in stage.gradient_sum.tensors],
            gradients.of_parameters,
            gradients.scale,
        )
        name = work.microbatch.hex()
        for stage, step, is_predicted in zip(stages, forward.steps, gradients.are_predicted, strict=True):
            stage.record_microbatch(name, forward.tokens, loss_sum, step, is_predicted=is_predicted)
        self._report(MicrobatchCounted(name, tuple(stage.number for stage in stages), forward.tokens))

    def _require_plausible_loss(self, loss_sum: float, work: DecodedWork) -> None:
        self._require_finite(loss_sum if abs(loss_sum) <= MAX_LOSS_SUM else math.inf, work, "the loss")

    def _require_finite(self, value: float, work: DecodedWork, what: str) -> None:
        if not math.isfinite(value):
            self.stages[work.entry_stage].record_refusal(work.microbatch.hex(), f"{what} is not finite")
            raise NonFinite(
                f"{what} from stage {work.entry_stage} on is not finite; a lower optimizer.learning_rate may help."
            )
