"""What a machine says of itself to placement: which spans fit, how fast it computes, what the run's stages ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, preset

from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import Machine, RunCost, StageCost
from agora.node.limits.memory import BASE_BYTES
from agora.node.peer.capacity_probe import CapacityProbe, longest_spans, needs_of
from agora.node.settings import Settings
from agora.train import machine_profile
from agora.train.machine_profile import MachineProfile, profile_key, write_profile

FLOPS = 1e10


def tiny(stages: int = 4) -> Manifest:
    return preset("tiny", model={"layers": stages}, stages={"count": stages})


def probe(folder: Path, **settings: object) -> CapacityProbe:
    """What a machine has found out that was profiled before."""
    key = profile_key(tiny(), torch.device("cpu"))
    write_profile(folder / f"profile-{key[:16]}.json", key, MachineProfile(FLOPS, 0.0, 1.0))
    own = CapacityProbe(tiny(), Settings(**{"device": "cpu", "precision": "float32", **settings}), folder)
    asyncio.run(own.assess_machine())
    return own


def test_a_cpu_computes_in_the_precision_that_is_faster_unless_its_owner_says_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_profile, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(machine_profile, "measure_bf16_gain", lambda manifest: 2.0)
    assert probe(tmp_path, precision="auto").dtype == torch.bfloat16
    assert probe(tmp_path).dtype == torch.float32
    assert probe(tmp_path, device="cuda:99", precision="auto").dtype is None, "building the stages says what is wrong"


def test_the_longest_span_from_each_stage_is_what_fits() -> None:
    cost = RunCost(
        [StageCost(1.0, 1.0, frozen_bytes=size) for size in (1.0, 2.0, 3.0, 9.0, 1.0)],
        forward_bytes=0,
        backward_bytes=0,
        tokens=1,
        in_flight=1,
    )
    assert longest_spans(cost, Machine("m", 1.0, 5.0), 0) == (2, 2, 1, 0, 1)
    assert longest_spans(cost, Machine("m", 1.0, 5.0), 1) == (1, 1, 1, 0, 1)
    assert longest_spans(cost, Machine("m", 1.0, 100.0), 0) == (5, 4, 3, 2, 1)


def test_demands_are_the_work_the_larger_boundary_and_what_a_newcomer_fetches() -> None:
    stages = [StageCost(1.0, 1.0, state_bytes=7.0), StageCost(3.0, 3.0, state_bytes=8.0)]
    needs = needs_of(RunCost(stages, forward_bytes=2.0, backward_bytes=3.0, tokens=1, in_flight=1, activations="keep"))
    assert needs.work == pytest.approx((0.5, 1.5))
    assert (needs.boundary_bytes, needs.state_bytes) == (3.0, (7.0, 8.0))


def test_before_anything_is_measured_speed_and_bandwidth_are_unknown(tmp_path: Path) -> None:
    own = CapacityProbe(tiny(), Settings(), tmp_path)
    assert (own.machine.speed, own.machine.bandwidth, own.machine.max_span_lengths) == (0.0, 0.0, ())
    assert len(own.needs.work) == 4 and sum(own.needs.work) == pytest.approx(4.0)


def test_the_profile_gives_the_speed_and_a_brake_divides_it(tmp_path: Path) -> None:
    cost = run_cost(tiny())
    mean = sum(cost.flops(Span(stage, stage)) for stage in range(4)) / 4
    assert probe(tmp_path).machine.speed == pytest.approx(FLOPS / mean)
    assert probe(tmp_path, slowdown=8.0).machine.speed == pytest.approx(FLOPS / mean / 8.0)


def test_owners_limits_shorten_the_spans(tmp_path: Path) -> None:
    assert probe(tmp_path).machine.max_span_lengths == (4, 3, 2, 1), "room for all of a tiny model"
    assert probe(tmp_path, most_stages=2).machine.max_span_lengths == (2, 2, 2, 1)
    assert probe(tmp_path, memory_gib=BASE_BYTES / 2**30).machine.max_span_lengths == (0, 0, 0, 0)


def test_measured_work_replaces_the_profile_and_a_silent_uplink_changes_nothing(tmp_path: Path) -> None:
    own = probe(tmp_path)
    assert own.record_measurement(Span(1, 2), 0.25, 1e6) == 4.0
    work = own.needs.work
    assert own.machine.speed == pytest.approx(4.0 * (work[1] + work[2]))
    assert own.machine.bandwidth == 1e6
    own.record_measurement(Span(0, 0), 0.5, None)
    assert own.machine.bandwidth == 1e6 and own.machine.speed == pytest.approx(2.0 * work[0])
    asyncio.run(own.assess_machine())
    assert own.machine.speed == pytest.approx(2.0 * work[0]), "what was measured is not forgotten for the next span"
