"""Encodes and decodes frames: a prefix of 16 bytes, a msgpack header, raw tensors.

A reader takes 16 bytes and calls Prefix.parse, which checks every length. It takes the header and calls decode_header,
which checks every tensor. It reads the payload into one buffer and calls slice_payload, which copies nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.errors import ProtocolError
from agora_protocol.limits import (
    FRAME_MAGIC,
    MAX_ANSWER_HEADER_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TENSORS,
    PREFIX_BYTES,
)
from agora_protocol.messages import KINDS, FrameType, Message, UnknownRequest, message_from_fields
from agora_protocol.packing import pack, unpack
from agora_protocol.tensors import TensorSpec, WireTensor, count_bytes

__all__ = ["FrameLimits", "FrameType", "Prefix", "TensorSpec", "decode_header", "encode_frame", "slice_payload"]

_PREFIX: Final = struct.Struct("<BBHIII")


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Most bytes of payload, header and answer's header that a connection accepts; Prefix.parse refuses more.

    A run's manifest usually allows much smaller payloads.
    """

    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    max_header_bytes: int = MAX_HEADER_BYTES
    max_answer_header_bytes: int = MAX_ANSWER_HEADER_BYTES


DEFAULT_LIMITS: Final = FrameLimits()
MAX_CALL: Final = 2**32 - 1
_TYPES: Final = {int(kind): kind for kind in FrameType}
_OF_CONNECTION: Final = frozenset({FrameType.HELLO, FrameType.GOODBYE})  # call 0; all others belong to a call
_WITH_PAYLOAD: Final = frozenset({FrameType.REQUEST, FrameType.ANSWER})
_HEADER_OPTIONAL: Final = frozenset({FrameType.GOODBYE})


class Prefix(NamedTuple):
    """The first 16 bytes of a frame: its type, its call's number, the lengths of header and payload. Immutable."""

    type: FrameType
    call: int
    header_bytes: int
    payload_bytes: int

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, limits: FrameLimits = DEFAULT_LIMITS) -> Prefix:
        """Returns the checked prefix in `data`, 16 bytes.

        Raises ProtocolError: "bad-frame" for a malformed prefix, "too-large" for a length beyond the limits.
        """
        if len(data) != PREFIX_BYTES:
            raise ProtocolError("bad-frame", f"A frame's prefix has {PREFIX_BYTES} bytes, not {len(data)}.")
        magic, number, reserved, call, header_bytes, payload_bytes = _PREFIX.unpack(data)
        kind = _TYPES.get(number)
        if magic != FRAME_MAGIC or reserved != 0 or kind is None:
            raise ProtocolError("bad-frame", f"{bytes(data[:4]).hex()} begins no frame.")
        _check_call(kind, call)
        _check_lengths(kind, header_bytes, payload_bytes, limits)
        return cls(kind, call, header_bytes, payload_bytes)

    def to_bytes(self) -> bytes:
        """Returns the 16 bytes for the wire; checks nothing."""
        return _PREFIX.pack(FRAME_MAGIC, self.type, 0, self.call, self.header_bytes, self.payload_bytes)


def _check_call(kind: FrameType, call: int) -> None:
    if (call == 0) != (kind in _OF_CONNECTION) or not 0 <= call <= MAX_CALL:
        raise ProtocolError("bad-frame", f"{kind.name} frames must not have call {call}.")


def _check_lengths(kind: FrameType, header_bytes: int, payload_bytes: int, limits: FrameLimits) -> None:
    most = limits.max_answer_header_bytes if kind is FrameType.ANSWER else limits.max_header_bytes
    if header_bytes > most:
        raise ProtocolError(
            "too-large", f"{kind.name} with a header of {header_bytes} bytes; at most {most} are allowed."
        )
    if payload_bytes > limits.max_payload_bytes:
        raise ProtocolError(
            "too-large", f"A payload of {payload_bytes} bytes; at most {limits.max_payload_bytes} are allowed."
        )
    if payload_bytes and kind not in _WITH_PAYLOAD:
        raise ProtocolError("bad-frame", f"{kind.name} frames have no payload.")
    if kind is FrameType.CANCEL and header_bytes:
        raise ProtocolError("bad-frame", "CANCEL frames have no header.")
    if not header_bytes and kind is not FrameType.CANCEL and kind not in _HEADER_OPTIONAL:
        raise ProtocolError("bad-frame", f"{kind.name} frames need a header.")


def encode_frame(
    type: FrameType, call: int, message: Message | None, tensors: Sequence[WireTensor] = ()
) -> list[bytes | memoryview]:
    """Returns the frame as buffers to write in order: prefix and header, then each tensor's data, which is not copied.

    message: None makes a frame without header. Raises ProtocolError if a receiver would refuse the frame.
    """
    _check_call(type, call)
    header = b""
    if message is not None:
        _check_message_fits(type, message, len(tensors))
        header = pack((message.KIND, message.to_fields(), [(tensor.dtype, tensor.shape) for tensor in tensors]))
    payload_bytes = sum([tensor.data.nbytes for tensor in tensors])
    _check_lengths(type, len(header), payload_bytes, DEFAULT_LIMITS)
    prefix = _PREFIX.pack(FRAME_MAGIC, type, 0, call, len(header), payload_bytes)
    return [prefix + header, *(tensor.data for tensor in tensors)]


def _check_message_fits(type: FrameType, message: Message, tensors: int) -> None:
    if type not in message.FRAMES:
        raise ProtocolError("bad-message", f"{message.__class__.__name__} does not travel in {type.name} frames.")
    fewest, most = message.TENSORS
    if not fewest <= tensors <= most:
        raise ProtocolError(
            "bad-tensor", f"{message.__class__.__name__} with {tensors} tensors; {fewest} to {most} belong."
        )


def decode_header(prefix: Prefix, header: bytes | memoryview) -> tuple[Message | None, tuple[TensorSpec, ...]]:
    """Returns the message in a frame's header, None for an empty one, and the specs of the tensors in its payload.

    Of a REQUEST whose kind is not known, the message is an UnknownRequest.

    Raises ProtocolError: "bad-message", "bad-tensor" (also where the specs' bytes do not add up to payload_bytes),
    "bad-frame" (the header is not as long as announced).
    """
    if len(header) != prefix.header_bytes:
        raise ProtocolError(
            "bad-frame", f"The header has {len(header)} bytes where {prefix.header_bytes} were announced."
        )
    if prefix.header_bytes == 0:
        return None, ()
    parts = unpack(header, MAX_ANSWER_HEADER_BYTES)
    if not isinstance(parts, tuple) or len(parts) != 3:
        raise ProtocolError("bad-message", "A header must be a list of kind, fields and tensors.")
    message = _read_message(prefix.type, parts[0], parts[1])
    if not isinstance(parts[2], tuple) or len(parts[2]) > MAX_TENSORS:
        raise ProtocolError("bad-tensor", f"A header lists at most {MAX_TENSORS} tensors.")
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in parts[2]):
        raise ProtocolError("bad-tensor", "A tensor must be listed as its dtype and its shape.")
    specs = tuple([TensorSpec(dtype, shape, count_bytes(dtype, shape)) for dtype, shape in parts[2]])
    _check_message_fits(prefix.type, message, len(specs))
    total = sum([spec.nbytes for spec in specs])
    if total != prefix.payload_bytes:
        raise ProtocolError("bad-tensor", f"The tensors have {total} bytes, the payload {prefix.payload_bytes}.")
    return message, specs


def _read_message(frame: FrameType, kind: object, fields: object) -> Message:
    if frame is FrameType.REQUEST and type(kind) is int and kind not in KINDS and isinstance(fields, dict):
        return UnknownRequest(kind)
    return message_from_fields(kind, fields)


def slice_payload(specs: Sequence[TensorSpec], payload: memoryview | bytearray | bytes) -> list[WireTensor]:
    """Returns the tensors of `specs`, which lie one after the other in `payload`, as views; copies nothing.

    Raises ProtocolError("bad-tensor") when the payload has more or fewer bytes than they need.
    """
    view, at = memoryview(payload).cast("B"), 0
    tensors = []
    for spec in specs:
        begin, at = at, at + spec.nbytes
        tensors.append(WireTensor.from_spec(spec, view[begin:at]))
    if at != view.nbytes:
        raise ProtocolError("bad-tensor", f"The payload has {view.nbytes} bytes, which is not what its tensors need.")
    return tensors
