"""Computes lineages: digests of all means that a stage has applied, equal at equal replicas. Pure.

Weights cannot be compared, because equal steps round differently on different hardware. But replicas that were equal
and have applied the same means since then have the same lineage, and other replicas do not. Local steps do not enter a
lineage; the means of slices do.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

INITIAL_LINEAGE: Final = 1  # the lineage of the initial weights. 0 stands for an unknown lineage.
# How many last steps' lineages are kept: replicas at different steps compare their lineages of an earlier one.
KEPT_STEPS: Final = 32


def with_step(lineages: Mapping[int, int], step: int, checksum: int, last: int | None = None) -> dict[int, int]:
    """Returns a copy of `lineages` (step -> lineage) with that of `step` added; only the last KEPT_STEPS steps remain.

    step: 1 is the first. checksum: of the step's mean. last: the agreed step before this one, by default step - 1.
    lineage(step) = CRC-32(lineage(last), step, checksum), or 0 (unknown) if lineage(last) is unknown.
    If that CRC is 0, the lineage is INITIAL_LINEAGE instead.
    """
    parent = lineages.get(step - 1 if last is None else last, 0)
    child = zlib.crc32(b"".join(number.to_bytes(8, "big") for number in (parent, step, checksum))) or INITIAL_LINEAGE
    kept = {past: lineage for past, lineage in lineages.items() if step - KEPT_STEPS < past < step}
    return {**kept, step: child if parent else 0}


def lineage_of_weights(weights: memoryview) -> int:
    """Returns a lineage that follows from a replica's own weights alone: after local steps no two replicas share it."""
    return zlib.crc32(weights) or INITIAL_LINEAGE
