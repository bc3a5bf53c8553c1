"""Sets as masks of blocks are what Python's own sets are, and their ranges are as long as they can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agora.tuning.epochs.state import MAX_BLOCKS, BlockLayout, MicrobatchSet, lowest_bit, position_of_set_bit

COUNTS = st.sampled_from([1, 2, 31, 511, 512, 513, 1500, 100_003])


@st.composite
def layouts_with_numbers(draw: st.DrawFn) -> tuple[BlockLayout, set[int]]:
    count = draw(COUNTS)
    starts = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(1, 700)), max_size=8))
    return BlockLayout(count), {n for start, length in starts for n in range(start, min(start + length, count))}


def set_of(layout: BlockLayout, numbers: set[int]) -> MicrobatchSet:
    made = MicrobatchSet(layout)
    for number in numbers:
        made.add(number)
    return made


@given(COUNTS)
def test_blocks_cover_the_epoch_and_are_at_most_so_many(count: int) -> None:
    layout = BlockLayout(count)
    assert layout.blocks <= MAX_BLOCKS
    assert sum(layout.full_mask(block).bit_count() for block in range(layout.blocks)) == count
    assert all(layout.full_mask(block) for block in range(layout.blocks))


@given(layouts_with_numbers())
def test_a_set_holds_what_was_added(case: tuple[BlockLayout, set[int]]) -> None:
    layout, numbers = case
    made = set_of(layout, numbers)
    assert len(made) == len(numbers) and all(number in made for number in numbers)
    assert made.is_complete() == (len(numbers) == layout.count)
    ranges = list(made.ranges(full_blocks=True))
    assert {first + place for first, length in ranges for place in range(length)} == numbers
    assert all(first + length < later for (first, length), (later, _) in zip(ranges, ranges[1:], strict=False))
    rebuilt = MicrobatchSet(layout)
    for piece in ranges:
        rebuilt.add_range(piece)
    assert rebuilt.masks == made.masks
    for number in numbers:
        made.discard(number)
    assert not made.masks


@given(layouts_with_numbers())
def test_runs_without_full_blocks_and_those_blocks_are_the_set(case: tuple[BlockLayout, set[int]]) -> None:
    layout, numbers = case
    made, rebuilt = set_of(layout, numbers), MicrobatchSet(layout)
    for piece in made.ranges(full_blocks=False):
        rebuilt.add_range(piece)
    assert not any(rebuilt.is_full(block) for block in rebuilt.masks)
    for block in made.masks:
        if made.is_full(block):
            rebuilt.add_block(block)
    assert rebuilt.masks == made.masks


@given(layouts_with_numbers(), st.integers(0, 2**32))
def test_an_update_is_a_union(case: tuple[BlockLayout, set[int]], seed: int) -> None:
    layout, numbers = case
    others = {seed * 7919 * n % layout.count for n in range(20)}
    made = set_of(layout, numbers)
    made.update(set_of(layout, others))
    assert made.masks == set_of(layout, numbers | others).masks


@given(st.integers(1, 2**70))
def test_the_bits_of_a_mask_are_numbered_from_the_lowest(mask: int) -> None:
    bits = [bit for bit in range(71) if mask >> bit & 1]
    assert [position_of_set_bit(mask, index) for index in range(len(bits))] == bits and lowest_bit(mask) == bits[0]
    with pytest.raises(IndexError):
        position_of_set_bit(mask, len(bits))


@pytest.mark.parametrize("numbers", [(-1, 2), (0, 0), (39, 2), (40, 1)])
def test_a_range_outside_of_the_epoch_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not within 40 microbatches"):
        MicrobatchSet(BlockLayout(40)).add_range(numbers)
