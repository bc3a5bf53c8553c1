"""What the agreement benchmark compares: ways to agree, and what they are tried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from agora_protocol.codec_names import NumberFormatName
from agora_protocol.manifest import Manifest, preset
from agora_protocol.manifest_sections import ALL_STEPS, AveragingSection

from agora.core.step_schedule import ALL_REDUCE

DEFAULTS: Final = AveragingSection()
DEFAULT_OPTIMIZER: Final = preset("tiny").optimizer.name
# The learning rate of each optimizer: the best of 3e-3, 6e-3 and 1.2e-2 for synchronous steps of this model.
RATES: Final[Mapping[str, float]] = {"adamw": 6e-3, "muon": 1.2e-2}


# Share of a step whose forwards begin before the mean of the step before is applied; more than measured of daemons.
DELAY: Final = 0.125


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to agree, by its `scheme`, and on what it is tried.

    | scheme | the replicas |
    |---|---|
    | none | train alone |
    | synchronous | step along the mean of their gradients, in float32 |
    | gradients | the same, as `wire` |
    | slices | step alone; every `every` steps they average one of `slices` slices of the weights, as `wire` |

    delay: steps from a slice's snapshot until its mean is applied.
    outer_rate, outer_momentum: of the anchor; the momentum for each step of a pass over all slices.
    stale: share of a step's sequences whose forward begins before the mean of the step before is applied.
    unequal: replica i of n computes in proportion to i + 1.
    missing: share of the contributions that come too late.
    """

    scheme: Literal["none", "synchronous", "gradients", "slices"]
    wire: NumberFormatName = "float32"
    slices: int = ALL_REDUCE
    every: int = 1
    delay: int = 1
    stale: float = DELAY
    outer_rate: float = DEFAULTS.outer_rate
    outer_momentum: float = DEFAULTS.outer_momentum
    optimizer: str = DEFAULT_OPTIMIZER
    replicas: int = 4
    unequal: bool = False
    missing: float = 0.0

    @property
    def name(self) -> str:
        label: str = self.scheme
        if self.scheme == "slices":
            label = f"all weights in {self.slices * self.every} inner steps as {self.wire}"
        elif self.scheme == "gradients":
            label = f"every gradient as {self.wire}"
        more = [f"delay {self.delay}"] if self.delay != 1 else []
        usual = DEFAULTS.outer_rate, DEFAULTS.outer_momentum
        outer = self.outer_rate, self.outer_momentum
        more += [f"outer {self.outer_rate:g}/{self.outer_momentum:g}"] if outer != usual else []
        more += [f"{self.stale:g} stale"] if self.stale != DELAY and self.scheme != "synchronous" else []
        more += [f"{self.replicas} replicas"] if self.replicas != 4 else []
        more += ["unequal shares"] if self.unequal else []
        more += [f"{100 * self.missing:g} % of contributions missing"] if self.missing else []
        return f"{self.optimizer}: " + ", ".join([label, *more])

    def manifest(self, plain: Manifest, seed: int) -> Manifest:
        """Returns the benchmark's manifest with this setting's optimizer, its learning rate, and a seed."""
        return plain.with_values(
            seed=seed,
            optimizer={"name": self.optimizer, "learning_rate": RATES[self.optimizer]},
            averaging={
                "exact_steps": 0 if self.scheme in ("none", "slices") else ALL_STEPS,
                "fraction": 1 / max(self.slices, 1),
                "every": self.every,
                "outer_rate": self.outer_rate,
                "outer_momentum": self.outer_momentum,
            },
        )

    @property
    def baseline(self) -> Setting:
        return Setting("synchronous", stale=0.0, optimizer=self.optimizer, replicas=self.replicas)


# What a peer sends whose uplink carries 0.28 bytes for each parameter in a step: the fewest bits.
FEWEST_BITS: Final = Setting("gradients", "normal2")
SYNCHRONOUS: Final = FEWEST_BITS.baseline
SYNCHRONOUS_ADAMW: Final = replace(SYNCHRONOUS, optimizer="adamw")
NONE: Final = Setting("none")
# What replicas agree by whose uplinks carry less, by the number of slices.
SLICES: Final = {count: Setting("slices", DEFAULTS.slice_wire, count) for count in (2, 3, 5, 10, 20)}
# What the ratios are made of.
NEEDED: Final = (SYNCHRONOUS, SYNCHRONOUS_ADAMW, NONE, FEWEST_BITS, SLICES[3], SLICES[20])
# More replicas, unequal ones, contributions that come too late.
HARDER: Final = tuple(
    changed
    for setting in (FEWEST_BITS, SLICES[3])
    for changed in (
        replace(setting, replicas=16),
        replace(setting, unequal=True),
        replace(setting, missing=0.1),
    )
)
# What is trained with the first seed only.
MORE: Final = (
    replace(FEWEST_BITS, wire="normal3"),
    replace(FEWEST_BITS, wire="normal4"),
    replace(FEWEST_BITS, wire="int8"),
    replace(FEWEST_BITS, stale=0.0),
    *SLICES.values(),
    *HARDER,
)


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
