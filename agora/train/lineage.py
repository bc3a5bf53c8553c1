"""Digests of what a stage has stepped along, by which replicas find out whether they are still equal. Pure.

Knows: steps and checksums. Must not know: weights, replicas.

Weights cannot be compared: equal steps round differently on different hardware. But replicas that were equal, and have
stepped along the same bytes ever since, have the same lineage, and others do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

SEEDED: Final = 1
"""The lineage of the weights that follow from the manifest's seed. 0 says that a lineage is not known."""
KEPT: Final = 32
"""Steps of which lineages are kept: replicas that are not at the same step compare an earlier one."""


def after_step(lineages: Mapping[int, int], step: int, checksum: int) -> dict[int, int]:
    """Returns the lineages by steps taken, after step number `step` (1 the first) along a gradient of this checksum.

    Of step n it is the CRC-32 of the lineage of n - 1, n and the checksum; unknown if that of n - 1 is.
    """
    before = lineages.get(step - 1, 0)
    after = zlib.crc32(b"".join(number.to_bytes(8, "big") for number in (before, step, checksum))) or SEEDED
    kept = {past: lineage for past, lineage in lineages.items() if step - KEPT < past < step}
    return {**kept, step: after if before else 0}
