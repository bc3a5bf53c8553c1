"""Adds up what the journals of a demo report of tuning: the objective's metrics, and how many samples were learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agora.core.metrics import named_means

SAMPLE_COUNTS: Final = ("seen", "repeated", "missed")


@dataclass
class MetricSums:
    """The metrics of several microbatches, summed. tokens: of these microbatches.

    sums: one for each metric of the objective, over tokens, as in MicrobatchCompleted; empty before the first.
    """

    tokens: int = 0
    sums: list[float] = field(default_factory=list)

    def add(self, metrics: Sequence[float], tokens: int) -> None:
        """Adds one microbatch's metric sums and its tokens. Raises ValueError for another number of sums."""
        self.tokens += tokens
        self.sums = [total + more for total, more in zip(self.sums or [0.0] * len(metrics), metrics, strict=True)]


@dataclass
class TuningTotals:
    """The totals of what all journals of a demo say about tuning: metrics of steps, and counts of samples.

    objective: the manifest's objective.kind.
    step_tokens: the target tokens of a step.
    samples: the counts of the origin that has seen the most samples.
    steps: the summed metrics of training microbatches, one entry for each `step_tokens` tokens, the last may have
        fewer.
    evaluated: the summed metrics of evaluation microbatches.
    """

    objective: str
    trainable_parameters: int
    step_tokens: int
    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SAMPLE_COUNTS, 0))
    steps: list[MetricSums] = field(default_factory=lambda: [MetricSums()])
    evaluated: MetricSums = field(default_factory=MetricSums)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Adds one line, given as its JSON fields, of any peer's journal: a MicrobatchCompleted or a SamplesCounted.

        Ignores other events, and a MicrobatchCompleted without metrics. The counts of a SamplesCounted replace the
        present ones if its origin has seen as many samples or more.
        """
        if fields.get("event") == "SamplesCounted":
            if fields["seen"] >= self.samples["seen"]:  # every origin counts all samples, as far as it knows of them
                self.samples = {name: int(fields[name]) for name in SAMPLE_COUNTS}
        elif fields.get("event") == "MicrobatchCompleted" and (metrics := fields.get("metrics")):
            is_training = fields.get("purpose", "train") == "train"
            self._add_metrics(metrics, int(fields.get("tokens", 0)), is_training=is_training)

    def _add_metrics(self, metrics: Sequence[float], tokens: int, *, is_training: bool) -> None:
        if not is_training:
            self.evaluated.add(metrics, tokens)
            return
        if self.steps[-1].tokens >= self.step_tokens:
            self.steps.append(MetricSums())
        self.steps[-1].add(metrics, tokens)

    def metrics(self) -> dict[str, Any]:
        """Returns the mean metrics of the last whole step by name, and with "first" and "eval" two more such dicts.

        "first" has the means of the first whole step, "eval" those of the evaluation microbatches; each of the two is
        {} without any metrics. Without a whole step, the partial step counts as first and last. Means are rounded to
        four decimals.
        """
        whole = [step for step in self.steps if step.tokens >= self.step_tokens] or self.steps
        last, first, evaluated = (
            {name: round(value, 4) for name, value in named_means(self.objective, part.sums, part.tokens).items()}
            for part in (whole[-1], whole[0], self.evaluated)
        )
        return {**last, "first": first, "eval": evaluated}

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a demo's result about tuning: objective, trained parameters, samples, metrics."""
        return {
            "objective": self.objective,
            "trainable_parameters": self.trainable_parameters,
            "samples": self.samples,
            "tuning": self.metrics(),
        }
