"""Judges by their sizes whether averages are plausible, and when a newcomer's values count. Pure.

Knows: distances and sizes as root mean squares. Must not know: tensors, calls, time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

USUAL_WEIGHT: Final = 0.3
"""Weight of a new distance or size in the usual one."""
MOST_TIMES_USUAL: Final = 8.0
LEAST_LIMIT: Final = 0.02
"""An average may always lie this share of the values' own size away: replicas that train well do."""
NEAR: Final = 1.25
"""A newcomer is near when its distance is at most this many times what the others would have from outside."""


def _usual_after(usual: float | None, sample: float) -> float:
    """Returns usual + 0.3 * (sample - usual), or the first sample. In a MovingAverage the second would weigh half."""
    return sample if usual is None else usual + USUAL_WEIGHT * (sample - usual)


@dataclass(frozen=True, slots=True)
class Drift:
    """How far averages usually lie from a stage's own weights, and so how far they may; `usual` is None before any."""

    usual: float | None = None

    def limit(self, size: float) -> float:
        """Returns how far an average may lie from the own values: max(8 * usual, 0.02 * size); `size` at first.

        size: root mean square of the own values.
        """
        return size if self.usual is None else max(MOST_TIMES_USUAL * self.usual, LEAST_LIMIT * size)

    def why_implausible(self, distance: float, size: float) -> str:
        """Returns why an average at `distance` from own values of size `size` is rejected; "" within `limit`."""
        limit = self.limit(size)
        why = f"the average lies {distance:.3g} from the own values, {limit:.3g} would be the most"
        return "" if distance <= limit else why

    def after_rejection(self, size: float) -> float | None:
        """Returns the distance to record after a rejection: min(limit(size), size). None before the first round.

        So replicas that have really drifted apart accept each other again after a few rounds.
        """
        return None if self.usual is None else min(self.limit(size), size)

    @staticmethod
    def after_acceptance(distance: float, median: float) -> float:
        """Returns the distance to record when an average was accepted: max(distance, min(median, 8 * distance)).

        median: the median of the members' distances, as the owner says it. It is asked because a member with most of
        the weight always lies near the average.
        """
        return max(distance, min(median, MOST_TIMES_USUAL * distance))

    def updated(self, distance: float) -> Drift:
        """Returns the drift after a round with the median recorded `distance`: usual + 0.3 * (distance - usual)."""
        return Drift(_usual_after(self.usual, distance))


@dataclass(frozen=True, slots=True)
class GradientSize:
    """How large a part's mean gradients usually are, and so how large they may be; `usual`: None before the first."""

    usual: float | None = None

    def limit(self, own: float) -> float:
        """Returns how large a mean gradient may be: 8 * max(usual, own); infinite when both are 0 or unknown."""
        largest = max(self.usual or 0.0, own)
        return MOST_TIMES_USUAL * largest if largest else math.inf

    def why_implausible(self, mean: float, own: float) -> str:
        """Returns why a mean gradient of size `mean` is rejected, `own` being the own share's; "" if it is not."""
        limit = self.limit(own)
        why = f"the mean gradient is {mean:.3g} large, {limit:.3g} would be the most"
        return "" if math.isfinite(mean) and mean <= limit else why

    def updated(self, mean: float, own: float) -> GradientSize:
        """Returns the usual size after an accepted mean; the first counts as min(mean, own), not at all if own is 0."""
        if self.usual is None:
            return GradientSize(min(mean, own) if own else None)
        return GradientSize(_usual_after(self.usual, mean))


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Whether this replica's values count in averages; after joining it has weight 0 until it is near the others.

    rounds: complete slice rounds that it has taken part in.
    """

    counts: bool = True
    rounds: int = 0

    def after_round(self, own: float, others: float, members: float, cover: int) -> Newcomer:
        """Returns the state after a slice round in which every part was averaged.

        It counts from now on if own <= NEAR * others * sqrt((members + 1) / (members - 1)), with fewer than 2 members,
        or after `cover` rounds. own: this replica's distance to the average. others: the median of the members'. Of
        replicas at distance s from their true mean, n are s sqrt(1 - 1/n) from their average, another s sqrt(1 + 1/n).
        """
        near = members < 2 or own <= NEAR * others * math.sqrt((members + 1) / (members - 1))
        return Newcomer(self.counts or near or self.rounds + 1 >= cover, self.rounds + 1)
