"""Tasks that run as long as their owner lives, and work on threads that never keep the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar


async def wait_for_any(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Waits until one of `waits` ends, then cancels the coroutines among them; tasks go on, and are left to the caller.

    Discards what the coroutines return or raise, and does not wait until they are cancelled. Also cancels the
    coroutines if it is cancelled itself.
    """
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in set(tasks) - {wait for wait in waits if isinstance(wait, asyncio.Task)}:
            task.cancel()


class BackgroundTasks:
    """Runs named tasks until `close`. A task that ends earlier is neither restarted nor reported: see `find_ended`."""

    def __init__(self) -> None:
        self.started: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` as a task called `name`, which is expected to run until `close`."""
        self.started.append(asyncio.create_task(work, name=name))

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended; their errors are dropped."""
        for task in self.started:
            task.cancel()
        await asyncio.gather(*self.started, return_exceptions=True)

    def find_ended(self) -> tuple[str, BaseException | None] | None:
        """Returns the name and error of a task that has ended, the one started first; None while all run. Never waits.

        The error is None when the task returned or was cancelled, and the first one of an exception group.
        """
        for task in self.started:
            if task.done():
                error = None if task.cancelled() else task.exception()
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                return task.get_name(), error
        return None


T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Runs `work` on a new daemon thread, waits for it, and returns its result or raises its exception.

    Cancelling this call does not stop the thread, but drops its result. If `work` raises SystemExit, the thread ends
    and this call never returns.
    """
    # Not asyncio.to_thread: its thread would make the daemon's end wait for the work.
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on the waiting task's cancellation does not reach the future

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=getattr(work, "__qualname__", repr(work)), daemon=True).start()
    return await asyncio.wrap_future(future)


class ChangeNotifier:
    """Wakes the coroutines that wait for some change; each then checks by itself whether its condition holds now.

    It is an asyncio.Condition without a lock, whose `wait` may have a time limit.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all coroutines that are in `wait` now, in the order of their arrival. Call it on the event loop."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, until: float | None = None) -> None:
        """Returns at the next `notify`, or at loop time `until` without an error; None means no time limit.

        A `notify` before the call does not end the wait: check the condition before each call.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._event.wait()
