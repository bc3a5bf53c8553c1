"""Fills a stage with initial weights: each tensor is a pure function of seed, full name, shape, standard deviation.

Knows: how random bits become a normal distribution. Must not know: which tensors a model has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agora.model.stage_module import Stage

PIECES = 8
PIECE_BITS = 15
CHUNK = 1 << 22


@torch.no_grad()
def fill_initial_weights(stage: Stage, seed: int) -> None:
    """Gives every parameter of the stage its initial values, as the stage's `initial_std` says."""
    for name, parameter in stage.named_parameters():
        std = stage.initial_std(name)
        if std is None:
            parameter.fill_(1.0)
        else:
            parameter.copy_(normal_like(parameter.shape, std, generator_for(seed, name)))


def generator_for(seed: int, name: str) -> torch.Generator:
    """Returns the CPU generator of one tensor: each has its own, so a peer draws only what it holds."""
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
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        sums = _sums_of_pieces(chunk.numel(), generator)
        chunk.copy_((sums.double() - centre) * scale)
    return flat.view(tuple(shape))


def _sums_of_pieces(count: int, generator: torch.Generator) -> Tensor:
    """Returns [count] sums of PIECES uniform integers below 2 ** PIECE_BITS, four from each 63-bit draw."""
    sums = torch.zeros(count, dtype=torch.int64)
    for _ in range(PIECES // 4):
        bits = torch.empty(count, dtype=torch.int64).random_(generator=generator)
        for shift in range(0, 4 * PIECE_BITS, PIECE_BITS):
            sums += (bits >> shift) & (2**PIECE_BITS - 1)
    return sums
