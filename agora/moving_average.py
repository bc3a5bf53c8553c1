"""The exponential moving average of measurements that start without a value. Pure.

Knows: numbers. Must not know: what they measure, or when.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """Immutable exponential moving average, changed by `with_sample`; the first 1 / `weight` samples count equally.

    value: None before the first sample. samples: how many there were.
    """

    weight: float
    value: float | None = None
    samples: int = 0

    def with_sample(self, sample: float) -> MovingAverage:
        """Returns a new average with the sample: value + w * (sample - value), w = max(weight, 1 / (samples + 1))."""
        weight, value = max(self.weight, 1.0 / (self.samples + 1)), sample if self.value is None else self.value
        return MovingAverage(self.weight, value + weight * (sample - value), self.samples + 1)
