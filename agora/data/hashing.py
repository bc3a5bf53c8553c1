"""Hashes numbers to uniform 64-bit numbers, alike on every machine and with every version of numpy.

Knows: splitmix64. Must not know: what the numbers stand for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def mix(values: Hashes, key: int) -> Hashes:
    """Returns uniform 64-bit hashes of `values` [n] under `key`: splitmix64's output (Steele et al., OOPSLA 2014)."""
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
