"""Decides the order of an epoch's samples: a pure function of seed and epoch, so that peers need not send it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from agora.data.hashing import mix


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Returns a pseudorandom permutation of 0 to count - 1, int64 [count]: the shuffled order of one epoch's items.

    It is the same on every machine: numpy's own permutations may change between its versions, a sort by hash does not.
    """
    digest = hashlib.sha256(f"agora epoch 1\0{seed}\0{epoch}".encode()).digest()
    hashes = mix(np.arange(count, dtype=np.uint64), int.from_bytes(digest[:8], "little"))
    return np.argsort(hashes, kind="stable").astype(np.int64)
