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
    decode_stop,
    encode_hop,
    encode_stop,
)
from agora.net.p2pd.multiaddr import decode_multiaddr, encode_multiaddr, read_varint, varint

PEER = Identity.generate().peer
RELAY = Identity.generate().peer
RESERVE = bytes.fromhex("020800")
"""What go-libp2p sends for a reservation at a relay."""
KNOWN = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
KNOWN_BYTES = bytes.fromhex("0024080112202ffa35a99d3a3cfbb17bb7c1dc5561b18a8dcca4df38dc613ea859c37eb1336b")


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.7/tcp/31000",
        "/dns4/my_host/tcp/31000",
        f"/ip6/2001:db8::7/tcp/4001/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit",
        f"/dns4/example.org/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ],
    ids=["direct", "of a container", "with its peer", "of a relay", "through a relay"],
)
def test_an_address_through_a_relay_survives_the_way_to_p2pd_and_back(address: str) -> None:
    assert decode_multiaddr(encode_multiaddr(address)) == address


@pytest.mark.parametrize(
    "address", ["/unix/tmp/x", "/ip4/::1/tcp/1", "/ip4/1.2.3.4/tcp/1x", "/ip4/1.2.3.4/tcp/70000", "/p2p", "/tcp"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError):
        encode_multiaddr(address)


@pytest.mark.parametrize("raw", ["04010203", "29ff", "0601", "35056162", "a5032200"])
def test_addresses_that_are_cut_short_are_refused(raw: str) -> None:
    with pytest.raises(ValueError):
        decode_multiaddr(bytes.fromhex(raw))


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


@pytest.mark.parametrize(
    ("written", "body"),
    [
        (encode_hop(CircuitMessage(HopType.CONNECT, peer=KNOWN)), b"\x08\x01\x12\x28\x0a\x26" + KNOWN_BYTES),
        (encode_hop(CircuitMessage(HopType.STATUS, status=Status.OK)), bytes.fromhex("08022864")),
        (
            encode_hop(CircuitMessage(HopType.STATUS, KNOWN, Status.OK), 1_790_000_000),
            b"\x08\x02\x12\x28\x0a\x26" + KNOWN_BYTES + bytes.fromhex("1a060880f7c4d5062864"),
        ),
        (encode_hop(CircuitMessage(HopType.STATUS, status=Status.NO_RESERVATION)), bytes.fromhex("080228cc01")),
        (encode_stop(CircuitMessage(StopType.CONNECT, peer=KNOWN)), b"\x08\x00\x12\x28\x0a\x26" + KNOWN_BYTES),
        (encode_stop(CircuitMessage(StopType.STATUS, status=Status.MALFORMED_MESSAGE)), bytes.fromhex("0801209003")),
    ],
    ids=["connect", "ok", "reserved", "no reservation", "offer", "malformed"],
)
def test_messages_have_these_bytes(written: bytes, body: bytes) -> None:
    assert written == bytes([len(body)]) + body


@pytest.mark.parametrize(
    "body",
    [
        "",
        "1200",
        "08",
        "0880",
        "08ffffffffffffffffffff01",
        "080012",
        "080012050a",
        "080012020a05",
        "0800150102",
        "0800ff",
    ],
)
def test_malformed_messages_are_refused(body: str) -> None:
    for decode in (decode_hop, decode_stop):
        with pytest.raises(ValueError):
            decode(bytes.fromhex(body))


def test_types_and_states_that_are_not_known_keep_their_numbers() -> None:
    for number in (7, 2**31, 2**32, 2**63):
        _, body = read_varint(encode_hop(CircuitMessage(number, status=number)))
        assert decode_hop(body) == CircuitMessage(number, status=number)


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
