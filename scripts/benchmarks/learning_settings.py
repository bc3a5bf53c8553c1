"""What the learning benchmark trains: swarms of several sizes, for how long, with which seeds; options by hand."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agora_protocol.manifest import Manifest

from agora.cli.demo_command import DemoOptions
from agora.net.shaping.link import LinkError, LinkSpec

STAGES: Final = 2
LINK: Final = "200Mbit,50ms"
KILL_EVERY_S: Final = 10.0
POINTS: Final = 20  # evaluations of a run before its end


@dataclass(frozen=True, slots=True)
class SwarmSetting:
    """A swarm of `peers` daemons. link: of every daemon; kill_every_s: a daemon is killed and replaced that often."""

    peers: int
    link: str | None = None
    kill_every_s: float | None = None

    @property
    def name(self) -> str:
        link = f", links of {self.link}" if self.link else ""
        kills = f", one killed every {self.kill_every_s:g} s" if self.kill_every_s else ""
        return f"{self.peers} peers{link}{kills}"


OVER_LINK: Final = SwarmSetting(4, link=LINK)
WITH_KILLS: Final = SwarmSetting(4, kill_every_s=KILL_EVERY_S)
SIZES: Final = tuple(map(SwarmSetting, (2, 4, 8)))


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a swarm, or with None the plain loop; as many tokens as `steps` optimizer steps should have; a seed."""

    setting: SwarmSetting | None
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return self.setting.name if self.setting else "plain loop"


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of training. Every setting is trained with each of `seeds`: those of `sizes` for each of `lengths`
    (in steps), the others for the first length only. overrides: values of the manifest, section by section.
    """

    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    sizes: tuple[SwarmSetting, ...] = SIZES
    others: tuple[SwarmSetting, ...] = (OVER_LINK, WITH_KILLS)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heldout_batches: int = 32

    @property
    def jobs(self) -> list[Job]:
        return [
            Job(setting, steps, seed)
            for steps in self.lengths
            for seed in self.seeds
            for setting in (None, *self.sizes, *(self.others if steps == self.lengths[0] else ()))
        ]

    def manifest(self, job: Job) -> Manifest:
        """Returns the manifest of a run: that of `swarm demo` with as many steps. The plain loop has one stage."""
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{job.name} {job.steps} {job.seed}")
        plan = DemoOptions(stages=STAGES, steps=job.steps, seed=job.seed)
        manifest = plan.manifest().with_values(name=name, **self.overrides)
        return manifest if job.setting else manifest.with_values(stages={"count": 1, "first_layers": ()})


QUICK: Final = Effort((40,), (0,))
FULL: Final = Effort((100, 400), (0, 1, 2))


def effort_of(options: Sequence[str], quick: bool) -> Effort:
    """Returns the effort that the options ask for. Exits with code 2 for options that it cannot read."""
    parser = argparse.ArgumentParser(prog="./scripts/bench learning", add_help=False)
    parser.add_argument("--peers", type=numbers_of)
    parser.add_argument("--steps", type=numbers_of)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--link", type=parse_link)
    parser.add_argument("--kill-every", type=float)
    parser.add_argument("--schedule", choices=("asynchronous", "synchronous"))
    parser.add_argument("--set", type=parse_assignment, action="append", default=[], metavar="SECTION.FIELD=VALUE")
    given, effort = parser.parse_args(options), QUICK if quick else FULL
    if given.peers or given.link or given.kill_every:
        peers = given.peers or [4]
        sizes = tuple(SwarmSetting(count, given.link, given.kill_every) for count in peers)
        effort = replace(effort, sizes=sizes, others=())
    overrides: dict[str, dict[str, Any]] = {"schedule": {"kind": given.schedule}} if given.schedule else {}
    for section, name, value in given.set:
        overrides.setdefault(section, {})[name] = value
    lengths, seeds = given.steps or effort.lengths, range(given.seeds) if given.seeds else effort.seeds
    return replace(effort, lengths=tuple(lengths), seeds=tuple(seeds), overrides=overrides)


def numbers_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_link(text: str) -> str:
    try:
        LinkSpec.parse(text)
    except LinkError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_assignment(text: str) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"{text} is not SECTION.FIELD=VALUE")
    try:
        return section, key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, value
