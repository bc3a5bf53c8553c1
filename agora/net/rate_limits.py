"""The owner's limits on this machine's line, and how much of them is left for streams. Pure.

Knows: rates, byte counts. Must not know: clocks, sockets, streams.

All traffic of a daemon leaves through p2pd: streams (microbatches, averaging, state, relayed circuits), which the
daemon can slow down, and the DHT, dials and protocol overhead, which it cannot. So what p2pd's sockets carry is
counted, and streams get what the rest leaves.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import InputError

MIN_RATE: Final = 10_000.0
"""The lowest limit, in bytes per second: under it the directory alone would not get through."""
MIN_SHARE: Final = 0.1
"""The part of a limit that streams get at least, whatever else is sent."""
UNCOUNTED_SHARE: Final = 0.9
"""The part of a limit that streams get where sockets' bytes cannot be counted."""
MEMORY_S: Final = 4.0
"""Seconds over which what else is sent is averaged."""
DEBT_S: Final = 4.0
"""Seconds in which bytes sent above the limit are made up for."""
MAX_DEBT_S: Final = 1.0
"""Bytes sent above the limit are remembered up to what the limit allows in this many seconds."""
_RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kMG]?)(bit|B)(?:/s|ps)?")
_FACTORS: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def parse_rate(text: str) -> float:
    """Returns a rate such as "1MB/s", "500kB" or "8Mbit" in bytes per second; "" is no limit, infinity.

    Raises InputError for other text, and for less than MIN_RATE.
    """
    if not text.strip():
        return math.inf
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a rate; write 1MB/s, 500kB/s or 8Mbit/s")
    rate = float(match[1]) * _FACTORS[match[2]] * (0.125 if match[3] == "bit" else 1.0)
    if rate < MIN_RATE:
        raise InputError(f"{text} is too slow to train over; write {MIN_RATE / 1e3:.0f}kB/s or more")
    return rate


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What the owner allows the daemon to send and to receive, in bytes per second; infinity is no limit."""

    up: float = math.inf
    down: float = math.inf

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return min(self.up, self.down) < math.inf


UNLIMITED: Final = RateLimits()


class StreamBrake:
    """Computes how fast streams may go in one direction, so that all traffic together keeps to the limit.

    rate: for streams, in bytes per second.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last: tuple[float, int, int] | None = None
        self._other = 0.0
        self._debt = 0.0
        self.rate = limit

    def update(self, now: float, carried: int | None, streamed: int) -> float:
        """Takes what all sockets have carried (None: cannot be counted), and what streams have, which is part of it.

        now: seconds. Both counts are totals in bytes since the start. Returns the new `rate`.
        """
        if self._limit == math.inf:
            return self.rate
        if carried is None:
            self._last, self.rate = None, UNCOUNTED_SHARE * self._limit
            return self.rate
        last, self._last = self._last, (now, carried, streamed)
        if last is None or now <= last[0]:
            return self.rate
        seconds, all_bytes = now - last[0], carried - last[1]
        other = max(0.0, (all_bytes - (streamed - last[2])) / seconds)
        self._other += (other - self._other) * min(1.0, seconds / MEMORY_S)
        most = MAX_DEBT_S * self._limit
        self._debt = max(0.0, min(most, self._debt + all_bytes - self._limit * seconds))
        self.rate = max(MIN_SHARE * self._limit, self._limit - self._other - self._debt / DEBT_S)
        return self.rate
