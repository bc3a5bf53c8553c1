"""One peer's work on one microbatch: the nested call of which the whole pipeline is the recursion.

Knows the order of things: seat, forward, onward, backward, answer. Must not know how tensors are computed
(interfaces.SpanCompute), which peer comes next (router) or who draws microbatches (origin).

What a caller may rely on. Refused (Busy, NotMyStage, ProtocolError) means that no work was done. A repeat of a
microbatch is answered from the cache or joins the running work. A caller that leaves (CANCEL, or its deadline) frees
the seat, the forward's memory and the calls downstream, unless the gradient is already being counted: then the hop
runs to its end and keeps the result. A caller that vanishes without a word changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from agora_protocol.errors import Busy, NotMyStage, PeerFailed, ProtocolError, Refused, Unavailable
from agora_protocol.ids import PeerId, Span
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import Advance, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress
from agora.clock import loop_time
from agora.observe import events, faults
from agora.observe.events import Report
from agora.observe.faults import ReachFault
from agora.pipeline.admission import Admission
from agora.pipeline.deadline import downstream_deadline, is_hopeless
from agora.pipeline.gate import StepGate
from agora.pipeline.inflight import InProgress, Work
from agora.pipeline.interfaces import BackwardResult, HopAnswer, LossSum, SpanCompute, WireShapes
from agora.pipeline.results import ResultCache, WorkKey

if TYPE_CHECKING:
    from agora.pipeline.router import Router

ELSEWHERE_RETRY_MS = 1000
MOST_AHEAD = 1
"""By so many steps a microbatch may be early. An origin's stage takes a step when all its tokens have been counted at
every stage, by replicas that had taken all before it: one that is further behind is no help before it has new state.
"""
PATHS = 33


@dataclass(frozen=True, slots=True)
class Job:
    """A Process message, understood: everything about it that a hop needs."""

    message: Process
    boundary: WireTensor | None
    tokens: WireTensor
    deadline: float

    @property
    def key(self) -> WorkKey:
        """What makes a repeat a repeat."""
        return WorkKey(self.message.microbatch, self.message.stage)

    @property
    def train(self) -> bool:
        """Whether there is a backward, and something to count."""
        return self.message.purpose == "train"


@dataclass(frozen=True, slots=True)
class HopConfig:
    """Who this peer is in the pipeline."""

    me: PeerId
    stage_count: int
    shapes: WireShapes


class Hop:
    """This peer's place in the pipeline; other peers and the local origin enter through `process`."""

    def __init__(
        self,
        config: HopConfig,
        compute: SpanCompute,
        router: Router,
        admission: Admission,
        *,
        results: ResultCache,
        report: Report,
        gate: StepGate | None = None,
        fault: ReachFault = faults.reach,
    ) -> None:
        self._config = config
        self._compute = compute
        self._router = router
        self._admission = admission
        self._results = results
        self._report = report
        self._gate = gate
        self._fault = fault
        self._running = InProgress()
        self._in_hand = 0
        self._busy_s = 0.0
        self._backward_s = 0.0
        self._paths_s: deque[float] = deque(maxlen=PATHS)

    @property
    def span(self) -> Span:
        """The stages that this peer serves."""
        return self._compute.span

    async def process(
        self, message: Process, tensors: Sequence[WireTensor], deadline: float, progress: OnProgress
    ) -> HopAnswer:
        """One hop: compute this peer's span, await the gradient from downstream, return the gradient upstream.

        tensors: [boundary, tokens]; the boundary is missing or ignored at stage 0. deadline: on the loop's clock. The
        answer carries the gradient of the boundary, in its shape; none at stage 0 and when evaluating. Raises Busy,
        NotMyStage or ProtocolError before any work is done, Unavailable when nobody downstream answered in time, and
        what the compute raises; nothing is counted then.
        """
        try:
            job = self._understood(message, tensors, deadline)
            kept = self._results.get(job.key, loop_time())
            if kept is None:
                self._refuse_another_entry(job)
                if self._gate is not None and message.step:
                    await self._gate.passed(message.stage, message.step - MOST_AHEAD, loop_time())
                    await self._gate.passed(message.stage, message.step, deadline)
                answer = await self._joined_or_begun(job, progress)
            else:
                answer = self._repeated(job, kept, progress)
        except Refused as refusal:
            self._report(events.HopRefused(message.microbatch.hex(), message.stage, refusal.code))
            raise
        await self._fault("hop.before-answer")
        return answer

    async def _joined_or_begun(self, job: Job, progress: OnProgress) -> HopAnswer:
        if self._running.has(job.key):
            self._report(events.RepeatServed(job.message.microbatch.hex(), job.message.stage))
        elif is_hopeless(loop_time(), job.deadline, self._busy_s):
            raise Unavailable(job.message.stage, [f"{job.deadline - loop_time():.3f} s are too short for this hop"])
        return await self._running.run(job.key, job.deadline, progress, lambda work: self._hop(job, work))

    async def _hop(self, job: Job, work: Work) -> HopAnswer:
        """The hop itself, from seat to answer."""
        started = loop_time()
        with self._admission.enter(started):
            work.advance(self._news(job, "accepted"))
            await self._fault("hop.accepted")
            answer = await (self._finish(job, work) if self._is_last else self._pass_on(job, work))
            self._results.put(job.key, answer, loop_time())
            work.advance(self._news(job, "finished"))
            self._admission.held(loop_time() - started)
            return answer

    async def _finish(self, job: Job, work: Work) -> HopAnswer:
        """The last hop: loss and gradient in one go."""
        if job.train:
            work.commit()
        with self._in_hands():
            done = await self._compute.finish(
                job.message.microbatch, job.message.stage, job.boundary, job.tokens, job.train
            )
        return self._answer(job, done, done.busy_s, done.gradient)

    async def _pass_on(self, job: Job, work: Work) -> HopAnswer:
        """Any other hop: forward, the rest of the pipeline, backward."""
        microbatch, held = job.message.microbatch, job.train
        try:
            with self._in_hands():
                output = await self._compute.forward(microbatch, job.message.stage, job.boundary, job.tokens, job.train)
            await self._fault("hop.forwarded")
            while True:
                below = await self._onward(job, output, work)
                if not job.train:
                    return self._answer(job, below.message, 0.0, None, below.message.path_ms)
                done = await self._backward(below, job, work)
                if done is not None:
                    held = False
                    return self._answer(job, below.message, done.busy_s, done.gradient, below.message.path_ms)
        finally:
            if held:
                self._compute.forget(microbatch)

    async def _onward(self, job: Job, output: WireTensor, work: Work) -> HopAnswer:
        """The rest of the pipeline, done early enough that our own backward still makes our deadline."""
        onward = replace(job.message, stage=self.span.last + 1)
        until = downstream_deadline(loop_time(), job.deadline, self._backward_s)
        return await self._router.send(onward, [output, job.tokens], until, work.advance)

    async def _backward(self, below: HopAnswer, job: Job, work: Work) -> BackwardResult | None:
        """Our backward; None when the peer below sent values that no gradient has: then the forward is still held."""
        if below.gradient is None or below.peer is None:
            raise PeerFailed("no gradient came back from downstream")
        work.commit()
        started = loop_time()
        try:
            with self._in_hands():
                done = await self._compute.backward(job.message.microbatch, below.gradient)
        except ProtocolError as error:
            work.uncommit()
            self._router.blame(self.span.last + 1, below.peer, error)
            return None
        self._backward_s += 0.1 * (loop_time() - started - self._backward_s)
        return done

    def _answer(
        self, job: Job, sums: LossSum, busy_s: float, gradient: WireTensor | None, below_ms: float = 0.0
    ) -> HopAnswer:
        """What goes upstream; when training, the microbatch has been counted by now. below_ms: the way after ours."""
        path_s = busy_s + below_ms / 1000.0
        if job.train:
            self._busy_s += 0.1 * (busy_s - self._busy_s) if self._busy_s else busy_s
            self._paths_s.append(path_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (busy_s, path_s))
        return HopAnswer(
            Processed(sums.loss_sum, sums.tokens, busy_ms, path_ms), [] if gradient is None else [gradient]
        )

    def _understood(self, message: Process, tensors: Sequence[WireTensor], deadline: float) -> Job:
        """Everything that can be refused before a seat is taken."""
        if message.stage not in self.span:
            raise NotMyStage(f"this peer holds stages {self.span}, not {message.stage}; read the directory again")
        boundary, tokens = self._config.shapes.boundary_and_tokens(message, tensors)
        return Job(message, boundary, tokens, deadline)

    def _refuse_another_entry(self, job: Job) -> None:
        """A microbatch is counted once per stage here, also when a repeat enters the span at another stage.

        The gradient of the boundary that the repeat asks for was never made, so there is nothing to answer; the peer
        before us finds a sibling, or its own caller comes back to the stage that we did answer.
        """
        if not job.train:
            return
        stage = self._running.entered_elsewhere(job.key)
        if stage is None:
            stage = self._results.entered_elsewhere(job.key, loop_time())
        if stage is not None:
            raise Busy(f"this microbatch entered this peer at stage {stage} before", ELSEWHERE_RETRY_MS)

    def _repeated(self, job: Job, kept: HopAnswer, progress: OnProgress) -> HopAnswer:
        self._report(events.RepeatServed(job.message.microbatch.hex(), job.message.stage))
        progress(self._news(job, "finished"))
        return kept

    def _news(self, job: Job, what: str) -> Advance:
        return Advance(job.message.stage, self._config.me, what, self._in_hand)

    @property
    def _is_last(self) -> bool:
        return self.span.last == self._config.stage_count - 1

    @contextmanager
    def _in_hands(self) -> Iterator[None]:
        """Counts what is with the device: the queue that callers are told of."""
        self._in_hand += 1
        try:
            yield
        finally:
            self._in_hand -= 1

    @property
    def queue(self) -> int:
        """Microbatches that wait for the device or are on it."""
        return self._in_hand

    def path_s(self) -> float | None:
        """About how long a microbatch needs from here to the end and back if it never waits; None until measured.

        The sum of what all peers on its way measured, each its own device time and its link to the next; the median of
        the last PATHS, since the first ones waited for connections.
        """
        return median(self._paths_s) if self._paths_s else None

    def pause(self, reason: str = "paused by its owner") -> None:
        """Refuses new microbatches; those inside are finished."""
        self._admission.close(reason)

    def resume(self) -> None:
        """Takes microbatches again."""
        self._admission.open()

    async def leave(self, within_s: float) -> bool:
        """Refuses newcomers, waits for those inside for at most `within_s`, then cancels; whether all were finished."""
        self._admission.close("leaving")
        drained = await self._admission.drained(loop_time() + within_s)
        await self._running.close()
        return drained
