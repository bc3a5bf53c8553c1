"""Loss runs of the tuning benchmark, dealt out to child processes of one thread each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks.children import ChildProcesses, deal
from benchmarks.machine import usable_cores
from benchmarks.task import corpus_cache
from benchmarks.tuning_results import Losses, TunedLoss
from benchmarks.tuning_settings import BASES, EXACT, LOSS_SIZES, TUNED_TEXT, BaseName, Effort, LossJob, loss_manifest
from benchmarks.window import print_progress

TIMEOUT_S: Final = 3600.0


def pretrain_bases(effort: Effort, folder: Path, nursery: ChildProcesses) -> dict[BaseName, Path]:
    """Pretrains the base models, each in a child of its own, and writes the text to tune them on. Returns folders."""
    print_progress(f"pretraining {len(BASES)} small models")
    spec = {"cache": str(corpus_cache(folder)), "threads": max(1, usable_cores() // len(BASES))}
    folders = {base: folder / base for base in BASES}
    children = [nursery.start(f"base-{base}", "tuning-base", spec) for base in BASES]
    children[0].ask({"text": str(folder / TUNED_TEXT)}, TIMEOUT_S)
    orders = (
        (base, {"to": str(to), "sizes": LOSS_SIZES, "steps": effort.pretraining_steps, "outliers": base == "outliers"})
        for base, to in folders.items()
    )
    for base, answer in deal(children, orders, TIMEOUT_S):
        print_progress(f"pretrained {base}: loss {answer['loss']:.3f}")
    for child in children:
        child.close()
    return folders


def measure_losses(bases: Mapping[BaseName, Path], effort: Effort, folder: Path, nursery: ChildProcesses) -> Losses:
    """Tunes the base models in the folders `bases` through each codec, and returns all losses."""
    spec = {"cache": str(corpus_cache(folder)), "heldout": effort.heldout_batches, "threads": 1}
    children = [nursery.start(f"losses-{number}", "tuning-losses", spec) for number in range(usable_cores())]
    checks = {LossJob(base, EXACT, effort.seeds[0]): 0 for base in BASES}
    found: dict[LossJob, TunedLoss] = {}
    untuned = {
        job.base: answer["loss"] for job, answer in deal(children, _orders(checks, bases, effort, folder), TIMEOUT_S)
    }
    jobs = dict.fromkeys(effort.loss_jobs, effort.steps)
    for job, answer in deal(children, _orders(jobs, bases, effort, folder), TIMEOUT_S):
        found[job] = TunedLoss(answer["loss"], answer["exported_loss"])
        print_progress(f"{job.codec}, {job.base}, seed {job.seed}: loss {answer['loss']:.4f}")
    return Losses({job: found[job] for job in effort.loss_jobs}, untuned)


def _orders(
    jobs: Mapping[LossJob, int], bases: Mapping[BaseName, Path], effort: Effort, folder: Path
) -> Iterator[tuple[LossJob, dict[str, object]]]:
    for number, (job, steps) in enumerate(jobs.items()):
        manifest = loss_manifest(bases[job.base], folder / TUNED_TEXT, job, effort)
        file = folder / f"losses-{steps}-{number}.toml"
        file.write_text(manifest.to_toml(), encoding="utf-8")
        yield job, {"manifest": str(file), "base": str(bases[job.base]), "steps": steps}
