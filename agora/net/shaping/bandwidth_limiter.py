"""Keeps all traffic of this daemon within its owner's limits: counts what p2pd's sockets carry, and slows down streams.

Received bytes are braked by not reading them; p2pd then holds up to a flow-control window of each connection.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from agora.core.clock import loop_time
from agora.net.shaping.link import LinkSpec
from agora.net.shaping.rate_limits import RateLimits, Throttle
from agora.net.shaping.shaper import AccessLink
from agora.net.shaping.socket_bytes import CarriedBytes, SocketCounter

COUNT_EVERY_S: Final = 0.25  # seconds between two counts of the bytes that were carried
FREE_LINK: Final = LinkSpec(1.25e9, 0.0)  # A link that delays nothing, and is as fast as this program can be


class BandwidthLimiter:
    """Throttles the streams of `link`, so that all of p2pd's traffic keeps to the owner's limits.

    Works in a task from its creation until `close`. Relayed circuits call `let_pass`. link: shapes the streams.
    carried: the newest totals of all of p2pd's sockets; None before the first count, or where they cannot be counted.
    """

    def __init__(self, pid: int, limits: RateLimits, link: AccessLink | None) -> None:
        """pid: of p2pd. link: the emulated link, to which the limits then apply too; None makes one without delay."""
        self.carried: CarriedBytes | None = None
        self.link = link if link is not None else AccessLink(FREE_LINK, random.Random(0))
        self._counter = SocketCounter(pid)
        self._brakes = Throttle(limits.upload), Throttle(limits.download)
        self.link.brake(limits.upload, limits.download)
        self._task = asyncio.create_task(self._run(), name="line brake")

    async def let_pass(self, size: int) -> None:
        """Waits until `size` bytes of a relayed circuit may pass, and books them both ways, as they come in and go out.

        Books them in pieces of `link.sent_at_once`, one after another, between which streams have their turns.
        """
        link = self.link
        left = size
        while left > 0:
            piece = min(left, link.sent_at_once)  # as much as a stream sends at its turn, so that all get as much
            left -= piece
            now = link.clock()
            passed_at = max(link.up.take(piece, now), link.down.take(piece, now))
            link.passed_up += piece
            link.passed_down += piece
            await asyncio.sleep(max(0.0, passed_at - now))

    def close(self) -> None:
        """Ends the task that counts; the rates of `link` stay as they are."""
        self._task.cancel()

    async def _run(self) -> None:
        up, down = self._brakes
        while True:
            self.carried = carried = await asyncio.to_thread(self._counter.read)
            now = loop_time()
            sent = received = None
            if carried is not None:
                sent, received = carried.sent, carried.received
            self.link.brake(
                up.update(now, sent, self.link.passed_up), down.update(now, received, self.link.passed_down)
            )
            await asyncio.sleep(COUNT_EVERY_S)
