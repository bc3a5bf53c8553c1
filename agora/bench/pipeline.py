"""`swarm bench pipeline`: the swarm's tokens per second beside three other ways to train the same model here.

Knows: the contenders, how their turns alternate, the ratios of the contract. Must not know: torch (only children import
it). All contenders are started once and kept; in every round each gets one measured window while the others rest, in
turning order, and a ratio is the median over rounds of the ratios within a round: slow drift and a noisy neighbour hit
both sides of each pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agora.bench.children import BenchFailed, Child, Nursery
from agora.bench.machine import describe, usable_cores
from agora.bench.report import Cell, Ratio, Report, paired_ratio
from agora.bench.stream_rates import measure_streams
from agora.bench.swarm import SwarmContender
from agora.bench.task import MICROBATCHES_PER_STEP, SEQUENCES, manifest_for, prepare_corpus, spec
from agora.bench.window import PATIENCE_S, START_S, Window, stage_threads, tell

STAGES = 4

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


QUICK = Effort(rounds=3, window_s=8.0, stream_repeats=5)
FULL = Effort(rounds=7, window_s=15.0, stream_repeats=15)


class Contender(Protocol):
    """One way to train the model. Rests, using no processor to speak of, between `start` and `measure`."""

    name: str
    processes: int
    threads: int
    note: str

    def start(self) -> None:
        """Starts its processes and trains until caches and allocators are warm."""
        ...

    def measure(self, seconds: float) -> Window:
        """Trains for about `seconds`; whole steps, or a steady stretch between two completions."""
        ...


class SingleLoop:
    """(a) The plain loop in one process with all threads."""

    name = "single"
    note = "plain PyTorch loop, float32, fused AdamW"

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.processes, self.threads = 1, usable_cores()
        self._steps = Lockstep([])

    def start(self) -> None:
        """See Contender."""
        told = spec(manifest_for(1), self._folder, self.threads)
        self._steps = Lockstep([self._nursery.start(self.name, "single", told, self.threads)])
        self._steps.warm_up()

    def measure(self, seconds: float) -> Window:
        """See Contender."""
        return self._steps.measure(seconds)


class Gloo1F1B:
    """(c) torch.distributed.pipelining."""

    name = "gloo_1f1b"
    note = "PipelineStage and Schedule1F1B over gloo on loopback, float32 boundaries, a flush per step as 1F1B has it"

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.processes, self.threads = STAGES, STAGES * stage_threads(STAGES)
        self._steps = Lockstep([])

    def start(self) -> None:
        """See Contender."""
        threads = stage_threads(STAGES)
        manifest = manifest_for(STAGES)
        meeting = str(self._folder / "gloo-meeting")
        ranks = [
            self._nursery.start(
                f"gloo-{k}", "gloo", spec(manifest, self._folder, threads, rank=k, meeting=meeting), threads
            )
            for k in range(STAGES)
        ]
        self._steps = Lockstep(ranks)
        self._steps.warm_up()

    def measure(self, seconds: float) -> Window:
        """See Contender."""
        return self._steps.measure(seconds)


class HivemindMoe:
    """(d) hivemind's servers with remote modules, and a trainer that calls them in turn."""

    name = "hivemind_moe"
    note = (
        "hivemind.moe Servers and RemoteExpert calls; 16 microbatches in flight on threads, 16-bit boundaries through "
        "the trainer and the forward repeated in the backward (hivemind's design); backends made to step every 16 "
        "calls, not every call"
    )

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self.processes, self.threads = STAGES + 1, STAGES * stage_threads(STAGES)
        self._trainer: Child | None = None

    def start(self) -> None:
        """See Contender."""
        threads = stage_threads(STAGES)
        manifest = manifest_for(STAGES)
        peers: list[str] = []
        for k in range(STAGES):
            told = spec(manifest, self._folder, threads, stage=k, peers=peers)
            peers = self._nursery.start(f"moe-{k}", "moe-stage", told, threads).hear(START_S)["addresses"]
        self._trainer = self._nursery.start("moe-trainer", "moe-trainer", spec(manifest, self._folder, 1, peers=peers))
        self._trainer.hear(START_S)
        self._trainer.ask({"steps": 1}, PATIENCE_S)

    def measure(self, seconds: float) -> Window:
        """See Contender."""
        assert self._trainer is not None
        answer = self._trainer.ask({"seconds": seconds}, PATIENCE_S + seconds)
        return Window(answer["tokens"], answer["seconds"])


class Lockstep:
    """Children that take whole optimizer steps together; knows how long a step takes, to fill a window with them."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._step_s = 1.0

    def warm_up(self) -> None:
        """Waits until all are ready, then takes two steps, the second one timed."""
        for child in self._children:
            child.hear(START_S)
        self.take(1)
        self.take(1)

    def measure(self, seconds: float) -> Window:
        """As many whole steps as fill `seconds` best."""
        return self.take(max(1, round(seconds / self._step_s)))

    def take(self, steps: int) -> Window:
        """`steps` steps; the time is that of the slowest child."""
        for child in self._children:
            child.tell({"steps": steps})
        answers = [child.hear(PATIENCE_S) for child in self._children]
        seconds = max(float(answer["seconds"]) for answer in answers)
        self._step_s = seconds / steps
        return Window(int(answers[0]["tokens"]), seconds)


def run(quick: bool, folder: Path) -> Report:
    """The whole comparison. Raises BenchFailed when a part of it cannot be measured."""
    effort = QUICK if quick else FULL
    report = Report("pipeline", "Pipeline: a local swarm beside other ways to train the same model", describe())
    prepare_corpus(folder)
    with Nursery(folder) as nursery:
        streams = measure_streams(nursery, effort.stream_repeats)
    with Nursery(folder) as nursery:
        contenders: list[Contender] = [
            SingleLoop(nursery, folder),
            SwarmContender(2, nursery, folder),
            SwarmContender(4, nursery, folder),
            Gloo1F1B(nursery, folder),
            HivemindMoe(nursery, folder),
        ]
        rates = alternate(contenders, effort)
    report.rows = [training_row(c, rates[c.name]) for c in contenders] + streams.rows
    report.ratios = training_ratios(rates) | {"stream_vs_bare": streams.ratio}
    report.notes = [f"`{c.name}`: {c.note}." for c in contenders] + notes(effort) + streams.notes
    return report


def alternate(contenders: Sequence[Contender], effort: Effort) -> dict[str, list[float]]:
    """Tokens per second of every contender in every round; the order of turns is reversed in every other round."""
    for contender in contenders:
        tell(f"starting {contender.name}")
        contender.start()
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(effort.rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            window = contender.measure(effort.window_s)
            if window.tokens <= 0 or window.seconds <= 0:
                raise BenchFailed(
                    f"{contender.name} trained nothing in {effort.window_s:.0f} s; run again on a calmer machine"
                )
            rates[contender.name].append(window.rate)
            tell(f"round {number + 1} of {effort.rounds}: {contender.name} {window.rate:,.0f} tokens/s")
    return rates


def training_row(contender: Contender, rates: Sequence[float]) -> dict[str, Cell]:
    """One line of the table for a contender."""
    return {
        "name": contender.name,
        "processes": contender.processes,
        "threads": contender.threads,
        "unit": "tokens/s",
        "median": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "rounds": len(rates),
    }


def training_ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, Ratio]:
    """The four ratios of tokens per second, by their fixed names."""
    return {
        name: Ratio(paired_ratio(rates[ours], rates[theirs]), target, meaning)
        for name, (ours, theirs, target, meaning) in RATIOS.items()
    }


def notes(effort: Effort) -> list[str]:
    """What makes the comparison fair, in the words of the published page."""
    manifest = manifest_for(1)
    model = manifest.model
    cores = usable_cores()
    return [
        f"The same work for all: a Llama-style decoder (width {model.width}, {model.layers} layers, "
        f"{model.heads} heads, feed-forward {model.feed_forward}, {model.vocabulary} byte tokens, context "
        f"{model.context}), microbatches of {SEQUENCES} sequences, {MICROBATCHES_PER_STEP} per AdamW step, the source "
        "of Python's standard library.",
        f"Compute threads in all: {cores} on {cores} cores, but one at least per stage process. The networks' own "
        "threads and processes come on top and share those cores.",
        f"All are started and warmed up first; then {effort.rounds} rounds in alternating order give each a window of "
        f"about {effort.window_s:.0f} s while the others rest. A ratio is the median of the rounds' ratios; low and "
        "high are the slowest and the fastest round.",
    ]
