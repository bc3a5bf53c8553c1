"""One peer of a transfer: its open calls, how many it may have, and how long it is left alone after a failure.

Deterministic: `now` is an argument, and nothing is sent. Knows: calls by what they ask for, errors, times. Must not
know: what is transferred, how calls travel, which source is chosen.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from agora_protocol.errors import AgoraError, Busy
from agora_protocol.ids import PeerId

SOURCES: Final = 4  # asked for chunks at once; the others wait to replace them
WINDOW: Final = 3  # open calls to a source that gives a chunk in less than QUICK_S; other sources get one at a time
QUICK_S: Final = 4.0
CHUNK_S: Final = 120.0  # for one chunk; a source that needs more counts as failed
FAILURES: Final = 4  # of one source in a row, before it is given up
PAUSE_S: Final = 0.5  # after a source's first failure, which doubles with each
MAX_PAUSE_S: Final = 10.0  # for which a busy source is left alone
SLOW_S: Final = 5.0  # without an answer for this long, and for four median chunk times: an idle source is asked too
TICK_S: Final = 0.05  # how often slow sources are looked for while nothing arrives
# With these numbers one source fills a link of 200 Mbit/s and 50 ms, and all chunks under way hold 48 MiB.

Asked = TypeVar("Asked", bound=Hashable)


@dataclass(slots=True)
class ChunkSource(Generic[Asked]):
    """A peer that something is fetched from.

    calls: the open ones with their start in loop time, by what is asked for. failures: in a row. not_before: it is
    asked for nothing until then. last_chunk_s: how long its last chunk took.
    """

    peer: PeerId
    calls: dict[Asked, tuple[asyncio.Task[None], float]] = field(default_factory=dict)
    failures: int = 0
    not_before: float = 0.0
    last_chunk_s: float = math.inf
    last_error: str = ""

    @property
    def window(self) -> int:
        """How many calls to the source may be open at once."""
        return WINDOW if self.last_chunk_s < QUICK_S and not self.failures else 1

    def is_slow(self, now: float, patience_s: float) -> bool:
        """Returns whether its oldest open call has lasted longer than `patience_s`."""
        return now - min((started_at for _, started_at in self.calls.values()), default=now) > patience_s

    def record_chunk(self, seconds: float) -> None:
        """Records that a chunk came, `seconds` after it was asked for."""
        self.failures, self.last_chunk_s = 0, seconds

    def record_failure(self, error: AgoraError, now: float) -> None:
        """Records that a call failed, and lets the source pause: as long as a Busy one asks, else longer each time."""
        self.last_error = str(error)
        if isinstance(error, Busy):
            self.not_before = now + min(max(error.retry_after_ms / 1000, PAUSE_S), MAX_PAUSE_S)
        elif now >= self.not_before:  # else its other calls broke with the same stream
            self.failures += 1
            self.not_before = now + PAUSE_S * 2 ** (self.failures - 1)

    def take_ended_calls(self) -> list[tuple[Asked, asyncio.Task[None]]]:
        """Removes the calls that have ended, and returns each with what it asked for."""
        ended = [(asked, task) for asked, (task, _) in self.calls.items() if task.done()]
        for asked, _ in ended:
            del self.calls[asked]
        return ended

    def cancel_calls(self) -> None:
        """Cancels the open calls; they end later."""
        for task, _ in self.calls.values():
            task.cancel()


async def cancel_and_await(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels the tasks and waits until all have ended; what they raise is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
