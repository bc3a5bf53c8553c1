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
    """Runs named tasks until `close`. One that ends earlier is not restarted: `on_end` is told."""

    def __init__(self, on_end: Callable[[str, BaseException | None], object]) -> None:
        """on_end: called in the event loop with name and error of each task that ends before `close`.

        The error is None when the task returned or was cancelled, and the first one of an exception group.
        """
        self.on_end = on_end
        self._started: list[asyncio.Task[None]] = []
        self._is_closed = False

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` as a task called `name`, which is expected to run until `close`."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_done)
        self._started.append(task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not self._is_closed:
            self.on_end(task.get_name(), error)

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended; their errors are dropped."""
        self._is_closed = True
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)


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
