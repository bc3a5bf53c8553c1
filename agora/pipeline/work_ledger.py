"""Each microbatch once: running work, kept answers for repeats, and slots, for as long as the local peer lives."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from agora_protocol.errors import AgoraError, Busy, OutOfMemory, PeerFailed
from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.messages import CallProgress

from agora.core.calls import OnProgress
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester, may_acquire
from agora.core.moving_average import MovingAverage
from agora.observe import events
from agora.pipeline.process_call import HopAnswer, ProcessCall

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
ANSWERS_PER_SLOT = 32  # one slot comes back after this many answers without an out-of-memory error
# Seconds that `WorkLedger.drain` waits for cancelled work to end, unless it is given other ones.
MAX_ENDING_TIMEOUT_S = 5.0

# Does a microbatch's work here and returns its answer.
Perform = Callable[["RunningWork"], Coroutine[Any, Any, HopAnswer]]


class WorkKey(NamedTuple):
    """Identifies work on a microbatch by the stage at which it enters this peer, by what entered, and by who sent it.

    requester_id: None for this peer's own origin. content_digest: see ProcessCall.content_digest.
    """

    microbatch: MicrobatchId
    entry_stage: int
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
        if (self.microbatch, self.entry_stage) != (asked.microbatch, asked.entry_stage):
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
        """Keeps the answer of work from `key.entry_stage` to `last_stage`; drops the oldest ones beyond the limits."""
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


class RunningWork:
    """One microbatch's work that runs in `task`, and the listeners that wait for it."""

    def __init__(self, key: WorkKey, last_stage: int, requester: Requester | None, perform: Perform) -> None:
        """Starts the task. requester: the peer that asked for it first; None for this peer itself."""
        self.key = key
        self.last_stage = last_stage
        self.requester = requester
        self.may_be_counted = False  # whether the device may be adding the gradient to the sums, or has done so
        self.cancelled = False
        self.listeners: list[OnProgress] = []  # one for each request that waits for the answer
        self.newest_progress: dict[int, CallProgress] = {}  # by stage, for requests that join later
        name = f"hop {key.microbatch.hex()} at stage {key.entry_stage}"
        self.task = asyncio.create_task(perform(self), name=name)

    def publish(self, call_progress: CallProgress) -> None:
        """Passes a progress message to every listener, and later to those that join."""
        self.newest_progress[call_progress.stage] = call_progress
        for on_progress in list(self.listeners):
            on_progress(call_progress)

    def mark_maybe_counted(self) -> None:
        """Records that the gradient may be counted from now on.

        The work then runs to its end even without listeners, so that a repeated request finds the answer.
        """
        self.may_be_counted = True

    def mark_not_counted(self) -> None:
        """Records that the gradient was not counted after all; cancels the work if nobody waits for it any more.

        Also if it was cancelled while the gradient could have been counted.
        """
        self.may_be_counted = False
        if self.cancelled or not self.listeners:
            self.cancel()

    def cancel(self) -> None:
        """Cancels the task of the work and returns immediately; the slot stays taken until the task has ended."""
        self.cancelled = True
        self.task.cancel()


class WorkLedger:
    """Runs this peer's work on microbatches, each once, on one of at most `max_slots` slots, and keeps the answers.

    A slot is the place of one microbatch from the start of its work to the answer. Work whose last listener has left is
    cancelled, unless its gradient may be counted by then.
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
            self._report(events.RepeatServed(key.microbatch.hex(), key.entry_stage))
            call.on_progress(CallProgress(key.entry_stage, self.me, "finished", queue))
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
            is_other_entry = known.entry_stage != key.entry_stage
            overlaps = known.entry_stage <= last_stage and key.entry_stage <= known_last
            if (
                is_other_entry
                and overlaps
                and (known.microbatch, known.requester_id) == (key.microbatch, key.requester_id)
            ):
                raise Busy(f"this microbatch entered this peer at stage {known.entry_stage} before", OVERLAP_RETRY_MS)

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
            # What was cancelled may have been counted all the same.
            if (answer := self.answer_repeat(call)) is not None:
                return answer
            work = next((work for work in self._works.values() if work.key.answers(key)), None)
            if work is not None and work.cancelled:
                await asyncio.wait([work.task], timeout=max(0.0, call.deadline - loop_time()))
                if not work.task.done():
                    raise Busy("an earlier attempt of this microbatch is still ending here", ENDING_RETRY_MS)
                continue
            if work is None:
                return await self._wait(self._start(key, last_stage, call.requester, perform), call.on_progress)
            self._report(events.RepeatServed(key.microbatch.hex(), key.entry_stage))
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

    async def drain(self, within_s: float, reason: str, ending_s: float = MAX_ENDING_TIMEOUT_S) -> bool:
        """Stops accepting work, waits at most `within_s` seconds for running work, and cancels what still runs then.

        Whoever waits for cancelled work gets PeerFailed. Where the device was counting the gradient at that time, and
        ends that within `ending_s`, they get the answer. Returns whether all work ended by itself. reason: completes
        "this peer is ..." in the Busy of new requests.
        """
        self.stop_accepting(reason)
        if self._works:
            await asyncio.wait([work.task for work in self._works.values()], timeout=within_s)
        late = list(self._works.values())
        for work in late:
            work.cancel()
        if late:
            await asyncio.wait([work.task for work in late], timeout=ending_s)
        return not late

    def _start(self, key: WorkKey, last_stage: int, requester: Requester | None, perform: Perform) -> RunningWork:
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
        work = self._works[key] = RunningWork(key, last_stage, requester, partial(self._perform_and_keep, perform))
        work.task.add_done_callback(lambda task: self._end(work))
        return work

    async def _perform_and_keep(self, perform: Perform, work: RunningWork) -> HopAnswer:
        started = loop_time()
        try:
            answer = await perform(work)
            self._answers.put(work.key, work.last_stage, answer, loop_time())
            self._slot_time_s = self._slot_time_s.with_sample(loop_time() - started)
            self._count_answer()
            return answer
        except OutOfMemory:
            self.reduce_slots("the device was out of memory")
            raise
        finally:
            self._end(work)

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
            if not work.listeners and not work.may_be_counted:
                work.cancel()

    def _end(self, work: RunningWork) -> None:
        # Called at the end of the task, so that the slot is free as soon as the answer is there, and again when it is
        # done, because a task that is cancelled before it began never runs.
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.task.done() and not work.task.cancelled():
            work.task.exception()  # retrieves the error even when nobody waits any more: asyncio would log it otherwise
