"""The tuning benchmark: both sides compute the same model, ratios, options, loss runs, a whole run of each part."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.ids import MicrobatchId
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from benchmarks import tuning, tuning_settings, tuning_speeds
from benchmarks.report import Report, columns
from benchmarks.task import corpus_cache, prepare_corpus, spec
from benchmarks.tuning_base import OUTLIER_COLUMNS, make_model, next_token_loss, plant_outliers, pretrain, rate_share
from benchmarks.tuning_losses import TunedStages, tune
from benchmarks.tuning_peft import load_model, train
from benchmarks.tuning_results import (
    CODEC_RATIO,
    SPEED_RATIOS,
    TunedLoss,
    best_codec,
    loss_notes,
    loss_rows,
    ratios,
    speed_notes,
)
from benchmarks.tuning_settings import (
    BASES,
    EXACT,
    FEWER,
    FULL,
    QUICK,
    FrozenAs,
    LossJob,
    effort_of,
    loss_manifest,
    speed_manifest,
    times_fewer,
)
from benchmarks.tuning_speeds import PeftLoop, ProcessorTime, measure_speeds, processor_time
from benchmarks.turns import Readings
from benchmarks.workload import Work, loss_sum
from torch import Tensor

from agora.model import family_of

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Sizes of a model small enough for tests. Layers of 64 inputs fill a block of NF4."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose values are those of bf16, as of most published models: nf4 rounds the embeddings to bf16."""
    folder = tmp_path_factory.mktemp("base")
    make_model(SMALL).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 1200, encoding="ascii")
    return file


# --- both sides compute the same


@pytest.mark.parametrize("frozen_as", ["float32", "nf4"])
def test_peft_and_the_stages_of_the_swarm_are_the_same_model_with_the_same_adapters(
    base: Path, frozen_as: FrozenAs
) -> None:
    manifest = speed_manifest(base, frozen_as)
    section = manifest.model
    assert isinstance(section, HfSection)
    whole = load_model(base, section, torch.device("cpu"))
    theirs = {name: parameter for name, parameter in whole.named_parameters() if parameter.requires_grad}
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
    hidden, ours = tokens[:, :-1], dict[str, Tensor]()
    for number in range(manifest.stage_count):
        stage = family_of(section).build_stage(manifest.layers_of(number), manifest.seed, base)
        trained = {f"base_model.model.{name}": parameter for name, parameter in stage.trained_parameters()}
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.normal_(std=0.05)
                theirs[name].copy_(parameter)
        hidden = stage(hidden, tokens[:, :-1])
        ours |= trained
    assert ours.keys() == theirs.keys()
    logits = whole(input_ids=tokens[:, :-1]).logits
    torch.testing.assert_close(hidden, logits, rtol=1e-4, atol=1e-4)
    for leaving in (hidden, logits):
        loss_sum(leaving, tokens[:, 1:]).backward()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-3)


def test_a_step_of_the_peft_loop_has_the_tokens_of_a_step_of_the_swarm(base: Path, text: Path, tmp_path: Path) -> None:
    manifest = speed_manifest(base, "float32").with_values(
        data={"corpus": (str(text),), "heldout": 0.1}, optimizer={"target_tokens": 1024, "warmup_steps": 0}
    )
    section = manifest.model
    assert isinstance(section, HfSection)
    prepare_corpus(tmp_path, manifest)
    work = Work(spec(manifest, tmp_path, 1))
    model = load_model(base, section, torch.device("cpu"))
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
    losses = train(work, model, torch.device("cpu"))
    first = next(losses)
    assert not any(bool(parameter.any()) for parameter in adapters), "a step is two microbatches of 512 tokens"
    next(losses)
    assert all(bool(parameter.any()) for parameter in adapters)
    assert first == pytest.approx(math.log(256), rel=0.1)
    last = list(itertools.islice(losses, 30))[-1]
    assert last < first


# --- results


def losses_of(values: dict[tuple[str, str], float]) -> dict[LossJob, TunedLoss]:
    """The losses of two seeds, by base model and codec; the second seed's are twice the first one's."""
    return {
        LossJob(base, codec, seed): TunedLoss(loss * (1 + seed), loss * (1 + seed))
        for seed in (0, 1)
        for (base, codec), loss in values.items()
    }


FOUND = losses_of(
    {
        ("ordinary", EXACT): 2.0,
        ("ordinary", "int8"): 2.0,
        ("ordinary", "int4/int3"): 2.02,
        ("ordinary", "int5h/int2h"): 2.04,
        ("outliers", EXACT): 1.0,
        ("outliers", "int8"): 1.0,
        ("outliers", "int4/int3"): 1.2,
        ("outliers", "int5h/int2h"): 1.01,
    }
)


def test_ratios_have_the_names_of_the_contract_and_what_was_not_measured_has_none() -> None:
    assert [*SPEED_RATIOS, CODEC_RATIO] == ["swarm_vs_peft", "nf4_swarm_vs_peft", "codec_4x_loss"]
    found = ratios({}, {})
    assert list(found) == [*SPEED_RATIOS, CODEC_RATIO]
    assert all(math.isnan(ratio.value) for ratio in found.values())


def test_ratios_divide_the_swarm_by_peft_of_the_same_weights() -> None:
    rates = {"peft": 100.0, "swarm": 98.0, "nf4_peft": 50.0, "nf4_swarm": 60.0}
    found = ratios({name: Readings([rate], [1.0], [0.0]) for name, rate in rates.items()}, FOUND)
    assert {name: ratio.value for name, ratio in found.items()} == pytest.approx(
        {"swarm_vs_peft": 0.98, "nf4_swarm_vs_peft": 1.2, "codec_4x_loss": 1.02}
    )


def test_the_best_codec_costs_least_where_it_costs_more_and_sends_few_enough_bytes() -> None:
    assert times_fewer("int8") < FEWER <= min(times_fewer(codec) for codec in ("int4/int3", "int5h/int2h"))
    assert times_fewer("bf16") == 1.0 and times_fewer("float32") == 0.5
    codec, ratio = best_codec(FOUND)
    assert codec == "int5h/int2h" and ratio == pytest.approx(1.02)


def test_a_codec_costs_what_the_worse_of_both_losses_says() -> None:
    found = FOUND | {LossJob("ordinary", "int5h/int2h", seed): TunedLoss(2.0, 3.0 * (1 + seed)) for seed in (0, 1)}
    assert best_codec(found) == ("int4/int3", pytest.approx(1.2))


def test_rows_share_their_columns_and_are_json() -> None:
    rows = loss_rows(FOUND)
    notes = speed_notes(QUICK, 2) + loss_notes(QUICK, {"ordinary": 2.5, "outliers": 2.25})
    report = Report("tuning", "Tuning", {}, rows, ratios({}, FOUND), notes)
    assert len({tuple(columns([row])) for row in rows}) == 1 and len(rows) == 8
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    lines = {row["name"]: row for row in told["rows"]}
    assert (lines["int4/int3, outliers"]["cost_%"], lines["int4/int3, outliers"]["rounds"]) == (20.0, 2)
    assert told["ratios"]["swarm_vs_peft"] is None and "2.25 (outliers)" in " ".join(told["notes"])


# --- settings


def test_a_step_of_the_swarm_is_long_enough_for_two_microbatches_in_flight_for_each_stage(base: Path) -> None:
    manifest = speed_manifest(base, "nf4")
    microbatches = manifest.optimizer.target_tokens // manifest.tokens_per_microbatch
    assert microbatches == 32 and manifest.schedule.max_in_flight == 0
    assert manifest.schedule.staleness * microbatches == 2 * manifest.stage_count
    assert isinstance(manifest.model, HfSection)
    assert (manifest.model.trained, manifest.model.frozen_as, manifest.boundary.codec) == ("lora", "nf4", "bf16")


def test_the_efforts_have_what_the_ratios_need() -> None:
    for effort in (QUICK, FULL):
        assert {job.base for job in effort.loss_jobs} == set(BASES) and effort.rounds >= 3
        assert EXACT in effort.codecs and max(map(times_fewer, effort.codecs)) >= FEWER
    assert len(FULL.seeds) >= 3


def test_options_choose_parts_codecs_and_lengths() -> None:
    speeds = effort_of(["--speeds"], quick=True)
    assert (speeds.rounds, speeds.codecs, speeds.loss_jobs) == (QUICK.rounds, (), [])
    given = "--losses --codecs int4h,top96:int4 --seeds 2 --steps 10 --stages 2"
    losses = effort_of(given.split(), quick=False)
    assert (losses.rounds, losses.codecs) == (0, ("float32", "bf16", "int4h", "top96:int4"))
    assert (losses.seeds, losses.steps, losses.stages) == ((0, 1), 10, 2)


@pytest.mark.parametrize("options", [["--codecs", "int9"], ["--speeds", "--losses"], ["--stages", "5"], ["--fast"]])
def test_options_that_mean_nothing_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        effort_of(options, quick=True)
    assert refused.value.code == 2


# --- base models and loss runs


def test_planted_outliers_stay_while_the_model_learns(tmp_path: Path) -> None:
    model = make_model({**SMALL, "max_position_embeddings": 64, "hidden_size": 128})
    plant_outliers(model)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))
    before = float(next_token_loss(model, tokens).detach())
    assert before == pytest.approx(math.log(256), rel=0.1)
    assert pretrain(model, corpus_cache(tmp_path), 12) < 0.9 * before
    layers = model(input_ids=tokens, output_hidden_states=True).hidden_states[1:-1]
    for hidden in layers:
        columns_rms = hidden.detach().square().mean(dim=(0, 1)).sqrt()
        assert sorted(columns_rms.topk(2).indices.tolist()) == sorted(OUTLIER_COLUMNS)
        assert float(columns_rms.max() / columns_rms.median()) > 10


def test_the_learning_rate_of_pretraining_rises_and_falls() -> None:
    shares = [rate_share(step, 100) for step in range(100)]
    assert max(shares) == shares[4] == 1.0 and shares[0] == 0.2
    assert shares[5:] == sorted(shares[5:], reverse=True) and shares[-1] == pytest.approx(0.1, abs=0.01)


@pytest.fixture
def manifest(base: Path, text: Path) -> Manifest:
    made = loss_manifest(base, text, LossJob("ordinary", EXACT, 0), replace(QUICK, steps=20))
    return made.with_values(schedule={"microbatch": 2}, optimizer={"target_tokens": 256})


def test_stages_of_lora_learn_and_begin_as_the_base_model(manifest: Manifest, base: Path, tmp_path: Path) -> None:
    crossed: list[tuple[str, int]] = []

    def cross(tensor: Tensor, direction: str, microbatch: MicrobatchId, stage: int) -> Tensor:
        crossed.append((direction, stage))
        return tensor

    stages = TunedStages(manifest, base, tmp_path)
    untuned = stages.loss(2, cross)
    assert crossed == [("forward", stage) for stage in (1, 2, 3)] * 2
    assert untuned == pytest.approx(math.log(256), rel=0.1)
    crossed.clear()
    stages.learn(0, cross)
    assert crossed == [("forward", stage) for stage in (1, 2, 3)] + [("backward", stage) for stage in (3, 2, 1)]
    for step in range(1, 20):
        stages.learn(step, cross)
    assert stages.loss(2, cross) < untuned


def test_a_loss_run_tells_the_loss_with_its_codec_and_without(manifest: Manifest, base: Path, tmp_path: Path) -> None:
    untuned, exported = tune(manifest, base, tmp_path, 0, 2)
    assert untuned == exported
    coarse = manifest.with_values(boundary={"codec": "int2"})
    loss, exported = tune(coarse, base, tmp_path, 0, 2)
    assert loss != exported == untuned
    loss, exported = tune(coarse, base, tmp_path, 20, 2)
    assert loss < untuned and exported < untuned


# --- processor time, and the whole


def test_processor_time_is_told_by_thread() -> None:
    stop, before = threading.Event(), processor_time(os.getpid())

    def burn() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=burn)
    thread.start()
    while (used := processor_time(os.getpid()).since(before)).threads.get(thread.native_id or 0, 0.0) < 0.05:
        pass
    stop.set()
    thread.join()
    assert 0.05 <= used.busiest <= used.total
    spent = ProcessorTime({1: 2.0, 2: 1.0}, 0.5).since(ProcessorTime({1: 0.5}, 0.25))
    assert (spent.threads, spent.children, spent.busiest, spent.total) == ({1: 1.5, 2: 1.0}, 0.25, 1.5, 2.75)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_of_codecs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_settings, "QUICK", replace(QUICK, pretraining_steps=2, heldout_batches=1))
    report = tuning.run_with_options(True, tmp_path, ["--losses", "--codecs", "int5h/int2h", "--steps", "2"])
    names = [f"{codec}, {base}" for base in BASES for codec in ("float32", "bf16", "int5h/int2h")]
    assert [row["name"] for row in report.rows] == names
    assert 0.9 < report.ratios[CODEC_RATIO].value < 1.5 and math.isnan(report.ratios["swarm_vs_peft"].value)
    assert "int5h/int2h" in report.ratios[CODEC_RATIO].meaning


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_swarm_of_daemons_is_timed_beside_peft(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_speeds, "PREFIXES", {"nf4": "nf4_"})
    monkeypatch.setattr(tuning_speeds, "WARM_S", 0.1)
    monkeypatch.setattr(PeftLoop, "waits", {"passive": {"OMP_WAIT_POLICY": "PASSIVE"}})
    prepare_corpus(tmp_path)
    found = measure_speeds(base, replace(QUICK, rounds=1, window_s=0.5), tmp_path)
    rows: dict[str, dict[str, Any]] = {str(row["name"]): row for row in found.rows}
    assert list(rows) == ["nf4_peft", "nf4_swarm"] == list(found.readings) and len(found.notes) == 2
    assert min(rows[name]["median"] for name in rows) > 0
    device, rest = rows["nf4_swarm"]["device_s_per_1000"], rows["nf4_swarm"]["rest_s_per_1000"]
    assert len(device.split("/")) == 2 and all(float(stage) > 0 for stage in device.split("/")) and rest > 0
    assert math.isnan(ratios(found.readings, {})["swarm_vs_peft"].value)
    assert ratios(found.readings, {})["nf4_swarm_vs_peft"].value > 0
