"""How averaging works beside the event loop: on threads of its own, and in tasks whose errors are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from agora_protocol.errors import AgoraError

from agora.observe import events

T = TypeVar("T")
# The work on a shard's values takes 2 to 5 ms, for which the event loop, and each microbatch's message, would wait. All
# stages share these threads, so that rounds take at most so many cores from the device thread.
_ARRAY_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="averaging")


async def off_loop(work: Callable[[], T]) -> T:
    """Runs work on arrays on one of the averaging threads; returns its result. It must not use state of the loop."""
    return await asyncio.get_running_loop().run_in_executor(_ARRAY_THREADS, work)


def start_reported(work: Coroutine[Any, Any, None], report: events.Report, name: str = "") -> asyncio.Task[None]:
    """Starts work in a task of its own; reports an error in it as TaskFailed, "NAME: CODE: MESSAGE"."""

    def report_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            code = error.code if isinstance(error, AgoraError) else type(error).__name__
            report(events.TaskFailed("averaging", ": ".join(filter(None, (name, code, str(error))))))

    task = asyncio.create_task(work)
    task.add_done_callback(report_failure)
    return task
