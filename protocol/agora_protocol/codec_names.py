"""The names of boundary codecs, and the dtype, shape and bytes of a wire tensor that follow from a name.

A name is the value of a manifest's boundary.codec, such as "bf16", "int6/int3" or "top28:int8".
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from agora_protocol.errors import ManifestError
from agora_protocol.fields import describe
from agora_protocol.limits import BOUNDARY_BLOCK

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
Shape = tuple[int, int, int]  # the shape of a boundary, [b, s, k]: sequences, positions, values for each token
# The number formats in which the values of an averaging round are sent; normal2 to normal4 take 2 to 4 bits each.
NumberFormatName = Literal["normal2", "normal3", "normal4", "int8", "bf16", "float32"]
NUMBER_FORMAT_NAMES: Final[tuple[NumberFormatName, ...]] = get_args(NumberFormatName)

UNCOMPRESSED_BYTES: Final = {"bf16": 2, "float32": 4}
SCALE_BYTES: Final = 2
BITS: Final = range(2, 9)
# The codecs of one direction. A boundary codec is one of them for both directions, or two as FORWARD/BACKWARD.
DIRECTION_CODEC_NAMES: Final = (
    *UNCOMPRESSED_BYTES,
    *(f"int{bits}{rotated}" for bits in reversed(BITS) for rotated in ("", "h")),
)
# The prefix topN: of a codec that sends only N columns; not allowed before rotated codecs.
TOP_COLUMNS: Final = re.compile(r"top([1-9][0-9]{0,4}):")
COLUMN_BYTES: Final = 2  # bytes of a column's number, which is below 65,536 as a model's width is


@dataclass(frozen=True, slots=True)
class DirectionCodec:
    """A codec of one direction: computes the bytes, dtype and shape of an encoded boundary. Immutable.

    bits: bits of each quantised value, 0 for bf16 and float32. rotated: whether values are rotated before they are
    quantised.
    """

    name: str
    bits: int
    rotated: bool

    def bytes_of(self, shape: Shape) -> int:
        """Returns how many bytes a boundary of `shape` takes on the wire.

        These are packed levels and a scale for each block of values, or the plain values of bf16 and float32.
        """
        b, s, k = shape
        if not self.bits:
            return b * s * k * UNCOMPRESSED_BYTES[self.name]
        return SCALE_BYTES * b * s * blocks_per_token(k) + packed_bytes(b * s * k, self.bits)

    def wire_format(self, shape: Shape) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape of the wire tensor: uint8 [bytes] if quantised, otherwise `name` and `shape`."""
        return ("uint8", (self.bytes_of(shape),)) if self.bits else (self.name, shape)


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """What a boundary codec's name means; immutable.

    forward, backward: the codecs of activations and of their gradients. columns: how many columns are sent; 0: all.
    """

    name: str
    forward: DirectionCodec
    backward: DirectionCodec
    columns: int = 0

    def of_direction(self, direction: Direction) -> DirectionCodec:
        """Returns the codec of activations (forward) or of their gradients (backward)."""
        return self.forward if direction == "forward" else self.backward

    def sent_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the values sent of a boundary: [b, s, columns], or `shape` if `columns` is 0."""
        return (*shape[:2], self.columns or shape[2])

    def bytes_of(self, shape: Shape, direction: Direction) -> int:
        """Returns how many bytes a boundary of `shape` takes on the wire, including the numbers of its columns."""
        return COLUMN_BYTES * self.columns + self.of_direction(direction).bytes_of(self.sent_shape(shape))

    def bytes_per_token(self, k: int, direction: Direction) -> float:
        """Returns the mean bytes on the wire of one token's `k` values, without the numbers of columns.

        Where the codec sends only some columns, only their values count, whatever `k` is.
        """
        return self.of_direction(direction).bytes_of(self.sent_shape((8, 1, k))) / 8

    def wire_format(self, shape: Shape, direction: Direction) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape of the wire tensor of a boundary of `shape`.

        It is uint8 [bytes] if only some columns are sent, otherwise what DirectionCodec.wire_format returns.
        """
        if self.columns:
            return "uint8", (self.bytes_of(shape, direction),)
        return self.of_direction(direction).wire_format(shape)


def blocks_per_token(k: int) -> int:
    """Returns how many blocks, of one scale each, a token's `k` values make: ceil(k / BOUNDARY_BLOCK)."""
    return -(-k // BOUNDARY_BLOCK)


def part_widths(bits: int) -> list[int]:
    """Returns the widths (8, 4, 2, 1) of the parts of a level of `bits` bits, from its lowest bit: 6 is [4, 2]."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_bytes(count: int, bits: int) -> int:
    """Returns the bytes of `count` levels of `bits` bits, whose parts of each width are packed into whole bytes."""
    return sum(-(-count * width // 8) for width in part_widths(bits))


def parse_codec(name: str) -> CodecSpec:
    """Returns the codec called `name`, [topN:]BOTH or [topN:]FORWARD/BACKWARD, such as "int8" or "top64:int6/int8".

    Raises ManifestError, which lists the known names, for any other name, and for topN: before a rotated codec.
    """
    top = TOP_COLUMNS.match(name)
    forward, slash, backward = name[top.end() if top else 0 :].partition("/")
    backward = backward if slash else forward
    for part in (forward, backward):
        if part not in DIRECTION_CODEC_NAMES or (top and part.endswith("h")):
            raise ManifestError(f"[boundary] codec {describe(name)} is unknown; {_remedy(part)}")
    return CodecSpec(name, _direction_codec(forward), _direction_codec(backward), int(top[1]) if top else 0)


def _direction_codec(name: str) -> DirectionCodec:
    return DirectionCodec(name, 0 if name in UNCOMPRESSED_BYTES else int(name[3]), name.endswith("h"))


def _remedy(name: str) -> str:
    close = difflib.get_close_matches(name[:64], DIRECTION_CODEC_NAMES, n=1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"{suggestion}use one of {', '.join(DIRECTION_CODEC_NAMES)}, or two of them as FORWARD/BACKWARD; "
        "topN: before a codec without h sends N columns."
    )
