"""Derives random integers from the run's seed and a purpose, the same on every machine.

SHA-256 and Philox4x64-10 (Salmon et al., SC 2011), whose raw output numpy keeps stable.
SPEC.md, section 3, calls these integers "words(purpose)".
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def random_words(purpose: str, seed: int, count: int) -> NDArray[np.uint64]:
    """Returns the first `count` 64-bit words of Philox with the key SHA-256(f"agora {purpose} 1\\0{seed}")[:16].

    purpose: a string that names the use; the same purpose and seed give the same words.
    """
    digest = hashlib.sha256(f"agora {purpose} 1\0{seed}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8").astype(np.uint64)
    return np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)
