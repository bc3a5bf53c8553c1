"""Small simulated swarms: what holds of them whatever the seed."""

from __future__ import annotations

from typing import Any

import pytest

from agora.planning.simulator.scenario import Scenario, parse_scenario
from agora.planning.simulator.simulation import Simulation
from agora.planning.simulator.simulation_report import SimulationReport, plots_of, to_svg


def scenario(machines: list[dict[str, Any]], stages: int = 4, **changed: Any) -> Scenario:
    model = {"stages": stages, "work": 0.5, "boundary_bytes": 1e5, "state_bytes": 1e7} | changed.pop("model", {})
    return parse_scenario({"seconds": 300, "warmup_s": 100, "model": model, "machines": machines, **changed})


def simulated(described: Scenario) -> SimulationReport:
    return SimulationReport(described, Simulation(described).run())


def test_one_chain_of_machines_computes_at_the_rate_of_its_slowest() -> None:
    chain = [{"count": 1, "stages": str(stage), "speed": 1.0 if stage == 2 else 2.0} for stage in range(4)]
    report = simulated(scenario(chain))
    assert report.mean(lambda sample: sample.bound) == pytest.approx(2.0, rel=1e-4)
    assert report.fraction_of_bound == pytest.approx(1.0, abs=0.02)
    assert report.measured.rerouted == report.measured.dropped == report.measured.counted_twice == 0


def test_a_machine_of_all_stages_needs_nobody() -> None:
    report = simulated(scenario([{"count": 1, "stages": "0-3", "speed": 4.0}]))
    assert report.fraction_of_bound == pytest.approx(1.0, abs=0.02)
    assert report.measured.messages == 0


def test_a_slow_link_bounds_the_rate() -> None:
    ends = [{"count": 1, "stages": str(stage), "link": "8Mbit,10ms"} for stage in range(2)]
    report = simulated(scenario(ends, 2, model={"work": 0.01, "boundary_bytes": 1e6}))
    assert report.rate == pytest.approx(1.0, rel=0.03)


def test_replicas_of_unequal_speed_share_the_work() -> None:
    replicas = [{"count": 1, "stages": "1", "speed": speed} for speed in (4.0, 2.0, 1.0)]
    report = simulated(scenario([{"count": 1, "stages": "0", "speed": 20.0}, *replicas], 2))
    assert report.fraction_of_bound > 0.95


def test_the_same_seed_gives_the_same_swarm() -> None:
    described = scenario([{"count": 12}], churn={"shape": "p3"}, seed=5, seconds=200)
    assert simulated(described).to_json() == simulated(described).to_json()
    other = scenario([{"count": 12}], churn={"shape": "p3"}, seed=6, seconds=200)
    assert simulated(described).to_json() != simulated(other).to_json()


@pytest.mark.parametrize("seed", range(3))
def test_under_kills_and_hangs_no_microbatch_is_dropped(seed: int) -> None:
    churn = {"kills_per_hour": 2.0, "hangs_per_hour": 1.5, "leaves_per_hour": 1.5, "return_s": 20.0, "at_once": 2}
    report = simulated(scenario([{"count": 24}], churn=churn, seed=seed, seconds=400))
    measured = report.measured
    assert measured.kills + measured.hangs + measured.leaves >= 4
    assert measured.joins
    assert measured.rerouted > 0
    assert measured.dropped == 0
    assert measured.completed > 300
    assert measured.counted_twice <= 0.01 * measured.counted


def test_the_pictures_have_a_line_for_each_name() -> None:
    report = simulated(scenario([{"count": 8}], seconds=150))
    for plot in plots_of(report.measured.samples).values():
        svg = to_svg(plot)
        assert svg.count("<polyline") == len(plot.lines)
        assert svg.endswith("</svg>\n")
