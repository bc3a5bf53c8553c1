"""The work ledger: a microbatch that enters this peer is started once; a repeat joins it or gets the kept answer.

Knows: seats, running tasks, who waits for them, the answers given; docs/routing.md has the table. Must not know: what
the work computes. The ledger lives as long as the peer, longer than its span: after a move it still answers repeats.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agora_protocol.errors import AgoraError, Busy, OutOfMemory
from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.messages import Advance, Process

from agora.calls import OnProgress
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.net.fair_share import Holder, may_enter
from agora.observe import events
from agora.pipeline.interfaces import HopAnswer

FREE_SEATS = 0.875
"""The fraction of the seats that any caller may take; the rest is for callers that hold less than a fair part."""
MAX_CACHE_BYTES = 256 << 20
"""Maximum number of bytes of all kept answers together."""
MAX_CACHE_AGE_S = 900.0
"""Seconds after which a kept answer is dropped."""
MAX_CACHE_ENTRIES = 65536
"""Maximum number of answers that are kept."""
ENTRY_BYTES = 512
"""Approximate bytes of a kept answer beyond its tensors; answers to evaluations have no tensors at all."""
CLOSED_RETRY_MS = 2000
"""Milliseconds after which a caller that was refused because this peer takes no new work may retry."""
MIN_RETRY_MS, MAX_RETRY_MS = 10, 2000
"""Minimum and maximum milliseconds after which a caller that found all seats taken may retry."""
OVERLAP_RETRY_MS = ENDING_RETRY_MS = 1000
"""Milliseconds after which a caller may retry a microbatch that entered at another stage, or is being cancelled."""
ANSWERS_PER_SEAT = 32
"""Number of answers without a lack of memory after which a seat that was given up for it is offered again."""
MAX_ENDING_S = 5.0
"""Seconds for which `WorkLedger.finish` waits for cancelled work to end."""


@dataclass(frozen=True, slots=True, order=True)
class WorkKey:
    """Identifies work: the microbatch, and the stage at which it enters this peer. Equal keys are the same work."""

    microbatch: MicrobatchId
    stage: int


class AnswerCache:
    """Keeps the newest answers to finished work: at most `max_bytes`, none older than `max_age_s` seconds.

    Has no clock of its own: `now` is passed in.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, max_age_s: float = MAX_CACHE_AGE_S) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[WorkKey, tuple[float, HopAnswer]] = OrderedDict()
        self._last_stages: dict[MicrobatchId, dict[int, int]] = {}
        self.nbytes = 0

    def get(self, key: WorkKey, now: float) -> HopAnswer | None:
        """Returns the kept answer to this work, or None."""
        self._drop_old(now)
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def stages_of(self, microbatch: MicrobatchId, now: float) -> dict[int, int]:
        """Returns which stages ran in answered work of this microbatch: the last stage by entry stage; {} if none."""
        self._drop_old(now)
        return self._last_stages.get(microbatch, {})

    def put(self, key: WorkKey, last: int, answer: HopAnswer, now: float) -> None:
        """Keeps the answer of work that ran stages `key.stage` to `last`; drops the oldest ones beyond the limits."""
        self._drop(key)
        self._entries[key] = (now, answer)
        self._last_stages.setdefault(key.microbatch, {})[key.stage] = last
        self.nbytes += answer.nbytes + ENTRY_BYTES
        while len(self._entries) > 1 and (self.nbytes > self._max_bytes or len(self._entries) > MAX_CACHE_ENTRIES):
            self._drop(next(iter(self._entries)))

    def _drop_old(self, now: float) -> None:
        """Drops every answer that is older than `max_age_s`."""
        while self._entries:
            key, (kept_at, _) = next(iter(self._entries.items()))
            if now - kept_at <= self._max_age_s:
                return
            self._drop(key)

    def _drop(self, key: WorkKey) -> None:
        """Drops one answer; does nothing when it is not kept."""
        if entry := self._entries.pop(key, None):
            self.nbytes -= entry[1].nbytes + ENTRY_BYTES
            del self._last_stages[key.microbatch][key.stage]
            if not self._last_stages[key.microbatch]:
                del self._last_stages[key.microbatch]


class RunningWork:
    """One piece of work that runs in `task`, and the callers that wait for it. last: the last stage that it runs here.

    newest: the latest progress message of each stage. committed: set by the function that performs the work, from the
    moment when the gradient may be counted; from then on the work runs to its end even without callers, so that a
    repeat finds the answer. cancelled: whether `cancel` was called.
    """

    task: asyncio.Task[HopAnswer]

    def __init__(self, key: WorkKey, last: int, holder: Holder | None = None) -> None:
        """holder: the peer that asked for it first; None for this peer itself."""
        self.key = key
        self.last = last
        self.holder = holder
        self.committed = self.cancelled = False
        self.callers: list[OnProgress] = []
        self.newest: dict[int, Advance] = {}

    def publish(self, news: Advance) -> None:
        """Passes a progress message to every caller, and keeps it as the latest of its stage for later callers."""
        self.newest[news.stage] = news
        for on_progress in list(self.callers):
            on_progress(news)

    def uncommit(self) -> None:
        """Records that the gradient was not counted after all; cancels the work if nobody waits for it."""
        self.committed = False
        if not self.callers:
            self.cancel()

    def cancel(self) -> None:
        """Cancels the work; its seat stays taken until it has ended."""
        self.cancelled = True
        self.task.cancel()


class WorkLedger:
    """Runs this peer's work: starts each microbatch once, on one of `max_seats` seats, and keeps the answer.

    A repeat joins the running work or gets the kept answer. When the last caller leaves, uncommitted work is cancelled.
    When work runs out of memory, there is one seat less, which is offered again after ANSWERS_PER_SEAT answers.
    """

    def __init__(self, me: PeerId, max_seats: int, report: events.Report) -> None:
        self.me = me
        self._max_seats = self._seats = max(1, max_seats)
        self._answers_since = 0  # answers since the number of seats last changed
        self._report = report
        self._answers = AnswerCache()
        self._works: dict[WorkKey, RunningWork] = {}
        self._refusal = ""
        self.shortage = ""
        """Set by the memory guard: completes "this peer is ..." while new work is refused for lack of memory."""
        self._seat_s = MovingAverage(0.1)

    @property
    def taken(self) -> int:
        """Number of seats taken: by work that runs, or was cancelled and has not ended yet."""
        return len(self._works)

    def answer_repeat(self, message: Process, on_progress: OnProgress, queue: int = 0) -> HopAnswer | None:
        """Returns the kept answer to a repeated request; None if there is none.

        With an answer, it reports RepeatServed and calls on_progress with "finished"; `queue` goes into that message.
        """
        answer = self._answers.get(WorkKey(message.microbatch, message.stage), loop_time())
        if answer is not None:
            self._report(events.RepeatServed(message.microbatch.hex(), message.stage))
            on_progress(Advance(message.stage, self.me, "finished", queue))
        return answer

    def refuse_overlap(self, key: WorkKey, last: int) -> None:
        """Raises Busy if the microbatch entered here at another stage and went through any of `key.stage` to `last`.

        It would be counted twice in those stages, and the gradient that this request asks for was never computed.
        """
        past = self._answers.stages_of(key.microbatch, loop_time()).items()
        present = [(w.key.stage, w.last) for w in self._works.values() if w.key.microbatch == key.microbatch]
        for entry, end in (*present, *past):
            if entry != key.stage and entry <= last and key.stage <= end:
                raise Busy(f"this microbatch entered this peer at stage {entry} before", OVERLAP_RETRY_MS)

    async def run(
        self,
        key: WorkKey,
        last: int,
        deadline: float,
        on_progress: OnProgress,
        start: Callable[[RunningWork], Awaitable[HopAnswer]],
        holder: Holder | None = None,
    ) -> HopAnswer:
        """Joins the running work `key`, or starts it as `start(work)` on a free seat; returns its answer.

        last: the last stage that the work runs here. holder: who asks; None for this peer's own origin. If joined work
        fails before this caller's `deadline` (loop time), it is started again. Raises what the work raises, and Busy
        when no seat is free or an earlier, cancelled attempt has not ended by `deadline`.
        """
        while True:
            work = self._works.get(key)
            if work is not None and work.cancelled:
                await asyncio.wait([work.task], timeout=max(0.0, deadline - loop_time()))
                if not work.task.done():
                    raise Busy("an earlier attempt of this microbatch is still ending here", ENDING_RETRY_MS)
                continue
            if work is None:
                return await self._wait(self._start(key, last, start, holder), on_progress)
            self._report(events.RepeatServed(key.microbatch.hex(), key.stage))
            for news in work.newest.values():
                on_progress(news)
            try:
                return await self._wait(work, on_progress)
            except AgoraError:
                if loop_time() >= deadline:
                    raise

    def stop_accepting(self, reason: str) -> None:
        """Refuses new work with Busy from now on; `reason` completes "this peer is ...". Still serves repeats."""
        self._refusal = reason

    def start_accepting(self) -> None:
        """Accepts new work again, after stop_accepting or finish."""
        self._refusal = ""

    async def finish(self, within_s: float, reason: str) -> bool:
        """Stops accepting work, waits at most `within_s` seconds for running work, and cancels the rest.

        Returns whether all work ended without being cancelled.
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

    def _start(
        self, key: WorkKey, last: int, start: Callable[[RunningWork], Awaitable[HopAnswer]], holder: Holder | None
    ) -> RunningWork:
        """Takes a seat and starts `start(work)` in a new task; returns the work, without waiting.

        last: the last stage that the work runs here. Raises Busy, with the time after which to try again, when all
        seats are taken, when others need those that are left (fair_share.may_enter), or this ledger accepts no more.
        """
        if refusal := self._refusal or self.shortage:
            raise Busy(f"this peer is {refusal}; ask another", CLOSED_RETRY_MS)
        held = Counter(work.holder for work in self._works.values() if work.holder is not None)
        is_beyond_part = holder is not None and not may_enter(held, holder, self._seats, free=FREE_SEATS)
        if self.taken >= self._seats or is_beyond_part:
            free_in_ms = 1000.0 * (self._seat_s.value or 0.0) / self._seats  # on average, the next one of all seats
            retry_ms = int(min(max(free_in_ms, MIN_RETRY_MS), MAX_RETRY_MS))
            what = "your part of" if self.taken < self._seats else "all"
            raise Busy(f"{what} {self._seats} seats are taken", retry_ms)
        work = self._works[key] = RunningWork(key, last, holder)

        async def perform() -> HopAnswer:
            """Awaits the work and returns its answer, which it keeps; frees the seat in any case.

            When the device is out of memory, gives up a seat and raises that.
            """
            started = loop_time()
            try:
                answer = await start(work)
                self._answers.put(key, last, answer, loop_time())
                self._seat_s = self._seat_s.with_sample(loop_time() - started)
                self._count_answer()
                return answer
            except OutOfMemory:
                self.give_up_a_seat("the device was out of memory")
                raise
            finally:
                self._end(work)

        work.task = asyncio.create_task(perform(), name=f"hop {key.microbatch.hex()} at stage {key.stage}")
        work.task.add_done_callback(lambda task: self._end(work))
        return work

    def give_up_a_seat(self, reason: str) -> None:
        """Lowers the seats to one fewer than are taken now, at least 1, and reports it; called when memory is short."""
        self._seats, self._answers_since = max(1, min(self._seats, self.taken) - 1), 0
        self._report(events.SeatsChanged(self._seats, self._max_seats, reason))

    def _count_answer(self) -> None:
        """Called for each answer: after every ANSWERS_PER_SEAT, adds one of the seats given up, and reports it."""
        self._answers_since += 1
        if self._seats < self._max_seats and self._answers_since >= ANSWERS_PER_SEAT:
            self._seats, self._answers_since = self._seats + 1, 0
            self._report(events.SeatsChanged(self._seats, self._max_seats, "memory has sufficed since"))

    async def _wait(self, work: RunningWork, on_progress: OnProgress) -> HopAnswer:
        """Waits for the work's answer and returns it. When the last caller leaves, cancels uncommitted work."""
        work.callers.append(on_progress)
        try:
            return await asyncio.shield(work.task)
        finally:
            work.callers.remove(on_progress)
            if not work.callers and not work.committed:
                work.cancel()

    def _end(self, work: RunningWork) -> None:
        """Frees the seat. Called in the task and again when it is done: a task that is cancelled early never runs."""
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.task.done() and not work.task.cancelled():
            work.task.exception()  # the error is retrieved, even when no caller waits any more
