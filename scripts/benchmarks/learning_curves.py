"""Held-out losses over tokens and seconds: the loss at a number of tokens, the time to a loss. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Point(NamedTuple):
    """The held-out loss after so many tokens and seconds of training."""

    tokens: int
    seconds: float
    loss: float


def loss_at(curve: Sequence[Point], tokens: float) -> float:
    """Returns the loss after so many tokens, on a straight line between two points; beyond the ends, that of the end.

    curve: not empty, by rising tokens.
    """
    for before, after in pairwise(curve):
        if tokens <= after.tokens:
            share = (tokens - before.tokens) / (after.tokens - before.tokens)
            return before.loss + max(share, 0.0) * (after.loss - before.loss)
    return curve[-1].loss


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """Returns the time at which the loss is first at most `loss`, on a straight line between points; None if never."""
    if curve and curve[0].loss <= loss:
        return curve[0].seconds
    for before, after in pairwise(curve):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def times_to_common_loss(ours: Sequence[Point], theirs: Sequence[Point]) -> tuple[float, float]:
    """Returns the times of two runs to the lowest loss that both have reached: the higher of their lowest losses."""
    common = max(min(point.loss for point in curve) for curve in (ours, theirs))
    times = seconds_to(ours, common), seconds_to(theirs, common)
    assert times[0] is not None and times[1] is not None  # each curve has a point at most as high
    return times[0], times[1]
