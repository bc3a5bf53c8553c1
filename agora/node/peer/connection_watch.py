"""A task of the local peer: notices within seconds that a peer was killed.

By its broken connection and a failed dial.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from agora_protocol.errors import AgoraError

from agora.core.clock import loop_time
from agora.net.p2pd.host import Host
from agora.net.rpc.network_errors import ConnectionBroken
from agora.swarm.lost_peers import LostPeers
from agora.swarm.view import PeerView, View

POLL_S: Final = 1.0  # seconds between two checks of which peers are connected
DIAL_S: Final = 4.0  # seconds after which a dial counts as failed


async def watch_connections(
    host: Host, view_of: Callable[[], View], lost: LostPeers, on_lost: Callable[[], None]
) -> None:
    """Every POLL_S, until cancelled, dials peers of the view whose connection broke; records failed dials in `lost`.

    Dials several peers concurrently. lost: decides which peers to dial, and whether a failed dial makes a peer count as
    lost. on_lost: called for each peer that then counts as lost.
    """
    while True:
        await asyncio.sleep(POLL_S)
        with contextlib.suppress(ConnectionBroken):  # p2pd is gone: the lifecycle notices that
            connected = await host.connected_peers()
            due = lost.update_connected(loop_time(), connected, view_of())
            failed = await asyncio.gather(*(_is_unreachable(host, peer) for peer in due))
            for peer in (peer for peer, has_failed in zip(due, failed, strict=True) if has_failed):
                if lost.record_failed_dial(loop_time(), peer.peer, peer.incarnation):
                    on_lost()


async def _is_unreachable(host: Host, peer: PeerView) -> bool:
    try:
        await host.reach(peer.peer, peer.addresses, DIAL_S)
    except AgoraError as error:
        return isinstance(error, ConnectionBroken)
    return False
