"""Finds how few machines can hold a whole model, one span each, by memory alone. Pure.

Knows: which spans fit which machine. Must not know: speeds, groups, replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from agora.plan.span_rates import Rates

MAX_CANDIDATES: Final = 32
"""Maximum number of sets of machines that are extended in parallel. With few kinds of machines these are all sets; then
the result is exact."""

Reach: TypeAlias = tuple[int, ...]
"""How far a machine's memory goes: for each first stage, the stage after the last one that it can hold from there."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Machines, by index, in the order of the adjacent spans that they can hold from stage 0 on. Immutable.

    ends[i]: the stage after the span of machine machines[i]; its span begins where the one before ends.
    """

    machines: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def reached(self) -> int:
        """How many stages are held, from stage 0 on."""
        return self.ends[-1] if self.ends else 0


def fewest_holders(rates: Rates) -> Coverage:
    """Returns a coverage of all stages by the fewest machines found; if that is impossible, of the most stages found.

    rates: as span_rates returns them; a rate above 0 says that the span fits. Machines with the same reach are
    exchangeable. Of two orders of the same machines only the one that reaches further matters, because a machine whose
    span begins later never has to end it earlier.
    """
    stages = rates.shape[-1] - 1
    reaches = [tuple(reach) for reach in ((rates > 0).sum(axis=2) + np.arange(stages + 1)).tolist()]
    candidates: dict[tuple[Reach, ...], Coverage] = {(): Coverage()}
    best = Coverage()
    while best.reached < stages and candidates:
        candidates = _extend_by_one(candidates, reaches)
        best = max([best, *candidates.values()], key=lambda found: found.reached)
    return best


def _extend_by_one(
    candidates: dict[tuple[Reach, ...], Coverage], reaches: Sequence[Reach]
) -> dict[tuple[Reach, ...], Coverage]:
    """Returns candidates of one more machine: for each set of kinds the one that reaches furthest.

    Keys are the sorted reaches of the machines. Of more than MAX_CANDIDATES, those that reach furthest are returned.
    """
    longer: dict[tuple[Reach, ...], Coverage] = {}
    for kinds, found in candidates.items():
        for reach, machine in _unused_kinds(found, reaches).items():
            end = reach[found.reached]
            key = tuple(sorted((*kinds, reach)))
            if end > found.reached and (key not in longer or end > longer[key].reached):
                longer[key] = Coverage((*found.machines, machine), (*found.ends, end))
    kept = sorted(longer.items(), key=lambda item: -item[1].reached)[:MAX_CANDIDATES]
    return dict(kept)


def _unused_kinds(found: Coverage, reaches: Sequence[Reach]) -> dict[Reach, int]:
    """Returns, for each kind of machine by its reach, the index of the first machine that `found` does not use yet."""
    used = set(found.machines)
    unused: dict[Reach, int] = {}
    for machine, reach in enumerate(reaches):
        if machine not in used:
            unused.setdefault(reach, machine)
    return unused
