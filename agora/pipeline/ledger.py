"""The work ledger: a microbatch that enters this peer is started once; a repeat joins it or gets the kept answer.

Knows: seats, running tasks, who waits for them, the answers given; docs/routing.md has the table. Must not know: what
the work computes. The ledger lives as long as the peer, not as its span: after a move it still answers repeats.

When the last caller of a piece of work leaves, the work is cancelled, unless it is committed: from the moment at which
its gradient may be counted it runs to its end, so that a repeat finds the answer and nothing is counted twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agora_protocol.errors import AgoraError, Busy
from agora_protocol.ids import MicrobatchId, PeerId
from agora_protocol.messages import Advance, Process

from agora.calls import OnProgress
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.observe import events
from agora.observe.events import Report
from agora.pipeline.interfaces import HopAnswer

MAX_CACHE_BYTES = 256 << 20
MAX_CACHE_AGE_S = 900.0
MAX_CACHE_ENTRIES = 65536
ENTRY_BYTES = 512
"""About what a kept answer costs beside its tensors; evaluation answers have no tensors at all."""
CLOSED_RETRY_MS = 2000
MIN_RETRY_MS, MAX_RETRY_MS = 10, 2000
OVERLAP_RETRY_MS = ENDING_RETRY_MS = 1000
MAX_ENDING_S = 5.0


@dataclass(frozen=True, slots=True, order=True)
class WorkKey:
    """What makes two requests the same work: the microbatch, and the stage at which it enters this peer."""

    microbatch: MicrobatchId
    stage: int


class AnswerCache:
    """Keeps the newest answers to finished work: at most `max_bytes`, none older than `max_age_s`. Pure: has no clock.

    What is dropped is forgotten, and a repeat of it is computed and counted again.
    """

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
        """Returns for each entry stage of this microbatch the last stage that the answered work ran."""
        self._drop_old(now)
        return self._last_stages.get(microbatch, {})

    def put(self, key: WorkKey, last: int, answer: HopAnswer, now: float) -> None:
        """Keeps the answer of work that ran stages `key.stage` to `last`; drops the oldest answers beyond the limits.

        The newest answer is kept even when it alone exceeds `max_bytes`.
        """
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
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry[1].nbytes + ENTRY_BYTES
            stages = self._last_stages[key.microbatch]
            del stages[key.stage]
            if not stages:
                del self._last_stages[key.microbatch]


class Work:
    """One piece of running work, and the callers that wait for it; `newest` is the newest progress of each stage.

    Whoever performs it sets `committed` when the gradient may be counted from now on: then the work runs to its end
    even without callers. last: the last stage that it runs here. cancelled: `cancel` was called.
    """

    task: asyncio.Task[HopAnswer]

    def __init__(self, key: WorkKey, last: int) -> None:
        self.key = key
        self.last = last
        self.committed = self.cancelled = False
        self.callers: list[OnProgress] = []
        self.newest: dict[int, Advance] = {}

    def publish(self, news: Advance) -> None:
        """Passes progress to every caller, and keeps it for callers that join later."""
        self.newest[news.stage] = news
        for on_progress in list(self.callers):
            on_progress(news)

    def uncommit(self) -> None:
        """Marks that the gradient was not counted after all; cancels work without callers."""
        self.committed = False
        if not self.callers:
            self.cancel()

    def cancel(self) -> None:
        """Cancels the work; its seat stays taken until it has ended."""
        self.cancelled = True
        self.task.cancel()


class WorkLedger:
    """Runs this peer's work: starts each microbatch once, on one of `max_seats` seats, and keeps the answer.

    A repeat joins the running work or gets the kept answer. New work gets Busy while all seats are taken or the ledger
    refuses. When the last caller stops waiting, the work is cancelled, unless it is committed.
    """

    def __init__(self, me: PeerId, max_seats: int, report: Report) -> None:
        self.max_seats = max(1, max_seats)
        self.me = me
        self._report = report
        self._answers = AnswerCache()
        self._works: dict[WorkKey, Work] = {}
        self._refusal = ""
        self._seat_s = MovingAverage(0.1)

    @property
    def taken(self) -> int:
        """Seats taken: work that runs, or was cancelled and has not ended yet."""
        return len(self._works)

    def answer_repeat(self, message: Process, on_progress: OnProgress, queue: int = 0) -> HopAnswer | None:
        """Returns the kept answer to a microbatch that this peer has finished, None when there is none.

        If there is one, reports RepeatServed and tells `on_progress` "finished". Needs no span: the daemon may hold
        none. queue: length of the device's queue, for the caller.
        """
        answer = self._answers.get(WorkKey(message.microbatch, message.stage), loop_time())
        if answer is not None:
            self._report(events.RepeatServed(message.microbatch.hex(), message.stage))
            on_progress(Advance(message.stage, self.me, "finished", queue))
        return answer

    def refuse_overlap(self, key: WorkKey, last: int) -> None:
        """Raises Busy when the microbatch entered here at another stage and went through one of `key.stage` to `last`.

        A microbatch is counted once per stage here. The gradient of the boundary that this entry asks for was never
        made, so there is nothing to answer: the caller finds a sibling, or its own caller repeats the earlier entry.
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

        last: the last stage that it runs here. A joined work that fails before our `deadline` is started again for us.
        Raises what the work raises. Raises Busy before any work when there is no seat, when nothing new is taken, or
        when an earlier, cancelled work of this name has not ended by `deadline`.
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
        """Refuses new work, waits at most `within_s` for running work, then cancels the rest and lets it end.

        Returns whether nothing had to be cancelled. The ledger refuses until `start_accepting`; `reason` completes
        "this peer is ...".
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

    def _refuse_when_full(self) -> None:
        """Raises Busy when the ledger refuses new work or all seats are taken. The seat itself is taken by `_start`."""
        if self._refusal:
            raise Busy(f"this peer is {self._refusal}; ask another", CLOSED_RETRY_MS)
        if self.taken >= self.max_seats:
            # one of max_seats seats, each taken for seat_s, becomes free every seat_s / max_seats on average
            free_in_ms = 1000.0 * (self._seat_s.value or 0.0) / self.max_seats
            retry_ms = int(min(max(free_in_ms, MIN_RETRY_MS), MAX_RETRY_MS))
            raise Busy(f"all {self.max_seats} seats are taken", retry_ms)

    def _start(self, key: WorkKey, last: int, start: Callable[[Work], Awaitable[HopAnswer]]) -> Work:
        """Takes a seat (or raises Busy) and starts `start(work)` in a new task; returns the Work, without waiting."""
        self._refuse_when_full()
        work = self._works[key] = Work(key, last)

        async def perform() -> HopAnswer:
            """The task: awaits the work, keeps its answer and the time it took; frees the seat, also after an error."""
            started = loop_time()
            try:
                answer = await start(work)
                self._answers.put(key, last, answer, loop_time())
                self._seat_s = self._seat_s.updated(loop_time() - started)
                return answer
            finally:
                self._free(work)

        work.task = asyncio.create_task(perform(), name=f"hop {key.microbatch.hex()} at stage {key.stage}")
        work.task.add_done_callback(lambda task: self._end(work))
        return work

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
        """Called when the task has ended: frees the seat if `perform` never began; marks an error as retrieved."""
        self._free(work)
        if not work.task.cancelled():
            work.task.exception()

    def _free(self, work: Work) -> None:
        """Frees the seat of work that has ended; does nothing the second time."""
        if self._works.get(work.key) is work:
            del self._works[work.key]
