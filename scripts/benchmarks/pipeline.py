"""`./scripts/bench pipeline`: the swarm's tokens per second beside three other ways to train the same model here.

All contenders are started once and kept; in every round each gets one measured window while the others are frozen, and
a ratio is the median over rounds of the ratios within a round: slow drift and a noisy neighbour hit both sides of each
pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agora.model import family_of
from benchmarks.children import ChildProcesses
from benchmarks.contenders import Contender, Gloo1F1B, HivemindMoe, SingleLoop
from benchmarks.freezer import Freezer
from benchmarks.machine import describe, usable_cores
from benchmarks.report import Ratio, Report, paired_ratio
from benchmarks.stream_rates import measure_streams
from benchmarks.swarm import SwarmContender
from benchmarks.task import MICROBATCHES_PER_STEP, SEQUENCES, manifest_for, prepare_corpus
from benchmarks.turns import Readings, calmness, row, start, take_turns

RATIOS: Mapping[str, tuple[str, str, str, str]] = {
    "swarm2_vs_single": ("swarm2", "single", ">= 1.0", "tokens/s, swarm of 2 stages against the plain loop"),
    "swarm4_vs_single": ("swarm4", "single", ">= 0.95", "tokens/s, swarm of 4 stages against the plain loop"),
    "swarm4_vs_gloo_1f1b": ("swarm4", "gloo_1f1b", "> 1", "tokens/s, against torch.distributed.pipelining, 1F1B, gloo"),
    "swarm4_vs_hivemind_moe": ("swarm4", "hivemind_moe", "clearly > 1", "tokens/s, against hivemind's remote modules"),
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int
    window_s: float
    stream_repeats: int


QUICK = Effort(rounds=3, window_s=6.0, stream_repeats=5)
FULL = Effort(rounds=7, window_s=15.0, stream_repeats=15)


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it cannot be measured."""
    effort = QUICK if quick else FULL
    report = Report("pipeline", "Pipeline: a local swarm beside other ways to train the same model", describe())
    prepare_corpus(folder)
    with ChildProcesses(folder) as nursery:
        streams = measure_streams(nursery, effort.stream_repeats)
    with ChildProcesses(folder) as nursery, Freezer() as freezer:
        contenders: list[Contender] = [
            SingleLoop(nursery, folder),
            SwarmContender(manifest_for(2), nursery, folder),
            SwarmContender(manifest_for(4), nursery, folder),
            Gloo1F1B(nursery, folder),
            HivemindMoe(nursery, folder),
        ]
        start(contenders, freezer)
        found = take_turns(contenders, effort.rounds, effort.window_s, freezer)
    swarms = {c.name: c.account_cells() for c in contenders if isinstance(c, SwarmContender)}
    report.rows = [row(c, found[c.name]) | swarms.get(c.name, {}) for c in contenders] + streams.rows
    report.ratios = training_ratios(found) | {"stream_vs_bare": streams.ratio}
    described = [f"`{c.name}`: {c.note}." for c in contenders]
    report.notes = (
        calmness(readings.elsewhere for readings in found.values()) + described + notes(effort) + streams.notes
    )
    return report


def training_ratios(found: Mapping[str, Readings]) -> dict[str, Ratio]:
    """Returns the four ratios of tokens per second, by their fixed names."""
    return {
        name: Ratio(paired_ratio(found[ours].rates, found[theirs].rates), target, meaning)
        for name, (ours, theirs, target, meaning) in RATIOS.items()
    }


def notes(effort: Effort) -> list[str]:
    """Returns what makes the comparison fair, for the published page."""
    manifest = manifest_for(1)
    model = manifest.model
    cores = usable_cores()
    return [
        f"The same work for all: a Llama-style decoder ({family_of(model).describe().shape}, context "
        f"{model.context}), microbatches of {SEQUENCES} sequences, {MICROBATCHES_PER_STEP} per AdamW step, the source "
        "of Python's standard library.",
        f"Compute threads in all: {cores} on {cores} cores, but one at least per stage process. The networks' own "
        "threads and processes come on top and share those cores.",
        f"All are started and warmed up first; then {effort.rounds} rounds in alternating order give each a window of "
        f"about {effort.window_s:.0f} s while the others are stopped. A ratio is the median of the rounds' ratios; "
        "low and high are the slowest and the fastest round; cpu_s_per_1000 is the processor time that 1000 tokens "
        "cost in all processes of the contender; others is what the rest of the machine used, in cores.",
        "What became of a swarm's tokens since its start: steps, the optimizer steps of each stage; counted, the share "
        "of the tokens that went into a step of every stage; step_fill, the tokens of a step by its target.",
    ]
