"""Runs long work outside of the event loop, on a thread that never keeps the process alive.

asyncio.to_thread would make the daemon's end wait for the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Runs `work` on a new daemon thread, waits for it, and returns its result or raises its exception.

    Cancelling this call does not stop the thread, but drops its result. If `work` raises SystemExit, the thread ends
    and this call never returns.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on the waiting task's cancellation does not reach the future

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=getattr(work, "__qualname__", repr(work)), daemon=True).start()
    return await asyncio.wrap_future(future)
