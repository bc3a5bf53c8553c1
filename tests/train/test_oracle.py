"""The heart: stages trained apart, in either way of keeping activations, are the plain PyTorch loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest
from torch import Tensor

from tests.oracle import PlainRun, relative_difference, run_plain_loop
from tests.train.support import batches_for, pipeline_of, small_manifest, train_step

STEPS = 6
TOLERANCE = 1e-5


async def run_swarm(manifest: Manifest, spans: list[str]) -> PlainRun:
    async with pipeline_of(manifest, spans) as pipeline:
        losses = [await train_step(pipeline, step, n) for n, step in enumerate(batches_for(manifest, STEPS))]
        weights = [await worker.copy_weights(stage) for worker in pipeline for stage in worker.span.stages]
        assert [p.step for worker in pipeline for p in worker.progress()] == [STEPS] * manifest.stage_count
    return PlainRun(losses, weights)


def check_equal(actual: PlainRun, expected: PlainRun) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=TOLERANCE)
    for mine, plain in zip(actual.weights, expected.weights, strict=True):
        assert mine.keys() == plain.keys()
        worst = max(relative_difference(mine[name], plain[name]) for name in plain)
        assert worst < TOLERANCE


@pytest.mark.parametrize("activations", ["recompute", "keep", "auto"])
@pytest.mark.parametrize(
    ("stages", "spans"),
    [(1, ["0"]), (2, ["0", "1"]), (2, ["0-1"]), (4, ["0", "1", "2", "3"]), (4, ["0-1", "2-3"]), (4, ["0-2", "3"])],
)
def test_a_cut_model_trains_as_the_plain_loop_does(stages: int, spans: list[str], activations: str) -> None:
    manifest = small_manifest(stages={"count": stages}, schedule={"activations": activations})
    expected = run_plain_loop(manifest, batches_for(manifest, STEPS))
    assert expected.losses[-1] < expected.losses[0]
    check_equal(asyncio.run(run_swarm(manifest, spans)), expected)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_sparse_boundaries_are_a_mask_within_the_plain_loop(activations: str) -> None:
    def masked(boundary: Tensor) -> Tensor:
        strongest = boundary.detach().square().sum(dim=(0, 1)).topk(20).indices
        return boundary * torch.zeros(boundary.shape[-1]).index_fill(0, strongest, 1.0)

    manifest = small_manifest(
        stages={"count": 4}, boundary={"codec": "top20:float32"}, schedule={"activations": activations}
    )
    batches = batches_for(manifest, STEPS)
    expected = run_plain_loop(manifest, batches, masked)
    check_equal(asyncio.run(run_swarm(manifest, ["0", "1", "2", "3"])), expected)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize(("stages", "spans"), [(1, ["0"]), (2, ["0", "1"]), (2, ["0-1"]), (4, ["0", "1", "2-3"])])
def test_muon_is_the_plain_loop_too(stages: int, spans: list[str], activations: str) -> None:
    manifest = small_manifest(
        model={"subspace": 12},
        stages={"count": stages},
        schedule={"activations": activations},
        optimizer={"name": "muon"},
    )
    expected = run_plain_loop(manifest, batches_for(manifest, STEPS))
    assert expected.losses[-1] < expected.losses[0]
    check_equal(asyncio.run(run_swarm(manifest, spans)), expected)


def test_nadam_and_no_clipping_are_the_plain_loop_too() -> None:
    manifest = small_manifest(optimizer={"name": "nadam", "clip": 0.0, "beta1": 0.95})
    check_equal(asyncio.run(run_swarm(manifest, ["0", "1"])), run_plain_loop(manifest, batches_for(manifest, STEPS)))


def test_the_cut_itself_changes_nothing_but_the_clipping() -> None:
    losses = []
    for stages in (1, 4):
        manifest = small_manifest(stages={"count": stages}, optimizer={"clip": 0.0})
        losses.append(run_plain_loop(manifest, batches_for(manifest, STEPS)).losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=TOLERANCE)
