"""Opens connections to other peers: dials each at its known addresses, again after a simultaneous open."""

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

from agora.net.nat.address_book import AddressBook
from agora.net.nat.dial_strategy import DialStrategy, reach_by_any_way, relays_of
from agora.net.p2pd.host import Host
from agora.net.p2pd.streams import FrameStream
from agora.net.rpc.connection import Connection
from agora.net.rpc.network_errors import ConnectionBroken, SimultaneousOpen

DIAL_AGAIN_S: Final = 5.1  # seconds from a simultaneous open to the next dial; p2pd refuses a failed address for 5 s
TURN_S: Final = 0.5  # seconds by which the peer with the higher id dials again later


class Dialler:
    """Opens connections to peers at the addresses that it has learnt.

    Callers that want the same peer share one dial.
    """

    def __init__(
        self,
        host: Host,
        frame_limits: FrameLimits,
        dial_s: float,
        connection_to: Callable[[PeerId], Connection | None],
        add: Callable[[FrameStream, PeerId, str], Connection],
    ) -> None:
        """dial_s: seconds within which a peer must be reached. connection_to: returns a usable connection, or None.

        add: called with a new stream, the peer at its other end and the path to that peer; registers a Connection on
        the stream, and returns it.
        """
        self._host = host
        self._frame_limits = frame_limits
        self._dial_s = dial_s
        self._connection_to = connection_to
        self._add = add
        self._ways = DialStrategy()
        self._book = AddressBook()
        self._dials: dict[PeerId, asyncio.Task[Connection]] = {}
        self._awaited_peers: dict[PeerId, asyncio.Event] = {}
        self._is_closing = False

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Replaces the known multiaddrs of `peer` with those given that end in its id; does nothing if none does."""
        self._book.learn(peer, addresses)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Returns the known multiaddrs at which `peer` would be dialled, ending in its id; empty if none are known."""
        return self._book.addresses(peer)

    def set_ways_to_reach(self, ways: DialStrategy) -> None:
        """Sets how later dials reach peers. Until it is called, all addresses are dialled, and no holes punched."""
        self._ways = ways

    def learn_announced(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Replaces the known addresses of `peer` with those that it announces and DialStrategy.may_dial allows.

        Keeps the known ones if none is allowed. Where an allowed address goes through a relay of which no address is
        known, learns the relay's own address from it.
        """
        usable = [address for address in addresses if self._ways.may_dial(address)]
        self.learn(peer, usable)
        for relay, its_addresses in relays_of(usable).items():
            if not self._book.addresses(relay):
                self.learn(relay, its_addresses)

    def on_peer_connected(self, peer: PeerId) -> None:
        """Wakes the dial that waits, after a simultaneous open, for `peer` to connect; does nothing if none waits."""
        if peer in self._awaited_peers:
            self._awaited_peers[peer].set()

    def stop(self) -> list[asyncio.Task[Connection]]:
        """Refuses new dials from now on; returns the tasks of those under way, which the caller cancels."""
        self._is_closing = True
        return list(self._dials.values())

    async def dial(self, peer: PeerId) -> Connection:
        """Opens a connection to `peer`, even if there is one, or awaits the dial that another caller has begun.

        The dial goes on when this caller is cancelled. Raises ConnectionBroken when the peer is not reached within
        `dial_s`, when it is this peer itself, when its HELLO is late or malformed, and after `stop`. Raises
        NotAdmitted, WrongRun or another AgoraError when either side refuses the other at HELLO.
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
        # Called when a dial has ended: forgets it, so that the next caller of `dial` starts a new one.
        self._dials.pop(peer, None)
        if not dial.cancelled():
            dial.exception()  # callers that still wait get the error; perhaps none does

    async def _open(self, peer: PeerId) -> Connection:
        try:
            async with asyncio.timeout(self._dial_s):
                reached = await self._open_stream_or_await_peer(peer)
        except TimeoutError:
            raise ConnectionBroken(f"{peer} could not be reached within {self._dial_s:.0f} s") from None
        if isinstance(reached, Connection):
            return reached
        stream, path = reached
        connection = self._add(stream, peer, path)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.abort, "the handshake failed")
            await connection.start()
            undo.pop_all()
        return connection

    async def _open_stream_or_await_peer(self, peer: PeerId) -> tuple[FrameStream, str] | Connection:
        while True:
            try:
                return await self._open_stream(peer)
            except SimultaneousOpen:  # the lower peer id dials again first
                turn_s = TURN_S * (random.random() * 0.5 + (self._host.peer > peer))
            peer_connected = self._awaited_peers[peer] = asyncio.Event()
            try:
                if self._connection_to(peer) is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(peer_connected.wait(), DIAL_AGAIN_S + turn_s)
            finally:
                del self._awaited_peers[peer]
            if connection := self._connection_to(peer):
                return connection

    async def _open_stream(self, peer: PeerId) -> tuple[FrameStream, str]:
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
