"""What the agreement benchmark compares: ways to agree, what they are tried on, and what others have published.

Knows: names and numbers, the manifest. Must not know: torch, processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from agora_protocol.manifest import AveragingSection, Manifest

REPLICAS: Final = 4
DEFAULTS: Final = AveragingSection()


@dataclass(frozen=True, slots=True)
class Setting:
    """`fraction` of the weights every `every` steps, taken in `delay` steps after the snapshot; or another scheme.

    The first `exact` steps are along the mean gradient of all whatever the scheme is, as in post-local SGD (Lin et al.,
    2020); it travels as `wire`.
    """

    scheme: Literal["none", "synchronous", "averaging"] = "averaging"
    fraction: float = DEFAULTS.fraction
    every: int = DEFAULTS.every
    delay: int = 1
    rule: Literal["delta", "ema"] = DEFAULTS.rule
    wire: Literal["int8", "bf16", "float32"] = DEFAULTS.wire
    exact: int = DEFAULTS.exact_steps

    @property
    def name(self) -> str:
        """As the table shows it: what differs from the defaults is named after the fraction and the interval."""
        told = self.scheme if self.scheme != "averaging" else f"{100 * self.fraction:g} % every {self.every}"
        more = [f"delay {self.delay}"] if self.delay != 1 else []
        more += [value for value, usual in ((self.rule, DEFAULTS.rule), (self.wire, DEFAULTS.wire)) if value != usual]
        first = f"{self.exact} exact steps, then " if self.exact else ""
        return first + ", ".join([told, *more])


SYNCHRONOUS: Final = Setting("synchronous", exact=0)
NONE: Final = Setting("none", exact=0)
DEFAULT: Final = Setting()
SCALED: Final = Setting(every=5)
NEEDED: Final = (SYNCHRONOUS, NONE, DEFAULT, SCALED)
"""What the ratios are made of."""
MORE: Final = (
    Setting("none"),
    Setting(exact=0),
    Setting(every=5, exact=0),
    Setting(every=1),
    Setting(fraction=0.2),
    Setting(fraction=1.0, every=1, delay=0, wire="float32", exact=0),
    Setting(delay=15),
    Setting(delay=15, rule="ema"),
)

PUBLISHED: Final[Mapping[str, float]] = {
    "DDP, float32": 4.0,
    "DDP, bf16": 2.0,
    "hivemind.Optimizer, gradients of every step, float32": 4.0,
    "AsyncMesh (arXiv 2601.22442), 5 % every step, float32": 0.05 * 4,
    "PowerSGD of rank 64 on 4096 x 4096, float32": 4 * 64 * (4096 + 4096) / 4096**2,
    "DeMo (arXiv 2411.19870), 32 of 4096, 12 bytes each": 12 * 32 / 4096,
    "DeMo (arXiv 2411.19870), 8 of 4096, 12 bytes each": 12 * 8 / 4096,
    "INTELLECT-1 (arXiv 2412.01152), all every 100, int8": 1 / 100,
    "DiLoCo (arXiv 2311.08105), all every 500, float32": 4 / 500,
    "Streaming DiLoCo (arXiv 2501.18512), all every 100, 4 bits": 0.5 / 100,
    "SPARTA, 0.1 % every step, float32": 0.001 * 4,
}
"""Bytes per parameter and optimizer step of others, from what they have published of their settings."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to train: `sequences` per replica and step, and the model's size.

    What the ratios need is trained with every one of `seeds`, `more` with the first.
    """

    more: tuple[Setting, ...]
    seeds: tuple[int, ...]
    steps: int
    width: int
    layers: int
    context: int
    sequences: int
    heldout_batches: int

    @property
    def jobs(self) -> list[tuple[Setting, int]]:
        """Every setting and seed to train, a setting's seeds in order."""
        return [(setting, seed) for setting in NEEDED for seed in self.seeds] + [
            (setting, self.seeds[0]) for setting in self.more
        ]

    def manifest(self) -> Manifest:
        """A Llama-style decoder on the standard library's source, one stage, whose schedule ends with `steps`."""
        model = {"width": self.width, "layers": self.layers, "heads": 4, "key_value_heads": 2, "context": self.context}
        model["feed_forward"] = 11 * self.width // 4
        tokens = REPLICAS * self.sequences * self.context
        warmup = min(50, self.steps // 10)
        values = {
            "model": model,
            "stages": {"count": 1},
            "schedule": {"microbatch": self.sequences},
            "optimizer": {"target_tokens": tokens, "total_steps": self.steps, "warmup_steps": warmup},
        }
        return Manifest.from_values(values, "benchmark")


QUICK: Final = Effort((), (0,), 800, 64, 2, 64, 8, heldout_batches=64)
FULL: Final = Effort(MORE, (0, 1), 1200, 64, 2, 64, 16, heldout_batches=64)
