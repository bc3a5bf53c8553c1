"""The moving average of a measured quantity."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """An exponential moving average in which the first 1 / `weight` samples count equally; see `with_sample`.

    weight: of a new sample, 0 to 1. value: None before the first sample. samples: how many there were.
    """

    weight: float
    value: float | None = None
    samples: int = 0

    def with_sample(self, sample: float) -> MovingAverage:
        """Returns the average with `sample` added: value + w * (sample - value), w = max(weight, 1 / (samples + 1))."""
        weight = max(self.weight, 1.0 / (self.samples + 1))
        value = sample if self.value is None else self.value
        return MovingAverage(self.weight, value + weight * (sample - value), self.samples + 1)
