"""One peer's work on one microbatch: the nested call of which the whole pipeline is the recursion.

Knows: the order of things (seat, forward, next stage, backward, answer). Must not know: how tensors are computed
(interfaces.SpanCompute), which peer comes next (router), or who draws microbatches (origin).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from agora_protocol.errors import NotMyStage, PeerFailed, ProtocolError, Refused, Unavailable
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import Advance, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.observe import events, faults
from agora.observe.events import Report
from agora.observe.faults import ReachFault
from agora.pipeline.barrier import StepBarrier
from agora.pipeline.interfaces import HopAnswer, SpanCompute, WireShapes
from agora.pipeline.ledger import Work, WorkKey, WorkLedger
from agora.pipeline.router import Router
from agora.pipeline.routing import MAX_OWN_SHARE
from agora.stepping import SpanResult

MIN_USEFUL_S = 0.001
"""Less time than this is not worth starting for."""
PATH_SAMPLES = 33
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A Process request with its tensors checked, and its deadline on the loop's clock. boundary: None at stage 0."""

    message: Process
    boundary: WireTensor | None
    tokens: WireTensor
    deadline: float

    @property
    def train(self) -> bool:
        """Whether the microbatch has a backward and is counted; otherwise it is only evaluated."""
        return self.message.purpose == "train"


class Hop:
    """Answers Process requests while this peer holds its span: forward here, call to the next peer, backward here.

    Other peers and this peer's own origin call `process`; the ledger makes each microbatch run once.

    queue: microbatches that wait for the device or are on it.
    """

    def __init__(
        self,
        compute: SpanCompute,
        router: Router,
        ledger: WorkLedger,
        *,
        stage_count: int,
        shapes: WireShapes,
        report: Report,
        barrier: StepBarrier | None = None,
        fault: ReachFault = faults.reach,
    ) -> None:
        self._span = compute.span
        self._is_last = compute.span.last == stage_count - 1
        self._shapes = shapes
        self._compute = compute
        self._router = router
        self._ledger = ledger
        self._report = report
        self._barrier = barrier
        self._fault = fault
        self.queue = 0
        self._busy_s = MovingAverage(0.1)
        self._backward_s = MovingAverage(0.1)
        self._paths_s: deque[float] = deque(maxlen=PATH_SAMPLES)

    async def process(
        self, message: Process, tensors: Sequence[WireTensor], deadline: float, on_progress: OnProgress
    ) -> HopAnswer:
        """Computes this peer's span, waits for the gradient from downstream, and returns the gradient for upstream.

        A repeat gets the kept answer, or joins the running work. Every refusal is reported as HopRefused.
        tensors: [boundary, tokens]; the boundary may be missing at stage 0. deadline: on the loop's clock. The answer
        carries the gradient of the boundary; none at stage 0 and when evaluating. Raises Busy, NotMyStage or
        ProtocolError before any work; Unavailable or an error of the compute later, when nothing was counted either.
        """
        try:
            answer = self._ledger.answer_repeat(message, on_progress, self.queue)
            if answer is None:
                if message.stage not in self._span:
                    raise NotMyStage(
                        f"this peer holds stages {self._span}, not {message.stage}; ask the directory again"
                    )
                boundary, tokens = self._shapes.boundary_and_tokens(message, tensors)
                answer = await self._join_or_start(Job(message, boundary, tokens, deadline), on_progress)
        except Refused as refusal:
            self._report(events.HopRefused(message.microbatch.hex(), message.stage, refusal.code))
            raise
        await self._fault("hop.before-answer")
        return answer

    async def _join_or_start(self, job: Job, on_progress: OnProgress) -> HopAnswer:
        """Refuses an overlap or a step too far ahead (Busy), waits for the step, then joins or starts the work."""
        first, step, last = job.message.stage, job.message.step, self._span.last
        key = WorkKey(job.message.microbatch, first)
        if job.train:
            self._ledger.refuse_overlap(key, last)
        if self._barrier is not None and step:
            self._barrier.refuse_early(first, step)
            await self._barrier.wait_for_step(first, step, job.deadline)
        return await self._ledger.run(key, last, job.deadline, on_progress, lambda work: self._perform(job, work))

    async def _perform(self, job: Job, work: Work) -> HopAnswer:
        """Tells the callers "accepted", computes the span and the rest of the pipeline, and tells them "finished".

        Raises Unavailable before that when the time left is too short, see `is_hopeless`.
        """
        stage, left_s = job.message.stage, job.deadline - loop_time()
        if is_hopeless(left_s, self._busy_s.value or 0.0):
            raise Unavailable(stage, [f"{left_s:.3f} s are too short for this hop"])
        work.publish(Advance(stage, self._ledger.me, "accepted", self.queue))
        await self._fault("hop.accepted")
        answer = await (self._finish(job, work) if self._is_last else self._pass_on(job, work))
        work.publish(Advance(stage, self._ledger.me, "finished", self.queue))
        return answer

    async def _in_queue(self, job: Awaitable[T]) -> T:
        """Awaits a job of the device and returns its result; counts the job in `queue` until then."""
        self.queue += 1
        try:
            return await job
        finally:
            self.queue -= 1

    async def _finish(self, job: Job, work: Work) -> HopAnswer:
        """Computes the last hop: forward, loss and, when training, backward as one job; commits the work first."""
        work.committed = job.train
        result = await self._in_queue(
            self._compute.finish(job.message.microbatch, job.message.stage, job.boundary, job.tokens, job.train)
        )
        return self._answer(job, result, result.busy_s, result.gradient)

    async def _pass_on(self, job: Job, work: Work) -> HopAnswer:
        """Computes a hop that is not the last: forward, the call to the next peer, and when training the backward.

        After an unusable gradient it calls another peer. When it ends without a backward, it drops the forward.
        """
        microbatch, first, kept = job.message.microbatch, job.message.stage, job.train
        try:
            output = await self._in_queue(self._compute.forward(microbatch, first, job.boundary, job.tokens, job.train))
            await self._fault("hop.forwarded")
            onward = replace(job.message, stage=self._span.last + 1)
            while True:
                until = downstream_deadline(loop_time(), job.deadline, self._backward_s.value or 0.0)
                below = await self._router.send(onward, [output, job.tokens], until, work.publish)
                if not job.train:
                    return self._answer(job, below.message, 0.0, None, below.message.path_ms)
                result = await self._backward(below, job, work)
                if result is not None:
                    kept = False
                    return self._answer(job, below.message, result.busy_s, result.gradient, below.message.path_ms)
        finally:
            if kept:
                self._compute.forget(microbatch, first)

    async def _backward(self, below: HopAnswer, job: Job, work: Work) -> SpanResult | None:
        """Runs the backward here. Unusable gradient: reports its sender, keeps the forward, and returns None."""
        if below.gradient is None or below.peer is None:
            raise PeerFailed("no gradient came back from downstream")
        work.committed = True
        started = loop_time()
        try:
            result = await self._in_queue(
                self._compute.backward(job.message.microbatch, job.message.stage, below.gradient)
            )
        except ProtocolError as error:
            work.uncommit()
            self._router.report_useless_gradient(self._span.last + 1, below.peer, error)
            return None
        self._backward_s = self._backward_s.updated(loop_time() - started)
        return result

    def _answer(
        self, job: Job, loss: SpanResult | Processed, busy_s: float, gradient: WireTensor | None, below_ms: float = 0.0
    ) -> HopAnswer:
        """Returns the answer for upstream: loss, times, gradient. When training, records the times for `path_s`.

        loss: holds loss_sum and tokens. below_ms: milliseconds of the way after this span, by the answer from there.
        """
        path_s = busy_s + below_ms / 1000.0
        if job.train:
            self._busy_s = self._busy_s.updated(busy_s)
            self._paths_s.append(path_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (busy_s, path_s))
        message = Processed(loss.loss_sum, loss.tokens, busy_ms, path_ms)
        return HopAnswer(message, [] if gradient is None else [gradient])

    def path_s(self) -> float | None:
        """Seconds that a microbatch takes from here to the last stage and back when nothing waits; None until measured.

        The sum of what every peer on its way measured: its device time and its link to the next. It is the median of
        the last PATH_SAMPLES, because the first microbatches waited for connections.
        """
        return median(self._paths_s) if self._paths_s else None


def downstream_deadline(now: float, deadline: float, own_s: float) -> float:
    """Returns by when the gradient must be back, so that a backward of about `own_s` seconds still makes `deadline`.

    1.5 * own_s before `deadline`, but at most MAX_OWN_SHARE of the time from `now` to `deadline`.
    """
    remaining = max(0.0, deadline - now)
    return deadline - min(1.5 * own_s, MAX_OWN_SHARE * remaining)


def is_hopeless(left_s: float, own_s: float) -> bool:
    """Whether `left_s` is less than MIN_USEFUL_S or than half of `own_s`, the usual seconds of this hop's own work."""
    return left_s < max(MIN_USEFUL_S, 0.5 * own_s)
