"""What the benchmark of slow links compares: boundaries, how long each is trained, which links they cross.

Knows: names and numbers, the manifest. Must not know: torch, processes, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from agora_protocol.codec_names import parse_codec
from agora_protocol.manifest import LINK_CODEC, Manifest

RTT_MS: Final = 50
DENSE_SHARE: Final = 0.15
"""Of a step of dense bf16 over the link, what it would take without the link: 85 % of it is the wire's doing."""
PUBLISHED_PARTS: Final = 6.4
SWARM_SEQUENCES: Final = 16
"""Sequences of a microbatch where speed is measured."""
SWARM_MICROBATCHES: Final = 8
"""Microbatches of an optimizer step where speed is measured; a loss run steps after each."""
TOKEN_BYTES: Final = 1
"""A token's id, which goes forward with its coordinates; of the bytes tokenizer."""
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
        """The name in the table: the boundary's size and its codec."""
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
PUBLISHED: Final = Setting(PUBLISHED_PARTS, "bf16")
CHOSEN: Final = Setting(16 / 7, LINK_CODEC)
"""What `throughput_kept_50ms` and both times to loss are about."""
NEEDED: Final = (DENSE, DENSE_LEARNT, PUBLISHED, CHOSEN)
"""What the ratios are made of."""


@dataclass(frozen=True, slots=True)
class Job:
    """One loss run."""

    setting: Setting
    width: int
    seed: int


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of training and measuring.

    Each of `settings` is trained with each of `seeds` at each of `widths`. The published recipe takes `most_steps` of
    that width, and its loss at the end is the target; a run of another setting ends when it is there, but not before
    `steps`, which all have in common. `turns`: windows of each swarm, and of the pace beside it.
    """

    widths: tuple[int, ...]
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    stages: int
    steps: int
    most_steps: tuple[int, ...]
    every: int
    heldout_batches: int
    window_s: float
    turns: int
    context: int = 64
    sequences: int = 8

    def most_at(self, width: int) -> int:
        """Returns the steps of the longest run at this width."""
        return self.most_steps[self.widths.index(width)]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of a loss run."""
        return self.context * self.sequences

    @property
    def jobs(self) -> list[Job]:
        """Every loss run: of each setting at each width, its seeds in order."""
        return [Job(setting, width, seed) for width in self.widths for setting in self.settings for seed in self.seeds]

    def swarm_manifest(self, setting: Setting, width: int) -> Manifest:
        """Returns the manifest of a swarm whose speed is measured."""
        target = SWARM_MICROBATCHES * SWARM_SEQUENCES * self.context
        return self.manifest(setting, width).replaced(
            schedule={"microbatch": SWARM_SEQUENCES}, optimizer={"target_tokens": target}
        )

    def manifest(self, setting: Setting, width: int, seed: int = 0) -> Manifest:
        """Returns the manifest of a loss run: one layer a stage, the learning rate constant after its warm-up.

        No average of the weights is kept: the losses of all settings are those of the weights themselves.
        """
        model = {
            "width": width,
            "subspace": setting.subspace(width),
            "embedding": setting.embedding,
            "layers": self.stages,
            "heads": 4,
            "key_value_heads": 2,
            "feed_forward": 11 * width // 4,
            "context": self.context,
        }
        optimizer = {
            "learning_rate": LEARNING_RATE,
            "warmup_steps": WARMUP_STEPS,
            "minimum_ratio": 1.0,
            "target_tokens": self.tokens_per_step,
            "average_decay": 0.0,
        }
        values = {
            "seed": seed,
            "model": model,
            "stages": {"count": self.stages},
            "boundary": {"codec": setting.codec},
            "schedule": {"microbatch": self.sequences},
            "optimizer": optimizer,
        }
        return Manifest.from_values(values, "benchmark")


QUICK: Final = Effort((64,), NEEDED, (0,), 4, 400, (500,), 20, 8, 6.0, 1)
FULL: Final = Effort((64, 128), NEEDED, (0, 1, 2), 8, 750, (3000, 1500), 50, 16, 10.0, 2)
