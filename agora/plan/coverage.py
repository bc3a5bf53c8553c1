"""How few machines can hold a whole model, one span each: what memory alone allows. Pure.

Knows: which spans fit which machine. Must not know: speeds, groups, replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from agora.plan.span_rates import Rates

MOST_CANDIDATES: Final = 32
"""So many sets of machines are followed at once. With few enough kinds of machines that is all sets, and exact."""

Reach: TypeAlias = tuple[int, ...]
"""For each first stage, the stage after the last one that a machine can hold from there; the first stage if none."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Machines in the order of the spans that they can hold, and the stage after the last one held.

    ends[i]: the stage after the span of the machine with index machines[i]; its span begins where the one before ends.
    """

    machines: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def reached(self) -> int:
        """Returns how many stages, from the first on, are held."""
        return self.ends[-1] if self.ends else 0


def fewest_holders(rates: Rates) -> Coverage:
    """Returns a coverage of all stages by as few machines as found, or of as many stages as all machines can hold.

    rates: of `span_rates`; a rate above 0 says that the span fits. Machines with the same reach are exchangeable, and
    of two orders of the same machines only the one that reaches further matters, as whoever begins later also ends
    later or at the same stage.
    """
    stages = rates.shape[-1] - 1
    reaches = [tuple(reach) for reach in ((rates > 0).sum(axis=2) + np.arange(stages + 1)).tolist()]
    candidates: dict[tuple[Reach, ...], Coverage] = {(): Coverage()}
    best = Coverage()
    while best.reached < stages and candidates:
        candidates = _longer(candidates, reaches)
        best = max([best, *candidates.values()], key=lambda found: found.reached)
    return best


def _longer(
    candidates: dict[tuple[Reach, ...], Coverage], reaches: Sequence[Reach]
) -> dict[tuple[Reach, ...], Coverage]:
    """Returns the candidates with one more machine, the furthest of each set of kinds, at most MOST_CANDIDATES."""
    longer: dict[tuple[Reach, ...], Coverage] = {}
    for kinds, found in candidates.items():
        for reach, machine in _unused_kinds(found, reaches).items():
            end = reach[found.reached]
            key = tuple(sorted((*kinds, reach)))
            if end > found.reached and (key not in longer or end > longer[key].reached):
                longer[key] = Coverage((*found.machines, machine), (*found.ends, end))
    kept = sorted(longer.items(), key=lambda item: -item[1].reached)[:MOST_CANDIDATES]
    return dict(kept)


def _unused_kinds(found: Coverage, reaches: Sequence[Reach]) -> dict[Reach, int]:
    """Returns the first machine of each kind that `found` does not use yet."""
    used = set(found.machines)
    unused: dict[Reach, int] = {}
    for machine, reach in enumerate(reaches):
        if machine not in used:
            unused.setdefault(reach, machine)
    return unused
