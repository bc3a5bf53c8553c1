"""`./scripts/bench simulate`: its scenarios, and that the simulator gets from an observation what it should."""

from __future__ import annotations

import dataclasses

import pytest
from agora_protocol.ids import Span
from benchmarks.simulate import QUICK, heavy_churn, large_fleet
from benchmarks.simulate_real import CASES, LOOPBACK, STAGES, Observation, manifest, simulate

from agora.planning.simulator.simulation import Simulation
from agora.planning.simulator.simulation_report import SimulationReport


def test_every_case_has_eight_daemons_and_covers_all_stages() -> None:
    assert len(CASES) >= 4
    for case in CASES.values():
        held = {stage for peer in case for stage in Span.parse(peer.stages).stages}
        assert len(case) == 8
        assert held == set(range(STAGES)) == set(range(manifest().stage_count))


def test_an_observed_chain_is_simulated_at_the_rate_of_its_slowest_peer() -> None:
    device_s, spans = (0.05, 0.2, 0.1, 0.05), tuple(Span(stage, stage) for stage in range(4))
    seen = Observation(4.8, device_s, spans, ("1Gbit,1ms",) * 4, 1e5)
    assert simulate(seen).rate == pytest.approx(5.0, rel=0.02)


def test_heavy_churn_without_microbatches_shows_what_placement_loses() -> None:
    described = dataclasses.replace(heavy_churn(QUICK, True, False), seconds=500.0)
    report = SimulationReport(described, Simulation(described).run())
    assert report.measured.kills > 5
    assert report.measured.completed == 0
    assert 0.0 < report.bound_fraction_of_best_placement <= 1.0 + 1e-6


def test_a_fleet_under_churn_comes_near_the_bound() -> None:
    described = large_fleet(64, 400.0, per_stage=4)
    report = SimulationReport(described, Simulation(described).run())
    assert report.fraction_of_bound > 0.75
    assert report.measured.dropped == 0


def test_equal_simulated_peers_reach_what_their_spans_allow_from_the_start() -> None:
    """The case that is compared with eight real daemons; one that began before it knew its next peers fell to 0.6."""
    case = CASES["equal peers"]
    spans = tuple(Span.parse(peer.stages) for peer in case)
    seen = Observation(19.0, (0.1,) * 8, spans, (LOOPBACK,) * 8, 33_000.0)
    found = simulate(seen)
    assert found.fraction_of_bound > 0.9
    assert found.measured.rerouted == 0
