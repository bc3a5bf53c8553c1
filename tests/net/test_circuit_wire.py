"""Circuit messages and addresses through relays, as bytes: what is written is read, and no bytes do anything else."""

from __future__ import annotations

import random

import pytest
from agora_protocol.identity import Identity

from agora.net.nat.circuit_wire import (
    CircuitMessage,
    HopType,
    Status,
    StopType,
    decode_hop,
    decode_multiaddr,
    decode_stop,
    encode_hop,
    encode_multiaddr,
    encode_stop,
    read_varint,
    varint,
)

PEER = Identity.generate().peer
RELAY = Identity.generate().peer
RESERVE = bytes.fromhex("020800")
"""What go-libp2p sends for a reservation at a relay."""


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.7/tcp/31000",
        f"/ip6/2001:db8::7/tcp/4001/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit",
        f"/dns4/example.org/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ],
    ids=["direct", "with its peer", "of a relay", "through a relay"],
)
def test_an_address_through_a_relay_survives_the_way_to_p2pd_and_back(address: str) -> None:
    assert decode_multiaddr(encode_multiaddr(address)) == address


@pytest.mark.parametrize(
    "address", ["/unix/tmp/x", "/ip4/::1/tcp/1", "/ip4/1.2.3.4/tcp/1x", "/ip4/1.2.3.4/tcp/70000", "/p2p", "/tcp"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError):
        encode_multiaddr(address)


def test_messages_are_those_of_go_libp2p() -> None:
    assert encode_hop(CircuitMessage(HopType.RESERVE)) == RESERVE
    for message in (
        CircuitMessage(HopType.CONNECT, peer=PEER),
        CircuitMessage(HopType.STATUS, status=Status.OK),
        CircuitMessage(HopType.STATUS, status=Status.NO_RESERVATION),
    ):
        _, body = read_varint(encode_hop(message))
        assert decode_hop(body) == message
    for message in (CircuitMessage(StopType.CONNECT, peer=PEER), CircuitMessage(StopType.STATUS, status=Status.OK)):
        _, body = read_varint(encode_stop(message))
        assert decode_stop(body) == message


def test_a_granted_place_says_until_when() -> None:
    _, body = read_varint(encode_hop(CircuitMessage(HopType.STATUS, status=Status.OK), expires_unix=1_790_000_000))
    assert varint(1_790_000_000) in body and decode_hop(body).status == Status.OK


def test_whatever_comes_is_a_message_or_a_value_error() -> None:
    rng = random.Random(1)
    seeds = [
        encode_hop(CircuitMessage(HopType.CONNECT, peer=PEER))[1:],
        encode_stop(CircuitMessage(StopType.STATUS, status=Status.OK))[1:],
        encode_multiaddr(f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit"),
        b"",
    ]
    refused = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(data) + 1)
            data[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
        for read in (decode_hop, decode_stop, decode_multiaddr):
            try:
                read(bytes(data))
            except ValueError:
                refused += 1
    assert refused > 10_000
