"""What an origin tells others about the epochs in progress, and keeps for a restart, written as integers. Pure.

Knows: how the state is written and read. Must not know: what is decided from it, who sends it.

| the integers, each 0 to 2^63 - 1 | how many |
|---|---|
| FORMAT, identity of the rows, microbatches in an epoch | 3 |
| session, version, first epoch that is not complete | 3 |
| number of tallies; of each: session, microbatches, samples | 1 + 3 for each |
| number of epochs; of each what follows | 1 |
| - the epoch, counted from the first | 1 |
| - its blocks that are done, bit 0 of the first word for block 0 | one for 32 blocks |
| - of opened, claimed, and done outside of those blocks: runs; of each the gap before it, its length | 3 + 2 for each |

An epoch has at most MAX_BLOCKS blocks. Done microbatches have as many gaps between them as microbatches are in flight;
so a state of 10^6 microbatches an epoch usually has less than 200 integers. A message has at most MAX_STATE_INTS: runs,
then epochs, that would exceed it are left out, the last ones first. An origin that is not told of a microbatch may
repeat it; nothing worse happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agora.data.microbatch_sets import BlockLayout, MicrobatchSet, Run, lowest_bit

FORMAT: Final = 1
MAX_INT: Final = 2**63 - 1
MAX_EPOCH: Final = 2**32
"""The highest first incomplete epoch that is believed of another origin; an origin's own count may go beyond it."""
MAX_TALLY: Final = 2**48
"""Maximum number of microbatches or samples of one session that a message may state; sums of them fit into MAX_INT."""
MAX_STATE_INTS: Final = 1024
MAX_TALLIES: Final = 64
"""How many tallies a message may have."""
KEPT_TALLIES: Final = 1024
"""How many tallies are kept in memory and in a snapshot; of more, those that changed least recently are forgotten."""
WORD_BITS: Final = 32
MIN_OPEN_MICROBATCHES: Final = 256
"""How many microbatches the epochs in progress should have together, within MAX_OPEN_EPOCHS."""
MAX_OPEN_EPOCHS: Final = 32


class Tally(NamedTuple):
    """How many microbatches one session of an origin has completed since it began, and how many samples in them."""

    microbatches: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class EpochPart:
    """One epoch: the microbatches known to be done by any origin, and those that the sender has opened or claimed."""

    done: MicrobatchSet
    opened: MicrobatchSet
    claimed: MicrobatchSet

    @classmethod
    def empty(cls, layout: BlockLayout) -> EpochPart:
        """Returns three empty sets: an epoch of which nothing is known."""
        return cls(MicrobatchSet(layout), MicrobatchSet(layout), MicrobatchSet(layout))

    def is_empty(self) -> bool:
        """Returns whether all three sets are empty."""
        return not (self.done.masks or self.opened.masks or self.claimed.masks)


@dataclass(frozen=True, slots=True)
class EpochState:
    """What an origin tells others. Epochs before `first` are complete.

    session: a number that no other start of any origin uses. version: grows with each change of what a session tells.
    tallies: by session number, what it has completed. epochs: by epoch number, those that have begun and are not
    complete.
    """

    session: int
    version: int
    first: int
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    epochs: Mapping[int, EpochPart] = field(default_factory=dict)


def open_epochs(layout: BlockLayout) -> int:
    """Returns how many epochs may be in progress at once: from 2 to 32, to hold MIN_OPEN_MICROBATCHES."""
    return min(max(2, -(-MIN_OPEN_MICROBATCHES // layout.count)), MAX_OPEN_EPOCHS)


def write_state(state: EpochState, layout: BlockLayout, rows_id: int, most: int | None) -> tuple[int, ...]:
    """Returns a state as at most `most` integers; None: without a limit.

    What does not fit is left out: the last runs of an epoch, and the epochs after it.
    """
    room = MAX_INT if most is None else most
    tallies = list(state.tallies.items())[: None if most is None else MAX_TALLIES]
    values = [FORMAT, rows_id, layout.count, state.session, state.version, state.first, len(tallies)]
    values += itertools.chain.from_iterable((session, *tally) for session, tally in tallies)
    place, epochs = len(values), 0
    values.append(0)
    for epoch in sorted(state.epochs):
        written = _write_epoch(epoch - state.first, state.epochs[epoch], room - len(values))
        if written is None:
            break
        values += written
        epochs += 1
    values[place] = epochs
    return tuple(values)


def read_state(
    values: Sequence[int], layout: BlockLayout, rows_id: int, *, max_tallies: int = KEPT_TALLIES
) -> EpochState:
    """Returns the state that write_state has written as integers.

    Raises OtherRows when rows_id or the number of microbatches differ, ValueError for a malformed state and for more
    than `max_tallies` tallies.
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
    most = open_epochs(layout)
    epochs: dict[int, EpochPart] = {}
    for _ in range(reader.take()):
        offset = reader.take()
        if offset >= most:
            raise ValueError(f"epoch {offset} after the first is in progress, more than {most} cannot be")
        epochs[first + offset] = _read_epoch(reader, layout)
    reader.check_end()
    return EpochState(session, version, first, tallies, epochs)


class DifferentRowsError(ValueError):
    """Raised when a state is about other rows than this origin's."""


def _write_epoch(offset: int, part: EpochPart, room: int) -> list[int] | None:
    """Returns one epoch as at most `room` integers, without its last runs if necessary; None if `room` is too small."""
    layout = part.done.layout
    values = [offset, *_full_words(part.done, layout)]
    lists = [part.opened, part.claimed, part.done]
    room -= len(values) + len(lists)
    if room < 0:
        return None
    for numbers in lists:
        runs = list(itertools.islice(_gaps(numbers.runs(full_blocks=numbers is not part.done)), room // 2))
        values += [len(runs), *itertools.chain.from_iterable(runs)]
        room -= 2 * len(runs)
    return values


def _read_epoch(reader: _Reader, layout: BlockLayout) -> EpochPart:
    """Reads the epoch that _write_epoch has written, after its offset. Raises ValueError if it is malformed."""
    part = EpochPart.empty(layout)
    for first in range(0, layout.blocks, WORD_BITS):
        word = reader.take()
        if word >> min(WORD_BITS, layout.blocks - first):
            raise ValueError(f"{word} names more than {layout.blocks} blocks")
        while word:
            part.done.add_block(first + lowest_bit(word))
            word &= word - 1
    for numbers in (part.opened, part.claimed, part.done):
        number = 0
        for _ in range(reader.take()):
            gap, length = reader.take(), reader.take()
            numbers.add_run((number + gap, length))
            number += gap + length
    return part


def _full_words(done: MicrobatchSet, layout: BlockLayout) -> list[int]:
    """Returns one bit for each block, set if all of the block is done, in words of WORD_BITS bits."""
    bits = sum(1 << block for block in done.masks if done.is_full(block))
    return [bits >> first & (1 << WORD_BITS) - 1 for first in range(0, layout.blocks, WORD_BITS)]


def _gaps(runs: Iterable[Run]) -> Iterator[Run]:
    """Yields for each run (gap, length): how many microbatches lie between it and the run before, and its length."""
    end = 0
    for first, length in runs:
        yield first - end, length
        end = first + length


class _Reader:
    """Reads integers of a message or file one by one."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = values
        self._at = 0

    def take(self) -> int:
        """Takes the next integer, from 0 to MAX_INT. Raises ValueError for another value, or if none is left."""
        if self._at >= len(self._values):
            raise ValueError("the state of the epochs ends too early")
        value = self._values[self._at]
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise ValueError(f"{value!r:.40} is not an integer from 0 to {MAX_INT}")
        self._at += 1
        return value

    def check_end(self) -> None:
        """Raises ValueError unless all integers have been read."""
        if self._at != len(self._values):
            raise ValueError("the state of the epochs goes on after its end")
