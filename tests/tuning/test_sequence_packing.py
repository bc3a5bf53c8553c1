"""Packing splits nothing, overlaps nothing, loses nothing, and is close to the best possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agora.tuning.chat.sample_rows import assign_rows, fill_rows
from agora.tuning.chat.supervision import TokenSequence

CONTEXT = 64
LENGTHS = st.lists(st.integers(1, CONTEXT), max_size=200)


def sequence(number: int, length: int) -> TokenSequence:
    """Tokens that name their sequence and their place in it; the odd places are learnt."""
    ids = (1000 * (number + 1) + np.arange(length)).astype(np.int32)
    offsets = np.stack([np.arange(length), np.arange(1, length + 1)], axis=1).astype(np.int32)
    return TokenSequence(ids, np.arange(length) % 2 == 1, offsets, "x" * length, 0)


@given(LENGTHS)
def test_every_sequence_is_in_one_row_and_no_row_overflows(lengths: list[int]) -> None:
    rows = assign_rows(lengths, CONTEXT)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= CONTEXT for row in rows)


@given(LENGTHS)
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    filled = sorted(sum(lengths[number] for number in row) for row in assign_rows(lengths, CONTEXT))
    assert len(filled) < 2 or filled[0] + filled[1] > CONTEXT


def test_rows_of_random_lengths_are_nearly_full() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 5000), 1, 1024).astype(int)
    rows = assign_rows(lengths, 1024)
    assert lengths.sum() / (1024 * len(rows)) > 0.995


def test_the_best_fit_is_taken_and_not_the_first() -> None:
    assert assign_rows([6, 7, 3, 4], 10) == [[1, 2], [0, 3]]


def test_the_same_lengths_give_the_same_rows() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 1000)
    assert assign_rows(lengths, 100) == assign_rows(lengths.tolist(), 100)


@pytest.mark.parametrize("length", [0, 65])
def test_a_length_that_no_row_can_hold_is_a_mistake_of_the_caller(length: int) -> None:
    with pytest.raises(ValueError, match="1 to 64"):
        assign_rows([3, length], CONTEXT)


@given(LENGTHS)
def test_filled_rows_hold_each_sequence_whole_with_its_own_segment_and_positions(lengths: list[int]) -> None:
    sequences = [sequence(number, length) for number, length in enumerate(lengths)]
    rows = assign_rows(lengths, CONTEXT)
    packed = fill_rows(sequences, rows, CONTEXT)
    assert packed.tokens.shape == packed.segments.shape == (len(rows), CONTEXT)
    for row, members in enumerate(rows):
        for segment, number in enumerate(members, 1):
            places = np.flatnonzero(packed.segments[row] == segment)
            assert (np.diff(places) == 1).all() and len(places) == lengths[number]
            assert (packed.tokens[row, places] == sequences[number].ids).all()
            assert (packed.supervised[row, places] == sequences[number].supervised).all()
            assert packed.positions[row, places].tolist() == list(range(lengths[number]))
        empty = packed.segments[row] == 0
        assert not packed.tokens[row, empty].any() and not packed.supervised[row, empty].any()


def test_no_sequences_give_no_rows() -> None:
    assert assign_rows([], CONTEXT) == []
    assert fill_rows([], [], CONTEXT).tokens.shape == (0, CONTEXT)
