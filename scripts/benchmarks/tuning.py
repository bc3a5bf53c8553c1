"""`./scripts/bench tuning`: LoRA and QLoRA through a swarm beside one process with peft, and what codecs cost there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.children import ChildProcesses
from benchmarks.machine import describe, usable_cores
from benchmarks.report import Report
from benchmarks.task import corpus_cache, prepare_corpus
from benchmarks.tuning_codecs import measure_losses, pretrain_bases
from benchmarks.tuning_results import Losses, loss_notes, loss_rows, ratios, speed_notes
from benchmarks.tuning_settings import SPEED_SIZES, Effort, effort_of
from benchmarks.tuning_speeds import Speeds, measure_speeds
from benchmarks.turns import calmness
from benchmarks.window import START_S, print_progress

TITLE: Final = "Tuning: LoRA through a swarm beside peft, and what boundary codecs cost"


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it fails."""
    return run_with_options(quick, folder, ())


def run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:
    """Runs the comparison with what the options change, see tuning_settings.effort_of."""
    effort = effort_of(options, quick)
    report = Report("tuning", TITLE, describe())
    prepare_corpus(folder)
    speeds = _speeds(effort, folder) if effort.rounds else Speeds()
    losses = _losses(effort, folder) if effort.codecs else Losses()
    report.rows = [*speeds.rows, *loss_rows(losses.tuned)]
    report.ratios = ratios(speeds.readings, losses.tuned)
    report.notes = calmness(readings.elsewhere for readings in speeds.readings.values()) + list(speeds.notes)
    if effort.rounds:
        report.notes += speed_notes(effort, usable_cores())
    if effort.codecs:
        report.notes += loss_notes(effort, losses.untuned)
    return report


def _speeds(effort: Effort, folder: Path) -> Speeds:
    base = folder / "random"
    with ChildProcesses(folder) as nursery:
        spec = {"cache": str(corpus_cache(folder)), "threads": usable_cores()}
        order = {"to": str(base), "sizes": SPEED_SIZES, "steps": 0, "outliers": False}
        print_progress("making a base model of random weights")
        nursery.start("base-random", "tuning-base", spec).ask(order, START_S)
    return measure_speeds(base, effort, folder)


def _losses(effort: Effort, folder: Path) -> Losses:
    with ChildProcesses(folder) as nursery:
        bases = pretrain_bases(effort, folder, nursery)
        return measure_losses(bases, effort, folder, nursery)
