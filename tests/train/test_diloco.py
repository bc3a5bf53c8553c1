"""The anchor moves as Nesterov momentum has it, slice by slice, and the weights with it."""

from __future__ import annotations

import pytest
import torch
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK
from agora_protocol.manifest_sections import AveragingSection

from agora.core.step_schedule import SyncSchedule
from agora.state.layout import OUTER_PARAMETERS, VELOCITY, lay_out
from agora.train.diloco import MAX_MOMENTUM, OuterOptimizer

SECTION = AveragingSection(outer_rate=0.7, outer_momentum=0.03)
PASS_STEPS = 20
"""Steps of a pass over all slices: the momentum is 0.6."""
BLOCKS = PART_ELEMENTS // SLICE_BLOCK + 3
NUMEL = BLOCKS * SLICE_BLOCK
LAYOUT = lay_out([("weights", (BLOCKS, SLICE_BLOCK))])


def weights_of(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def rows(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return values.view(-1, SLICE_BLOCK)[blocks].flatten()


def take(
    outer: OuterOptimizer,
    blocks: torch.Tensor,
    snapshot: torch.Tensor,
    mean: torch.Tensor,
    has_mean: tuple[bool, ...],
    pass_steps: int = PASS_STEPS,
    section: AveragingSection = SECTION,
) -> torch.Tensor:
    """Takes the outer step; returns the change of the weights."""
    step = outer.prepare(section, blocks, snapshot, mean, has_mean, pass_steps)
    outer.take(step)
    return step.change


def test_a_fragment_moves_as_nesterov_momentum_has_it_and_no_other_does() -> None:
    outer = OuterOptimizer(LAYOUT, weights_of(0))
    anchor, velocity = weights_of(0), torch.zeros(NUMEL)
    blocks = torch.tensor([1, 4, 7])
    for number in range(1, 4):
        snapshot, mean = rows(weights_of(number), blocks), rows(weights_of(100 + number), blocks)
        assert torch.equal(outer.outer_gradient(blocks, snapshot), rows(anchor, blocks) - snapshot)
        moved = take(outer, blocks, snapshot, mean, (True,))
        faster = 0.6 * rows(velocity, blocks) + mean
        new = rows(anchor, blocks) - 0.7 * (mean + 0.6 * faster)
        torch.testing.assert_close(moved, new - snapshot)
        anchor.view(-1, SLICE_BLOCK)[blocks] = new.view(-1, SLICE_BLOCK)
        velocity.view(-1, SLICE_BLOCK)[blocks] = faster.view(-1, SLICE_BLOCK)
        torch.testing.assert_close(outer.moments[OUTER_PARAMETERS], anchor)
        torch.testing.assert_close(outer.moments[VELOCITY], velocity)


def test_a_part_without_a_mean_stays_with_its_weights() -> None:
    outer = OuterOptimizer(LAYOUT, weights_of(0))
    blocks = torch.arange(BLOCKS)
    moved = take(outer, blocks, weights_of(1), weights_of(2), (True, False))
    assert bool(moved[:PART_ELEMENTS].any()) and not moved[PART_ELEMENTS:].any()
    assert torch.equal(outer.moments[OUTER_PARAMETERS][PART_ELEMENTS:], weights_of(0)[PART_ELEMENTS:])
    assert not outer.moments[VELOCITY][PART_ELEMENTS:].any()


def test_a_part_of_a_large_fragment_is_larger() -> None:
    """A fragment of 65 small shards has 33 of twice as many elements."""
    large = 65 * PART_ELEMENTS
    layout = lay_out([("weights", (large // SLICE_BLOCK, SLICE_BLOCK))])
    outer = OuterOptimizer(layout, torch.zeros(large))
    moved = take(outer, torch.arange(large // SLICE_BLOCK), torch.ones(large), torch.ones(large), (False, *[True] * 32))
    assert not moved[: 2 * PART_ELEMENTS].any() and bool(moved[2 * PART_ELEMENTS :].all())


def test_with_rate_one_and_no_momentum_the_outer_parameters_becomes_the_mean_of_the_weights() -> None:
    section = AveragingSection(outer_rate=1.0, outer_momentum=0.0)
    replicas = [weights_of(seed) for seed in (1, 2, 3)]
    blocks = torch.arange(BLOCKS)
    outer = OuterOptimizer(LAYOUT, weights_of(0))
    mean = sum((outer.outer_gradient(blocks, own) for own in replicas), torch.zeros(NUMEL)) / 3
    own = replicas[0] + take(outer, blocks, replicas[0], mean, (True, True), 1, section)
    torch.testing.assert_close(own, sum(replicas) / 3)


@pytest.mark.parametrize(("pass_steps", "momentum"), [(1, 0.03), (5, 0.15), (20, 0.6), (100, MAX_MOMENTUM)])
def test_the_longer_a_pass_over_all_fragments_the_larger_the_momentum(pass_steps: int, momentum: float) -> None:
    outer = OuterOptimizer(LAYOUT, torch.zeros(NUMEL))
    blocks, ones = torch.tensor([2]), torch.ones(SLICE_BLOCK)
    for _ in range(2):
        take(outer, blocks, 0 * ones, ones, (True,), pass_steps)
    torch.testing.assert_close(rows(outer.moments[VELOCITY], blocks), (1 + momentum) * ones)


def test_the_weights_of_the_only_replica_become_the_outer_parameters_at_rest() -> None:
    outer = OuterOptimizer(LAYOUT, weights_of(0))
    blocks = torch.tensor([2])
    take(outer, blocks, rows(weights_of(1), blocks), rows(weights_of(2), blocks), (True,))
    outer.restart(blocks, rows(weights_of(3), blocks))
    assert torch.equal(rows(outer.moments[OUTER_PARAMETERS], blocks), rows(weights_of(3), blocks))
    assert not outer.moments[VELOCITY].any()


def test_padding_stays_zero_whatever_few_bits_make_of_it() -> None:
    layout = lay_out([("bias", (SLICE_BLOCK - 5,))])
    outer = OuterOptimizer(layout, torch.zeros(layout.numel))
    take(outer, torch.tensor([0]), torch.zeros(SLICE_BLOCK), torch.ones(SLICE_BLOCK), (True,))
    assert (
        outer.moments[OUTER_PARAMETERS][: SLICE_BLOCK - 5].all()
        and not outer.moments[OUTER_PARAMETERS][SLICE_BLOCK - 5 :].any()
    )


def test_outer_parameters_and_velocity_have_a_value_for_every_element_in_the_state_during_inner_steps() -> None:
    for sync_schedule in (SyncSchedule(0, 6, 20), SyncSchedule(20, 5, 0)):
        assert LAYOUT.at_step(5, sync_schedule) == LAYOUT
    assert [(moment.name, moment.numel) for moment in LAYOUT.at_step(5, SyncSchedule(0, 5, 20)).moments] == [
        (OUTER_PARAMETERS, NUMEL),
        (VELOCITY, NUMEL),
    ]
