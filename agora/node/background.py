"""Tasks that run in the background for as long as the object that they belong to.

Knows: asyncio tasks. Must not know: what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self


class BackgroundTasks:
    """Tasks by name. They are cancelled and awaited when the `async with` block ends."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work`, which is expected to run until the block ends."""
        self._tasks[name] = asyncio.create_task(work, name=name)

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """All tasks that were started, also those that have ended."""
        return list(self._tasks.values())

    def first_ended(self) -> tuple[str, BaseException | None] | None:
        """Returns the name of the first task that has ended and its first error, if any; None when all still run."""
        for name, task in self._tasks.items():
            if task.done():
                error = None if task.cancelled() else task.exception()
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                return name, error
        return None
