"""Rotates each block of a token's values before quantisation, which spreads an outlier over its block.

Source: QuaRot, arXiv 2404.00456. Knows: matrices and the run's seed. Must not know: levels, scales, the wire.
"""

from __future__ import annotations

import functools
import math

import torch
from agora_protocol.limits import BOUNDARY_BLOCK
from torch import Tensor

from agora.codec.seeded_random import random_words


def rotate_blocks(rows: Tensor, seed: int, *, inverse: bool = False) -> Tensor:
    """Returns float32 [rows, k] with every block of BOUNDARY_BLOCK columns rotated; `inverse` undoes the rotation.

    A shorter last block is rotated by a matrix of its own size.
    """
    k = rows.shape[1]
    whole = k - k % BOUNDARY_BLOCK
    if whole == k:
        rotation = _cached_rotation(BOUNDARY_BLOCK, seed, inverse, rows.device)
        return (rows.reshape(-1, BOUNDARY_BLOCK) @ rotation).view(rows.shape)
    rotated = torch.empty_like(rows)
    if whole:
        rotated[:, :whole] = rotate_blocks(rows[:, :whole], seed, inverse=inverse)
    rotated[:, whole:] = rows[:, whole:] @ _cached_rotation(k - whole, seed, inverse, rows.device)
    return rotated


def rotation_matrix(size: int, seed: int) -> Tensor:
    """Returns the orthogonal matrix R, float32 [size, size], that rotates a row of values x to x R.

    R is Sylvester's Hadamard matrix / sqrt(size) where size is a power of two, else the DCT-II's matrix, each row with
    a random sign that the seed decides.
    """
    signs = 1.0 - 2.0 * torch.from_numpy((random_words("rotation", seed, size) & 1).astype("float64"))
    return (signs[:, None] * (_cosine_matrix(size) if size & (size - 1) else _hadamard_matrix(size))).float()


@functools.lru_cache(maxsize=64)
def _cached_rotation(size: int, seed: int, inverse: bool, device: torch.device) -> Tensor:
    """Returns rotation_matrix(size, seed) on `device`, transposed if `inverse`; the last 64 are cached."""
    matrix = rotation_matrix(size, seed)
    return (matrix.T if inverse else matrix).contiguous().to(device)


def _hadamard_matrix(size: int) -> Tensor:
    """Returns Sylvester's Hadamard matrix / sqrt(size), float64 [size, size], orthogonal. size: a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _cosine_matrix(size: int) -> Tensor:
    """Returns the matrix of the discrete cosine transform DCT-II, float64 [size, size], orthogonal."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.outer(2 * index + 1, index) * (math.pi / (2 * size))) * math.sqrt(2 / size)
    matrix[:, 0] = 1 / math.sqrt(size)
    return matrix
