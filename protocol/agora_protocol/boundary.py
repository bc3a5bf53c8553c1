"""The names of boundary codecs, and what follows from a name: dtype, shape and bytes of what crosses a boundary.

Knows names and sizes. Must not know tensor libraries, nor how a value becomes a level.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from agora_protocol.errors import ManifestError
from agora_protocol.fields import shown
from agora_protocol.limits import BOUNDARY_BLOCK

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
Shape = tuple[int, int, int]

DENSE_BYTES: Final = {"bf16": 2, "float32": 4}
SCALE_BYTES: Final = 2
BITS: Final = range(2, 9)
LEGS: Final = (*DENSE_BYTES, *(f"int{bits}{turned}" for bits in reversed(BITS) for turned in ("", "h")))
"""The name of one direction; a codec is one of them for both, or two as FORWARD/BACKWARD."""
SPARSE: Final = re.compile(r"top([1-9][0-9]{0,4}):")
"""Before those that are not rotated, where only so many columns cross."""
COLUMN_BYTES: Final = 2
"""Of a column's number, which is below 65,536 as a model's width is."""


@dataclass(frozen=True, slots=True)
class Leg:
    """How boundaries cross in one direction. bits: of a level, 0 where values are dense; rotated: before quantising."""

    name: str
    bits: int
    rotated: bool

    def bytes_of(self, shape: Shape) -> int:
        """Bytes on the wire of a boundary [b, s, k]."""
        b, s, k = shape
        if not self.bits:
            return b * s * k * DENSE_BYTES[self.name]
        return SCALE_BYTES * b * s * blocks(k) + packed_bytes(b * s * k, self.bits)

    def wire(self, shape: Shape) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the wire tensor of a boundary [b, s, k]."""
        return ("uint8", (self.bytes_of(shape),)) if self.bits else (self.name, shape)


@dataclass(frozen=True, slots=True)
class CodecName:
    """A manifest's boundary.codec, understood. columns: how many of a boundary's cross, their numbers first; 0: all."""

    name: str
    forward: Leg
    backward: Leg
    columns: int = 0

    def leg(self, direction: Direction) -> Leg:
        """How activations (forward) or their gradients (backward) cross."""
        return self.forward if direction == "forward" else self.backward

    def crossing(self, shape: Shape) -> Shape:
        """[b, s, columns] of what the leg carries of a boundary [b, s, k]."""
        return (*shape[:2], self.columns or shape[2])

    def bytes_of(self, shape: Shape, direction: Direction) -> int:
        """Bytes on the wire of a boundary [b, s, k]."""
        return COLUMN_BYTES * self.columns + self.leg(direction).bytes_of(self.crossing(shape))

    def bytes_per_token(self, k: int, direction: Direction) -> float:
        """Bytes on the wire for the `k` values of a token, where a boundary has many tokens."""
        return self.leg(direction).bytes_of(self.crossing((8, 1, k))) / 8

    def wire(self, shape: Shape, direction: Direction) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the wire tensor of a boundary [b, s, k]."""
        if self.columns:
            return "uint8", (self.bytes_of(shape, direction),)
        return self.leg(direction).wire(shape)


def blocks(k: int) -> int:
    """Into how many blocks of at most BOUNDARY_BLOCK values a token's `k` values are cut; each has a scale."""
    return -(-k // BOUNDARY_BLOCK)


def part_widths(bits: int) -> list[int]:
    """Into which parts, from its lowest bit, a level of `bits` is cut: parts of 8, 4, 2 or 1 bits, the widest first."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` packed levels."""
    return sum(-(-count * width // 8) for width in part_widths(bits))


def parse_codec(name: str) -> CodecName:
    """The codec `name`, such as int8, int6/int8, int4h or top64:int8. Raises ManifestError with what is known."""
    sparse = SPARSE.match(name)
    forward, slash, backward = name[sparse.end() if sparse else 0 :].partition("/")
    backward = backward if slash else forward
    for leg in (forward, backward):
        if leg not in LEGS or (sparse and leg.endswith("h")):
            raise ManifestError(f"[boundary] codec {shown(name)} is unknown; {_remedy(leg)}")
    return CodecName(name, _leg(forward), _leg(backward), int(sparse[1]) if sparse else 0)


def _leg(name: str) -> Leg:
    return Leg(name, 0 if name in DENSE_BYTES else int(name[3]), name.endswith("h"))


def _remedy(leg: str) -> str:
    close = difflib.get_close_matches(leg[:64], LEGS, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"{meant}use one of {', '.join(LEGS)}, or two of them as FORWARD/BACKWARD; with topN: before, "
        "but for those that end with h, N columns cross."
    )
