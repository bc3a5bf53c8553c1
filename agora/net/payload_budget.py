"""Bounds the memory of payloads: bytes are reserved before a buffer exists, and released when it is no longer needed.

Knows: numbers of bytes, and who waits for more. Must not know: frames' meaning, calls, sockets.

| payload of | reserved |
|---|---|
| an answer | always: this peer asked for it, and whoever waits for it may hold what others wait for |
| a request | if it fits into the budget or the connection's guaranteed bytes; else it waits, at most `patience_s` |
| a request, after one waited in vain | only if it fits at once, until one has |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from agora.net.streams import Intake

GUARANTEED_BYTES: Final = 65_536
"""Payload bytes that every connection may always hold, however full the budget is."""


class PayloadBudget:
    """Counts the payload bytes that all connections have reserved, and serves waiting ones when bytes are released.

    `waiting`: the shares that wait for bytes, served first come first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.waiting: dict[PayloadShare, None] = {}
        self._is_releasing = False

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes stay within the limit."""
        return self.used + size <= self.limit

    def reserve(self, size: int) -> None:
        """Reserves bytes, also beyond the limit."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def release(self, size: int) -> None:
        """Gives bytes back, then serves the waiting connections in order, until the next one's do not fit."""
        self.used -= size
        if self._is_releasing:  # one that is served may release others at once: the outer call goes on with the queue
            return
        self._is_releasing = True
        try:
            while self.waiting and self.fits((first := next(iter(self.waiting))).wanted):
                first.end_wait(is_served=True)
        finally:
            self._is_releasing = False


class PayloadShare:
    """Reserves and releases one connection's bytes (`held`) of the budget, and waits for more (`wanted`, 0: no wait).

    A wait ends after `patience_s` at most: nothing is read meanwhile, not even answers that would free the bytes.
    """

    def __init__(self, budget: PayloadBudget, patience_s: float, on_wait_over: Callable[[bool], None]) -> None:
        """on_wait_over: called when a wait ends, with True when the bytes are reserved now, False when time ran out."""
        self._budget = budget
        self._patience_s = patience_s
        self._on_wait_over = on_wait_over
        self._patience: asyncio.TimerHandle | None = None
        self._arriving = 0  # reserved for the frame whose payload is arriving
        self._waited_in_vain = False
        self.wanted = 0
        self.held = 0

    def reserve_for_request(self, size: int) -> Intake:
        """Reserves bytes that fit into the budget or GUARANTEED_BYTES, and returns TAKE.

        Else returns WAIT, and calls `on_wait_over` later; or DROP (refuse it) when the last wait was in vain.
        """
        if not size:
            return Intake.TAKE
        if self._budget.fits(size):
            self._waited_in_vain = False
        elif self.held + size > GUARANTEED_BYTES:
            if self._waited_in_vain:
                return Intake.DROP
            self.wanted = size
            self._budget.waiting[self] = None
            self._patience = asyncio.get_running_loop().call_later(self._patience_s, self.end_wait, False)
            return Intake.WAIT
        self.reserve(size)
        return Intake.TAKE

    def reserve(self, size: int) -> None:
        """Reserves the payload of the frame that arrives next, without asking whether it fits."""
        self._budget.reserve(size)
        self.held += size
        self._arriving = size

    def take_arrived(self) -> int:
        """Returns the bytes reserved for the payload that has arrived; the caller must `release` them later."""
        arrived, self._arriving = self._arriving, 0
        return arrived

    def release(self, size: int) -> None:
        """Gives bytes back to the budget, which may end other connections' waits."""
        if size:
            self.held -= size
            self._budget.release(size)

    def end_wait(self, is_served: bool) -> None:
        """Ends a wait: reserves the wanted bytes if `is_served`, and calls `on_wait_over(is_served)`."""
        wanted = self._stop_waiting()
        if is_served:
            self.reserve(wanted)
        self._waited_in_vain = not is_served
        self._on_wait_over(is_served)

    def close(self) -> None:
        """Called when the connection is gone: drops its wait, and releases what an unfinished payload had reserved."""
        self._stop_waiting()
        self.release(self.take_arrived())

    def _stop_waiting(self) -> int:
        """Takes this share out of the budget's queue. Returns the bytes that it waited for, 0 when it did not wait."""
        wanted, self.wanted = self.wanted, 0
        self._budget.waiting.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
        return wanted
