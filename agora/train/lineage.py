"""Digests of what a stage has agreed on with its replicas, by which they find out whether they are equal. Pure.

Knows: steps and checksums. Must not know: weights, replicas.

Weights cannot be compared: equal steps round differently on different hardware. But replicas that were equal, and have
taken in the same bytes ever since, have the same lineage, and others do not. Of local steps only the slices count.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

SEEDED: Final = 1
"""The lineage of the weights that follow from the manifest's seed. 0 says that a lineage is not known."""
KEPT: Final = 32
"""Steps of which lineages are kept: replicas that are not at the same step compare an earlier one."""


def after_step(lineages: Mapping[int, int], step: int, checksum: int, last: int | None = None) -> dict[int, int]:
    """Returns the lineages by steps, after the mean of step `step` (1 the first), of this checksum, was taken in.

    Of step n it is the CRC-32 of the lineage of the step `last` agreed on before, n - 1 by default, n and the checksum;
    unknown if that lineage is.
    """
    before = lineages.get(step - 1 if last is None else last, 0)
    after = zlib.crc32(b"".join(number.to_bytes(8, "big") for number in (before, step, checksum))) or SEEDED
    kept = {past: lineage for past, lineage in lineages.items() if step - KEPT < past < step}
    return {**kept, step: after if before else 0}
