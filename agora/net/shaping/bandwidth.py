"""The bandwidth of this machine's line: the owner's limits, what they leave for streams, the uplink's measured rate.

All traffic of a daemon leaves through p2pd. The daemon can slow down streams (microbatches, averaging, state, relayed
circuits), but not the DHT, dials and protocol overhead. So it counts what p2pd's sockets carry, and gives streams what
the rest leaves. Deterministic: objects change only by the calls to them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.errors import InputError

from agora.core.moving_average import MovingAverage

MIN_RATE: Final = 10_000.0  # the lowest limit, in bytes per second: below it not even the directory's traffic fits
MIN_SHARE: Final = 0.1  # streams get at least this fraction of a limit, whatever else is sent
UNCOUNTED_SHARE: Final = 0.9  # streams get this fraction of a limit where sockets' bytes cannot be counted
AVERAGING_WINDOW_S: Final = 4.0  # seconds over which the traffic beside streams is averaged
REPAYMENT_S: Final = 4.0  # seconds over which an excess over the limit is paid back
MAX_DEBT_S: Final = 1.0  # upper bound of that excess, as seconds of traffic at the limit
_RATE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kMG]?)(bit|B)(?:/s|ps)?")
_FACTORS: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def parse_rate(text: str) -> float:
    """Returns a rate such as "1MB/s", "500kB" or "8Mbit" in bytes per second; for "", no limit, infinity.

    Raises InputError for other text, and for less than MIN_RATE.
    """
    if not text.strip():
        return math.inf
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a rate; write 1MB/s, 500kB/s or 8Mbit/s.")
    rate = float(match[1]) * _FACTORS[match[2]] * (0.125 if match[3] == "bit" else 1.0)
    if rate < MIN_RATE:
        raise InputError(f"{text} is too slow to train over; write {MIN_RATE / 1e3:.0f}kB/s or more.")
    return rate


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What the owner allows the daemon to send and to receive, in bytes per second; infinity means no limit."""

    upload: float = math.inf
    download: float = math.inf

    @property
    def is_limited(self) -> bool:
        return min(self.upload, self.download) < math.inf


UNLIMITED: Final = RateLimits()


class Throttle:
    """Computes how fast streams may go in one direction, so that all traffic together keeps to the limit.

    Streams always get MIN_SHARE of the limit, even if the other traffic leaves them less.

    limit: of all traffic, in bytes per second; infinity for none. rate: bytes per second that are left for streams.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last: tuple[float, int, int] | None = None
        self._other_rate = 0.0
        self._debt = 0.0
        self.rate = limit

    def update(self, now: float, carried: int | None, streamed: int) -> float:
        """Sets `rate` by the bytes carried since the last call, and returns it; both counts are totals since the start.

        now: seconds. carried: by all sockets; None: cannot be counted. streamed: by streams, a part of `carried`. The
        rate is the limit, less the averaged rate of traffic that is not of streams, less the excess over the limit so
        far / REPAYMENT_S; but at least MIN_SHARE of the limit, and UNCOUNTED_SHARE of it where nothing can be counted.
        The first call, and any call without a limit, changes nothing.
        """
        if self._limit == math.inf:
            return self.rate
        if carried is None:
            self._last = None
            self.rate = UNCOUNTED_SHARE * self._limit
            return self.rate
        last, self._last = self._last, (now, carried, streamed)
        if last is None or now <= last[0]:
            return self.rate
        seconds, all_bytes = now - last[0], carried - last[1]
        other_rate = max(0.0, (all_bytes - (streamed - last[2])) / seconds)
        self._other_rate += (other_rate - self._other_rate) * min(1.0, seconds / AVERAGING_WINDOW_S)
        max_debt = MAX_DEBT_S * self._limit
        self._debt = max(0.0, min(max_debt, self._debt + all_bytes - self._limit * seconds))
        self.rate = max(MIN_SHARE * self._limit, self._limit - self._other_rate - self._debt / REPAYMENT_S)
        return self.rate


SAMPLE_INTERVAL_S: Final = 0.25  # seconds between two calls of `measure`
# Bytes that must wait at both ends of a sample: less may just be on its way through the buffers.
MIN_WAITING_BYTES: Final = 65_536


@dataclass(slots=True)
class UplinkMeter:
    """Measures the rate of an uplink by samples. rate: average in bytes per second, whose value is first None."""

    rate: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    _last: tuple[float, int, int] | None = None

    def measure(self, now: float, given: int, waiting: int) -> None:
        """Takes a sample, the bytes sent per second since the last call; averages it into `rate` if enough waited.

        Enough is at least MIN_WAITING_BYTES at both calls. now: in seconds. given: bytes given to all streams since the
        start. waiting: those of them not sent yet.
        """
        last, self._last = self._last, (now, given - waiting, waiting)
        if last is None or now <= last[0] or min(last[2], waiting) < MIN_WAITING_BYTES:
            return
        self.rate = self.rate.with_sample(max(0, given - waiting - last[1]) / (now - last[0]))
