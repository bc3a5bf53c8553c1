"""Real hosts on loopback that meet directly, through a relay and through a hole."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId

from agora.core.calls import ConnectionBroken
from agora.net.nat import relay
from agora.net.nat.circuit_wire import HOP_PROTOCOL, CircuitMessage, HopType, Status, decode_hop, encode_hop
from agora.net.nat.hole_punching import HolePuncher
from agora.net.nat.relay import RelayService
from agora.net.p2pd.addresses import relays_of
from agora.net.p2pd.host import Host
from agora.net.rpc.dialling import DialStrategy
from tests.net.helpers import MEGABYTE, Peer, after, boundary, make_host, make_peer, peers, process, run, until


async def call(one: Peer, other: Peer) -> None:
    """Sends a megabyte from one to the other and back."""
    sent = boundary(MEGABYTE)
    reply = await one.network.call(other.id, process(one.id), sent, deadline=after(20.0))
    assert bytes(reply.tensors[0].data) == bytes(sent[0].data)


async def ask(host: Host, relay_peer: PeerId, message: CircuitMessage) -> int:
    """Returns the status with which a relay answers a message."""
    stream = await host.open_raw(relay_peer, HOP_PROTOCOL, 5.0)
    await stream.write(encode_hop(message))
    answer = decode_hop(await stream.read_message(4096))
    stream.abort()
    return answer.status


async def start_relay(
    stack: AsyncExitStack, folder: Path, name: str, admitted: set[PeerId]
) -> tuple[Host, RelayService]:
    """Starts a host that relays for one peer."""
    host, _ = await make_host(folder, name)
    stack.push_async_callback(host.close)
    service = RelayService(host, 1, lambda peer: peer in admitted)
    await service.start()
    return host, service


def test_when_a_relay_dies_peers_call_each_other_through_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, other = [await make_peer(tmp_path, name, allow_private=False) for name in ("one", "other")]
            stack.push_async_callback(one.close)
            stack.push_async_callback(other.close)
            circuits = []
            relays = [await start_relay(stack, tmp_path, name, {one.id, other.id}) for name in ("r", "s")]
            for host, _ in relays:
                addresses = await host.addresses()
                await other.host.reach(host.peer, addresses, 5.0)
                await relay.reserve(other.host, host.peer)
                circuits += [f"{address}/p2p-circuit/p2p/{other.id}" for address in addresses]
            one.network.address_book.learn(other.id, circuits)
            await call(one, other)
            assert one.network.paths == {other.id: "relayed"}
            assert other.network.paths == {one.id: "relayed"}
            (dies, carrying), (_, spare) = sorted(relays, key=lambda pair: -pair[1].carried_bytes)
            assert carrying.carried_bytes > 2 * MEGABYTE
            assert spare.carried_bytes == 0
            await dies.close()
            await until(lambda: not one.network.paths)
            await call(one, other)
            assert one.network.paths == {other.id: "relayed"}
            assert spare.carried_bytes > 2 * MEGABYTE

    run(main, timeout_s=60.0)


def test_a_relay_serves_those_that_are_admitted_and_as_many_as_its_owner_says(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            hosts = [(await make_host(tmp_path, name))[0] for name in ("one", "two")]
            for host in hosts:
                stack.push_async_callback(host.close)
            one, two = hosts
            admitted = {two.peer}
            relaying, service = await start_relay(stack, tmp_path, "relay", admitted)
            at = relaying.peer
            for host in hosts:
                await host.reach(at, await relaying.addresses(), 5.0)
            to_two = CircuitMessage(HopType.CONNECT, peer=two.peer)
            with pytest.raises(ConnectionBroken, match=str(int(Status.PERMISSION_DENIED))):
                await relay.reserve(one, at)
            assert await ask(one, at, to_two) == Status.PERMISSION_DENIED
            admitted.add(one.peer)
            assert await ask(one, at, to_two) == Status.NO_RESERVATION
            await relay.reserve(two, at)
            await relay.reserve(two, at)
            with pytest.raises(ConnectionBroken, match=str(int(Status.RESERVATION_REFUSED))):
                await relay.reserve(one, at)
            assert service.reserving_peers() == [two.peer]
            assert await ask(one, at, CircuitMessage(HopType.STATUS)) == Status.MALFORMED_MESSAGE
            assert await ask(one, at, to_two) == Status.OK

    run(main, timeout_s=60.0)


def test_a_call_goes_through_a_hole_where_there_is_one_and_both_ends_know(tmp_path: Path) -> None:
    async def main() -> None:
        asked = []

        async def punch_hole(peer: PeerId, relay_peer: PeerId) -> None:
            asked.append((peer, relay_peer))
            await holes.connect(peer, other.addresses[0].partition("/p2p/")[0])

        async with peers(*2 * [_unused], dial_strategy=DialStrategy(punch_hole=punch_hole)) as (one, other):
            holes = HolePuncher(one.host)
            circuit = f"/ip4/127.0.0.1/tcp/9/p2p/{one.id}/p2p-circuit/p2p/{other.id}"
            one.network.address_book.learn(other.id, [circuit])
            try:
                await one.network.connect(other.id)
                assert one.network.paths == {other.id: "punched"}
                assert asked == [(other.id, one.id)]
                assert set(relays_of([circuit])) == {one.id}
            finally:
                await holes.close()
            await until(lambda: not one.network.paths)

    run(main)


def test_a_hole_whose_other_end_cannot_be_had_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        async with peers(*2 * [_unused]) as (one, other):
            holes = HolePuncher(one.host)
            sockets = len(os.listdir("/proc/self/fd"))
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "start_server", refuse)
                with pytest.raises(ConnectionBroken, match="Too many open files"):
                    await holes.connect(other.id, other.addresses[0].partition("/p2p/")[0])
            assert holes.has_room()
            assert not one.host.tunnel_ports
            await until(lambda: len(os.listdir("/proc/self/fd")) <= sockets)

    run(main)


def test_without_an_open_hole_or_a_relay_there_is_an_error_that_says_what_was_tried(tmp_path: Path) -> None:
    async def main() -> None:
        async def punch_hole(_peer: PeerId, _relay: PeerId) -> None:
            raise ConnectionBroken("no hole today")

        async with peers(_unused, dial_strategy=DialStrategy(punch_hole=punch_hole)) as (one,):
            gone = "12D3KooWJh8qcyGgNZcyHmiyKVcAPggbd4AoSmPxExqV161dWcct"
            one.network.address_book.learn(PeerId(gone), [f"/ip4/127.0.0.1/tcp/9/p2p/{one.id}/p2p-circuit/p2p/{gone}"])
            with pytest.raises(AgoraError, match="no hole today"):
                await one.network.connect(PeerId(gone))

    run(main)


def test_what_may_not_be_dialled_is_not_learnt_from_those_who_announce_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            may_dial = DialStrategy(may_dial=lambda address: "/127." not in address)
            one, other = await make_peer(tmp_path, "one", dial_strategy=may_dial), await make_peer(tmp_path, "other")
            stack.push_async_callback(one.close)
            stack.push_async_callback(other.close)
            one.network.address_book.learn_announced(other.id, other.addresses)
            with pytest.raises(ConnectionBroken):
                await one.network.connect(other.id)
            one.network.address_book.learn(other.id, other.addresses)  # what an invite says is dialled
            await one.network.connect(other.id)

    run(main)


def test_hosts_meet_over_ipv6_and_tell_no_private_addresses_unless_that_is_allowed(tmp_path: Path) -> None:
    async def main() -> None:
        hosts = [
            (await make_host(tmp_path, name, listen=["/ip6/::1/tcp/0"], allow_private=allowed))[0]
            for name, allowed in (("open", True), ("hidden", False))
        ]
        try:
            shown, hidden = hosts
            assert await shown.addresses()
            assert not await hidden.addresses()
            place = f"/ip6/::1/tcp/{hidden.listen_endpoints['ip6'][1]}"
            assert hidden.own_addresses == (place,)
            await shown.reach(hidden.peer, [place], 5.0)
            assert await hidden.is_connected(shown.peer)
        finally:
            for host in hosts:
                await host.close()

    run(main)


async def _unused(_call: object) -> object:
    """Answers no call: none is made."""
    raise AssertionError("nothing is asked")
