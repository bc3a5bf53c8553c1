"""A state survives its integers, whatever is in it; no other integers are read; a long one loses its last runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agora.tuning.epochs.state import (
    MAX_INT,
    MAX_STATE_INTS,
    MAX_TALLIES,
    BlockLayout,
    DifferentRowsError,
    EpochProgress,
    EpochState,
    MicrobatchSet,
    Tally,
    open_epochs,
    read_state,
    write_state,
)

COUNTS = st.sampled_from([1, 7, 40, 512, 1000, 1_000_000])
NUMBERS = st.lists(st.integers(0, 999_999), max_size=30)


@st.composite
def states(draw: st.DrawFn) -> tuple[BlockLayout, EpochState]:
    layout = BlockLayout(draw(COUNTS))

    def numbers() -> MicrobatchSet:
        made = MicrobatchSet(layout)
        for number in draw(NUMBERS):
            made.add(number % layout.count)
        return made

    first = draw(st.integers(0, 1000))
    offsets = draw(st.sets(st.integers(0, open_epochs(layout) - 1), max_size=2))
    parts = {first + offset: EpochProgress(numbers(), numbers(), numbers()) for offset in offsets}
    tallies = draw(st.dictionaries(st.integers(0, MAX_INT), st.builds(Tally, st.integers(0, 99), st.integers(0, 999))))
    return layout, EpochState(draw(st.integers(0, MAX_INT)), draw(st.integers(0, 99)), first, tallies, parts)


def plain(state: EpochState) -> tuple[object, ...]:
    parts = {
        epoch: [part.done.masks, part.opened.masks, part.claimed.masks] for epoch, part in sorted(state.epochs.items())
    }
    return state.session, state.version, state.first, dict(state.tallies), parts


@given(states())
def test_a_state_survives_its_integers(case: tuple[BlockLayout, EpochState]) -> None:
    layout, state = case
    written = write_state(state, layout, 5, None)
    assert all(type(value) is int and 0 <= value <= MAX_INT for value in written)
    assert plain(read_state(written, layout, 5)) == plain(state)
    assert write_state(read_state(written, layout, 5), layout, 5, None) == written


@given(states(), st.integers(10, 300))
def test_a_state_that_is_too_long_says_less_and_nothing_else(case: tuple[BlockLayout, EpochState], most: int) -> None:
    layout, state = case
    most += 3 * min(len(state.tallies), MAX_TALLIES)
    written = write_state(state, layout, 5, most)
    assert len(written) <= most
    read = read_state(written, layout, 5)
    for epoch, part in read.epochs.items():
        whole = state.epochs[epoch]
        for said, known in ((part.done, whole.done), (part.opened, whole.opened), (part.claimed, whole.claimed)):
            assert all(mask & ~known.mask(block) == 0 for block, mask in said.masks.items())


@given(states(), st.data())
def test_a_changed_state_is_read_or_refused_and_never_an_accident(
    case: tuple[BlockLayout, EpochState], data: st.DataObject
) -> None:
    layout, state = case
    values = list(write_state(state, layout, 5, MAX_STATE_INTS))
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = data.draw(st.integers(-1, 2**64) | st.booleans() | st.just(1.5))
    for changed in (values, values[:place], [*values, 0]):
        try:
            read_state(changed, layout, 5)
        except ValueError as error:
            assert str(error)


def test_the_state_of_other_rows_is_known_as_such() -> None:
    state = EpochState(1, 1, 0)
    with pytest.raises(DifferentRowsError):
        read_state(write_state(state, BlockLayout(40), 5, None), BlockLayout(40), 6)
    with pytest.raises(DifferentRowsError):
        read_state(write_state(state, BlockLayout(41), 5, None), BlockLayout(40), 5)


def test_more_tallies_than_fit_are_left_out_but_in_a_snapshot() -> None:
    layout = BlockLayout(40)
    state = EpochState(1, 1, 0, {session: Tally(1, 1) for session in range(100)})
    assert list(read_state(write_state(state, layout, 5, MAX_STATE_INTS), layout, 5).tallies) == list(
        range(MAX_TALLIES)
    )
    assert len(read_state(write_state(state, layout, 5, None), layout, 5).tallies) == 100


@pytest.mark.parametrize(("count", "most"), [(1, 32), (8, 32), (9, 29), (128, 2), (100_000, 2)])
def test_short_epochs_may_overlap_more(count: int, most: int) -> None:
    assert open_epochs(BlockLayout(count)) == most
