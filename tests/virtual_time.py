"""An event loop with a simulated clock: it jumps to the next timer when nothing is ready.

So tests wait no real time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Raised when every task waits and no timer is set, so that nothing can ever happen again."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never blocks: each `select` adds its timeout to the clock `now`, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: a wait takes no real time, because the clock jumps to the next timer.

    A coroutine that uses no sockets runs in the same order every time: what it has threads do is done at once.
    """

    def __init__(self) -> None:
        """Creates the loop with a clock of its own."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Returns the virtual time, in seconds; it begins at 1000."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Calls `func` now: the clock would jump while a thread works."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def open_timers(self) -> int:
        """Returns the number of timers of the loop that are set and not cancelled."""
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled")  # noqa: B009 asyncio does not declare it
        return sum(not timer.cancelled() for timer in timers)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on a new VirtualLoop and returns its result; lets its errors through.

    Raises DeadlockError if every task waits and no timer is set. Cancels the tasks that are left at the end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
