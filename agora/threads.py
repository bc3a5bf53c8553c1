"""Long work beside the event loop, on a thread that never keeps the process alive.

Knows: one thread, one future. Must not know: the work. asyncio.to_thread would make the daemon's end wait for the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises. When the awaiting task is cancelled, the thread goes on and nobody hears of it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, caught = None, None
        try:
            result = work()
        except Exception as error:
            caught = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=run, name="in thread", daemon=True).start()
    return await future
