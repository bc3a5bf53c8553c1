"""What the pipeline sees of the device: wire tensors in, wire tensors out, and nothing of torch in between.

Knows: the device queue, the codec, what the manifest says of shapes. Must not know: routing, calls, peers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import numpy as np
import torch
from agora_protocol.errors import DeviceError, MemoryError_, NotMyStage, ProtocolError
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec import BoundaryCodec, all_finite, decode_tokens, gradient_dither_key
from agora.observe.events import Report, TaskFailed
from agora.state.layout import Flat, Layout, StageState
from agora.stepping import StageStepped, StepEvents, StepPolicy
from agora.train.device import DeviceQueue, DeviceStatistics, Priority, choose_device, has_native_bf16
from agora.train.held import LIMIT_PER_SEAT, Held
from agora.train.memory import keep_freed_memory
from agora.train.replicas import Blocks, SliceRule, StageReplica
from agora.train.span import SpanTrainer
from agora.train.stage import MeanGradient, StageProgress

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DEFAULT_IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a microbatch's way forward. gradient: None when evaluated, or when it entered at stage 0."""

    loss_sum: float
    tokens: int
    gradient: WireTensor | None
    busy_s: float


@dataclass(frozen=True, slots=True)
class Backward:
    """gradient: None at stage 0. busy_s: device seconds of this microbatch here, its forward included."""

    gradient: WireTensor | None
    busy_s: float


class Compute:
    """The stages of this peer's span behind one device queue. Made by `create`, ended by `close`.

    All methods raise ProtocolError ("bad-tensor") for a tensor whose dtype, shape or values the run does not allow,
    NonFinite for this peer's own numbers, MemoryError_ or DeviceError for the device, Busy when the queue is full; in
    each case nothing was added to any gradient.
    """

    def __init__(
        self,
        manifest: Manifest,
        span: Span,
        device: torch.device,
        trainer: SpanTrainer,
        queue: DeviceQueue,
        events: StepEvents,
    ) -> None:
        self.span = span
        self.device = str(device)
        self._device = device
        self._trainer = trainer
        self._queue = queue
        self._events = events
        self._replicas = {n: StageReplica(trainer.stage(n), manifest.optimizer) for n in span.stages}
        self._codec = BoundaryCodec(manifest.boundary.codec, manifest.seed)
        self._boundary_shape = manifest.boundary_shape()
        self._tokens_shape = (self._boundary_shape[0], self._boundary_shape[1] + 1)
        self._vocabulary = manifest.model.vocabulary
        self._last_stage = manifest.stage_count - 1

    @classmethod
    async def create(
        cls,
        manifest: Manifest,
        span: Span,
        *,
        report: Report,
        device: str = "auto",
        in_flight: int = 0,
        bf16: bool | None = None,
        fault: Callable[[str], None] | None = None,
    ) -> Compute:
        """Builds the span's stages with their initial weights on the device.

        in_flight: how many microbatches will be between forward and backward here at most (admission's seats; 0: the
        manifest's max_in_flight, or 32). bf16: matrix products in bf16, None for what the device has natively.
        Raises DeviceError, MemoryError_, ManifestError.
        """
        where = choose_device(device)
        if where.type == "cpu":
            keep_freed_memory()
        in_flight = in_flight or manifest.schedule.max_in_flight or DEFAULT_IN_FLIGHT
        limit = LIMIT_PER_SEAT * in_flight
        queue = DeviceQueue(limit=limit, fault=fault, failed=lambda error: report(TaskFailed("device", repr(error))))

        events = StepEvents()

        def build() -> SpanTrainer:
            precision = has_native_bf16(where) if bf16 is None else bf16
            with _device_errors():
                return SpanTrainer(
                    manifest, span, where, report=report, bf16=precision, in_flight=in_flight, on_step=events.put
                )

        async with AsyncExitStack() as undo:
            undo.push_async_callback(queue.close)
            compute = cls(manifest, span, where, await queue.run(Priority.FORWARD, build), queue, events)
            undo.pop_all()
        return compute

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Ends the device thread; False when a job still runs after `timeout_s`."""
        return await self._queue.close(timeout_s)

    async def forward(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, train: bool
    ) -> WireTensor:
        """Runs stages `first` to the span's last; the encoded boundary for the stage after.

        boundary: what enters `first`, [b, s, d] as the codec left it, None at stage 0; tokens: ids [b, s + 1].
        With `train`, what the backward needs is held until `backward`, `forget`, or another forward of the same
        microbatch.
        """
        priority = Priority.FORWARD if train else Priority.EVALUATE

        def undo(nobodys: tuple[WireTensor, Held | None]) -> None:
            if nobodys[1] is not None:
                self._trainer.held.forget_this(microbatch, nobodys[1])

        output, _ = await self._queue.run(
            priority, self._forward, microbatch, first, boundary, tokens, train, abandoned=undo
        )
        return output

    async def finish(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, train: bool
    ) -> Finished:
        """Runs stages `first` to the model's last, the loss, and with `train` the backward, in one go."""
        priority = Priority.FORWARD if train else Priority.EVALUATE
        return await self._queue.run(
            priority, self._finish, microbatch, first, boundary, tokens, train, then=self._trainer.take_due_steps
        )

    async def backward(self, microbatch: MicrobatchId, gradient: WireTensor, first: int | None = None) -> Backward:
        """Adds the microbatch's gradients to the sums and counts its tokens in every stage that it went through.

        gradient: of the loss sum with respect to what `forward` returned. first: the stage that this forward entered;
        without it a microbatch held twice, from two stages, is a LocalError. After a ProtocolError the forward is still
        held, so that a gradient from another peer can follow; after any other error it is gone.
        """
        return await self._queue.run(
            Priority.BACKWARD, self._backward, microbatch, gradient, first, then=self._trainer.take_due_steps
        )

    def forget(self, microbatch: MicrobatchId, first: int | None = None) -> None:
        """Frees a forward that will have no backward (all of the microbatch's, or the one that entered at `first`)."""
        self._trainer.held.forget(microbatch, first)

    def progress(self) -> list[StageProgress]:
        """How far each stage of the span is, in order."""
        return self._trainer.progress()

    def step_of(self, stage: int) -> int:
        """Optimizer steps that a stage of the span has taken. From any thread."""
        return self._trainer.stage(stage).progress.step

    def publish_policy(self, stage: int, policy: StepPolicy) -> None:
        """Replaces what decides when `stage` takes a step by itself. From any thread. Raises NotMyStage.

        The device thread reads the policy after every microbatch. Before the first call: a step whenever this peer
        alone has counted the manifest's `target_tokens`.
        """
        self._trainer.publish_policy(stage, policy)

    def step_events(self) -> AsyncIterator[StageStepped]:
        """Yields every optimizer step of the span's stages, in order, to one reader; ends only when it is cancelled."""
        return aiter(self._events)

    def statistics(self) -> DeviceStatistics:
        """How busy the device thread is."""
        return self._queue.statistics()

    async def weights(self, stage: int) -> dict[str, np.ndarray]:
        """A copy of the stage's trainable tensors by full name; every step due before the call is in it."""
        tensors = await self._queue.run(Priority.BACKWARD, self._trainer.weights, stage)
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    # --- with the other replicas of a stage; each raises NotMyStage for a stage that is not held here

    def layout(self, stage: int) -> Layout:
        """Where the stage's named tensors lie in its flat weights; their size is a multiple of SLICE_BLOCK."""
        return self._trainer.stage(stage).weights.layout

    async def snapshot_blocks(self, stage: int, blocks: Blocks) -> tuple[Tensor, int]:
        """A copy of the weights in `blocks`, float32 [blocks * SLICE_BLOCK] on the CPU, and the step they are of."""
        return await self._change(self._replica(stage).snapshot_blocks, blocks)

    async def apply_average(self, stage: int, blocks: Blocks, delta: Tensor, snapshot: Tensor, rule: SliceRule) -> None:
        """Takes in an average that lies `delta` from `snapshot`, both [blocks * SLICE_BLOCK]: see StageReplica."""
        await self._change(self._replica(stage).apply_average, blocks, delta, snapshot, rule)

    async def replace_blocks(self, stage: int, blocks: Blocks, values: Flat) -> None:
        """Replaces the weights in `blocks` by another replica's, float32 [blocks * SLICE_BLOCK]."""
        await self._change(self._replica(stage).replace_blocks, blocks, values)

    async def catch_up(self, stage: int, step: int) -> None:
        """The stage has taken `step` steps elsewhere: follows, with what was counted here if only one is missing.

        Further behind, what was counted is dropped (event StepsSkipped). Nothing happens when this replica is not
        behind, or waits for `step_with_gradient`.
        """
        await self._change(self._trainer.stage(stage).catch_up, step)

    async def take_mean_gradient(self, stage: int) -> MeanGradient:
        """This replica's share of the stage's next step; from now on only `step_with_gradient` takes that step.

        The same again if asked again. A gradient that still arrives goes into the step after; in a synchronous run
        it is late, which is reported (GradientLate).
        """
        return await self._change(self._trainer.stage(stage).take_mean_gradient)

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes step `number`, whose share was given, along the mean [numel] over the `tokens` of all replicas.

        Raises LocalError when the stage does not wait for it; after a ProtocolError it still does.
        """
        await self._change(self._replica(stage).step_with_gradient, number, mean_gradient, tokens)

    async def export_state(self, stage: int) -> StageState:
        """A copy of weights and moments, consistent, as of the last step."""
        return await self._change(self._replica(stage).export_state)

    async def load_state(self, state: StageState) -> None:
        """Goes on from `state`; what was summed here is dropped. After a ProtocolError nothing has changed."""
        await self._change(self._replica(state.stage).load_state, state)

    def _replica(self, stage: int) -> StageReplica:
        self._trainer.stage(stage)
        return self._replicas[stage]

    async def _change(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Between two microbatches, before the next one; then the steps that became due."""

        def guarded() -> T:
            with _device_errors():
                return function(*args)

        return await self._queue.run(Priority.BACKWARD, guarded, then=self._trainer.take_due_steps)

    # --- on the device thread

    def _forward(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, train: bool
    ) -> tuple[WireTensor, Held | None]:
        if first not in self.span or self.span.last == self._last_stage:
            raise NotMyStage(f"stages {first} to {self.span.last} cannot run forward here; this peer holds {self.span}")
        with _device_errors():
            entry, ids = self._decode(microbatch, first, boundary, tokens)
            output, held = self._trainer.forward(microbatch, first, entry, ids, train)
            return self._codec.encode(output, "forward"), held

    def _finish(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor, train: bool
    ) -> Finished:
        if first not in self.span or self.span.last != self._last_stage:
            raise NotMyStage(f"stages {first} to the last cannot run here; this peer holds {self.span}")
        begun = time.perf_counter()
        with _device_errors():
            entry, ids = self._decode(microbatch, first, boundary, tokens)
            loss_sum, supervised, gradient = self._trainer.finish(microbatch, first, entry, ids, train)
            encoded = None if gradient is None else self._encode_gradient(microbatch, first, gradient, entry)
        return Finished(loss_sum, supervised, encoded, time.perf_counter() - begun)

    def _backward(self, microbatch: MicrobatchId, gradient: WireTensor, first: int | None) -> Backward:
        begun = time.perf_counter()
        with _device_errors():
            key = gradient_dither_key(microbatch, self.span.last + 1)
            received = self._codec.decode(gradient, self._boundary_shape, "backward", key, self._device)
            decoded = self._finite(microbatch, self.span.last, received, "gradient")
            result, held = self._trainer.backward(microbatch, decoded, first)
            encoded = None if result is None else self._encode_gradient(microbatch, held.first, result, held.entry)
        return Backward(encoded, held.seconds + time.perf_counter() - begun)

    def _decode(
        self, microbatch: MicrobatchId, first: int, boundary: WireTensor | None, tokens: WireTensor
    ) -> tuple[Tensor, Tensor]:
        """What enters stage `first`, and the token ids [b, s + 1]."""
        if (boundary is None) != (first == 0):
            raise ProtocolError("bad-tensor", f"stage {first} takes {'token ids only' if first == 0 else 'a boundary'}")
        ids = decode_tokens(tokens, self._vocabulary, self._device, shape=self._tokens_shape)
        if boundary is None:
            return ids[:, :-1], ids
        received = self._codec.decode(boundary, self._boundary_shape, "forward", device=self._device)
        return self._finite(microbatch, first, received, "boundary"), ids

    def _encode_gradient(self, microbatch: MicrobatchId, first: int, gradient: Tensor, entry: Tensor) -> WireTensor:
        """first: the stage whose `entry` it belongs to."""
        return self._codec.encode(gradient, "backward", gradient_dither_key(microbatch, first), entry)

    def _finite(self, microbatch: MicrobatchId, stage: int, tensor: Tensor, what: str) -> Tensor:
        if not all_finite(tensor):
            self._trainer.refuse(stage, microbatch, f"the {what} received is not finite")
            raise ProtocolError("bad-tensor", f"the {what} holds values that are not finite; send it again")
        return tensor


@contextmanager
def _device_errors() -> Iterator[None]:
    """What torch raises when the device cannot, as this project's errors."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError_("the device is out of memory; hold fewer stages or microbatches") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise MemoryError_("this machine is out of memory; hold fewer stages or microbatches") from error
        raise DeviceError(f"the device failed ({_first_line(error)}); restart this daemon") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]
