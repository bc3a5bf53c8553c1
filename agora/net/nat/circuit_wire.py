"""The bytes of libp2p's circuit relay, version 2, and of multiaddrs with a relay in them. Pure.

hivemind's own Multiaddr cannot read an address that goes through a relay, so those are converted here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from agora.net.p2pd.hivemind_shim import PeerID

# The protocol of the streams on which a peer asks a relay for a reservation or a circuit.
HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
# The protocol of the streams on which a relay offers a peer a circuit from another one.
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES: Final = 4096
CIRCUIT: Final = "p2p-circuit"

_CODES: Final = {"ip4": 4, "tcp": 6, "ip6": 41, "dns": 53, "dns4": 54, "dns6": 55, "p2p": 421, CIRCUIT: 290}
_NAMES: Final = {code: name for name, code in _CODES.items()}
_FIXED_BYTES: Final = {"ip4": 4, "ip6": 16, "tcp": 2, CIRCUIT: 0}


class HopType(IntEnum):
    """The types of messages on a hop stream, on which a peer asks a relay for a reservation or a circuit."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(IntEnum):
    """The types of messages on a stop stream, on which a relay offers a peer a circuit that another peer asked for."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """The result of a request, in a STATUS message: libp2p's codes."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400


@dataclass(frozen=True, slots=True)
class CircuitMessage:
    """A message of a hop or a stop stream. kind: HopType or StopType. peer: an id's text, "" if none is named.

    status: a Status, 0 if the message has none. Other fields of the protocol are not kept.
    """

    kind: int
    peer: str = ""
    status: int = 0


def encode_hop(message: CircuitMessage, expires_unix: int = 0) -> bytes:
    """Returns a hop message as bytes, with its length before it.

    expires_unix: when the reservation that a relay grants by this message ends; 0 for a message without a reservation.
    """
    reservation = _field(3, _field(1, expires_unix)) if expires_unix else b""
    return with_length(_field(1, message.kind) + _peer_field(message.peer) + reservation + _status(5, message.status))


def encode_stop(message: CircuitMessage) -> bytes:
    """Returns a stop message as bytes, with its length before it."""
    return with_length(_field(1, message.kind) + _peer_field(message.peer) + _status(4, message.status))


def decode_hop(body: bytes) -> CircuitMessage:
    """Parses the hop message in `body`, which does not include its length. Raises ValueError for any other bytes."""
    return _decode(body, 5)


def decode_stop(body: bytes) -> CircuitMessage:
    """Parses the stop message in `body`, which does not include its length. Raises ValueError for any other bytes."""
    return _decode(body, 4)


def encode_multiaddr(text: str) -> bytes:
    """Returns the binary form of a multiaddr; what stands before its first "/" is ignored.

    Raises ValueError for a protocol that is not in _CODES (IP, TCP, DNS, p2p, p2p-circuit), or a malformed value.
    """
    words = iter(text.split("/")[1:])
    encoded = b""
    for name in words:
        if name not in _CODES:
            raise ValueError(f"/{name} is not converted here")
        encoded += varint(_CODES[name])
        if name != CIRCUIT:
            encoded += _value_bytes(name, next(words, ""))
    return encoded


def decode_multiaddr(raw: bytes) -> str:
    """Returns the text of a binary multiaddr; "" for no bytes.

    Raises ValueError for a protocol that is not in _CODES, or malformed bytes.
    """
    rest = raw
    text = ""
    while rest:
        code, rest = read_varint(rest)
        if code not in _NAMES:
            raise ValueError(f"the address has a part of unknown code {code}")
        name = _NAMES[code]
        length = _FIXED_BYTES.get(name)
        if length is None:
            length, rest = read_varint(rest)
        if length > len(rest):
            raise ValueError("the address is cut short")
        value, rest = rest[:length], rest[length:]
        text += f"/{name}" if name == CIRCUIT else f"/{name}/{_value_text(name, value)}"
    return text


def varint(number: int) -> bytes:
    """Returns a number as protobuf's variable-length integer."""
    low = number & 0x7F
    return bytes([low]) if number == low else bytes([low | 0x80]) + varint(number >> 7)


def read_varint(data: bytes) -> tuple[int, bytes]:
    """Returns the variable-length integer with which `data` begins, and the bytes after it.

    Raises ValueError if the integer does not end within 10 bytes.
    """
    number = 0
    for index, byte in enumerate(data[:10]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, data[index + 1 :]
    raise ValueError("a number is cut short")


def _value_bytes(name: str, value: str) -> bytes:
    if name in ("ip4", "ip6"):
        packed = ipaddress.ip_address(value).packed
        if len(packed) != _FIXED_BYTES[name]:
            raise ValueError(f"{value} is not a value of /{name}")
        return packed
    if name == "tcp":
        if not 0 <= int(value) < 65_536:
            raise ValueError(f"{value} is not a TCP port")
        return int(value).to_bytes(2, "big")
    if not value:
        raise ValueError(f"/{name} has no value")
    raw = PeerID.from_base58(value).to_bytes() if name == "p2p" else value.encode()
    return with_length(raw)


def _value_text(name: str, value: bytes) -> str:
    if name in ("ip4", "ip6"):
        return str(ipaddress.ip_address(value))
    if name == "tcp":
        return str(int.from_bytes(value, "big"))
    return str(PeerID(value)) if name == "p2p" else value.decode("ascii")


def with_length(body: bytes) -> bytes:
    """Returns `body` with its length before it, as a varint."""
    return varint(len(body)) + body


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + with_length(value)


def _peer_field(peer: str) -> bytes:
    return _field(2, _field(1, PeerID.from_base58(peer).to_bytes())) if peer else b""


def _status(number: int, status: int) -> bytes:
    return _field(number, status) if status else b""


def _decode(body: bytes, status_field: int) -> CircuitMessage:
    kind, peer, status = -1, "", 0
    for number, value in _fields(body):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == status_field and isinstance(value, int):
            status = value
        elif number == 2 and isinstance(value, bytes):
            ids = [inner for key, inner in _fields(value) if key == 1 and isinstance(inner, bytes)]
            peer = str(PeerID(ids[0])) if ids and len(ids[0]) <= 64 else ""
    if kind < 0:
        raise ValueError("the message has no type")
    return CircuitMessage(kind, peer, status)


def _fields(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    value: int | bytes
    while body:
        key, body = read_varint(body)
        if key & 7 == 0:
            value, body = read_varint(body)
        elif key & 7 == 2:
            length, body = read_varint(body)
            if length > len(body):
                raise ValueError("a field is cut short")
            value, body = body[:length], body[length:]
        else:
            raise ValueError("a field is of a kind that no circuit message has")
        yield key >> 3, value
