"""What the journals of a demo say of tuning: the metrics of its objective, and which samples were learnt how often.

Knows: the journal fields of a completed microbatch, the names of metrics. Must not know: losses, steps, processes,
files. Deterministic.

| line of the journal | fields read here |
|---|---|
| MicrobatchCompleted | `purpose`, `tokens`; `metrics`, its sums; `epoch`, `epoch_microbatch`, `samples` |
| SamplesOpened | `samples`: how many are trained on in an epoch |

A line without a field, as runs on plain text write it, adds nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SampledMicrobatch(NamedTuple):
    """A completed microbatch of samples: its epoch, its number in the epoch, the samples that its rows hold."""

    epoch: int
    number: int
    samples: int


def sample_accounts(completed: Iterable[SampledMicrobatch], samples_per_epoch: int) -> dict[str, int]:
    """Returns how many samples were `seen`, `repeated` and `missed`, summed over all epochs.

    seen: completed at least once in their epoch. repeated: completed once more in it, as part of a microbatch that was
    computed again or of a last one that was filled up. missed: never completed in an epoch after which another began.
    samples_per_epoch: 0 when no journal says it; then nothing is missed.
    """
    times: defaultdict[int, Counter[int]] = defaultdict(Counter)
    sizes: dict[tuple[int, int], int] = {}
    for epoch, number, samples in completed:
        times[epoch][number] += 1
        sizes[epoch, number] = samples
    newest = max(times, default=-1)
    accounts = {"seen": 0, "repeated": 0, "missed": 0}
    for epoch in range(newest + 1):
        computed = sum(count * sizes[epoch, number] for number, count in times[epoch].items())
        distinct = sum(sizes[epoch, number] for number in times[epoch])
        seen = min(distinct, samples_per_epoch or distinct)
        accounts["seen"] += seen
        accounts["repeated"] += computed - seen
        if epoch < newest:
            accounts["missed"] += max(samples_per_epoch - seen, 0)
    return accounts


def tuning_metrics(objective: str, sums: Sequence[float], tokens: int) -> dict[str, float]:
    """Returns the metrics of an objective by their usual names; {} where there are none.

    sums: what microbatches report together, in the order of Processed.metrics. tokens: supervised ones in them.
    """
    match objective, list(sums):
        case "sft", [right, *_] if tokens:
            return {"token_accuracy": right / tokens}
        case "dpo", [chosen, rejected, ranked, pairs, *_] if pairs:
            return {
                "rewards/chosen": chosen / pairs,
                "rewards/rejected": rejected / pairs,
                "rewards/margins": (chosen - rejected) / pairs,
                "rewards/accuracies": ranked / pairs,
            }
    return {}


@dataclass
class MetricSums:
    """Adds up the metrics of some microbatches."""

    microbatches: int = 0
    tokens: int = 0
    sums: list[float] = field(default_factory=list)

    def add(self, metrics: Sequence[float], tokens: int) -> None:
        """Adds one microbatch's sums."""
        self.microbatches += 1
        self.tokens += tokens
        self.sums = [mine + more for mine, more in zip(self.sums or [0.0] * len(metrics), metrics, strict=False)]


@dataclass
class TuningTotals:
    """Adds up the lines of all journals that are about tuning. step_microbatches: how many make one step."""

    objective: str
    trainable_parameters: int
    step_microbatches: int
    samples_per_epoch: int = 0
    completed: list[SampledMicrobatch] = field(default_factory=list)
    steps: list[MetricSums] = field(default_factory=lambda: [MetricSums()])  # of each step's worth; the last may lack
    evaluated: MetricSums = field(default_factory=MetricSums)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Adds one line of a journal."""
        if fields.get("event") == "SamplesOpened":
            self.samples_per_epoch = int(fields.get("samples", 0))
        elif fields.get("event") == "MicrobatchCompleted":
            is_training = fields.get("purpose", "train") == "train"
            if metrics := fields.get("metrics"):
                self._add_metrics(metrics, int(fields.get("tokens", 0)), is_training=is_training)
            if is_training and fields.get("samples"):
                place = int(fields.get("epoch", 0)), int(fields.get("epoch_microbatch", 0))
                self.completed.append(SampledMicrobatch(*place, int(fields["samples"])))

    def _add_metrics(self, metrics: Sequence[float], tokens: int, *, is_training: bool) -> None:
        """Adds the sums of one microbatch to those of its step, or to those of the evaluation."""
        if not is_training:
            self.evaluated.add(metrics, tokens)
            return
        if self.steps[-1].microbatches >= self.step_microbatches:
            self.steps.append(MetricSums())
        self.steps[-1].add(metrics, tokens)

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last whole step, and under `first` and `eval` those of the first and held out."""
        whole = [step for step in self.steps if step.microbatches >= self.step_microbatches] or self.steps
        last, first, evaluated = (
            {name: round(value, 4) for name, value in tuning_metrics(self.objective, part.sums, part.tokens).items()}
            for part in (whole[-1], whole[0], self.evaluated)
        )
        return {**last, "first": first, "eval": evaluated}

    def fields(self) -> dict[str, Any]:
        """Returns what a demo's result says of tuning."""
        return {
            "objective": self.objective,
            "trainable_parameters": self.trainable_parameters,
            "samples": sample_accounts(self.completed, self.samples_per_epoch),
            "tuning": self.metrics(),
        }
