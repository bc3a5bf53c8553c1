"""The greatest rate, in microbatches per second, at which machines that hold given spans can train together. Pure.

It is the maximum flow of a pipeline: the greatest rate r for which shares x[p, s] exist with, for each stage s, the sum
of x over the holders of s at least r, and for each peer p, the sum of x[p, s] * work[s] over its span at most speed[p].
Since spans are intervals, serving the stages in order, each by the holders whose spans end first, finds such shares
whenever there are any (a bipartite graph that is convex: Glover, 1967). Bisection gives r.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agora_protocol.ids import Span

PRECISION = 1e-6  # the bisection ends when its two bounds differ by at most this fraction of the upper one


def flow_bound(holders: Iterable[tuple[Span, float]], work: Sequence[float]) -> float:
    """Returns the greatest rate, in microbatches per second, of holders given as (span, speed); 0 if a stage has none.

    The result is below the exact rate by at most the fraction PRECISION. speed: work that a machine does per second.
    work: of each stage, for one microbatch.
    """
    speeds: defaultdict[Span, float] = defaultdict(float)
    for span, speed in holders:
        speeds[span] += speed
    high = _rate_bound(speeds, work)
    low = 0.0
    if not can_serve(speeds, work, high * PRECISION):
        return 0.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if can_serve(speeds, work, middle) else (low, middle)
    return low


def can_serve(speeds: Mapping[Span, float], work: Sequence[float], rate: float) -> bool:
    """speeds: by span, work per second in sum of its holders. work: of each stage, for one microbatch."""
    unused = dict(speeds)
    by_end = sorted(unused, key=lambda span: (span.last, span.first))
    for stage, amount in enumerate(work):
        need = rate * amount
        for span in by_end:
            if need <= 0.0:
                break
            if stage in span and unused[span] > 0.0:
                used = min(need, unused[span])
                unused[span] -= used
                need -= used
        if need > 1e-12 * max(1.0, rate * amount):
            return False
    return True


def best_whole_placement(speeds: Sequence[float], work: Sequence[float]) -> float:
    """Longest processing time first, one stage a machine: optimal if all are equal, otherwise an approximation."""
    rates = [0.0] * len(work)
    for speed in sorted(speeds, reverse=True):
        weakest = min(range(len(work)), key=lambda stage: (rates[stage], -work[stage]))
        rates[weakest] += speed / work[weakest]
    return min(rates)


def _rate_bound(speeds: Mapping[Span, float], work: Sequence[float]) -> float:
    total = sum(speeds.values()) / sum(work)
    alone = (
        sum(speed for span, speed in speeds.items() if stage in span) / amount
        for stage, amount in enumerate(work)
        if amount > 0.0
    )
    return min(total, min(alone, default=total))
