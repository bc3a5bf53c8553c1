"""What is different when only LoRA is trained: dropout, the state of a stage, what stays as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.core.span_work import SpanWork
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from tests.model.tiny_models import CONFIGS, make_model, save
from tests.train.support import microbatch_id, pipeline_of, tokens_of
from tests.train.test_tuning_oracle import answered_batches, learn, lora_manifest, step_together
from tests.train.trl_loops import answered_samples

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("qwen2"), tmp_path_factory.mktemp("base"))


async def gradients(manifest: Manifest, base: Path, microbatch: int) -> dict[int, np.ndarray]:
    """By stage the gradient that one microbatch with this number leaves; the data is always the same."""
    batch = answered_batches(answered_samples(2))[0]
    async with pipeline_of(manifest, ["0", "1-2"], base_model=base) as pipeline:
        for worker in pipeline:
            for stage in worker.span.stages:  # B is zero at first, and A would have no gradient
                with worker.trainer.stages[stage].weights.writable() as flat:
                    flat.add_(0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(stage)))
        await learn(pipeline, microbatch, batch, "sft")
        stages = [stage for worker in pipeline for stage in worker.trainer.stages.values()]
        return {stage.number: stage.gradient_sum.flat.numpy().copy() for stage in stages}


def gradients_of(base: Path, microbatch: int = 0, **sections: Any) -> dict[int, np.ndarray]:
    return asyncio.run(gradients(lora_manifest(base, "sft", **sections), base, microbatch))


@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
def test_dropout_is_the_same_in_a_forward_that_is_repeated_for_its_backward(frozen_as: str, base: Path) -> None:
    dropped = {"model": {"lora_dropout": 0.5, "frozen_as": frozen_as}}
    kept = gradients_of(base, **dropped, schedule={"activations": "keep"})
    repeated = gradients_of(base, **dropped, schedule={"activations": "recompute"})
    none = gradients_of(base, model={"frozen_as": frozen_as}, schedule={"activations": "keep"})
    for stage, values in kept.items():
        np.testing.assert_array_equal(values, repeated[stage])
        assert np.abs(values - none[stage]).max() > 0.01 * np.abs(none[stage]).max(), "something was dropped"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_repeats_its_layers_with_the_same_dropout(name: str, tmp_path: Path) -> None:
    folder, dropped = save(make_model(name), tmp_path), {"lora_dropout": 0.5}
    kept = gradients_of(folder, model=dropped, schedule={"activations": "keep"})
    repeated = gradients_of(folder, model=dropped, schedule={"activations": "recompute"})
    for stage, values in kept.items():
        assert values.any()
        np.testing.assert_array_equal(values, repeated[stage])


def test_another_microbatch_drops_other_values(base: Path) -> None:
    dropped = {"model": {"lora_dropout": 0.5}}
    first, second = gradients_of(base, 0, **dropped), gradients_of(base, 1, **dropped)
    assert all((first[stage] != second[stage]).any() for stage in first)


def test_an_evaluation_drops_nothing_and_draws_nothing(base: Path) -> None:
    async def losses(dropout: float) -> list[float]:
        manifest = lora_manifest(base, "sft", stages=1, model={"lora_dropout": dropout})
        batch = answered_batches(answered_samples(2))[0]
        async with pipeline_of(manifest, ["0"], base_model=base) as (worker,):
            with worker.trainer.stages[0].weights.writable() as flat:
                flat.add_(0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(5)))
            wired = tokens_of(batch)
            return [
                (await worker.run_last_stages(SpanWork(microbatch_id(n), 0, None, wired, "evaluate"))).loss_sum
                for n in range(2)
            ]

    state = torch.random.get_rng_state()
    with_dropout, without = asyncio.run(losses(0.5)), asyncio.run(losses(0.0))
    assert with_dropout == without and len(set(without)) == 1
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
def test_a_stages_state_is_its_adapter_and_nothing_else_changes(base: Path, frozen_as: str) -> None:
    async def whole() -> None:
        manifest = lora_manifest(base, "sft", stages=2, model={"frozen_as": frozen_as})
        batches = answered_batches(answered_samples(8))
        async with pipeline_of(manifest, ["0", "1"], base_model=base) as pipeline:
            modules = [worker.trainer.stages[stage].weights.current.module for stage, worker in enumerate(pipeline)]
            before = [{n: p.detach().clone() for n, p in module.named_parameters()} for module in modules]
            for step, batch in enumerate(batches):
                await learn(pipeline, step, batch, "sft")
                await step_together([pipeline], step)
            for stage, worker in enumerate(pipeline):
                state = await worker.export_state(stage)
                assert {slot.name.split(".")[-3] for slot in state.layout.slots} == {"lora_A", "lora_B"}
                module = worker.trainer.stages[stage].weights.current.module
                for name, parameter in module.named_parameters():
                    assert torch.equal(parameter, before[stage][name]) != (".lora_" in name), name

    asyncio.run(whole())


def test_what_is_kept_of_a_forward_does_not_count_the_frozen_weights(base: Path) -> None:
    sizes = {}
    for frozen_as in ("float32", "bf16"):
        manifest = lora_manifest(base, "lm", 1, model={"frozen_as": frozen_as}, data={"samples": ""})
        manifest = manifest.with_values(schedule={"activations": "auto"})
        trainer = SpanTrainer(manifest, Span(0, 0), CPU, report=lambda event: None, in_flight=1, base_model=base)
        batch = torch.zeros(manifest.tokens_shape(), dtype=torch.int32)
        tokens = TokenBatch.from_wire(batch, has_marks=False)
        trainer.forward(DecodedWork(microbatch_id(0), 0, tokens.inputs, tokens, "train"))
        sizes[frozen_as] = trainer.graphs.bytes_by_entry[0]
    assert sizes["float32"] == pytest.approx(sizes["bf16"], rel=0.05)
