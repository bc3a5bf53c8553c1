"""The work ledger: a microbatch that enters this peer is started once; a repeat joins it or gets the kept answer.

Knows: seats, running tasks, who waits for them, the answers given; docs/routing.md has the table. Must not know: what
the work computes. The ledger lives as long as the peer, not as its span: after a move it still answers repeats.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agora_protocol.errors import AgoraError, Busy, MemoryError_
from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.messages import Advance, Process

from agora.calls import OnProgress
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.observe import events
from agora.pipeline.interfaces import HopAnswer

MAX_CACHE_BYTES = 256 << 20
"""Bytes of all kept answers together, at most."""
MAX_CACHE_AGE_S = 900.0
"""Seconds after which a kept answer is dropped."""
MAX_CACHE_ENTRIES = 65536
"""Answers that are kept, at most."""
ENTRY_BYTES = 512
"""Bytes that a kept answer costs beside its tensors, about; evaluation answers have no tensors at all."""
CLOSED_RETRY_MS = 2000
"""Milliseconds after which a caller may ask again that was refused because this peer takes no new work."""
MIN_RETRY_MS, MAX_RETRY_MS = 10, 2000
"""The bounds of the milliseconds after which a caller may ask again that found all seats taken."""
OVERLAP_RETRY_MS = ENDING_RETRY_MS = 1000
"""Milliseconds after which a caller may ask again whose microbatch entered elsewhere, or is still being cancelled."""
ANSWERS_PER_SEAT = 32
"""After so many answers without a lack of memory, a seat that was given up for it is offered again."""
MAX_ENDING_S = 5.0
"""Seconds for which `WorkLedger.finish` waits for cancelled work to end."""


@dataclass(frozen=True, slots=True, order=True)
class WorkKey:
    """What makes two requests the same work: the microbatch, and the stage at which it enters this peer."""

    microbatch: MicrobatchId
    stage: int


class AnswerCache:
    """Keeps the newest answers to finished work: at most `max_bytes`, none older than `max_age_s`. Has no clock."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, max_age_s: float = MAX_CACHE_AGE_S) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[WorkKey, tuple[float, HopAnswer]] = OrderedDict()
        self._last_stages: dict[MicrobatchId, dict[int, int]] = {}
        self.nbytes = 0

    def get(self, key: WorkKey, now: float) -> HopAnswer | None:
        """Returns the answer to this work, None when it is not kept."""
        self._drop_old(now)
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def stages_of(self, microbatch: MicrobatchId, now: float) -> dict[int, int]:
        """Returns, by the stage at which answered work of this microbatch entered, the last stage that it ran."""
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


class Work:
    """One piece of running work, and the callers that wait for it; `newest` is the newest progress of each stage.

    Whoever performs it sets `committed` when the gradient may be counted from now on: then the work runs to its end
    even without callers, so that a repeat finds the answer. last: the last stage that it runs here.
    """

    task: asyncio.Task[HopAnswer]

    def __init__(self, key: WorkKey, last: int) -> None:
        self.key = key
        self.last = last
        self.committed = self.cancelled = False
        self.callers: list[OnProgress] = []
        self.newest: dict[int, Advance] = {}

    def publish(self, news: Advance) -> None:
        """Passes progress to every caller, and keeps the newest of each stage for callers that join later."""
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
    Work that runs out of memory costs a seat, which is offered again after ANSWERS_PER_SEAT answers.
    """

    def __init__(self, me: PeerId, max_seats: int, report: events.Report) -> None:
        self.me = me
        self._max_seats = self._seats = max(1, max_seats)
        self._answers_since = 0  # answers since the number of seats last changed
        self._report = report
        self._answers = AnswerCache()
        self._works: dict[WorkKey, Work] = {}
        self._refusal = ""
        self.shortage = ""  # completes "this peer is ..." while new work is refused for lack of something
        self._seat_s = MovingAverage(0.1)

    @property
    def taken(self) -> int:
        """Seats taken: work that runs, or was cancelled and has not ended yet."""
        return len(self._works)

    def answer_repeat(self, message: Process, on_progress: OnProgress, queue: int = 0) -> HopAnswer | None:
        """Returns the kept answer to the same work, reporting RepeatServed and "finished"; None if there is none."""
        answer = self._answers.get(WorkKey(message.microbatch, message.stage), loop_time())
        if answer is not None:
            self._report(events.RepeatServed(message.microbatch.hex(), message.stage))
            on_progress(Advance(message.stage, self.me, "finished", queue))
        return answer

    def refuse_overlap(self, key: WorkKey, last: int) -> None:
        """Raises Busy when the microbatch entered here at another stage and went through one of `key.stage` to `last`.

        It would be counted twice there, and the gradient that this entry asks for was never made.
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
        start: Callable[[Work], Awaitable[HopAnswer]],
    ) -> HopAnswer:
        """Joins the work `key`, or starts it with `start` on a free seat, and returns its answer.

        last: the last stage that it runs here. Joined work that fails before our `deadline` is started again for us.
        Raises what the work raises, and Busy when it cannot be started by `deadline`.
        """
        while True:
            work = self._works.get(key)
            if work is not None and work.cancelled:
                await asyncio.wait([work.task], timeout=max(0.0, deadline - loop_time()))
                if not work.task.done():
                    raise Busy("an earlier attempt of this microbatch is still ending here", ENDING_RETRY_MS)
                continue
            if work is None:
                return await self._wait(self._start(key, last, start), on_progress)
            self._report(events.RepeatServed(key.microbatch.hex(), key.stage))
            for news in work.newest.values():
                on_progress(news)
            try:
                return await self._wait(work, on_progress)
            except AgoraError:
                if loop_time() >= deadline:
                    raise

    def stop_accepting(self, reason: str) -> None:
        """Makes new work raise Busy from now on; `reason` completes "this peer is ...". Repeats are still served."""
        self._refusal = reason

    def start_accepting(self) -> None:
        """Takes new work again."""
        self._refusal = ""

    async def finish(self, within_s: float, reason: str) -> bool:
        """Stops accepting, waits at most `within_s` for running work, cancels the rest; returns whether all ended."""
        self.stop_accepting(reason)
        if self._works:
            await asyncio.wait([work.task for work in self._works.values()], timeout=within_s)
        late = list(self._works.values())
        for work in late:
            work.cancel()
        if late:
            await asyncio.wait([work.task for work in late], timeout=MAX_ENDING_S)
        return not late

    def _start(self, key: WorkKey, last: int, start: Callable[[Work], Awaitable[HopAnswer]]) -> Work:
        """Takes a seat and starts `start(work)` in a new task; returns the Work, without waiting.

        last: the last stage that the work runs here. Raises Busy, with the time after which to try again, when all
        seats are taken or this ledger accepts no more.
        """
        if refusal := self._refusal or self.shortage:
            raise Busy(f"this peer is {refusal}; ask another", CLOSED_RETRY_MS)
        if self.taken >= self._seats:
            free_in_ms = 1000.0 * (self._seat_s.value or 0.0) / self._seats  # on average, the next one of all seats
            retry_ms = int(min(max(free_in_ms, MIN_RETRY_MS), MAX_RETRY_MS))
            raise Busy(f"all {self._seats} seats are taken", retry_ms)
        work = self._works[key] = Work(key, last)

        async def perform() -> HopAnswer:
            """The task: awaits the work, keeps its answer and the time it took; frees the seat, also after an error."""
            started = loop_time()
            try:
                answer = await start(work)
                self._answers.put(key, last, answer, loop_time())
                self._seat_s = self._seat_s.updated(loop_time() - started)
                self._count_answer()
                return answer
            except MemoryError_:
                self.give_up_a_seat("the device was out of memory")
                raise
            finally:
                self._end(work)

        work.task = asyncio.create_task(perform(), name=f"hop {key.microbatch.hex()} at stage {key.stage}")
        work.task.add_done_callback(lambda task: self._end(work))
        return work

    def give_up_a_seat(self, reason: str) -> None:
        """Called when memory is short: from now on one microbatch less than now may be here at once, but one always."""
        self._seats, self._answers_since = max(1, min(self._seats, self.taken) - 1), 0
        self._report(events.SeatsChanged(self._seats, self._max_seats, reason))

    def _count_answer(self) -> None:
        """Called for each answer: offers one more seat, where some were given up, after ANSWERS_PER_SEAT of them."""
        self._answers_since += 1
        if self._seats < self._max_seats and self._answers_since >= ANSWERS_PER_SEAT:
            self._seats, self._answers_since = self._seats + 1, 0
            self._report(events.SeatsChanged(self._seats, self._max_seats, "memory has sufficed since"))

    async def _wait(self, work: Work, on_progress: OnProgress) -> HopAnswer:
        """Returns the work's answer. When the last caller stops waiting, cancels the work unless it is committed."""
        work.callers.append(on_progress)
        try:
            return await asyncio.shield(work.task)
        finally:
            work.callers.remove(on_progress)
            if not work.callers and not work.committed:
                work.cancel()

    def _end(self, work: Work) -> None:
        """Frees the seat; called at the task's end, and after it, since a cancelled task may never have begun."""
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.task.done() and not work.task.cancelled():
            work.task.exception()  # the error is retrieved, even when no caller waits any more
