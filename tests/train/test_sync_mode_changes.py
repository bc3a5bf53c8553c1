"""A real stage that changes from all-reduce to inner steps and back: its anchor, its history hash, its state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from agora_protocol.limits import SLICE_BLOCK

from agora.core.step_schedule import (
    ALL_REDUCE,
    MIN_STEPS_BETWEEN,
    NOTICE_PASSES,
    NOTICE_STEPS,
    ONLY_ALL_REDUCE,
    SyncSchedule,
)
from agora.state.layout import OUTER_PARAMETERS, VELOCITY
from agora.train.stage import Stage
from tests.train.test_weight_versions import Bench

SLICES = 4
FIRST = NOTICE_STEPS
"""The first inner step where the mean of step 0 wants slices."""
PLAN = SyncSchedule(ALL_REDUCE, FIRST, SLICES)


def stage_of() -> Stage:
    return Bench("keep", averaging={"fraction": 1 / SLICES}).trainer.stages[0]


def take_exact_step(stage: Stage, wanted: int = ALL_REDUCE) -> None:
    """Along a mean that every stage gets alike."""
    generator = torch.Generator().manual_seed(stage.step)
    gradient = torch.randn(stage.layout.numel, generator=generator)
    stage.step_with_gradient(stage.step, gradient, 64, wanted)


def take_local_step(stage: Stage, seed: int) -> None:
    """Along a gradient of its own."""
    stage.gradient_sum.flat.copy_(torch.randn(stage.layout.numel, generator=torch.Generator().manual_seed(seed)))
    stage.layout.clear_padding(stage.gradient_sum.flat)
    stage.gradient_sum.totals.tokens = 64
    stage.catch_up(stage.step + 1)


def change_to_local(stage: Stage) -> None:
    take_exact_step(stage, wanted=SLICES)
    while stage.step < FIRST:
        take_exact_step(stage)


def average_slice(stage: Stage, wanted: int = SLICES) -> None:
    """Applies a mean difference of 0 in a block."""
    blocks = np.array([0])
    found = stage.outer_gradient(blocks)
    assert found is not None
    _, snapshot = found
    stage.outer_step(stage.step, blocks, snapshot, (torch.zeros(SLICE_BLOCK), (True,)), wanted)


def test_the_outer_parameters_is_what_the_last_all_reduce_step_leaves_and_exists_only_during_inner_steps() -> None:
    stage = stage_of()
    take_exact_step(stage, wanted=SLICES)
    assert stage.progress.sync_schedule == PLAN and OUTER_PARAMETERS not in stage.moments
    while stage.step < FIRST:
        assert stage.outer is None
        take_exact_step(stage)
    weights = stage.weights.current.flat.clone()
    assert torch.equal(stage.moments[OUTER_PARAMETERS], weights) and not stage.moments[VELOCITY].any()
    take_local_step(stage, seed=1)
    assert torch.equal(stage.moments[OUTER_PARAMETERS], weights) and not torch.equal(
        stage.weights.current.flat, weights
    )


def test_what_the_means_want_enters_the_history_hash() -> None:
    stages = stage_of(), stage_of()
    for stage, wanted in zip(stages, (SLICES, ALL_REDUCE), strict=True):
        take_exact_step(stage, wanted)
    assert np.array_equal(*(stage.export_state().weights for stage in stages))
    assert stages[0].progress.history_hash != stages[1].progress.history_hash


def test_a_state_of_inner_steps_has_the_outer_parameters_and_one_of_all_reduce_steps_has_none() -> None:
    giver, taker = stage_of(), stage_of()
    exact = giver.export_state()
    change_to_local(giver)
    take_local_step(giver, seed=1)
    average_slice(giver)
    state = giver.export_state()
    assert state.sync_schedule == PLAN and {OUTER_PARAMETERS, VELOCITY} <= state.moments.keys()
    taker.load_state(state)
    assert (
        taker.progress.sync_schedule == state.sync_schedule
        and taker.progress.history_hash == giver.progress.history_hash
    )
    for name, values in giver.moments.items():
        assert torch.equal(taker.moments[name], values)
    for stage in (giver, taker):
        take_local_step(stage, seed=2)
    assert torch.equal(giver.weights.current.flat, taker.weights.current.flat)
    taker.load_state(exact)
    assert taker.outer is None and OUTER_PARAMETERS not in taker.export_state().moments
    assert taker.progress.sync_schedule == ONLY_ALL_REDUCE


def test_after_the_last_inner_step_replicas_differ_until_they_fetch_one_state() -> None:
    stages = stage_of(), stage_of()
    for seed, stage in enumerate(stages):
        change_to_local(stage)
        stage.load_state(replace(stage.export_state(), sync_schedule=SyncSchedule(SLICES, FIRST + 2, ALL_REDUCE)))
        for step in range(2):
            take_local_step(stage, seed=10 * seed + step)
        assert stage.step == FIRST + 2 and stage.outer is None
        assert stage.progress.history.keys() == {stage.step}
    first, second = stages
    assert first.progress.history_hash != second.progress.history_hash
    second.load_state(first.export_state())
    for stage in stages:
        take_exact_step(stage)
    assert np.array_equal(*(stage.export_state().weights for stage in stages))
    assert first.progress.history_hash == second.progress.history_hash


def test_a_round_of_fragments_ends_inner_steps_no_sooner_than_the_rule_says() -> None:
    stage = stage_of()
    change_to_local(stage)
    average_slice(stage, wanted=ALL_REDUCE)
    assert stage.progress.sync_schedule == PLAN, "too early"
    while stage.step < FIRST + MIN_STEPS_BETWEEN:
        take_local_step(stage, seed=stage.step)
    average_slice(stage, wanted=ALL_REDUCE)
    assert stage.progress.sync_schedule == SyncSchedule(SLICES, stage.step + NOTICE_PASSES * SLICES, ALL_REDUCE)


def test_another_number_of_fragments_keeps_outer_parameters_and_history_hash() -> None:
    stage = stage_of()
    change_to_local(stage)
    while stage.step < FIRST + NOTICE_PASSES * SLICES:
        take_local_step(stage, seed=stage.step)
    average_slice(stage, wanted=2)
    change_at = stage.step + NOTICE_PASSES * SLICES
    assert stage.progress.sync_schedule == SyncSchedule(SLICES, change_at, 2)
    anchor = stage.moments[OUTER_PARAMETERS].clone()
    history_hash = stage.progress.history_hash
    while stage.step <= change_at:
        take_local_step(stage, seed=stage.step)
    assert torch.equal(stage.moments[OUTER_PARAMETERS], anchor) and stage.progress.history_hash == history_hash


def test_a_stage_that_skips_into_inner_steps_does_not_take_itself_for_a_replica_of_the_others() -> None:
    """Its anchor would be its own weights."""
    stage, other = stage_of(), stage_of()
    for each in (stage, other):
        take_exact_step(each, wanted=SLICES)
    stage.catch_up(FIRST + 2)
    while other.step < FIRST:
        take_exact_step(other)
    assert stage.progress.history.keys() == {FIRST + 2}
    assert stage.progress.history_hash not in other.progress.history.values() and stage.progress.history_hash
