"""The stages of one span: forward, loss, backward, gradient sums, steps. Everything here runs on the device thread.

Knows: modules, weights, microbatches by id. Must not know: codecs, queues, event loops, peers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from agora_protocol.errors import NotMyStage
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor
from torch.nn.utils import get_total_norm

from agora.model import Context, family_of, stage_loss
from agora.observe.events import GradientRefused, MicrobatchCounted, Report
from agora.stepping import StageStepped, StepPolicy
from agora.train.device import autocast
from agora.train.held import LIMIT_PER_SEAT, Held, HeldForwards, NonFinite
from agora.train.memory import AvailableMemory, graphs_fit, measure_saved_bytes
from agora.train.optimizer import StageOptimizer
from agora.train.stage import StageProgress, TrainedStage
from agora.train.weights import Bank, StageWeights


class SpanTrainer:
    """Trains the stages of a span, entered at any of them.

    A forward and its backward may lie steps apart, and a step changes weights in place. Two ways out, by the manifest's
    `schedule.activations`. recompute: keep the entry, run the forward again in the backward, on the weights of then.
    keep: the graph stays on the version it was computed on; a step that meets such graphs first copies the weights and
    changes the copy; should graphs on a still older version be left then, they fall back to recompute, so that at most
    two versions are ever alive. auto: keep while the graphs of all microbatches in flight fit into memory.

    Gradients of all parameters are computed, found finite, and only then added: an error never leaves half of them.
    """

    def __init__(
        self,
        manifest: Manifest,
        span: Span,
        device: torch.device,
        *,
        report: Report,
        bf16: bool,
        in_flight: int,
        on_step: Callable[[StageStepped], None] = lambda event: None,
    ) -> None:
        """in_flight: how many microbatches will be between forward and backward at most; four times that is refused.
        on_step: is called after each step of a stage.
        """
        self._span = span
        self._device = device
        self._report = report
        self._bf16 = bf16
        self._activations = manifest.schedule.activations
        self._in_flight = in_flight
        self._available = AvailableMemory(device)
        self._activation_bytes: dict[int, int] = {}
        self.held = HeldForwards(LIMIT_PER_SEAT * in_flight)
        self._stages = {stage: self._make_stage(manifest, stage, on_step) for stage in span.stages}
        self._policies = dict.fromkeys(span.stages, StepPolicy(manifest.optimizer.target_tokens))

    # --- a microbatch's way through the span

    def forward(
        self, microbatch: MicrobatchId, first: int, entry: Tensor, tokens: Tensor, train: bool
    ) -> tuple[Tensor, Held | None]:
        """Runs stages `first` to the span's last; the boundary that leaves it, [b, s, d], without a graph, and what is
        held for the backward (None unless `train`).

        entry: float32 [b, s, d], or token ids [b, s] at stage 0. tokens: [b, s + 1]; the last s are the targets.
        Raises NonFinite, and Busy (when `train`) as long as too many microbatches wait for their backward.
        """
        context = Context(tokens[:, :-1])
        if not train:
            with torch.no_grad():
                return self._run(first, entry, context), None
        self.held.check_room(microbatch, first)
        begun = time.perf_counter()
        output, banks = self._forward_for_training(first, entry, context)
        result = output.detach()
        self._require_finite(float(torch.linalg.vector_norm(result)), first, microbatch, "the boundary it computed")
        steps = tuple(self._stages[stage].step for stage in self._stages_from(first))
        held = Held(first, entry, context, _supervised(tokens), steps, time.perf_counter() - begun)
        if banks:
            held.output, held.banks = output, banks
        self.held.keep(microbatch, held)
        return result, held

    def finish(
        self, microbatch: MicrobatchId, first: int, entry: Tensor, tokens: Tensor, train: bool
    ) -> tuple[float, int, Tensor | None]:
        """Forward, loss and backward in one go, for a span that holds the model's last stage.

        Returns the loss summed over the supervised tokens, their number, and when `train` the gradient of the loss
        with respect to `entry` (None at stage 0). Raises NonFinite; then nothing was added.
        """
        context, targets = Context(tokens[:, :-1]), tokens[:, 1:]
        supervised = _supervised(tokens)
        with torch.set_grad_enabled(train):
            if train and first > 0:
                entry.requires_grad_()
            loss = stage_loss(self._run(first, entry, context), targets)
        loss_sum = float(loss.detach())
        self._require_finite(loss_sum, first, microbatch, "the loss")
        if not train:
            return loss_sum, supervised, None
        steps = tuple(self._stages[stage].step for stage in self._stages_from(first))
        gradient = self._add_gradients(microbatch, first, entry, self._current_banks(first), loss, None)
        self._count(microbatch, first, supervised, steps, loss_sum)
        return loss_sum, supervised, gradient

    def backward(
        self, microbatch: MicrobatchId, gradient: Tensor, first: int | None = None
    ) -> tuple[Tensor | None, Held]:
        """Adds this microbatch's gradients to the sums; the gradient of its entry (None at stage 0), and what was held
        of its forward.

        gradient: float32 [b, s, d], finite, with respect to what `forward` returned. first: where it entered, needed
        only when it entered twice. Raises LocalError when no forward is held, NonFinite when a computed gradient is not
        finite; then nothing was added, and it is held no more.
        """
        held = self.held.take(microbatch, first)
        output, banks = held.output, held.banks
        if output is None:
            with torch.enable_grad():
                output, banks = self._with_graph(held.first, held.entry, held.context)
        result = self._add_gradients(microbatch, held.first, held.entry, banks, output, gradient.to(output.dtype))
        self._count(microbatch, held.first, held.supervised, held.steps)
        return result, held

    def take_due_steps(self) -> None:
        """Takes the optimizer step of every stage whose policy allows it by now."""
        for stage in self._stages.values():
            policy = self._policies[stage.number]
            if stage.is_due(policy.tokens_needed(stage.step)) and not policy.waits_for_mean(stage.step):
                stage.take_step()

    def publish_policy(self, stage: int, policy: StepPolicy) -> None:
        """Replaces what decides when `stage` steps; read from now on. From any thread. Raises NotMyStage."""
        self._policies[self.stage(stage).number] = policy

    def refuse(self, stage: int, microbatch: MicrobatchId, reason: str) -> None:
        """Counts and reports a microbatch whose numbers are not finite."""
        self._stages[stage].refused += 1
        self._stages[stage].publish()
        self._report(GradientRefused(stage, microbatch.hex(), reason))

    # --- what others may ask

    def progress(self) -> list[StageProgress]:
        """How far each stage is, in order; may be called from any thread."""
        return [stage.progress for stage in self._stages.values()]

    def stage(self, number: int) -> TrainedStage:
        """A stage of this span; raises NotMyStage."""
        if number not in self._stages:
            raise NotMyStage(f"stage {number} is not held here; this peer holds {self._span}")
        return self._stages[number]

    def weights(self, stage: int) -> dict[str, Tensor]:
        """The stage's trainable tensors by full name, copied to the CPU."""
        return self.stage(stage).weights.tensors()

    def versions_alive(self, stage: int) -> int:
        """1, or 2 while graphs on the former weights are alive."""
        return 1 + bool(self.held.graphs_on(self._stages[stage].weights.former))

    # --- forward

    def _stages_from(self, first: int) -> range:
        return range(first, self._span.last + 1)

    def _current_banks(self, first: int) -> tuple[Bank, ...]:
        return tuple(self._stages[stage].weights.current for stage in self._stages_from(first))

    def _run(self, first: int, hidden: Tensor, context: Context) -> Tensor:
        with autocast(self._device, self._bf16):
            for bank in self._current_banks(first):
                hidden = bank.module(hidden, context)
        return hidden

    def _with_graph(self, first: int, entry: Tensor, context: Context) -> tuple[Tensor, tuple[Bank, ...]]:
        if first > 0:
            entry.requires_grad_()
        return self._run(first, entry, context), self._current_banks(first)

    def _forward_for_training(self, first: int, entry: Tensor, context: Context) -> tuple[Tensor, tuple[Bank, ...]]:
        """The output, and the banks that its graph needs; no banks when no graph is kept."""
        if self._activations == "auto" and first not in self._activation_bytes:
            return self._measure(first, entry, context), ()
        if self._keeps_graph(first):
            with torch.enable_grad():
                return self._with_graph(first, entry, context)
        with torch.no_grad():
            return self._run(first, entry, context), ()

    def _keeps_graph(self, first: int) -> bool:
        if self._activations != "auto":
            return self._activations == "keep"
        to_come = max(self._in_flight - self.held.live_graphs(), 1)
        second = sum(s.weights.nbytes for s in self._stages.values() if s.weights.former is None)
        return graphs_fit(self._activation_bytes[first], to_come, second, self._available())

    def _measure(self, first: int, entry: Tensor, context: Context) -> Tensor:
        """The first forward that enters at `first`: runs it as `keep` would, weighs its graph and lets it go."""
        weights = {bank.flat.untyped_storage().data_ptr() for bank in self._current_banks(first)}
        output, self._activation_bytes[first] = measure_saved_bytes(
            lambda: self._with_graph(first, entry, context)[0], weights
        )
        return output.detach()

    # --- backward and step

    def _add_gradients(
        self,
        microbatch: MicrobatchId,
        first: int,
        entry: Tensor,
        banks: Sequence[Bank],
        output: Tensor,
        gradient: Tensor | None,
    ) -> Tensor | None:
        """All gradients first, then the check, then one sum: what fails, fails before anything was added."""
        parameters = [parameter for bank in banks for parameter in bank.parameters]
        inputs = [entry, *parameters] if first > 0 else parameters
        computed = list(torch.autograd.grad([output], inputs, None if gradient is None else [gradient]))
        norm = get_total_norm(computed, foreach=True)
        self._require_finite(float(norm), first, microbatch, "the gradient it computed")
        result = computed.pop(0) if first > 0 else None
        sums = [total for stage in self._stages_from(first) for total in self._stages[stage].weights.gradients]
        torch._foreach_add_(sums, computed)
        return result

    def _require_finite(self, value: float, first: int, microbatch: MicrobatchId, what: str) -> None:
        if not math.isfinite(value):
            self.refuse(first, microbatch, f"{what} is not finite")
            raise NonFinite(f"{what} from stage {first} on is not finite; a lower optimizer.learning_rate may help")

    def _count(
        self, microbatch: MicrobatchId, first: int, supervised: int, steps: Sequence[int], loss_sum: float = 0.0
    ) -> None:
        name, stages = microbatch.hex(), self._stages_from(first)
        for number, step_at_forward in zip(stages, steps, strict=True):
            self._stages[number].count(name, supervised, loss_sum, step_at_forward)
        self._report(MicrobatchCounted(name, tuple(stages), supervised))

    def _make_stage(self, manifest: Manifest, number: int, on_step: Callable[[StageStepped], None]) -> TrainedStage:
        module = family_of(manifest.model).build_stage(manifest.layers_of(number), manifest.seed)
        weights = StageWeights(module, self._device)
        return TrainedStage(
            number,
            weights,
            StageOptimizer(manifest.optimizer, manifest.stage_count, weights.layout.matrices_end, weights.gradient),
            self.held,
            report=self._report,
            on_step=on_step,
            knows_loss=number == manifest.stage_count - 1,
            flowing=manifest.schedule.kind == "asynchronous",
        )


def _supervised(tokens: Tensor) -> int:
    """How many targets of [b, s + 1] token ids are supervised; a negative id is not."""
    return int((tokens[:, 1:] >= 0).sum())
