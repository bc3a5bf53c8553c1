"""What the scaling benchmark trains: fleets of emulated machines of one speed, and options by hand."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.cli.demo_command import DemoOptions
from benchmarks.learning_settings import LINK, numbers_of, parse_assignment, parse_link

# Milliseconds of the whole model's forward pass over a microbatch. Eight machines then share two cores and leave most
# of them idle: a microbatch really takes some 40 ms of a core in all, messages included.
MODEL_MS: Final = 160.0
MICROBATCH: Final = 2
MICROBATCHES_PER_STEP: Final = 16
SLOW_FACTOR: Final = 10.0
WARM_STEPS: Final = 2  # steps of the whole swarm before its speed counts: its pipeline is full, and routes are known


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines of one speed. link: of each. slow_stage: a further machine, SLOW_FACTOR times slower, holds it."""

    machines: int
    stages: int = 2
    link: str = ""
    slow_stage: int | None = None

    @property
    def name(self) -> str:
        machines = "1 machine" if self.machines == 1 else f"{self.machines} machines"
        link = f", links of {self.link}" if self.link else ""
        slow = f", one {SLOW_FACTOR:g} times slower in stage {self.slow_stage}" if self.slow_stage is not None else ""
        return f"{machines}, {self.stages} stages{link}{slow}"

    @property
    def spans(self) -> list[Span]:
        """The span of each machine; the slow one's is the last. Machines and stages divide each other."""
        stages_each, count = max(1, self.stages // self.machines), min(self.stages, self.machines)
        spans = [Span(first, first + stages_each - 1) for first in range(0, self.stages, stages_each)]
        slow = [] if self.slow_stage is None else [Span(self.slow_stage, self.slow_stage)]
        return [spans[number % count] for number in range(self.machines)] + slow

    @property
    def least_replicas(self) -> int:
        """Of each stage: training begins when all machines but the slow one are there."""
        return max(1, self.machines // self.stages)

    def forward_ms(self, machine: int) -> float:
        """Returns what one stage's forward pass takes on a machine, by its number; all stages are as much work."""
        return MODEL_MS / self.stages * (SLOW_FACTOR if machine >= self.machines else 1.0)


ONE: Final = Fleet(1)
EIGHT: Final = Fleet(8)
EIGHT_LINKED: Final = Fleet(8, link=LINK)
WITH_SLOW: Final = (Fleet(8, slow_stage=0), Fleet(8, slow_stage=1))
QUICK_FLEETS: Final = (Fleet(2), Fleet(4), EIGHT, EIGHT_LINKED, WITH_SLOW[0])
FULL_FLEETS: Final = (
    *(Fleet(2), Fleet(4), EIGHT, EIGHT_LINKED, *WITH_SLOW),
    *(Fleet(2, 4), Fleet(4, 4), Fleet(8, 4), Fleet(8, 4, LINK)),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured. steps: optimizer steps of every fleet; `single_steps` of the one machine. rounds: of all."""

    fleets: tuple[Fleet, ...]
    steps: int
    single_steps: int
    rounds: int
    heldout_batches: int = 48
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def manifest(self, fleet: Fleet, seed: int) -> Manifest:
        """Returns the manifest of a fleet: the preset tiny with small microbatches."""
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{fleet.name} {seed}")
        base = DemoOptions(stages=fleet.stages, steps=self.steps, seed=seed).manifest()
        step = MICROBATCHES_PER_STEP * MICROBATCH * base.model.context
        own = {"microbatch": MICROBATCH, "least_replicas": fleet.least_replicas}
        manifest = base.with_values(name=name, schedule=own, optimizer={"target_tokens": step})
        return manifest.with_values(**self.overrides)


QUICK: Final = Effort(QUICK_FLEETS, 24, 12, 1)
FULL: Final = Effort(FULL_FLEETS, 48, 24, 2)


def effort_of(options: Sequence[str], quick: bool) -> Effort:
    """Returns the effort that the options ask for. Exits with code 2 for options that it cannot read."""
    parser = argparse.ArgumentParser(prog="./scripts/bench scaling", add_help=False)
    parser.add_argument("--machines", type=numbers_of)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--link", type=parse_link)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--set", type=parse_assignment, action="append", default=[], metavar="SECTION.FIELD=VALUE")
    given, effort = parser.parse_args(options), QUICK if quick else FULL
    if given.machines:
        fleets = tuple(Fleet(count, given.stages, given.link or "") for count in given.machines if count > 1)
        effort = replace(effort, fleets=fleets)
    overrides: dict[str, dict[str, Any]] = {}
    for section, name, value in given.set:
        overrides.setdefault(section, {})[name] = value
    steps = given.steps or effort.steps
    single = max(1, effort.single_steps * steps // effort.steps)
    return replace(effort, steps=steps, single_steps=single, rounds=given.rounds or effort.rounds, overrides=overrides)
