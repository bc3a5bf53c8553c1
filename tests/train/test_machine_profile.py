"""A machine's profile comes from real layers, ends in time, and is read again only where it still holds."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from agora_protocol.manifest import Manifest, preset

from agora.train import machine_profile
from agora.train.machine_profile import (
    MIN_BF16_GAIN,
    MachineProfile,
    compare_passes,
    find_product_dtype,
    find_profile,
    fit_line,
    measure_bf16_gain,
    measure_profile,
    profile_key,
    read_profile,
    write_profile,
)
from tests.cost.test_manifest_cost import KINDS, hf_manifest

CPU = torch.device("cpu")
PROFILE = MachineProfile(2e9, 0.001, 0.01)


def test_a_line_through_the_times_gives_what_a_microbatch_costs_at_any_size() -> None:
    assert fit_line([(1, 3.0), (2, 5.0), (4, 9.0)]) == pytest.approx((1.0, 2.0))
    assert fit_line([(2, 6.0)]) == pytest.approx((0.0, 3.0))
    assert fit_line([(1, 1.0), (2, 4.0)])[0] == 0.0, "no time is below 0"
    assert fit_line([(1, 2.0), (2, 1.0)])[1] > 0, "more rows never take less"


@pytest.mark.parametrize("manifest", [preset("tiny"), hf_manifest("llama", KINDS[0]), hf_manifest("gpt2", KINDS[2])])
def test_a_real_layer_is_timed(manifest: Manifest) -> None:
    profile = measure_profile(manifest, CPU, budget_s=0.3)
    assert 1e5 < profile.flops < 1e14
    assert profile.row_s > 0
    assert profile.fixed_s >= 0


def test_measuring_stops_when_its_time_is_over() -> None:
    ticks = itertools.count(step=1.0)  # each look at the clock is a second later
    looks = itertools.count()

    def clock() -> float:
        """A clock on which everything takes seconds."""
        next(looks)
        return next(ticks)

    profile = measure_profile(preset("tiny"), CPU, budget_s=1.0, clock=clock)
    assert profile.fixed_s == 0.0
    assert next(looks) < 12


def test_a_profile_is_read_again_and_only_for_the_same_machine_and_run(tmp_path: Path) -> None:
    path, key = tmp_path / "profile.json", profile_key(preset("tiny"), CPU)
    assert read_profile(path, key) is None
    write_profile(path, key, PROFILE)
    assert read_profile(path, key) == PROFILE
    assert read_profile(path, profile_key(preset("small"), CPU)) is None


def test_another_name_or_seed_of_a_run_needs_no_new_profile() -> None:
    assert profile_key(preset("tiny"), CPU) == profile_key(preset("tiny", name="other", seed=3), CPU)
    assert profile_key(preset("tiny"), CPU) != profile_key(preset("tiny", schedule={"microbatch": 4}), CPU)


@pytest.mark.parametrize(
    "change", [{"flops": 0}, {"flops": float("nan")}, {"flops": 1e30}, {"row_s": -1}, {"row_s": "1s"}, {"more": 1}]
)
def test_a_malformed_file_is_no_profile(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, "key", PROFILE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_profile(path, "key") is None


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"key": "key"}', " " * 5000])
def test_a_file_that_is_no_profile_at_all_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert read_profile(path, "key") is None


def test_the_first_start_measures_and_the_next_one_reads(tmp_path: Path) -> None:
    first = find_profile(tmp_path, preset("tiny"), CPU, budget_s=0.2)
    assert first is not None
    assert len(list(tmp_path.iterdir())) == 1
    assert find_profile(tmp_path, preset("tiny"), CPU, budget_s=0.2) == first


def test_a_layer_that_takes_long_is_not_measured_at_the_start(tmp_path: Path) -> None:
    sizes = {"width": 8192, "heads": 64, "key_value_heads": 8, "feed_forward": 28_672, "context": 4096}
    assert find_profile(tmp_path, preset("tiny", model=sizes, schedule={"microbatch": 1}), CPU) is None
    assert not list(tmp_path.iterdir())


def test_a_cpu_computes_in_bf16_where_that_was_measured_to_be_faster_and_measures_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_profile, "cpu_has_bf16", lambda: True)
    gains: list[float] = []

    def find(gain: float, folder: Path, manifest: Manifest = preset("tiny")) -> torch.dtype:
        def measure(manifest: Manifest) -> float:
            gains.append(gain)
            return gain

        return find_product_dtype(folder, manifest, CPU, measure)

    assert find(MIN_BF16_GAIN, tmp_path) == torch.bfloat16
    assert find(0.5, tmp_path) == torch.bfloat16 and len(gains) == 1, "a later start reads it"
    assert find(MIN_BF16_GAIN - 0.01, tmp_path, preset("small")) == torch.float32, "another run has other layers"
    (tmp_path / "file").touch()
    assert find(3.0, tmp_path / "file") == torch.bfloat16, "a folder that cannot be written"
    for path in tmp_path.glob("precision-*.json"):
        path.write_text(path.read_text().replace("1.", "-1."))
    assert find(0.5, tmp_path) == torch.float32 and len(gains) == 4, "a file that nobody has measured"


def test_without_bf16_in_hardware_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "cpu_has_bf16", lambda: False)
    assert find_product_dtype(tmp_path, preset("tiny"), CPU, measure=lambda manifest: 9.0) == torch.float32
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("manifest", [preset("tiny"), hf_manifest("llama", KINDS[0]), hf_manifest("gpt2", KINDS[2])])
def test_both_precisions_of_a_real_layer_are_timed(manifest: Manifest) -> None:
    assert 0.01 < measure_bf16_gain(manifest, budget_s=0.3) < 100


def test_of_a_large_layer_only_a_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "StageWeights", None)
    assert 0.01 < measure_bf16_gain(preset("1b"), budget_s=0.1) < 100


def test_both_take_turns_and_the_fastest_call_of_each_counts() -> None:
    now, order = [0.0], list[float]()

    def compute(seconds: float) -> None:
        order.append(seconds)
        now[0] += seconds * (3.0 if len(order) == 3 else 1.0)  # another program takes the machine once

    one, other = partial(compute, 0.02), partial(compute, 0.01)
    assert compare_passes(one, other, 1.0, clock=lambda: now[0]) == pytest.approx(2.0)
    assert order == [0.02, 0.01] * 6
    del order[:]
    assert compare_passes(one, other, 0.0, clock=lambda: now[0]) == pytest.approx(6.0) and len(order) == 4


def test_a_profile_is_of_one_precision() -> None:
    assert profile_key(preset("tiny"), CPU) == profile_key(preset("tiny"), CPU, torch.float32)
    assert profile_key(preset("tiny"), CPU) != profile_key(preset("tiny"), CPU, torch.bfloat16)
