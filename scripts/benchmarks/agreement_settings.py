"""What the agreement benchmark compares: ways to agree, and what they are tried on.

Knows: names and numbers, the manifest. Must not know: torch, processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from agora_protocol.codec_names import WireName
from agora_protocol.manifest import AveragingSection, Manifest, preset

DEFAULTS: Final = AveragingSection()
DEFAULT_OPTIMIZER: Final = preset("tiny").optimizer.name
RATES: Final[Mapping[str, float]] = {"adamw": 6e-3, "muon": 1.2e-2}
"""The learning rate of each optimizer: the best of 3e-3, 6e-3 and 1.2e-2 for synchronous steps of this model."""


DELAY: Final = 0.125
"""Share of a step that is computed before the mean of the step before is applied; more than measured of daemons."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`fraction` of the anchor every `every` local steps, taken in `delay` steps after the snapshot; or another scheme.

    The first `exact` steps are along the mean gradient of all, whatever the scheme is. Gradients travel as
    `gradient_wire`, differences to the anchor as `slice_wire`.

    outer_rate, outer_momentum: of the anchor.
    stale: share of a step's sequences that are computed before the mean of the step before is applied.
    unequal: replica i of n computes in proportion to i + 1.
    missing: share of the contributions that come too late.
    """

    scheme: Literal["none", "synchronous", "slices"] = "slices"
    fraction: float = DEFAULTS.fraction
    every: int = DEFAULTS.every
    delay: int = 1
    stale: float = DELAY
    slice_wire: WireName = DEFAULTS.slice_wire
    outer_rate: float = DEFAULTS.outer_rate
    outer_momentum: float = DEFAULTS.outer_momentum
    gradient_wire: WireName = DEFAULTS.gradient_wire
    exact: int = DEFAULTS.exact_steps
    optimizer: str = "adamw"
    replicas: int = 4
    unequal: bool = False
    missing: float = 0.0

    @property
    def name(self) -> str:
        """As the table shows it: the optimizer, the exact steps if they end, the scheme, what is not the default."""
        label: str = self.scheme
        if self.scheme == "slices":
            label = f"all weights in {math.ceil(1 / self.fraction) * self.every} local steps as {self.slice_wire}"
        first: str = f"{self.exact} exact steps as {self.gradient_wire}, then " if self.exact else ""
        if self.exact >= DEFAULTS.exact_steps:
            first, label = "", f"every gradient as {self.gradient_wire}"
        more = [f"delay {self.delay}"] if self.delay != 1 else []
        usual = DEFAULTS.outer_rate, DEFAULTS.outer_momentum
        outer = self.outer_rate, self.outer_momentum
        more += [f"outer {self.outer_rate:g}/{self.outer_momentum:g}"] if outer != usual else []
        more += [f"{self.stale:g} stale"] if self.stale != DELAY and self.scheme != "synchronous" else []
        more += [f"{self.replicas} replicas"] if self.replicas != 4 else []
        more += ["unequal shares"] if self.unequal else []
        more += [f"{100 * self.missing:g} % of contributions missing"] if self.missing else []
        return f"{self.optimizer}: {first}" + ", ".join([label, *more])

    def manifest(self, plain: Manifest, seed: int) -> Manifest:
        """Returns the benchmark's manifest with this setting's optimizer, its learning rate, and a seed."""
        return plain.with_values(
            seed=seed,
            optimizer={"name": self.optimizer, "learning_rate": RATES[self.optimizer]},
            averaging={
                "exact_steps": self.exact if self.scheme != "synchronous" else DEFAULTS.exact_steps,
                "outer_rate": self.outer_rate,
                "outer_momentum": self.outer_momentum,
            },
        )

    @property
    def baseline(self) -> Setting:
        """Synchronous steps with the same optimizer and as many replicas."""
        return Setting("synchronous", exact=0, stale=0.0, optimizer=self.optimizer, replicas=self.replicas)


FEWEST_BITS: Final = Setting(optimizer=DEFAULT_OPTIMIZER, gradient_wire="normal2")
"""What a peer sends whose uplink carries 0.28 bytes for each parameter in a step: the fewest bits."""
SYNCHRONOUS: Final = FEWEST_BITS.baseline
SYNCHRONOUS_ADAMW: Final = replace(SYNCHRONOUS, optimizer="adamw")
NONE: Final = Setting("none", exact=0, optimizer=DEFAULT_OPTIMIZER)
BITS: Final[Mapping[WireName, Setting]] = {
    "normal3": replace(FEWEST_BITS, gradient_wire="normal3"),
    "normal4": replace(FEWEST_BITS, gradient_wire="normal4"),
    "int8": replace(FEWEST_BITS, gradient_wire="int8"),
}
AT_ONCE: Final = replace(FEWEST_BITS, stale=0.0)
SIXTEEN: Final = replace(FEWEST_BITS, replicas=16)
UNEQUAL: Final = replace(FEWEST_BITS, unequal=True)
MISSING: Final = replace(FEWEST_BITS, missing=0.1)
SLICES: Final = replace(FEWEST_BITS, exact=0)
"""Slices from the first step on: the fewest bytes."""
SLICES_LATER: Final = {steps: replace(FEWEST_BITS, exact=steps) for steps in (267, 400)}
"""2-bit gradients for a third of a run, then slices: by the steps of a quick run's third, and of a full one's."""
NEEDED: Final = (SYNCHRONOUS, SYNCHRONOUS_ADAMW, NONE, FEWEST_BITS)
"""What the ratios are made of."""
MORE: Final = (*BITS.values(), AT_ONCE, SIXTEEN, UNEQUAL, MISSING, SLICES, *SLICES_LATER.values())
"""What is trained with the first seed only."""


def sequences_of(total: int, replicas: int, unequal: bool) -> list[int]:
    """Returns how many of a step's `total` sequences each replica computes: as many, or in proportion to i + 1."""
    sizes = [number + 1 if unequal else 1 for number in range(replicas)]
    ends = [round(total * sum(sizes[: number + 1]) / sum(sizes)) for number in range(replicas)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to train: `sequences` of all replicas in a step, the model's size, and the seeds of every setting."""

    seeds: tuple[int, ...]
    steps: int
    width: int
    layers: int
    context: int
    sequences: int
    heldout_batches: int

    @property
    def jobs(self) -> list[tuple[Setting, int]]:
        """Every setting and seed to train, a setting's seeds in order; those of MORE with the first seed."""
        first = [(setting, self.seeds[0]) for setting in dict.fromkeys(MORE) if setting not in NEEDED]
        return [(setting, seed) for setting in dict.fromkeys(NEEDED) for seed in self.seeds] + first

    def manifest(self) -> Manifest:
        """A Llama-style decoder on the standard library's source, one stage, whose schedule ends with `steps`.

        No average of the weights is kept: losses are those of the weights themselves, which replicas agree on.
        """
        model = {"width": self.width, "layers": self.layers, "heads": 4, "key_value_heads": 2, "context": self.context}
        model["feed_forward"] = 11 * self.width // 4
        tokens = self.sequences * self.context
        warmup = min(50, self.steps // 10)
        values = {
            "model": model,
            "stages": {"count": 1},
            "schedule": {"microbatch": self.sequences // 4},
            "optimizer": {
                "target_tokens": tokens,
                "total_steps": self.steps,
                "warmup_steps": warmup,
                "average_decay": 0.0,
            },
        }
        return Manifest.from_values(values, "benchmark")


QUICK: Final = Effort((0,), 800, 64, 2, 64, 32, heldout_batches=64)
FULL: Final = Effort((0, 1), 1200, 64, 2, 64, 64, heldout_batches=64)
