"""Bounds the size of one gradient that comes from downstream by the median of those before it. Deterministic.

A GradientNormBound changes only itself, and
only by the calls to it.

One gradient of size 1e30 would outweigh all others in the sum of a step. So a gradient may be at most MAX_RATIO times
as large as the median of the last WINDOW. A rejected one is remembered with the size of the limit: if most gradients
are larger, the limit rises to them, but a peer that sends less than half of a stage's gradients cannot raise it.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

WINDOW: Final = 65
MIN_SAMPLES: Final = 5
MAX_RATIO: Final = 100.0
# The limit before MIN_SAMPLES gradients were seen: the gradient of a sum of token losses is far smaller.
FIRST_LIMIT: Final = 1e4


class GradientNormBound:
    """The upper bound for the next gradient's root mean square, by the last WINDOW root mean squares above 0."""

    def __init__(self) -> None:
        self._sizes: deque[float] = deque(maxlen=WINDOW)

    @property
    def limit(self) -> float:
        return MAX_RATIO * median(self._sizes) if len(self._sizes) >= MIN_SAMPLES else FIRST_LIMIT

    def record_and_check(self, size: float) -> bool:
        """Returns whether a gradient of root mean square `size` may be used: whether it is at most `limit`.

        False for NaN. Records min(size, limit) for later limits, unless the size is 0 or NaN.
        """
        limit = self.limit
        if size > 0:
            self._sizes.append(min(size, limit))
        return size <= limit
