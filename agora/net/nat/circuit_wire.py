"""The bytes of libp2p's circuit relay, version 2, and of multiaddrs with a relay in them. Pure.

Addresses are converted by hand. hivemind's Multiaddr cannot read one that goes through a relay. The `multiaddr`
package can, but it reads an address that is cut short as another address, and refuses host names with a "_", as
containers have them, which p2pd dials.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from agora.net.p2pd.hivemind_shim import PeerID

# The protocol of the streams on which a peer asks a relay for a reservation or a circuit.
HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
# The protocol of the streams on which a relay offers a peer a circuit from another one.
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES: Final = 4096
CIRCUIT: Final = "p2p-circuit"

# The fields that are written or read here; others are skipped. Types and states are enums in libp2p's schema, but
# uint64 here, since a parser drops the numbers that its enum does not name.
_SCHEMA: Final = """
name: "circuit.proto"
message_type { name: "Peer" field { name: "id" number: 1 type: TYPE_BYTES } }
message_type { name: "Reservation" field { name: "expire" number: 1 type: TYPE_UINT64 } }
message_type {
  name: "HopMessage"
  field { name: "type" number: 1 type: TYPE_UINT64 }
  field { name: "peer" number: 2 type: TYPE_MESSAGE type_name: ".Peer" }
  field { name: "reservation" number: 3 type: TYPE_MESSAGE type_name: ".Reservation" }
  field { name: "status" number: 5 type: TYPE_UINT64 }
}
message_type {
  name: "StopMessage"
  field { name: "type" number: 1 type: TYPE_UINT64 }
  field { name: "peer" number: 2 type: TYPE_MESSAGE type_name: ".Peer" }
  field { name: "status" number: 4 type: TYPE_UINT64 }
}
"""
# A pool of its own: all packages share the names in the default one, where hivemind's and py-libp2p's clash already.
_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
_HopMessage: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("HopMessage"))
_StopMessage: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("StopMessage"))

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
    wire = _to_wire(_HopMessage(), message)
    if expires_unix:
        wire.reservation.expire = expires_unix
    return with_length(wire.SerializeToString())


def encode_stop(message: CircuitMessage) -> bytes:
    """Returns a stop message as bytes, with its length before it."""
    return with_length(_to_wire(_StopMessage(), message).SerializeToString())


def decode_hop(body: bytes) -> CircuitMessage:
    """Parses the hop message in `body`, which does not include its length. Raises ValueError for any other bytes."""
    return _decode(_HopMessage(), body)


def decode_stop(body: bytes) -> CircuitMessage:
    """Parses the stop message in `body`, which does not include its length. Raises ValueError for any other bytes."""
    return _decode(_StopMessage(), body)


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


def _to_wire(wire: Any, message: CircuitMessage) -> Any:
    wire.type = message.kind
    if message.peer:
        wire.peer.id = PeerID.from_base58(message.peer).to_bytes()
    if message.status:
        wire.status = message.status
    return wire


def _decode(wire: Any, body: bytes) -> CircuitMessage:
    try:
        wire.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the message is malformed ({error})") from None
    if not wire.HasField("type"):
        raise ValueError("the message has no type")
    raw = wire.peer.id
    return CircuitMessage(wire.type, str(PeerID(raw)) if 0 < len(raw) <= 64 else "", wire.status)
