"""One peer's work on one microbatch. Each hop calls the next one; the gradient comes back as the answer of the call.

Knows: the order of the work (seat, forward, next stage, backward, answer). Must not know: how tensors are computed
(interfaces.SpanCompute), which peer comes next (router), or who draws microbatches (origin).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from agora_protocol.errors import NotMyStage, ProtocolError, Refused, Unavailable
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import Advance, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.net.fair_share import Holder
from agora.observe import events, faults
from agora.pipeline.barrier import MeanBarrier, StepBarrier
from agora.pipeline.interfaces import HopAnswer, SpanCompute
from agora.pipeline.ledger import RunningWork, WorkKey, WorkLedger
from agora.pipeline.router import Router
from agora.pipeline.routing import deadline_for_others
from agora.stepping import SpanResult

MIN_USEFUL_S = 0.001
"""Seconds: with less time left, a hop starts nothing."""
PATH_SAMPLES = 33
"""Number of latest samples whose median is `Hop.path_s`."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A Process request with its checked tensors, and its deadline on the loop's clock. Immutable.

    boundary: what enters the stage; None at stage 0. holder: the peer that asks; None for this peer's own origin.
    """

    message: Process
    boundary: WireTensor | None
    tokens: WireTensor
    deadline: float
    holder: Holder | None = None

    @property
    def is_training(self) -> bool:
        """Whether the microbatch has a backward, and its gradient is counted; otherwise it is only evaluated."""
        return self.message.purpose == "train"


class Hop:
    """Answers Process requests while this peer holds its span: forward here, call to the next peer, backward here.

    Other peers and this peer's own origin call `process`. queue: number of jobs that wait for the device or are on it.
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
        """on_trained: is called when a training microbatch leaves this hop, after training_count was decremented."""
        self._span = compute.span
        self._is_last = compute.span.last == router.stage_count - 1
        self._compute = compute
        self._router = router
        self._ledger = ledger
        self._report = report
        self._barrier = barrier
        self._fault = fault
        self.queue = 0
        self.training_count = 0
        """Number of training microbatches whose work has begun here and not ended."""
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
        holder: Holder | None = None,
    ) -> HopAnswer:
        """Computes this peer's span, waits for the gradient from downstream, and returns the gradient for upstream.

        First waits, for part of the time until loop time `deadline`, for its stages to reach the microbatch's step. A
        repeated request gets the kept answer, or joins the running work. tensors: [boundary, tokens]; the boundary may
        be missing at stage 0. on_progress is called with each Advance. holder: who asks; None for this peer's own
        origin. Raises Busy, NotMyStage or ProtocolError before any work; Unavailable before it, if too little time is
        left, or, like errors of the compute, during it. In all these cases the gradient is not counted here. Reports
        refusals as HopRefused.
        """
        try:
            answer = self._ledger.answer_repeat(message, on_progress, self.queue)
            if answer is None:
                if message.stage not in self._span:
                    raise NotMyStage(
                        f"this peer holds stages {self._span}, not {message.stage}; ask the directory again"
                    )
                boundary, tokens = self._router.shapes.boundary_and_tokens(message, tensors)
                answer = await self._join_or_start(Job(message, boundary, tokens, deadline, holder), on_progress)
        except Refused as refusal:
            self._report(events.HopRefused(message.microbatch.hex(), message.stage, refusal.code))
            raise
        await self._fault("hop.before-answer")
        return answer

    async def _join_or_start(self, job: Job, on_progress: OnProgress) -> HopAnswer:
        """Waits for the microbatch's step or for a mean, then starts the work or joins it; returns its answer.

        Raises Busy for a microbatch that went through one of these stages before, or whose step is too far ahead.
        """
        first, step, last = job.message.stage, job.message.step, self._span.last
        key = WorkKey(job.message.microbatch, first)
        if job.is_training:
            self._ledger.refuse_overlap(key, last)
        if isinstance(self._barrier, MeanBarrier) and job.is_training:
            await self._barrier.wait_for_mean(first, job.deadline)
        elif isinstance(self._barrier, StepBarrier) and step:
            self._barrier.refuse_early(first, step)
            await self._barrier.wait_for_step(first, step, job.deadline)
        return await self._ledger.run(
            key, last, job.deadline, on_progress, lambda work: self._perform(job, work), job.holder
        )

    async def _perform(self, job: Job, work: RunningWork) -> HopAnswer:
        """Computes this span, has the later stages computed, and returns the answer.

        Publishes "accepted" to the callers at the start and "finished" at the end. Raises Unavailable, before any work,
        if too little time is left for this hop alone.
        """
        stage, left_s = job.message.stage, job.deadline - loop_time()
        if is_hopeless(left_s, self._busy_s.value or 0.0):
            raise Unavailable(stage, [f"{left_s:.3f} s are too short for this hop"])
        work.publish(Advance(stage, self._ledger.me, "accepted", self.queue))
        self.training_count += job.is_training
        try:
            await self._fault("hop.accepted")
            answer = await (self._finish(job, work) if self._is_last else self._pass_on(job, work))
        finally:
            self.training_count -= job.is_training
            if job.is_training:
                self._on_trained()
        work.publish(Advance(stage, self._ledger.me, "finished", self.queue))
        return answer

    async def _await_device(self, job: Awaitable[T]) -> T:
        """Awaits a device job and returns its result; `queue` is one higher until then."""
        self.queue += 1
        try:
            return await job
        finally:
            self.queue -= 1

    async def _finish(self, job: Job, work: RunningWork) -> HopAnswer:
        """Does the last hop: forward, loss and, when training, backward, as one device job; returns the answer.

        When training, first marks the work as committed: it then runs to its end even if all callers leave.
        """
        work.committed = job.is_training
        result = await self._await_device(
            self._compute.finish(
                job.message.microbatch,
                job.message.stage,
                job.boundary,
                job.tokens,
                job.message.purpose,
                job.message.references,
            )
        )
        return self._answer(job, result)

    async def _pass_on(self, job: Job, work: RunningWork) -> HopAnswer:
        """Does a hop that is not the last: forward, call to the next peer, backward when training; returns the answer.

        When the gradient from downstream cannot be used, another peer is called with the same forward.
        """
        microbatch, first, purpose = job.message.microbatch, job.message.stage, job.message.purpose
        try:
            output = await self._await_device(
                self._compute.forward(microbatch, first, job.boundary, job.tokens, purpose)
            )
            await self._fault("hop.forwarded")
            onward = replace(job.message, stage=self._span.last + 1)
            while True:
                until = deadline_for_others(loop_time(), job.deadline, 1.5 * (self._backward_s.value or 0.0))
                downstream = await self._router.send(onward, [output, job.tokens], until, work.publish)
                result = await self._backward(downstream, job, work) if job.is_training else SpanResult(None, 0.0)
                if result is not None:
                    return self._answer(job, result, downstream.message)
        finally:
            self._compute.forget(microbatch, first)  # does nothing after a backward

    async def _backward(self, downstream: HopAnswer, job: Job, work: RunningWork) -> SpanResult | None:
        """Runs the backward on the gradient in `downstream`, commits the work, and returns the result.

        If the gradient cannot be used, reports its sender, keeps the forward, and returns None.
        """
        assert downstream.gradient is not None and downstream.peer is not None, "Router.send checks the answer"
        work.committed = True
        started = loop_time()
        try:
            result = await self._await_device(
                self._compute.backward(job.message.microbatch, job.message.stage, downstream.gradient)
            )
        except ProtocolError as error:
            work.uncommit()
            self._router.report_unusable_gradient(self._span.last + 1, downstream.peer, error)
            return None
        self._backward_s = self._backward_s.with_sample(loop_time() - started)
        return result

    def _answer(self, job: Job, result: SpanResult, downstream: Processed | None = None) -> HopAnswer:
        """Returns the answer for upstream: loss, metrics, times and gradient. When training, records the times too.

        downstream: the answer of the next hop, from which loss and metrics are taken; None at the last hop. busy_ms:
        this span's time on the device. path_ms: busy_ms plus `downstream.path_ms`, to which the router has added the
        time on the link; it contains no queueing.
        """
        path_s = result.busy_s + (downstream.path_ms / 1000.0 if downstream is not None else 0.0)
        if job.is_training:
            self._busy_s = self._busy_s.with_sample(result.busy_s)
            self._paths_s.append(path_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (result.busy_s, path_s))
        loss: SpanResult | Processed = result if downstream is None else downstream
        message = Processed(loss.loss_sum, loss.tokens, busy_ms, path_ms, loss.log_probabilities, loss.metrics)
        return HopAnswer(message, [] if result.gradient is None else [result.gradient])

    @property
    def service_s(self) -> float | None:
        """Moving average of the device seconds that a training microbatch takes here; None until measured."""
        return self._busy_s.value

    def path_s(self) -> float | None:
        """Returns the median seconds of the way from here to the last stage and back, without queueing.

        The median is over the PATH_SAMPLES latest training microbatches; None before the first.
        """
        return median(self._paths_s) if self._paths_s else None


def is_hopeless(left_s: float, own_s: float) -> bool:
    """Returns whether `left_s` seconds are too few for this hop: less than MIN_USEFUL_S, or than half of `own_s`.

    own_s: the device seconds that a microbatch usually takes here.
    """
    return left_s < max(MIN_USEFUL_S, 0.5 * own_s)
