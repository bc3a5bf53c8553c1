"""Fine-tuning through cut stages is what TRL's trainers do: losses, metrics and adapters, step by step."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import ADAPTER_FILE, HfSection
from agora_protocol.tensors import BEGINS, SUPERVISED, WireTensor
from transformers import PreTrainedModel

from agora.core.metrics import METRIC_NAMES, add_sums, named_means
from agora.core.span_work import ForwardKey, SpanResult, SpanWork
from agora.train.device_worker import DeviceWorker
from agora.tuning.adapters.peft_folder import read_adapter
from tests.model.tiny_models import CONFIGS, CONTEXT, make_model, manifest_of, save
from tests.oracle import relative_difference
from tests.train.support import microbatch_id, never_step, pipeline_of, tokens_of
from tests.train.trl_loops import Answered, Pair, TrlRun, answered_samples, preference_pairs, run_dpo, run_sft
from tests.tuning.test_going_on_from_adapter import make_adapter

STEPS = 20
ROWS = 2
"""Rows of a microbatch."""
NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}


def lora_manifest(folder: Path, kind: str, stages: int = 3, **sections: Any) -> Manifest:
    values = {
        "model": {"trained": "lora", "frozen_as": "float32", "lora_rank": 4, "lora_alpha": 8.0},
        "objective": {"kind": kind},
        "data": {"samples": "samples.jsonl"},
        "optimizer": {"learning_rate": 3e-3, "minimum_ratio": 1.0, "clip": 0.0, "average_decay": 0.0},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return manifest_of(folder, stages, **values)


def base_of(name: str) -> PreTrainedModel:
    return make_model(name, **NO_DROPOUT.get(name, {}))


def row_of(prompt: list[int], answer: list[int]) -> np.ndarray:
    """One sequence as a row [2, s + 1] of ids and marks; what is left of the row is a sequence that nobody learns."""
    row = np.zeros((2, CONTEXT + 1), np.int32)
    end = len(prompt) + len(answer)
    row[0, :end] = prompt + answer
    row[1, [0, end]] = BEGINS
    row[1, len(prompt) : end] = SUPERVISED
    return row


def batch_of(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(rows, axis=1)


def answered_batches(samples: Sequence[Answered]) -> list[np.ndarray]:
    rows = [row_of(sample.prompt, sample.answer) for sample in samples]
    return [batch_of(rows[i : i + ROWS]) for i in range(0, len(rows), ROWS)]


def pair_batches(pairs: Sequence[Pair]) -> list[np.ndarray]:
    return [batch_of([row_of(p.prompt, p.chosen), row_of(p.prompt, p.rejected)]) for p in pairs]


async def run_forwards(
    pipeline: Sequence[DeviceWorker], number: int, tokens: WireTensor, purpose: str
) -> list[WireTensor | None]:
    """The boundaries that enter the stages' workers, of which the first is None."""
    boundaries: list[WireTensor | None] = [None]
    for worker in pipeline[:-1]:
        sent = await worker.forward(SpanWork(microbatch_id(number), worker.span.first, boundaries[-1], tokens, purpose))
        boundaries.append(sent)
    return boundaries


async def learn(pipeline: Sequence[DeviceWorker], number: int, batch: np.ndarray, kind: str) -> SpanResult:
    """One microbatch through the pipeline and back; for dpo the reference is asked before."""
    *inner, last = pipeline
    tokens, references = tokens_of(batch), ()
    if kind == "dpo":
        *_, boundary = await run_forwards(pipeline, 2 * number + 1, tokens, "reference")
        asked = await last.run_last_stages(
            SpanWork(microbatch_id(2 * number + 1), last.span.first, boundary, tokens, "reference")
        )
        references = asked.log_probabilities
    *_, boundary = await run_forwards(pipeline, 2 * number, tokens, "train")
    done = await last.run_last_stages(
        SpanWork(microbatch_id(2 * number), last.span.first, boundary, tokens, "train", references)
    )
    gradient = done.gradient
    for worker in reversed(inner):
        assert gradient is not None
        gradient = (await worker.backward(ForwardKey(microbatch_id(2 * number), worker.span.first), gradient)).gradient
    return done


async def adapter_of(pipeline: Sequence[DeviceWorker]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for worker in pipeline:
        for stage in worker.span.stages:
            found |= await worker.copy_weights(stage)
    return found


async def tune(
    manifest: Manifest, folder: Path, steps: Sequence[Sequence[np.ndarray]], replicas: int = 1
) -> tuple[dict[str, np.ndarray], TrlRun]:
    """Trains `steps`, the microbatches of a step dealt out to the replicas; the adapter before, and the run."""
    kind, logs = manifest.objective.kind, []
    spans = [str(stage) for stage in range(manifest.stage_count)] * replicas
    async with pipeline_of(manifest, spans, base_model=folder) as workers:
        count = manifest.stage_count
        pipelines = [workers[i : i + count] for i in range(0, len(workers), count)]
        first = await adapter_of(pipelines[0])
        for worker in workers:
            never_step(worker)
        for step, microbatches in enumerate(steps):
            done = [
                await learn(pipelines[i % replicas], step * 100 + i, batch, kind)
                for i, batch in enumerate(microbatches)
            ]
            await step_together(pipelines, step)
            tokens = sum(one.tokens for one in done)
            sums: tuple[float, ...] = ()
            for one in done:
                sums = add_sums(sums, one.metrics)
            logs.append({"loss": sum(one.loss_sum for one in done) / tokens, **named_means(kind, sums, tokens)})
        adapters = [await adapter_of(pipeline) for pipeline in pipelines]
    for other in adapters[1:]:
        assert all((other[name] == adapters[0][name]).all() for name in other), "replicas stay bit-equal"
    return first, TrlRun(logs, adapters[0])


async def step_together(pipelines: Sequence[Sequence[DeviceWorker]], step: int) -> None:
    """Every stage takes the step along the mean gradient of its replicas, weighted by their tokens."""
    for replicas in zip(*pipelines, strict=True):
        stage = replicas[0].span.first
        shares = [await worker.close_share(stage) for worker in replicas]
        tokens = sum(share.tokens for share in shares)
        mean = sum(share.values * (share.tokens / tokens) for share in shares)
        for worker in replicas:
            await worker.step_with_gradient(stage, step, mean, tokens)


def check_equal(ours: TrlRun, theirs: TrlRun, tolerance: float, metrics: Sequence[str] = ()) -> None:
    assert len(ours.logs) == len(theirs.logs) > 0
    for name in ("loss", *metrics):
        mine, trl = [log[name] for log in ours.logs], [log[name] for log in theirs.logs]
        np.testing.assert_allclose(mine, trl, atol=tolerance, err_msg=name)
    worst = max(relative_difference(ours.adapter[name], theirs.adapter[name]) for name in theirs.adapter)
    assert worst < 10 * tolerance


@pytest.mark.parametrize("name", CONFIGS)
def test_sft_through_three_stages_is_trls(name: str, tmp_path: Path) -> None:
    folder = save(base_of(name), tmp_path / "base")
    manifest, samples = lora_manifest(folder, "sft"), answered_samples(STEPS * ROWS)
    first, ours = asyncio.run(tune(manifest, folder, [[batch] for batch in answered_batches(samples)]))
    theirs = run_sft(manifest, base_of(name), samples, first, tmp_path / "trl", batch=ROWS)
    check_equal(ours, theirs, 1e-4)
    moved = [relative_difference(theirs.adapter[name], first[name]) for name in first if ".lora_A." in name]
    assert min(moved) > 0.01, "every matrix has learnt"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_of_several_microbatches_is_a_mean_over_their_answers_tokens(replicas: int, tmp_path: Path) -> None:
    folder = save(base_of("qwen2"), tmp_path / "base")
    manifest, samples = lora_manifest(folder, "sft"), answered_samples(STEPS * 2 * ROWS)
    batches = answered_batches(samples)
    steps = [batches[i : i + 2] for i in range(0, len(batches), 2)]
    first, ours = asyncio.run(tune(manifest, folder, steps, replicas))
    theirs = run_sft(manifest, base_of("qwen2"), samples, first, tmp_path / "trl", batch=ROWS, accumulated=2)
    check_equal(ours, theirs, 1e-4 if replicas == 1 else 1e-3)


async def check_dpo(name: str, objective: dict[str, Any], steps: int, folder: Path) -> None:
    """Compares `steps` pairs, one a step, of the architecture `name` with DPOTrainer: losses, metrics and adapter."""
    base = save(base_of(name), folder / "base")
    manifest, pairs = lora_manifest(base, "dpo", objective={"kind": "dpo", **objective}), preference_pairs(steps)
    first, ours = await tune(manifest, base, [[batch] for batch in pair_batches(pairs)])
    theirs = run_dpo(manifest, base_of(name), pairs, first, folder / "trl", batch=1)
    check_equal(ours, theirs, 1e-4, METRIC_NAMES["dpo"])


@pytest.mark.parametrize(
    "objective",
    [{}, {"beta": 0.5}, {"preference_loss": "ipo", "beta": 0.2}],
    ids=["sigmoid", "sigmoid-0.5", "ipo"],
)
def test_dpo_through_three_stages_is_trls(objective: dict[str, Any], tmp_path: Path) -> None:
    asyncio.run(check_dpo("qwen2", objective, STEPS, tmp_path))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_dpo_that_goes_on_from_an_adapter_compares_with_that_adapter_as_trls_does(name: str, tmp_path: Path) -> None:
    asyncio.run(check_dpo_from_adapter(name, tmp_path))


async def check_dpo_from_adapter(name: str, folder: Path) -> None:
    """As check_dpo, for a run that begins with an adapter whose matrices B are not zero."""
    base = save(base_of(name), folder / "base")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    adapter = make_adapter(base, folder / "adapter", **lora)
    manifest = lora_manifest(base, "dpo", objective={"kind": "dpo"}).with_values(model=begins_with(adapter, base))
    shutil.copy(adapter / ADAPTER_FILE, base)
    pairs = preference_pairs(STEPS)
    first, ours = await tune(manifest, base, [[batch] for batch in pair_batches(pairs)])
    assert all(values.any() for values in first.values())
    theirs = run_dpo(manifest, base_of(name), pairs, first, folder / "trl", batch=1, goes_on=True)
    check_equal(ours, theirs, 1e-4, METRIC_NAMES["dpo"])


def begins_with(adapter: Path, base: Path) -> dict[str, Any]:
    section = manifest_of(base).model
    assert isinstance(section, HfSection)
    found = read_adapter(adapter, section)
    return {**found.manifest_values(), "tensors_hash": "0" * 64}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen2"])
def test_dpo_of_every_architecture_is_trls(name: str, tmp_path: Path) -> None:
    asyncio.run(check_dpo(name, {}, STEPS, tmp_path))
