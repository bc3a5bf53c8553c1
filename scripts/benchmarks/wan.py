"""`./scripts/bench wan`: the time to a target loss over slow links, of what may cross a boundary.

Each codec is trained with two optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.children import ChildProcesses
from benchmarks.machine import describe
from benchmarks.report import Report
from benchmarks.task import prepare_corpus
from benchmarks.wan_notes import notes
from benchmarks.wan_results import Results, ratios, row
from benchmarks.wan_settings import effort_of
from benchmarks.wan_speeds import Swarms
from benchmarks.wan_training import train_all


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it fails."""
    return run_with_options(quick, folder, ())


def run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:
    """Runs the comparison with what the options change, see wan_settings.effort_of."""
    effort = effort_of(options, quick)
    report = Report("wan", "Slow links: the time to a target loss", describe())
    prepare_corpus(folder, effort.corpus_manifest())
    results = []
    for runs in train_all(effort, folder):
        speeds = None
        if not effort.losses_only:
            with ChildProcesses(folder) as nursery:
                speeds = Swarms(effort, runs.width, folder, nursery).speeds(runs.links_to_measure())
        results.append(Results(runs, speeds))
    report.rows = [row(of_width, recipe) for of_width in results for recipe in of_width.runs.recipes]
    report.ratios, report.notes = ratios(results), notes(results)
    return report
