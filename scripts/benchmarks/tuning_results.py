"""The results of the tuning benchmark: ratios, the rows of the codecs, notes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.report import Cell, Ratio, paired_ratio
from benchmarks.tuning_settings import (
    BASES,
    CONTEXT,
    EXACT,
    FEWER,
    LOSS_SEQUENCES,
    LOSS_SIZES,
    MICROBATCHES,
    RANK,
    SEQUENCES,
    SPEED_SIZES,
    STAGES,
    BaseName,
    Effort,
    LossJob,
    times_fewer,
)
from benchmarks.turns import Readings

SPEED_RATIOS: Final[Mapping[str, tuple[str, str, str]]] = {
    "swarm_vs_peft": ("swarm", "peft", "tokens/s of LoRA, frozen weights float32, a swarm of 2 against peft"),
    "nf4_swarm_vs_peft": ("nf4_swarm", "nf4_peft", "tokens/s of QLoRA, frozen weights nf4, a swarm of 2 against peft"),
}
CODEC_RATIO: Final = "codec_4x_loss"


@dataclass(frozen=True, slots=True)
class TunedLoss:
    """The held-out losses after a loss run: as the swarm reports it, and of the adapter without boundaries."""

    loss: float
    exported_loss: float

    @property
    def worse(self) -> float:
        return max(self.loss, self.exported_loss)


TunedLosses = Mapping[LossJob, TunedLoss]


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of all loss runs, in their order, and of the base models on the same held-out text."""

    tuned: TunedLosses = field(default_factory=dict)
    untuned: Mapping[BaseName, float] = field(default_factory=dict)


def ratios(readings: Mapping[str, Readings], losses: TunedLosses) -> dict[str, Ratio]:
    """Returns all ratios by their fixed names; one that was not measured is NaN."""
    found = {
        name: Ratio(_rate_ratio(readings, ours, theirs), ">= 0.95", meaning)
        for name, (ours, theirs, meaning) in SPEED_RATIOS.items()
    }
    codec, ratio = best_codec(losses)
    meaning = f"held-out loss with the best codec of {FEWER:g} times fewer bytes than bf16 against {EXACT}"
    found[CODEC_RATIO] = Ratio(ratio, "<= 1.01", f"{meaning}: {codec or 'none was measured'}")
    return found


def _rate_ratio(readings: Mapping[str, Readings], ours: str, theirs: str) -> float:
    measured = ours in readings and theirs in readings
    return paired_ratio(readings[ours].rates, readings[theirs].rates) if measured else math.nan


def best_codec(losses: TunedLosses) -> tuple[str, float]:
    """Returns the codec of at least FEWER times fewer bytes than bf16 that costs least, and its loss ratio to EXACT.

    A codec's cost is the loss ratio on the base model where that is higher. ("", NaN) when no such codec was measured.
    """
    costs = {codec: _worst_ratio(losses, codec) for codec in _codecs(losses) if times_fewer(codec) >= FEWER}
    best = min(costs, key=lambda codec: costs[codec], default="")
    return best, costs.get(best, math.nan)


def loss_rows(losses: TunedLosses) -> list[dict[str, Cell]]:
    """Returns one line of the table for each base model and codec. median, low, high: of the loss, over the seeds."""
    return [_loss_row(losses, base, codec) for base in BASES for codec in _codecs(losses)]


def _loss_row(losses: TunedLosses, base: BaseName, codec: str) -> dict[str, Cell]:
    found = [tuned for job, tuned in losses.items() if (job.base, job.codec) == (base, codec)]
    costs = [100 * (ratio - 1) for ratio in _loss_ratios(losses, base, codec)]
    values = [tuned.loss for tuned in found]
    return {
        "name": f"{codec}, {base}",
        "unit": "nats",
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "rounds": len(values),
        "times_fewer_bytes": round(times_fewer(codec), 2),
        "exported": statistics.median(tuned.exported_loss for tuned in found),
        "cost_%": round(statistics.fmean(costs), 2),
        "cost_high": round(max(costs), 2),
    }


def _worst_ratio(losses: TunedLosses, codec: str) -> float:
    return max(statistics.fmean(_loss_ratios(losses, base, codec)) for base in BASES)


def _loss_ratios(losses: TunedLosses, base: BaseName, codec: str) -> list[float]:
    seeds = [job.seed for job in losses if (job.base, job.codec) == (base, codec)]
    return [losses[LossJob(base, codec, seed)].worse / losses[LossJob(base, EXACT, seed)].loss for seed in seeds]


def _codecs(losses: TunedLosses) -> list[str]:
    return list(dict.fromkeys(job.codec for job in losses))


def speed_notes(effort: Effort, cores: int) -> list[str]:
    """Returns what makes the comparison of speeds fair, for the published page."""
    sizes = SPEED_SIZES
    return [
        f"The same work for all: a Qwen2 decoder of random weights (width {sizes['hidden_size']}, "
        f"{sizes['num_hidden_layers']} layers, context {CONTEXT}, vocabulary 256), LoRA of rank {RANK} in all linear "
        f"layers, microbatches of {SEQUENCES} sequences, {MICROBATCHES} of them per AdamW step, every place of a row "
        "supervised; float32 where bf16 is not native, as here on processors.",
        f"Compute threads in all: {cores} on {cores} cores; a swarm has {STAGES} daemons, which have one each on 2 "
        "cores. The daemons' event loops and network processes come on top and share those cores.",
        f"All are started and warmed up first; then {effort.rounds} rounds in alternating order give each a window of "
        f"about {effort.window_s:.0f} s while the others are stopped. A ratio is the median of the rounds' ratios.",
        "Of a swarm, for each stage: device_s_per_1000, processor seconds of its compute thread for 1000 tokens; "
        "device_busy, those for a second that passed. rest_s_per_1000: those of everything else in its processes.",
    ]


def loss_notes(effort: Effort, untuned: Mapping[BaseName, float]) -> list[str]:
    """Returns how losses were compared. untuned: losses of the base models on the text that they are tuned on."""
    sizes, context = LOSS_SIZES, LOSS_SIZES["max_position_embeddings"]
    before = " and ".join(f"{loss:.2f} ({base})" for base, loss in untuned.items())
    return [
        f"Codecs: a Qwen2 decoder (width {sizes['hidden_size']}, {sizes['num_hidden_layers']} layers, bytes) is "
        f"pretrained for {effort.pretraining_steps} steps on the standard library's source, then tuned with LoRA of "
        f"rank {RANK} on its docstrings for {effort.steps} steps of {LOSS_SEQUENCES * context:,} tokens. It is cut "
        f"into {effort.stages} stages in one process, whose boundaries cross by the codec. "
        f"Untuned, its loss on that text is {before}.",
        "ordinary: the model as it comes out, whose columns are alike. outliers: two columns of its residual stream "
        "are 10 to 25 times larger than the others in every token, as in large pretrained models; they were planted in "
        "its embedding before pretraining.",
        "median, low, high: over the seeds, of the held-out loss as the swarm reports it: boundaries cross by the "
        "codec, weights are their moving average. exported: that of the adapter without boundaries. cost: how much the "
        f"worse of the two is above the loss with {EXACT}, in percent; the mean and the highest of the seeds. "
        f"{CODEC_RATIO} is the mean over seeds, on the base model where the codec costs more.",
    ]
