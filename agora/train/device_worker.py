"""This peer's stages on their device, for the event loop: wire tensors and arrays in and out, every call a job."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from agora_protocol.errors import NotMyStage, ProtocolError
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec import BoundaryCodec, Download, EncodedTensor, decode_tokens, gradient_dither_key
from agora.codec.transfer import Upload, is_apart
from agora.core.live_manifest import LiveManifest
from agora.core.span_work import ForwardKey, SpanResult, SpanWork
from agora.core.step_instructions import StageStepped, StepEvent, StepInstructions
from agora.observe.events import Report, TaskFailed
from agora.state.layout import Layout, StageState
from agora.train.accelerator import accelerator_of
from agora.train.compiled_layers import LayerCompiler, compiles_on
from agora.train.device import (
    PRECISIONS,
    DeviceLoad,
    DeviceOptions,
    DeviceQueue,
    JobTimes,
    Launched,
    Priority,
    choose_device,
    work_clock_of,
)
from agora.train.device_use import DeviceGauge, DeviceReading, gauge_of
from agora.train.gradients import GradientMagnitudeBound
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Stage, StageProgress
from agora.train.weight_versions import MAX_TIMES_IN_FLIGHT, DecodedWork, StashedForward

P = ParamSpec("P")
T = TypeVar("T")

MAX_AHEAD: Final = 8  # jobs whose work on the host is done before their turn; each has a boundary in pinned memory
MAX_EVENTS: Final = 4096  # maximum number of step events that wait for their reader; the oldest are dropped


class StepEvents:
    """The latest MAX_EVENTS step events. Any thread may `put`; one task iterates, on its loop."""

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


def _job_on_stage(
    method: Callable[Concatenate[Stage, P], T],
) -> Callable[Concatenate[DeviceWorker, int, P], Coroutine[Any, Any, T]]:
    # Makes a method of Stage a job of the worker, called with the stage's number before its other arguments.
    async def run_as_job(worker: DeviceWorker, stage: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await worker._run_and_step(partial(method, worker.trainer.stages[stage], *args, **kwargs))

    return run_as_job


class DeviceWorker:
    """Runs forward and backward passes, steps and copies of this peer's stages, each as a job of the one device thread.

    It owns that thread, from `create` to `close`. After each job but a `forward`, the thread takes the steps, and
    closes the shares, that are due in any stage. After an error of a method nothing was added to any gradient sum:

    | error                        | for                                                                    |
    |------------------------------|------------------------------------------------------------------------|
    | ProtocolError ("bad-tensor") | a tensor whose dtype, shape or values the run does not allow           |
    | NonFinite                    | results of this peer's own that are not finite                         |
    | OutOfMemory, DeviceError     | a device that fails                                                    |
    | Busy                         | a full queue                                                           |
    | NotMyStage                   | a stage that is not held here                                          |

    OutOfMemory is raised only after half of the kept graphs were
    dropped, then all, and the job was tried once more each time.
    """

    def __init__(
        self,
        manifest: Manifest,
        trainer: SpanTrainer,
        queue: DeviceQueue,
        events: StepEvents,
        gauge: DeviceGauge,
        times: JobTimes,
    ) -> None:
        """Use `create` instead. events: those of the trainer. times: the least of each job."""
        self._gauge = gauge
        self.span, self.device = trainer.span, trainer.device
        self.predicts_weights = trainer.predicts_weights
        self.trainer = trainer
        self._queue = queue
        self._events = events
        self._times = times
        self._seed = manifest.seed
        # By name, and the one that the run was founded with by "". Others are named by amendments, and so are few.
        self._codecs = {"": BoundaryCodec(manifest.boundary.codec, manifest.seed)}
        self._gradient_norms = GradientMagnitudeBound()
        self._boundary_shape = manifest.boundary_shape()
        self._tokens_shape = manifest.tokens_shape()
        self._has_marks = manifest.has_marks
        self._vocabulary = manifest.model.vocabulary
        self._has_last_stage = self.span.last == manifest.stage_count - 1
        self._ahead = HostPrefetch(is_apart(self.device) or queue.launches_ahead)

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
        gauge: DeviceGauge | None = None,
        live: LiveManifest | None = None,
        draws: bool = True,
    ) -> DeviceWorker:
        """Starts the device thread, and builds the span's stages on it with their initial weights.

        in_flight: microbatches that are usually between forward and backward; at most MAX_TIMES_IN_FLIGHT times as many
        forwards are stashed, or jobs of one priority queued. base_model: its folder, if the run has one. gauge: None
        makes that of the device. live: the manifest in force at each step; None: `manifest` at every step.
        draws: False leaves the weights zeros until `draw_initial_weights` or `load_state`.

        Raises DeviceError, OutOfMemory, ManifestError, or LocalError if the base model is missing or another one.
        """
        chosen = choose_device(device.name)
        events = StepEvents()
        keep_freed_memory()  # for averaging, which works in host memory beside a GPU as well
        gauge = gauge or gauge_of(chosen)
        queue = DeviceQueue(
            is_idle=gauge.is_idle if gauge.can_idle else None,
            limit=MAX_TIMES_IN_FLIGHT * in_flight,
            slowdown=device.slowdown,
            work_clock=work_clock_of(chosen),
            fault=device.fault,
            on_error=lambda error: report(TaskFailed("device", repr(error))),
            accelerator=accelerator_of(chosen, is_emulated=device.emulated_s > 0.0),
        )
        times = JobTimes(device.emulated_s)

        def on_step(event: StepEvent) -> None:
            if isinstance(event, StageStepped):
                queue.extend_job(times.step_s)
            events.put(event)

        build_stages = partial(
            SpanTrainer,
            manifest,
            span,
            chosen,
            report=report,
            in_flight=in_flight,
            on_step=on_step,
            base_model=base_model,
            draws=draws,
            state_in_host=device.state_in_host,
            live=live,
            dtype=device.dtype,
            compiler=(
                LayerCompiler(report, cache=device.compiled_code) if compiles_on(chosen, device.compile) else None
            ),
        )
        async with AsyncExitStack() as undo:
            undo.push_async_callback(queue.close)
            worker = cls(manifest, await queue.run(Priority.FORWARD, build_stages), queue, events, gauge, times)
            undo.pop_all()
        return worker

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Fails all queued and later jobs with DeviceError; returns whether the running one has ended."""
        if self.trainer.compiler is not None:
            self.trainer.compiler.close()
        self._ahead.close()
        return await self._queue.close(timeout_s)

    # --- for the pipeline

    async def forward(self, work: SpanWork) -> WireTensor:
        """Runs the stages from `work.entry_stage` to the span's last. Returns the boundary [b, s, k] for the one after.

        For "train", what the backward pass needs is stashed until `backward`, `drop_forward`, or another forward of the
        same microbatch from the same stage. Raises NotMyStage when the entry stage is not held here or the span has the
        model's last stage (use `run_last_stages`), ProtocolError for malformed tensors, and Busy also when too many
        forwards are stashed.
        """

        read = self._ahead.start(partial(self._read, work))

        def job() -> Launched[tuple[WireTensor, StashedForward | None]]:
            if work.entry_stage not in self.span or self._has_last_stage:
                here = f"stages {work.entry_stage} to {self.span.last} cannot run forward here"
                raise NotMyStage(f"{here}, only {self.span}")
            decoded, _ = self._decode(work, read())
            self._extend_job(work.entry_stage, forward=True, backward=False)
            launched = self.trainer.launch_forward(decoded)
            assert launched.output is not None
            try:
                encoded = self._codec_of(work).encode_on_device(launched.output, "forward")
                download = Download(launched.values, encoded)
            except Exception:
                launched.give_up()
                raise

            def finish() -> tuple[WireTensor, StashedForward | None]:
                values, boundary = download.on_host()
                _, forward = launched.finish(values)
                if forward is not None:
                    forward.record_device_time(self._queue.job_s())
                assert boundary is not None
                return boundary, forward

            return Launched(finish, launched.give_up)

        def free_unused(unused: tuple[WireTensor, StashedForward | None]) -> None:
            # The caller was cancelled, or has an error: no backward will come. A newer forward of the microbatch stays.
            if unused[1] is not None:
                self.trainer.stashed.forget(work.key, only=unused[1])

        # Nothing was added to a sum, so no step can have become due.
        free_memory = self.trainer.free_memory
        output, _ = await self._queue.run(
            _priority_of(work), job, free_memory=free_memory, on_abandoned=free_unused, is_pass=True
        )
        return output

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        """Runs the stages from `work.entry_stage` to the model's last, the loss, and for "train" the backward pass.

        The backward pass adds the microbatch's gradients to the stages' sums, and counts the microbatch. The result has
        loss and metrics; after a backward the encoded gradient with respect to `boundary`, None at stage 0; with
        "reference" only log-probabilities. Raises NotMyStage without the entry stage or the model's last stage,
        ProtocolError for malformed tensors and references.
        """

        read = self._ahead.start(partial(self._read, work, encodes_gradient=work.is_training))

        def job() -> Launched[SpanResult]:
            if work.entry_stage not in self.span or not self._has_last_stage:
                raise NotMyStage(f"stages {work.entry_stage} to the last cannot run here; this peer holds {self.span}")
            decoded, dither = self._decode(work, read())
            self._extend_job(work.entry_stage, forward=True, backward=work.is_training)
            launched = self.trainer.launch_last_stages(decoded)
            download = Download(launched.values, self._encode_gradient(decoded, launched.output, dither))

            def finish() -> SpanResult:
                values, gradient = download.on_host()
                done = launched.finish(values)
                return SpanResult(
                    gradient=gradient,
                    busy_s=self._queue.job_s(),
                    loss_sum=done.loss_sum,
                    tokens=done.tokens,
                    metrics=done.metrics,
                    log_probabilities=done.log_probabilities,
                )

            return Launched(finish)

        return await self._run_and_step(job, priority=_priority_of(work), keeps_result=work.is_training, is_pass=True)

    async def backward(self, key: ForwardKey, gradient: WireTensor) -> SpanResult:
        """Runs a microbatch's backward pass: adds its gradients to the sums of the stages, and counts it in each.

        gradient: of the loss sum by the boundary that `forward` returned; one that is implausibly large also raises
        ProtocolError. The result has the encoded gradient with respect to the boundary that entered, None at stage 0,
        and the device seconds of forward and backward. After ProtocolError, `backward` may be called again; after
        other errors the stashed forward may be gone.
        Raises LocalError when no forward is stashed.
        """

        read = self._ahead.start(partial(self._read_gradient, key, gradient))

        def job() -> Launched[SpanResult]:
            received = read()
            _, dither, parts = received.to_device()
            decoded = self._codec_of(key).decode_parts(parts, self._boundary_shape, "backward")
            if not received.is_finite:
                raise self._refusal(
                    key.microbatch, self.span.last, "The gradient received is not finite; send it again."
                )
            count = max(1, decoded.numel())

            def check_received(norm: float) -> None:
                # One gradient far larger than most would outweigh all others in the sum of a step.
                size, limit = norm / math.sqrt(count), self._gradient_norms.limit
                if not self._gradient_norms.record_and_check(size):
                    found = f"a root mean square of {size:.3g}; at most {limit:.3g} is plausible"
                    raise self._refusal(key.microbatch, self.span.last, f"The gradient received has {found}.")

            self._extend_job(key.entry_stage, forward=False, backward=True)
            entered = self.trainer.stashed.find(key).work
            encoded: list[EncodedTensor | None] = []
            launched = self.trainer.launch_backward(
                key,
                decoded,
                lambda computed: encoded.append(self._encode_gradient(entered, computed, dither)),
                check_received,
            )
            download = Download(launched.values, encoded.pop())

            def finish() -> SpanResult:
                values, entered_gradient = download.on_host()
                forward = launched.finish(values)
                return SpanResult(entered_gradient, forward.device_s + self._queue.job_s())

            return Launched(finish, launched.give_up)

        return await self._run_and_step(job, keeps_result=True, is_pass=True)

    def drop_forward(self, key: ForwardKey) -> None:
        """Drops a stashed forward, if there is one. From any thread."""
        self.trainer.stashed.forget(key)

    # --- how far the stages are; from any thread

    def progress(self) -> list[StageProgress]:
        return [stage.progress for stage in self.trainer.stages.values()]

    def step_of(self, stage: int) -> int:
        return self.trainer.stages[stage].progress.step

    def progress_of(self, stage: int) -> StageProgress:
        return self.trainer.stages[stage].progress

    def step_events(self) -> AsyncIterator[StepEvent]:
        """Yields an event for every step and closed share, in order; never ends. One task may read it."""
        return aiter(self._events)

    async def watch(self) -> None:
        """Waits until cancelled; raises DeviceError when the thread ended or its jobs fail."""
        await self._queue.watch()

    def busy_fraction(self) -> float:
        """Of the time since `create`, what the device thread spent on jobs."""
        return self._queue.busy_fraction()

    def idle_fraction(self) -> float | None:
        """Of the time of jobs, in which the device waited for the host; None where that cannot be, or is not known."""
        return self._queue.idle_fraction()

    def read_device(self) -> DeviceReading:
        return self._gauge.read()

    def device_load(self) -> DeviceLoad:
        """Returns the seconds of the device thread's jobs, and of their waits in its queue, since `create`."""
        return self._queue.load()

    @property
    def precision(self) -> str:
        """Of products: bf16, fp16 or float32."""
        return PRECISIONS[self.trainer.dtype]

    @property
    def compile_problem(self) -> str:
        """Why layers are not compiled, in a sentence, although they should be; "" if they are or will be."""
        return self.trainer.compiler.problem if self.trainer.compiler is not None else ""

    def set_step_instructions(self, stage: int, instructions: StepInstructions) -> None:
        """The instructions decide, after each job, whether `stage` steps or closes its share. From any thread."""
        self.trainer.stages[stage].set_instructions(instructions)

    def layout(self, stage: int) -> Layout:
        return self.trainer.stages[stage].layout

    # --- the methods of Stage, each as a job between two microbatches

    outer_gradient = _job_on_stage(Stage.outer_gradient)
    outer_step = _job_on_stage(Stage.outer_step)
    catch_up = _job_on_stage(Stage.catch_up)
    close_share = _job_on_stage(Stage.close_share)
    step_with_gradient = _job_on_stage(Stage.step_with_gradient)
    export_state = _job_on_stage(Stage.export_state)

    async def draw_initial_weights(self, stage: int) -> None:
        await self._queue.run(Priority.BACKWARD, self.trainer.draw_initial_weights, stage)

    async def load_state(self, state: StageState) -> None:
        await self._run_and_step(partial(self.trainer.stages[state.stage].load_state, state))

    async def copy_weights(self, stage: int, *, average: bool = False) -> dict[str, np.ndarray]:
        """Returns copies of the stage's trainable tensors by full name, on the CPU.

        average: of their moving averages instead; in a run without averages, still of the tensors.
        """
        held = self.trainer.stages[stage]
        tensors = await self._run_and_step(
            lambda: held.weights.copy_tensors(held.evaluation_weights if average else held.weights.current)
        )
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    async def _run_and_step(
        self,
        function: Callable[[], T | Launched[T]],
        *,
        priority: Priority = Priority.BACKWARD,
        keeps_result: bool = False,
        is_pass: bool = False,
    ) -> T:
        return await self._queue.run(
            priority,
            function,
            afterwards=self.trainer.take_due_steps,
            free_memory=self.trainer.free_memory,
            keeps_result=keeps_result,
            is_pass=is_pass,
        )

    # --- on the host, before the job's turn comes

    def _read(self, work: SpanWork, *, encodes_gradient: bool = False) -> _Received:
        if (work.boundary is None) != (work.entry_stage == 0):
            takes = "token ids only" if work.entry_stage == 0 else "a boundary"
            raise ProtocolError("bad-tensor", f"Stage {work.entry_stage} takes {takes}.")
        ids = decode_tokens(work.tokens, self._vocabulary, shape=self._tokens_shape)
        if work.boundary is None:
            return _Received(self.device, ids=ids)
        return _Received(
            self.device,
            ids=ids,
            parts=self._codec_of(work).read(work.boundary, self._boundary_shape, "forward"),
            dither=self._draw_dither(work.key) if encodes_gradient else None,
            is_finite=self._codec_of(work).has_finite_values(work.boundary, "forward"),
        )

    def _read_gradient(self, key: ForwardKey, gradient: WireTensor) -> _Received:
        codec, dither_key = self._codec_of(key), gradient_dither_key(key.microbatch, self.span.last + 1)
        return _Received(
            self.device,
            parts=codec.read(gradient, self._boundary_shape, "backward", dither_key),
            dither=self._draw_dither(key) if key.entry_stage > 0 else None,
            is_finite=codec.has_finite_values(gradient, "backward"),
        )

    def _draw_dither(self, key: ForwardKey) -> Tensor | None:
        # Of the gradient that will leave the span.
        dither_key = gradient_dither_key(key.microbatch, key.entry_stage)
        return self._codec_of(key).draw_dither(self._boundary_shape, "backward", dither_key)

    def _codec_of(self, work: SpanWork | DecodedWork | ForwardKey) -> BoundaryCodec:
        if work.codec not in self._codecs:
            self._codecs[work.codec] = BoundaryCodec(work.codec, self._seed)
        return self._codecs[work.codec]

    # --- on the device thread

    def _extend_job(self, entry_stage: int, *, forward: bool, backward: bool) -> None:
        stages = self.span.last + 1 - entry_stage
        self._queue.extend_job(self._times.passes_s(stages, forward=forward, backward=backward))

    def _decode(self, work: SpanWork, received: _Received) -> tuple[DecodedWork, Tensor | None]:
        ids, dither, parts = received.to_device()
        assert received.ids is not None
        batch = TokenBatch.from_wire(received.ids, has_marks=self._has_marks, on_device=ids)
        entry = batch.inputs
        if work.boundary is not None:
            entry = self._codec_of(work).decode_parts(parts, self._boundary_shape, "forward")
            if not received.is_finite:
                why = "The boundary received is not finite; send it again."
                raise self._refusal(work.microbatch, work.entry_stage, why)
        decoded = DecodedWork(
            work.microbatch,
            work.entry_stage,
            entry,
            batch,
            work.purpose,
            work.references,
            work.content_digest,
            work.codec,
        )
        return decoded, dither

    def _encode_gradient(
        self, work: DecodedWork, gradient: Tensor | None, dither: Tensor | None
    ) -> EncodedTensor | None:
        if gradient is None:
            return None
        key = gradient_dither_key(work.microbatch, work.entry_stage)
        return self._codec_of(work).encode_on_device(gradient, "backward", key, boundary=work.entry, dither=dither)

    def _refusal(self, microbatch: MicrobatchId, stage: int, why: str) -> ProtocolError:
        self.trainer.stages[stage].record_refusal(microbatch.hex(), why)
        return ProtocolError("bad-tensor", why)


class _OnDevice(NamedTuple):
    ids: Tensor | None
    dither: Tensor | None
    parts: list[Tensor]


class _Received:
    # What came for a job, checked, with the dither of the gradient that the job encodes: on its way in one copy.

    def __init__(
        self,
        device: torch.device,
        *,
        ids: Tensor | None = None,
        parts: Sequence[Tensor] = (),  # of a boundary or its gradient, see BoundaryCodec.read
        dither: Tensor | None = None,
        is_finite: bool = True,
    ) -> None:
        self.ids = ids
        self.is_finite = is_finite
        self._has_dither = dither is not None
        self._upload = Upload([tensor for tensor in (ids, dither, *parts) if tensor is not None], device)

    def to_device(self) -> _OnDevice:
        parts = self._upload.to_device()
        ids = parts.pop(0) if self.ids is not None else None
        return _OnDevice(ids, parts.pop(0) if self._has_dither else None, parts)


class HostPrefetch:
    """Work on the host that jobs need: on a thread of its own, beside the jobs before, or in the job itself."""

    def __init__(self, is_ahead: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host work") if is_ahead else None
        self._waiting: WeakSet[Future[Any]] = WeakSet()  # whose job has not ended

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Starts `work` on the host thread if it has room. Returns a function that waits for it and returns its result.

        If it was not started, or failed, that function does `work` in the calling thread, each time it is called.
        """
        if self._thread is None or len(self._waiting) >= MAX_AHEAD:
            return work
        future = self._thread.submit(work)
        self._waiting.add(future)
        # A failed work is done again here: memory may suffice by now, and the traceback must be of this thread.
        return lambda: work() if future.exception() else future.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
