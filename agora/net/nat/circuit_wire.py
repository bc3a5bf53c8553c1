"""The messages of libp2p's circuit relay, version 2, by which peers get reservations and circuits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from agora.net.p2pd.hivemind_shim import PeerID
from agora.net.p2pd.multiaddr import with_length

# The protocol of the streams on which a peer asks a relay for a reservation or a circuit.
HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
# The protocol of the streams on which a relay offers a peer a circuit from another one.
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES: Final = 4096

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
