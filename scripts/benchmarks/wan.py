"""`./scripts/bench wan`: the time to a target loss over slow links, of what may cross a boundary.

Knows: the order of things: speeds of real swarms behind shaped links, then loss runs. Must not know: torch (only
children import it), how a target is chosen, what a swarm is made of.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.children import Nursery, deal
from benchmarks.machine import describe, usable_cores
from benchmarks.report import Report, paired_ratio
from benchmarks.task import corpus_cache, prepare_corpus
from benchmarks.turns import start, take_turns
from benchmarks.wan_curves import Curve, Length, final
from benchmarks.wan_results import (
    SAME_SPEED,
    Results,
    Speeds,
    notes,
    ratios,
    row,
)
from benchmarks.wan_settings import (
    CHOSEN,
    DENSE,
    DENSE_SHARE,
    FULL,
    PUBLISHED,
    QUICK,
    RTT_MS,
    Effort,
    Job,
    Setting,
)
from benchmarks.wan_swarm import SteadySwarm
from benchmarks.window import print_progress

PATIENCE_S = 3600.0
FILE_NAME = str.maketrans(" /=,", "____")


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it fails."""
    effort = QUICK if quick else FULL
    report = Report("wan", "Slow links: the time to a target loss", describe())
    prepare_corpus(folder, effort.manifest(DENSE, effort.widths[0]))
    speeds: dict[int, Speeds] = {}
    for width in effort.widths:
        with Nursery(folder) as nursery:
            speeds[width] = Swarms(effort, width, folder, nursery).speeds()
    curves = train_all(effort, folder)
    results = [Results(effort, width, curves[width], speeds[width]) for width in effort.widths]
    report.rows = [row(of_width, setting) for of_width in results for setting in of_width.curves]
    report.ratios, report.notes = ratios(results), notes(results)
    return report


class Swarms:
    """The speeds of real swarms of one width, each of which takes turns with the same swarm, the pace.

    The pace is the chosen setting without a link. Every speed is a share of it, and every link follows from what the
    machine let it do lately: what drifts hits both.
    """

    def __init__(self, effort: Effort, width: int, folder: Path, nursery: Nursery) -> None:
        self._effort, self._width, self._folder, self._nursery = effort, width, folder, nursery
        self._pace = self.new_swarm(CHOSEN, None)
        self._paces: list[float] = []
        self._others = 0.0
        start([self._pace])

    def speeds(self) -> Speeds:
        """Measures dense bf16 without a link, then every setting over the link that follows from its speed."""
        dense = self._share(DENSE, None, 2 * self._effort.turns)
        links, shares = {}, {}
        for setting in self._effort.settings:
            if setting not in SAME_SPEED:
                links[setting] = link_for(self._width, dense * self._lately)
                shares[setting] = self._share(setting, links[setting], self._effort.turns * (1 + (setting == CHOSEN)))
        free = statistics.median(self._paces)
        speeds = {setting: share * free for setting, share in shares.items()}
        return Speeds(dense * free, links[CHOSEN], speeds, free, self._others)

    @property
    def _lately(self) -> float:
        """Median tokens per second of the pace in its latest turns."""
        return statistics.median(self._paces[-self._effort.turns :])

    def _share(self, setting: Setting, link: str | None, turns: int) -> float:
        """Returns tokens per second of a setting / those of the pace, the median over so many turns."""
        swarm = self.new_swarm(setting, link)
        try:
            start([swarm])
            found = take_turns([self._pace, swarm], turns, self._effort.window_s)
        finally:
            swarm.stop()
        pace, own = found[self._pace.name], found[swarm.name]
        self._paces += pace.rates
        self._others = max(self._others, *pace.elsewhere, *own.elsewhere)
        share = paired_ratio(own.rates, pace.rates)
        print_progress(f"{swarm.name}: {share:.3f} of the pace")
        return share

    def new_swarm(self, setting: Setting, link: str | None) -> SteadySwarm:
        """Returns a swarm of this setting behind a link, not yet started."""
        manifest = self._effort.swarm_manifest(setting, self._width)
        name = f"{setting.name} {self._width} {link or 'no link'}".translate(FILE_NAME)
        return SteadySwarm(manifest, self._nursery, self._folder, name, link=link)


def link_for(width: int, tokens_per_s: float) -> str:
    """Returns the link over which the bytes of dense bf16 take 1 / DENSE_SHARE of a step at this speed."""
    bits = 8 * DENSE.sent_per_token(width) * tokens_per_s * DENSE_SHARE
    return f"{bits / 1e6:.4f}Mbit,{RTT_MS}ms"


def train_all(effort: Effort, folder: Path) -> dict[int, dict[Setting, list[Curve]]]:
    """Trains every setting in child processes of one thread each; returns the curves by width and setting."""
    child_spec = {"cache": str(corpus_cache(folder)), "threads": 1, "heldout": effort.heldout_batches}
    curves: dict[Job, Curve] = {}
    with Nursery(folder) as nursery:
        count = min(usable_cores(), len(effort.jobs))
        children = [nursery.start(f"loss-{number}", "wan-loss", child_spec) for number in range(count)]
        for those in ([job for job in effort.jobs if (job.setting == PUBLISHED) == first] for first in (True, False)):
            orders = [(job, order(job, effort, curves, folder)) for job in longest_first(those)]
            for job, answer in deal(children, orders, PATIENCE_S):
                curves[job] = curve = [(int(step), float(loss)) for step, loss in answer["curve"]]
                last = f"{curve[-1][1]:.4f} after {curve[-1][0]} steps" if curve else "no finite loss"
                print_progress(f"{job.setting.name}, width {job.width}, seed {job.seed}: {last}")
    found: dict[int, dict[Setting, list[Curve]]] = {}
    for job in effort.jobs:
        found.setdefault(job.width, {}).setdefault(job.setting, []).append(curves[job])
    return found


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs with the longest first, so that the children end at about the same time."""
    return sorted(jobs, key=lambda job: -job.width)


def order(job: Job, effort: Effort, known: Mapping[Job, Curve], folder: Path) -> dict[str, object]:
    """Returns a child's order, its manifest in a file. All but the published recipe may end at that one's last loss."""
    manifest = effort.manifest(job.setting, job.width, job.seed)
    file = folder / f"loss-{job.width}-{effort.settings.index(job.setting)}-{job.seed}.toml"
    file.write_text(manifest.to_toml(), encoding="utf-8")
    target = known.get(replace(job, setting=PUBLISHED))
    length = Length(effort.most_at(job.width), effort.every, effort.steps, final(target) if target else None)
    return {"manifest": str(file), "length": asdict(length)}
