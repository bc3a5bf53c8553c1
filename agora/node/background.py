"""Tasks that run in the background for as long as the object that they belong to.

Knows: asyncio tasks. Must not know: what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self


class BackgroundTasks:
    """Runs named tasks until the `async with` block ends, then cancels and awaits them all.

    A task that ends before is neither restarted nor reported here: look at `running` and `first_ended`.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels all tasks and waits until they have ended; their errors are dropped."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` as a task, which is expected to run until the block ends."""
        self._tasks[name] = asyncio.create_task(work, name=name)

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """All tasks that were started, also those that have ended."""
        return list(self._tasks.values())

    def first_ended(self) -> tuple[str, BaseException | None] | None:
        """Returns the name and error of an ended task, of several the one started first; None when all still run.

        The error is None when the task returned or was cancelled; of an exception group it is the first one.
        """
        for name, task in self._tasks.items():
            if task.done():
                error = None if task.cancelled() else task.exception()
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                return name, error
        return None
