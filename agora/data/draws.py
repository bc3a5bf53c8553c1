"""Draws that are equal on every machine and with every version of numpy: hashes, held-out splits, orders, batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def splitmix64(values: Hashes, key: int) -> Hashes:
    """Returns uniform 64-bit hashes of `values` [n] under `key`: splitmix64's mixer (Steele et al., OOPSLA 2014)."""
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_key(seed: int, purpose: int) -> int:
    """Returns a 64-bit key for `splitmix64`, derived from the run's seed.

    purpose: a constant of each use, which makes the keys of different uses differ.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def heldout_threshold(hashes: Hashes, fraction: float) -> np.uint64:
    """Returns the limit below which about this fraction of uniform `hashes` [n >= 1] lies: fraction * 2^64.

    fraction: above 0 and at most 1. The limit is moved so that at least one hash is below it and at least one is not.
    If all hashes are equal, that is impossible, and none is below the limit.
    """
    limit = min(int(fraction * 2**64), 2**64 - 1)
    return np.uint64(min(max(limit, int(hashes.min()) + 1), int(hashes.max())))


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Returns a pseudorandom permutation of 0 to count - 1, int64 [count]: the shuffled order of one epoch's items."""
    # By a sort of hashes: numpy's own permutations may change between its versions, and peers would disagree.
    digest = hashlib.sha256(f"agora epoch 1\0{seed}\0{epoch}".encode()).digest()
    hashes = splitmix64(np.arange(count, dtype=np.uint64), int.from_bytes(digest[:8], "little"))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def cut_batches(numbers: NDArray[np.int64], batch_size: int, limit: int | None) -> Iterator[NDArray[np.int64]]:
    """[n] in batches [batch_size]. Numbers that do not fill the last one are left out; fewer than one batch are
    repeated.
    """
    if 0 < len(numbers) < batch_size:
        numbers = np.resize(numbers, batch_size)
    count = len(numbers) // batch_size
    for i in range(count if limit is None else min(count, limit)):
        yield numbers[i * batch_size : (i + 1) * batch_size]
