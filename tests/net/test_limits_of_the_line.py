"""Claims about the owner's limits on the line: rates as texts, the share of streams, what sockets really carry."""

from __future__ import annotations

import math
import os
import random
import socket
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from agora_protocol.errors import InputError

from agora.core.clock import loop_time
from agora.net.nat import relay
from agora.net.shaping.bandwidth import MIN_SHARE, RateLimits, Throttle, parse_rate
from agora.net.shaping.bandwidth_limiter import SocketCounter
from agora.net.shaping.link import LinkSpec
from agora.net.shaping.shaped_transport import AccessLink
from tests.net.helpers import after, boundary, echo, make_host, make_peer, peers, process, run


@pytest.mark.parametrize(
    ("text", "rate"),
    [("", math.inf), ("1MB/s", 1e6), ("500kB", 5e5), ("8Mbit", 1e6), ("8Mbit/s", 1e6), ("2.5 GB/s", 2.5e9)],
)
def test_a_rate_is_bytes_or_bits_a_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["1", "fast", "1mb", "-1MB/s", "9kB/s", "1MB/h", "1e9MB", "0MB"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"1MB/s|10kB/s"):
        parse_rate(text)


def carried_in(seconds: float, limit: float, other: float, *, overhead: float = 1.03, dt: float = 0.25) -> float:
    """Bytes per second on the line when streams take all that they may, beside `other` that nobody can slow down."""
    throttle, rng, carried, streamed, now = Throttle(limit), random.Random(1), 0.0, 0.0, 0.0
    begun = 0.0
    while now < seconds:
        rate = throttle.update(now, int(carried), int(streamed))
        streamed += rate * dt
        carried += rate * dt * overhead + other * dt * rng.uniform(0.0, 2.0)
        now += dt
        begun = carried if now <= seconds / 4 else begun
    return (carried - begun) / (0.75 * seconds)


@pytest.mark.parametrize("limit", [50_000.0, 1e6, 12.5e6])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.7])
def test_streams_and_all_else_together_keep_within_a_tenth_of_the_limit(limit: float, share: float) -> None:
    assert carried_in(60.0, limit, share * limit) == pytest.approx(limit, rel=0.1)


def test_streams_keep_a_tenth_where_something_else_fills_the_line() -> None:
    throttle = Throttle(1e6)
    for step in range(100):
        throttle.update(step * 0.25, step * 500_000, 0)
    assert throttle.rate == MIN_SHARE * 1e6


def test_where_nobody_can_count_streams_get_nine_tenths() -> None:
    assert Throttle(1e6).update(1.0, None, 5) == 9e5
    assert Throttle(math.inf).update(1.0, None, 5) == math.inf


def test_a_limit_holds_beside_an_emulated_link_and_through_a_change_of_its_rate() -> None:
    link = AccessLink(LinkSpec.parse("80Mbit,10ms"), random.Random(0), lambda: 0.0)
    link.limit_rates(1e6, math.inf)
    assert (link.up.rate, link.down.rate) == (1e6, 1e7)
    link.change_rate("4Mbit")
    assert (link.up.rate, link.down.rate) == (5e5, 5e5)
    link.change_rate("80Mbit")
    assert (link.up.rate, link.down.rate) == (1e6, 1e7)
    assert RateLimits(1e6).is_limited and not RateLimits().is_limited


def read_all(end: socket.socket) -> None:
    """Until the other side has stopped sending."""
    while end.recv(1 << 16):
        pass


def test_the_kernels_count_of_a_process_holds_every_byte_once_closed_sockets_included() -> None:
    size, counter = 3_000_000, SocketCounter(os.getpid())
    before = counter.read()
    if before is None:
        pytest.skip("this kernel does not tell (sock_diag)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(2):
            with socket.create_connection(server.getsockname()) as sender:
                receiver, _ = server.accept()
                reading = threading.Thread(target=read_all, args=[receiver])
                reading.start()
                sender.sendall(bytes(size))
                sender.shutdown(socket.SHUT_WR)
                reading.join(10)
                after = counter.read()
                receiver.close()
    assert after is not None
    assert 2 * size <= after.sent - before.sent < 2.05 * size
    assert 2 * size <= after.received - before.received < 2.05 * size


def test_a_process_that_is_gone_has_no_count() -> None:
    assert SocketCounter(2**22 + 1).read() is None


def test_two_peers_that_send_as_fast_as_they_may_keep_to_their_limit() -> None:
    """1 MB there and back at 1 MB/s, and the bytes that the kernel saw of either p2pd meanwhile."""
    size, limit = 1_000_000, 1e6

    async def scenario() -> None:
        async with peers(echo, echo, rates=RateLimits(upload=limit)) as (a, b):
            await a.network.call(b.id, process(a.id), boundary(1000), deadline=after(10))
            began, counters = loop_time(), [SocketCounter(peer.host.p2p._child.pid) for peer in (a, b)]
            first = [counter.read() for counter in counters]
            await a.network.call(b.id, process(a.id), boundary(size), deadline=after(20))
            seconds = loop_time() - began
            assert 2 * size / limit * 0.9 < seconds
            for counter, former in zip(counters, first, strict=True):
                if former is not None:
                    latest = counter.read()
                    assert latest is not None
                    assert 0.95 * size < latest.sent - former.sent < 1.1 * limit * seconds

    run(scenario)


def test_a_peer_reads_no_faster_than_its_owner_allows() -> None:
    size, limit = 1_000_000, 1e6

    async def scenario() -> None:
        async with peers(echo, echo, rates=RateLimits(download=limit)) as (a, b):
            began = loop_time()
            await a.network.call(b.id, process(a.id), boundary(size), deadline=after(20))
            assert 2 * size / limit * 0.85 < loop_time() - began

    run(scenario)


def test_what_a_relay_carries_for_others_keeps_to_its_owners_limit(tmp_path: Path) -> None:
    """1 MB there and back between two peers that have no limit, through one that may send 1 MB/s."""
    size, limit = 1_000_000, 1e6

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            one, other = [await make_peer(tmp_path, name, allow_private=False) for name in ("one", "other")]
            stack.push_async_callback(one.close)
            stack.push_async_callback(other.close)
            middle, _ = await make_host(tmp_path, "middle", limits=RateLimits(upload=limit))
            stack.push_async_callback(middle.close)
            service = relay.RelayService(middle, 1, lambda peer: True)
            await service.start()
            addresses = await middle.addresses()
            await other.host.reach(middle.peer, addresses, 5.0)
            await relay.reserve(other.host, middle.peer)
            one.network.address_book.learn(other.id, [f"{address}/p2p-circuit/p2p/{other.id}" for address in addresses])
            await one.network.call(other.id, process(one.id), boundary(1000), deadline=after(20))
            began, counter = loop_time(), SocketCounter(middle.p2p._child.pid)
            former = counter.read()
            await one.network.call(other.id, process(one.id), boundary(size), deadline=after(20))
            seconds, latest = loop_time() - began, counter.read()
            assert one.network.paths == {other.id: "relayed"}
            assert service.carried_bytes > 2 * size
            assert 2 * size / limit * 0.9 < seconds
            if former is not None:
                assert latest is not None and 1.9 * size < latest.sent - former.sent < 1.15 * limit * seconds

    run(scenario)
