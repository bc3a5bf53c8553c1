"""`./scripts/bench learning`: the held-out loss of a swarm by that of a plain loop at the same tokens."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.children import Child, ChildProcesses
from benchmarks.learning_curves import Point
from benchmarks.learning_results import Trained, groups_of, notes, ratios, row
from benchmarks.learning_settings import POINTS, Effort, Job, effort_of
from benchmarks.learning_swarm import LearningSwarm
from benchmarks.machine import Watch, describe, usable_cores
from benchmarks.report import Report
from benchmarks.task import corpus_cache, prepare_corpus
from benchmarks.window import print_progress

TIMEOUT_S: Final = 3600.0
CALIBRATE_S: Final = 1.5
# The ways in which OpenMP's threads may wait; see benchmarks.contenders.SingleLoop.
WAITS: Final = {"default": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
# Factor by which the plain loop trains longer, since a swarm may compute a few more tokens than it should.
OVERSHOOT: Final = 1.1


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it fails."""
    return run_with_options(quick, folder, ())


def run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:
    """Runs the comparison with what the options change, see learning_settings.effort_of."""
    effort = effort_of(options, quick)
    report = Report("learning", "Learning: what a swarm learns from its tokens, beside a plain loop", describe())
    prepare_corpus(folder, effort.manifest(effort.jobs[0]))
    found: dict[Job, Trained] = {}
    with ChildProcesses(folder) as nursery:
        plain = PlainChild(effort, folder, nursery)
        for job in effort.jobs:
            print_progress(f"training: {job.name}, {job.steps} steps, seed {job.seed}")
            found[job] = plain.train(job) if job.setting is None else train_swarm(job, effort, folder, plain)
            print_progress(_summary(found[job]))
    groups = groups_of(found)
    report.rows = [row(group) for group in groups]
    report.ratios = ratios(groups)
    report.notes = notes(effort, plain.chunk, max(run.others for run in found.values()))
    return report


class PlainChild:
    """The child process that trains the plain loop and evaluates the weights of all runs."""

    def __init__(self, effort: Effort, folder: Path, nursery: ChildProcesses) -> None:
        """Starts a child for each way to wait, and keeps the faster one."""
        self._effort, self._folder, threads = effort, folder, usable_cores()
        spec = {"cache": str(corpus_cache(folder)), "threads": threads}
        order = {"manifest": self._manifest_file(effort.jobs[0]), "calibrate": CALIBRATE_S}
        rates: dict[Child, float] = {}
        chunks: dict[Child, int] = {}
        for wait, environment in WAITS.items():
            child = nursery.start(f"plain-{wait}", "learning", spec, threads, environment)
            answer = child.ask(order, TIMEOUT_S)
            rates[child], chunks[child] = answer["rate"], answer["chunk"]
            print_progress(f"plain loop, waiting {wait}: {answer['rate']:,.0f} tokens/s with {answer['chunk']} at once")
        self._child = max(rates, key=lambda child: rates[child])
        self.chunk = chunks[self._child]
        for child in rates.keys() - {self._child}:
            child.close()

    @property
    def group(self) -> int:
        return self._child.pid

    def train(self, job: Job) -> Trained:
        """Trains the plain loop on somewhat more than the job's tokens, so that its curve has every swarm's tokens."""
        watch = Watch([self.group])
        every = max(1, job.steps // POINTS)
        ends = sorted({*range(every, job.steps, every), job.steps, round(job.steps * OVERSHOOT) + 1})
        order = {"train": ends, "chunk": self.chunk}
        curve = [Point(*point) for point in self._ask(job, order)["points"]]
        return Trained(curve, curve[1 + ends.index(job.steps)], None, 1, watch.elsewhere())

    def losses(self, job: Job, models: Sequence[Sequence[str]]) -> list[float]:
        """Returns the held-out loss of each model: the weights files of its stages. job: the run that made them."""
        losses: list[float] = self._ask(Job(None, job.steps, job.seed), {"evaluate": models})["losses"]
        return losses

    def _ask(self, job: Job, order: Mapping[str, object]) -> dict[str, Any]:
        whole = {"manifest": self._manifest_file(job), "heldout": self._effort.heldout_batches, **order}
        return self._child.ask(whole, TIMEOUT_S)

    def _manifest_file(self, job: Job) -> str:
        manifest = self._effort.manifest(job)
        file = self._folder / f"{manifest.name}.toml"
        file.write_text(manifest.to_toml(), encoding="utf-8")
        return str(file)


def train_swarm(job: Job, effort: Effort, folder: Path, plain: PlainChild) -> Trained:
    """Trains a swarm, then evaluates its weights on the way and at the end by the plain loop's evaluator."""
    assert job.setting is not None
    manifest = effort.manifest(job)
    tokens = job.steps * manifest.optimizer.target_tokens
    trained = LearningSwarm(job.setting, manifest, tokens, folder, [plain.group]).train()
    losses = iter(plain.losses(job, [model for snapshot in trained.snapshots for model in snapshot.models]))
    curve = [
        Point(snapshot.tokens, snapshot.seconds, statistics.fmean(next(losses) for _ in snapshot.models))
        for snapshot in trained.snapshots
    ]
    shutil.rmtree(folder / manifest.name, ignore_errors=True)
    return Trained(curve, curve[-1], trained.accounts, trained.daemons, trained.others)


def _summary(trained: Trained) -> str:
    end, accounts = trained.end, trained.accounts
    text = f"  loss {end.loss:.4f} after {end.tokens:,} tokens in {end.seconds:.1f} s"
    if accounts is None:
        return text
    return f"{text}, steps {accounts.steps}, counted {accounts.counted:.3f}, staleness {accounts.staleness:.2f}"
