"""Where a stage starts from, which steps are plausible, when a checkpoint is due."""

from __future__ import annotations

import math

import pytest
from agora_protocol.ids import PeerId

from agora.state.rules import (
    CLAIM_LAG,
    choose_start,
    is_checkpoint_due,
    lowest_step_to_fetch,
    most_advanced_first,
    plausibility_bound,
)

A, B, C = (PeerId(name) for name in "abc")


@pytest.mark.parametrize(
    ("checkpoint_step", "offers", "action", "at_least", "sources"),
    [
        (None, {}, "keep initial weights", 0, ()),
        (None, {A: 0, B: 0}, "keep initial weights", 0, ()),
        (0, {}, "load", 0, ()),
        (200, {}, "load", 200, ()),
        (200, {A: 200, B: 100}, "load", 200, ()),
        (200, {A: 100}, "load", 200, ()),
        (200, {A: 201}, "fetch", 101, (A,)),
        (None, {A: 30}, "fetch", 1, (A,)),
        (100, {A: 399, B: 400, C: 500}, "fetch", 400, (C, B)),
        (None, {B: 500, A: 500, C: 499}, "fetch", 400, (A, B, C)),
    ],
)
def test_a_stage_starts_from_the_newest_state_there_is(checkpoint_step, offers, action, at_least, sources) -> None:
    start = choose_start(checkpoint_step, offers, lag_limit=100)
    assert (start.action, start.at_least, start.sources) == (action, at_least, sources)


@pytest.mark.parametrize(
    ("checkpoint_step", "offers", "reason"),
    [
        (None, {}, "no checkpoint, and no peer offers any"),
        (None, {A: 0}, "no peer has taken a step yet"),
        (200, {}, "own checkpoint of step 200; no peer offers any"),
        (200, {A: 100}, "own checkpoint of step 200; peers are at step 100"),
        (200, {A: 300, B: 250}, "own checkpoint of step 200; 2 peers are at most 100 steps behind step 300"),
        (None, {A: 300}, "no local checkpoint; 1 peers are at most 100 steps behind step 300"),
    ],
)
def test_every_start_says_why(checkpoint_step, offers, reason) -> None:
    assert choose_start(checkpoint_step, offers, lag_limit=100).reason == reason


def test_peers_are_ordered_by_step_and_then_by_id() -> None:
    assert most_advanced_first({C: 7, B: 9, A: 7}) == [B, A, C] and most_advanced_first({}) == []


def test_a_single_replica_far_ahead_of_three_is_implausible() -> None:
    assert plausibility_bound([500, 501, 10**9], 100) == 601
    assert plausibility_bound([501, 10**9, 501, 10**9], 100) == 601, "half of the replicas do not move it"
    assert plausibility_bound([500, 500, 0], 100) == 600, "one that has just begun does not lower it"
    assert plausibility_bound([500, 10**9], 100) == 600, "of two, the one that claims less counts"
    assert plausibility_bound([], 100) == plausibility_bound([10**9], 100) == math.inf, "of one, nobody can tell"
    assert plausibility_bound([100, 101, 103, 10**9], 100) == 201
    assert plausibility_bound([100, 101, 103, 201], 100) == 201, "one that is a little ahead is plausible"


def test_the_lowest_step_to_fetch_is_the_wanted_one_or_as_far_behind_the_others_as_claims_are_late() -> None:
    assert lowest_step_to_fetch(7, []) == 7 and lowest_step_to_fetch(7, [10, 20]) == 7
    assert lowest_step_to_fetch(7, [100, 200, 300]) == 200 - CLAIM_LAG
    assert lowest_step_to_fetch(7, [100, 200]) == 100 - CLAIM_LAG


def test_a_checkpoint_is_due_once_for_each_multiple_even_when_a_step_jumps_over_it() -> None:
    def is_due(step: int, last: int, end: int = 10**9) -> bool:
        return is_checkpoint_due(step, 100, last, end)

    assert not is_due(99, 0) and is_due(100, 0)
    assert not is_due(101, 100) and not is_due(0, 0)
    assert is_due(203, 100) and not is_due(299, 203)


def test_a_checkpoint_is_due_once_at_the_runs_last_step_or_the_first_one_after_it() -> None:
    assert not is_checkpoint_due(149, 100, 100, 150)
    assert is_checkpoint_due(150, 100, 100, 150) and is_checkpoint_due(152, 100, 100, 150)
    assert not is_checkpoint_due(151, 100, 150, 150)
