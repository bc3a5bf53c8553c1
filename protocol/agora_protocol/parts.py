"""How a stage's weights are cut into fragments (slices on the wire), and a gradient or a fragment into shards."""

from __future__ import annotations

import math
from typing import Final

from agora_protocol.limits import MAX_PART_ELEMENTS, MAX_SMALL_PARTS, PART_ELEMENTS

# Minimum number of fragments: as one fragment inner steps would send as much as all-reduces, and learn less.
MIN_FRAGMENTS: Final = 2


def fragment_count(fraction: float) -> int:
    """Returns how many fragments a stage has if each holds `fraction` of its weights: ceil(1 / fraction)."""
    return math.ceil(round(1.0 / fraction, 9))


def shard_elements(numel: int) -> int:
    """Returns the number of elements of each shard of a vector of `numel` elements; the last one may be shorter.

    That is PART_ELEMENTS, doubled until there are at most MAX_SMALL_PARTS shards, but not beyond MAX_PART_ELEMENTS: a
    call costs time whatever its size, and many small shards spread a small vector over all reducers.
    """
    size = PART_ELEMENTS
    while size < MAX_PART_ELEMENTS and numel > MAX_SMALL_PARTS * size:
        size *= 2
    return size
