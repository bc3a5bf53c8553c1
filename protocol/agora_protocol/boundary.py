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

    def bytes_per_token(self, k: int) -> int:
        """Bytes on the wire for the `k` values of a token."""
        if not self.bits:
            return k * DENSE_BYTES[self.name]
        return SCALE_BYTES * blocks(k) + -(-k * self.bits // 8)

    def wire(self, shape: tuple[int, int, int]) -> tuple[str, tuple[int, int, int]]:
        """Dtype and shape of the wire tensor of a boundary [b, s, k]."""
        if not self.bits:
            return self.name, shape
        return "uint8", (*shape[:2], self.bytes_per_token(shape[2]))


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
