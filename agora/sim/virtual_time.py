"""An event loop with a simulated clock: it jumps to the next timer when nothing is ready, so tests wait no real time.

Knows: asyncio's selectors and timers. Must not know: what runs in it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Raised when every task waits and no timer is set, so that nothing can ever happen again."""


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks: advances its clock by the timeout."""

    def __init__(self) -> None:
        """Starts the clock at 1000 s."""
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Adds `timeout` to the clock and returns what is ready now. Raises DeadlockError without a timeout."""
        if timeout is None:
            raise DeadlockError
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A deterministic loop: the same coroutine runs in the same order every time, without sockets and threads."""

    def __init__(self) -> None:
        """Creates the loop with a clock of its own."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the virtual time, in seconds."""
        return self._jumping.now

    def open_timers(self) -> int:
        """Returns the number of timers that will still fire."""
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled")  # noqa: B009 asyncio does not declare it
        return sum(not timer.cancelled() for timer in timers)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in virtual time and returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
