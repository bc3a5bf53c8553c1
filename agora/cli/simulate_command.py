"""`swarm simulate`: runs the daemon's own decisions on thousands of simulated machines, and prints a report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agora.cli import console
from agora.planning.simulator.scenario import load_scenario
from agora.planning.simulator.simulation import Simulation
from agora.planning.simulator.simulation_report import SimulationReport, plots_of, to_svg


def run(path: Path, *, seed: int | None, plots: Path | None, as_json: bool) -> int:
    """seed: replaces the scenario's. plots: the folder, None for none. Raises ScenarioError, Failure when plots cannot
    be written.
    """
    scenario = load_scenario(path)
    if seed is not None:
        scenario = dataclasses.replace(scenario, seed=seed)
    simulation = Simulation(scenario)
    what = f"simulating {scenario.peers} machines for {scenario.seconds:.0f} s"
    with console.ProgressDisplay(what, scenario.seconds) as display:
        measured = simulation.run(lambda time: display.show(time, f"{what}: {time:.0f} s"))
    report = SimulationReport(scenario, measured)
    if plots is not None:
        _write_plots(report, plots)
    if as_json:
        console.print_json(report.to_json())
    else:
        print("\n".join(report.lines()), flush=True)
    return console.EXIT_DONE


def _write_plots(report: SimulationReport, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, plot in plots_of(report.measured.samples).items():
            (folder / f"{name}.svg").write_text(to_svg(plot), encoding="utf-8")
    except OSError as error:
        raise console.Failure(f"the plots cannot be written to {folder} ({error.strerror}); give another") from None
