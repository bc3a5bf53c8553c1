"""What the benchmark of plans plans for: models tuned with QLoRA, and clusters and home machines to do it on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agora_protocol.codec_names import parse_codec

from agora.cost.run_cost import Activations, Machine, RunCost, StageCost

TOKENS: Final = 1024
BOUNDARY_CODEC: Final = "int4"
LORA_RANK: Final = 16
IN_FLIGHT: Final = 16
NF4_BYTES: Final = 0.516
VOCABULARY: Final = 32_000
GBIT: Final = 1e9 / 8
MBIT: Final = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a decoder. like: the model whose measured layer times give a machine's speed for this one."""

    layers: int
    width: int
    feed_forward: int
    key_value_width: int
    like: str

    @property
    def layer_parameters(self) -> float:
        return 2 * self.width**2 + 2 * self.width * self.key_value_width + 3 * self.width * self.feed_forward

    @property
    def lora_parameters(self) -> float:
        attention = 4 * self.width + 2 * (self.width + self.key_value_width)
        return LORA_RANK * (attention + 3 * (self.width + self.feed_forward))

    def forward_flops(self, tokens: int) -> float:
        """Returns the operations of one layer's forward for one sequence of so many tokens."""
        return 2 * self.layer_parameters * tokens + 2 * tokens**2 * self.width


MODELS: Final[Mapping[str, Decoder]] = {
    "7B": Decoder(32, 4096, 11008, 4096, "7B"),
    "13B": Decoder(40, 5120, 13824, 5120, "13B"),
    "33B": Decoder(60, 6656, 17920, 6656, "33B"),
    "70B": Decoder(80, 8192, 28672, 1024, "33B"),
}

# Memory in GB, and of each model (sequence length, milliseconds of one layer's forward and backward of one sequence).
#
# Source: the layer times that Zorse (arXiv 2507.10392) and Cephalo (arXiv 2411.01075) publish with their code, fp16.
LAYER_MS: Final[Mapping[str, tuple[float, Mapping[str, tuple[int, float]]]]] = {
    "H100": (94, {"7B": (512, 0.64 + 1.31), "13B": (1024, 1.89 + 4.42), "33B": (1024, 3.01 + 7.03)}),
    "A100-80": (80, {"7B": (1024, 2.09 + 4.15), "13B": (1024, 3.05 + 6.33), "33B": (1024, 4.95 + 10.49)}),
    "A100-40": (40, {"7B": (1024, 2.38 + 4.68), "13B": (1024, 3.37 + 6.80), "33B": (1024, 5.26 + 10.77)}),
    "A6000": (48, {"7B": (1024, 4.45 + 10.09), "13B": (1024, 7.84 + 16.73), "33B": (1024, 13.75 + 32.10)}),
    "V100": (16, {"7B": (1024, 5.58 + 11.65), "13B": (1024, 8.56 + 16.73), "33B": (1024, 13.86 + 27.45)}),
    "A10G": (24, {"7B": (1024, 7.79 + 16.25), "13B": (1024, 11.52 + 23.74), "33B": (1024, 18.57 + 38.19)}),
    "L4": (24, {"7B": (1024, 9.78 + 22.85), "13B": (1024, 15.07 + 35.68), "33B": (1024, 25.53 + 55.75)}),
    "T4": (16, {"7B": (1024, 15.24 + 42.58), "13B": (1024, 29.24 + 66.58), "33B": (1024, 47.54 + 111.3)}),
}

# The published clusters; their links are not published with them: 10 Gbit/s each way for every accelerator here.
CLUSTERS: Final[Mapping[str, Mapping[str, int]]] = {
    "4 H100, 16 A100": {"H100": 4, "A100-80": 16},
    "8 A100, 16 A10G, 16 V100, 24 T4": {"A100-40": 8, "A10G": 16, "V100": 16, "T4": 24},
}
HOME_KINDS: Final = ("H100", "A100-80", "A6000", "V100", "A10G", "L4", "T4")
# Megabits per second down and up, as home contracts have them; drawn alike.
RESIDENTIAL_LINKS: Final = ((250, 40), (500, 50), (1000, 100), (1000, 500), (1000, 1000))
HOME_SWARMS: Final = ("32 mixed, 0.2-1 Gbit/s", "32 mixed, residential links")


def tuning_cost(name: str, activations: Activations | None = None) -> RunCost:
    """Returns the cost of tuning a model with QLoRA, one layer a stage, 4-bit boundaries.

    activations: what all machines do; None: each the fastest for which it has the memory. A layer's graph is 34 bytes
    for each value that enters it (arXiv 2205.05198, with fused attention). The head's operations stand in
    `backward_flops`, where they count once.
    """
    model = MODELS[name]
    forward = model.forward_flops(TOKENS)
    entries = TOKENS * model.width
    table = VOCABULARY * model.width * 2.0
    layer = StageCost(
        forward_flops=forward,
        backward_flops=forward,
        frozen_bytes=NF4_BYTES * model.layer_parameters,
        trained_bytes=8.0 * model.lora_parameters,
        optimizer_bytes=8.0 * model.lora_parameters,
        kept_bytes=34.0 * entries,
        peak_bytes=7.0 * entries + 2.0 * model.width * model.feed_forward,
        layer_inputs_bytes=2.0 * entries,
        layer_peak_bytes=41.0 * entries + 2.0 * model.width * model.feed_forward,
    )
    first = StageCost(**_fields(layer) | {"frozen_bytes": layer.frozen_bytes + table})
    last = _fields(layer) | {
        "backward_flops": forward + 4.0 * VOCABULARY * model.width * TOKENS,
        "frozen_bytes": layer.frozen_bytes + table,
        "peak_bytes": layer.peak_bytes + 8.0 * VOCABULARY * TOKENS,
        "layer_peak_bytes": layer.layer_peak_bytes + 8.0 * VOCABULARY * TOKENS,
    }
    codec, shape = parse_codec(BOUNDARY_CODEC), (1, TOKENS, model.width)
    return RunCost(
        [first, *[layer] * (model.layers - 2), StageCost(**last)],
        forward_bytes=codec.bytes_of(shape, "forward"),
        backward_bytes=codec.bytes_of(shape, "backward"),
        tokens=TOKENS,
        in_flight=IN_FLIGHT,
        activations=activations,
        can_offload=False,
    )


def cluster_machines(cluster: str, model: str) -> list[Machine]:
    """Returns the accelerators of a published cluster, as fast as they are at layers of `model`."""
    kinds = [kind for kind, count in CLUSTERS[cluster].items() for _ in range(count)]
    return [_accelerator(kind, model, number, 10 * GBIT, 10 * GBIT) for number, kind in enumerate(kinds)]


def home_machines(model: str, rng: random.Random, count: int, *, residential: bool = False) -> list[Machine]:
    """Returns accelerators of mixed kinds at homes, with residential links, or 0.2 to 1 Gbit/s alike both ways."""
    machines = []
    for number in range(count):
        kind = rng.choice(HOME_KINDS)
        if residential:
            download, upload = (MBIT * rate for rate in rng.choice(RESIDENTIAL_LINKS))
        else:
            download = upload = GBIT * 0.2 * 5 ** rng.random()
        machines.append(_accelerator(kind, model, number, upload, download))
    return machines


def machines_of(swarm: str, model: str) -> list[Machine]:
    """Returns the machines of a row of the table: a published cluster, or one of HOME_SWARMS, the same in each run."""
    if swarm in CLUSTERS:
        return cluster_machines(swarm, model)
    return home_machines(model, random.Random(7), 32, residential=swarm == HOME_SWARMS[1])


def _accelerator(kind: str, model: str, number: int, upload: float, download: float) -> Machine:
    gigabytes, times = LAYER_MS[kind]
    measured = MODELS[model].like
    tokens, milliseconds = times[measured]
    flops = 3 * MODELS[measured].forward_flops(tokens) / (milliseconds / 1000)
    return Machine(f"{kind} {number}", flops, (0.9 * gigabytes - 3) * 1e9, upload=upload, download=download)


def _fields(stage: StageCost) -> dict[str, float]:
    return {name: getattr(stage, name) for name in StageCost.__slots__}
