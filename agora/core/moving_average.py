"""Averages of measured quantities: moving averages, and rates over a window of time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

RATE_WINDOW_S: Final = 15.0  # seconds over which a WindowedRate is averaged


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


class WindowedRate:
    """Computes the rate per second of a growing total over about the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def update(self, now: float, total: float) -> float:
        """Records the total at `now`, in seconds, and returns the rate per second; 0 at the first call.

        If calls are rarer than RATE_WINDOW_S, the rate is that since the last call.
        """
        self._samples.append((now, total))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        began, earlier = self._samples[0]
        return (total - earlier) / (now - began) if now > began else 0.0
