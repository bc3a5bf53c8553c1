"""Random words that the run's seed and a purpose decide, the same on every machine.

Knows SHA-256 and Philox4x64-10 (Salmon et al., SC 2011), whose raw output numpy keeps stable. Knows no tensors.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def words(what: str, seed: int, count: int) -> NDArray[np.uint64]:
    """`count` little-endian words for a purpose `what` under the run's seed, as the specification's words(what)."""
    digest = hashlib.sha256(f"agora {what} 1\0{seed}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8").astype(np.uint64)
    return np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)


def random_bytes(what: str, seed: int, count: int) -> NDArray[np.int8]:
    """`count` signed bytes, those of the words in their order."""
    return words(what, seed, -(-count // 8)).view(np.int8)[:count]
