"""The interface to this peer's stages for the pipeline and the replicas: wire tensors and arrays in and out, no graphs.

Knows: the device queue, the codec, the shapes in the manifest. Must not know: routing, calls, peers.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
import torch
from agora_protocol.errors import DeviceError, NotMyStage, OutOfMemory, ProtocolError
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec import BoundaryCodec, decode_tokens, gradient_dither_key, is_all_finite
from agora.observe.events import Report, TaskFailed
from agora.state.layout import Layout, StageState
from agora.stepping import SpanResult, StepEvent, StepPolicy
from agora.train.device import DeviceQueue, Priority, choose_device, work_clock_of
from agora.train.gradient_norms import GradientNormBound
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.stage_replica import AveragedSlice, Blocks
from agora.train.step_events import StepEvents
from agora.train.trained_stage import GradientShare, StageProgress
from agora.train.weight_versions import LIMIT_PER_SEAT, StashedForward

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@contextmanager
def _device_errors() -> Iterator[None]:
    """Context manager: turns torch's out-of-memory errors into OutOfMemory, other RuntimeErrors into DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory("the device is out of memory; hold fewer stages or microbatches") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise OutOfMemory("this machine is out of memory; hold fewer stages or microbatches") from error
        first_line = (str(error).splitlines() or [repr(error)])[0][:200]
        raise DeviceError(f"the device failed ({first_line}); restart this daemon") from error


def _priority_of(purpose: str) -> Priority:
    """Returns the priority of a job for this purpose of the message Process: EVALUATE for "evaluate", or FORWARD."""
    return Priority.EVALUATE if purpose == "evaluate" else Priority.FORWARD


class Compute:
    """Runs forwards, backwards, steps and copies of this peer's stages, each as a job of the one device thread.

    Its methods raise ProtocolError ("bad-tensor") for a tensor whose dtype, shape or values the run does not allow,
    NonFinite when this peer's own results are not finite, OutOfMemory or DeviceError when the device fails, Busy when
    the queue is full, and NotMyStage for a stage that is not held here. In each case nothing was added to any gradient
    sum.
    """

    def __init__(self, manifest: Manifest, trainer: SpanTrainer, queue: DeviceQueue, events: StepEvents) -> None:
        """Use `create` instead. events: the queue into which the trainer's `on_step` puts."""
        self.span = trainer.span
        self.device = trainer.device
        self.trainer = trainer
        self._queue = queue
        self._events = events
        self._codec = BoundaryCodec(manifest.boundary.codec, manifest.seed)
        self._gradient_norms = GradientNormBound()
        self._boundary_shape = manifest.boundary_shape()
        self._tokens_shape, self._has_marks = manifest.tokens_shape(), manifest.has_marks
        self._vocabulary = manifest.model.vocabulary
        self._has_last_stage = self.span.last == manifest.stage_count - 1

    @classmethod
    async def create(
        cls,
        manifest: Manifest,
        span: Span,
        *,
        report: Report,
        device: str = "auto",
        in_flight: int = 32,
        slowdown: float = 1.0,
        fault: Callable[[str], None] = lambda point: None,
        base_model: Path | None = None,
    ) -> Compute:
        """Starts the device thread, and builds the span's stages on it with their initial weights.

        device: see choose_device. in_flight: the most microbatches that are between forward and backward. slowdown,
        fault: as for DeviceQueue. base_model: the folder with the files of the run's base model, if it has one. Raises
        DeviceError, OutOfMemory, ManifestError, and LocalError for a base model that is missing or not the run's.
        """
        chosen, events = choose_device(device), StepEvents()
        if chosen.type == "cpu":
            keep_freed_memory()
        limit = LIMIT_PER_SEAT * in_flight
        queue = DeviceQueue(
            limit=limit,
            slowdown=slowdown,
            work_clock=work_clock_of(chosen),
            fault=fault,
            failed=lambda error: report(TaskFailed("device", repr(error))),
        )
        build_stages = _device_errors()(
            lambda: SpanTrainer(
                manifest, span, chosen, report=report, in_flight=in_flight, on_step=events.put, base_model=base_model
            )
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(queue.close)
            compute = cls(manifest, await queue.run(Priority.FORWARD, build_stages), queue, events)
            undo.pop_all()
        return compute

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued jobs and ends the device thread; returns False when a job still runs after `timeout_s`."""
        return await self._queue.close(timeout_s)

    # --- for the pipeline

    async def forward(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, purpose: str
    ) -> WireTensor:
        """Runs stages `first` to the span's last. Returns the encoded boundary [b, s, k] for the stage after.

        boundary: what enters `first`, None at stage 0. tokens, purpose: as in the message Process. With "train", what
        the backward needs is stashed until `backward`, `forget`, or another forward of the same microbatch. Raises
        NotMyStage when `first` is not held here or the span has the model's last stage (use `finish`), ProtocolError
        for malformed tensors.
        """

        @_device_errors()
        def job() -> tuple[WireTensor, StashedForward | None]:
            """On the device thread: decodes the tensors, runs the stages forward, and encodes their output.

            Raises NotMyStage if `first` is not in the span, or the span has the last stage.
            """
            if first not in self.span or self._has_last_stage:
                raise NotMyStage(f"stages {first} to {self.span.last} cannot run forward here, only {self.span}")
            begun = self._queue.begin_work()
            entry, batch = self._decode(microbatch, first, boundary, tokens)
            output, forward = self.trainer.forward(microbatch, first, entry, batch, purpose)
            encoded = self._codec.encode(output, "forward")
            if forward is not None:
                forward.device_s = self._queue.work_s(begun)
            return encoded, forward

        def free_unused(unused: tuple[WireTensor, StashedForward | None]) -> None:
            """Frees the stashed forward; called with the job's result if the caller was cancelled in the meantime."""
            if unused[1] is not None:
                self.trainer.stashed.forget(microbatch, first, only=unused[1])

        output, _ = await self._queue.run(_priority_of(purpose), job, abandoned=free_unused)
        return output

    async def finish(
        self,
        microbatch: MicrobatchId,
        first: int,
        boundary: WireTensor | None,
        tokens: WireTensor,
        purpose: str,
        references: Sequence[float] = (),
    ) -> SpanResult:
        """Runs stages `first` to the model's last, the loss, and for the purpose "train" the backward, as one job.

        boundary, tokens, purpose: as for `forward`; references: as in the message Process. The result has the loss, and
        after a backward the gradient with respect to `boundary`. Raises NotMyStage when `first` or the model's last
        stage is not held here, ProtocolError for malformed tensors and references.
        """

        def job() -> SpanResult:
            """On the device thread: decodes the tensors, runs the stages, and encodes the gradient.

            Raises NotMyStage if `first` is not in the span, or the span lacks the last stage.
            """
            if first not in self.span or not self._has_last_stage:
                raise NotMyStage(f"stages {first} to the last cannot run here; this peer holds {self.span}")
            begun = self._queue.begin_work()
            entry, batch = self._decode(microbatch, first, boundary, tokens)
            done = self.trainer.finish(microbatch, first, entry, batch, purpose, references)
            encoded = self._encode_gradient(microbatch, first, done.gradient, entry)
            return SpanResult(
                encoded, self._queue.work_s(begun), done.loss_sum, done.tokens, done.metrics, done.log_probabilities
            )

        return await self._run_and_step(job, priority=_priority_of(purpose))

    async def backward(self, microbatch: MicrobatchId, first: int, gradient: WireTensor) -> SpanResult:
        """Runs the backward of a microbatch: adds its gradients to the sums, counts its tokens in each of its stages.

        first: the stage that its forward entered. gradient: of the loss sum with respect to the boundary that `forward`
        returned. The result has the gradient with respect to the boundary that entered. After a ProtocolError, another
        gradient may be given; after any other error the forward is gone. Raises LocalError when none is stashed.
        """

        def job() -> SpanResult:
            """On the device thread: decodes and checks the gradient, runs the backward, encodes its result."""
            begun = self._queue.begin_work()
            key = gradient_dither_key(microbatch, self.span.last + 1)
            decoded = self._codec.decode(gradient, self._boundary_shape, "backward", key, self.device)
            self._require_finite(decoded, microbatch, self.span.last, "gradient")
            self._require_plausible(decoded, microbatch)
            result, forward = self.trainer.backward(microbatch, first, decoded)
            encoded = self._encode_gradient(microbatch, first, result, forward.entry)
            return SpanResult(encoded, forward.device_s + self._queue.work_s(begun))

        return await self._run_and_step(job)

    def _require_plausible(self, gradient: Tensor, microbatch: MicrobatchId) -> None:
        """Raises ProtocolError for a gradient from downstream that is far larger than most, see gradient_norms.

        Remembers the gradient's size for later ones, and counts the microbatch of an implausible one as refused.
        """
        size, limit = float(gradient.norm()) / math.sqrt(max(1, gradient.numel())), self._gradient_norms.limit
        if not self._gradient_norms.record_and_judge(size):
            why = f"the gradient received has a root mean square of {size:.3g}; at most {limit:.3g} is plausible"
            self.trainer.stage(self.span.last).count_refused(microbatch.hex(), why)
            raise ProtocolError("bad-tensor", why)

    def forget(self, microbatch: MicrobatchId, first: int) -> None:
        """Frees the stashed forward of a microbatch that entered at `first` and gets no backward, if there is one."""
        self.trainer.stashed.forget(microbatch, first)

    # --- how far the stages are, from any thread

    def progress(self) -> list[StageProgress]:
        """Returns the progress of each stage of the span, in stage order."""
        return [stage.progress for stage in self.trainer.stages.values()]

    def step_of(self, stage: int) -> int:
        """Returns the number of optimizer steps that a stage has taken."""
        return self.trainer.stage(stage).progress.step

    def step_events(self) -> AsyncIterator[StepEvent]:
        """Yields an event for every step and closed share of the span's stages, in order; never ends.

        Only one task may read it.
        """
        return aiter(self._events)

    async def watch(self) -> None:
        """Runs until cancelled. Raises DeviceError when the device or its thread has failed, see DeviceQueue.watch."""
        await self._queue.watch()

    def busy_fraction(self) -> float:
        """Returns the fraction of the time since the start that the device thread was working, 0 to 1."""
        return self._queue.busy_fraction()

    # --- for the replicas, the checkpoints and the export of a stage; each runs between two jobs of microbatches

    def set_step_policy(self, stage: int, policy: StepPolicy) -> None:
        """Replaces the policy that decides when `stage` steps or closes a share by itself. From any thread."""
        self.trainer.stage(stage).policy = policy

    def layout(self, stage: int) -> Layout:
        """Returns where the stage's named tensors lie in its flat weights [numel], and its moments.

        numel is a multiple of SLICE_BLOCK.
        """
        return self.trainer.stage(stage).layout

    async def copy_weights(self, stage: int, *, average: bool = False) -> dict[str, np.ndarray]:
        """Returns a copy of the stage's trainable tensors by full name, on the CPU.

        average: copies their moving averages instead, if the run keeps them.
        """
        trained = self.trainer.stage(stage)
        tensors = await self._run_and_step(
            lambda: trained.weights.copy_tensors(trained.evaluated if average else trained.weights.current)
        )
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    async def difference_to_anchor(self, stage: int, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Returns anchor - weights in `blocks`, and these weights, both float32 [blocks * SLICE_BLOCK] on the CPU."""
        return await self._run_and_step(self.trainer.stage(stage).difference_to_anchor, blocks)

    async def step_anchor(
        self, stage: int, step: int, blocks: Blocks, snapshot: Tensor, averaged: AveragedSlice | None
    ) -> None:
        """Applies a round's mean difference to anchor and weights in `blocks`, see StageReplica.step_anchor."""
        await self._run_and_step(self.trainer.stage(stage).step_anchor, step, blocks, snapshot, averaged)

    async def catch_up(self, stage: int, step: int) -> None:
        """Sets a stage's step count to `step`, that of its other replicas, see TrainedStage.catch_up.

        A step that is due after that is taken, too.
        """
        await self._run_and_step(self.trainer.stage(stage).catch_up, step)

    async def take_gradient_share(self, stage: int) -> GradientShare:
        """Returns this replica's share of the next step, and closes the share if it is open.

        After this, only `step_with_gradient` takes that step.
        """
        return await self._run_and_step(self.trainer.stage(stage).take_gradient_share)

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes step `number`, the next one, along the mean gradient [numel] over all replicas' `tokens`.

        Drops this replica's closed share of it. Raises LocalError when another step is the next one, ProtocolError for
        a gradient that cannot be used; the step can then be taken along another one.
        """
        await self._run_and_step(self.trainer.stage(stage).step_with_gradient, number, mean_gradient, tokens)

    async def export_state(self, stage: int) -> StageState:
        """Returns a copy of the stage's weights and moments after its last step, all of the same step."""
        return await self._run_and_step(self.trainer.stage(stage).export_state)

    async def load_state(self, state: StageState) -> None:
        """Replaces a stage's weights, moments and step, and drops its gradient sum.

        Raises ProtocolError for a state that does not fit; nothing has changed then.
        """
        await self._run_and_step(self.trainer.stage(state.stage).load_state, state)

    async def _run_and_step(
        self, function: Callable[[*Ts], T], *args: *Ts, priority: Priority = Priority.BACKWARD
    ) -> T:
        """Runs `function(*args)` as one job on the device thread and returns its result; then due steps are taken."""
        guarded = _device_errors()(function)
        return await self._queue.run(priority, guarded, *args, then=self.trainer.take_due_steps)

    # --- on the device thread

    def _decode(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor
    ) -> tuple[Tensor, TokenBatch]:
        """Decodes and checks received tensors: returns what enters `first` (ids [b, s] at stage 0), and the tokens.

        Raises ProtocolError for a boundary at stage 0 or none at another stage, for a tensor of a wrong dtype or shape,
        and for values that are not finite.
        """
        if (boundary is None) != (first == 0):
            raise ProtocolError("bad-tensor", f"stage {first} takes {'token ids only' if first == 0 else 'a boundary'}")
        ids = decode_tokens(tokens, self._vocabulary, self.device, shape=self._tokens_shape)
        batch = TokenBatch.from_wire(ids, has_marks=self._has_marks)
        if boundary is None:
            return batch.inputs, batch
        entry = self._codec.decode(boundary, self._boundary_shape, "forward", device=self.device)
        self._require_finite(entry, microbatch, first, "boundary")
        return entry, batch

    def _encode_gradient(
        self, microbatch: MicrobatchId, first: int, gradient: Tensor | None, entry: Tensor
    ) -> WireTensor | None:
        """Encodes the gradient with respect to `entry`, which entered stage `first`; returns None for None."""
        if gradient is None:
            return None
        return self._codec.encode(gradient, "backward", gradient_dither_key(microbatch, first), entry)

    def _require_finite(self, tensor: Tensor, microbatch: MicrobatchId, stage: int, what: str) -> None:
        """Raises ProtocolError, and counts the microbatch as refused, when a received tensor is not finite.

        what: "boundary" or "gradient", for the texts.
        """
        if not is_all_finite(tensor):
            self.trainer.stage(stage).count_refused(microbatch.hex(), f"the {what} received is not finite")
            raise ProtocolError("bad-tensor", f"the {what} holds values that are not finite; send it again")
