"""The agreement benchmark: synchronous replicas are one, a round's bytes are those of its slice, fixed names."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.ids import MicrobatchId
from agora_protocol.manifest import Manifest
from benchmarks import agreement
from benchmarks.agreement_replicas import Anchored, Exact, Replica, agree, judge, train
from benchmarks.agreement_settings import (
    FEWEST_BITS,
    FULL,
    MORE,
    NEEDED,
    NONE,
    QUICK,
    SYNCHRONOUS,
    Effort,
    Setting,
    sequences_of,
)
from benchmarks.children import ChildProcesses, deal
from benchmarks.report import columns
from benchmarks.task import prepare_corpus, spec

from agora.core.step_instructions import StepInstructions
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler
from agora.data.tokenizer import ByteTokenizer, Ids
from agora.replica.number_formats import NumberFormat
from agora.replica.reducers import FragmentDivision
from agora.train.objectives import TokenBatch
from agora.train.weight_versions import DecodedWork

TINY = Effort((0,), 6, 32, 1, 16, 8, heldout_batches=2)
REPLICAS = 4
PLAIN_MEAN: Any = {"outer_rate": 1.0, "outer_momentum": 0.0}
"""Of the anchor: it becomes the mean of the weights."""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    text = tmp_path / "corpus.txt"
    text.write_text("def square(number):\n    return number * number\n\n" * 200)
    return TINY.manifest().with_values(data={"corpus": (str(text),), "heldout": 0.1})


@pytest.fixture
def corpus(manifest: Manifest, tmp_path: Path) -> Ids:
    return open_corpus(manifest.data.corpus, ByteTokenizer(), tmp_path)


@pytest.fixture
def sampler(manifest: Manifest, corpus: Ids) -> Sampler:
    return Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)


def replicas_of(manifest: Manifest, sampler: Sampler) -> list[Replica]:
    return [Replica(manifest, sampler, f"replica {number}", 2) for number in range(REPLICAS)]


def trained(manifest: Manifest, sampler: Sampler, setting: Setting, steps: int) -> dict[str, float]:
    return train(setting.manifest(manifest, manifest.seed), sampler, setting, steps, 2)


def test_synchronous_replicas_are_one_that_sees_all_samples(manifest: Manifest, sampler: Sampler) -> None:
    replicas = replicas_of(manifest, sampler)
    together = Exact(replicas, "float32")
    (alone,) = [Replica(manifest, sampler, "alone", 2)]
    alone.trainer.stages[0].set_instructions(StepInstructions(REPLICAS * alone.tokens))
    for step in range(5):
        drawn = [replica.draw(step) for replica in replicas]
        for replica, tokens in zip(replicas, drawn, strict=True):
            assert torch.equal(replica.draw(step), tokens)
            replica.learn(step, 1.0)
        together.after(step + 1)
        tokens = torch.cat(drawn)
        batch = TokenBatch.from_wire(tokens, has_marks=False)
        alone.trainer.run_last_stages(
            DecodedWork(MicrobatchId(bytes(16)), 0, batch.inputs.contiguous(), batch, "train")
        )
        alone.trainer.take_due_steps()
    assert [replica.stage.step for replica in (*replicas, alone)] == [5] * (REPLICAS + 1)
    for replica in replicas:
        assert torch.equal(replica.flat, replicas[0].flat)
        torch.testing.assert_close(replica.flat, alone.flat, rtol=0, atol=2e-5)
    assert together.bytes_each == 5 * 4 * len(alone.flat)


def test_gradients_in_int8_are_the_same_for_all_and_near_those_in_float32(manifest: Manifest, sampler: Sampler) -> None:
    rough, plain = (
        trained(manifest, sampler, Setting("gradients", wire), 6)
        for wire in ("int8", "float32")  # the first in few bits travel as int8
    )
    assert rough["apart"] == pytest.approx(0, abs=1e-6) and rough["bytes"] < 0.26 * plain["bytes"]
    assert rough["loss_of_replica"] == pytest.approx(plain["loss_of_replica"], rel=0.01)


@pytest.mark.parametrize("wire", ["normal2", "int8", "float32"])
def test_a_round_puts_in_the_bytes_of_its_slice(manifest: Manifest, sampler: Sampler, wire: str) -> None:
    setting = Setting("slices", wire, 4, every=2)
    found = trained(manifest, sampler, setting, 6)
    flat = replicas_of(manifest, sampler)[0].flat
    slices = FragmentDivision(len(flat), 4, manifest.seed)
    taken = [torch.zeros(slices.numel_of(number)) for number in (1, 2, 3)]
    sent = sum(tensor.nbytes for values in taken for tensor in NumberFormat(setting.wire).encode(values))
    assert found["rounds"] == 3 and found["bytes"] == pytest.approx(sent / len(flat) / 6)


def test_replicas_that_never_average_send_nothing_and_part(manifest: Manifest, sampler: Sampler) -> None:
    none, synchronous = (trained(manifest, sampler, setting, 6) for setting in (NONE, SYNCHRONOUS))
    assert none["bytes"] == none["rounds"] == 0 and none["apart"] > 0.001
    assert synchronous["apart"] == pytest.approx(0, abs=1e-6) and synchronous["bytes"] == 4.0
    assert synchronous["loss_of_mean"] == pytest.approx(synchronous["loss_of_replica"])


def test_agreeing_on_everything_at_once_makes_replicas_equal(manifest: Manifest, sampler: Sampler) -> None:
    setting = Setting("slices", slices=1, every=3, delay=0, **PLAIN_MEAN)
    assert trained(manifest, sampler, setting, 6)["apart"] < 1e-5
    assert trained(manifest, sampler, replace(setting, every=4), 6)["apart"] > 1e-5


def test_rounds_under_way_are_taken_in_by_their_numbers(manifest: Manifest, sampler: Sampler) -> None:
    manifest = manifest.with_values(averaging={"exact_steps": 0})
    replicas = replicas_of(manifest, sampler)
    averaging = agree(Setting("slices", slices=20, delay=3), replicas, 0)
    assert isinstance(averaging, Anchored)
    for step in range(1, 7):
        averaging.after(step)
    assert averaging.rounds == 6 and [replica.stage.progress.agreed_step for replica in replicas] == [3] * REPLICAS


def test_judging_leaves_the_first_replica_with_the_mean(manifest: Manifest, sampler: Sampler) -> None:
    replicas = replicas_of(manifest, sampler)
    base = replicas[0].flat.clone()
    for number, replica in enumerate(replicas):
        with replica.stage.weights.writable() as flat:
            flat.mul_(number)
    found = judge(replicas, [replicas[0].draw(0)])
    torch.testing.assert_close(replicas[0].flat, 1.5 * base)
    assert found["apart"] == pytest.approx(np.sqrt(5 / 4) / 1.5)


def test_settings_have_names_of_their_own_and_the_ratios_what_they_need() -> None:
    names = [setting.name for setting in {*NEEDED, *MORE}]
    assert len(set(names)) == len(names)
    sixteen = Setting("gradients", "normal2", replicas=16, optimizer="adamw")
    assert sixteen.name == "adamw: every gradient as normal2, 16 replicas"
    assert Setting("slices", "normal2", 10, every=2).name == "muon: all weights in 20 inner steps as normal2"
    for effort in (QUICK, FULL):
        assert len(set(effort.jobs)) == len(effort.jobs) and effort.manifest().optimizer.total_steps == effort.steps
        found = {setting: [{"loss_of_replica": 2.0, "bytes": 0.5}] for setting, _ in effort.jobs}
        assert [ratio.value for ratio in agreement.ratios(found).values()] == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]


def test_the_sequences_of_a_step_are_all_dealt() -> None:
    assert sequences_of(64, 4, unequal=False) == [16] * 4
    assert sequences_of(64, 4, unequal=True) == [6, 13, 19, 26] and sum(sequences_of(37, 16, unequal=False)) == 37


@pytest.mark.parametrize("stale", [0.0, 0.5])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_replicas_whose_gradients_travel_in_few_bits_are_the_same_bits(
    manifest: Manifest, sampler: Sampler, stale: float, missing: float
) -> None:
    setting = Setting("gradients", "normal2", stale=stale, missing=missing, unequal=True)
    found = trained(manifest, sampler, setting, 24)
    assert found["apart"] == pytest.approx(0, abs=1e-6) and found["rounds"] == 24
    assert (20 * 1.0 + 4 * 0.25) / 24 < found["bytes"] < (20 * 1.02 + 4 * 0.28) / 24, "the first 20 as int8"


def test_rows_compare_within_a_seed() -> None:
    one = {"loss_of_replica": 1.0, "loss_of_mean": 1.0, "apart": 0.0, "bytes": 4.0}
    found = {SYNCHRONOUS: [one, one], FEWEST_BITS: [one | {"loss_of_replica": 1.1}, one | {"loss_of_replica": 1.3}]}
    row = agreement.row(FEWEST_BITS, found)
    assert agreement.row(NONE, found | {NONE: [one]})["lost_%"] == 0.0
    assert (row["lost_%"], row["low"], row["high"]) == pytest.approx((20.0, 10.0, 30.0))
    assert columns([row])[0] == "name"


@pytest.mark.process
def test_children_share_the_jobs(manifest: Manifest, tmp_path: Path) -> None:
    prepare_corpus(tmp_path, manifest)
    told = spec(manifest, tmp_path, 1, steps=2, heldout=1)
    jobs = [(NONE, 0), (SYNCHRONOUS, 0), (NONE, 1)]
    with ChildProcesses(tmp_path) as nursery:
        children = [nursery.start(f"replicas-{number}", "agreement", told) for number in range(2)]
        answers = dict(deal(children, [(job, {"setting": asdict(job[0]), "seed": job[1]}) for job in jobs], 60.0))
    assert sorted(map(repr, answers)) == sorted(map(repr, jobs))
    assert answers[NONE, 0]["loss_of_replica"] != answers[NONE, 1]["loss_of_replica"]
