"""Trains the loss runs of the benchmark of slow links in child processes, each of one thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.children import Child, ChildProcesses, deal
from benchmarks.machine import usable_cores
from benchmarks.task import corpus_cache
from benchmarks.wan_curves import Curve, Length
from benchmarks.wan_settings import OPTIMIZERS, PUBLISHED, Effort, Job, Recipe
from benchmarks.wan_steps import LossRuns
from benchmarks.window import print_progress

TIMEOUT_S: Final = 3600.0
# All but the published recipe, whose loss at its end is the target, may take so many times its steps.
SLACK: Final = 1.25


def train_all(effort: Effort, folder: Path) -> list[LossRuns]:
    """Returns the loss runs of each width, in three parts, each of which needs the one before it.

    | part   | trains                                                   | because                                     |
    |--------|----------------------------------------------------------|---------------------------------------------|
    | first  | the published recipe, each seed                          | its loss at the end is a target             |
    | second | all other recipes, the first seed                        | they choose what is compared over each link |
    | third  | what is compared, the other seeds                        |                                             |
    """
    found: list[LossRuns] = [LossRuns(effort, width, {}) for width in effort.widths]
    first, *others = effort.seeds
    published = [Recipe(PUBLISHED, optimizer) for optimizer in OPTIMIZERS]
    with ChildProcesses(folder) as nursery:
        spec = {"cache": str(corpus_cache(folder)), "threads": 1, "heldout": effort.heldout_batches}
        children = [nursery.start(f"loss-{number}", "wan-loss", spec) for number in range(usable_cores())]
        found = train_part(children, found, [(published, effort.seeds) for _ in found], folder)
        rest = [recipe for recipe in effort.recipes if recipe not in published]
        found = train_part(children, found, [(rest, [first]) for _ in found], folder)
        return train_part(children, found, [(runs.compared(), others) for runs in found], folder)


def train_part(
    children: list[Child],
    found: list[LossRuns],
    parts: Iterable[tuple[Iterable[Recipe], Iterable[int]]],
    folder: Path,
) -> list[LossRuns]:
    """Trains recipes with seeds at each width, the wider first, and returns `found` with their curves.

    parts: for each of `found`, recipes and seeds; every recipe is trained with every seed.
    """
    orders = {
        Job(recipe, runs.width, seed): order(Job(recipe, runs.width, seed), runs, folder)
        for runs, (recipes, seeds) in zip(found, parts, strict=True)
        for recipe in recipes
        for seed in seeds
    }
    longest_first = sorted(orders.items(), key=lambda entry: -entry[0].width)  # so the children end together
    curves: dict[Job, Curve] = {}
    for job, answer in deal(children, longest_first, TIMEOUT_S):
        curves[job] = curve = [(int(step), float(loss)) for step, loss in answer["curve"]]
        last = f"{curve[-1][1]:.4f} after {curve[-1][0]} steps" if curve else "no finite loss"
        print_progress(f"{job.recipe.setting.name}, {job.recipe.optimizer}, width {job.width}, seed {job.seed}: {last}")
    return [
        LossRuns(
            runs.effort, runs.width, {**runs.curves, **{job: c for job, c in curves.items() if job.width == runs.width}}
        )
        for runs in found
    ]


def order(job: Job, runs: LossRuns, folder: Path) -> dict[str, object]:
    """Returns a child's order, its manifest in a file. All but the published recipe may end below every target."""
    effort, recipe = runs.effort, job.recipe
    number = effort.recipes.index(recipe)
    file = folder / f"loss-{job.width}-{number}-{job.seed}.toml"
    file.write_text(effort.manifest(job).to_toml(), encoding="utf-8")
    most = effort.max_steps_at(recipe.optimizer, job.width)
    if recipe.setting == PUBLISHED:
        length = Length(most, effort.every)
    else:
        length = Length(round(most * SLACK), effort.every, effort.steps, runs.enough(recipe.optimizer, job.seed))
    return {"manifest": str(file), "length": asdict(length)}
