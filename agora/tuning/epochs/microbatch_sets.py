"""Sets of the microbatches of one epoch: as bit masks of blocks in memory, as ranges for messages and files.

Deterministic: a MicrobatchSet changes only itself, and only by the calls to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

MAX_BLOCKS: Final = 512  # maximum number of blocks in an epoch

# A range of consecutive microbatches: the number of the first one, and how many there are.
NumberRange = tuple[int, int]


@dataclass(frozen=True)
class BlockLayout:
    """How the `count` microbatches of an epoch, numbered from 0, are cut into at most MAX_BLOCKS blocks of equal size.

    count: at least 1. The last block may be shorter. The mask of a block is an integer with one bit for each of the
    block's microbatches; the lowest bit stands for the first one.
    """

    count: int

    @cached_property
    def size(self) -> int:
        """How many microbatches a block has; the last block may have fewer."""
        return -(-self.count // MAX_BLOCKS)

    @cached_property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.count // self.size)

    def full_mask(self, block: int) -> int:
        """Returns the mask of a block with all of its microbatches: every bit set."""
        return (1 << min(self.size, self.count - block * self.size)) - 1


class MicrobatchSet:
    """A mutable set of the microbatches of one epoch, as bit masks of blocks (see BlockLayout).

    masks: block -> mask of its microbatches in the set; a block without any is absent.
    """

    __slots__ = ("layout", "masks")

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.masks: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        block, bit = divmod(number, self.layout.size)
        return bool(self.mask(block) >> bit & 1)

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask in self.masks.values())

    def mask(self, block: int) -> int:
        """Returns the mask of a block's microbatches that are in the set; 0 if there are none."""
        return self.masks.get(block, 0)

    def add(self, number: int) -> None:
        """Adds one microbatch; does not check that its number is within the epoch."""
        block, bit = divmod(number, self.layout.size)
        self.masks[block] = self.mask(block) | 1 << bit

    def add_range(self, numbers: NumberRange) -> None:
        """Adds the consecutive microbatches of a range (first, length).

        Raises ValueError if some are outside of the epoch, or the length is below 1; nothing is added then.
        """
        number, length = numbers
        if number < 0 or length < 1 or number + length > self.layout.count:
            raise ValueError(f"the range {numbers} is not within {self.layout.count} microbatches")
        while length:
            block, bit = divmod(number, self.layout.size)
            part = min(length, self.layout.size - bit)
            self.masks[block] = self.mask(block) | ((1 << part) - 1) << bit
            number, length = number + part, length - part

    def add_block(self, block: int) -> None:
        """Adds all microbatches of a block."""
        self.masks[block] = self.layout.full_mask(block)

    def update(self, other: MicrobatchSet) -> None:
        """Adds all microbatches of another set of the same layout."""
        for block, mask in other.masks.items():
            self.masks[block] = self.mask(block) | mask

    def discard(self, number: int) -> None:
        """Removes one microbatch; does nothing if it is not in the set."""
        block, bit = divmod(number, self.layout.size)
        if mask := self.mask(block) & ~(1 << bit):
            self.masks[block] = mask
        else:
            self.masks.pop(block, None)

    def is_full(self, block: int) -> bool:
        """Returns whether all microbatches of a block are in the set."""
        return self.mask(block) == self.layout.full_mask(block)

    def is_complete(self) -> bool:
        """Returns whether all microbatches of the epoch are in the set."""
        return len(self.masks) == self.layout.blocks and len(self) == self.layout.count

    def ranges(self, *, full_blocks: bool) -> Iterator[NumberRange]:
        """Yields the set as ascending ranges (first, length), each as long as can be.

        full_blocks: False leaves out the blocks whose microbatches are all in the set; no range reaches across them.
        """
        start = end = 0
        for block in sorted(self.masks):
            if self.is_full(block) and not full_blocks:
                continue
            for bit, length in _bit_ranges(self.masks[block]):
                first = block * self.layout.size + bit
                if first != end:
                    if end > start:
                        yield start, end - start
                    start = first
                end = first + length
        if end > start:
            yield start, end - start


def lowest_bit(mask: int) -> int:
    """Returns the position, from 0, of the lowest set bit of a mask that is not 0."""
    return (mask & -mask).bit_length() - 1


def position_of_set_bit(mask: int, index: int) -> int:
    """Returns the position of a mask's set bit that has `index` set bits below it; positions count all bits from 0.

    Raises IndexError if the mask has too few set bits.
    """
    for bit, length in _bit_ranges(mask):
        if index < length:
            return bit + index
        index -= length
    raise IndexError(index)


def _bit_ranges(mask: int) -> Iterator[NumberRange]:
    start = 0
    while mask:
        skipped = lowest_bit(mask)
        mask >>= skipped
        length = lowest_bit(~mask)
        yield start + skipped, length
        mask >>= length
        start += skipped + length
