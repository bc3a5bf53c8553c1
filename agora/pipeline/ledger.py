"""The work ledger: a microbatch that enters this peer is started once; a repeat joins it or gets the kept answer.

The ledger lives as long as the peer, longer than its span: after a move it still answers repeats.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from agora_protocol.errors import AgoraError, Busy, OutOfMemory, PeerFailed
from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.messages import CallProgress, Process

from agora.core.calls import OnProgress
from agora.core.clock import loop_time
from agora.core.rates import Client, MovingAverage, may_acquire
from agora.observe import events
from agora.pipeline.process_call import HopAnswer, ProcessCall

# Of the slots, what any caller may take; the rest is for callers that hold less than their fair share.
FREE_SLOT_FRACTION = 0.875
MAX_CACHE_BYTES = 256 << 20
MAX_CACHE_AGE_S = 900.0
MAX_CACHE_ENTRIES = 65536
ENTRY_BYTES = 512  # of a kept answer on top of its tensors, about; answers to evaluations have no tensors
CLOSED_RETRY_MS = 2000  # for a caller that was refused because this peer takes no new work
MIN_RETRY_MS, MAX_RETRY_MS = 10, 2000  # bounds for a caller that found all slots taken
OVERLAP_RETRY_MS = ENDING_RETRY_MS = 1000  # for a microbatch that entered here at another stage, or is still ending
ANSWERS_PER_SLOT = 32  # after so many answers without an out-of-memory error one slot is restored
MAX_ENDING_S = 5.0  # for which `WorkLedger.drain` waits for cancelled work to end


@dataclass(frozen=True, slots=True, order=True)
class WorkKey:
    """Identifies work: a microbatch, and the stage at which it enters this peer. Equal keys are the same work."""

    microbatch: MicrobatchId
    stage: int


class AnswerCache:
    """The newest answers to finished work, to serve repeated requests; bounded in bytes, entries and age.

    nbytes: of the kept answers, about.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, max_age_s: float = MAX_CACHE_AGE_S) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[WorkKey, tuple[float, HopAnswer]] = OrderedDict()
        self._last_stages: dict[MicrobatchId, dict[int, int]] = {}
        self.nbytes = 0

    def get(self, key: WorkKey, now: float) -> HopAnswer | None:
        """Returns the kept answer to the work `key`."""
        self._drop_old(now)
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def last_stages_of(self, microbatch: MicrobatchId, now: float) -> dict[int, int]:
        """Returns entry stage -> last stage of each work of this microbatch whose answer is kept."""
        self._drop_old(now)
        return self._last_stages.get(microbatch, {})

    def put(self, key: WorkKey, last_stage: int, answer: HopAnswer, now: float) -> None:
        """Keeps the answer of work on stages `key.stage` to `last_stage`; drops the oldest ones beyond the limits."""
        self._drop(key)
        self._entries[key] = (now, answer)
        self._last_stages.setdefault(key.microbatch, {})[key.stage] = last_stage
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
            del self._last_stages[key.microbatch][key.stage]
            if not self._last_stages[key.microbatch]:
                del self._last_stages[key.microbatch]


# Does a microbatch's work here and returns its answer.
Perform = Callable[["RunningWork"], Coroutine[Any, Any, HopAnswer]]


class RunningWork:
    """One microbatch's work that runs in `task`, and the callers that wait for it."""

    def __init__(self, key: WorkKey, last_stage: int, caller: Client | None, perform: Perform) -> None:
        """Starts the task. caller: the peer that asked for it first; None for this peer itself."""
        self.key = key
        self.last_stage = last_stage
        self.caller = caller
        self.committed = self.cancelled = False
        self.callers: list[OnProgress] = []  # one for each waiting caller
        self.newest: dict[int, CallProgress] = {}  # by stage, for callers that join
        name = f"hop {key.microbatch.hex()} at stage {key.stage}"
        self.task = asyncio.create_task(perform(self), name=name)

    def publish(self, call_progress: CallProgress) -> None:
        """Passes a progress message to every waiting caller, and later to those that join."""
        self.newest[call_progress.stage] = call_progress
        for on_progress in list(self.callers):
            on_progress(call_progress)

    def commit(self) -> None:
        """Records that the gradient may be counted from now on.

        The work then runs to its end even without callers, so that a repeated request finds the answer.
        """
        self.committed = True

    def uncommit(self) -> None:
        """Records that the gradient was not counted after all; cancels the work if no caller waits any more."""
        self.committed = False
        if not self.callers:
            self.cancel()

    def cancel(self) -> None:
        """Cancels the task of the work and returns immediately; the slot stays taken until the task has ended."""
        self.cancelled = True
        self.task.cancel()


class WorkLedger:
    """Runs this peer's work on microbatches, each once, on one of at most `max_slots` slots, and keeps the answers.

    A slot is the place of one microbatch from the start of its work to the answer. When the last caller leaves,
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

    def answer_repeat(self, message: Process, on_progress: OnProgress, queue: int = 0) -> HopAnswer | None:
        """Returns the kept answer to a repeated request, and then reports progress "finished" too.

        queue: number of microbatches at the device.
        """
        answer = self._answers.get(WorkKey(message.microbatch, message.stage), loop_time())
        if answer is not None:
            self._report(events.RepeatServed(message.microbatch.hex(), message.stage))
            on_progress(CallProgress(message.stage, self.me, "finished", queue))
        return answer

    def refuse_overlap(self, key: WorkKey, last_stage: int) -> None:
        """Raises Busy if the microbatch of `key` entered this peer at another stage and went through a common stage.

        There it would be counted twice, and the gradient that this request asks for was never computed.
        """
        past = self._answers.last_stages_of(key.microbatch, loop_time()).items()
        present = [(w.key.stage, w.last_stage) for w in self._works.values() if w.key.microbatch == key.microbatch]
        for entry, end in (*present, *past):
            if entry != key.stage and entry <= last_stage and key.stage <= end:
                raise Busy(f"this microbatch entered this peer at stage {entry} before", OVERLAP_RETRY_MS)

    async def run(self, call: ProcessCall, last_stage: int, perform: Perform) -> HopAnswer:
        """Joins the call's running work, or starts it as `perform(work)` on a free slot; returns the answer.

        last_stage: the last stage that the work runs here. If joined work fails before the call's deadline, this caller
        starts the work again; the deadline does not end the wait for an answer. Raises the work's own error, PeerFailed
        when `drain` cancels the work, and Busy when no slot is free for the caller, when no new work is accepted, when
        the microbatch would be counted twice, or when an earlier, cancelled attempt has not ended by the deadline.
        """
        key = WorkKey(call.request.microbatch, call.request.stage)
        if call.request.purpose == "train":
            self.refuse_overlap(key, last_stage)
        while True:
            work = self._works.get(key)
            if work is not None and work.cancelled:
                await asyncio.wait([work.task], timeout=max(0.0, call.deadline - loop_time()))
                if not work.task.done():
                    raise Busy("an earlier attempt of this microbatch is still ending here", ENDING_RETRY_MS)
                continue
            if work is None:
                return await self._wait(self._start(key, last_stage, call.caller, perform), call.on_progress)
            self._report(events.RepeatServed(key.microbatch.hex(), key.stage))
            for call_progress in work.newest.values():
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

        The callers of cancelled work get PeerFailed. Returns whether all work ended by itself. reason: completes
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

    def _start(self, key: WorkKey, last_stage: int, caller: Client | None, perform: Perform) -> RunningWork:
        if refusal := self._refusal or self._shortage:
            raise Busy(f"this peer is {refusal}; ask another", CLOSED_RETRY_MS)
        held = Counter(work.caller for work in self._works.values() if work.caller is not None)
        exceeds_share = caller is not None and not may_acquire(held, caller, self._slots, free=FREE_SLOT_FRACTION)
        if self.taken >= self._slots or exceeds_share:
            free_in_ms = 1000.0 * (self._slot_time_s.value or 0.0) / self._slots  # when the next of all slots is free
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

        work = self._works[key] = RunningWork(key, last_stage, caller, perform_and_keep)
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
        work.callers.append(on_progress)
        try:
            return await asyncio.shield(work.task)
        except asyncio.CancelledError:
            this_caller = asyncio.current_task()
            if not work.task.cancelled() or (this_caller is not None and this_caller.cancelling()):
                raise
            # Passed on, it would end the caller's request without any answer, and the caller would wait in vain.
            raise PeerFailed("this peer has given up its work on this microbatch; ask another") from None
        finally:
            work.callers.remove(on_progress)
            if not work.callers and not work.committed:
                work.cancel()

    def _end(self, work: RunningWork) -> None:
        # Called at the end of the task, so that the slot is free as soon as the answer is there, and again when it is
        # done, because a task that is cancelled before it began never runs.
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.task.done() and not work.task.cancelled():
            work.task.exception()  # the error is retrieved, even when no caller waits any more
