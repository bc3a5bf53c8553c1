"""Opens connections to other peers: directly, else through a punched hole, else through a relay.

| way | tried when | for at most |
|---|---|---|
| directly | the peer has direct addresses | DIRECT_DIAL_TIMEOUT_S, or all of the time when there is no other way |
| hole punching | it has addresses at relays, one of which introduces the two | what is left, less RELAY_RESERVE_S |
| through a relay | it has addresses at relays | what is left, at least half of RELAY_RESERVE_S |
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from agora_protocol.addresses import address_problem, peer_of_address
from agora_protocol.errors import AgoraError
from agora_protocol.frames import FrameLimits
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES, PROTOCOL_NAME

from agora.core.calls import ConnectionBroken
from agora.core.clock import loop_time
from agora.net.p2pd.addresses import is_circuit, is_named, relays_of, resolve_name
from agora.net.p2pd.frame_stream import FrameStream
from agora.net.p2pd.host import Host, SimultaneousOpen
from agora.net.rpc.connection import Connection

MAX_PEERS: Final = 16_384  # maximum number of peers whose addresses are remembered


DIRECT_DIAL_TIMEOUT_S: Final = 3.0  # seconds for a direct dial when there are other ways
RELAY_RESERVE_S: Final = 3.0  # seconds that are kept for the way through a relay
REDIAL_DELAY_S: Final = 5.1  # seconds from a simultaneous open to the next dial; p2pd refuses a failed address for 5 s
HIGHER_ID_DELAY_S: Final = 0.5  # seconds by which the peer with the higher id dials again later

# Connects p2pd to the first peer through a punched hole; the second is the relay that introduces the two.
# Raises an AgoraError when that fails.
PunchHole = Callable[[PeerId, PeerId], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DialStrategy:
    """The ways in which peers may be reached; by default at all addresses, without hole punching.

    may_dial: returns whether an address that a peer announces may be dialled. punch_hole: None for no hole punching.
    """

    may_dial: Callable[[str], bool] = lambda _address: True
    punch_hole: PunchHole | None = None


class AddressBook:
    """The last known addresses of up to MAX_PEERS peers; when full, it forgets the peer updated longest ago."""

    def __init__(self, may_dial: Callable[[str], bool] = lambda _address: True) -> None:
        """may_dial: returns whether an address that a peer announces may be dialled."""
        self._may_dial = may_dial
        self._vouched_names: set[str] = set()  # addresses with host names that came from an invite or the owner
        self._known: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Replaces the addresses of `peer` with the first MAX_ADDRESSES given that are well-formed and end in its id.

        Keeps the known addresses if no given address qualifies. The given ones come from an invite or from the owner,
        so they are dialled wherever they lead.
        """
        addresses = tuple(addresses)
        self._vouched_names.update(filter(is_named, addresses))
        self._remember(peer, addresses)

    def _remember(self, peer: PeerId, addresses: Iterable[str]) -> None:
        usable = [known for known in addresses if address_problem(known) is None and peer_of_address(known) == peer]
        if usable:
            self._known[peer] = tuple(usable[:MAX_ADDRESSES])
            self._known.move_to_end(peer)
            if len(self._known) > MAX_PEERS:
                self._known.popitem(last=False)

    def learn_announced(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Learns those addresses that `peer` announces which may be dialled.

        If one goes through a relay of which no address is known, learns the relay's own address from it.
        """
        usable = [address for address in addresses if self._may_dial(address)]
        self._remember(peer, usable)
        for relay, its_addresses in relays_of(usable).items():
            if not self.addresses(relay):
                self._remember(relay, its_addresses)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Returns the peer's remembered multiaddrs, each ending in /p2p/ and its id; empty if none are known."""
        return self._known.get(peer, ())

    async def dialable(self, peer: PeerId) -> list[str]:
        """Returns the peer's addresses as `resolve` does."""
        return await self.resolve(self.addresses(peer))

    async def resolve(self, addresses: Iterable[str]) -> list[str]:
        """Returns `addresses` with announced host names resolved, as far as those lead where may_dial says.

        A peer can let its host name point to any address, for example one of a LAN. So p2pd gets the resolved address
        that was checked, not the name.
        """
        resolved: list[str] = []
        for address in addresses:
            if self.is_unchecked(address):
                resolved += filter(self._may_dial, await resolve_name(address))
            else:
                resolved.append(address)
        return resolved

    def is_unchecked(self, address: str) -> bool:
        """Returns whether an address has a host name that only a peer has announced, which has to be resolved first."""
        return is_named(address) and address not in self._vouched_names


async def reach_by_any_way(
    host: Host, peer: PeerId, addresses: Sequence[str], punch_hole: PunchHole | None, timeout_s: float
) -> None:
    """Has p2pd connect to `peer` unless it is connected: directly, else by hole punching, else through a relay.

    Each way is tried only if the ways before failed, and if `addresses` and `punch_hole` allow it, for the time that
    the module's table gives it. Raises ConnectionBroken, with the reason for each way; SimultaneousOpen
    immediately, if both peers dialled each other at the same time.
    """
    direct = [address for address in addresses if not is_circuit(address)]
    circuits = [address for address in addresses if is_circuit(address)]
    if not circuits:
        await host.reach(peer, direct, timeout_s)
        return
    until = loop_time() + timeout_s
    tried = ""
    if await host.is_connected(peer):
        return
    if direct:
        try:
            await host.reach(peer, direct, DIRECT_DIAL_TIMEOUT_S)
            return
        except ConnectionBroken as error:
            tried = f"; directly: {error}"
    if punch_hole is not None:
        for relay in relays_of(circuits):
            try:
                async with asyncio.timeout_at(until - RELAY_RESERVE_S):
                    await punch_hole(peer, relay)
                return
            except (AgoraError, TimeoutError) as error:
                tried += f"; through a hole: {str(error) or 'too late'}"
    try:
        await host.reach(peer, circuits, max(RELAY_RESERVE_S / 2, until - loop_time()))
    except ConnectionBroken as error:
        raise ConnectionBroken(f"{error}{tried}") from None


class Dialler:
    """Opens connections to peers at the addresses in `book`.

    Callers that want the same peer share one dial.
    """

    def __init__(
        self,
        host: Host,
        frame_limits: FrameLimits,
        dial_s: float,
        book: AddressBook,
        punch_hole: PunchHole | None,
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
        self._book = book
        self._punch_hole = punch_hole
        self._dials: dict[PeerId, asyncio.Task[Connection]] = {}
        self._awaited_peers: dict[PeerId, asyncio.Event] = {}
        self._is_closing = False

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
        while True:  # until `dial_s` is over
            try:
                return await self._open_stream(peer)
            except SimultaneousOpen:  # both dials failed; the lower peer id dials again first
                turn_s = HIGHER_ID_DELAY_S * (random.random() * 0.5 + (self._host.peer > peer))
            peer_connected = self._awaited_peers[peer] = asyncio.Event()
            try:
                if self._connection_to(peer) is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(peer_connected.wait(), REDIAL_DELAY_S + turn_s)
            finally:
                del self._awaited_peers[peer]
            if connection := self._connection_to(peer):
                return connection

    async def _open_stream(self, peer: PeerId) -> tuple[FrameStream, str]:
        # p2pd does not find a peer that it never met ("routing: not found"), so it gets the known addresses first.
        addresses = await self._book.dialable(peer)
        tried = ""
        if addresses:
            try:
                await reach_by_any_way(self._host, peer, addresses, self._punch_hole, self._dial_s)
            except ConnectionBroken as error:
                tried = f" ({error})"
        try:
            return await self._host.open_stream(peer, PROTOCOL_NAME, self._frame_limits, self._dial_s)
        except ConnectionBroken as error:
            raise ConnectionBroken(f"{peer} could not be reached: {error}{tried}") from error
