"""Initial weights: each tensor is a pure function of (seed, its full name, shape, standard deviation).

Knows how bits become a bell curve. Must not know which tensors a model has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

PIECES = 8
PIECE_BITS = 15
CHUNK = 1 << 22


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for every tensor, so that no peer needs to draw what it does not hold."""
    digest = hashlib.sha256(f"agora initial weights 1\0{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def normal_like(shape: Sequence[int], std: float, generator: torch.Generator) -> Tensor:
    """float32 [shape] on the CPU, mean 0, standard deviation `std`, bounded at 4.9 std: a truncated normal to the eye.

    The sum of eight 15-bit uniform integers, then one multiplication: every CPU gets the same bits. torch's own normal_
    and trunc_normal_ take other paths (logarithm, erfinv) on other vector units. Excess kurtosis -0.15.
    """
    flat = torch.empty(math.prod(shape))
    centre = PIECES * (2**PIECE_BITS - 1) / 2
    scale = std / math.sqrt(PIECES * (4**PIECE_BITS - 1) / 12)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        total = _sum_of_pieces(part.numel(), generator)
        part.copy_((total.double() - centre) * scale)
    return flat.view(tuple(shape))


def _sum_of_pieces(count: int, generator: torch.Generator) -> Tensor:
    """[count] sums of PIECES uniform integers below 2 ** PIECE_BITS, four from each 63-bit draw."""
    total = torch.zeros(count, dtype=torch.int64)
    for _ in range(PIECES // 4):
        bits = torch.empty(count, dtype=torch.int64).random_(generator=generator)
        for shift in range(0, 4 * PIECE_BITS, PIECE_BITS):
            total += (bits >> shift) & (2**PIECE_BITS - 1)
    return total
