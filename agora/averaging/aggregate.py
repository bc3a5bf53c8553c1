"""Averages the contributions to a part: a weighted mean, or a centered clip. Pure functions.

Knows: tensors and weights. Must not know: who contributed, or when.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from agora_protocol.messages import Averaged
from torch import Tensor

from agora.averaging.wire import Encoded
from agora.codec import all_finite

Aggregation = Literal["mean", "clip"]
CLIP_ROUNDS: Final = 3  # enough, because the owner's own value, where it begins, is near: Karimireddy et al., ICML 2021
LEAST_NORM, MOST_NORM = 1e-15, 1e15


@dataclass(frozen=True, slots=True)
class Average:
    """The average of a part, float32 [n], and the owner's message about it: counts and weight.

    wire: the bytes that `values` were decoded from; None before it is encoded.
    """

    values: Tensor
    message: Averaged
    wire: Encoded | None = None


def aggregate(
    contributions: Sequence[Tensor],
    weights: Sequence[float],
    aggregation: Aggregation,
    *,
    center: Tensor | None,
    cap: bool,
) -> Average | None:
    """Returns the average of `contributions`, float32 [n] each, finite, by `aggregation`: a mean or a centered clip.

    Those of weight 0 are only counted as present. cap: whether to lower the weights first, see `capped`. center: where
    a clip begins; None for the median of each coordinate. Returns None when every weight is 0, or the average is not
    finite.
    """
    counted = [(values, weight) for values, weight in zip(contributions, weights, strict=True) if weight > 0]
    if not counted:
        return None
    values = [value for value, _ in counted]
    plain = [weight for _, weight in counted]
    used = capped(plain) if cap else plain
    shares = [weight / sum(used) for weight in used]
    average = _mean(values, shares) if aggregation == "mean" else _clip(values, shares, center)
    if not all_finite(average):
        return None
    return Average(average, Averaged(len(values), len(contributions), sum(plain), counted=True, wire="float32"))


def capped(weights: Sequence[float]) -> list[float]:
    """Returns the weights, all above 0, with the largest lowered until none is more than 2/n of the returned sum."""
    ordered = sorted(weights, reverse=True)
    for lowered, largest_kept in enumerate(ordered):
        most = 2.0 * sum(ordered[lowered:]) / (len(ordered) - 2 * lowered)
        if largest_kept <= most:
            break
    return [min(weight, most) for weight in weights]


def magnitude(values: Tensor) -> float:
    """Returns the root mean square over all elements: a peer judged by a known sample could cheat on the others."""
    return _norm(values) / math.sqrt(max(1, len(values)))


def _norm(values: Tensor) -> float:
    """Returns the Euclidean norm: computed in float32, and again in float64 if not within LEAST_NORM to MOST_NORM."""
    norm = float(torch.linalg.vector_norm(values))
    return norm if LEAST_NORM < norm < MOST_NORM else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Returns the weighted mean, as x0 + sum of share * (x - x0): the mean of equal values is exactly that value."""
    average = values[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        average = torch.add(average, value - values[0], alpha=share)
    return average


def _clip(values: Sequence[Tensor], shares: Sequence[float], center: Tensor | None) -> Tensor:
    """Returns the centered clip: CLIP_ROUNDS times v += sum of share * (x - v) * min(1, tau / |x - v|), from `center`.

    Without a center v begins as the median of each coordinate. tau: the median of the |x - v| that are not 0; of two
    middle ones the lower, so that half of the others cannot choose it.
    """
    average = (torch.stack(list(values)).median(dim=0).values if center is None else center).clone()
    for _ in range(CLIP_ROUNDS):
        distances = [_norm(value - average) for value in values]
        apart = [distance for distance in distances if distance > 0]
        if not apart:
            break
        tau = statistics.median_low(apart)
        moved = torch.zeros_like(average)
        for value, share, distance in zip(values, shares, distances, strict=True):
            if distance > 0:
                moved.add_(value - average, alpha=share * min(1.0, tau / distance))
        average += moved
    return average
