"""Which elements of a stage's weights one round averages, and in which parts. Pure: computed, never sent or stored.

Knows numbers of blocks. Must not know weights, peers, or time. A slice has blocks of SLICE_BLOCK consecutive elements;
an affine permutation of the blocks' numbers, made from the run's seed with whole numbers alone, spreads them, so that
every version of every library computes the same slices, and `count` rounds cover each element exactly once.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK
from numpy.typing import NDArray


class Slices:
    """The slices of `numel` elements, a multiple of SLICE_BLOCK: block i is in slice ((a i + b) mod blocks) mod count.

    `count` is ceil(1 / fraction), or the number of blocks where that is less.
    """

    def __init__(self, numel: int, fraction: float, seed: int) -> None:
        if numel <= 0 or numel % SLICE_BLOCK:
            raise ValueError(f"{numel} elements are no multiple of {SLICE_BLOCK}")
        self._blocks = numel // SLICE_BLOCK
        self.count = min(self._blocks, math.ceil(round(1.0 / fraction, 9)))
        digest = hashlib.sha256(f"agora slices 1\0{seed}\0{numel}".encode()).digest()
        self._factor = _coprime(int.from_bytes(digest[:8], "big"), self._blocks)
        self._offset = int.from_bytes(digest[8:16], "big") % self._blocks

    def blocks(self, number: int) -> NDArray[np.int64]:
        """The blocks that round `number` averages, rising; int64 [n]."""
        inverse = pow(self._factor, -1, self._blocks) if self._blocks > 1 else 0
        places = range(number % self.count, self._blocks, self.count)
        return np.array(sorted(inverse * (place - self._offset) % self._blocks for place in places), np.int64)

    def numel_of(self, number: int) -> int:
        """Elements that round `number` averages."""
        return SLICE_BLOCK * len(range(number % self.count, self._blocks, self.count))


def parts(numel: int) -> list[slice]:
    """The parts of a slice of `numel` elements: PART_ELEMENTS each, the last one what is left."""
    return [slice(start, min(start + PART_ELEMENTS, numel)) for start in range(0, numel, PART_ELEMENTS)]


def _coprime(start: int, modulus: int) -> int:
    """The first of start, start + 1, ... (mod modulus) that has no factor in common with it."""
    candidate = start % modulus
    while math.gcd(candidate, modulus) != 1:
        candidate = (candidate + 1) % modulus
    return candidate
