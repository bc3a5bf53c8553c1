"""Moments in 8 bits: bitsandbytes' own update, in a quarter of the bytes, and the same bits wherever a state goes."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest
from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from agora.core.optional_packages import PackageMissing
from agora.state.layout import lay_out
from agora.train.adamw8bit import BLOCK, CHUNK, QuantisedMoment, chunks
from agora.train.optimizer import StageOptimizer
from agora.train.optimizer_offload import OptimizerOffload
from agora.train.stage import stage_layout
from tests.train.support import batches_for, moment_bytes, pipeline_of, small_manifest, train_step
from tests.train.test_optimizer import section

CPU = torch.device("cpu")
STEPS = 6
NAMES = ("adamw", "adamw8bit")


def manifest_of(name: str) -> Manifest:
    return small_manifest(optimizer={"name": name})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, BLOCK, 5 * BLOCK + 7, CHUNK + 3])
@pytest.mark.parametrize("is_signed", [True, False])
def test_decoding_and_encoding_again_changes_no_bit(count: int, is_signed: bool) -> None:
    values = random(count) if is_signed else random(count).square()
    values[: BLOCK // 2] = 0.0
    if count == BLOCK:
        values[200] = -9.0 if is_signed else 9.0  # the largest of a block may be negative
    first, second = (QuantisedMoment(count, OptimizerOffload(CPU), is_signed=is_signed) for _ in range(2))
    assert not first.decode().any()
    first.replace(*first.encode(values))
    second.replace(*second.encode(first.decode()))
    assert torch.equal(first.decode(), second.decode())
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)
    worst = max(float((first.decode() - values).abs().max()), 1e-30)
    assert worst < 0.02 * float(values.abs().max().clamp(min=1e-20)) + 1e-30


def test_chunks_cover_every_value_and_scale_once() -> None:
    count = 2 * CHUNK + 5
    parts = list(chunks(count))
    assert [part for part, _ in parts] == [slice(0, CHUNK), slice(CHUNK, 2 * CHUNK), slice(2 * CHUNK, count)]
    assert [scales.start for _, scales in parts[1:]] == [scales.stop for _, scales in parts[:-1]]
    assert parts[-1][1].stop == -(-count // BLOCK)


def test_a_matrix_is_updated_as_by_bitsandbytes_own_optimizer() -> None:
    """Its lowest level is -0.993; with ours of -1 there, too, every bit is the same."""
    values = random(32, 40)
    plain = torch.nn.Parameter(values.clone())
    theirs = AdamW8bit([plain], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, min_8bit_size=1)
    theirs.fill_qmap()
    theirs.name2qmap["dynamic"][0] = -1.0
    layout = lay_out([("matrix", (32, 40))])
    weights = torch.zeros(layout.numel)
    weights[: values.numel()] = values.flatten()
    options = {"name": "adamw8bit", "learning_rate": 3e-3, "minimum_ratio": 1.0, "average_decay": 0.0}
    ours = StageOptimizer(section(**options), 1, layout, weights)
    for step in range(STEPS):
        gradient = random(32, 40, seed=step + 1)
        plain.grad = gradient.clone()
        theirs.step()
        flat = torch.zeros(layout.numel)
        flat[: values.numel()] = gradient.flatten()
        ours.step(weights, flat, step)
    assert torch.equal(weights[: values.numel()].view(32, 40), plain.data)


def test_moments_take_a_quarter_of_the_bytes() -> None:
    whole, small = (moment_bytes(manifest_of(name).optimizer, stage_layout(manifest_of(name), 0)) for name in NAMES)
    average = 4 * stage_layout(manifest_of("adamw"), 0).numel
    assert small - average < 0.3 * (whole - average)


def test_a_run_learns_as_with_adamw() -> None:
    async def losses(name: str) -> list[float]:
        manifest = manifest_of(name)
        async with pipeline_of(manifest, ["0", "1"]) as pipeline:
            return [await train_step(pipeline, batch, n) for n, batch in enumerate(batches_for(manifest, 20))]

    whole, small = (asyncio.run(losses(name)) for name in NAMES)
    np.testing.assert_allclose(small, whole, rtol=0.02)
    assert small[-1] < 0.95 * small[0]


def test_a_stage_that_loads_a_state_goes_on_as_the_one_that_gave_it() -> None:
    async def work() -> None:
        manifest = small_manifest(stages={"count": 1}, optimizer={"name": "adamw8bit"})
        batches = batches_for(manifest, 2 * STEPS)
        async with pipeline_of(manifest, ["0"]) as first, pipeline_of(manifest, ["0"]) as second:
            for step in range(STEPS):
                await train_step(first, batches[step], step)
            state = await first[0].export_state(0)
            assert all(state.moments[name].any() for name in ("mean", "square"))
            await second[0].load_state(state)
            for step in range(STEPS, 2 * STEPS):
                assert await train_step(first, batches[step], step) == await train_step(second, batches[step], step)
            mine, theirs = await first[0].export_state(0), await second[0].export_state(0)
            assert all(np.array_equal(array, theirs.arrays[name]) for name, array in mine.arrays.items())

    asyncio.run(work())


def test_without_bitsandbytes_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    layout = lay_out([("matrix", (32, 40))])
    with pytest.raises(PackageMissing, match=r"bitsandbytes, .* install it with: pip install"):
        StageOptimizer(section(name="adamw8bit"), 1, layout, torch.zeros(layout.numel))
