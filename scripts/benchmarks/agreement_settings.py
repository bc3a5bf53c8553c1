"""What the agreement benchmark compares: ways to agree, and what they are tried on.

Knows: names and numbers, the manifest. Must not know: torch, processes.
"""

from __future__ import annotations

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
        label = self.scheme if self.scheme != "averaging" else f"{100 * self.fraction:g} % every {self.every}"
        more = [f"delay {self.delay}"] if self.delay != 1 else []
        more += [value for value, usual in ((self.rule, DEFAULTS.rule), (self.wire, DEFAULTS.wire)) if value != usual]
        first = f"{self.exact} exact steps, then " if self.exact else ""
        return first + ", ".join([label, *more])


SYNCHRONOUS: Final = Setting("synchronous", exact=0)
NONE: Final = Setting("none", exact=0)
DEFAULT: Final = Setting()
SCALED: Final = Setting(every=5)
NEEDED: Final = (SYNCHRONOUS, NONE, DEFAULT, SCALED)
"""What the ratios are made of."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to train: `sequences` per replica and step, the model's size, and the seeds of every setting."""

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
        return [(setting, seed) for setting in NEEDED for seed in self.seeds]

    def manifest(self) -> Manifest:
        """A Llama-style decoder on the standard library's source, one stage, whose schedule ends with `steps`.

        No average of the weights is kept: losses are those of the weights themselves, which replicas agree on.
        """
        model = {"width": self.width, "layers": self.layers, "heads": 4, "key_value_heads": 2, "context": self.context}
        model["feed_forward"] = 11 * self.width // 4
        tokens = REPLICAS * self.sequences * self.context
        warmup = min(50, self.steps // 10)
        values = {
            "model": model,
            "stages": {"count": 1},
            "schedule": {"microbatch": self.sequences},
            "optimizer": {
                "target_tokens": tokens,
                "total_steps": self.steps,
                "warmup_steps": warmup,
                "average_decay": 0.0,
            },
        }
        return Manifest.from_values(values, "benchmark")


QUICK: Final = Effort((0,), 800, 64, 2, 64, 8, heldout_batches=64)
FULL: Final = Effort((0, 1), 1200, 64, 2, 64, 16, heldout_batches=64)
