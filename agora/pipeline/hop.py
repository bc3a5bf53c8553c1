"""One peer's work on one microbatch. Each hop calls the next one; the gradient comes back as the answer of the call.

From top to bottom as a microbatch passes: the hop; the work ledger, which begins each work once and answers repeats;
the barriers, which hold a microbatch back until this peer's stages have taken a step or have a mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol

from agora_protocol.errors import (
    AgoraError,
    Busy,
    NotMyStage,
    OutOfMemory,
    PeerFailed,
    ProtocolError,
    Refused,
    Unavailable,
)
from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import CallProgress, Process, Processed
from agora_protocol.tensors import WireTensor

from agora.core.calls import OnProgress
from agora.core.clock import loop_time
from agora.core.rates import Client, MovingAverage, may_acquire
from agora.core.span_work import SpanResult, SpanWork
from agora.core.tasks import ChangeNotifier
from agora.observe import events, faults
from agora.pipeline.load_balancer import deadline_for_others
from agora.pipeline.router import HopAnswer, ProcessCall, Router

MIN_USEFUL_S = 0.001  # a hop starts nothing when fewer seconds than this are left
PATH_SAMPLES = 33  # number of latest samples whose median is `Hop.path_s`
# This fraction of the slots is free to all. The rest is for requesters that hold less than their fair share.
FREE_SLOT_FRACTION = 0.875
MAX_CACHE_BYTES = 256 << 20
MAX_CACHE_AGE_S = 900.0
MAX_CACHE_ENTRIES = 65536
ENTRY_BYTES = 512  # what a kept answer takes beside its tensors, roughly; an answer to an evaluation has no tensors
# Milliseconds after which a requester that was refused as Busy may ask again, by the cause of the refusal.
CLOSED_RETRY_MS = 2000  # this peer takes no new work
MIN_RETRY_MS, MAX_RETRY_MS = 10, 2000  # all slots are taken: the bounds of the time until one is expected to be free
OVERLAP_RETRY_MS = 1000  # the microbatch entered this peer at another stage before
ENDING_RETRY_MS = 1000  # an earlier attempt of the microbatch is still ending here
BEHIND_RETRY_MS = 200  # a stage here has not taken the microbatch's step yet
ANSWERS_PER_SLOT = 32  # one slot comes back after this many answers without an out-of-memory error
MAX_ENDING_S = 5.0  # seconds that `WorkLedger.drain` waits for cancelled work to end
# A microbatch waits here for at most this fraction of its remaining time. The rest is for asking another peer.
MAX_WAIT_FRACTION = 0.5
# Step s opens only after s - 1 is counted. Two behind means that state was missed: waiting would not help, so refuse.
MAX_STEPS_AHEAD = 1
LOOK_S = 0.05  # seconds between two checks of whether a mean is still awaited


class SpanDevice(Protocol):
    """The device that computes this peer's span of stages.

    Every failure is an AgoraError, and a cancelled job leaves nothing behind. `run_last_stages` for training, and
    `backward`, count the microbatch: when one of these returns, its gradient is in the stages' sums; when it raises,
    the gradient is not.
    """

    @property
    def span(self) -> Span:
        """The stages that this device computes."""

    async def forward(self, work: SpanWork) -> WireTensor:
        """Runs stages `work.entry_stage` to the span's last and returns the boundary that leaves the span.

        For training, what `backward` needs is kept until `backward` succeeds or `forget` is called.
        """

    async def run_last_stages(self, work: SpanWork) -> SpanResult:
        """Runs stages `work.entry_stage` to the model's last, the loss and, for training, the backward, as one job."""

    async def backward(
        self, microbatch: MicrobatchId, entry_stage: int, gradient: WireTensor, content_digest: bytes
    ) -> SpanResult:
        """Runs the backward pass of an earlier `forward`. gradient: of the boundary that `forward` returned.

        Raises ProtocolError for a gradient that cannot be used; then `backward` may be called with another one.
        """

    def forget(self, microbatch: MicrobatchId, entry_stage: int, content_digest: bytes) -> None:
        """Drops what `forward` kept of this work, if anything."""


class Hop:
    """Answers Process requests while this peer holds its span: forward here, call to the next peer, backward here.

    Other peers and this peer's own origin call `process`. queue: number of this hop's jobs that wait for the device or
    run on it. training_count: number of training microbatches whose work has begun here and not ended.
    """

    def __init__(
        self,
        device: SpanDevice,
        router: Router,
        ledger: WorkLedger,
        *,
        report: events.Report,
        barrier: StepBarrier | MeanBarrier | None = None,
        fault: faults.ReachFault = faults.reach,
        on_trained: Callable[[], None] = lambda: None,
    ) -> None:
        """on_trained: called when a training microbatch leaves this hop, after training_count was decremented."""
        self._span = device.span
        self._is_last = device.span.last == router.stage_count - 1
        self._device = device
        self._router = router
        self._ledger = ledger
        self._report = report
        self._barrier = barrier
        self._fault = fault
        self.queue = 0
        self.training_count = 0
        self._on_trained = on_trained
        self._busy_s = MovingAverage(0.1)
        self._backward_s = MovingAverage(0.1)
        self._paths_s: deque[float] = deque(maxlen=PATH_SAMPLES)

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
                    running.commit()  # one job: it cannot be cancelled between forward and counting
                with self._queued_job():
                    result = await self._device.run_last_stages(work)
                answer = self._compose_answer(work, result)
            else:
                answer = await self._pass_on(call, work, running)
        finally:
            self.training_count -= work.is_training
            if work.is_training:
                self._on_trained()
        running.publish(CallProgress(work.entry_stage, self._ledger.me, "finished", self.queue))
        return answer

    async def _pass_on(self, call: ProcessCall, work: SpanWork, running: RunningWork) -> HopAnswer:
        microbatch, entry_stage = work.microbatch, work.entry_stage
        try:
            with self._queued_job():
                output = await self._device.forward(work)
            await self._fault("hop.forwarded")
            onward = replace(call.request, stage=self._span.last + 1)
            while True:
                until = deadline_for_others(loop_time(), call.deadline, 1.5 * (self._backward_s.value or 0.0))
                sent = ProcessCall(onward, [output, work.tokens], until, running.publish)
                downstream = await self._router.send(sent)
                if not work.is_training:
                    return self._compose_answer(work, SpanResult(None, 0.0), downstream.message)
                assert downstream.gradient is not None and downstream.peer is not None, "Router.send checks the answer"
                running.commit()
                started = loop_time()
                try:
                    with self._queued_job():
                        result = await self._device.backward(
                            microbatch, entry_stage, downstream.gradient, work.content_digest
                        )
                except ProtocolError as error:
                    # The forward is kept. Its sender is blamed, so another peer is asked for a gradient next.
                    running.uncommit()
                    self._router.report_unusable_gradient(onward.stage, downstream.peer, error)
                    continue
                self._backward_s = self._backward_s.with_sample(loop_time() - started)
                return self._compose_answer(work, result, downstream.message)
        finally:
            self._device.forget(microbatch, entry_stage, work.content_digest)  # does nothing after a backward

    @contextmanager
    def _queued_job(self) -> Iterator[None]:
        self.queue += 1
        try:
            yield
        finally:
            self.queue -= 1

    def _compose_answer(self, work: SpanWork, result: SpanResult, downstream: Processed | None = None) -> HopAnswer:
        # path_ms has no queueing in it: it is the device time of this span, plus the path_ms from downstream, to which
        # the router has added the time on the link.
        path_s = result.busy_s + (downstream.path_ms / 1000.0 if downstream is not None else 0.0)
        if work.is_training:
            self._busy_s = self._busy_s.with_sample(result.busy_s)
            self._paths_s.append(path_s)
        busy_ms, path_ms = (min(1000.0 * s, float(MAX_DEADLINE_MS)) for s in (result.busy_s, path_s))
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

    def path_s(self) -> float | None:
        """The median seconds from here to the last stage and back: compute and links, no queueing.

        Over the latest training microbatches; None before the first.
        """
        return median(self._paths_s) if self._paths_s else None


def is_hopeless(left_s: float, own_s: float) -> bool:
    """Returns whether `left_s` is too little time for a hop whose device usually needs `own_s` (0 if unknown)."""
    return left_s < max(MIN_USEFUL_S, 0.5 * own_s)


# --- each microbatch once


class WorkKey(NamedTuple):
    """Identifies work on a microbatch by the stage at which it enters this peer, by what entered, and by who sent it.

    requester_id: None for this peer's own origin. content_digest: see ProcessCall.content_digest.
    """

    microbatch: MicrobatchId
    stage: int
    requester_id: PeerId | None = None
    content_digest: bytes = b""

    @classmethod
    def of(cls, call: ProcessCall) -> WorkKey:
        """The key of the work that `call` asks for."""
        requester_id = call.requester.peer if call.requester is not None else None
        return cls(call.request.microbatch, call.request.stage, requester_id, call.content_digest)

    def answers(self, asked: WorkKey) -> bool:
        """Whether this work's answer also answers `asked`: the requester or the content must be the same.

        The microbatch's id does not suffice. A peer that knows the id could send other tensors under it first, and the
        others would get the gradient of those.
        """
        if (self.microbatch, self.stage) != (asked.microbatch, asked.stage):
            return False
        return self.requester_id == asked.requester_id or self.content_digest == asked.content_digest


class AnswerCache:
    """The newest answers to finished work, to serve repeated requests; bounded in bytes, entries and age.

    nbytes: of the kept answers, about.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, max_age_s: float = MAX_CACHE_AGE_S) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[WorkKey, tuple[float, HopAnswer]] = OrderedDict()
        self._last_stages: dict[MicrobatchId, dict[WorkKey, int]] = {}
        self.nbytes = 0

    def get(self, key: WorkKey, now: float) -> HopAnswer | None:
        """Returns the kept answer to the work `key`, or to work that answers it."""
        found = next((kept for kept in self.last_stages_of(key.microbatch, now) if kept.answers(key)), None)
        return self._entries[found][1] if found is not None else None

    def last_stages_of(self, microbatch: MicrobatchId, now: float) -> dict[WorkKey, int]:
        """Returns the last stage of each work on this microbatch whose answer is kept."""
        self._drop_old(now)
        return self._last_stages.get(microbatch, {})

    def put(self, key: WorkKey, last_stage: int, answer: HopAnswer, now: float) -> None:
        """Keeps the answer of work on stages `key.stage` to `last_stage`; drops the oldest ones beyond the limits."""
        self._drop(key)
        self._entries[key] = (now, answer)
        self._last_stages.setdefault(key.microbatch, {})[key] = last_stage
        self.nbytes += answer.nbytes + ENTRY_BYTES
        while len(self._entries) > 1 and (self.nbytes > self._max_bytes or len(self._entries) > MAX_CACHE_ENTRIES):
            self._drop(next(iter(self._entries)))

    def _drop_old(self, now: float) -> None:
        while self._entries:
            key, (kept_at, _) = next(iter(self._entries.items()))
            if now - kept_at <= self._max_age_s:
                return
            self._drop(key)

    def _drop(self, key: WorkKey) -> None:
        if entry := self._entries.pop(key, None):
            self.nbytes -= entry[1].nbytes + ENTRY_BYTES
            del self._last_stages[key.microbatch][key]
            if not self._last_stages[key.microbatch]:
                del self._last_stages[key.microbatch]


# Does a microbatch's work here and returns its answer.
Perform = Callable[["RunningWork"], Coroutine[Any, Any, HopAnswer]]


class RunningWork:
    """One microbatch's work that runs in `task`, and the listeners that wait for it."""

    def __init__(self, key: WorkKey, last_stage: int, requester: Client | None, perform: Perform) -> None:
        """Starts the task. requester: the peer that asked for it first; None for this peer itself."""
        self.key = key
        self.last_stage = last_stage
        self.requester = requester
        self.committed = self.cancelled = False
        self.listeners: list[OnProgress] = []  # one for each request that waits for the answer
        self.newest_progress: dict[int, CallProgress] = {}  # by stage, for requests that join later
        name = f"hop {key.microbatch.hex()} at stage {key.stage}"
        self.task = asyncio.create_task(perform(self), name=name)

    def publish(self, call_progress: CallProgress) -> None:
        """Passes a progress message to every listener, and later to those that join."""
        self.newest_progress[call_progress.stage] = call_progress
        for on_progress in list(self.listeners):
            on_progress(call_progress)

    def commit(self) -> None:
        """Records that the gradient may be counted from now on.

        The work then runs to its end even without listeners, so that a repeated request finds the answer.
        """
        self.committed = True

    def uncommit(self) -> None:
        """Records that the gradient was not counted after all; cancels the work if nobody waits for it any more."""
        self.committed = False
        if not self.listeners:
            self.cancel()

    def cancel(self) -> None:
        """Cancels the task of the work and returns immediately; the slot stays taken until the task has ended."""
        self.cancelled = True
        self.task.cancel()


class WorkLedger:
    """Runs this peer's work on microbatches, each once, on one of at most `max_slots` slots, and keeps the answers.

    A slot is the place of one microbatch from the start of its work to the answer. When the last listener leaves,
    uncommitted work is cancelled.
    """

    def __init__(self, me: PeerId, max_slots: int, report: events.Report) -> None:
        self.me = me
        self._max_slots = self._slots = max(1, max_slots)
        self._answers_since = 0  # answers since the number of slots last changed
        self._report = report
        self._answers = AnswerCache()
        self._works: dict[WorkKey, RunningWork] = {}
        self._refusal = ""
        self._shortage = ""
        self._slot_time_s = MovingAverage(0.1)

    @property
    def taken(self) -> int:
        return len(self._works)

    def answer_repeat(self, call: ProcessCall, queue: int = 0) -> HopAnswer | None:
        """Returns the kept answer to a repeated request, and then reports progress "finished" too.

        queue: number of microbatches at the device.
        """
        key = WorkKey.of(call)
        answer = self._answers.get(key, loop_time())
        if answer is not None:
            self._report(events.RepeatServed(key.microbatch.hex(), key.stage))
            call.on_progress(CallProgress(key.stage, self.me, "finished", queue))
        return answer

    def refuse_overlap(self, key: WorkKey, last_stage: int) -> None:
        """Raises Busy if the requester sent this microbatch to another stage before, and both ways share a stage here.

        That stage would count the microbatch twice, and the gradient that this request wants was never computed.
        What another requester sent blocks nobody: one microbatch counted twice does less harm than a peer that can have
        others' microbatches refused.
        """
        past = self._answers.last_stages_of(key.microbatch, loop_time()).items()
        present = [(work.key, work.last_stage) for work in self._works.values()]
        for known, known_last in (*present, *past):
            is_another_entry = known.stage != key.stage and known.stage <= last_stage and key.stage <= known_last
            if is_another_entry and (known.microbatch, known.requester_id) == (key.microbatch, key.requester_id):
                raise Busy(f"this microbatch entered this peer at stage {known.stage} before", OVERLAP_RETRY_MS)

    async def run(self, call: ProcessCall, last_stage: int, perform: Perform) -> HopAnswer:
        """Joins the call's running work, or starts it as `perform(work)` on a free slot; returns the answer.

        last_stage: the last stage that the work runs here. If joined work fails before the call's deadline, this call
        starts the work again; the deadline does not end the wait for an answer. Raises the work's own error, PeerFailed
        when `drain` cancels the work, and Busy when no slot is free for the requester, when no new work is accepted,
        when the microbatch would be counted twice, or when an earlier, cancelled attempt has not ended by the deadline.
        """
        key = WorkKey.of(call)
        if call.request.purpose == "train":
            self.refuse_overlap(key, last_stage)
        while True:
            work = next((work for work in self._works.values() if work.key.answers(key)), None)
            if work is not None and work.cancelled:
                await asyncio.wait([work.task], timeout=max(0.0, call.deadline - loop_time()))
                if not work.task.done():
                    raise Busy("an earlier attempt of this microbatch is still ending here", ENDING_RETRY_MS)
                continue
            if work is None:
                return await self._wait(self._start(key, last_stage, call.requester, perform), call.on_progress)
            self._report(events.RepeatServed(key.microbatch.hex(), key.stage))
            for call_progress in work.newest_progress.values():
                call.on_progress(call_progress)
            try:
                return await self._wait(work, call.on_progress)
            except AgoraError:
                if loop_time() >= call.deadline:
                    raise

    def stop_accepting(self, reason: str) -> None:
        """Refuses new work from now on, but no repeats. reason: completes "this peer is ..." in the error."""
        self._refusal = reason

    def start_accepting(self) -> None:
        """Accepts new work again, after stop_accepting or drain; in a shortage, work is still refused."""
        self._refusal = ""

    def set_shortage(self, shortage: str) -> None:
        """Refuses new work while memory is short; completes "this peer is ..." in the error, "" for no shortage."""
        self._shortage = shortage

    async def drain(self, within_s: float, reason: str) -> bool:
        """Stops accepting work, waits at most `within_s` seconds for running work, and cancels what still runs then.

        Whoever waits for cancelled work gets PeerFailed. Returns whether all work ended by itself. reason: completes
        "this peer is ..." in the Busy of new requests.
        """
        self.stop_accepting(reason)
        if self._works:
            await asyncio.wait([work.task for work in self._works.values()], timeout=within_s)
        late = list(self._works.values())
        for work in late:
            work.cancel()
        if late:
            await asyncio.wait([work.task for work in late], timeout=MAX_ENDING_S)
        return not late

    def _start(self, key: WorkKey, last_stage: int, requester: Client | None, perform: Perform) -> RunningWork:
        if refusal := self._refusal or self._shortage:
            raise Busy(f"this peer is {refusal}; ask another", CLOSED_RETRY_MS)
        held = Counter(work.requester for work in self._works.values() if work.requester is not None)
        exceeds_share = requester is not None and not may_acquire(held, requester, self._slots, free=FREE_SLOT_FRACTION)
        if self.taken >= self._slots or exceeds_share:
            free_in_ms = 1000.0 * (self._slot_time_s.value or 0.0) / self._slots  # until one of the slots is free
            retry_ms = int(min(max(free_in_ms, MIN_RETRY_MS), MAX_RETRY_MS))
            is_share = self.taken < self._slots
            taken = f"your share of the {self._slots} slots is" if is_share else f"all {self._slots} slots are"
            raise Busy(f"{taken} taken", retry_ms)

        async def perform_and_keep(work: RunningWork) -> HopAnswer:
            started = loop_time()
            try:
                answer = await perform(work)
                self._answers.put(key, last_stage, answer, loop_time())
                self._slot_time_s = self._slot_time_s.with_sample(loop_time() - started)
                self._count_answer()
                return answer
            except OutOfMemory:
                self.reduce_slots("the device was out of memory")
                raise
            finally:
                self._end(work)

        work = self._works[key] = RunningWork(key, last_stage, requester, perform_and_keep)
        work.task.add_done_callback(lambda task: self._end(work))
        return work

    def reduce_slots(self, reason: str) -> None:
        """Offers one slot fewer than are taken now, at least 1, because memory is short; running work goes on."""
        self._slots = max(1, min(self._slots, self.taken) - 1)
        self._answers_since = 0
        self._report(events.SlotsChanged(self._slots, self._max_slots, reason))

    def _count_answer(self) -> None:
        self._answers_since += 1
        if self._slots < self._max_slots and self._answers_since >= ANSWERS_PER_SLOT:
            self._slots += 1
            self._answers_since = 0
            self._report(events.SlotsChanged(self._slots, self._max_slots, "memory has sufficed since"))

    async def _wait(self, work: RunningWork, on_progress: OnProgress) -> HopAnswer:
        work.listeners.append(on_progress)
        try:
            return await asyncio.shield(work.task)
        except asyncio.CancelledError:
            this_request = asyncio.current_task()
            if not work.task.cancelled() or (this_request is not None and this_request.cancelling()):
                raise
            # A CancelledError would end this request without any answer, and the requester would wait in vain.
            raise PeerFailed("this peer has given up its work on this microbatch; ask another") from None
        finally:
            work.listeners.remove(on_progress)
            if not work.listeners and not work.committed:
                work.cancel()

    def _end(self, work: RunningWork) -> None:
        # Called at the end of the task, so that the slot is free as soon as the answer is there, and again when it is
        # done, because a task that is cancelled before it began never runs.
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.task.done() and not work.task.cancelled():
            work.task.exception()  # retrieves the error even when nobody waits any more: asyncio would log it otherwise


# --- waiting for steps and means


class StepBarrier:
    """In a synchronous run, holds a microbatch of step s back until this peer's stages have taken s steps.

    So no gradient of one step is counted into another, however far apart the replicas are. A microbatch that waits
    takes no slot of the ledger. step_of: how many steps a stage of `span` has taken here.
    """

    def __init__(self, span: Span, step_of: Callable[[int], int]) -> None:
        self._span = span
        self._step_of = step_of
        self._changed = ChangeNotifier()

    def notify_step(self) -> None:
        """Makes the waiting microbatches check again; call it after each step of a stage of the span."""
        self._changed.notify()

    async def hold(self, request: Process, deadline: float) -> None:
        """Waits until this peer's stages have taken the request's step; see refuse_early and wait_for_step."""
        if request.step:
            self.refuse_early(request.stage, request.step)
            await self.wait_for_step(request.stage, request.step, deadline)

    def refuse_early(self, entry_stage: int, step: int) -> None:
        """Raises Busy if a microbatch of `step` would have to wait for more than MAX_STEPS_AHEAD steps; never waits."""
        self._require_step(entry_stage, step - MAX_STEPS_AHEAD)

    async def wait_for_step(self, entry_stage: int, step: int, deadline: float) -> None:
        """Waits until all stages from `entry_stage` to the span's last have taken at least `step` steps.

        Raises Busy after MAX_WAIT_FRACTION of the time until the loop time `deadline`, so that the requester can still
        ask another peer.
        """
        until = loop_time() + MAX_WAIT_FRACTION * (deadline - loop_time())
        while loop_time() < until and self._stages_behind(entry_stage, step):
            await self._changed.wait(until)
        self._require_step(entry_stage, step)

    def _stages_behind(self, entry_stage: int, step: int) -> list[int]:
        return [stage for stage in range(entry_stage, self._span.last + 1) if self._step_of(stage) < step]

    def _require_step(self, entry_stage: int, step: int) -> None:
        if behind := self._stages_behind(entry_stage, step):
            raise Busy(f"stage {behind[0]} has not taken step {step} here yet", BEHIND_RETRY_MS)


class MeanBarrier:
    """In an asynchronous run, holds microbatches back while the replicas average a gradient and the mean is due soon.

    The held microbatches are then computed on weights that include the mean, and count for the step after it. They take
    no slot of the ledger. awaits_mean: whether such a mean is awaited for a stage; must become False by itself.
    """

    def __init__(self, span: Span, awaits_mean: Callable[[int], bool]) -> None:
        self._span = span
        self._awaits_mean = awaits_mean
        self._changed = ChangeNotifier()

    def notify_step(self) -> None:
        """Makes the waiting microbatches check again; call it after each step of a stage of the span."""
        self._changed.notify()

    async def hold(self, request: Process, deadline: float) -> None:
        """Waits while a mean is awaited for any stage that a training microbatch enters; raises nothing.

        Returns at the latest after MAX_WAIT_FRACTION of the time until the loop time `deadline`.
        """
        if request.purpose != "train":
            return
        until = loop_time() + MAX_WAIT_FRACTION * (deadline - loop_time())
        stages = range(request.stage, self._span.last + 1)
        while (now := loop_time()) < until and any(map(self._awaits_mean, stages)):
            await self._changed.wait(min(until, now + LOOK_S))
