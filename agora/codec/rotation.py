"""The rotation before a low-bit quantiser: random signs, then a Hadamard matrix, within each block of a token.

It spreads an outlier over its whole block, so that it no longer sets the block's scale alone (QuaRot, arXiv
2404.00456). Knows matrices and the run's seed. Must not know levels, scales or the wire.
"""

from __future__ import annotations

import functools
import math

import torch
from agora_protocol.limits import BOUNDARY_BLOCK
from torch import Tensor

from agora.codec.words import words


def rotate(rows: Tensor, seed: int, *, back: bool = False) -> Tensor:
    """float32 [rows, k], every block of BOUNDARY_BLOCK columns turned (the last, shorter, by its own matrix)."""
    k = rows.shape[1]
    whole = k - k % BOUNDARY_BLOCK
    if whole == k:
        return (rows.reshape(-1, BOUNDARY_BLOCK) @ _matrix(BOUNDARY_BLOCK, seed, back, rows.device)).view(rows.shape)
    turned = torch.empty_like(rows)
    if whole:
        turned[:, :whole] = rotate(rows[:, :whole], seed, back=back)
    turned[:, whole:] = rows[:, whole:] @ _matrix(k - whole, seed, back, rows.device)
    return turned


def rotation_matrix(size: int, seed: int) -> Tensor:
    """R, float32 [size, size], orthogonal; a row of values x becomes x R. Row i has its sign from the seed.

    Sylvester's Hadamard matrix / sqrt(size) where size is a power of two, else the DCT-II's.
    """
    signs = 1.0 - 2.0 * torch.from_numpy((words("rotation", seed, size) & 1).astype("float64"))
    return (signs[:, None] * (_cosines(size) if size & (size - 1) else _hadamard(size))).float()


@functools.lru_cache(maxsize=64)
def _matrix(size: int, seed: int, back: bool, device: torch.device) -> Tensor:
    matrix = rotation_matrix(size, seed)
    return (matrix.T if back else matrix).contiguous().to(device)


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _cosines(size: int) -> Tensor:
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.outer(2 * index + 1, index) * (math.pi / (2 * size))) * math.sqrt(2 / size)
    matrix[:, 0] = 1 / math.sqrt(size)
    return matrix
