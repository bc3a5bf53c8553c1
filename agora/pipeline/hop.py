"""One peer's work on one microbatch: the nested call of which the whole pipeline is the recursion.

Knows: the order of things (seat, forward, next stage, backward, answer). Must not know: how tensors are computed
(interfaces.SpanCompute), which peer comes next (router), or who draws microbatches (origin).

What a caller may rely on:

| the caller                         | then                                                             |
|------------------------------------|------------------------------------------------------------------|
| is refused (Busy, NotMyStage, ...) | no work was done                                                 |
| repeats a microbatch               | it gets the kept answer, or joins the running work               |
| leaves (CANCEL, its deadline)      | seat, forward and calls downstream are freed, unless the         |
|                                    | gradient may be counted already                                  |
| vanishes without a word            | nothing changes: the work ends and its answer is kept            |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from agora_protocol.errors import NotMyStage, PeerFailed, ProtocolError, Refused, Unavailable
from agora_protocol.ids import Span
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
from agora.pipeline.routing import MAX_OWN_SHARE
from agora.stepping import SpanResult

if TYPE_CHECKING:
    from agora.pipeline.router import Router

MIN_USEFUL_S = 0.001
"""Less time than this is not worth starting for."""
PATH_SAMPLES = 33


@dataclass(frozen=True, slots=True)
class Job:
    """A Process request with its tensors checked: everything about it that a hop needs."""

    message: Process
    boundary: WireTensor | None
    tokens: WireTensor
    deadline: float

    @property
    def key(self) -> WorkKey:
        """The key of this work in the ledger."""
        return WorkKey.of(self.message)

    @property
    def train(self) -> bool:
        """Whether the microbatch has a backward and is counted."""
        return self.message.purpose == "train"


class Hop:
    """This peer's place in the pipeline while it holds its span. Other peers and the own origin enter by `process`."""

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
        self._stage_count = stage_count
        self._shapes = shapes
        self._compute = compute
        self._router = router
        self._ledger = ledger
        self._report = report
        self._barrier = barrier
        self._fault = fault
        self._on_device = 0
        self._busy_s = MovingAverage(0.1)
        self._backward_s = MovingAverage(0.1)
        self._paths_s: deque[float] = deque(maxlen=PATH_SAMPLES)

    @property
    def span(self) -> Span:
        """The stages that this peer serves."""
        return self._compute.span

    @property
    def queue(self) -> int:
        """Microbatches that wait for the device or are on it."""
        return self._on_device

    async def process(
        self, message: Process, tensors: Sequence[WireTensor], deadline: float, on_progress: OnProgress
    ) -> HopAnswer:
        """Computes this peer's span, waits for the gradient from downstream, and returns the gradient for upstream.

        tensors: [boundary, tokens]; the boundary may be missing at stage 0. deadline: on the loop's clock. The answer
        carries the gradient of the boundary, in its shape; none at stage 0 and when evaluating. Raises Busy, NotMyStage
        or ProtocolError before any work is done, Unavailable when nobody downstream answered in time, and what the
        compute raises; nothing is counted then.
        """
        try:
            answer = self._ledger.answer_repeat(message, on_progress, self._on_device)
            if answer is None:
                answer = await self._join_or_start(self._checked(message, tensors, deadline), on_progress)
        except Refused as refusal:
            self._report(events.HopRefused(message.microbatch.hex(), message.stage, refusal.code))
            raise
        await self._fault("hop.before-answer")
        return answer

    def _checked(self, message: Process, tensors: Sequence[WireTensor], deadline: float) -> Job:
        """Returns the request as a Job. Raises NotMyStage or ProtocolError when this peer cannot take it."""
        if message.stage not in self.span:
            raise NotMyStage(f"this peer holds stages {self.span}, not {message.stage}; read the directory again")
        boundary, tokens = self._shapes.boundary_and_tokens(message, tensors)
        return Job(message, boundary, tokens, deadline)

    async def _join_or_start(self, job: Job, on_progress: OnProgress) -> HopAnswer:
        """Refuses what may not start here now, waits for the microbatch's step, then joins or starts its work."""
        first, step = job.message.stage, job.message.step
        if job.train:
            self._ledger.refuse_overlap(job.key, self.span.last)
        if self._barrier is not None and step:
            self._barrier.refuse_early(first, step)
            await self._barrier.wait_for_step(first, step, job.deadline)
        left_s = job.deadline - loop_time()
        if not self._ledger.is_running(job.key) and is_hopeless(left_s, self._busy_s.value or 0.0):
            raise Unavailable(first, [f"{left_s:.3f} s are too short for this hop"])
        return await self._ledger.run(
            job.key, self.span.last, job.deadline, on_progress, lambda work: self._perform(job, work)
        )

    async def _perform(self, job: Job, work: Work) -> HopAnswer:
        """Announces the seat, computes the span and the rest of the pipeline, and returns the answer."""
        work.publish(self._advance(job, "accepted"))
        await self._fault("hop.accepted")
        is_last = self.span.last == self._stage_count - 1
        answer = await (self._finish(job, work) if is_last else self._pass_on(job, work))
        work.publish(self._advance(job, "finished"))
        return answer

    async def _finish(self, job: Job, work: Work) -> HopAnswer:
        """Computes the last hop: forward, loss and backward as one job of the device."""
        if job.train:
            work.commit()
        with self._counted_on_device():
            result = await self._compute.finish(
                job.message.microbatch, job.message.stage, job.boundary, job.tokens, job.train
            )
        return self._answer(job, result, result.busy_s, result.gradient)

    async def _pass_on(self, job: Job, work: Work) -> HopAnswer:
        """Computes any other hop: forward, the rest of the pipeline, backward."""
        microbatch, first, kept = job.message.microbatch, job.message.stage, job.train
        try:
            with self._counted_on_device():
                output = await self._compute.forward(microbatch, first, job.boundary, job.tokens, job.train)
            await self._fault("hop.forwarded")
            while True:
                below = await self._send_on(job, output, work)
                if not job.train:
                    return self._answer(job, below.message, 0.0, None, below.message.path_ms)
                result = await self._backward(below, job, work)
                if result is not None:
                    kept = False
                    return self._answer(job, below.message, result.busy_s, result.gradient, below.message.path_ms)
        finally:
            if kept:
                self._compute.forget(microbatch, first)

    async def _send_on(self, job: Job, output: WireTensor, work: Work) -> HopAnswer:
        """Sends the output to the next stage and returns its answer, in time for the backward here."""
        message = replace(job.message, stage=self.span.last + 1)
        until = downstream_deadline(loop_time(), job.deadline, self._backward_s.value or 0.0)
        return await self._router.send(message, [output, job.tokens], until, work.publish)

    async def _backward(self, below: HopAnswer, job: Job, work: Work) -> SpanResult | None:
        """Runs the backward here; returns None, with the forward still kept, when the gradient received is unusable."""
        if below.gradient is None or below.peer is None:
            raise PeerFailed("no gradient came back from downstream")
        work.commit()
        started = loop_time()
        try:
            with self._counted_on_device():
                result = await self._compute.backward(job.message.microbatch, job.message.stage, below.gradient)
        except ProtocolError as error:
            work.uncommit()
            self._router.report_useless_gradient(self.span.last + 1, below.peer, error)
            return None
        self._backward_s = self._backward_s.updated(loop_time() - started)
        return result

    def _answer(
        self, job: Job, loss: SpanResult | Processed, busy_s: float, gradient: WireTensor | None, below_ms: float = 0.0
    ) -> HopAnswer:
        """Returns the answer for upstream, and records how long this way takes when nothing waits.

        When training, the microbatch has been counted by now. below_ms: time of the way after this span.
        """
        path_s = busy_s + below_ms / 1000.0
        if job.train:
            self._busy_s = self._busy_s.updated(busy_s)
            self._paths_s.append(path_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (busy_s, path_s))
        message = Processed(loss.loss_sum, loss.tokens, busy_ms, path_ms)
        return HopAnswer(message, [] if gradient is None else [gradient])

    def _advance(self, job: Job, what: str) -> Advance:
        """Returns the progress message of this hop."""
        return Advance(job.message.stage, self._ledger.me, what, self._on_device)

    @contextmanager
    def _counted_on_device(self) -> Iterator[None]:
        """Counts one microbatch more in the device's queue while the context lasts."""
        self._on_device += 1
        try:
            yield
        finally:
            self._on_device -= 1

    def path_s(self) -> float | None:
        """Seconds that a microbatch takes from here to the last stage and back when nothing waits; None until measured.

        The sum of what every peer on its way measured: its device time and its link to the next. It is the median of
        the last PATH_SAMPLES, because the first microbatches waited for connections.
        """
        return median(self._paths_s) if self._paths_s else None

    def pause(self, reason: str = "paused by its owner") -> None:
        """Refuses new microbatches; those inside are finished."""
        self._ledger.refuse_new(reason)

    def resume(self) -> None:
        """Takes new microbatches again."""
        self._ledger.accept_new()

    async def leave(self, within_s: float, reason: str = "leaving") -> bool:
        """Refuses new microbatches, waits at most `within_s` for those inside, then cancels them.

        Returns whether all were finished. The ledger keeps refusing until `resume` of this hop or of the next one.
        """
        self._ledger.refuse_new(reason)
        idle = await self._ledger.wait_until_idle(loop_time() + within_s)
        await self._ledger.cancel_all()
        return idle


def downstream_deadline(now: float, deadline: float, own_s: float) -> float:
    """Returns when the gradient must be back so that a backward of about `own_s` seconds still makes `deadline`."""
    remaining = max(0.0, deadline - now)
    return deadline - min(1.5 * own_s, MAX_OWN_SHARE * remaining)


def is_hopeless(left_s: float, own_s: float) -> bool:
    """Whether `left_s` seconds are too short for this hop's own work, which takes about `own_s` seconds."""
    return left_s < max(MIN_USEFUL_S, 0.5 * own_s)
