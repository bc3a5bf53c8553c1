"""Held-out losses over steps: how many steps a run needs to a target, and when it may end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Curve = Sequence[tuple[int, float]]  # (step, held-out loss), by step

NEIGHBOURS: Final = 2


def smooth(curve: Curve) -> list[tuple[int, float]]:
    """Returns the curve with each loss replaced by the mean of up to five around it, without the last two."""
    losses = [loss for _, loss in curve]
    last = len(curve) - NEIGHBOURS
    return [
        (curve[at][0], statistics.fmean(losses[at - reach : at + reach + 1]))
        for at in range(max(last, min(1, len(curve))))
        for reach in [min(NEIGHBOURS, at)]
    ]


def final(curve: Curve) -> float:
    """Returns the loss of the last smoothed point; NaN for a curve without points."""
    return smooth(curve)[-1][1] if curve else math.nan


def until(curve: Curve, steps: int) -> list[tuple[int, float]]:
    """Returns the part of the curve up to a step."""
    return [(step, loss) for step, loss in curve if step <= steps]


def steps_to(curve: Curve, target: float) -> float | None:
    """Returns the first step whose smoothed loss is at most `target`, interpolated; None when there is none."""
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

    def must_end(self, curve: Curve) -> bool:
        """Returns whether a run with this curve ends now."""
        return self.enough is not None and curve[-1][0] >= self.least and final(curve) <= self.enough
