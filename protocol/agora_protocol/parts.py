"""How a gradient or a slice is cut into parts: one owner averages one part in one call.

Knows: numbers of elements. Must not know: owners, number formats.
"""

from __future__ import annotations

from agora_protocol.limits import MAX_PART_ELEMENTS, MAX_SMALL_PARTS, PART_ELEMENTS


def part_elements(numel: int) -> int:
    """Returns the number of elements of each part of a vector of `numel` elements; the last part may be shorter.

    That is PART_ELEMENTS, doubled until there are at most MAX_SMALL_PARTS parts, but not beyond MAX_PART_ELEMENTS: a
    call costs time whatever its size, and many small parts spread a small vector over all owners.
    """
    size = PART_ELEMENTS
    while size < MAX_PART_ELEMENTS and numel > MAX_SMALL_PARTS * size:
        size *= 2
    return size
