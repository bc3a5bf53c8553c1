"""`swarm bench wan`: the time to a target loss over slow links, of what may cross a boundary.

Knows: the order of things: speeds of real swarms behind shaped links, then loss runs. Must not know: torch (only
children import it), how a target is chosen, what a swarm is made of.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from agora.bench import pipeline
from agora.bench.children import Nursery, deal
from agora.bench.freezer import Freezer
from agora.bench.machine import describe, usable_cores
from agora.bench.report import Report, paired_ratio
from agora.bench.task import corpus_cache, prepare_corpus
from agora.bench.wan_curves import Curve, Length, final
from agora.bench.wan_results import (
    SAME_SPEED,
    Results,
    Speeds,
    figures,
    notes,
    ratios,
    row,
    utilisation_rows,
)
from agora.bench.wan_settings import (
    CHOSEN,
    DENSE,
    DENSE_SHARE,
    FULL,
    PUBLISHED,
    QUICK,
    RTT_MS,
    SWARM_MICROBATCHES,
    Effort,
    Job,
    Setting,
)
from agora.bench.wan_swarm import Steady, SteadySwarm, measure
from agora.bench.window import tell

PATIENCE_S = 3600.0
FILE_NAME = str.maketrans(" /=,", "____")


def run(quick: bool, folder: Path) -> Report:
    """The whole comparison. Raises BenchFailed when a part of it cannot be had."""
    effort = QUICK if quick else FULL
    report = Report("wan", "Slow links: the time to a target loss", describe())
    if importlib.util.find_spec("matplotlib") is None:
        tell("matplotlib is not installed, so --write would have no figures: pip install 'agora-swarm[bench]'")
    prepare_corpus(folder, effort.manifest(DENSE, effort.widths[0]))
    swarms = Swarms(effort, folder)
    speeds = {width: swarms.speeds(width) for width in effort.widths}
    utilisation = swarms.utilisation(effort.widths[0], speeds[effort.widths[0]])
    curves = train_all(effort, folder)
    found = [Results(effort, width, curves[width], speeds[width]) for width in effort.widths]
    report.rows = [row(results, setting) for results in found for setting in results.curves]
    report.further = [utilisation_rows(utilisation)]
    report.ratios, report.notes, report.figures = ratios(found), notes(found), figures(found, utilisation)
    return report


class Swarms:
    """Speeds of real swarms, one after the other."""

    def __init__(self, effort: Effort, folder: Path) -> None:
        self._effort, self._folder = effort, folder
        self._others = 0.0

    def speeds(self, width: int) -> Speeds:
        """Dense without a link, then over the link that follows from it; every setting at the first width."""
        self._others = 0.0
        unshaped = self._rate(DENSE, width, None)
        link = link_for(width, unshaped)
        settings = [it for it in self._effort.settings_at(width) if it not in SAME_SPEED and it != CHOSEN]
        shaped = {setting: self._rate(setting, width, link) for setting in settings}
        chosen, kept = self._kept(width, link)
        return Speeds(unshaped, link, {**shaped, CHOSEN: kept * chosen}, chosen, self._others)

    def utilisation(self, width: int, speeds: Speeds) -> dict[tuple[float, int], float]:
        """By (rate against the link's, ms of a round trip): throughput of the chosen setting against no link."""
        found = {}
        for rate, ms in self._effort.cells:
            link = link_for(width, speeds.unshaped * rate, ms)
            found[rate, ms] = speeds.kept if link == speeds.link else self._kept(width, link)[1]
        return found

    def _kept(self, width: int, link: str) -> tuple[float, float]:
        """The chosen setting's tokens per second without a link, and its share of them over `link`.

        Two swarms take turns, so that what the machine does meanwhile hits both.
        """
        manifest = self._effort.manifest(CHOSEN, width, microbatches=SWARM_MICROBATCHES)
        prepare_corpus(self._folder, manifest)
        names = {f"{kind} {width} {link}".translate(FILE_NAME): at for kind, at in (("free", None), ("linked", link))}
        with Nursery(self._folder) as nursery, Freezer() as freezer:
            swarms = [SteadySwarm(manifest, nursery, self._folder, name, link=at) for name, at in names.items()]
            turns = pipeline.Effort(self._effort.turns, self._effort.window_s, 0)
            try:
                free, linked = pipeline.alternate(swarms, turns, freezer).values()
            finally:
                for swarm in swarms:
                    swarm.stop()
        self._others = max(self._others, *free.elsewhere, *linked.elsewhere)
        return statistics.median(free.rates), paired_ratio(linked.rates, free.rates)

    def _rate(self, setting: Setting, width: int, link: str | None) -> float:
        manifest = self._effort.manifest(setting, width, microbatches=SWARM_MICROBATCHES)
        name = f"{setting.name} {width} {link or 'unshaped'}".translate(FILE_NAME)
        with Nursery(self._folder) as nursery:
            steady: Steady = measure(manifest, link, self._folder, nursery, self._effort.window_s, name)
        self._others = max(self._others, steady.others_cores)
        tell(f"{setting.name}, width {width}, {link or 'no link'}: {steady.tokens_per_second:,.0f} tokens/s")
        return steady.tokens_per_second


def link_for(width: int, tokens_per_s: float, rtt_ms: int = RTT_MS) -> str:
    """The link on which the bytes of dense bf16 take 1 / DENSE_SHARE of a step at this speed."""
    bits = 8 * DENSE.sent_per_token(width) * tokens_per_s * DENSE_SHARE
    return f"{bits / 1e6:.4f}Mbit,{rtt_ms}ms"


def train_all(effort: Effort, folder: Path) -> dict[int, dict[Setting, list[Curve]]]:
    """By width and setting, the curves of its seeds in order; the children train side by side, a thread each."""
    told = {"cache": str(corpus_cache(folder)), "threads": 1, "heldout": effort.heldout_batches}
    curves: dict[Job, Curve] = {}
    with Nursery(folder) as nursery:
        count = min(usable_cores(), len(effort.jobs))
        children = [nursery.start(f"loss-{number}", "wan-loss", told) for number in range(count)]
        for those in ([job for job in effort.jobs if (job.setting == PUBLISHED) == first] for first in (True, False)):
            orders = [(job, order(job, effort, curves, folder)) for job in longest_first(those)]
            for job, answer in deal(children, orders, PATIENCE_S):
                curves[job] = curve = [(int(step), float(loss)) for step, loss in answer["curve"]]
                last = f"{curve[-1][1]:.4f} after {curve[-1][0]} steps" if curve else "no finite loss"
                tell(f"{job.setting.name}, width {job.width}, seed {job.seed}: {last}")
    found: dict[int, dict[Setting, list[Curve]]] = {}
    for job in effort.jobs:
        found.setdefault(job.width, {}).setdefault(job.setting, []).append(curves[job])
    return found


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """So that the children end about together."""
    return sorted(jobs, key=lambda job: -job.width)


def order(job: Job, effort: Effort, known: Mapping[Job, Curve], folder: Path) -> dict[str, object]:
    """What a child is told; the manifest lies in a file. All but the published recipe may end at its last loss."""
    manifest = effort.manifest(job.setting, job.width, job.seed)
    file = folder / f"loss-{job.width}-{effort.settings.index(job.setting)}-{job.seed}.toml"
    file.write_text(manifest.to_toml(), encoding="utf-8")
    target = known.get(replace(job, setting=PUBLISHED))
    length = Length(effort.most_at(job.width), effort.every, effort.steps, final(target) if target else None)
    return {"manifest": str(file), "length": asdict(length)}
