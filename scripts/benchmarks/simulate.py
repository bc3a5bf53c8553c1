"""`./scripts/bench simulate`: what the daemon's own decisions make of thousands of machines, and how true that is.

Everything is simulated with a fixed seed, so those figures are the same on each machine; only the comparison with real
daemons is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agora.cli.local_swarm import SwarmFailed
from agora.net.shaping.link import LinkSpec
from agora.planning.simulator.churn import SHAPES
from agora.planning.simulator.measurements import Sample
from agora.planning.simulator.scenario import MachineGroup, Scenario, SimulatedModel
from agora.planning.simulator.simulation import Simulation
from agora.planning.simulator.simulation_report import SimulationReport
from benchmarks.children import BenchFailed
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report
from benchmarks.simulate_figure import draw
from benchmarks.simulate_real import CASES, observe_case, simulate
from benchmarks.window import print_progress

HOME_LINK = "200Mbit,50ms"
# Microbatches that an origin keeps in flight for each stage, where schedule.max_in_flight of the manifest sets it.
#
# Callers choose by reports of a queue that are up to a minute old. N microbatches in a closed network of M equal
# machines that are chosen at random keep N / (N + M - 1) of them busy: with 4 for each machine 0.80, with 12 for each
# 0.92.
PER_STAGE_IN_FLIGHT = 12
FIGURE = "simulate-scale.svg"
TITLE = "Simulation: the daemon's decisions on many machines"
# By part of the benchmark: the title of its section when it runs alone.
TITLES = {
    "churn": "Simulation: placement under heavy churn",
    "fleets": "Simulation: ten thousand machines",
    "real": "Simulation beside real daemons",
}
ROWS_NOTE = (
    "of_bound divides by the maximum flow of the spans that are held. took_s: seconds of this machine's processor, on "
    "one core."
)
LOAD_NOTE = (
    "messages: frames that a machine sends per second, progress included; stored and read: records of the "
    "directory per machine and second; keys: reads of one key. A run of up to 256 claims is read whole every 4 s, "
    f"a larger one six shards at a time every 8 s. ![Load by fleet size](figures/{FIGURE})"
)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is simulated. hours: of heavy churn. churn_peers: in it. traffic_s: with microbatches.

    sizes: numbers of machines of the fleets in the rows of messages.
    large: number of machines behind the ratio `ten_thousand_of_bound`.
    large_s: simulated seconds of each of these fleets.
    real_s: seconds for which a real swarm is observed.
    """

    hours: float
    churn_peers: int
    traffic_s: float
    sizes: tuple[int, ...]
    large: int
    large_s: float
    real_s: float


QUICK = Extent(0.5, 160, traffic_s=400.0, sizes=(100,), large=300, large_s=400.0, real_s=12.0)
FULL = Extent(2.0, 400, traffic_s=1200.0, sizes=(100, 1000), large=10_000, large_s=300.0, real_s=40.0)


def heavy_churn(extent: Extent, rebalancing: bool, traffic: bool) -> Scenario:
    """Returns 32 stages under the churn of a published log of preemptible machines, all of them of equal speed.

    traffic: with microbatches, and the send windows that origins measure; else for many hours, to see placement alone.
    """
    name = "heavy churn, " + ("rebalancing" if rebalancing else "no moves") + (", microbatches" if traffic else "")
    seconds = extent.traffic_s if traffic else 3600.0 * extent.hours
    scenario = _scenario(name, extent.churn_peers, stages=32, work=1.0, seconds=seconds, per_stage=0)
    return dataclasses.replace(scenario, rebalancing=rebalancing, traffic=traffic)


def large_fleet(peers: int, seconds: float, per_stage: int = PER_STAGE_IN_FLIGHT) -> Scenario:
    """Returns a scenario of 8 stages under the same churn.

    per_stage: how many microbatches origins keep in flight for each stage; with 0, as many as they measure to be right.
    """
    how = f"{per_stage} in flight per stage" if per_stage else "measured send window"
    return _scenario(f"{peers:,} peers, {how}", peers, stages=8, work=1.0, seconds=seconds, per_stage=per_stage)


def run(quick: bool, folder: Path) -> Report:
    """Runs all simulations, and the real swarms beside theirs. Raises BenchFailed when a real swarm ends by itself."""
    return run_with_options(quick, folder, ())


def run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:
    """Runs all three parts, or the one that is named; exits with code 2 for other options.

    `--churn`: placement under heavy churn. `--fleets`: up to ten thousand machines. `--real`: real daemons beside
    simulated ones. A part that runs alone has a section of its own.
    """
    parser = argparse.ArgumentParser(prog="./scripts/bench simulate", add_help=False)
    part = parser.add_mutually_exclusive_group()
    for name in TITLES:
        part.add_argument(f"--{name}", dest="part", action="store_const", const=name)
    chosen, extent = parser.parse_args(options).part, QUICK if quick else FULL
    report = Report(f"simulate --{chosen}" if chosen else "simulate", TITLES.get(chosen, TITLE), describe())
    if chosen in (None, "churn"):
        _run_churn(extent, report)
    if chosen in (None, "fleets"):
        _run_fleets(extent, report)
    if chosen in (None, "real"):
        _run_real_part(extent, folder, report)
    return report


def _run_churn(extent: Extent, report: Report) -> None:
    moving, unmoved = (_simulate(heavy_churn(extent, moves, False), report) for moves in (True, False))
    _simulate(heavy_churn(extent, True, True), report)
    report.ratios["rebalancing_of_optimal"] = Ratio(
        moving.bound_fraction_of_best_placement,
        ">= 0.96",
        "flow of the spans held by that of the best placement at each moment; without moves "
        f"{unmoved.bound_fraction_of_best_placement:.3f}",
    )
    report.notes += [churn_note(extent), ROWS_NOTE]


def _run_fleets(extent: Extent, report: Report) -> None:
    _simulate(large_fleet(extent.sizes[0], extent.large_s, per_stage=0), report)
    fleets = {peers: _simulate(large_fleet(peers, extent.large_s), report) for peers in (*extent.sizes, extent.large)}
    report.pictures = {FIGURE: _picture_of(fleets)}
    report.ratios["ten_thousand_of_bound"] = Ratio(
        fleets[extent.large].fraction_of_bound,
        ">= 0.95",
        f"throughput of {extent.large:,} peers by the flow bound of their spans",
    )
    report.notes += [fleets_note(extent), *([] if ROWS_NOTE in report.notes else [ROWS_NOTE]), LOAD_NOTE]


def _run_real_part(extent: Extent, folder: Path, report: Report) -> None:
    errors = _compare(folder, extent.real_s, report)
    worst = max(map(abs, errors.values()))
    report.ratios["model_vs_real_worst"] = Ratio(worst, "<= 0.15", "worst relative error of the simulated throughput")
    report.notes.append(
        "real: eight daemons on this machine with slowed devices; the simulator is told each one's device seconds per "
        "microbatch and the links, and gives microbatches_s; error is the difference by the real throughput. "
        "Optimizer steps, whose waits are not simulated, are made rare there."
    )


def _picture_of(fleets: Mapping[int, SimulationReport]) -> str:
    figures: dict[str, Callable[[Sample], float]] = {
        "messages sent": lambda sample: sample.messages,
        "keys of the directory read": lambda sample: sample.keys,
        "records stored": lambda sample: sample.stored,
    }
    lines = {name: [(size, found.mean(figure)) for size, found in fleets.items()] for name, figure in figures.items()}
    return draw("Per machine and second, by machines in the run", lines)


def churn_note(extent: Extent) -> str:
    """Returns what the figures of heavy churn mean, for the published page."""
    return (
        f"Heavy churn: {SHAPES['p3'].kills:.0%} of the fleet vanish per hour, up to {SHAPES['p3'].at_once} at once, "
        f"and others come; {extent.churn_peers} equal machines hold one of 32 stages each, for {extent.hours:g} hours. "
        "of_best_placement and placement_of_best divide throughput and the flow of the spans held by "
        "what an omniscient placement of whole machines would reach at each moment, where "
        "moves and joins cost nothing; machines that still fetch their state count in it."
    )


def fleets_note(extent: Extent) -> str:
    """Returns what the figures of fleets mean, for the published page."""
    return (
        f"Fleets live under the same churn, {SHAPES['p3'].kills:.0%} of the machines per hour, and hold 8 stages. "
        f"An origin keeps {PER_STAGE_IN_FLIGHT} microbatches for each stage in flight (schedule.max_in_flight). "
        f"They are simulated for {extent.large_s:g} s, of which the first "
        f"{large_fleet(1, extent.large_s).warmup_s:g} s are not counted."
    )


def _scenario(
    name: str,
    peers: int,
    *,
    stages: int,
    work: float,
    seconds: float,
    per_stage: int,
) -> Scenario:
    in_flight = per_stage * stages
    model = SimulatedModel(
        (work,) * stages, 1e6, 1e6, (200e6,) * stages, slots=max(256, 2 * in_flight), max_in_flight=in_flight
    )
    machines = (MachineGroup("machine", peers, 1.0, LinkSpec.parse(HOME_LINK)),)
    warmup_s = min(0.5 * seconds, 2.0 * per_stage * stages * work + 100.0)  # until all in flight have come twice
    churn = SHAPES["p3"]
    return Scenario(name, machines, model, churn, seconds=seconds, warmup_s=warmup_s, sample_s=10.0)


def _simulate(scenario: Scenario, report: Report) -> SimulationReport:
    started = time.process_time()
    print_progress(f"simulating {scenario.name}")
    found = SimulationReport(scenario, Simulation(scenario).run())
    measured = found.measured
    row: dict[str, Cell] = {
        "what": scenario.name,
        "peers": scenario.peers,
        "microbatches_s": found.rate,
        "of_bound": round(found.fraction_of_bound, 4),
        "of_best_placement": round(found.fraction_of_best_placement, 4),
        "placement_of_best": round(found.bound_fraction_of_best_placement, 4),
        "moves": measured.moves,
        "rerouted": measured.rerouted,
        "dropped": measured.dropped,
        "empty_longest_s": measured.longest_empty_s,
        "messages": round(found.mean(lambda sample: sample.messages), 3),
        "stored": round(found.mean(lambda sample: sample.stored), 3),
        "read": round(found.mean(lambda sample: sample.read), 3),
        "keys": round(found.mean(lambda sample: sample.keys), 3),
        "took_s": round(time.process_time() - started, 1),
    }
    report.rows.append(row)
    return found


def _compare(folder: Path, seconds: float, report: Report) -> dict[str, float]:
    errors = {}
    for number, (name, case) in enumerate(CASES.items()):
        place = folder / f"case-{number}"
        place.mkdir()
        started = time.process_time()
        try:
            seen = observe_case(place, case, seconds)
        except SwarmFailed as failed:
            raise BenchFailed(f"{name}: {failed}") from failed
        found = simulate(seen)
        errors[name] = found.rate / seen.rate - 1.0
        row: dict[str, Cell] = dict.fromkeys(report.rows[0] if report.rows else ())
        row |= {"what": f"8 real daemons, {name}", "peers": len(case), "microbatches_s": found.rate}
        row |= {"of_bound": round(found.fraction_of_bound, 4), "real": seen.rate, "error": round(errors[name], 4)}
        report.rows.append(row | {"took_s": round(time.process_time() - started, 1)})
    return errors
