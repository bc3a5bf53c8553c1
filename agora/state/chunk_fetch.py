"""Fetches the chunks of one transfer from several peers at the same time; peers may die, hang, or send bad data.

A source is first asked for its index: what it can give. Then it is asked for chunks, one at a time, or WINDOW at a time
while it is quick. The caller defines what an index and a chunk are and what a failure means: stages and base
models differ only in that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from agora_protocol.errors import AgoraError, Busy
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_DEADLINE_MS
from agora_protocol.messages import Request

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.state.chunk_schedule import ChunkSchedule

# With these numbers one source fills a link of 200 Mbit/s and 50 ms, and all chunks being fetched take 48 MiB of
# memory.
MAX_ACTIVE_SOURCES: Final = 4  # how many sources are asked for chunks at the same time; the others wait to replace them
WINDOW: Final = 3  # open calls to a source whose last chunk took less than QUICK_S; other sources get one at a time
QUICK_S: Final = 4.0
CHUNK_TIMEOUT_S: Final = 120.0  # seconds a call for one chunk may last; then it has failed
INDEX_TIMEOUT_S: Final = 30.0  # seconds a source may take to say what it can give: it may have to copy a stage first
MAX_SOURCE_FAILURES: Final = 4  # after this many failures in a row a source is given up, or left alone for long
FIRST_PAUSE_S: Final = 0.5  # seconds without a call after a source's first failure; doubles with each further one
MAX_PAUSE_S: Final = 10.0  # the longest pause that a Busy source can ask for
SLOW_AFTER_S: Final = 5.0  # a source without an answer for this long, and for four median chunk times, counts as slow
TICK_INTERVAL_S: Final = 0.05  # seconds between two checks for slow sources while nothing arrives

Offered = TypeVar("Offered")  # what a source can give


@dataclass(slots=True, eq=False)
class Source(Generic[Offered]):
    """A peer that chunks are fetched from, and what its calls have shown. Times are loop times."""

    peer: PeerId
    offer: Offered | None = None  # None before the first answer, and when the source is to be asked again
    given_up: bool = False  # it is not asked again; last_error has the reason
    # chunk, None for the index -> task of the open call, and when it began
    calls: dict[int | None, tuple[asyncio.Task[None], float]] = field(default_factory=dict)
    failures: int = 0  # in a row
    not_before: float = 0.0  # no call is made earlier
    last_chunk_s: float = math.inf  # seconds that the last chunk took
    last_error: str = ""

    @property
    def window(self) -> int:
        return WINDOW if self.last_chunk_s < QUICK_S and not self.failures else 1

    def is_slow(self, now: float, timeout_s: float) -> bool:
        """Returns whether this source's oldest open call has lasted longer than `timeout_s`; False without one."""
        return now - min((started_at for _, started_at in self.calls.values()), default=now) > timeout_s

    def record_chunk(self, seconds: float) -> None:
        """Records that a chunk arrived `seconds` after it was asked for; sets the count of failures to 0."""
        self.failures = 0
        self.last_chunk_s = seconds

    def record_failure(self, error: AgoraError, now: float) -> None:
        """Records that a call failed, and pauses the source.

        | error | counted in `failures` | pause |
        |---|---|---|
        | Busy | no | as long as the peer asks for, clamped to FIRST_PAUSE_S and MAX_PAUSE_S |
        | any other | yes | FIRST_PAUSE_S, doubled with each failure in a row |
        | other than Busy, during a pause | no | as before |
        """
        self.last_error = str(error)
        if isinstance(error, Busy):
            self.not_before = now + min(max(error.retry_after_ms / 1000, FIRST_PAUSE_S), MAX_PAUSE_S)
        elif now >= self.not_before:  # during a pause, other calls fail because the same stream broke: not counted
            self.failures += 1
            self.not_before = now + FIRST_PAUSE_S * 2 ** (self.failures - 1)

    def give_up(self, reason: str) -> None:
        """Asks the source for nothing any more and cancels its open calls; chunks that it gave stay."""
        self.given_up = True
        self.last_error = reason
        self.offer = None
        for task, _ in self.calls.values():
            task.cancel()


class ChunkFetch(Generic[Offered]):
    """The sources of one transfer and their open calls: starts calls, awaits them, keeps the schedule up to date.

    sources: by peer, the best first.
    """

    def __init__(
        self,
        ask_index: Callable[[Source[Offered]], Coroutine[None, None, None]],
        fetch_chunk: Callable[[Source[Offered], Offered, int], Coroutine[None, None, None]],
        can_give: Callable[[Offered, int], bool] = lambda index, chunk: True,
        is_usable: Callable[[Offered], bool] = lambda index: True,
    ) -> None:
        """ask_index, fetch_chunk: each call of them runs as a task of its own.

        ask_index: asks a source for its index and sets it. fetch_chunk: fetches and checks a chunk, keeps it, and calls
        record_arrival. Both handle the source's failures. can_give(index, chunk): whether the source has the chunk.
        is_usable: whether chunks of a source with this index are wanted at all.
        """
        self.schedule = ChunkSchedule(0)
        self.sources: dict[PeerId, Source[Offered]] = {}
        self._ask_index = ask_index
        self._fetch_chunk = fetch_chunk
        self._can_give = can_give
        self._is_usable = is_usable

    @property
    def calls(self) -> list[asyncio.Task[None]]:
        return [task for source in self.sources.values() for task, _ in source.calls.values()]

    @property
    def usable_sources(self) -> list[Source[Offered]]:
        return [source for source in self.sources.values() if not source.given_up]

    def begin(self, peers: Iterable[PeerId]) -> None:
        """Forgets the sources, none of which may have an open call, and takes these, the best first."""
        self.sources = {peer: Source(peer) for peer in peers}

    def update_sources(self, peers: Collection[PeerId]) -> None:
        """Adds the new ones of `peers`, and removes sources that are not among them and have no open call.

        A source that was given up stays, or it would be asked again when it comes back.
        """
        for peer in peers:
            self.sources.setdefault(peer, Source(peer))
        for peer, source in list(self.sources.items()):
            if peer not in peers and not source.calls and not source.given_up:
                del self.sources[peer]

    # --- starting calls

    def ask_for_indexes(self, now: float) -> None:
        """Asks sources for their indexes until MAX_ACTIVE_SOURCES of them, without slow ones, give chunks or answer."""
        usable = self.usable_sources
        # A source that hangs or failed does not hold one of the MAX_ACTIVE_SOURCES places: another is asked beside it.
        engaged = [s for s in usable if None in s.calls or (s.offer is not None and not s.failures)]
        not_slow = sum(1 for source in engaged if not self._is_slow(source, now))
        idle = [s for s in usable if s.offer is None and None not in s.calls and now >= s.not_before]
        for source in idle[: max(MAX_ACTIVE_SOURCES - not_slow, 0)]:
            source.calls[None] = (asyncio.create_task(self._ask_index(source)), now)

    def _is_slow(self, source: Source[Offered], now: float) -> bool:
        timeout_s = SLOW_AFTER_S if source.offer is None else max(SLOW_AFTER_S, 4 * self.schedule.median_s())
        return source.is_slow(now, timeout_s)

    def ask_for_chunks(self, now: float) -> None:
        """Asks every source whose index is known for as many chunks as its window allows."""
        free = [source for source in self.sources.values() if now >= source.not_before]
        while free:  # one chunk each in turn, so that all sources have work
            free = [source for source in free if self._start_chunk(source, now)]

    def _start_chunk(self, source: Source[Offered], now: float) -> bool:
        offer = source.offer
        if offer is None or len(source.calls) >= source.window or not self._is_usable(offer):
            return False
        if (chunk := self.schedule.take(source.peer, now, lambda chunk: self._can_give(offer, chunk))) is None:
            return False
        source.calls[chunk] = (asyncio.create_task(self._fetch_chunk(source, offer, chunk)), now)
        return True

    # --- awaiting calls

    async def wait(self, timeout_s: float, others: Collection[asyncio.Task[None]] = ()) -> None:
        """Waits until a call, or one of `others`, has ended, but at most `timeout_s`.

        Raises what a call raised: its coroutine handles what its source can cause.
        """
        if awaited := [*self.calls, *others]:
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout_s)
        self._remove_ended_calls()

    def record_arrival(self, source: Source[Offered], chunk: int) -> None:
        """Records that the source gave the chunk, and cancels the calls by which others were asked for it as well."""
        for peer in self.schedule.record_arrival(chunk, source.peer, loop_time()):
            self.sources[peer].calls[chunk][0].cancel()

    async def close(self) -> None:
        """Cancels the open calls and waits for their end; call it when a fetch ends, whatever the reason."""
        calls = self.calls
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._remove_ended_calls()

    def _remove_ended_calls(self) -> None:
        for source in self.sources.values():
            ended = [(chunk, task) for chunk, (task, _) in source.calls.items() if task.done()]
            for chunk, _ in ended:
                del source.calls[chunk]
            for chunk, task in ended:
                if chunk is not None:
                    self.schedule.record_call_end(chunk, source.peer)
                if not task.cancelled():
                    task.result()


async def call_until(peer_caller: PeerCaller, peer: PeerId, make: Callable[[int], Request], deadline: float) -> Reply:
    """Makes a call whose request says how much time is left. make: returns the request, given these milliseconds."""
    return await peer_caller.call(peer, make(milliseconds_until(deadline)), deadline=deadline)


def milliseconds_until(moment: float) -> int:
    """Returns the whole milliseconds from now until `moment` (loop time), at least 1 and at most MAX_DEADLINE_MS."""
    return min(max(int((moment - loop_time()) * 1000), 1), MAX_DEADLINE_MS)
