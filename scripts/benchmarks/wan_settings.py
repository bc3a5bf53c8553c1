"""What the benchmark of slow links compares: boundaries and optimizers, how long each is trained and measured."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from agora_protocol.codec_names import parse_codec
from agora_protocol.manifest import Manifest
from agora_protocol.presets import LINK_CODEC

Optimizer = Literal["adamw", "muon"]
OPTIMIZERS: Final[tuple[Optimizer, ...]] = get_args(Optimizer)

PUBLISHED_PARTS: Final = 6.4
SWARM_SEQUENCES: Final = 16  # sequences of a microbatch where speed is measured
SWARM_MICROBATCHES: Final = 16  # microbatches of an optimizer step where speed is measured; a loss run steps after each
# Where speed is measured the pipeline is as full as the link needs, as it would be with steps of many microbatches.
UNBOUNDED_STALENESS: Final = 64.0
TOKEN_BYTES: Final = 1  # A token's id, which goes forward with its coordinates; of the bytes tokenizer
WARMUP_STEPS: Final = 50
LEARNING_RATE: Final = 3e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """A boundary of width / `parts` coordinates for each token, crossing by `codec`."""

    parts: float
    codec: str
    embedding: Literal["fixed", "learnt"] = "fixed"

    @property
    def name(self) -> str:
        share = {1.0: "d", 16 / 7: "7d/16"}.get(self.parts, f"d/{self.parts:g}")
        label = f"k = {share}, {self.codec}"
        return label if self.embedding == "fixed" else f"{label}, learnt embedding"

    def subspace(self, width: int) -> int:
        """Returns k, the coordinates of a boundary, at this width."""
        return max(2, round(width / self.parts))

    def bytes_per_token(self, width: int) -> tuple[float, float]:
        """Returns the bytes of a boundary per token, forward and backward, without the token's id."""
        codec, k = parse_codec(self.codec), self.subspace(width)
        return codec.bytes_per_token(k, "forward"), codec.bytes_per_token(k, "backward")

    def sent_per_token(self, width: int) -> float:
        """Returns the bytes that a middle stage sends for each token in both directions, ids included."""
        return sum(self.bytes_per_token(width)) + TOKEN_BYTES


DENSE: Final = Setting(1, "bf16")
DENSE_LEARNT: Final = Setting(1, "bf16", "learnt")
# Settings that send the same bytes and compute the same, so that only one of them is measured.
SAME_SPEED: Final[Mapping[Setting, Setting]] = {DENSE_LEARNT: DENSE}
PUBLISHED: Final = Setting(PUBLISHED_PARTS, "bf16")
PRESET: Final = Setting(16 / 7, LINK_CODEC)  # the boundary of the presets, which `throughput_kept_50ms` is about
# The published recipe's rank in fewer bits, which its loss hardly feels under Muon.
NARROW: Final = tuple(Setting(PUBLISHED_PARTS, codec) for codec in ("int6/int3", "int5/int3", "int4/int3"))
# Our boundaries under each optimizer; the one that is chosen for a link is compared over it.
CANDIDATES: Final[Mapping[Optimizer, tuple[Setting, ...]]] = {"adamw": (PRESET,), "muon": (PRESET, *NARROW)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained: what crosses its boundaries, and the optimizer."""

    setting: Setting
    optimizer: Optimizer


@dataclass(frozen=True, slots=True)
class Job:
    """One loss run."""

    recipe: Recipe
    width: int
    seed: int


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of training and measuring.

    The published recipe takes the `max_steps` of optimizer and width, and its loss at the end is a target; a run of
    another setting ends when it reaches that loss, but not before `steps`, which all have in common. With the first of
    `seeds` every setting is trained; the results choose the settings that the other seeds train. dense: the forms of
    dense bf16, of which the better one counts. rates: names of the links. turns: windows of each swarm over each link,
    and of the pace before each.
    """

    widths: tuple[int, ...]
    dense: tuple[Setting, ...]
    seeds: tuple[int, ...]
    stages: int
    steps: int
    max_steps: Mapping[Optimizer, Mapping[int, int]]
    every: int
    heldout_batches: int
    window_s: float
    turns: int
    rates: tuple[str, ...]
    losses_only: bool = False
    context: int = 64
    sequences: int = 8

    def max_steps_at(self, optimizer: Optimizer, width: int) -> int:
        """Returns the steps of the longest run with this optimizer at this width."""
        return self.max_steps[optimizer][width]

    @property
    def tokens_per_step(self) -> int:
        return self.context * self.sequences

    @property
    def recipes(self) -> list[Recipe]:
        return [
            Recipe(setting, optimizer)
            for optimizer in OPTIMIZERS
            for setting in (*self.dense, PUBLISHED, *CANDIDATES[optimizer])
        ]

    def corpus_manifest(self) -> Manifest:
        """Returns a manifest with the corpus that every run trains on."""
        return self.manifest(Job(self.recipes[0], self.widths[0], self.seeds[0]))

    def swarm_manifest(self, setting: Setting, width: int) -> Manifest:
        """Returns the manifest of a swarm whose speed is measured, with Muon."""
        target = SWARM_MICROBATCHES * SWARM_SEQUENCES * self.context
        return self.manifest(Job(Recipe(setting, "muon"), width, 0)).with_values(
            schedule={"microbatch": SWARM_SEQUENCES, "staleness": UNBOUNDED_STALENESS},
            optimizer={"target_tokens": target},
        )

    def manifest(self, job: Job) -> Manifest:
        """Returns the manifest of a loss run: one layer a stage, the learning rate constant after its warm-up.

        No average of the weights is kept: the losses of all settings are those of the weights themselves.
        """
        setting = job.recipe.setting
        model = {
            "width": job.width,
            "subspace": setting.subspace(job.width),
            "embedding": setting.embedding,
            "layers": self.stages,
            "heads": 4,
            "key_value_heads": 2,
            "feed_forward": 11 * job.width // 4,
            "context": self.context,
        }
        optimizer = {
            "name": job.recipe.optimizer,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": WARMUP_STEPS,
            "minimum_ratio": 1.0,
            "target_tokens": self.tokens_per_step,
            "average_decay": 0.0,
        }
        values = {
            "seed": job.seed,
            "model": model,
            "stages": {"count": self.stages},
            "boundary": {"codec": setting.codec},
            "schedule": {"microbatch": self.sequences},
            "optimizer": optimizer,
        }
        return Manifest.from_values(values, "benchmark")


QUICK: Final = Effort(
    widths=(64,),
    dense=(DENSE,),
    seeds=(0,),
    stages=4,
    steps=240,
    max_steps={"adamw": {64: 400}, "muon": {64: 320}},
    every=20,
    heldout_batches=8,
    window_s=5.0,
    turns=1,
    rates=("today", "bound"),
)
FULL: Final = Effort(
    widths=(64, 128),
    dense=(DENSE, DENSE_LEARNT),
    seeds=(0, 1, 2),
    stages=8,
    steps=750,
    max_steps={"adamw": {64: 3000, 128: 1500}, "muon": {64: 1800, 128: 1000}},
    every=50,
    heldout_batches=16,
    window_s=10.0,
    turns=2,
    rates=("today", "bound", "fast"),
)


def effort_of(options: Sequence[str], quick: bool) -> Effort:
    """Returns the effort that the options ask for. Exits with code 2 for options that it cannot read."""
    effort = QUICK if quick else FULL
    parser = argparse.ArgumentParser(prog="./scripts/bench wan", add_help=False)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--widths", type=int, nargs="+", choices=effort.widths, default=effort.widths)
    parser.add_argument("--seeds", type=int, default=len(effort.seeds))
    given = parser.parse_args(options)
    return replace(effort, widths=tuple(given.widths), seeds=tuple(range(given.seeds)), losses_only=given.losses)
