"""Makes boundaries.json beside this file, the same bytes every time: `python tests/codec/vectors/make.py`.

For whoever writes a peer in another language: quantised boundaries, as section 8 of the specification has them. In the
JSON, `values` are what was encoded and `decoded` what a receiver has, float32 in hex, little-endian, row-major.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from agora_protocol.codec_names import Direction

from agora.codec import BoundaryCodec, gradient_dither_key

HERE: Final = Path(__file__).parent
SEED: Final = 7
MICROBATCH: Final = bytes(range(16))
STAGE: Final = 3
DIRECTION_CODEC_NAMES: Final = (
    "int8",
    "int7",
    "int6",
    "int5",
    "int4",
    "int3",
    "int2",
    "int8h",
    "int4h",
    "top3:int8",
    "top4:int3",
)
SHAPES: Final = ((1, 2, 5), (1, 2, 64), (1, 1, 70))


def values_of(shape: tuple[int, int, int]) -> np.ndarray:
    """Values of many sizes, each from integers, so that every machine has the same."""
    count = int(np.prod(shape))
    index = np.arange(count)
    return ((index * 7919 % 2003 - 1001) / 2.0 ** (6 + index % 5)).astype("<f4").reshape(shape)


def vector(leg: str, shape: tuple[int, int, int], backward: bool) -> dict[str, Any]:
    """One boundary, or gradient, and its bytes."""
    codec, values = BoundaryCodec(leg, SEED), torch.from_numpy(values_of(shape))
    direction: Direction = "backward" if backward else "forward"
    key = gradient_dither_key(MICROBATCH, STAGE) if backward else None
    wire = codec.encode(values, direction, key)
    decoded = codec.decode(wire, shape, direction, key)
    return {
        "leg": leg,
        "direction": direction,
        "shape": shape,
        "values": values.numpy().tobytes().hex(),
        "wire": bytes(wire.data).hex(),
        "decoded": decoded.numpy().astype("<f4").tobytes().hex(),
    }


def build() -> str:
    """The file's text."""
    made = [
        vector(leg, shape, backward) for leg in DIRECTION_CODEC_NAMES for shape in SHAPES for backward in (False, True)
    ]
    return (
        json.dumps({"seed": SEED, "microbatch": MICROBATCH.hex(), "stage": STAGE, "boundaries": made}, indent=1) + "\n"
    )


if __name__ == "__main__":
    (HERE / "boundaries.json").write_text(build(), encoding="ascii")
    sys.stdout.write(f"{HERE / 'boundaries.json'}\n")
