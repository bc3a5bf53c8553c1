"""Held-out losses over steps: how many steps a run needs to a target, and when it may end.

Knows: numbers. Must not know: what was trained, links, time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Curve = Sequence[tuple[int, float]]
"""(step, held-out loss), by step."""

NEIGHBOURS: Final = 2


def smooth(curve: Curve) -> list[tuple[int, float]]:
    """Each loss replaced by the mean of up to five around it, as many before as after; the last ones stay out of it."""
    losses = [loss for _, loss in curve]
    last = len(curve) - NEIGHBOURS
    return [
        (curve[at][0], statistics.fmean(losses[at - reach : at + reach + 1]))
        for at in range(max(last, min(1, len(curve))))
        for reach in [min(NEIGHBOURS, at)]
    ]


def final(curve: Curve) -> float:
    """The loss at the end: of the last smoothed point. NaN, which nothing reaches, where none was ever finite."""
    return smooth(curve)[-1][1] if curve else math.nan


def until(curve: Curve, steps: int) -> list[tuple[int, float]]:
    """The part of it that a run of `steps` would have."""
    return [(step, loss) for step, loss in curve if step <= steps]


def steps_to(curve: Curve, target: float) -> float | None:
    """The first step at which the smoothed loss is as low, between two points by a straight line; None if never."""
    before: tuple[int, float] | None = None
    for step, loss in smooth(curve):
        if loss <= target:
            if before is None:
                return float(step)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = step, loss
    return None


@dataclass(frozen=True, slots=True)
class Length:
    """At most so many steps, of which `every`-th are evaluated; from step `least` on, fewer if the loss is `enough`."""

    most: int
    every: int
    least: int = 0
    enough: float | None = None

    def ends(self, curve: Curve) -> bool:
        """Whether this is all that was to be known."""
        return self.enough is not None and curve[-1][0] >= self.least and final(curve) <= self.enough
