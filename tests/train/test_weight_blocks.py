"""A slice of a stage's weights: read, averaged into what training makes of it meanwhile, and put in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import OptimizerSection
from torch import Tensor

from agora.train.stage_replica import SliceRule, drift_weight
from tests.train.test_weight_versions import Bench, same


class SliceBench(Bench):
    """A trainer of stage 0 by hand, and its replica's side."""

    def __init__(self, activations: str = "keep", blocks: Sequence[int] = (3, 0, 5)) -> None:
        super().__init__(activations)
        self.stage = self.trainer.stage(0)
        self.blocks = np.array(blocks, np.int64)
        self.generator = torch.Generator().manual_seed(3)

    def noise(self, scale: float = 0.01) -> Tensor:
        return scale * torch.randn(len(self.blocks) * SLICE_BLOCK, generator=self.generator)

    def slice(self) -> Tensor:
        return self.stage.snapshot_blocks(self.blocks)[0]

    def without_gaps(self, values: Tensor) -> Tensor:
        """The slice of a stage whose weights would be `values` there: what lies between tensors is zero."""
        flat = torch.zeros(self.stage.weights.layout.numel)
        flat.view(-1, SLICE_BLOCK)[torch.tensor(self.blocks)] = values.view(-1, SLICE_BLOCK)
        self.stage.weights.layout.clear_padding(flat)
        return flat.view(-1, SLICE_BLOCK)[torch.tensor(self.blocks)].flatten()


def test_the_blocks_of_a_slice_come_in_the_order_asked_and_cover_padding() -> None:
    bench = SliceBench(blocks=[5, 0])
    flat = bench.stage.weights.current.flat
    assert flat.numel() == bench.stage.weights.layout.numel and flat.numel() % SLICE_BLOCK == 0
    expected = torch.cat([flat[5 * SLICE_BLOCK : 6 * SLICE_BLOCK], flat[:SLICE_BLOCK]])
    values = bench.slice()
    assert torch.equal(values, expected)
    values.zero_()
    assert torch.equal(bench.slice(), expected)


def test_a_delta_keeps_what_was_learnt_since_the_snapshot() -> None:
    bench = SliceBench()
    snapshot, delta = bench.slice(), bench.noise()
    bench.step_with(0)
    moved, rest = bench.slice(), bench.stage.weights.current.flat.clone()
    assert not torch.equal(moved, snapshot)
    bench.stage.apply_average(bench.blocks, delta, snapshot, "delta")
    assert torch.equal(bench.slice(), bench.without_gaps(moved + delta))
    others = np.setdiff1d(np.arange(bench.stage.weights.layout.numel // SLICE_BLOCK), bench.blocks)
    now = bench.stage.weights.current.flat
    assert torch.equal(now.view(-1, SLICE_BLOCK)[others], rest.view(-1, SLICE_BLOCK)[others])


def test_the_ema_rule_is_asyncmeshs_equations() -> None:
    """drift = w - s; m = (1 - l) m + l drift, or drift on the first visit; w = a + m."""
    bench = SliceBench()
    first, second = np.array([3, 0], np.int64), np.array([0, 4], np.int64)
    m: dict[int, Tensor] = {}
    for turn, blocks in enumerate([first, second, first, first]):
        bench.blocks = blocks
        s = bench.slice()
        bench.step_with(turn)
        w, a = bench.slice(), s + bench.noise()
        share = drift_weight(bench.stage.step, bench.manifest.optimizer)
        expected = []
        for block, w_c, s_c, a_c in zip(blocks.tolist(), *(t.split(SLICE_BLOCK) for t in (w, s, a)), strict=True):
            drift = w_c - s_c
            m[block] = (1 - share) * m[block] + share * drift if block in m else drift
            expected.append(a_c + m[block])
        bench.stage.apply_average(blocks, a - s, s, "ema")
        torch.testing.assert_close(bench.slice(), bench.without_gaps(torch.cat(expected)), rtol=1e-5, atol=1e-7)


def test_the_share_of_a_new_drift_falls_from_a_half_to_a_hundredth() -> None:
    section = OptimizerSection(total_steps=3000)
    shares = [drift_weight(step, section) for step in (0, 1000, 2000, 3000, 9000)]
    assert shares == pytest.approx([0.5, 0.5, 0.255, 0.01, 0.01])


@pytest.mark.parametrize("rule", ["delta", "ema"])
def test_a_slice_added_under_live_graphs_leaves_them_the_weights_they_saw(rule: SliceRule) -> None:
    bench = SliceBench("keep")
    old = bench.weights()
    bench.forward(0)
    bench.stage.apply_average(bench.blocks, bench.noise(0.1), bench.slice(), rule)
    new = bench.weights()
    assert bench.alive() == 2
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, old))
    assert not same(bench.sums(), bench.by_hand(0, new))
    assert bench.alive() == 1


def test_a_slice_between_steps_makes_no_third_version() -> None:
    bench = SliceBench("keep")
    bench.forward(0)
    bench.step_with(1)
    bench.forward(2)
    second = bench.weights()
    bench.stage.apply_average(bench.blocks, bench.noise(0.1), bench.slice(), "delta")
    assert (bench.alive(), bench.trainer.stashed.graph_count()) == (2, 1)
    bench.backward(2)
    before = bench.sums()
    assert same(before, bench.by_hand(2, second))
    bench.backward(0)  # its graph was given up: computed again, on the weights of now
    mine = {name: total - before[name] for name, total in bench.sums().items()}
    assert same(mine, bench.by_hand(0, bench.weights()))


def test_with_recompute_the_backward_sees_the_slice() -> None:
    bench = SliceBench("recompute")
    old = bench.weights()
    bench.forward(0)
    bench.stage.apply_average(bench.blocks, bench.noise(0.1), bench.slice(), "delta")
    bench.backward(0)
    assert same(bench.sums(), bench.by_hand(0, bench.weights()))
    assert not same(bench.sums(), bench.by_hand(0, old))
    assert bench.stage.weights.previous is None


@pytest.mark.parametrize("rule", ["delta", "ema"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_slice_that_would_not_be_finite_changes_nothing(rule: SliceRule, value: float) -> None:
    bench = SliceBench()
    snapshot, before = bench.slice(), bench.stage.weights.current.flat.clone()
    delta = bench.noise()
    delta[17] = value
    if value == 3e38:
        snapshot[17] = bench.stage.weights.current.flat.view(-1, SLICE_BLOCK)[3, 17] = before[3 * SLICE_BLOCK + 17] = (
            value
        )
    with pytest.raises(ProtocolError, match="not finite"):
        bench.stage.apply_average(bench.blocks, delta, snapshot, rule)
    assert torch.equal(bench.stage.weights.current.flat, before)
    for bad in (delta[:-1], delta.double()):
        with pytest.raises(ProtocolError, match="no slice"):
            bench.stage.apply_average(bench.blocks, bad, snapshot, rule)
