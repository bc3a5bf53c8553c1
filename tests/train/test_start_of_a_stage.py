"""A stage starts without what it does not need: no weights are drawn that a state replaces, no state is copied twice.

The bytes are those of torch's tensors, of numpy's arrays, and of what files are read into.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from benchmarks.live_bytes import LiveBytes

from agora.model import family
from agora.state.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from agora.state.layout import OUTER_PARAMETERS
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Stage
from tests.state.test_keeper import ME, OTHERS, World, keeper_of
from tests.train.support import MODEL, pipeline_of, small_manifest

CPU = torch.device("cpu")
# Of some megabytes, so that small objects do not count.
LARGE = {**MODEL, "width": 128, "feed_forward": 352, "vocabulary": 1024}


class Drawn(list[str]):
    """The names of the tensors whose initial values were drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        real = family.initial_values

        def record(seed: int, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
            self.append(name)
            return real(seed, name, shape, std)

        monkeypatch.setattr(family, "initial_values", record)


@contextmanager
def most_bytes() -> Iterator[Callable[[], int]]:
    """Yields what tells the most bytes that were alive at once within it, beside those alive before."""
    tracemalloc.start()
    try:
        with LiveBytes() as live:
            yield lambda: live.most + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def stage_of(manifest: Manifest, *, draws: bool = True) -> Stage:
    return SpanTrainer(manifest, Span(0, 0), CPU, report=lambda event: None, in_flight=1, draws=draws).stages[0]


def state_of(stage: Stage) -> dict[str, np.ndarray[Any, Any]]:
    return dict(stage.export_state().arrays)


@pytest.mark.parametrize("exact_steps", [0, 10**9], ids=["inner steps", "all-reduces"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_weights_that_are_drawn_later_are_those_that_a_stage_is_built_with(
    optimizer: str, exact_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"name": optimizer, "average_decay": 0.9}
    manifest = small_manifest(optimizer=section, averaging={"exact_steps": exact_steps})
    at_once = stage_of(manifest)
    drawn = Drawn(monkeypatch)
    trainer = SpanTrainer(manifest, Span(0, 0), CPU, report=lambda event: None, in_flight=1, draws=False)
    assert not drawn and not trainer.stages[0].weights.current.flat.any()
    trainer.draw_initial_weights(0)
    count = len(drawn)
    assert count and all(map(np.array_equal, state_of(at_once).values(), state_of(trainer.stages[0]).values()))
    assert (OUTER_PARAMETERS in trainer.stages[0].moments) == (exact_steps == 0)
    trainer.draw_initial_weights(0)
    assert len(drawn) == count, "they are drawn once"


def test_a_newcomer_that_fetches_a_state_draws_nothing_and_one_that_begins_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whole() -> None:
        manifest = small_manifest()
        async with pipeline_of(manifest, ["0"]) as (built,):
            initial = await built.export_state(0)
        drawn = Drawn(monkeypatch)
        async with pipeline_of(manifest, ["0"], draws=False) as (worker,):
            world = World()
            world.add(OTHERS[0], replace(initial, step=3, updates=3))
            keeper = keeper_of(worker, tmp_path / "fetches", {ME: 0, OTHERS[0]: 3}, world)
            await keeper.find_checkpoints()
            assert "fetched step 3" in await keeper.fill_stages()
            assert not drawn and np.array_equal((await worker.export_state(0)).weights, initial.weights)
        async with pipeline_of(manifest, ["0"], draws=False) as (worker,):
            keeper = keeper_of(worker, tmp_path / "begins", {})
            await keeper.find_checkpoints()
            assert "no peer offers any" in await keeper.fill_stages()
            assert drawn and np.array_equal((await worker.export_state(0)).weights, initial.weights)

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_is_copied_once_when_it_is_exported_and_not_at_all_when_it_is_loaded(optimizer: str) -> None:
    manifest = small_manifest(model=LARGE, optimizer={"name": optimizer})
    giver, taker = stage_of(manifest), stage_of(manifest, draws=False)
    with most_bytes() as exported:
        state = giver.export_state()
    size = state.layout.nbytes
    assert size > 2 << 20 and exported() < 1.05 * size
    with most_bytes() as loaded:
        taker.load_state(state)
    assert loaded() < 0.05 * size
    assert all(map(np.array_equal, state_of(giver).values(), state_of(taker).values()))


def test_a_share_closes_with_one_copy_of_the_sum_and_is_refused_for_one_value_that_is_not_finite() -> None:
    stage = stage_of(small_manifest(model=LARGE, schedule={"predict_weights": False}))
    for value in (1.0, float("nan"), float("inf"), -float("inf")):
        stage.gradient_sum.flat.fill_(1.0)
        stage.gradient_sum.flat[7], stage.gradient_sum.totals.tokens = value, 4
        with most_bytes() as closed:
            share = stage.close_share()
        assert closed() < 1.05 * stage.gradient_sum.flat.nbytes
        assert share.tokens == (4 if value == 1.0 else 0) and (share.values == (0.25 if value == 1.0 else 0.0)).all()
        stage.step_with_gradient(stage.step, share.values, 0)


def test_a_checkpoint_is_read_into_the_arrays_that_are_loaded_a_tensor_at_a_time(tmp_path: Path) -> None:
    manifest = small_manifest(model=LARGE)
    stage = stage_of(manifest)
    state = stage.export_state()
    write_checkpoint(tmp_path, manifest.run_id, state, keep=1)
    checkpoint = newest_checkpoint(tmp_path, manifest.run_id, 0)
    assert checkpoint is not None
    with most_bytes() as read:
        found = read_checkpoint(checkpoint, stage.layout)
    largest = max(4 * np.prod(slot.shape) for slot in stage.layout.slots)
    assert read() < 1.05 * (state.layout.nbytes + 2 * largest) < 1.7 * state.layout.nbytes
    assert all(map(np.array_equal, found.arrays.values(), state.arrays.values()))


def test_a_stage_is_built_with_its_weights_once_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "CHUNK", 1 << 12)
    sections = {"model": LARGE, "optimizer": {"name": "adamw"}, "schedule": {"predict_weights": False}}
    for draws in (False, True):
        with most_bytes() as built:
            stage = stage_of(small_manifest(**sections), draws=draws)
        weights = stage.weights.current.flat.nbytes
        largest = max(4 * np.prod(slot.shape) for slot in stage.layout.slots)
        held = weights + stage.gradient_sum.flat.nbytes + sum(moment.nbytes for moment in stage.moments.values())
        fixed = sum(buffer.nbytes for buffer in stage.weights.current.module.buffers())
        assert built() < 1.05 * (held + fixed) + (largest if draws else 0)


def test_a_span_that_is_given_up_gives_its_memory_back_at_once() -> None:
    """Not when the garbage collector comes: the next span's stages must fit beside what is left."""
    trainer = SpanTrainer(small_manifest(), Span(0, 1), CPU, report=lambda event: None, in_flight=1)
    left = [weakref.ref(kept) for stage in trainer.stages.values() for kept in (stage, stage.weights.current.module)]
    gc.disable()
    try:
        del trainer
        assert [kept() for kept in left] == [None] * 4
    finally:
        gc.enable()
