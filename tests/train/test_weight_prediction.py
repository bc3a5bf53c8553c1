"""Weights predicted while a mean gradient is awaited: when they are used, and that they change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agora.core.step_instructions import StepInstructions
from agora.observe.events import StepTaken
from agora.train.stage import Stage
from agora.train.weight_prediction import MAX_MEMORY_FRACTION, predicts_weights
from tests.train.support import small_manifest
from tests.train.test_weight_versions import Bench, same

TOKENS = 32
"""Of a microbatch."""


def bench_of(activations: str = "keep", **sections: Any) -> tuple[Bench, Stage]:
    bench = Bench(activations, **sections)
    return bench, bench.trainer.stages[0]


def mean_gradient(stage: Stage, seed: int) -> Tensor:
    gradient = torch.randn(stage.layout.numel, generator=torch.Generator().manual_seed(seed))
    stage.layout.clear_padding(gradient)
    return gradient


def flat(stage: Stage) -> Tensor:
    return stage.weights.current.flat.clone()


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "nadam"])
def test_the_prediction_is_the_step_along_this_replicas_own_gradient(optimizer: str) -> None:
    (bench, stage), (_, twin) = (bench_of(optimizer={"name": optimizer, "warmup_steps": 0}) for _ in range(2))
    for each in (stage, twin):
        for number in range(2):
            each.step_with_gradient(number, mean_gradient(each, number), TOKENS)
    assert stage.training_version() is stage.weights.current, "no share is closed"
    bench.forward(0)
    bench.backward(0)
    own = stage.close_share()
    moments = {name: values.clone() for name, values in stage.moments.items()}
    before, predicted = flat(stage), stage.training_version().flat
    twin.step_with_gradient(2, own.values, TOKENS)
    torch.testing.assert_close(predicted, flat(twin), rtol=1e-6, atol=1e-7)
    assert torch.equal(flat(stage), before) and not torch.equal(predicted, before)
    for name, values in moments.items():
        assert torch.equal(stage.moments[name], values), "it was only tried"


def test_steps_are_the_same_bits_with_and_without_predicted_weights() -> None:
    benches = [bench_of(schedule={"predict_weights": predicts}) for predicts in (True, False)]
    assert [stage.prediction is not None for _, stage in benches] == [True, False]
    for bench, stage in benches:
        bench.forward(0)
        bench.backward(0)
        for number in range(4):
            stage.close_share()
            assert (stage.training_version() is stage.weights.current) == (number > 0 or stage.prediction is None)
            stage.step_with_gradient(number, mean_gradient(stage, number), TOKENS)
    assert torch.equal(flat(benches[0][1]), flat(benches[1][1]))


def close_share_with(bench: Bench, stage: Stage, number: int) -> None:
    bench.forward(number)
    bench.backward(number)
    stage.close_share()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_microbatch_computed_while_a_mean_is_awaited_has_the_gradient_at_the_predicted_weights(
    activations: str,
) -> None:
    bench, stage = bench_of(activations)
    stage.step_with_gradient(0, mean_gradient(stage, 0), TOKENS)
    close_share_with(bench, stage, 0)
    predicted = [stage.weights.copy_tensors(stage.training_version())]
    bench.forward(1)
    bench.backward(1)
    assert same(bench.sums(), bench.by_hand(1, predicted))
    assert not same(bench.sums(), bench.by_hand(1, bench.weights()))
    stage.step_with_gradient(1, mean_gradient(stage, 1), TOKENS)
    assert stage.training_version() is stage.weights.current


@pytest.mark.parametrize("closes", [True, False])
def test_a_microbatch_that_those_in_progress_push_into_the_next_step_is_computed_at_its_weights(closes: bool) -> None:
    bench, stage = bench_of()
    instructions = StepInstructions(1 << 20, True, 0, 3 * TOKENS, closes_share=closes, alone=not closes)
    stage.set_instructions(instructions)
    bench.forward(0)
    bench.backward(0)
    for number in (1, 2):
        bench.forward(number)
        assert stage.training_version(TOKENS) is stage.weights.current, "it completes the share itself"
    own = stage.gradient_sum.mean()
    expected = flat(stage)
    stage.optimizer.preview(expected, own, 0)
    bench.forward(3)
    assert torch.equal(stage.training_version(2 * TOKENS).flat, expected)
    predicted = [stage.weights.copy_tensors(stage.training_version(2 * TOKENS))]
    for number in (1, 2):
        bench.backward(number)
    stage.step_or_close_share()
    assert stage.progress.open_step == 1
    bench.backward(3)
    assert same(bench.sums(), bench.by_hand(3, predicted))
    assert stage.progress.tokens_predicted == TOKENS
    stage.set_instructions(StepInstructions(TOKENS))
    if closes:
        stage.step_with_gradient(0, mean_gradient(stage, 0), TOKENS)
    stage.step_or_close_share()
    assert [event.predicted for event in bench.events.of(StepTaken)] == [0.0, 1.0]


def test_an_open_share_that_others_close_predicts_nothing() -> None:
    bench, stage = bench_of()
    stage.set_instructions(StepInstructions(1 << 20, True, 0, 2 * TOKENS))
    bench.forward(0)
    bench.backward(0)
    assert stage.training_version(8 * TOKENS) is stage.weights.current


def test_two_closed_shares_predict_two_steps() -> None:
    bench, stage = bench_of()
    close_share_with(bench, stage, 0)
    once = stage.training_version().flat.clone()
    bench.forward(1)
    bench.backward(1)
    stage.set_instructions(StepInstructions(1 << 20, True, 1, TOKENS, closes_share=True))
    stage.step_or_close_share()
    assert stage.progress.open_step == 2
    twice = stage.training_version().flat
    assert not torch.equal(once, twice) and float((twice - flat(stage)).norm()) > float((once - flat(stage)).norm())


def test_a_graph_on_predicted_weights_outlives_the_step() -> None:
    bench, stage = bench_of("keep")
    close_share_with(bench, stage, 0)
    predicted = [stage.weights.copy_tensors(stage.training_version())]
    bench.forward(1)
    stage.step_with_gradient(0, mean_gradient(stage, 0), TOKENS)
    bench.backward(1)
    assert same(bench.sums(), bench.by_hand(1, predicted))


def test_a_third_prediction_is_never_kept_the_oldest_graphs_are_computed_again() -> None:
    bench, stage = bench_of("keep")
    for number in range(3):
        close_share_with(bench, stage, number)
        bench.forward(10 + number)
        stage.step_with_gradient(number, mean_gradient(stage, number), TOKENS)
    now = bench.weights()
    bench.backward(10)
    assert same(bench.sums(), bench.by_hand(10, now))


def test_a_loaded_state_makes_the_prediction_void() -> None:
    bench, stage = bench_of()
    other = bench_of(seed=5)[1]
    close_share_with(bench, stage, 0)
    assert stage.training_version() is not stage.weights.current
    stage.load_state(other.export_state())
    assert stage.training_version() is stage.weights.current
    close_share_with(bench, stage, 1)
    assert float((stage.training_version().flat - flat(stage)).norm()) < float((flat(stage)).norm())


@pytest.mark.parametrize(
    ("schedule", "available", "predicts"),
    [
        ({}, 8000, True),
        ({}, 7999, False),
        ({"predict_weights": False}, 10**9, False),
        ({"kind": "synchronous"}, 10**9, False),
    ],
)
def test_weights_are_predicted_in_asynchronous_runs_where_memory_suffices(
    schedule: dict[str, Any], available: int, predicts: bool
) -> None:
    assert MAX_MEMORY_FRACTION == 1 / 8
    assert predicts_weights(small_manifest(schedule=schedule), 1000, available) == predicts
