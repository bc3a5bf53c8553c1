"""What an origin knows and sends of the epochs in progress: sets of microbatches, and the state as integers.

| the integers, each 0 to 2^63 - 1 | how many |
|---|---|
| FORMAT, identity of the rows, microbatches in an epoch | 3 |
| session, version, first epoch that is not complete | 3 |
| number of tallies; of each: session, microbatches, samples | 1 + 3 for each |
| number of epochs; of each what follows | 1 |
| - the epoch, counted from the first | 1 |
| - its blocks that are done, bit 0 of the first word for block 0 | one for 32 blocks |
| - of opened, claimed, other done ones: how many ranges; of each the gap before it, its length | 3 + 2 for each |

An epoch has at most MAX_BLOCKS blocks. Done microbatches have as many gaps between them as microbatches are in flight;
so a state of 10^6 microbatches an epoch usually has less than 200 integers. A message has at most MAX_STATE_INTS:
ranges, then epochs, that would exceed it are left out, the last ones first. An origin that does not receive such a
range may repeat its microbatches; nothing worse happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

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
        return -(-self.count // self.size)

    def full_mask(self, block: int) -> int:
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
        block, bit = divmod(number, self.layout.size)
        self.masks[block] = self.mask(block) | 1 << bit

    def add_range(self, numbers: NumberRange) -> None:
        """Raises ValueError if some are outside of the epoch, or the length is below 1; nothing is added then."""
        number, length = numbers
        if number < 0 or length < 1 or number + length > self.layout.count:
            raise ValueError(f"the range {numbers} is not within {self.layout.count} microbatches")
        while length:
            block, bit = divmod(number, self.layout.size)
            part = min(length, self.layout.size - bit)
            self.masks[block] = self.mask(block) | ((1 << part) - 1) << bit
            number, length = number + part, length - part

    def add_block(self, block: int) -> None:
        self.masks[block] = self.layout.full_mask(block)

    def update(self, other: MicrobatchSet) -> None:
        for block, mask in other.masks.items():
            self.masks[block] = self.mask(block) | mask

    def discard(self, number: int) -> None:
        block, bit = divmod(number, self.layout.size)
        if mask := self.mask(block) & ~(1 << bit):
            self.masks[block] = mask
        else:
            self.masks.pop(block, None)

    def is_full(self, block: int) -> bool:
        return self.mask(block) == self.layout.full_mask(block)

    def is_complete(self) -> bool:
        return len(self.masks) == self.layout.blocks and len(self) == self.layout.count

    def ranges(self, *, full_blocks: bool) -> Iterator[NumberRange]:
        """Ascending (first, length). full_blocks: False leaves out blocks that are wholly in the set."""
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


# --- the state as integers


FORMAT: Final = 1
MAX_INT: Final = 2**63 - 1
# The highest first incomplete epoch that is plausible of another origin; an origin's own count may go beyond it.
MAX_EPOCH: Final = 2**32
# Maximum number of microbatches or samples of one session that a message may state; sums of them fit into MAX_INT.
MAX_TALLY: Final = 2**48
MAX_STATE_INTS: Final = 1024
MAX_TALLIES: Final = 64  # maximum number of tallies in a message
# Maximum number of tallies in memory and in a snapshot; of more, those that changed least recently are forgotten.
KEPT_TALLIES: Final = 1024
WORD_BITS: Final = 32
# How many microbatches the epochs in progress should have together, within MAX_OPEN_EPOCHS.
MIN_OPEN_MICROBATCHES: Final = 256
MAX_OPEN_EPOCHS: Final = 32


class Tally(NamedTuple):
    """How many microbatches one session (one start of an origin) has completed, and the samples in them."""

    microbatches: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """What one origin knows of an epoch: the microbatches done by any origin, and those that it has opened or claimed.

    The sets themselves are changed in place.
    """

    done: MicrobatchSet
    opened: MicrobatchSet  # taken for training, not done yet
    claimed: MicrobatchSet  # to be opened next

    @classmethod
    def empty(cls, layout: BlockLayout) -> EpochProgress:
        return cls(MicrobatchSet(layout), MicrobatchSet(layout), MicrobatchSet(layout))

    def is_empty(self) -> bool:
        return not (self.done.masks or self.opened.masks or self.claimed.masks)


@dataclass(frozen=True, slots=True)
class EpochState:
    """What an origin sends the other origins about the epochs. All epochs before `first` are complete."""

    session: int  # the number of this start of the origin, used by no other start of any origin
    version: int  # grows with each change of the session's state
    first: int  # the first epoch that is not complete
    # What each session has completed, by the session's number.
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    # What the origin knows of the epochs that are not complete, by the epoch's number.
    epochs: Mapping[int, EpochProgress] = field(default_factory=dict)

    def done_mask(self, epoch: int, block: int, layout: BlockLayout) -> int:
        """Returns the mask of what is done in a block."""
        if epoch < self.first:
            return layout.full_mask(block)
        return self.epochs[epoch].done.mask(block) if epoch in self.epochs else 0

    def masks_done(self, epoch: int, layout: BlockLayout) -> Iterator[tuple[int, int]]:
        """Yields (block, mask of what is done in it) for the blocks of an epoch, without those with nothing done."""
        if epoch < self.first:
            yield from ((block, layout.full_mask(block)) for block in range(layout.blocks))
        elif epoch in self.epochs:
            yield from self.epochs[epoch].done.masks.items()


@dataclass(frozen=True, slots=True)
class EpochCounts:
    """Of an epoch in progress. not_started: neither done nor in flight, claimed ones included."""

    epoch: int
    done: int
    in_flight: int
    not_started: int


@dataclass(frozen=True, slots=True)
class EpochTotals:
    """How many microbatches the swarm has done, as far as this origin knows."""

    seen: int  # microbatches done at least once, summed over the epochs
    repeated: int  # completions of a microbatch that was done before
    missed: int  # microbatches not done yet, of all epochs but the newest that has begun
    samples: int  # the samples in all completions, repeated ones included
    epochs: tuple[EpochCounts, ...]  # the epochs in progress, the oldest first


def open_epochs(layout: BlockLayout) -> int:
    """How many epochs may be in progress: the fewest, from 2 on, that have MIN_OPEN_MICROBATCHES together."""
    return min(max(2, -(-MIN_OPEN_MICROBATCHES // layout.count)), MAX_OPEN_EPOCHS)


def write_state(state: EpochState, layout: BlockLayout, rows_id: int, limit: int | None) -> tuple[int, ...]:
    """Encodes a state as at most `limit` integers, in the format of the module's text; None: without a limit.

    A limit also leaves out all but the first MAX_TALLIES tallies, and must have room for these. rows_id: identifies the
    rows that the state is about.
    """
    room = MAX_INT if limit is None else limit
    tallies = list(state.tallies.items())[: None if limit is None else MAX_TALLIES]
    values = [FORMAT, rows_id, layout.count, state.session, state.version, state.first, len(tallies)]
    values += itertools.chain.from_iterable((session, *tally) for session, tally in tallies)
    count_index = len(values)
    epochs = 0
    values.append(epochs)
    for epoch in sorted(state.epochs):
        written = _write_epoch(epoch - state.first, state.epochs[epoch], room - len(values))
        if written is None:
            break
        values += written
        epochs += 1
    values[count_index] = epochs
    return tuple(values)


def read_state(
    values: Sequence[int], layout: BlockLayout, rows_id: int, *, max_tallies: int = KEPT_TALLIES
) -> EpochState:
    """Decodes a state from the integers that write_state returned.

    A `first` above MAX_EPOCH is lowered to MAX_EPOCH, and the epochs are numbered from there; above 2 * MAX_EPOCH it is
    refused. Raises DifferentRowsError (a ValueError) if `rows_id` or the number of microbatches in an epoch differ from
    the sender's, ValueError for a malformed state, numbers that are too large, or more than `max_tallies` tallies.
    """
    reader = _Reader(values)
    if reader.take() != FORMAT:
        raise ValueError("the state of the epochs has an unknown format")
    if reader.take() != rows_id or reader.take() != layout.count:
        raise DifferentRowsError("the state of the epochs is of other rows")
    session, version, first = reader.take(), reader.take(), reader.take()
    if first > 2 * MAX_EPOCH:
        raise ValueError(f"epoch {first} is beyond {2 * MAX_EPOCH}")
    first = min(first, MAX_EPOCH)
    count = reader.take()
    if count > max_tallies:
        raise ValueError(f"{count} tallies are more than {max_tallies}")
    tallies = {reader.take(): Tally(reader.take(), reader.take()) for _ in range(count)}
    if any(number > MAX_TALLY for tally in tallies.values() for number in tally):
        raise ValueError(f"a tally is more than {MAX_TALLY}")
    max_open = open_epochs(layout)
    epochs: dict[int, EpochProgress] = {}
    for _ in range(reader.take()):
        offset = reader.take()
        if offset >= max_open:
            raise ValueError(f"epoch {offset} after the first is in progress, more than {max_open} cannot be")
        epochs[first + offset] = _read_epoch(reader, layout)
    reader.check_end()
    return EpochState(session, version, first, tallies, epochs)


class DifferentRowsError(ValueError):
    """Raised when a state is about other rows than this origin's."""


def _write_epoch(offset: int, part: EpochProgress, room: int) -> list[int] | None:
    layout = part.done.layout
    values = [offset, *_full_words(part.done, layout)]
    lists = [part.opened, part.claimed, part.done]
    room -= len(values) + len(lists)
    if room < 0:
        return None
    for microbatches in lists:
        ranges = microbatches.ranges(full_blocks=microbatches is not part.done)
        written = list(itertools.islice(_gaps(ranges), room // 2))
        values += [len(written), *itertools.chain.from_iterable(written)]
        room -= 2 * len(written)
    return values


def _read_epoch(reader: _Reader, layout: BlockLayout) -> EpochProgress:
    part = EpochProgress.empty(layout)
    for first in range(0, layout.blocks, WORD_BITS):
        word = reader.take()
        if word >> min(WORD_BITS, layout.blocks - first):
            raise ValueError(f"{word} names more than {layout.blocks} blocks")
        while word:
            part.done.add_block(first + lowest_bit(word))
            word &= word - 1
    for microbatches in (part.opened, part.claimed, part.done):
        position = 0
        for _ in range(reader.take()):
            gap, length = reader.take(), reader.take()
            microbatches.add_range((position + gap, length))
            position += gap + length
    return part


def _full_words(done: MicrobatchSet, layout: BlockLayout) -> list[int]:
    bits = sum(1 << block for block in done.masks if done.is_full(block))
    return [bits >> first & (1 << WORD_BITS) - 1 for first in range(0, layout.blocks, WORD_BITS)]


def _gaps(ranges: Iterable[NumberRange]) -> Iterator[NumberRange]:
    end = 0
    for first, length in ranges:
        yield first - end, length
        end = first + length


# Reads the integers of a message or file one after the other, and checks that each is 0 to MAX_INT.
class _Reader:
    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        self._at = 0

    def take(self) -> int:
        if self._at >= len(self._values):
            raise ValueError("the state of the epochs ends too early")
        value = self._values[self._at]
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise ValueError(f"{value!r:.40} is not an integer from 0 to {MAX_INT}")
        self._at += 1
        return value

    def check_end(self) -> None:
        if self._at != len(self._values):
            raise ValueError("the state of the epochs goes on after its end")
