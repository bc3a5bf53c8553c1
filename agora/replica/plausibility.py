"""Decides by their magnitudes whether means are plausible. Deterministic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

NEW_WEIGHT: Final = 0.3  # weight of a new magnitude in the moving average
# A mean may be this many times as large as the average of earlier means, or as the peer's own values.
MAX_RATIO: Final = 8.0


@dataclass(frozen=True, slots=True)
class MagnitudeBound:
    """Bounds the magnitude of a region's next mean by the region's earlier means and this peer's own values.

    average: moving average of the accepted means' magnitudes (root mean squares); None before the first.
    """

    average: float | None = None

    def limit(self, own: float) -> float:
        """Returns the largest plausible magnitude, MAX_RATIO * max(average, own), with an unknown average taken as 0.

        own: magnitude of this peer's own values. Returns infinity if that maximum is 0.
        """
        largest = max(self.average or 0.0, own)
        return MAX_RATIO * largest if largest else math.inf

    def why_implausible(self, mean: float, own: float) -> str:
        """Returns why a mean of magnitude `mean` must be rejected, or "" if it is plausible: finite and within `limit`.

        own: magnitude of this peer's own values.
        """
        limit = self.limit(own)
        why = f"the mean has a root mean square of {mean:.3g}; at most {limit:.3g} is plausible"
        return "" if math.isfinite(mean) and mean <= limit else why

    def after_accepted_mean(self, mean: float, own: float) -> MagnitudeBound:
        """Returns the bound after a mean of magnitude `mean` was accepted: average + NEW_WEIGHT * (mean - average).

        The first average is min(mean, own), or None if `own` is 0. MovingAverage is not used: it would give the second
        mean a weight of one half.
        """
        if self.average is None:
            return MagnitudeBound(min(mean, own) if own else None)
        return MagnitudeBound(self.average + NEW_WEIGHT * (mean - self.average))
