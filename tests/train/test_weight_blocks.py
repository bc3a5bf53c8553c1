"""A slice of a stage's weights: read, and moved with its anchor while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest_sections import AveragingSection
from torch import Tensor

from agora.core.step_schedule import SyncSchedule
from agora.state.layout import OUTER_PARAMETERS, VELOCITY
from agora.train.stage import stage_layout
from tests.train.test_weight_versions import Bench, same

RATE, MOMENTUM = AveragingSection().outer_rate, 20 * AveragingSection().outer_momentum


class FragmentBench(Bench):
    """A trainer of stage 0 by hand, and its replica's side."""

    def __init__(self, activations: str = "keep", blocks: Sequence[int] = (3, 0, 5)) -> None:
        super().__init__(activations, averaging={"exact_steps": 0})
        self.stage = self.trainer.stages[0]
        self.blocks = np.array(blocks, np.int64)
        self.generator = torch.Generator().manual_seed(3)

    def noise(self, scale: float = 0.01) -> Tensor:
        return scale * torch.randn(len(self.blocks) * SLICE_BLOCK, generator=self.generator)

    def slice(self) -> Tensor:
        return self.stage.outer_gradient(self.blocks)[1]

    def rows(self, flat: Tensor) -> Tensor:
        return flat.view(-1, SLICE_BLOCK)[torch.tensor(self.blocks)].flatten()

    def take_in(self, step: int, mean: Tensor, snapshot: Tensor, done: bool = True) -> None:
        self.stage.outer_step(step, self.blocks, snapshot, (mean, (done,)))

    def without_gaps(self, values: Tensor) -> Tensor:
        """The slice of a stage whose weights would be `values` there: what lies between tensors is zero."""
        flat = torch.zeros(self.stage.weights.layout.numel)
        flat.view(-1, SLICE_BLOCK)[torch.tensor(self.blocks)] = values.view(-1, SLICE_BLOCK)
        self.stage.weights.layout.clear_padding(flat)
        return flat.view(-1, SLICE_BLOCK)[torch.tensor(self.blocks)].flatten()


def test_the_blocks_of_a_fragment_come_in_the_order_asked_and_cover_padding() -> None:
    bench = FragmentBench(blocks=[5, 0])
    flat = bench.stage.weights.current.flat
    assert flat.numel() == bench.stage.weights.layout.numel and flat.numel() % SLICE_BLOCK == 0
    expected = torch.cat([flat[5 * SLICE_BLOCK : 6 * SLICE_BLOCK], flat[:SLICE_BLOCK]])
    values = bench.slice()
    assert torch.equal(values, expected)
    values.zero_()
    assert torch.equal(bench.slice(), expected)


def test_a_fragment_keeps_what_was_learnt_since_its_snapshot() -> None:
    bench = FragmentBench()
    snapshot, mean = bench.slice(), bench.noise()
    anchor = bench.stage.moments[OUTER_PARAMETERS].clone()
    bench.step_with(0)
    learnt, rest = bench.slice(), bench.stage.weights.current.flat.clone()
    assert not torch.equal(learnt, snapshot)
    bench.take_in(1, mean, snapshot)
    new = bench.rows(anchor) - RATE * (mean + MOMENTUM * mean)
    torch.testing.assert_close(bench.slice(), bench.without_gaps(learnt + new - snapshot), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bench.rows(bench.stage.moments[OUTER_PARAMETERS]), bench.without_gaps(new))
    others = np.setdiff1d(np.arange(bench.stage.weights.layout.numel // SLICE_BLOCK), bench.blocks)
    now = bench.stage.weights.current.flat
    assert torch.equal(now.view(-1, SLICE_BLOCK)[others], rest.view(-1, SLICE_BLOCK)[others])


def test_a_round_is_taken_in_once_and_makes_the_history_hash_another() -> None:
    bench, other = FragmentBench(), FragmentBench()
    mean = bench.noise()
    for stage in (bench, other):
        stage.step_with(0)
        before = stage.stage.progress
        assert (before.agreed_step, stage.stage.step) == (0, 1), "an inner step is agreed on with nobody"
        stage.take_in(1, mean, stage.slice())
    assert bench.stage.progress.agreed_step == 1 and bench.stage.progress.history_hash not in (0, before.history_hash)
    assert bench.stage.progress.history_hash == other.stage.progress.history_hash
    weights = bench.stage.weights.current.flat.clone()
    bench.take_in(1, bench.noise(), bench.slice())
    assert torch.equal(bench.stage.weights.current.flat, weights)
    other.take_in(2, mean, other.slice(), done=False)
    bench.take_in(2, mean, bench.slice())
    assert bench.stage.progress.history_hash != other.stage.progress.history_hash


def test_a_state_brings_outer_parameters_velocity_and_what_was_agreed_on() -> None:
    bench, other = FragmentBench(), FragmentBench()
    bench.step_with(0)
    bench.take_in(1, bench.noise(), bench.slice())
    state = bench.stage.export_state()
    assert {OUTER_PARAMETERS, VELOCITY} <= state.moments.keys() and state.layout == stage_layout(
        bench.manifest, 0
    ).at_step(1, SyncSchedule(20))
    other.stage.load_state(state)
    for name, values in bench.stage.moments.items():
        assert torch.equal(other.stage.moments[name], values)
    assert other.stage.progress.history == {1: bench.stage.progress.history_hash}


def test_a_run_of_all_reduce_steps_keeps_no_outer_parameters() -> None:
    stage = Bench("keep").trainer.stages[0]
    assert stage.moments.keys() == {"mean", "square", "average"}
    assert stage.outer_gradient(np.array([0])) is None
    weights = stage.export_state().weights
    stage.outer_step(1, np.array([0]), torch.zeros(SLICE_BLOCK), (torch.ones(SLICE_BLOCK), (True,)))
    assert np.array_equal(stage.export_state().weights, weights) and stage.progress.agreed_step == 0


def test_a_fragment_added_under_live_graphs_leaves_them_the_weights_they_saw() -> None:
    bench = FragmentBench("keep")
    old = bench.weights()
    bench.forward(0)
    bench.take_in(1, bench.noise(0.1), bench.slice())
    new = bench.weights()
    assert bench.alive() == 2
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, old))
    assert not same(bench.sums(), bench.by_hand(0, new))
    assert bench.alive() == 1


def test_a_fragment_between_steps_makes_no_third_version() -> None:
    bench = FragmentBench("keep")
    bench.forward(0)
    bench.step_with(1)
    bench.forward(2)
    second = bench.weights()
    bench.take_in(1, bench.noise(0.1), bench.slice())
    assert (bench.alive(), bench.trainer.stashed.count_graphs()) == (2, 1)
    bench.backward(2)
    before = bench.sums()
    assert same(before, bench.by_hand(2, second))
    bench.backward(0)  # its graph was given up: computed again, on the weights of now
    mine = {name: total - before[name] for name, total in bench.sums().items()}
    assert same(mine, bench.by_hand(0, bench.weights()))


def test_with_recompute_the_backward_sees_the_fragment() -> None:
    bench = FragmentBench("recompute")
    old = bench.weights()
    bench.forward(0)
    bench.take_in(1, bench.noise(0.1), bench.slice())
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, bench.weights()))
    assert not same(bench.sums(), bench.by_hand(0, old))
    assert bench.stage.weights.previous is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_fragment_that_would_not_be_finite_changes_nothing(value: float) -> None:
    bench = FragmentBench()
    before = bench.stage.weights.current.flat.clone()
    moments = {name: values.clone() for name, values in bench.stage.moments.items()}
    mean = bench.noise()
    mean[17] = value
    for bad, why in (
        (mean, "not be finite"),
        (bench.noise()[:-1], "not a fragment"),
        (bench.noise().double(), "not a fragment"),
    ):
        with pytest.raises(ProtocolError, match=why):
            bench.take_in(1, bad, bench.slice())
    assert torch.equal(bench.stage.weights.current.flat, before) and bench.stage.progress.agreed_step == 0
    assert all(torch.equal(bench.stage.moments[name], values) for name, values in moments.items())
