"""Draws initial weights: pure functions of the seed, and of a tensor's full name, shape and standard deviation.

Knows: how random bits become a normal distribution. Must not know: which tensors a model has.
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
    """Returns the CPU random generator that the run's seed and a tensor's full name seed.

    Each tensor has its own, so a peer draws only the tensors that it holds.
    """
    digest = hashlib.sha256(f"agora initial weights 1\0{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def normal_like(shape: Sequence[int], std: float, generator: torch.Generator) -> Tensor:
    """Returns float32 [shape] on the CPU, nearly normal: mean 0, deviation `std`, bounded at 4.9 std.

    A value is the sum of eight 15-bit uniform integers, then multiplied once, so that every CPU gives the same bits;
    torch's normal_ and trunc_normal_ (logarithm, erfinv) differ between vector units.
    """
    flat = torch.empty(math.prod(shape))
    centre = PIECES * (2**PIECE_BITS - 1) / 2
    scale = std / math.sqrt(PIECES * (4**PIECE_BITS - 1) / 12)
    for chunk in torch.split(flat, CHUNK):
        sums = torch.zeros(len(chunk), dtype=torch.int64)
        for _ in range(PIECES // 4):  # four integers from each 63-bit draw
            bits = torch.empty(len(chunk), dtype=torch.int64).random_(generator=generator)
            for shift in range(0, 4 * PIECE_BITS, PIECE_BITS):
                sums += (bits >> shift) & (2**PIECE_BITS - 1)
        chunk.copy_((sums.double() - centre) * scale)
    return flat.view(tuple(shape))
