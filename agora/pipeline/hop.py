"""Answers Process requests for this peer's span: forward, a call to the next peer, backward.

The gradient comes back as the answer of the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Protocol

from agora_protocol.errors import NotMyStage, ProtocolError, Refused, Unavailable
from agora_protocol.ids import Span
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import CallProgress, Processed
from agora_protocol.tensors import WireTensor

from agora.core.clock import loop_time
from agora.core.moving_average import MovingAverage
from agora.core.span_work import ForwardKey, SpanResult, SpanWork
from agora.observe import events, faults
from agora.pipeline.barriers import MeanBarrier, StepBarrier
from agora.pipeline.device_time import DeviceTimeAccount
from agora.pipeline.load_balancer import deadline_for_others
from agora.pipeline.process_call import HopAnswer, ProcessCall
from agora.pipeline.router import Router
from agora.pipeline.work_ledger import RunningWork, WorkLedger

MIN_USEFUL_S = 0.001  # a hop starts nothing when fewer seconds than this are left
LATENCY_SAMPLES = 33  # number of latest samples whose median is `Hop.latency_s`


class MicrobatchWorker(Protocol):
    """The worker of this peer's span as a hop uses it: runs microbatches forward and backward. Takes no steps.

    Every failure is an AgoraError, and a cancelled job leaves nothing behind. `run_last_stages` for training, and
    `backward`, count the microbatch: when one of these returns, its gradient is in the stages' sums; when it raises,
    the gradient is not. So a cancellation that comes while one of these runs on the device does nothing, and the result
    is returned; before that, the job is dropped.
    """

    @property
    def span(self) -> Span:
        """The stages that this worker computes."""

    async def forward(self, work: SpanWork) -> WireTensor:
        """Runs stages `work.entry_stage` to the span's last and returns the boundary that leaves the span.

        For training, what `backward` needs is kept until `backward` succeeds or `drop_forward` is called.
        """

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        """Runs stages `work.entry_stage` to the model's last, the loss and, for training, the backward, as one job."""

    async def backward(self, key: ForwardKey, gradient: WireTensor) -> SpanResult:
        """Runs the backward pass of an earlier `forward`. gradient: of the boundary that `forward` returned.

        Raises ProtocolError for a gradient that cannot be used; then `backward` may be called with another one.
        """

    def drop_forward(self, key: ForwardKey) -> None:
        """Drops what `forward` kept under this key, if anything."""


class Hop:
    """Answers Process requests while this peer holds its span: forward here, call to the next peer, backward here.

    Other peers and this peer's own origin call `process`.
    queue: number of this hop's jobs that wait for the device or run on it.
    training_count: number of training microbatches whose work has begun here and not ended.
    device_time: what the device's time is spent on.
    """

    def __init__(
        self,
        worker: MicrobatchWorker,
        router: Router,
        ledger: WorkLedger,
        *,
        report: events.Report,
        barrier: StepBarrier | MeanBarrier | None = None,
        fault: faults.InjectFault = faults.inject_fault,
        on_trained: Callable[[], None] = lambda: None,
    ) -> None:
        """on_trained: called when the work on a training microbatch has ended here, with or without success."""
        self._span = worker.span
        self._is_last = worker.span.last == router.stage_count - 1
        self._worker = worker
        self._router = router
        self._ledger = ledger
        self._report = report
        self._barrier = barrier
        self._fault = fault
        self.queue = 0
        self.training_count = 0
        self._on_trained = on_trained
        self.device_time = DeviceTimeAccount(loop_time())
        self._busy_s = MovingAverage(0.1)
        self._backward_s = MovingAverage(0.1)
        self._latencies_s: deque[float] = deque(maxlen=LATENCY_SAMPLES)

    async def process(self, call: ProcessCall) -> HopAnswer:
        """Computes this peer's span, waits for the gradient from downstream, and returns the gradient for upstream.

        A repeated request gets the kept answer, or joins the running work. Before any work, raises Busy, NotMyStage or
        ProtocolError, or Unavailable if too little time is left. During the work, raises Unavailable, errors of the
        device, or PeerFailed when WorkLedger.drain ends the work. After each of these the gradient is not counted here.
        """
        request = call.request
        try:
            # Before any check of span and tensors: after a move this peer still keeps answers of its former span.
            answer = self._ledger.answer_repeat(call, self.queue)
            if answer is None:
                if request.stage not in self._span:
                    raise NotMyStage(
                        f"this peer holds stages {self._span}, not {request.stage}; ask the directory again"
                    )
                work = self._router.wire_rules.check_request(call)
                if self._barrier is not None:  # before it takes a slot: what waits for a step must not hold up others
                    with self._accounted(held=1):
                        await self._barrier.hold(request, call.deadline)
                answer = await self._ledger.run(call, self._span.last, partial(self._perform, call, work))
        except Refused as refusal:
            self._report(events.HopRefused(request.microbatch.hex(), request.stage, refusal.code))
            raise
        await self._fault("hop.before-answer")
        return answer

    async def _perform(self, call: ProcessCall, work: SpanWork, running: RunningWork) -> HopAnswer:
        left_s = call.deadline - loop_time()
        if is_hopeless(left_s, self._busy_s.value or 0.0):
            raise Unavailable(work.entry_stage, [f"{left_s:.3f} s are too short for this hop"])
        running.publish(CallProgress(work.entry_stage, self._ledger.me, "accepted", self.queue))
        self.training_count += work.is_training
        try:
            await self._fault("hop.accepted")
            if self._is_last:
                if work.is_training:
                    running.mark_maybe_counted()  # one job: it cannot be cancelled between forward and counting
                with self._queued_job():
                    result = await self._worker.run_last_stages(work)
                answer = self._compose_answer(work, result)
            else:
                answer = await self._through_later_stages(call, work, running)
        finally:
            self.training_count -= work.is_training
            if work.is_training:
                self._on_trained()
        running.publish(CallProgress(work.entry_stage, self._ledger.me, "finished", self.queue))
        return answer

    async def _through_later_stages(self, call: ProcessCall, work: SpanWork, running: RunningWork) -> HopAnswer:
        try:
            with self._queued_job():
                output = await self._worker.forward(work)
            await self._fault("hop.forwarded")
            onward = replace(call.request, stage=self._span.last + 1)
            while True:
                until = deadline_for_others(loop_time(), call.deadline, 1.5 * (self._backward_s.value or 0.0))
                sent = ProcessCall(onward, [output, work.tokens], until, running.publish)
                sent_at = loop_time()
                with self._accounted(away=1):
                    downstream = await self._router.send(sent)
                self.device_time.record_return(loop_time() - sent_at, downstream.wire_s)
                if not work.is_training:
                    return self._compose_answer(work, SpanResult(None, 0.0), downstream.message)
                assert downstream.gradient is not None and downstream.peer is not None, "Router.send checks the answer"
                running.mark_maybe_counted()
                started = loop_time()
                try:
                    with self._queued_job():
                        result = await self._worker.backward(work.key, downstream.gradient)
                except ProtocolError as error:
                    # The forward is kept. Its sender is blamed, so another peer is asked for a gradient next.
                    running.mark_not_counted()
                    self._router.report_unusable_gradient(onward.stage, downstream.peer, error)
                    continue
                self._backward_s = self._backward_s.with_sample(loop_time() - started)
                return self._compose_answer(work, result, downstream.message)
        finally:
            self._worker.drop_forward(work.key)  # does nothing after a backward

    @contextmanager
    def _queued_job(self) -> Iterator[None]:
        self.queue += 1
        try:
            with self._accounted(jobs=1):
                yield
        finally:
            self.queue -= 1

    @contextmanager
    def _accounted(self, *, jobs: int = 0, held: int = 0, away: int = 0) -> Iterator[None]:
        self.device_time.change(loop_time(), jobs=jobs, held=held, away=away)
        try:
            yield
        finally:
            self.device_time.change(loop_time(), jobs=-jobs, held=-held, away=-away)

    def _compose_answer(self, work: SpanWork, result: SpanResult, downstream: Processed | None = None) -> HopAnswer:
        # path_ms has no queueing in it: it is the device time of this span, plus the path_ms from downstream, to which
        # the router has added the time on the link.
        latency_s = result.busy_s + (downstream.path_ms / 1000.0 if downstream is not None else 0.0)
        if work.is_training:
            self._busy_s = self._busy_s.with_sample(result.busy_s)
            self._latencies_s.append(latency_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (result.busy_s, latency_s))
        loss: SpanResult | Processed = result if downstream is None else downstream
        message = Processed(
            loss_sum=loss.loss_sum,
            tokens=loss.tokens,
            busy_ms=busy_ms,
            path_ms=path_ms,
            log_probabilities=loss.log_probabilities,
            metrics=loss.metrics,
        )
        return HopAnswer(message, [] if result.gradient is None else [result.gradient])

    @property
    def service_s(self) -> float | None:
        return self._busy_s.value

    def latency_s(self) -> float | None:
        """The median seconds from here to the last stage and back: compute and links, no queueing.

        Over the latest training microbatches; None before the first.
        """
        return median(self._latencies_s) if self._latencies_s else None


def is_hopeless(left_s: float, own_s: float) -> bool:
    """Returns whether `left_s` is too little time for a hop whose device usually needs `own_s` (0 if unknown)."""
    return left_s < max(MIN_USEFUL_S, 0.5 * own_s)
