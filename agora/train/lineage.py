"""Computes lineages: digests of all means that a stage has applied, equal at equal replicas. Pure.

Knows: steps and checksums. Must not know: weights, replicas.

Weights cannot be compared, because equal steps round differently on different hardware. But replicas that were equal
and have applied the same means since then have the same lineage, and others do not. Of local steps only the slices'
means count.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

INITIAL_LINEAGE: Final = 1
"""The lineage of the initial weights. 0 stands for an unknown lineage."""
KEPT_STEPS: Final = 32
"""The lineages of the last so many steps are kept: replicas that are not at the same step compare an earlier one."""


def with_step(lineages: Mapping[int, int], step: int, checksum: int, last: int | None = None) -> dict[int, int]:
    """Returns the lineages by step, with that of `step` (1 the first), whose mean has this checksum.

    lineage(step) = CRC-32(lineage(last), step, checksum); 0, unknown, if lineage(last) is. last: the agreed step before
    this one, `step` - 1 by default.
    """
    parent = lineages.get(step - 1 if last is None else last, 0)
    child = zlib.crc32(b"".join(number.to_bytes(8, "big") for number in (parent, step, checksum))) or INITIAL_LINEAGE
    kept = {past: lineage for past, lineage in lineages.items() if step - KEPT_STEPS < past < step}
    return {**kept, step: child if parent else 0}
