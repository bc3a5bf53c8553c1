"""What the tuning benchmark compares: the models, the manifests, how long each part is measured, the options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from agora_protocol.codec_names import DIRECTIONS, parse_codec
from agora_protocol.errors import ManifestError
from agora_protocol.manifest import Manifest

from agora.tuning.base.model_files import file_hash, read_config, weight_files

FrozenAs = Literal["float32", "bf16", "nf4"]
BaseName = Literal["ordinary", "outliers"]

RANK: Final = 16
STAGES: Final = 2
CONTEXT: Final = 256
SEQUENCES: Final = 2
# Of a step, as `swarm new --base-model` has it, so that the default staleness lets four be in flight.
MICROBATCHES: Final = 32
# Of the model whose tuning is timed: 12.9 M parameters, random weights.
SPEED_SIZES: Final[Mapping[str, int]] = {
    "hidden_size": 384,
    "intermediate_size": 1056,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
# Of the pretrained models whose losses are compared: 0.8 M parameters.
LOSS_SIZES: Final[Mapping[str, int]] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LOSS_SEQUENCES: Final = 8
LOSS_RATE: Final = 1e-2  # the learning rate of the loss runs: the best of 1e-3, 3e-3 and 1e-2 after 150 steps
TUNED_TEXT: Final = "tuned.txt"
BASES: Final[tuple[BaseName, ...]] = ("ordinary", "outliers")
EXACT, REFERENCE = "float32", "bf16"  # the codecs that a loss, and bytes, are compared with
FEWER: Final = 4.0  # times fewer bytes than bf16 that the ratio `codec_4x_loss` asks for
QUICK_CODECS: Final = (
    EXACT,
    REFERENCE,
    "int8",
    "int4",
    "int4h",
    "int4h/int3h",
    "int5h/int2h",
    "int5h/int2",
    "top96:int4",
)
MORE_CODECS: Final = (
    "int8h",
    "int6",
    "int6h",
    "int6/int4h",
    "int5",
    "int5h",
    "int5h/int3h",
    "int5/int2",
    "int4/int3",
    "int4h/int3",
    "int4h/int2h",
    "int3",
    "int3h",
    "top64:int6",
)


@dataclass(frozen=True, slots=True)
class LossJob:
    """One loss run: the base model, the codec of the boundaries, the seed of samples and adapters."""

    base: BaseName
    codec: str
    seed: int


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    rounds, window_s: of the measured speeds; with 0 rounds no speed is measured.
    codecs: of the loss runs; without codecs there are no loss runs.
    stages: of a loss run, with a boundary between any two.
    heldout_batches: of an evaluation, each LOSS_SEQUENCES sequences.
    """

    rounds: int
    window_s: float
    codecs: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    pretraining_steps: int
    heldout_batches: int
    stages: int = 4

    @property
    def loss_jobs(self) -> list[LossJob]:
        return [LossJob(base, codec, seed) for seed in self.seeds for base in BASES for codec in self.codecs]


QUICK: Final = Effort(3, 5.0, QUICK_CODECS, (0,), steps=60, pretraining_steps=250, heldout_batches=16)
FULL: Final = Effort(
    7, 15.0, (*QUICK_CODECS, *MORE_CODECS), (0, 1, 2), steps=200, pretraining_steps=600, heldout_batches=32
)


def effort_of(options: Sequence[str], quick: bool) -> Effort:
    """Returns the effort that the options ask for. Exits with code 2 for options that it cannot read."""
    parser = argparse.ArgumentParser(prog="./scripts/bench tuning", add_help=False)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--speeds", action="store_true")
    part.add_argument("--losses", action="store_true")
    parser.add_argument("--codecs", type=_codecs)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stages", type=int, choices=range(1, LOSS_SIZES["num_hidden_layers"] + 1))
    given, effort = parser.parse_args(options), QUICK if quick else FULL
    codecs = () if given.speeds else tuple(dict.fromkeys((EXACT, REFERENCE, *(given.codecs or effort.codecs))))
    return replace(
        effort,
        rounds=0 if given.losses else effort.rounds,
        codecs=codecs,
        seeds=tuple(range(given.seeds)) if given.seeds else effort.seeds,
        steps=given.steps or effort.steps,
        stages=given.stages or effort.stages,
    )


def speed_manifest(base: Path, frozen_as: FrozenAs, stages: int = STAGES) -> Manifest:
    """Returns the manifest of the run whose speed is measured, in rows of as many tokens as the model has positions.

    base: the folder of its base model.
    """
    context = int(json.loads(read_config(base))["max_position_embeddings"])
    values = {
        "model": _model(base, context, frozen_as),
        "stages": {"count": stages},
        "schedule": {"microbatch": SEQUENCES},
        "optimizer": {
            "learning_rate": 2e-4,
            "weight_decay": 0.0,
            "target_tokens": MICROBATCHES * SEQUENCES * context,
        },
    }
    return Manifest.from_values(values, "benchmark")


def loss_manifest(base: Path, text: Path, job: LossJob, effort: Effort) -> Manifest:
    """Returns the manifest of a loss run that tunes the model in `base` on the file `text`."""
    context = LOSS_SIZES["max_position_embeddings"]
    values = {
        "seed": job.seed,
        "model": _model(base, context, "float32"),
        "stages": {"count": effort.stages},
        "boundary": {"codec": job.codec},
        "schedule": {"microbatch": LOSS_SEQUENCES},
        "optimizer": {
            "learning_rate": LOSS_RATE,
            "weight_decay": 0.0,
            "warmup_steps": effort.steps // 15,
            "total_steps": effort.steps,
            "target_tokens": LOSS_SEQUENCES * context,
        },
        "data": {"corpus": [str(text)], "heldout": 0.03},
    }
    return Manifest.from_values(values, "benchmark")


def times_fewer(codec: str) -> float:
    """Returns how many times fewer bytes than bf16 a boundary of the loss runs takes by `codec`, both ways together."""
    return _boundary_bytes(REFERENCE) / _boundary_bytes(codec)


def _boundary_bytes(codec: str) -> int:
    spec, shape = parse_codec(codec), (LOSS_SEQUENCES, LOSS_SIZES["max_position_embeddings"], LOSS_SIZES["hidden_size"])
    return sum(spec.bytes_of(shape, direction) for direction in DIRECTIONS)


def _model(base: Path, context: int, frozen_as: FrozenAs) -> dict[str, Any]:
    return {
        "family": "hf",
        "config": read_config(base),
        "context": context,
        "weights": [[name, file_hash(base / name)] for name in weight_files(base)],
        "trained": "lora",
        "frozen_as": frozen_as,
        "lora_rank": RANK,
        "lora_alpha": 2.0 * RANK,
    }


def _codecs(text: str) -> list[str]:
    names = text.split(",")
    try:
        for name in names:
            parse_codec(name)
    except ManifestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names
