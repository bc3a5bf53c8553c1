"""The moving average of a stage's weights: what it is, when it changes, what uses it, and that it travels."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from safetensors.numpy import load_file

from agora.core.clock import loop_time
from agora.core.step_schedule import ONLY_ALL_REDUCE
from agora.model import family_of
from agora.state.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from agora.state.layout import AVERAGE, StageState
from agora.state.state_fetch import StateFetch
from agora.train.objectives import TokenBatch, stage_loss
from agora.train.optimizer import average_decay
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Stage
from agora.train.weight_versions import DecodedWork
from tests.state.world import CHANGE_RULE, World
from tests.train.support import batches_for, microbatch_id, small_manifest

START = 120
"""The stages of these tests begin here, where the average is an average."""
CPU = torch.device("cpu")
WHOLE = Span(0, 0)


def trainer_of(manifest: Manifest) -> SpanTrainer:
    return SpanTrainer(manifest, WHOLE, CPU, report=lambda event: None, in_flight=1)


def one_stage(**optimizer: object) -> Manifest:
    return small_manifest(stages={"count": 1}, optimizer=optimizer)


def gradient(stage: Stage, seed: int) -> torch.Tensor:
    flat = torch.randn(stage.weights.layout.numel, generator=torch.Generator().manual_seed(seed))
    stage.weights.layout.clear_padding(flat)
    return flat


def take_steps(stage: Stage, first: int, last: int) -> list[np.ndarray]:
    """Takes steps along random gradients, from step number START + first on. Returns the weights after each."""
    weights = []
    if stage.step == 0:
        stage.restart_at(START, 0, START, 0, ONLY_ALL_REDUCE)
    for number in range(START + first, START + last):
        stage.step_with_gradient(number, gradient(stage, number), 1)
        weights.append(stage.export_state().weights)
    return weights


@pytest.mark.parametrize("name", ["adamw", "nadam", "muon"])
@pytest.mark.parametrize("decay", [0.05, 0.3, 0.99])
def test_the_average_is_the_formula_after_every_step(name: str, decay: float) -> None:
    stage = trainer_of(one_stage(name=name, average_decay=decay)).stages[0]
    stage.restart_at(97, 0, 97, 0, ONLY_ALL_REDUCE)
    expected = stage.export_state().weights.astype(np.float64)
    for step in range(97, 112):
        if step == 105:
            stage.weights.begin_version()  # the average stays, the weights move
        (weights,) = take_steps(stage, step - START, step - START + 1)
        keep = min(decay, max(step - 99, 0) / max(step - 90, 9))
        expected = keep * expected + (1 - keep) * weights
        np.testing.assert_allclose(stage.export_state().averaged_weights, expected, rtol=1e-6, atol=1e-7)
    assert not np.allclose(expected, weights, rtol=0, atol=2e-6), "the average lags behind the weights"


def test_it_is_the_weights_before_the_first_step_and_without_one_there_is_none() -> None:
    for decay, arrays in ((0.9, 4), (0.0, 3)):
        stage = trainer_of(one_stage(average_decay=decay)).stages[0]
        state = stage.export_state()
        assert np.array_equal(state.averaged_weights, state.weights) and state.weights.any()
        assert len(state.arrays) == arrays and state.layout.nbytes == 4 * arrays * state.layout.numel
        take_steps(stage, 0, 3)
        state = stage.export_state()
        assert (AVERAGE in state.moments) == bool(decay)
        assert np.array_equal(state.averaged_weights, state.weights) == (not decay)
        assert (stage.evaluation_weights is stage.weights.current) == (not decay)


def test_a_step_without_a_gradient_leaves_the_average_as_it_was() -> None:
    stage = trainer_of(one_stage()).stages[0]
    take_steps(stage, 0, 2)
    before = stage.export_state()
    stage.step_with_gradient(START + 2, gradient(stage, 2), 0)
    stage.catch_up(START + 6)
    after = stage.export_state()
    assert after.step == START + 6 and np.array_equal(after.averaged_weights, before.averaged_weights)


def test_replicas_of_all_reduce_steps_have_the_same_bits_in_their_averages() -> None:
    one, other = (trainer_of(one_stage(name="muon")).stages[0] for _ in range(2))
    take_steps(one, 0, 4)
    take_steps(other, 0, 2)
    other.load_state(other.export_state())
    take_steps(other, 2, 4)
    mine, theirs = one.export_state(), other.export_state()
    assert all(np.array_equal(array, theirs.arrays[name]) for name, array in mine.arrays.items())


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_evaluations_use_the_average_and_training_the_weights(decay: float) -> None:
    manifest = one_stage(average_decay=decay, learning_rate=0.03)
    trainer = trainer_of(manifest)
    stage = trainer.stages[0]
    take_steps(stage, 0, 5)
    state, ids = stage.export_state(), torch.from_numpy(batches_for(manifest, 1)[0][0]).long()
    losses = {}
    for what, flat in (("average", state.averaged_weights), ("weights", state.weights)):
        module = family_of(manifest.model).build_stage(manifest.layers_of(0), manifest.seed)
        module.load_state_dict({n: torch.from_numpy(v) for n, v in state.layout.views(flat).items()}, strict=False)
        with torch.no_grad():
            losses[what] = float(stage_loss(module(ids[:, :-1], ids[:, :-1]), ids[:, 1:]))
    assert (abs(losses["average"] - losses["weights"]) > 1e-2) == bool(decay)
    batch = TokenBatch.from_wire(ids, has_marks=False)
    evaluated = trainer.run_last_stages(DecodedWork(microbatch_id(0), 0, batch.inputs, batch, "evaluate")).loss_sum
    trained = trainer.run_last_stages(DecodedWork(microbatch_id(0), 0, batch.inputs, batch, "train")).loss_sum
    assert evaluated == pytest.approx(losses["average"], rel=1e-6)
    assert trained == pytest.approx(losses["weights"], rel=1e-6)


def test_a_boundary_that_is_evaluated_leaves_a_stage_as_its_average_makes_it() -> None:
    manifest = small_manifest(optimizer={"learning_rate": 0.03})
    trainer = SpanTrainer(manifest, Span(0, 0), CPU, report=lambda event: None, in_flight=1)
    take_steps(trainer.stages[0], 0, 5)
    ids = torch.from_numpy(batches_for(manifest, 1)[0][0]).long()
    batch = TokenBatch.from_wire(ids, has_marks=False)
    forward = {
        purpose: trainer.forward(DecodedWork(microbatch_id(0), 0, batch.inputs, batch, purpose))[0]
        for purpose in ("train", "evaluate")
    }
    with torch.no_grad():
        expected = trainer.stages[0].evaluation_weights.module(ids[:, :-1], ids[:, :-1])
    assert torch.equal(forward["evaluate"], expected) and not torch.allclose(forward["train"], expected, atol=1e-3)


def check_that_it_goes_on(state: StageState, stage: Stage) -> None:
    """A fresh stage that loads `state`, exported from `stage`, has its average and goes on as `stage` does."""
    fresh = trainer_of(one_stage(name="muon")).stages[0]
    fresh.load_state(state)
    assert np.array_equal(fresh.export_state().averaged_weights, stage.export_state().averaged_weights)
    for one in (fresh, stage):
        take_steps(one, 3, 6)
    assert np.array_equal(fresh.export_state().averaged_weights, stage.export_state().averaged_weights)


def test_a_checkpoint_holds_it_by_name_and_it_goes_on_from_there(tmp_path: Path) -> None:
    stage = trainer_of(one_stage(name="muon")).stages[0]
    take_steps(stage, 0, 3)
    state = stage.export_state()
    written = write_checkpoint(tmp_path, "ab" * 32, state, keep=1)
    tensors = load_file(written.path / "moments.safetensors")
    for name, values in state.layout.views(state.averaged_weights).items():
        assert np.array_equal(tensors[f"average.{name}"], values)
    found = newest_checkpoint(tmp_path, "ab" * 32, 0)
    assert found is not None
    check_that_it_goes_on(read_checkpoint(found, state.layout), stage)


def test_a_fetched_state_has_it_and_one_that_is_not_finite_is_a_violation() -> None:
    stage = trainer_of(one_stage(name="muon")).stages[0]
    take_steps(stage, 0, 3)
    state = stage.export_state()
    spoiled = state.averaged_weights.copy()
    spoiled[-1] = np.inf

    async def whole() -> None:
        world = World()
        world.add("honest", state)
        fetch = StateFetch(world, 0, state.layout, world.report_violation, CHANGE_RULE)
        check_that_it_goes_on(await fetch.run(list(world.replicas), deadline=loop_time() + 30), stage)
        assert not world.violations
        liars = World()
        liars.add("liar", StageState(0, 123, 3, 0, state.layout, state.weights, {**state.moments, AVERAGE: spoiled}))
        fetch = StateFetch(liars, 0, state.layout, liars.report_violation, CHANGE_RULE)
        with pytest.raises(Exception, match="not finite"):
            await fetch.run(list(liars.replicas), deadline=loop_time() + 30)
        assert len(liars.violations) == 1

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_the_decay_grows_to_the_manifests() -> None:
    section = one_stage(average_decay=0.9).optimizer
    decays = [average_decay(step, section) for step in range(300)]
    assert decays == sorted(decays) and decays[:100] == [0.0] * 100
    assert decays[100] == 0.1 and decays[179] < 0.9 and decays[180] == decays[-1] == 0.9


def test_in_a_short_run_the_average_has_the_bits_of_the_weights() -> None:
    stage = trainer_of(one_stage()).stages[0]
    for number in range(5):
        stage.step_with_gradient(number, gradient(stage, number), 1)
        state = stage.export_state()
        assert np.array_equal(state.averaged_weights, state.weights)
