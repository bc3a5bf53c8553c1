"""What a connection and the network around it agree on: limits, held bytes, calls that came in, replies.

Knows their form. Must not know streams, sockets, or how either side works.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from agora_protocol.frames import FrameLimits
from agora_protocol.ids import PeerId
from agora_protocol.limits import (
    HANDSHAKE_TIMEOUT_S,
    MAX_CALLS_PER_CONNECTION,
    MAX_PAYLOAD_BYTES,
    PING_AFTER_SILENCE_S,
    PING_ANSWER_S,
)
from agora_protocol.messages import Message
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress


@dataclass(frozen=True, slots=True)
class NetLimits:
    """What this peer lets others cost it, and how patient it is."""

    max_payload_bytes: int = MAX_PAYLOAD_BYTES  # of one frame; what the run's manifest implies
    max_held_bytes: int = 2 * MAX_PAYLOAD_BYTES  # request payloads in hand, over all connections
    max_calls: int = MAX_CALLS_PER_CONNECTION  # open at once on one connection, each way
    max_connections: int = 512
    patience_s: float = 0.25  # how long a request may wait for held bytes to be let go before it gets Busy
    dial_s: float = 10.0
    hello_s: float = HANDSHAKE_TIMEOUT_S
    silence_s: float = (
        PING_AFTER_SILENCE_S  # without a byte from a peer that owes an answer, before it is asked whether it lives
    )
    answer_s: float = PING_ANSWER_S  # for it to say so

    def frames(self) -> FrameLimits:
        """What a prefix may announce."""
        return FrameLimits(max_payload_bytes=self.max_payload_bytes)


@dataclass(slots=True)
class IncomingCall:
    """What a peer asks for. `deadline` is loop time; `run` the 32 bytes of the peer's run, None for an observer.

    `progress` tells the caller how far things are; it never waits, and does nothing once the caller is gone.
    """

    peer: PeerId
    run: bytes | None
    message: Message
    tensors: list[WireTensor]
    deadline: float
    progress: OnProgress = lambda _: None
    caller_gone: bool = False


class Waiter(Protocol):
    """Whoever waits for held bytes."""

    def try_again(self) -> bool:
        """Bytes were let go; whether this one need not wait any longer."""


class HeldBytes:
    """Payload bytes in hand over all connections: taken before a buffer exists, let go when its request is answered."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._waiting: OrderedDict[Waiter, asyncio.TimerHandle] = OrderedDict()
        self._letting = False

    def take(self, size: int) -> bool:
        """Take `size` bytes if they fit below the limit."""
        fits = self.used + size <= self.limit
        if fits:
            self.add(size)
        return fits

    def add(self, size: int) -> None:
        """Take bytes that were promised already."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def wait(self, waiter: Waiter, patience: asyncio.TimerHandle) -> None:
        """Let `waiter` try again when bytes are let go, first come, first served; `patience` ends with its wait."""
        self._waiting[waiter] = patience

    def forget(self, waiter: Waiter) -> None:
        """`waiter` waits no longer."""
        patience = self._waiting.pop(waiter, None)
        if patience is not None:
            patience.cancel()

    def let_go(self, size: int) -> None:
        """Give bytes back. Who gets through may give others back at once, or wait again: the first call goes on."""
        self.used -= size
        if self._letting:
            return
        self._letting = True
        try:
            while self._waiting and self._let_through():
                pass
        finally:
            self._letting = False

    def _let_through(self) -> bool:
        """Whether the first in the queue, who leaves it before it tries, need not come back."""
        waiter, patience = self._waiting.popitem(last=False)
        through = waiter.try_again()
        if through:
            patience.cancel()
        else:
            self._waiting[waiter] = patience
            self._waiting.move_to_end(waiter, last=False)
        return through
