"""Finds how few machines can hold a whole model, one span each, by memory alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from agora.planning.span_rates import Rates

# Maximum number of sets of machines that are extended in parallel. With few kinds of machines no set is left out; then
# the result is exact.
MAX_CANDIDATES: Final = 32

# How far a machine's memory goes: for each first stage, the stage after the last one that it can hold from there.
#
# Machines with the same reach are interchangeable: they are of one kind.
Reach: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Machines, by index, in the order of the adjacent spans that they can hold from stage 0 on. Immutable.

    ends[i]: the stage after the span of machine machines[i]; its span begins where the one before ends.
    """

    machines: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def reached(self) -> int:
        return self.ends[-1] if self.ends else 0


def fewest_holders(rates: Rates) -> Coverage:
    """Returns a coverage of all stages by the fewest machines found; if that is impossible, of the most stages found.

    rates: as span_rates returns them; a rate above 0 says that the span fits. A beam search: machines are added one by
    one to at most MAX_CANDIDATES sets. Machines with the same reach are interchangeable. Of two orders of the same
    machines only the one that reaches further matters, because a machine whose span begins later never has to end it
    earlier.
    """
    stages = rates.shape[-1] - 1
    reaches = [tuple(reach) for reach in ((rates > 0).sum(axis=2) + np.arange(stages + 1)).tolist()]
    candidates: dict[tuple[Reach, ...], Coverage] = {(): Coverage()}
    best = Coverage()
    while best.reached < stages and candidates:
        candidates = _extend_by_one(candidates, reaches)
        best = max([best, *candidates.values()], key=lambda coverage: coverage.reached)
    return best


def _extend_by_one(
    candidates: dict[tuple[Reach, ...], Coverage], reaches: Sequence[Reach]
) -> dict[tuple[Reach, ...], Coverage]:
    longer: dict[tuple[Reach, ...], Coverage] = {}
    for kinds, coverage in candidates.items():
        for reach, machine in _unused_kinds(coverage, reaches).items():
            end = reach[coverage.reached]
            key = tuple(sorted((*kinds, reach)))
            if end > coverage.reached and (key not in longer or end > longer[key].reached):
                longer[key] = Coverage((*coverage.machines, machine), (*coverage.ends, end))
    kept = sorted(longer.items(), key=lambda item: -item[1].reached)[:MAX_CANDIDATES]
    return dict(kept)


def _unused_kinds(coverage: Coverage, reaches: Sequence[Reach]) -> dict[Reach, int]:
    used = set(coverage.machines)
    unused: dict[Reach, int] = {}
    for machine, reach in enumerate(reaches):
        if machine not in used:
            unused.setdefault(reach, machine)
    return unused
