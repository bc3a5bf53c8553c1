"""Derives the tensors of the subspace family that the run's seed fixes: the basis and the fixed embedding.

Every machine and library gives the same bits: random words come from SHA-256 and Philox (agora.codec.seeded_random),
and the basis is a product of permutations, sign changes and Hadamard matrices, integers until the last division.
"""

from __future__ import annotations

import functools
import hashlib
from typing import ClassVar

import numpy as np
from agora_protocol.errors import LocalError
from numpy.typing import NDArray

from agora.codec.seeded_random import random_words

# SHA-256 of the basis and the embedding signs for seed 7, 1000 tokens, width 24 and rank 5 on a correct machine.
KNOWN_DIGEST = "b6dd8460cd61ee1dfc1d8c770288a0ecf2f41e3f58c29979a61989144b69a38a"


class DerivationError(LocalError):
    """Raised when this machine's numpy derives other tensors from a seed than other peers do, see check_derivation."""

    code: ClassVar[str] = "derivation"


def derive_basis(seed: int, width: int, rank: int) -> NDArray[np.float32]:
    """Derives the subspace basis U, [width, rank], from the seed: orthonormal columns that spread over all coordinates.

    U has the first columns of a random orthogonal matrix, made in rounds: permute the rows, change signs, multiply
    blocks of rows (their size is the largest power of two that divides the width) by a Hadamard matrix. There are twice
    as many rounds as are needed for every row to depend on every other. Columns do not depend on the rank. width: must
    be even, unless rank = width; then U is the identity.
    """
    if rank == width:
        return np.eye(width, dtype=np.float32)
    block = width & -width
    rounds = 1
    while block**rounds < width:
        rounds += 1
    matrix = np.eye(width, rank, dtype=np.int64)
    for words in random_words(f"basis {width}", seed, 2 * rounds * width).reshape(2 * rounds, width):
        signs = 1 - 2 * (words & np.uint64(1)).astype(np.int64)
        matrix = _hadamard_product(matrix[np.argsort(words, kind="stable")] * signs[:, None], block)
    columns: NDArray[np.float32] = (matrix / block**rounds).astype(np.float32)
    return columns


def derive_embedding_signs(seed: int, vocabulary: int, width: int) -> NDArray[np.uint8]:
    """Derives the fixed embedding's signs from the seed as bits, [vocabulary, ceil(width / 8)]: 1/32 of float32 signs.

    Bit i % 8 of byte i // 8 in a token's row is set where coordinate i of the token is positive. The row is the first
    `width` bits of the token's own ceil(width / 64) little-endian random words.
    """
    words_per_token = -(-width // 64)
    words = random_words(f"fixed embedding {width}", seed, vocabulary * words_per_token)
    return np.ascontiguousarray(words.view(np.uint8).reshape(vocabulary, 8 * words_per_token)[:, : -(-width // 8)])


def derive_embedding(seed: int, vocabulary: int, width: int) -> NDArray[np.float32]:
    """Derives the fixed embedding's signs from the seed as 1 and -1, float32 [vocabulary, width], not scaled."""
    bits = np.unpackbits(derive_embedding_signs(seed, vocabulary, width), axis=1, count=width, bitorder="little")
    return np.where(bits, np.float32(1), np.float32(-1))


@functools.cache
def check_derivation() -> None:
    """Raises DerivationError if this machine derives other tensors than other peers: small ones with a known digest.

    Called before the run's own tensors are derived. After a success, later calls do nothing.
    """
    tensors = derive_basis(7, 24, 5).astype("<f4"), derive_embedding_signs(7, 1000, 24)
    derived = hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors)).hexdigest()
    if derived != KNOWN_DIGEST:
        raise DerivationError(
            f"This machine derives other fixed tensors ({derived[:16]}, not {KNOWN_DIGEST[:16]}) from a seed than "
            f"other peers, and cannot train with them; install another numpy than {np.__version__}."
        )


def _hadamard_product(matrix: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    width, rank = matrix.shape
    step = 1
    while step < block:
        pairs = matrix.reshape(width // (2 * step), 2, step, rank)
        matrix = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(width, rank)
        step *= 2
    return matrix
