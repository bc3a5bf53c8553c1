"""How many microbatches an origin keeps in flight: pure, no clock, no network.

Knows: two measured times and two bounds. Must not know: who measured them.

By Little's law a pipeline that finishes one microbatch every `period` holds x = round trip / period of them when
nothing ever waits. Exactly x starves the slowest stage at every hiccup, so a safety of 4 * sqrt(x) is added, the
square-root staffing rule (Halfin and Whitt, "Heavy-traffic limits for queues with many exponential servers", 1981): a
long pipeline needs relatively less of it than a short one. `round_trip_s` must be free of queueing (sums of compute
and transfer times, not observed round trips): more credit makes longer queues, and an origin that counted them would
ask for still more. So each link is known by its shortest waits, as BBR knows a path (Cardwell et al., "BBR:
Congestion-based congestion control", 2016). While the pipeline is not yet full the period is the round trip divided by
the credit, so the rule raises it by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SAFETY = 4.0
PER_STAGE = 2
"""At the start, and at least: for each stage one microbatch that is computed and one that travels."""
KEPT = 64


@dataclass(frozen=True, slots=True)
class Credit:
    """At most `limit` microbatches of this origin are in flight, for `reason`."""

    limit: int
    reason: str


def in_flight(round_trip_s: float | None, period_s: float | None, stages: int, ceiling: int) -> Credit:
    """How many microbatches an origin may have in flight, at most `ceiling` (its memory)."""
    ceiling = max(1, ceiling)
    least = min(PER_STAGE * stages, ceiling)
    if not round_trip_s or not period_s or round_trip_s <= 0 or period_s <= 0:
        return Credit(least, f"{least}: {PER_STAGE} per stage until the round trip is measured")
    load = round_trip_s / period_s
    wanted = math.ceil(min(load + SAFETY * math.sqrt(load), 1e9))
    limit = max(least, min(wanted, ceiling))
    why = (
        f"round trip {round_trip_s:.3f} s / period {period_s:.3f} s = {load:.1f}, and {SAFETY:g} times its square root"
    )
    return Credit(limit, f"{limit}: {why}" + (f", bounded by {ceiling}" if wanted > ceiling else ""))


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean time between two completions at one origin; gaps of a stall or a pause do not count as pace."""

    period_s: float | None = None
    last: float | None = None
    samples: int = 0

    def completed(self, now: float) -> Pace:
        """After a completion at `now`."""
        if self.last is None:
            return Pace(self.period_s, now, self.samples)
        gap = now - self.last
        if self.period_s is None:
            return Pace(gap, now, 1)
        gap = min(gap, 10.0 * self.period_s + 1e-6)
        weight = max(0.03, 1.0 / (self.samples + 1))
        return Pace(self.period_s + weight * (gap - self.period_s), now, self.samples + 1)

    def interrupted(self) -> Pace:
        """After a pause, a stall or a flush: the next gap says nothing about the pipeline."""
        return Pace(self.period_s, None, self.samples)


@dataclass(frozen=True, slots=True)
class Least:
    """The least of the last `KEPT` to twice as many samples; infinite before the first."""

    value: float = math.inf
    recent: float = math.inf
    samples: int = 0

    def seen(self, sample: float) -> Least:
        """After one more sample. What is older than the last KEPT is forgotten with every KEPT-th."""
        recent = min(self.recent, sample)
        if (self.samples + 1) % KEPT == 0:
            return Least(recent, math.inf, self.samples + 1)
        return Least(min(self.value, sample), recent, self.samples + 1)


def step_share(target_tokens: int, tokens_per_microbatch: int, rank: int, origins: int) -> int:
    """How many microbatches of one step the `rank`-th of `origins` origins opens; the shares sum to the whole step."""
    total = math.ceil(target_tokens / max(1, tokens_per_microbatch))
    base, rest = divmod(total, max(1, origins))
    return base + (1 if rank < rest else 0)
