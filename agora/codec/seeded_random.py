"""What sender and receiver derive from the run's seed, the same on every machine: random words, dithers, rotations.

Words come from SHA-256 and Philox4x64-10 (Salmon et al., SC 2011), whose raw output numpy keeps stable. SPEC.md calls
them "words(purpose)" in section 3. Rotating each block of a token's values before quantisation spreads an outlier over
its block: QuaRot, arXiv 2404.00456.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import torch
from agora_protocol.limits import BOUNDARY_BLOCK
from numpy.typing import NDArray
from torch import Tensor


def random_words(purpose: str, seed: int, count: int) -> NDArray[np.uint64]:
    """Returns the first `count` 64-bit words of Philox with the key SHA-256(f"agora {purpose} 1\\0{seed}")[:16].

    purpose: a string that names the use; the same purpose and seed give the same words.
    """
    digest = hashlib.sha256(f"agora {purpose} 1\0{seed}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8").astype(np.uint64)
    return np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)


def draw_dither(key: str, seed: int, rows: int, k: int) -> Tensor:
    """Draws the dither of `rows` rows of k values: int8 [rows, k] on the CPU, in 1/256 of a level."""
    drawn = random_words(key, seed, -(-rows * k // 8)).view(np.int8)[: rows * k]
    return torch.from_numpy(drawn).view(rows, k)


def rotate_blocks(rows: Tensor, seed: int, *, inverse: bool = False) -> Tensor:
    """Returns a copy of rows, float32 [rows, k], with each block of BOUNDARY_BLOCK columns multiplied by a rotation.

    A shorter last block gets a rotation of its own size (see rotation_matrix). seed: the run's. inverse: multiplies by
    the inverse rotations, which undoes the first call.
    """
    k = rows.shape[1]
    whole = k - k % BOUNDARY_BLOCK
    if whole == k:
        rotation = rotation_matrix(BOUNDARY_BLOCK, seed, inverse, rows.device)
        return (rows.reshape(-1, BOUNDARY_BLOCK) @ rotation).view(rows.shape)
    rotated = torch.empty_like(rows)
    if whole:
        rotated[:, :whole] = rotate_blocks(rows[:, :whole], seed, inverse=inverse)
    rotated[:, whole:] = rows[:, whole:] @ rotation_matrix(k - whole, seed, inverse, rows.device)
    return rotated


@functools.lru_cache(maxsize=64)
def rotation_matrix(size: int, seed: int, inverse: bool, device: torch.device) -> Tensor:
    """Returns the orthogonal matrix R, float32 [size, size], that rotates a row x to x R; its inverse R^T if `inverse`.

    R is Sylvester's Hadamard matrix / sqrt(size) if size is a power of two, otherwise the matrix of the DCT-II. Each
    row is multiplied by a random sign, which the seed decides. The tensor is cached and shared: do not change it.
    """
    if size & (size - 1) == 0:
        hadamard = torch.ones(1, 1, dtype=torch.float64)
        while len(hadamard) < size:
            hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
        matrix = hadamard / math.sqrt(size)
    else:
        index = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(torch.outer(2 * index + 1, index) * (math.pi / (2 * size))) * math.sqrt(2 / size)
        matrix[:, 0] = 1 / math.sqrt(size)
    signs = 1.0 - 2.0 * torch.from_numpy((random_words("rotation", seed, size) & 1).astype("float64"))
    rotation = (signs[:, None] * matrix).float()
    return (rotation.T if inverse else rotation).contiguous().to(device)
