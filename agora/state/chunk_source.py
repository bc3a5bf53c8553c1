"""One peer that chunks are fetched from: its open calls, how many it may have, and its pause after a failure.

Reads no clock (`now` is an argument) and sends nothing, but keeps the asyncio tasks of the open calls and cancels them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from agora_protocol.errors import AgoraError, Busy
from agora_protocol.ids import PeerId

SOURCES: Final = 4  # how many sources are asked for chunks at the same time; the others wait to replace them
WINDOW: Final = 3  # open calls to a source whose last chunk took less than QUICK_S; other sources get one at a time
QUICK_S: Final = 4.0
CHUNK_S: Final = 120.0  # seconds a call for one chunk may last; then it has failed
FAILURES: Final = 4  # failures of one source in a row, after which it is given up
PAUSE_S: Final = 0.5  # seconds without a call after a source's first failure; doubles with each further one
MAX_PAUSE_S: Final = 10.0  # the longest pause that a Busy source can ask for
SLOW_S: Final = 5.0  # a source without an answer for this long, and for four median chunk times, counts as slow
TICK_S: Final = 0.05  # seconds between two checks for slow sources while nothing arrives
# With these numbers one source fills a link of 200 Mbit/s and 50 ms, and all chunks being fetched take 48 MiB of
# memory.

RequestKey = TypeVar("RequestKey", bound=Hashable)


@dataclass(slots=True)
class ChunkSource(Generic[RequestKey]):
    """A peer that chunks or pieces are fetched from, and what its calls have shown.

    calls: what is asked for -> task of the open call, and the loop time at which the call began.
    failures: how many in a row.
    not_before: loop time until which no call is made.
    last_chunk_s: seconds that the peer's last chunk took, infinite before the first.
    last_error: the text of the peer's last failure, "" before one.
    """

    peer: PeerId
    calls: dict[RequestKey, tuple[asyncio.Task[None], float]] = field(default_factory=dict)
    failures: int = 0
    not_before: float = 0.0
    last_chunk_s: float = math.inf
    last_error: str = ""

    @property
    def window(self) -> int:
        # Maximum number of open calls: 1, or WINDOW if the last chunk took under QUICK_S and no call failed since.
        return WINDOW if self.last_chunk_s < QUICK_S and not self.failures else 1

    def is_slow(self, now: float, timeout_s: float) -> bool:
        """Returns whether this source's oldest open call has lasted longer than `timeout_s`; False without one.

        now: loop time.
        """
        return now - min((started_at for _, started_at in self.calls.values()), default=now) > timeout_s

    def record_chunk(self, seconds: float) -> None:
        """Records that a chunk arrived `seconds` after it was asked for; sets the count of failures to 0."""
        self.failures = 0
        self.last_chunk_s = seconds

    def record_failure(self, error: AgoraError, now: float) -> None:
        """Records at loop time `now` that a call failed: keeps the error's text and pauses the source (`not_before`).

        Busy is not counted in `failures`: the pause is as long as the peer asks for, clamped to PAUSE_S and
        MAX_PAUSE_S. Any other error is counted; its pause is PAUSE_S, doubled with each failure in a row. During a
        pause, an error other than Busy changes only the text.
        """
        self.last_error = str(error)
        if isinstance(error, Busy):
            self.not_before = now + min(max(error.retry_after_ms / 1000, PAUSE_S), MAX_PAUSE_S)
        elif now >= self.not_before:  # during a pause, other calls fail because the same stream broke: not counted
            self.failures += 1
            self.not_before = now + PAUSE_S * 2 ** (self.failures - 1)

    def take_ended_calls(self) -> list[tuple[RequestKey, asyncio.Task[None]]]:
        """Removes the calls that have ended from `calls`; returns for each call what it asked for, and its task."""
        ended = [(key, task) for key, (task, _) in self.calls.items() if task.done()]
        for key, _ in ended:
            del self.calls[key]
        return ended

    def cancel_calls(self) -> None:
        """Cancels the open calls without waiting; take_ended_calls removes them once they have ended."""
        for task, _ in self.calls.values():
            task.cancel()


async def cancel_and_await(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels the tasks and waits until all have ended; their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
