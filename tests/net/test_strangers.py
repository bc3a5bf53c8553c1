"""What a stranger gets out of the libp2p process itself, below everything that the daemon decides: no other peer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from agora.core.calls import ConnectionBroken
from agora.net.p2pd.host import Host
from tests.net.helpers import make_host, run

KADEMLIA = "/ipfs/kad/1.0.0"


async def finds(stranger: Any, asked: list[str], wanted: PeerId) -> bool:
    """Whether a full libp2p node, connected to one peer only, can connect to another by its id alone."""
    try:
        await stranger._client.connect(PeerID.from_base58(asked[0].rpartition("/")[2]), [parsed(asked[0])])
        await stranger._client.connect(PeerID.from_base58(wanted), [])
    except ControlFailure:
        return False
    return True


def parsed(address: str) -> Multiaddr:
    """A multiaddr as hivemind's client takes it, without /p2p/PEER."""
    return Multiaddr(address.rpartition("/p2p/")[0])


def test_a_stranger_that_asks_by_raw_libp2p_learns_of_no_other_peer(tmp_path: Path) -> None:
    """Its own p2pd has Kademlia in client mode. The same question to a p2pd with Kademlia is answered."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            member, neighbour = [(await make_host(tmp_path, name))[0] for name in ("member", "neighbour")]
            for host in (member, neighbour):
                stack.push_async_callback(host.close)
            await member.connect(await neighbour.addresses())
            talkative, stranger, second = [
                await P2P.create(dht_mode=mode, use_relay=False, auto_nat=False, nat_port_map=False)
                for mode in ("server", "client", "client")
            ]
            for p2p in (talkative, stranger, second):
                stack.push_async_callback(p2p.shutdown)
            await talkative._client.connect(neighbour.p2p.peer_id, [parsed(a) for a in await neighbour.addresses()])
            address = f"{(await talkative.get_visible_maddrs())[0]}"
            while not await finds(second, [address], neighbour.peer):
                await asyncio.sleep(0.1)  # Kademlia answers once it knows the asker's protocols
            assert not await finds(stranger, list(await member.addresses()), neighbour.peer)
            assert await member.connected_peers() >= {neighbour.peer, PeerId(str(stranger.peer_id))}

    run(main, timeout_s=60.0)


def test_a_host_speaks_no_kademlia_and_dials_nobody_whose_address_it_was_not_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            hosts: list[Host] = []
            for name in ("a", "b", "c"):
                hosts.append((await make_host(tmp_path, name))[0])
                stack.push_async_callback(hosts[-1].close)
            a, b, c = hosts
            await a.connect(await b.addresses())
            await c.connect(await b.addresses())
            with pytest.raises(ConnectionBroken, match="protocols not supported"):
                await c.open_raw(b.peer, KADEMLIA, 3.0)
            with pytest.raises(ConnectionBroken, match="no addresses"):
                await c.reach(a.peer, [], 3.0)
            with pytest.raises(ConnectionBroken, match="no addresses"):
                await c.reach(Identity.generate().peer, [], 3.0)

    run(main, timeout_s=60.0)
