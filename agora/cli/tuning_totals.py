"""What the journals of a demo say of tuning: the metrics of its objective, and how many samples were learnt how often.

Knows: the fields of the events MicrobatchCompleted and SamplesCounted. Must not know: losses, steps, processes, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agora.metrics import named_means

SAMPLE_COUNTS: Final = ("seen", "repeated", "missed")


@dataclass
class MetricSums:
    """Adds up the metrics of some microbatches."""

    tokens: int = 0
    sums: list[float] = field(default_factory=list)

    def add(self, metrics: Sequence[float], tokens: int) -> None:
        """Adds one microbatch's sums."""
        self.tokens += tokens
        self.sums = [mine + more for mine, more in zip(self.sums or [0.0] * len(metrics), metrics, strict=False)]


@dataclass
class TuningTotals:
    """Adds up the lines of all journals that are about tuning. step_tokens: the target of a step."""

    objective: str
    trainable_parameters: int
    step_tokens: int
    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SAMPLE_COUNTS, 0))
    steps: list[MetricSums] = field(default_factory=lambda: [MetricSums()])  # of each step's worth; the last may lack
    evaluated: MetricSums = field(default_factory=MetricSums)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Adds one line of a journal."""
        if fields.get("event") == "SamplesCounted":
            if fields["seen"] >= self.samples["seen"]:  # every origin counts what it knows of all of them
                self.samples = {name: int(fields[name]) for name in SAMPLE_COUNTS}
        elif fields.get("event") == "MicrobatchCompleted" and (metrics := fields.get("metrics")):
            is_training = fields.get("purpose", "train") == "train"
            self._add_metrics(metrics, int(fields.get("tokens", 0)), is_training=is_training)

    def _add_metrics(self, metrics: Sequence[float], tokens: int, *, is_training: bool) -> None:
        """Adds the sums of one microbatch to those of its step, or to those of the evaluation."""
        if not is_training:
            self.evaluated.add(metrics, tokens)
            return
        if self.steps[-1].tokens >= self.step_tokens:
            self.steps.append(MetricSums())
        self.steps[-1].add(metrics, tokens)

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last whole step, and under `first` and `eval` those of the first and held out."""
        whole = [step for step in self.steps if step.tokens >= self.step_tokens] or self.steps
        last, first, evaluated = (
            {name: round(value, 4) for name, value in named_means(self.objective, part.sums, part.tokens).items()}
            for part in (whole[-1], whole[0], self.evaluated)
        )
        return {**last, "first": first, "eval": evaluated}

    def fields(self) -> dict[str, Any]:
        """Returns what a demo's result says of tuning."""
        return {
            "objective": self.objective,
            "trainable_parameters": self.trainable_parameters,
            "samples": self.samples,
            "tuning": self.metrics(),
        }
