"""What training loses to averaging: three local swarms that differ in nothing but how they agree."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from agora_protocol.manifest import Manifest

from benchmarks.children import ChildProcesses
from benchmarks.report import Cell, Ratio, paired_ratio
from benchmarks.swarm import SwarmContender
from benchmarks.task import manifest_for, prepare_corpus
from benchmarks.turns import Readings, row, start, take_turns
from benchmarks.window import Window

STAGES, REPLICAS = 2, 2
TARGET_TOKENS = 16_384  # tokens of an optimizer step: the presets' for a model of this size
NEVER = 10**6

DEFAULT, LOCAL, OFF = "swarm_averaging", "swarm_slices", "swarm_never"


@dataclass(slots=True)
class Slowdown:
    """The measured slowdown: rows, the ratio, and notes for the page."""

    ratio: Ratio
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class AveragingSwarm(SwarmContender):
    """A swarm that remembers the participation in its rounds over all windows."""

    def __init__(self, name: str, manifest: Manifest, nursery: ChildProcesses, folder: Path) -> None:
        super().__init__(manifest, nursery, folder, name, REPLICAS)
        # For every round and stage replica, the share of the replicas that took part in the round.
        self.done: list[float] = []

    def measure(self, seconds: float) -> Window:
        window = super().measure(seconds)
        self.done += [float(done["contributors"]) / float(done["members"]) for done in self.rounds]
        return window


def measure_slowdown(folder: Path, windows: int, window_s: float) -> Slowdown:
    """Measures the three swarms in turns; the others rest meanwhile."""
    manifest = training_manifest()
    prepare_corpus(folder, manifest)
    kinds: dict[str, dict[str, object]] = {
        DEFAULT: {},
        LOCAL: {"exact_steps": 0},
        OFF: {"exact_steps": 0, "every": NEVER},
    }
    with ChildProcesses(folder) as nursery:
        swarms = [AveragingSwarm(name, manifest.with_values(averaging=kinds[name]), nursery, folder) for name in kinds]
        start(swarms)
        found = take_turns(swarms, windows, window_s)
    return summary(swarms, found, manifest)


def training_manifest() -> Manifest:
    """Returns the manifest: the pipeline benchmark's model in STAGES stages, averaging by the defaults."""
    return manifest_for(STAGES).with_values(optimizer={"target_tokens": TARGET_TOKENS})


def summary(swarms: list[AveragingSwarm], found: dict[str, Readings], manifest: Manifest) -> Slowdown:
    """Returns rows, ratio and notes; the ratio is NaN when the swarm that should average had no round."""
    averaging = swarms[0]
    lost = 1.0 - paired_ratio(found[DEFAULT].rates, found[OFF].rates) if averaging.done else float("nan")
    slowdown = Slowdown(Ratio(lost, "< 0.03", "share of tokens/s that training loses to averaging"))
    for swarm in swarms:
        cells = row(swarm, found[swarm.name])
        shown = {key: cells[key] for key in ("name", "unit", "median", "low", "high", "rounds", "others")}
        averaged = statistics.fmean(swarm.done) if swarm.done else None
        slowdown.rows.append({**shown, "averaged": averaged, **swarm.account_cells()})
    section = manifest.averaging
    local = 1 - paired_ratio(found[LOCAL].rates, found[OFF].rates)
    slowdown.notes = [
        f"`swarm_`: {STAGES} stages of {REPLICAS} agora-node daemons each, the pipeline benchmark's model, steps of "
        f"{manifest.optimizer.target_tokens:,} tokens. One averages by the defaults, on loopback the gradient of every "
        f"step ({section.gradient_wire}); one takes inner steps with slices "
        f"({section.fraction:.0%} every {section.every} steps, {section.slice_wire}), which costs {local:.1%} of the "
        "throughput; one never averages. They take turns. "
        f"averaged: the share of replicas in a round, over {len(averaging.done)} rounds seen by a replica. "
        "steps, counted, step_fill: optimizer steps of each stage, the share of tokens that went into them, and the "
        "tokens of a step by its target."
    ]
    if not averaging.done:
        slowdown.notes.insert(
            0, "NO ROUND TOOK PLACE in the swarm that should average: training_slowdown is not known."
        )
    return slowdown
