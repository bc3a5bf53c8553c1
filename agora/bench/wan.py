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

from agora_protocol.manifest import Manifest

from agora.bench.children import Nursery, deal
from agora.bench.freezer import Freezer
from agora.bench.machine import describe, usable_cores
from agora.bench.report import Report
from agora.bench.swarm import SwarmContender
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
from agora.bench.wan_swarm import Reference, Steady, measure
from agora.bench.window import tell

PATIENCE_S = 3600.0


def run(quick: bool, folder: Path) -> Report:
    """The whole comparison. Raises BenchFailed when a part of it cannot be had."""
    effort = QUICK if quick else FULL
    report = Report("wan", "Slow links: the time to a target loss", describe())
    if importlib.util.find_spec("matplotlib") is None:
        tell("matplotlib is not installed, so --write would have no figures: pip install 'agora-swarm[bench]'")
    prepare_corpus(folder, effort.manifest(DENSE, effort.widths[0]))
    speeds, utilisation = measure_all(effort, folder)
    curves = train_all(effort, folder)
    found = [Results(effort, width, curves[width], speeds[width]) for width in effort.widths]
    report.rows = [row(results, setting) for results in found for setting in results.curves]
    report.further = [utilisation_rows(utilisation)]
    report.ratios, report.notes, report.figures = ratios(found), notes(found), figures(found, utilisation)
    return report


class Swarms:
    """Speeds of real swarms at one width, one after the other, each against the same reference."""

    def __init__(self, effort: Effort, width: int, folder: Path, reference: Reference) -> None:
        self._effort, self._width, self._folder = effort, width, folder
        self._reference = reference
        self._others = 0.0

    def speeds(self) -> Speeds:
        """Of dense bf16 and the chosen boundary without a link, then of all over the link that follows from dense."""
        share = self._share(DENSE, None)
        base = statistics.fmean(self._reference.rates)
        link = link_for(self._width, share * base)
        chosen = self._share(CHOSEN, None) * base
        settings = [it for it in self._effort.settings_at(self._width) if it not in SAME_SPEED]
        shaped = {setting: base * self._share(setting, link) for setting in settings}
        return Speeds(share * base, link, shaped, chosen, base, self._others)

    def utilisation(self, speeds: Speeds) -> dict[tuple[float, int], float]:
        """By (rate against the link's, ms of a round trip): throughput of the chosen setting against no link."""
        found = {}
        for rate, ms in self._effort.cells if self._width == self._effort.widths[0] else ():
            link = link_for(self._width, speeds.unshaped * rate, ms)
            known = speeds.of(CHOSEN) if link == speeds.link else None
            found[rate, ms] = (known or self._share(CHOSEN, link) * speeds.base) / speeds.chosen_unshaped
        return found

    def _share(self, setting: Setting, link: str | None) -> float:
        return self._reference.against(lambda: self._rate(setting, link))

    def _rate(self, setting: Setting, link: str | None) -> float:
        manifest = manifest_of(self._effort, setting, self._width)
        name = f"{setting.name} {self._width} {link or 'unshaped'}".translate(str.maketrans(" /=,", "____"))
        with Nursery(self._folder) as nursery:
            steady: Steady = measure(manifest, link, self._folder, nursery, self._effort.window_s, name)
        self._others = max(self._others, steady.others_cores)
        told = f"{setting.name}, width {self._width}, {link or 'no link'}: {steady.tokens_per_second:,.0f} tokens/s"
        tell(f"{told} (the reference did {self._reference.rates[-1]:,.0f} before)")
        return steady.tokens_per_second


def measure_all(effort: Effort, folder: Path) -> tuple[dict[int, Speeds], dict[tuple[float, int], float]]:
    """Speeds by width, and the utilisation at the first, all against a swarm of the chosen boundary without a link."""
    speeds: dict[int, Speeds] = {}
    utilisation: dict[tuple[float, int], float] = {}
    for width in effort.widths:
        with Nursery(folder) as nursery, Freezer() as freezer:
            manifest = manifest_of(effort, CHOSEN, width)
            prepare_corpus(folder, manifest)
            swarm = SwarmContender(manifest, nursery, folder, name=f"reference_{width}")
            swarms = Swarms(effort, width, folder, Reference(swarm, freezer, effort.window_s))
            speeds[width] = swarms.speeds()
            utilisation |= swarms.utilisation(speeds[width])
    return speeds, utilisation


def manifest_of(effort: Effort, setting: Setting, width: int) -> Manifest:
    """What is trained where speed is measured."""
    return effort.manifest(setting, width, microbatches=SWARM_MICROBATCHES)


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
