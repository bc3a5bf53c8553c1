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
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from agora.net.streams import Intake

GUARANTEED_BYTES: Final = 65_536
"""Payload bytes that every connection may always hold, however full the budget is."""


class PayloadBudget:
    """The payload bytes that all connections hold together, and the connections that wait for more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._waiting: OrderedDict[PayloadShare, asyncio.TimerHandle] = OrderedDict()
        self._is_releasing = False

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes stay within the limit."""
        return self.used + size <= self.limit

    def reserve(self, size: int) -> None:
        """Reserves bytes, also beyond the limit."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def wait(self, share: PayloadShare, patience: asyncio.TimerHandle) -> None:
        """Has `share` try again when bytes are released, first come, first served. `patience` ends its wait."""
        self._waiting[share] = patience

    def stop_waiting(self, share: PayloadShare) -> None:
        """Takes `share` out of the queue, if it is in it."""
        patience = self._waiting.pop(share, None)
        if patience is not None:
            patience.cancel()

    def release(self, size: int) -> None:
        """Gives bytes back, and lets those that wait try again.

        A share that gets its bytes may release others at once, or wait again; then the outer call goes on with the
        queue.
        """
        self.used -= size
        if self._is_releasing:
            return
        self._is_releasing = True
        try:
            while self._waiting and self._serve_first():
                pass
        finally:
            self._is_releasing = False

    def _serve_first(self) -> bool:
        """Lets the first of the queue try again. Returns False, and puts it back, when its bytes do not fit yet."""
        share, patience = self._waiting.popitem(last=False)
        is_served = share.try_again()
        if is_served:
            patience.cancel()
        else:
            self._waiting[share] = patience
            self._waiting.move_to_end(share, last=False)
        return is_served


class PayloadShare:
    """What one connection holds of the budget.

    While a request waits for bytes nothing is read from the stream, answers included, whose readers may hold the very
    bytes that are waited for. So a wait ends after `patience_s`.
    """

    def __init__(self, budget: PayloadBudget, patience_s: float, on_wait_over: Callable[[bool], None]) -> None:
        """on_wait_over: called when a wait ends, with whether the bytes are reserved now."""
        self._budget = budget
        self._patience_s = patience_s
        self._on_wait_over = on_wait_over
        self._arriving = 0  # reserved for the frame whose payload is arriving
        self._wanted = 0  # by the request that waits
        self._waited_in_vain = False
        self.held = 0

    def reserve_for_request(self, size: int) -> Intake:
        """Reserves the payload of a request, if it may: see the table at the top of this module.

        Returns TAKE when it is reserved, WAIT until `on_wait_over` is called, DROP when the request must be refused.
        """
        if not size:
            return Intake.TAKE
        if self._budget.fits(size):
            self._waited_in_vain = False
        elif self.held + size > GUARANTEED_BYTES:
            if self._waited_in_vain:
                return Intake.DROP
            self._wanted = size
            self._budget.wait(self, asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience))
            return Intake.WAIT
        self.reserve(size)
        return Intake.TAKE

    def take_arrived(self) -> int:
        """Returns the bytes of the payload that has arrived. The caller releases them."""
        arrived, self._arriving = self._arriving, 0
        return arrived

    def release(self, size: int) -> None:
        """Gives bytes back to the budget."""
        if size:
            self.held -= size
            self._budget.release(size)

    def close(self) -> None:
        """Ends a wait, and releases what was reserved for a payload that will not arrive."""
        if self._wanted:
            self._wanted = 0
            self._budget.stop_waiting(self)
        self.release(self.take_arrived())

    def try_again(self) -> bool:
        """Reserves what is waited for, if it fits now. Returns whether this share need not wait any longer."""
        if not self._wanted:
            return True
        if not self._budget.fits(self._wanted):
            return False
        wanted, self._wanted = self._wanted, 0
        self.reserve(wanted)
        self._on_wait_over(True)
        return True

    def reserve(self, size: int) -> None:
        """Reserves the payload of the frame that arrives next, without asking whether it fits."""
        self._budget.reserve(size)
        self.held += size
        self._arriving = size

    def _lose_patience(self) -> None:
        """Ends a wait that took too long: the request must be refused."""
        if self._wanted:
            self._wanted = 0
            self._budget.stop_waiting(self)
            self._waited_in_vain = True
            self._on_wait_over(False)
