"""Claims about what the optimizer steps of a stage held, on events made by hand."""

from __future__ import annotations

import pytest

from agora.cli.step_accounts import StageSteps
from agora.observe.events import RoundDone, StepTaken


def taken(step: int, tokens: int, *, whole: int | None = None, norm: float | None = 1.0, age: float = 0.0) -> StepTaken:
    """A step that one replica took; `whole`: the tokens of all replicas in the mean gradient that it stepped along."""
    return StepTaken(0, step, tokens, None, 0.1, gradient_norm=norm, staleness=age, step_tokens=whole)


def steps_of(*events: StepTaken) -> StageSteps:
    found = StageSteps()
    for event in events:
        found.add(event)
    return found


def test_replicas_that_step_along_their_own_gradients_count_all_their_tokens_in_one_step() -> None:
    found = steps_of(taken(1, 60), taken(1, 40), taken(2, 40), taken(2, 60))
    assert (found.steps, found.counted_tokens, found.missed, dict(found.tokens)) == (2, 200, 0, {1: 100, 2: 100})
    assert found.tokens_per_step == 100.0


def test_a_step_along_the_mean_of_all_holds_the_tokens_of_that_mean_once() -> None:
    found = steps_of(taken(1, 60, whole=100), taken(1, 40, whole=100))
    assert (found.steps, found.counted_tokens, found.missed) == (1, 100, 0)


def test_a_part_that_came_too_late_is_counted_with_the_step_that_it_went_into_or_missed() -> None:
    found = steps_of(taken(1, 60, whole=60), taken(1, 40, whole=60), taken(2, 60, whole=140), taken(2, 40, whole=140))
    assert (found.counted_tokens, dict(found.tokens), found.missed) == (200, {1: 60, 2: 140}, 0)
    found.add_round(RoundDone(0, "gradient", 2, 1, 0, 2.0, 2, 40.0, 40.0, 0.1, 8))
    assert found.missed == 40.0


def test_what_a_replica_brought_before_it_was_killed_is_counted() -> None:
    found = steps_of(taken(1, 60, whole=100))
    assert (found.counted_tokens, found.missed) == (100, 0)


def test_a_step_that_was_replayed_counts_nothing_twice() -> None:
    found = steps_of(taken(1, 100, whole=100), taken(1, 0, whole=100))
    assert (found.steps, found.counted_tokens, found.missed) == (1, 100, 0)


def test_a_number_taken_over_without_a_gradient_is_no_step() -> None:
    found = steps_of(taken(1, 50), taken(2, 50, norm=None))
    assert (found.steps, found.counted_tokens) == (1, 50)


def test_staleness_is_a_mean_over_tokens() -> None:
    assert steps_of(taken(1, 75, age=2.0), taken(2, 25)).staleness == pytest.approx(1.5)


def test_a_stage_without_a_step_has_neither_tokens_per_step_nor_staleness() -> None:
    found = StageSteps()
    assert (found.steps, found.counted_tokens, found.tokens_per_step, found.staleness) == (0, 0, None, None)
