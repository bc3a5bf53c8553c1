"""When to write, who speaks of it, where to start."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from agora_protocol.ids import PeerId, RunId
from hypothesis import given
from hypothesis import strategies as st

from agora.state.rules import (
    checkpoint_due,
    choose_start,
    choose_writer,
    cut_step,
    leading_step,
    missed_rounds,
    most_believed,
)

RUN = RunId("ab" * 32)
A, B, C = (PeerId(name) for name in "abc")


@pytest.mark.parametrize(
    ("own", "offers", "kind", "step", "sources"),
    [
        (None, {}, "seed", 0, ()),
        (None, {A: 0, B: 0}, "seed", 0, ()),
        (0, {}, "own", 0, ()),
        (200, {}, "own", 200, ()),
        (200, {A: 200, B: 100}, "own", 200, ()),
        (200, {A: 100}, "own", 200, ()),
        (200, {A: 201}, "peers", 101, (A,)),
        (None, {A: 30}, "peers", 1, (A,)),
        (100, {A: 399, B: 400, C: 500}, "peers", 400, (C, B)),
        (None, {B: 500, A: 500, C: 499}, "peers", 400, (A, B, C)),
    ],
)
def test_a_stage_starts_from_the_newest_there_is(own, offers, kind, step, sources) -> None:
    start = choose_start(own, offers)
    assert (start.kind, start.step, start.sources) == (kind, step, sources)
    assert start.reason


def test_no_single_replica_is_believed_to_be_far_ahead_of_three() -> None:
    assert most_believed([500, 501, 10**9], 100) == 601 == most_believed([501, 10**9, 501, 10**9], 100) - 10**9 + 501
    assert most_believed([500, 500, 0], 100) == 600, "nor held back by one that has just begun"
    assert most_believed([], 100) == most_believed([500, 10**9], 100) == math.inf, "of two, nobody knows which"


def test_a_checkpoint_is_due_once_for_each_multiple_even_when_a_step_jumps_over_it() -> None:
    assert not checkpoint_due(99, 100, 0) and checkpoint_due(100, 100, 0)
    assert not checkpoint_due(101, 100, 100) and not checkpoint_due(0, 100, 0)
    assert checkpoint_due(203, 100, 100) and not checkpoint_due(299, 100, 203)
    assert cut_step(203, 100) == 200


@given(st.lists(st.integers(0, 999).map(lambda i: PeerId(f"p{i}")), min_size=1, unique=True), st.randoms())
def test_every_view_of_the_same_members_names_the_same_writer(members, random) -> None:
    shuffled = list(members)
    random.shuffle(shuffled)
    writer = choose_writer(RUN, 3, 100, members)
    assert writer == choose_writer(RUN, 3, 100, shuffled) and writer in members
    rest = [peer for peer in members if peer != writer]
    for gone in rest:
        assert choose_writer(RUN, 3, 100, [p for p in members if p != gone]) == writer


def test_the_work_of_writing_goes_around() -> None:
    turns = Counter(choose_writer(RUN, stage, 100 * n, [A, B, C]) for n in range(200) for stage in range(3))
    assert all(150 < turns[peer] < 250 for peer in (A, B, C))
    assert choose_writer(RUN, 0, 0, []) is None


def test_missed_slices_are_those_averaged_since_each_once() -> None:
    assert missed_rounds(100, 100, 20, 20) == [] and missed_rounds(100, 119, 20, 20) == []
    assert missed_rounds(100, 160, 20, 20) == [6, 7, 8]
    assert missed_rounds(0, 1000, 20, 20) == list(range(31, 51))
    assert missed_rounds(120, 100, 20, 20) == []


def test_the_furthest_stage_is_not_what_a_single_replica_says() -> None:
    assert leading_step([[40, 40, 41], [20, 10**12], []]) == 40
    assert leading_step([[3], [7]]) == 7 and leading_step([[], []]) == 0
