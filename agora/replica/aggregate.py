"""Reduces the contributions to a part to one mean: weighted, or by centered clipping. Arguments are never changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from agora_protocol.messages import Averaged
from torch import Tensor

from agora.codec import is_all_finite
from agora.replica.part_codec import EncodedPart

Aggregation = Literal["mean", "clip"]
CLIP_ROUNDS: Final = 3  # enough, since clipping begins near, at the owner's own value: Karimireddy et al., ICML 2021
MIN_NORM, MAX_NORM = 1e-15, 1e15
# A contribution may be this many times as long as the lower median of all; a longer one is shortened to that.
MAX_TIMES_LONGER: Final = 2.0
# Minimum number of contributions for one to be called too long: of two, either could be right.
MIN_TO_COMPARE: Final = 3


@dataclass(frozen=True, slots=True)
class PartMean:
    """The mean of one part of a round."""

    values: Tensor  # float32 [n]
    # How many members contributed, and the tokens behind the mean; the part's owner sends it with the mean.
    message: Averaged
    encoded: EncodedPart | None = None  # the tensors that `values` were decoded from; None before the mean is encoded


def aggregate(
    contributions: Sequence[Tensor],
    weights: Sequence[float],
    aggregation: Aggregation,
    *,
    center: Tensor | None,
    cap: bool,
) -> PartMean | None:
    """Returns the weighted mean, or the centered clip, of `contributions`, float32 [n] each and finite.

    aggregation: "mean" or "clip". A contribution of weight 0 adds no values, but the result's message counts it as a
    contributor. cap: whether to lower the largest weights first, see cap_weights, and to scale contributions down that
    are far too long, see shorten; the message's weight is the sum before that. center: the start value of a clip; None
    means the median of each coordinate. The result is not encoded; it is None when every weight is 0 or the mean is not
    finite.
    """
    weighted = [(values, weight) for values, weight in zip(contributions, weights, strict=True) if weight > 0]
    if not weighted:
        return None
    values = [value for value, _ in weighted]
    tokens = [weight for _, weight in weighted]
    values = shorten(values, tokens) if cap else values
    limited = cap_weights(tokens) if cap else tokens
    fractions = [weight / sum(limited) for weight in limited]
    mean = _mean(values, fractions) if aggregation == "mean" else _clip(values, fractions, center)
    if not is_all_finite(mean):
        return None
    return PartMean(mean, Averaged(len(values), len(contributions), sum(tokens), counted=True, wire="float32"))


def cap_weights(weights: Sequence[float]) -> list[float]:
    """Returns the n `weights`, in the same order, with the largest lowered until none exceeds 2/n of their new sum.

    All must be above 0, and there must be at least one.
    """
    ordered = sorted(weights, reverse=True)
    for lowered, largest_kept in enumerate(ordered):
        cap = 2.0 * sum(ordered[lowered:]) / (len(ordered) - 2 * lowered)
        if largest_kept <= cap:
            break
    return [min(weight, cap) for weight in weights]


def shorten(values: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    """Returns the contributions `values`, float32 [n] each, with the ones that are too long scaled down to their limit.

    weights: tokens of each contribution. The limit of the Euclidean length x of a contribution over w tokens is
    MAX_TIMES_LONGER * max(median(x), median(x sqrt(w)) / sqrt(w)), with lower medians over all contributions: one over
    fewer tokens holds more noise, and so is longer. Without this limit one contribution of 1e30 makes the mean
    implausible for every replica, and all of them lose the step. A contribution is returned unchanged if its length is
    infinite or its limit 0; all are returned unchanged if there are fewer than MIN_TO_COMPARE.
    """
    if len(values) < MIN_TO_COMPARE:
        return list(values)
    lengths = [_norm(value) for value in values]
    median_length = statistics.median_low(lengths)
    median_of_one_token = statistics.median_low([x * math.sqrt(w) for x, w in zip(lengths, weights, strict=True)])
    limits = [MAX_TIMES_LONGER * max(median_length, median_of_one_token / math.sqrt(weight)) for weight in weights]
    return [
        value * (limit / length) if 0.0 < limit < length < math.inf else value
        for value, length, limit in zip(values, lengths, limits, strict=True)
    ]


def magnitude(values: Tensor) -> float:
    """Returns the root mean square of `values`, 0 if empty.

    All elements count: with a sample of them, a peer that knows the sample could send anything in the others.
    """
    return _norm(values) / math.sqrt(max(1, len(values)))


def _norm(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    return norm if MIN_NORM < norm < MAX_NORM else float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _mean(values: Sequence[Tensor], fractions: Sequence[float]) -> Tensor:
    mean = values[0]
    for value, fraction in zip(values[1:], fractions[1:], strict=True):
        mean = torch.add(mean, value - values[0], alpha=fraction)
    return mean


def _clip(values: Sequence[Tensor], fractions: Sequence[float], center: Tensor | None) -> Tensor:
    # CLIP_ROUNDS times v += sum of fraction * (x - v) * min(1, tau / |x - v|). fractions: of the weights, with sum 1. v
    # begins at `center`, or, if that is None, at the lower median of each coordinate. tau, computed each time again, is
    # the lower median of the |x - v| that are not 0, so that half of the contributors cannot choose it.
    clipped = (torch.stack(list(values)).median(dim=0).values if center is None else center).clone()
    for _ in range(CLIP_ROUNDS):
        distances = [_norm(value - clipped) for value in values]
        nonzero = [distance for distance in distances if distance > 0]
        if not nonzero:
            break
        tau = statistics.median_low(nonzero)
        change = torch.zeros_like(clipped)
        for value, fraction, distance in zip(values, fractions, distances, strict=True):
            if distance > 0:
                change.add_(value - clipped, alpha=fraction * min(1.0, tau / distance))
        clipped += change
    return clipped
