"""One peer's work on one microbatch. Each hop calls the next one; the gradient comes back as the answer of the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from agora_protocol.errors import NotMyStage, ProtocolError, Refused, Unavailable
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import CallProgress, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.core.calls import OnProgress
from agora.core.clock import loop_time
from agora.core.fair_share import Client
from agora.core.moving_average import MovingAverage
from agora.core.span_work import SpanResult, SpanWork
from agora.observe import events, faults
from agora.pipeline.barrier import MeanBarrier, StepBarrier
from agora.pipeline.interfaces import HopAnswer, SpanCompute
from agora.pipeline.ledger import RunningWork, WorkKey, WorkLedger
from agora.pipeline.load_balancer import deadline_for_others
from agora.pipeline.router import Router

MIN_USEFUL_S = 0.001  # A hop that has less than this many seconds left starts nothing
PATH_SAMPLES = 33  # number of latest samples whose median is `Hop.path_s`
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HopRequest:
    """A Process request whose tensors have been checked."""

    message: Process
    work: SpanWork
    deadline: float  # loop time by which its answer is due
    consumer: Client | None = None  # the calling peer and its address prefix; None for this peer's own origin

    @property
    def is_training(self) -> bool:
        return self.work.is_training


class Hop:
    """Answers Process requests while this peer holds its span: forward here, call to the next peer, backward here.

    Other peers and this peer's own origin call `process`. queue: number of this hop's jobs that wait for the device or
    run on it. barrier: makes microbatches wait for a step or a mean before they take a slot; None lets none wait.
    """

    def __init__(
        self,
        compute: SpanCompute,
        router: Router,
        ledger: WorkLedger,
        *,
        report: events.Report,
        barrier: StepBarrier | MeanBarrier | None = None,
        fault: faults.ReachFault = faults.reach,
        on_trained: Callable[[], None] = lambda: None,
    ) -> None:
        """on_trained: called when a training microbatch leaves this hop, after training_count was decremented."""
        self._span = compute.span
        self._is_last = compute.span.last == router.stage_count - 1
        self._compute = compute
        self._router = router
        self._ledger = ledger
        self._report = report
        self._barrier = barrier
        self._fault = fault
        self.queue = 0
        self.training_count = 0  # number of training microbatches whose work has begun here and not ended
        self._on_trained = on_trained
        self._busy_s = MovingAverage(0.1)
        self._backward_s = MovingAverage(0.1)
        self._paths_s: deque[float] = deque(maxlen=PATH_SAMPLES)

    async def process(
        self,
        message: Process,
        tensors: Sequence[WireTensor],
        deadline: float,
        on_progress: OnProgress,
        consumer: Client | None = None,
    ) -> HopAnswer:
        """Computes this peer's span, waits for the gradient from downstream, and returns the gradient for upstream.

        A repeated request gets the kept answer immediately, or joins the running work. Others first wait at the barrier
        for part of the time until loop time `deadline`. tensors: [boundary, tokens]; the boundary may be missing at
        stage 0. on_progress: called with each CallProgress of this and later hops. consumer: the caller; None for this
        peer's own origin. Before any work, raises Busy, NotMyStage or ProtocolError, or Unavailable if too little
        time is left. During the work, raises Unavailable, errors of the compute, or PeerFailed when WorkLedger.drain
        ends the work. After each of these errors the gradient is not counted here. Reports a refusal as HopRefused.
        """
        try:
            answer = self._ledger.answer_repeat(message, on_progress, self.queue)
            if answer is None:
                if message.stage not in self._span:
                    raise NotMyStage(
                        f"this peer holds stages {self._span}, not {message.stage}; ask the directory again"
                    )
                work = self._router.wire_rules.check_request(message, tensors)
                answer = await self._join_or_start(HopRequest(message, work, deadline, consumer), on_progress)
        except Refused as refusal:
            self._report(events.HopRefused(message.microbatch.hex(), message.stage, refusal.code))
            raise
        await self._fault("hop.before-answer")
        return answer

    async def _join_or_start(self, request: HopRequest, on_progress: OnProgress) -> HopAnswer:
        entry_stage = request.message.stage
        last_stage = self._span.last
        step = request.message.step
        key = WorkKey(request.message.microbatch, entry_stage)
        if isinstance(self._barrier, MeanBarrier) and request.is_training:
            await self._barrier.wait_for_mean(entry_stage, request.deadline)
        elif isinstance(self._barrier, StepBarrier) and step:
            self._barrier.refuse_early(entry_stage, step)
            await self._barrier.wait_for_step(entry_stage, step, request.deadline)
        if request.is_training:  # checked after the wait, in which work of another entry may have begun
            self._ledger.refuse_overlap(key, last_stage)
        return await self._ledger.run(
            key, last_stage, request.deadline, on_progress, lambda work: self._perform(request, work), request.consumer
        )

    async def _perform(self, request: HopRequest, work: RunningWork) -> HopAnswer:
        stage = request.message.stage
        left_s = request.deadline - loop_time()
        if is_hopeless(left_s, self._busy_s.value or 0.0):
            raise Unavailable(stage, [f"{left_s:.3f} s are too short for this hop"])
        work.publish(CallProgress(stage, self._ledger.me, "accepted", self.queue))
        self.training_count += request.is_training
        try:
            await self._fault("hop.accepted")
            answer = await (self._finish(request, work) if self._is_last else self._pass_on(request, work))
        finally:
            self.training_count -= request.is_training
            if request.is_training:
                self._on_trained()
        work.publish(CallProgress(stage, self._ledger.me, "finished", self.queue))
        return answer

    async def _await_device(self, job: Awaitable[T]) -> T:
        self.queue += 1
        try:
            return await job
        finally:
            self.queue -= 1

    async def _finish(self, request: HopRequest, work: RunningWork) -> HopAnswer:
        # When training, first marks `work` as committed, so that it runs to its end even if all callers leave.
        work.committed = request.is_training
        result = await self._await_device(self._compute.run_last_stages(request.work))
        return self._compose_answer(request, result)

    async def _pass_on(self, request: HopRequest, work: RunningWork) -> HopAnswer:
        microbatch = request.message.microbatch
        entry_stage = request.message.stage
        try:
            output = await self._await_device(self._compute.forward(request.work))
            await self._fault("hop.forwarded")
            onward = replace(request.message, stage=self._span.last + 1)
            while True:
                until = deadline_for_others(loop_time(), request.deadline, 1.5 * (self._backward_s.value or 0.0))
                downstream = await self._router.send(onward, [output, request.work.tokens], until, work.publish)
                result = (
                    await self._backward(downstream, request, work) if request.is_training else SpanResult(None, 0.0)
                )
                if result is not None:
                    return self._compose_answer(request, result, downstream.message)
        finally:
            self._compute.forget(microbatch, entry_stage)  # does nothing after a backward

    async def _backward(self, downstream: HopAnswer, request: HopRequest, work: RunningWork) -> SpanResult | None:
        assert downstream.gradient is not None and downstream.peer is not None, "Router.send checks the answer"
        work.committed = True
        started = loop_time()
        try:
            result = await self._await_device(
                self._compute.backward(request.message.microbatch, request.message.stage, downstream.gradient)
            )
        except ProtocolError as error:
            work.uncommit()
            self._router.report_unusable_gradient(self._span.last + 1, downstream.peer, error)
            return None
        self._backward_s = self._backward_s.with_sample(loop_time() - started)
        return result

    def _compose_answer(
        self, request: HopRequest, result: SpanResult, downstream: Processed | None = None
    ) -> HopAnswer:
        path_s = result.busy_s + (downstream.path_ms / 1000.0 if downstream is not None else 0.0)
        if request.is_training:
            self._busy_s = self._busy_s.with_sample(result.busy_s)
            self._paths_s.append(path_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (result.busy_s, path_s))
        loss: SpanResult | Processed = result if downstream is None else downstream
        message = Processed(loss.loss_sum, loss.tokens, busy_ms, path_ms, loss.log_probabilities, loss.metrics)
        return HopAnswer(message, [] if result.gradient is None else [result.gradient])

    @property
    def service_s(self) -> float | None:
        return self._busy_s.value

    def path_s(self) -> float | None:
        """Returns the median seconds of the path from here to the last stage and back: compute and links, no queueing.

        The median is over the PATH_SAMPLES latest training microbatches; None before the first.
        """
        return median(self._paths_s) if self._paths_s else None


def is_hopeless(left_s: float, own_s: float) -> bool:
    """Returns whether `left_s` is too little time for this hop: less than MIN_USEFUL_S or less than own_s / 2.

    own_s: the device seconds that a microbatch usually takes here; 0 if unknown.
    """
    return left_s < max(MIN_USEFUL_S, 0.5 * own_s)
