"""The names of boundary codecs, and what follows from a name: dtype, shape and bytes of what crosses a boundary.

Knows names and sizes. Must not know tensor libraries, nor how a value becomes a level.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final, Literal

from agora_protocol.errors import ManifestError
from agora_protocol.fields import shown
from agora_protocol.limits import BOUNDARY_BLOCK

Direction = Literal["forward", "backward"]

DENSE_BYTES: Final = {"bf16": 2, "float32": 4}
SCALE_BYTES: Final = 2
BITS: Final = range(2, 9)
LEGS: Final = (*DENSE_BYTES, *(f"int{bits}{turned}" for bits in reversed(BITS) for turned in ("", "h")))
"""The name of one direction; a codec is one of them for both, or two as FORWARD/BACKWARD."""


@dataclass(frozen=True, slots=True)
class Leg:
    """How boundaries cross in one direction. bits: of a level, 0 where values are dense; rotated: before quantising."""

    name: str
    bits: int
    rotated: bool

    def bytes_of(self, shape: tuple[int, int, int]) -> int:
        """Bytes on the wire of a boundary [b, s, k]."""
        b, s, k = shape
        if not self.bits:
            return b * s * k * DENSE_BYTES[self.name]
        return SCALE_BYTES * b * s * blocks(k) + packed_bytes(b * s * k, self.bits)

    def bytes_per_token(self, k: int) -> float:
        """Bytes on the wire for the `k` values of a token, where a boundary has many tokens."""
        return self.bytes_of((8, 1, k)) / 8

    def wire(self, shape: tuple[int, int, int]) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the wire tensor of a boundary [b, s, k]."""
        return ("uint8", (self.bytes_of(shape),)) if self.bits else (self.name, shape)


@dataclass(frozen=True, slots=True)
class CodecName:
    """A manifest's boundary.codec, understood."""

    name: str
    forward: Leg
    backward: Leg

    def leg(self, direction: Direction) -> Leg:
        """How activations (forward) or their gradients (backward) cross."""
        return self.forward if direction == "forward" else self.backward


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
    """The codec `name`, such as int8, int6/int8 or int4h. Raises ManifestError with what is known."""
    forward, slash, backward = name.partition("/")
    legs = (forward, backward if slash else forward)
    for leg in legs:
        if leg not in LEGS:
            raise ManifestError(f"[boundary] codec {shown(name)} is unknown; {_remedy(leg)}")
    return CodecName(name, *(Leg(leg, _bits(leg), leg.endswith("h")) for leg in legs))


def _bits(leg: str) -> int:
    return 0 if leg in DENSE_BYTES else int(leg[3])


def _remedy(leg: str) -> str:
    close = difflib.get_close_matches(leg[:64], LEGS, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}use one of {', '.join(LEGS)}, or two of them as FORWARD/BACKWARD."
