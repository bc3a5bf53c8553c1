"""What the seed of a run fixes for ever in the subspace family: the basis, and the signs of the fixed embedding.

Knows: integers. Must not know: torch, layers, peers. Nothing here is rounded before the end, so that every machine and
every library gives the same bits: the random words are those that the run's seed decides (SPEC.md), and the
basis is a product of permutations, sign changes and Hadamard matrices, whose entries are integers.
"""

from __future__ import annotations

import functools
import hashlib
from typing import ClassVar

import numpy as np
from agora_protocol.errors import LocalError
from numpy.typing import NDArray

from agora.codec.seeded_random import random_words

KNOWN = "b6dd8460cd61ee1dfc1d8c770288a0ecf2f41e3f58c29979a61989144b69a38a"
"""SHA-256 of what the seed 7 fixes for 1000 tokens, width 24 and rank 5; see check_derivation."""


class DerivationError(LocalError):
    """This machine's libraries derive other tensors from a seed than those of other peers."""

    code: ClassVar[str] = "derivation"


def basis(seed: int, width: int, rank: int) -> NDArray[np.float32]:
    """U, [width, rank], orthonormal columns spread evenly over all coordinates; the identity when rank is width.

    A random orthogonal matrix's first columns, by an even number of rounds: permute the rows, change signs, multiply
    blocks of rows by a Hadamard matrix. A block is the largest power of two that divides the width. The rounds are
    twice as many as it takes for every row to reach every other. Columns do not depend on the rank.
    """
    if rank == width:
        return np.eye(width, dtype=np.float32)
    block, rounds = width & -width, 1
    while block**rounds < width:
        rounds += 1
    matrix = np.eye(width, rank, dtype=np.int64)
    for drawn in random_words(f"basis {width}", seed, 2 * rounds * width).reshape(2 * rounds, width):
        signs = 1 - 2 * (drawn & np.uint64(1)).astype(np.int64)
        matrix = _hadamard(matrix[np.argsort(drawn, kind="stable")] * signs[:, None], block)
    columns: NDArray[np.float32] = (matrix / block**rounds).astype(np.float32)
    return columns


def embedding_signs(seed: int, vocabulary: int, width: int) -> NDArray[np.uint8]:
    """The fixed embedding's signs, [vocabulary, ceil(width / 8)]: bit i % 8 of byte i // 8 of a token's row is set
    where its coordinate i is positive. A 32nd of the table in float32.

    A row is the first `width` bits of the words that are its own, ceil(width / 64) little-endian words for each token.
    """
    own = -(-width // 64)
    drawn = random_words(f"fixed embedding {width}", seed, vocabulary * own)
    return np.ascontiguousarray(drawn.view(np.uint8).reshape(vocabulary, 8 * own)[:, : -(-width // 8)])


def embedding(seed: int, vocabulary: int, width: int) -> NDArray[np.float32]:
    """The same signs as 1 and -1, [vocabulary, width]."""
    bits = np.unpackbits(embedding_signs(seed, vocabulary, width), axis=1, count=width, bitorder="little")
    return np.where(bits, np.float32(1), np.float32(-1))


def digest(seed: int, vocabulary: int, width: int, rank: int) -> str:
    """SHA-256 in hex of the basis, float32, and of the signs after it; the same on every peer of a run."""
    state = hashlib.sha256(basis(seed, width, rank).astype("<f4").tobytes())
    state.update(embedding_signs(seed, vocabulary, width).tobytes())
    return state.hexdigest()


@functools.cache
def check_derivation() -> None:
    """A known answer, before a stage is built: raises DerivationError when this machine's differs."""
    if (found := digest(7, 1000, 24, 5)) != KNOWN:
        raise DerivationError(
            f"this machine derives other fixed tensors ({found[:16]}, not {KNOWN[:16]}) from a seed than other peers, "
            f"and cannot train with them; install another numpy than {np.__version__}"
        )


def _hadamard(matrix: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    """[width, rank], each block of rows multiplied by the Hadamard matrix of its size (Sylvester's, entries +-1)."""
    width, rank = matrix.shape
    step = 1
    while step < block:
        pairs = matrix.reshape(width // (2 * step), 2, step, rank)
        matrix = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(width, rank)
        step *= 2
    return matrix
