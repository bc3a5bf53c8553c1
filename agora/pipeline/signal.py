"""A condition without a lock: waiters sleep until somebody says that something changed, or until a time.

Knows one event loop. Must not know what changed: every waiter looks for itself.
"""

from __future__ import annotations

import asyncio


class Signal:
    """Something may have changed. `notify` wakes everybody who waits, in the order in which they came."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Wakes everybody; must be called on the loop."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, until: float | None = None) -> None:
        """Returns at the next `notify`, or at `until` on the loop's clock."""
        loop = asyncio.get_running_loop()
        if until is not None and until <= loop.time():
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = None
        timer = None if until is None else loop.call_at(until, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
