"""Opens connections to other peers: dials each at its known addresses, again when two dials have crossed.

Knows: where peers can be dialled, and the dials under way. Must not know: which peers are connected (it asks), whether
a peer may be called, or what is said on a connection after HELLO.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from agora_protocol.frames import FrameLimits
from agora_protocol.ids import PeerId
from agora_protocol.limits import PROTOCOL_NAME

from agora.net.address_book import AddressBook
from agora.net.connection import Connection
from agora.net.host import Host
from agora.net.network_errors import ConnectionBroken, DialsCrossed
from agora.net.reaching import WaysToReach, reach_by_any_way, relays_of
from agora.net.streams import FrameStream

DIAL_AGAIN_S: Final = 5.1  # seconds from crossed dials to the next; for 5 s p2pd refuses an address that has failed
TURN_S: Final = 0.5  # seconds by which the peer with the higher id dials again later


class Dialler:
    """Dials peers; callers that want the same peer at the same time share one dial."""

    def __init__(
        self,
        host: Host,
        frame_limits: FrameLimits,
        dial_s: float,
        connection_to: Callable[[PeerId], Connection | None],
        add: Callable[[FrameStream, PeerId, str], Connection],
    ) -> None:
        """dial_s: seconds for a dial. connection_to: returns the usable connection to a peer, or None.

        add: makes a connection of a stream to a peer and its path, and keeps it.
        """
        self._host = host
        self._frame_limits = frame_limits
        self._dial_s = dial_s
        self._connection_to = connection_to
        self._add = add
        self._ways = WaysToReach()
        self._book = AddressBook()
        self._dials: dict[PeerId, asyncio.Task[Connection]] = {}
        self._awaited: dict[PeerId, asyncio.Event] = {}
        self._is_closing = False

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remembers the multiaddrs with /p2p/PEER at which `peer` can be dialled; ignores unusable ones."""
        self._book.learn(peer, addresses)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Returns the multiaddrs with /p2p/PEER at which `peer` would be dialled; empty when none are known."""
        return self._book.addresses(peer)

    def reach_by(self, ways: WaysToReach) -> None:
        """Has peers reached in these ways from now on; before, at all their addresses, but through no holes."""
        self._ways = ways

    def learn_announced(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remembers where a peer says that it, or its relays, can be dialled; ignores addresses that must not be."""
        usable = [address for address in addresses if self._ways.may_dial(address)]
        self.learn(peer, usable)
        for relay, its_addresses in relays_of(usable).items():
            if not self._book.addresses(relay):
                self.learn(relay, its_addresses)

    def wake(self, peer: PeerId) -> None:
        """Tells a dial that waits for `peer` to open a stream, after crossed dials, that the peer has done so."""
        if peer in self._awaited:
            self._awaited[peer].set()

    def stop(self) -> list[asyncio.Task[Connection]]:
        """Refuses new dials from now on; returns those under way, which the caller cancels."""
        self._is_closing = True
        return list(self._dials.values())

    async def dial(self, peer: PeerId) -> Connection:
        """Opens a connection to `peer`, or awaits the dial that another caller has begun.

        Raises ConnectionBroken when the peer is not reached within `dial_s`, and what `Connection.start` raises.
        """
        if self._is_closing:
            raise ConnectionBroken("this peer is leaving")
        if peer == self._host.peer:
            raise ConnectionBroken("a peer does not call itself")
        dial = self._dials.get(peer)
        if dial is None:
            dial = self._dials[peer] = asyncio.create_task(self._open(peer), name=f"dial {peer}")
            dial.add_done_callback(partial(self._forget_dial, peer))
        await asyncio.wait([dial])  # a caller that is cancelled here leaves the dial to the others
        if dial.cancelled():
            raise ConnectionBroken("this peer is leaving")
        return dial.result()

    def _forget_dial(self, peer: PeerId, dial: asyncio.Task[Connection]) -> None:
        """Called when a dial has ended: forgets it, so that the next call dials again."""
        self._dials.pop(peer, None)
        if not dial.cancelled():
            dial.exception()  # callers that still wait get it; perhaps none does

    async def _open(self, peer: PeerId) -> Connection:
        """Opens a stream to `peer` and returns the connection after the HELLOs, or one that the peer opened meanwhile.

        Breaks the connection off if the HELLOs fail. Raises as `dial` does.
        """
        try:
            async with asyncio.timeout(self._dial_s):
                opened = await self._open_stream_or_meet(peer)
        except TimeoutError:
            raise ConnectionBroken(f"{peer} could not be reached within {self._dial_s:.0f} s") from None
        if isinstance(opened, Connection):
            return opened
        connection = self._add(opened[0], peer, opened[1])
        with contextlib.ExitStack() as undo:
            undo.callback(connection.break_off, "the handshake failed")
            await connection.start()
            undo.pop_all()
        return connection

    async def _open_stream_or_meet(self, peer: PeerId) -> tuple[FrameStream, str] | Connection:
        """Returns a new stream to `peer` and its path; when dials have crossed, the connection that the peer opened.

        After crossed dials it waits a random time for the peer's stream, shorter at the lower peer id, and then dials
        again. It has no time limit of its own: the caller sets one.
        """
        while True:
            try:
                return await self._open_stream(peer)
            except DialsCrossed:  # the lower peer id dials again first
                turn_s = TURN_S * (random.random() * 0.5 + (self._host.peer > peer))
            peer_connected = self._awaited[peer] = asyncio.Event()
            try:
                if self._connection_to(peer) is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(peer_connected.wait(), DIAL_AGAIN_S + turn_s)
            finally:
                del self._awaited[peer]
            if met := self._connection_to(peer):
                return met

    async def _open_stream(self, peer: PeerId) -> tuple[FrameStream, str]:
        """Opens a stream to `peer`, dialling its known addresses first. Returns it and its path, see Host.

        Raises ConnectionBroken, with the reasons, when the peer cannot be reached.
        """
        # p2pd cannot find by itself a peer that it never met ("routing: not found"): known addresses first.
        addresses = self._book.addresses(peer)
        tried = ""
        if addresses:
            try:
                await reach_by_any_way(self._host, peer, addresses, self._ways.punch_hole, self._dial_s)
            except ConnectionBroken as error:
                tried = f" ({error})"
        try:
            return await self._host.open_stream(peer, PROTOCOL_NAME, self._frame_limits, self._dial_s)
        except ConnectionBroken as error:
            raise ConnectionBroken(f"{peer} could not be reached: {error}{tried}") from error
