"""Carries step events from the device thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from agora.core.stepping import StepEvent

MAX_EVENTS: Final = 4096  # maximum number of step events that wait for their reader; the oldest are dropped


class StepEvents:
    """A queue of at most MAX_EVENTS step events: any thread may `put`; one task iterates, on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[StepEvent] = deque(maxlen=MAX_EVENTS)
        self._arrived = asyncio.Event()

    def put(self, event: StepEvent) -> None:
        """Appends an event and wakes the reader; drops the oldest event if the queue is full. From any thread."""
        self._events.append(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def __aiter__(self) -> AsyncIterator[StepEvent]:
        while True:
            while self._events:
                yield self._events.popleft()
            await self._arrived.wait()
            self._arrived.clear()
