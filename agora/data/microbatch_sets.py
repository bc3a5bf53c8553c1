"""Sets of the microbatches of one epoch: as bit masks of blocks in memory, as runs for messages and files. Pure.

Knows: numbers, bits. Must not know: who takes a microbatch, what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

MAX_BLOCKS: Final = 512

Run = tuple[int, int]
"""Consecutive microbatches: the number of the first one, and how many there are."""


@dataclass(frozen=True)
class BlockLayout:
    """How the `count` microbatches of an epoch, numbered from 0, are cut into at most MAX_BLOCKS blocks of one size.

    The last block may be shorter. A block's mask has a bit for each of its microbatches, the first one the lowest.
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
    """A mutable set of microbatches of one epoch. masks: block -> its bits; blocks without any are absent."""

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
        """Returns the bits of a block; 0 if none of its microbatches is in the set."""
        return self.masks.get(block, 0)

    def add(self, number: int) -> None:
        """Adds one microbatch."""
        block, bit = divmod(number, self.layout.size)
        self.masks[block] = self.mask(block) | 1 << bit

    def add_run(self, run: Run) -> None:
        """Adds consecutive microbatches.

        Raises ValueError when some are outside of the epoch; nothing is added then.
        """
        number, length = run
        if number < 0 or length < 1 or number + length > self.layout.count:
            raise ValueError(f"the run {run} is not within {self.layout.count} microbatches")
        while length:
            block, bit = divmod(number, self.layout.size)
            part = min(length, self.layout.size - bit)
            self.masks[block] = self.mask(block) | ((1 << part) - 1) << bit
            number, length = number + part, length - part

    def add_block(self, block: int) -> None:
        """Adds all microbatches of a block."""
        self.masks[block] = self.layout.full_mask(block)

    def update(self, other: MicrobatchSet) -> None:
        """Adds all microbatches of another set."""
        for block, mask in other.masks.items():
            self.masks[block] = self.mask(block) | mask

    def discard(self, number: int) -> None:
        """Removes one microbatch, if it is there."""
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

    def runs(self, *, full_blocks: bool) -> Iterator[Run]:
        """Yields the set as ascending runs (first, length), each as long as can be.

        full_blocks: whether to include the blocks all of whose microbatches are in the set.
        """
        start = end = 0
        for block in sorted(self.masks):
            if self.is_full(block) and not full_blocks:
                continue
            for bit, length in _runs_of(self.masks[block]):
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


def bit_number(mask: int, index: int) -> int:
    """Returns the position of the set bit number `index`, counted from the lowest, from 0. Raises IndexError."""
    for bit, length in _runs_of(mask):
        if index < length:
            return bit + index
        index -= length
    raise IndexError(index)


def _runs_of(mask: int) -> Iterator[Run]:
    """Yields (position of its first bit, length) of each run of set bits, from the lowest."""
    start = 0
    while mask:
        skipped = lowest_bit(mask)
        mask >>= skipped
        length = lowest_bit(~mask)
        yield start + skipped, length
        mask >>= length
        start += skipped + length
