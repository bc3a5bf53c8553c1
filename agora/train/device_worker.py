"""The interface to this peer's stages for the pipeline and the replicas: wire tensors and arrays in and out.

No graphs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

import numpy as np
from agora_protocol.errors import NotMyStage, ProtocolError
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec import BoundaryCodec, decode_tokens, gradient_dither_key, is_all_finite
from agora.core.span_work import SpanResult, SpanWork
from agora.core.sync_mode import EXACT, StepEvent, StepPlan, StepPolicy
from agora.observe.events import Report, TaskFailed
from agora.state.layout import Layout, StageState
from agora.train.device import DeviceOptions, DeviceQueue, Priority, choose_device, device_errors, work_clock_of
from agora.train.gradients import GradientNormBound, GradientShare
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import AveragedSlice, Blocks, StageProgress
from agora.train.weight_versions import LIMIT_FACTOR, StashedForward

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_EVENTS: Final = 4096  # maximum number of step events that wait for their reader; the oldest are dropped


class StepEvents:
    """A queue of at most MAX_EVENTS step events: any thread may `put`; one task iterates, on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[StepEvent] = deque(maxlen=MAX_EVENTS)
        self._arrived = asyncio.Event()

    def put(self, event: StepEvent) -> None:
        """Appends an event and wakes the reader; drops the oldest event if the queue is full. From any thread."""
        self._events.append(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def __aiter__(self) -> AsyncIterator[StepEvent]:
        while True:
            while self._events:
                yield self._events.popleft()
            await self._arrived.wait()
            self._arrived.clear()


def _priority_of(purpose: str) -> Priority:
    # EVALUATE for "evaluate", otherwise FORWARD.
    return Priority.EVALUATE if purpose == "evaluate" else Priority.FORWARD


class DeviceWorker:
    """Runs forward and backward passes, steps and copies of this peer's stages, each as a job of the one device thread.

    It owns that thread, from `create` to `close`. After each job but a `forward`, the thread takes the steps,
    and closes the shares, that are due in any stage. The methods raise ProtocolError ("bad-tensor") for a tensor whose
    dtype, shape or values the run does not allow, NonFinite when this peer's own results are not finite, OutOfMemory or
    DeviceError when the device fails, Busy when the queue is full, and NotMyStage for a stage that is not held here.
    Nothing was then added to any gradient sum, unless the device failed while the result was encoded.
    """

    def __init__(self, manifest: Manifest, trainer: SpanTrainer, queue: DeviceQueue, events: StepEvents) -> None:
        """Use `create` instead. events: the queue into which the trainer's `on_step` puts."""
        self.span, self.device = trainer.span, trainer.device
        self.predicts_weights = trainer.predicts_weights
        self.trainer = trainer
        self._queue = queue
        self._events = events
        self._codec = BoundaryCodec(manifest.boundary.codec, manifest.seed)
        self._gradient_norms = GradientNormBound()
        self._boundary_shape = manifest.boundary_shape()
        self._tokens_shape = manifest.tokens_shape()
        self._has_marks = manifest.has_marks
        self._vocabulary = manifest.model.vocabulary
        self._has_last_stage = self.span.last == manifest.stage_count - 1

    @classmethod
    async def create(
        cls,
        manifest: Manifest,
        span: Span,
        *,
        report: Report,
        device: DeviceOptions,
        in_flight: int = 32,
        base_model: Path | None = None,
    ) -> DeviceWorker:
        """Starts the device thread, and builds the span's stages on it with their initial weights.

        in_flight: how many microbatches are usually between forward and backward; at most LIMIT_FACTOR times as many
        forwards are stashed, or jobs of one priority queued. base_model: folder of the run's base model, if it has one.
        report: also gets TaskFailed when a step after a job fails. On a CPU, calls keep_freed_memory. Ends the thread
        and raises DeviceError, OutOfMemory, ManifestError, or LocalError if the base model is missing or another one.
        """
        chosen = choose_device(device.name)
        events = StepEvents()
        if chosen.type == "cpu":
            keep_freed_memory()
        queue = DeviceQueue(
            limit=LIMIT_FACTOR * in_flight,
            slowdown=device.slowdown,
            work_clock=work_clock_of(chosen),
            fault=device.fault,
            on_error=lambda error: report(TaskFailed("device", repr(error))),
        )
        build_stages = device_errors()(
            lambda: SpanTrainer(
                manifest,
                span,
                chosen,
                report=report,
                in_flight=in_flight,
                on_step=events.put,
                base_model=base_model,
                state_in_host=device.state_in_host,
            )
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(queue.close)
            compute = cls(manifest, await queue.run(Priority.FORWARD, build_stages), queue, events)
            undo.pop_all()
        return compute

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued and later jobs with DeviceError, lets the running job end, and ends the device thread.

        Returns whether the thread has ended: False if its job still runs after `timeout_s`.
        """
        return await self._queue.close(timeout_s)

    # --- for the pipeline

    async def forward(self, work: SpanWork) -> WireTensor:
        """Runs stages `entry_stage` to the span's last. Returns the encoded boundary [b, s, k] for the stage after.

        For "train", what the backward pass needs is stashed until `backward`, `forget`, or another forward of the same
        microbatch from `entry_stage`; if the caller is cancelled, the stashed forward is dropped. Raises NotMyStage
        when `entry_stage` is not held here or the span has the model's last stage (use `run_last_stages`),
        ProtocolError for malformed tensors, and Busy also when too many forwards are stashed.
        """
        microbatch, entry_stage, purpose = work.microbatch, work.entry_stage, work.purpose

        @device_errors()
        def job() -> tuple[WireTensor, StashedForward | None]:
            """On the device thread: decodes the tensors, runs the stages, and returns their encoded output.

            For "train", also stashes the forward, with its seconds on the device, and returns it; otherwise None.
            Raises NotMyStage if `entry_stage` is not in the span, or the span has the last stage.
            """
            if entry_stage not in self.span or self._has_last_stage:
                raise NotMyStage(f"stages {entry_stage} to {self.span.last} cannot run forward here, only {self.span}")
            begun = self._queue.begin_work()
            entry, batch = self._decode(work)
            output, forward = self.trainer.forward(microbatch, entry_stage, entry, batch, purpose)
            encoded = self._codec.encode(output, "forward")
            if forward is not None:
                forward.device_s = self._queue.work_s(begun)
            return encoded, forward

        def free_unused(unused: tuple[WireTensor, StashedForward | None]) -> None:
            if unused[1] is not None:
                self.trainer.stashed.forget(microbatch, entry_stage, only=unused[1])

        output, _ = await self._queue.run(_priority_of(purpose), job, on_abandoned=free_unused)
        return output

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        """Runs stages `entry_stage` to the model's last, the loss, and with "train" the backward pass, as one job.

        The backward pass adds the microbatch's gradients to the stages' sums, and counts the microbatch. The result has
        loss and metrics; after a backward the encoded gradient with respect to `boundary`, None at stage 0; with
        "reference" only log-probabilities. Raises NotMyStage without `entry_stage` or the model's last stage,
        ProtocolError for malformed tensors and references.
        """
        microbatch, entry_stage, purpose = work.microbatch, work.entry_stage, work.purpose

        def job() -> SpanResult:
            if entry_stage not in self.span or not self._has_last_stage:
                raise NotMyStage(f"stages {entry_stage} to the last cannot run here; this peer holds {self.span}")
            begun = self._queue.begin_work()
            entry, batch = self._decode(work)
            done = self.trainer.run_last_stages(microbatch, entry_stage, entry, batch, purpose, work.references)
            encoded = self._encode_gradient(microbatch, entry_stage, done.gradient, entry)
            return SpanResult(
                encoded, self._queue.work_s(begun), done.loss_sum, done.tokens, done.metrics, done.log_probabilities
            )

        return await self._run_and_step(job, priority=_priority_of(purpose))

    async def backward(self, microbatch: MicrobatchId, entry_stage: int, gradient: WireTensor) -> SpanResult:
        """Runs a microbatch's backward pass: adds its gradients to the sums of the stages, and counts it in each.

        entry_stage: the stage that its forward entered. gradient: of the loss sum with respect to the boundary that
        `forward` returned; one that is implausibly large also raises ProtocolError. The result has the encoded gradient
        with respect to the boundary that entered, None at stage 0, and the device seconds of forward and backward.
        After ProtocolError or Busy, `backward` may be called again; after other errors the stashed forward may be gone.
        Raises LocalError when no forward is stashed.
        """

        def job() -> SpanResult:
            begun = self._queue.begin_work()
            key = gradient_dither_key(microbatch, self.span.last + 1)
            decoded = self._codec.decode(gradient, self._boundary_shape, "backward", key, self.device)
            self._require_finite(decoded, microbatch, self.span.last, "gradient")
            self._require_plausible(decoded, microbatch)
            result, forward = self.trainer.backward(microbatch, entry_stage, decoded)
            encoded = self._encode_gradient(microbatch, entry_stage, result, forward.entry)
            return SpanResult(encoded, forward.device_s + self._queue.work_s(begun))

        return await self._run_and_step(job)

    def _require_plausible(self, gradient: Tensor, microbatch: MicrobatchId) -> None:
        size = float(gradient.norm()) / math.sqrt(max(1, gradient.numel()))
        limit = self._gradient_norms.limit
        if not self._gradient_norms.record_and_check(size):
            why = f"the gradient received has a root mean square of {size:.3g}; at most {limit:.3g} is plausible"
            self.trainer.stage(self.span.last).record_refusal(microbatch.hex(), why)
            raise ProtocolError("bad-tensor", why)

    def forget(self, microbatch: MicrobatchId, entry_stage: int) -> None:
        """Drops the stashed forward of a microbatch that entered at `entry_stage`, if there is one. From any thread."""
        self.trainer.stashed.forget(microbatch, entry_stage)

    # --- how far the stages are, from any thread

    def progress(self) -> list[StageProgress]:
        """Returns each stage's last progress (steps, tokens, staleness, lineages); any thread may call this."""
        return [stage.progress for stage in self.trainer.stages.values()]

    def step_of(self, stage: int) -> int:
        """Returns how many optimizer steps `stage` has taken. Raises NotMyStage for a stage outside the span."""
        return self.trainer.stage(stage).progress.step

    def step_plan(self, stage: int) -> StepPlan:
        """Returns which steps of `stage` are local. Raises NotMyStage for a stage outside the span."""
        return self.trainer.stage(stage).progress.plan

    def step_events(self) -> AsyncIterator[StepEvent]:
        """Yields an event for every step and closed share of the span's stages, in order; never ends.

        Only one task may read it. If it falls MAX_EVENTS behind, the oldest events are dropped.
        """
        return aiter(self._events)

    async def watch(self) -> None:
        """Waits until cancelled; raises DeviceError when the thread ended or its jobs fail, see DeviceQueue.watch."""
        await self._queue.watch()

    def busy_fraction(self) -> float:
        """Returns the fraction of the time since `create` that the device thread spent on jobs, 0 to 1."""
        return self._queue.busy_fraction()

    # --- for the replicas, the checkpoints and the export of a stage; each runs between two jobs of microbatches

    def set_step_policy(self, stage: int, policy: StepPolicy) -> None:
        """Replaces the policy that decides, after each job, whether `stage` steps or closes its share; any thread."""
        self.trainer.stage(stage).policy = policy

    def layout(self, stage: int) -> Layout:
        """Returns where the stage's named tensors lie in its flat weights [numel], with a spec of each moment.

        numel is a multiple of SLICE_BLOCK.
        """
        return self.trainer.stage(stage).layout

    async def copy_weights(self, stage: int, *, average: bool = False) -> dict[str, np.ndarray]:
        """Returns copies of the stage's trainable tensors by full name, on the CPU.

        average: copies the moving averages of the tensors instead; in a run without averages, still the tensors.
        """
        trained = self.trainer.stage(stage)
        tensors = await self._run_and_step(
            lambda: trained.weights.copy_tensors(trained.evaluated if average else trained.weights.current)
        )
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    async def difference_to_anchor(self, stage: int, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
        """Returns (anchor - weights, weights), both copied from the numbered `blocks` of the stage's flat weights.

        The two tensors are float32 [blocks * SLICE_BLOCK] on the CPU. None while the stage takes exact steps.
        """
        return await self._run_and_step(self.trainer.stage(stage).difference_to_anchor, blocks)

    async def step_anchor(
        self,
        stage: int,
        step: int,
        blocks: Blocks,
        snapshot: Tensor,
        averaged: AveragedSlice | None,
        wanted_slices: int = EXACT,
    ) -> None:
        """Moves the stage's anchor and weights in `blocks` by the result of the averaging round of step `step`.

        Does nothing if a result of this or a later step was applied before. Arguments: see Stage.step_anchor.
        """
        function = self.trainer.stage(stage).step_anchor
        await self._run_and_step(function, step, blocks, snapshot, averaged, wanted_slices)

    async def catch_up(self, stage: int, step: int) -> None:
        """Raises a stage's step count to `step`, that of its other replicas, if it is behind and has no closed share.

        May first take a step with the stage's summed gradient, or drop that gradient, see Stage.catch_up.
        """
        await self._run_and_step(self.trainer.stage(stage).catch_up, step)

    async def take_gradient_share(self, stage: int) -> GradientShare:
        """Returns this replica's share of the next step, its mean gradient; closes the share if it is still open.

        After this, only `step_with_gradient` takes that step, and until then each call returns the same share.
        """
        return await self._run_and_step(self.trainer.stage(stage).take_gradient_share)

    async def step_with_gradient(
        self, stage: int, step: int, mean_gradient: Tensor, tokens: int, wanted_slices: int = EXACT
    ) -> None:
        """Takes step `step`, the next one, along the mean gradient [numel] over all replicas' `tokens`.

        Drops this replica's closed share of this step. With 0 tokens the step is only counted. wanted_slices: see
        Stage. Raises LocalError when another step is the next one, ProtocolError for a gradient that cannot be
        used; the step can then be taken along another gradient.
        """
        function = self.trainer.stage(stage).step_with_gradient
        await self._run_and_step(function, step, mean_gradient, tokens, wanted_slices)

    async def export_state(self, stage: int) -> StageState:
        """Returns a copy, on the CPU, of the stage's weights and moments after its last step, without gradients."""
        return await self._run_and_step(self.trainer.stage(stage).export_state)

    async def load_state(self, state: StageState) -> None:
        """Replaces the weights, moments and step of `state`'s stage, and drops its gradient sum and closed shares.

        Raises ProtocolError for a state that does not fit or is not finite; nothing has changed then.
        """
        await self._run_and_step(self.trainer.stage(state.stage).load_state, state)

    async def _run_and_step(
        self, function: Callable[[*Ts], T], *args: *Ts, priority: Priority = Priority.BACKWARD
    ) -> T:
        guarded = device_errors()(function)
        return await self._queue.run(priority, guarded, *args, afterwards=self.trainer.take_due_steps)

    # --- on the device thread

    def _decode(self, work: SpanWork) -> tuple[Tensor, TokenBatch]:
        microbatch, entry_stage, boundary, tokens = work.microbatch, work.entry_stage, work.boundary, work.tokens
        if (boundary is None) != (entry_stage == 0):
            takes = "token ids only" if entry_stage == 0 else "a boundary"
            raise ProtocolError("bad-tensor", f"stage {entry_stage} takes {takes}")
        ids = decode_tokens(tokens, self._vocabulary, self.device, shape=self._tokens_shape)
        batch = TokenBatch.from_wire(ids, has_marks=self._has_marks)
        if boundary is None:
            return batch.inputs, batch
        entry = self._codec.decode(boundary, self._boundary_shape, "forward", device=self.device)
        self._require_finite(entry, microbatch, entry_stage, "boundary")
        return entry, batch

    def _encode_gradient(
        self, microbatch: MicrobatchId, entry_stage: int, gradient: Tensor | None, entry: Tensor
    ) -> WireTensor | None:
        if gradient is None:
            return None
        return self._codec.encode(gradient, "backward", gradient_dither_key(microbatch, entry_stage), entry)

    def _require_finite(self, tensor: Tensor, microbatch: MicrobatchId, stage: int, what: str) -> None:
        if not is_all_finite(tensor):
            self.trainer.stage(stage).record_refusal(microbatch.hex(), f"the {what} received is not finite")
            raise ProtocolError("bad-tensor", f"the {what} holds values that are not finite; send it again")
