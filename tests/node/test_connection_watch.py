"""That a killed peer is noticed at once by those who were connected to it, and a peer that lives never."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from agora_protocol.ids import PeerId, Span

from agora.net.p2pd.host import Host
from agora.net.rpc.dialling import AddressBook
from agora.node.peer.local_peer import watch_connections
from agora.swarm.lost_peers import LostPeers
from agora.swarm.view import PeerView, View
from tests.net.helpers import make_host, run


class Noting(LostPeers):
    """Says when it was told that so many peers are connected."""

    def __init__(self, connected: int) -> None:
        super().__init__()
        self.wanted = connected
        self.looked = asyncio.Event()

    def update_connected(self, now: float, connected: Collection[PeerId], view: View) -> list[PeerView]:
        due = super().update_connected(now, connected, view)
        if len(connected) == self.wanted:
            self.looked.set()
        return due


async def seen(host: Host) -> PeerView:
    return PeerView(host.peer, Span(0, 0), 1, await host.addresses(), "serving")


def test_a_peer_whose_process_ended_is_lost_and_one_that_only_hung_up_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        watcher, hangs_up, killed, stays = [
            (await make_host(tmp_path, name))[0] for name in ("watcher", "hangs up", "killed", "stays")
        ]
        others = (hangs_up, killed, stays)
        peers = [await seen(host) for host in others]
        view, lost, noticed = View({peer.peer: peer for peer in peers}), Noting(connected=3), asyncio.Event()
        await watcher.connect([address for peer in peers for address in peer.addresses])
        assert await watcher.connected_peers() == frozenset(host.peer for host in others)
        book = AddressBook()
        for peer in peers:
            book.learn_announced(peer.peer, peer.addresses)
        watching = asyncio.create_task(watch_connections(watcher, book, lambda: view, lost, noticed.set))
        try:
            await lost.looked.wait()
            await hangs_up.p2p._client.disconnect(watcher.p2p.peer_id)
            killed.p2p._child.kill()
            await noticed.wait()
            assert lost.is_lost(peers[1])
            assert not lost.is_lost(peers[0]) and not lost.is_lost(peers[2])
        finally:
            watching.cancel()
            for host in (watcher, *others):
                await host.close()

    run(main)
