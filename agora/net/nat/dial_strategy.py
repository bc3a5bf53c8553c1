"""Connects p2pd to a peer in the first way that works: directly, through a punched hole, through a relay.

| way | tried when | for at most |
|---|---|---|
| directly | the peer has direct addresses | DIRECT_S, or all of the time when there is no other way |
| through a hole | it has addresses at relays, and one of these relays introduces the two | what is left, less RELAY_S |
| through a relay | it has addresses at relays | what is left: RELAY_S at least |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId

from agora.core.clock import loop_time
from agora.net.nat.own_addresses import is_circuit
from agora.net.p2pd.host import Host
from agora.net.rpc.network_errors import ConnectionBroken

DIRECT_S: Final = 3.0  # seconds for a direct dial when there are other ways
RELAY_S: Final = 3.0  # seconds that are kept for the way through a relay

# Connects p2pd to the first peer through a punched hole; the second is the relay that introduces the two.
#
# Raises an AgoraError when that fails.
PunchHole = Callable[[PeerId, PeerId], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DialStrategy:
    """The ways in which peers may be reached; by default at all addresses, and through no holes.

    may_dial: returns whether an address that a peer announces may be dialled. punch_hole: None to punch no holes.
    """

    may_dial: Callable[[str], bool] = lambda _address: True
    punch_hole: PunchHole | None = None


def relays_of(addresses: Sequence[str]) -> dict[PeerId, list[str]]:
    """Returns the relays that `addresses` go through: peer id -> the relay's own addresses, each with /p2p/RELAY.

    Addresses that go through no relay, or do not name it, are ignored.
    """
    relays: dict[PeerId, list[str]] = {}
    for address in filter(is_circuit, addresses):
        own = address.partition("/p2p-circuit")[0]
        if "/p2p/" in own:
            relays.setdefault(PeerId(own.rpartition("/")[2]), []).append(own)
    return relays


async def reach_by_any_way(
    host: Host, peer: PeerId, addresses: Sequence[str], punch_hole: PunchHole | None, timeout_s: float
) -> None:
    """Has p2pd connect to `peer` unless it is connected: directly, else through a hole, else through a relay.

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
            await host.reach(peer, direct, DIRECT_S)
            return
        except ConnectionBroken as error:
            tried = f"; directly: {error}"
    if punch_hole is not None:
        for relay in relays_of(circuits):
            try:
                async with asyncio.timeout_at(until - RELAY_S):
                    await punch_hole(peer, relay)
                return
            except (AgoraError, TimeoutError) as error:
                tried += f"; through a hole: {str(error) or 'too late'}"
    try:
        await host.reach(peer, circuits, max(RELAY_S / 2, until - loop_time()))
    except ConnectionBroken as error:
        raise ConnectionBroken(f"{error}{tried}") from None
