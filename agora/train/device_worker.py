"""This peer's stages on their device, for the event loop: wire tensors and arrays in and out, every call a job."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
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
from agora.core.sync_mode import ALL_REDUCE, StepEvent, StepPlan, StepPolicy
from agora.observe.events import Report, TaskFailed
from agora.state.layout import Layout, StageState
from agora.train.device import DeviceOptions, DeviceQueue, Priority, choose_device, work_clock_of
from agora.train.gradients import GradientNormBound, GradientShare
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import AveragedFragment, Blocks, StageProgress
from agora.train.weight_versions import LIMIT_FACTOR, DecodedWork, StashedForward

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_EVENTS: Final = 4096  # maximum number of step events that wait for their reader; the oldest are dropped


class StepEvents:
    """A queue of MAX_EVENTS step events, then the oldest go: any thread may `put`; one task iterates, on its loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[StepEvent] = deque(maxlen=MAX_EVENTS)
        self._arrived = asyncio.Event()

    def put(self, event: StepEvent) -> None:
        self._events.append(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def __aiter__(self) -> AsyncIterator[StepEvent]:
        while True:
            while self._events:
                yield self._events.popleft()
            await self._arrived.wait()
            self._arrived.clear()


def _priority_of(work: SpanWork) -> Priority:
    return Priority.EVALUATE if work.purpose == "evaluate" else Priority.FORWARD


class DeviceWorker:
    """Runs forward and backward passes, steps and copies of this peer's stages, each as a job of the one device thread.

    It owns that thread, from `create` to `close`. After each job but a `forward`, the thread takes the steps, and
    closes the shares, that are due in any stage. The methods raise

    | error                        | for                                                                    |
    |------------------------------|------------------------------------------------------------------------|
    | ProtocolError ("bad-tensor") | a tensor whose dtype, shape or values the run does not allow           |
    | NonFinite                    | results of this peer's own that are not finite                         |
    | OutOfMemory, DeviceError     | a device that fails                                                    |
    | Busy                         | a full queue                                                           |
    | NotMyStage                   | a stage that is not held here                                          |

    and have then added nothing to any gradient sum. OutOfMemory is raised only after all kept graphs were dropped and
    the job was tried once more.
    """

    def __init__(self, manifest: Manifest, trainer: SpanTrainer, queue: DeviceQueue, events: StepEvents) -> None:
        """Use `create` instead. events: those of the trainer."""
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

        in_flight: microbatches that are usually between forward and backward; at most LIMIT_FACTOR times as many
        forwards are stashed, or jobs of one priority queued. base_model: its folder, if the run has one. Raises
        DeviceError, OutOfMemory, ManifestError, or LocalError if the base model is missing or another one.
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
        build_stages = partial(
            SpanTrainer,
            manifest,
            span,
            chosen,
            report=report,
            in_flight=in_flight,
            on_step=events.put,
            base_model=base_model,
            state_in_host=device.state_in_host,
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(queue.close)
            worker = cls(manifest, await queue.run(Priority.FORWARD, build_stages), queue, events)
            undo.pop_all()
        return worker

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued and later jobs with DeviceError; returns whether the running one has ended."""
        return await self._queue.close(timeout_s)

    # --- for the pipeline

    async def forward(self, work: SpanWork) -> WireTensor:
        """Runs the stages from `work.entry_stage` to the span's last. Returns the boundary [b, s, k] for the one after.

        For "train", what the backward pass needs is stashed until `backward`, `forget`, or another forward of the same
        microbatch from the same stage. Raises NotMyStage when the entry stage is not held here or the span has the
        model's last stage (use `run_last_stages`), ProtocolError for malformed tensors, and Busy also when too many
        forwards are stashed.
        """

        def job() -> tuple[WireTensor, StashedForward | None]:
            if work.entry_stage not in self.span or self._has_last_stage:
                here = f"stages {work.entry_stage} to {self.span.last} cannot run forward here"
                raise NotMyStage(f"{here}, only {self.span}")
            output, forward = self.trainer.forward(self._decode(work))
            try:
                encoded = self._codec.encode(output, "forward")
            except Exception:
                free_unused((None, forward))
                raise
            if forward is not None:
                forward.record_device_time(self._queue.job_s())
            return encoded, forward

        def free_unused(unused: tuple[WireTensor | None, StashedForward | None]) -> None:
            # The caller was cancelled, or has an error: no backward will come. A newer forward of the microbatch stays.
            if unused[1] is not None:
                self.trainer.stashed.forget(work.microbatch, work.entry_stage, work.content_digest, only=unused[1])

        # Nothing was added to a sum, so no step can have become due.
        free_memory = self.trainer.free_memory
        output, _ = await self._queue.run(_priority_of(work), job, free_memory=free_memory, on_abandoned=free_unused)
        return output

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        """Runs the stages from `work.entry_stage` to the model's last, the loss, and for "train" the backward pass.

        The backward pass adds the microbatch's gradients to the stages' sums, and counts the microbatch. The result has
        loss and metrics; after a backward the encoded gradient with respect to `boundary`, None at stage 0; with
        "reference" only log-probabilities. Raises NotMyStage without the entry stage or the model's last stage,
        ProtocolError for malformed tensors and references.
        """

        def job() -> SpanResult:
            if work.entry_stage not in self.span or not self._has_last_stage:
                raise NotMyStage(f"stages {work.entry_stage} to the last cannot run here; this peer holds {self.span}")
            decoded = self._decode(work)
            encoded: list[WireTensor | None] = []
            done = self.trainer.run_last_stages(
                decoded, lambda found: encoded.append(self._encode_gradient(decoded, found))
            )
            return SpanResult(
                gradient=encoded[0] if encoded else None,
                busy_s=self._queue.job_s(),
                loss_sum=done.loss_sum,
                tokens=done.tokens,
                metrics=done.metrics,
                log_probabilities=done.log_probabilities,
            )

        return await self._run_and_step(job, priority=_priority_of(work))

    async def backward(
        self, microbatch: MicrobatchId, entry_stage: int, gradient: WireTensor, content_digest: bytes = b""
    ) -> SpanResult:
        """Runs a microbatch's backward pass: adds its gradients to the sums of the stages, and counts it in each.

        entry_stage, content_digest: of its forward's SpanWork. gradient: of the loss sum by the boundary that
        `forward` returned; one that is implausibly large also raises ProtocolError. The result has the encoded gradient
        with respect to the boundary that entered, None at stage 0, and the device seconds of forward and backward.
        After ProtocolError or Busy, `backward` may be called again; after other errors the stashed forward may be gone.
        Raises LocalError when no forward is stashed.
        """

        def job() -> SpanResult:
            key = gradient_dither_key(microbatch, self.span.last + 1)
            decoded = self._codec.decode(gradient, self._boundary_shape, "backward", key, self.device)
            if not is_all_finite(decoded):
                raise self._refusal(microbatch, self.span.last, "the gradient received is not finite; send it again")
            # One gradient far larger than most would outweigh all others in the sum of a step.
            size = float(decoded.norm()) / math.sqrt(max(1, decoded.numel()))
            limit = self._gradient_norms.limit
            if not self._gradient_norms.record_and_check(size):
                why = f"the gradient received has a root mean square of {size:.3g}; at most {limit:.3g} is plausible"
                raise self._refusal(microbatch, self.span.last, why)
            entered = self.trainer.stashed.find(microbatch, entry_stage, content_digest).work
            encoded: list[WireTensor | None] = []
            _, forward = self.trainer.backward(
                microbatch,
                entry_stage,
                decoded,
                content_digest,
                lambda computed: encoded.append(self._encode_gradient(entered, computed)),
            )
            return SpanResult(encoded[0], forward.device_s + self._queue.job_s())

        return await self._run_and_step(job)

    def forget(self, microbatch: MicrobatchId, entry_stage: int, content_digest: bytes = b"") -> None:
        """Drops a stashed forward, if there is one. From any thread."""
        self.trainer.stashed.forget(microbatch, entry_stage, content_digest)

    # --- how far the stages are; from any thread

    def progress(self) -> list[StageProgress]:
        return [stage.progress for stage in self.trainer.stages.values()]

    def step_of(self, stage: int) -> int:
        return self.trainer.stages[stage].progress.step

    def step_plan(self, stage: int) -> StepPlan:
        return self.trainer.stages[stage].progress.plan

    def step_events(self) -> AsyncIterator[StepEvent]:
        """Yields an event for every step and closed share, in order; never ends. One task may read it."""
        return aiter(self._events)

    async def watch(self) -> None:
        """Waits until cancelled; raises DeviceError when the thread ended or its jobs fail."""
        await self._queue.watch()

    def busy_fraction(self) -> float:
        """Of the time since `create`, what the device thread spent on jobs."""
        return self._queue.busy_fraction()

    def set_step_policy(self, stage: int, policy: StepPolicy) -> None:
        """The policy decides, after each job, whether `stage` steps or closes its share. From any thread."""
        self.trainer.stages[stage].set_policy(policy)

    def layout(self, stage: int) -> Layout:
        return self.trainer.stages[stage].layout

    # --- the methods of Stage of the same name, each as a job between two microbatches

    async def outer_gradient(self, stage: int, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
        return await self._run_and_step(self.trainer.stages[stage].outer_gradient, blocks)

    async def outer_step(
        self,
        stage: int,
        step: int,
        blocks: Blocks,
        snapshot: Tensor,
        averaged: AveragedFragment | None,
        wanted_fragments: int = ALL_REDUCE,
    ) -> None:
        function = self.trainer.stages[stage].outer_step
        await self._run_and_step(function, step, blocks, snapshot, averaged, wanted_fragments)

    async def catch_up(self, stage: int, step: int) -> None:
        await self._run_and_step(self.trainer.stages[stage].catch_up, step)

    async def take_gradient_share(self, stage: int) -> GradientShare:
        return await self._run_and_step(self.trainer.stages[stage].take_gradient_share)

    async def step_with_gradient(
        self, stage: int, step: int, mean_gradient: Tensor, tokens: int, wanted_fragments: int = ALL_REDUCE
    ) -> None:
        function = self.trainer.stages[stage].step_with_gradient
        await self._run_and_step(function, step, mean_gradient, tokens, wanted_fragments)

    async def export_state(self, stage: int) -> StageState:
        return await self._run_and_step(self.trainer.stages[stage].export_state)

    async def load_state(self, state: StageState) -> None:
        await self._run_and_step(self.trainer.stages[state.stage].load_state, state)

    async def copy_weights(self, stage: int, *, average: bool = False) -> dict[str, np.ndarray]:
        """Returns copies of the stage's trainable tensors by full name, on the CPU.

        average: of their moving averages instead; in a run without averages, still of the tensors.
        """
        held = self.trainer.stages[stage]
        tensors = await self._run_and_step(
            lambda: held.weights.copy_tensors(held.evaluated if average else held.weights.current)
        )
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    async def _run_and_step(
        self, function: Callable[[*Ts], T], *args: *Ts, priority: Priority = Priority.BACKWARD
    ) -> T:
        trainer = self.trainer
        return await self._queue.run(
            priority, function, *args, afterwards=trainer.take_due_steps, free_memory=trainer.free_memory
        )

    # --- on the device thread

    def _decode(self, work: SpanWork) -> DecodedWork:
        microbatch, entry_stage = work.microbatch, work.entry_stage
        if (work.boundary is None) != (entry_stage == 0):
            takes = "token ids only" if entry_stage == 0 else "a boundary"
            raise ProtocolError("bad-tensor", f"stage {entry_stage} takes {takes}")
        ids = decode_tokens(work.tokens, self._vocabulary, self.device, shape=self._tokens_shape)
        batch = TokenBatch.from_wire(ids, has_marks=self._has_marks)
        entry = batch.inputs
        if work.boundary is not None:
            entry = self._codec.decode(work.boundary, self._boundary_shape, "forward", device=self.device)
            if not is_all_finite(entry):
                raise self._refusal(microbatch, entry_stage, "the boundary received is not finite; send it again")
        return DecodedWork(microbatch, entry_stage, entry, batch, work.purpose, work.references, work.content_digest)

    def _encode_gradient(self, work: DecodedWork, gradient: Tensor | None) -> WireTensor | None:
        if gradient is None:
            return None
        key = gradient_dither_key(work.microbatch, work.entry_stage)
        return self._codec.encode(gradient, "backward", key, boundary=work.entry)

    def _refusal(self, microbatch: MicrobatchId, stage: int, why: str) -> ProtocolError:
        self.trainer.stages[stage].record_refusal(microbatch.hex(), why)
        return ProtocolError("bad-tensor", why)
