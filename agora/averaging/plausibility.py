"""Judges by their sizes whether means are plausible. Pure.

Knows: sizes as root mean squares. Must not know: tensors, calls, time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

USUAL_WEIGHT: Final = 0.3
"""Weight of a new size in the usual one."""
MOST_TIMES_USUAL: Final = 8.0


@dataclass(frozen=True, slots=True)
class UsualSize:
    """How large the means of a place usually are, and so how large they may be; `usual`: None before the first."""

    usual: float | None = None

    def limit(self, own: float) -> float:
        """Returns how large a mean may be: 8 * max(usual, own); infinite when both are 0 or unknown."""
        largest = max(self.usual or 0.0, own)
        return MOST_TIMES_USUAL * largest if largest else math.inf

    def why_implausible(self, mean: float, own: float) -> str:
        """Returns why a mean of size `mean` is rejected, `own` being the size of the own values; "" if it is not."""
        limit = self.limit(own)
        why = f"the mean is {mean:.3g} large, {limit:.3g} would be the most"
        return "" if math.isfinite(mean) and mean <= limit else why

    def updated(self, mean: float, own: float) -> UsualSize:
        """Returns the usual size after an accepted mean: usual + 0.3 * (mean - usual).

        The first is min(mean, own), or still unknown if own is 0. In a MovingAverage the second would weigh half.
        """
        if self.usual is None:
            return UsualSize(min(mean, own) if own else None)
        return UsualSize(self.usual + USUAL_WEIGHT * (mean - self.usual))
