"""Measures the rate of this peer's uplink by its usual traffic. Deterministic: a meter changes only by calls to it.

An uplink shows its rate only while more waits for it than it carries. So a sample counts when bytes waited at its start
and at its end; an uplink that nothing ever waits for is faster than needed, and its rate stays unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from agora.core.moving_average import MovingAverage

SAMPLE_S: Final = 0.25  # seconds between two calls of `measure`
# Bytes that must wait at both ends of a sample: less may just be on its way through the buffers.
MIN_WAITING_BYTES: Final = 65_536


@dataclass(slots=True)
class UplinkMeter:
    """Measures the rate of an uplink by samples. rate: average in bytes per second, whose value is first None."""

    rate: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    _last: tuple[float, int, int] | None = None

    def measure(self, now: float, given: int, waiting: int) -> None:
        """Takes a sample, the bytes sent per second since the last call; averages it into `rate` if enough waited.

        Enough: at least MIN_WAITING_BYTES at both calls. now: in seconds. given: bytes given to all streams since the
        start. waiting: those of them not sent yet.
        """
        last, self._last = self._last, (now, given - waiting, waiting)
        if last is None or now <= last[0] or min(last[2], waiting) < MIN_WAITING_BYTES:
            return
        self.rate = self.rate.with_sample(max(0, given - waiting - last[1]) / (now - last[0]))
