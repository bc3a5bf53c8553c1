"""Computes what a link of a given rate and latency does to bytes: when a chunk has left, and when it arrives. Pure.

Knows: rates and delays; the time and the source of random numbers are arguments. Must not know: clocks, sockets,
streams; `shaping` applies this to them. docs/links.md is the definition in words.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import InputError

EXAMPLES: Final = "write RATE,RTT[,JITTER[,LOSS]], such as 200Mbit,50ms or 20Mbit,100ms,10ms,0.1%"
CHUNK_S: Final = 0.016  # streams take turns this often
LEAST_CHUNK: Final = 1_500
MOST_CHUNK: Final = 65_536
PACKET_BYTES: Final = 1_460  # what TCP puts into one packet, each of which may be lost
SLOWEST: Final = 1_000  # bytes per second
LONGEST_S: Final = 10.0
MOST_LOSS: Final = 0.5

# to bytes per second, seconds, or a fraction
_UNITS: Final = {"": 0.125, "k": 125.0, "m": 125e3, "g": 125e6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01}
_RATE: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<unit>[kmg]?)bit(?:/s)?")
_TIME: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<unit>us|ms|s)")
_LOSS: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<unit>%)")


class LinkError(InputError):
    """Error of `LinkSpec.parse`: the text is malformed or has extreme values; the message says what to write."""

    code = "bad-link"


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One peer's access link: `rate` bytes per second each way, and its share of a round trip.

    A round trip between peers a and b takes (rtt_a + rtt_b) / 2, and up to (jitter_a + jitter_b) / 2 longer. `loss` is
    the share of packets that have to be sent again.
    """

    rate: float
    rtt_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """Reads RATE,RTT[,JITTER[,LOSS]], such as "200Mbit,50ms". Raises LinkError for other text or extreme values."""
        parts = [part.strip() for part in text.split(",")]
        if not 2 <= len(parts) <= 4:
            raise LinkError(f"{text!r} is no link; {EXAMPLES}")
        rate = _number(_RATE, parts[0].lower(), "rate", "20Mbit")
        rtt_s = _number(_TIME, parts[1].lower(), "RTT", "50ms")
        jitter_s = _number(_TIME, parts[2].lower(), "jitter", "50ms") if len(parts) > 2 else 0.0
        loss = _number(_LOSS, parts[3], "loss", "0.1%") if len(parts) > 3 else 0.0
        if rate < SLOWEST:
            raise LinkError(f"a rate of {parts[0]} is too slow to train over; write 8kbit or more")
        if max(rtt_s, jitter_s) > LONGEST_S:
            raise LinkError(f"{text!r} has a delay above {LONGEST_S:.0f}s, where every call times out; write less")
        if loss > MOST_LOSS:
            raise LinkError(f"a loss of {parts[3]} is more than TCP survives; write at most {MOST_LOSS:.0%}")
        return cls(rate, rtt_s, jitter_s, loss, ",".join(parts))

    def __str__(self) -> str:
        """The description as `parse` read it; without one, rate in Mbit and RTT in ms."""
        return self.text or f"{self.rate * 8 / 1e6:g}Mbit,{self.rtt_s * 1e3:g}ms"

    @property
    def chunk_bytes(self) -> int:
        """How many bytes one stream sends at its turn: rate * CHUNK_S, within LEAST_CHUNK and MOST_CHUNK."""
        return max(LEAST_CHUNK, min(MOST_CHUNK, int(self.rate * CHUNK_S)))


def _number(pattern: re.Pattern[str], part: str, what: str, example: str) -> float:
    """Reads a number and its unit: a rate to bytes per second, a time to seconds, a percentage to a fraction.

    what, example: what the LinkError names when `part` does not match `pattern`.
    """
    match = pattern.fullmatch(part)
    if match is None:
        raise LinkError(f"{part!r} is no {what} like {example}; {EXAMPLES}")
    return float(match["number"]) * _UNITS[match["unit"]]


class TokenBucket:
    """Computes when bytes have passed one direction of a link, which all streams share, at `rate` bytes per second.

    depth_s: how many seconds of unused rate may be used later, at once.
    """

    def __init__(self, rate: float, depth_s: float = 0.0) -> None:
        self._rate, self._depth_s = rate, depth_s
        self._free_at = -math.inf

    def take(self, size: int, ready: float) -> float:
        """Books `size` bytes behind all booked before, and returns the time at which the last of them has passed.

        ready: when they came, which may lie in the past.
        """
        self._free_at = max(self._free_at, ready - self._depth_s) + size / self._rate
        return self._free_at


class DelayLine:
    """Computes when chunks of one stream arrive: after half the RTT, random jitter and retransmissions, in order."""

    def __init__(self, spec: LinkSpec, rng: random.Random) -> None:
        self._spec, self._rng = spec, rng
        self._arrived = -math.inf

    def arrival(self, size: int, departs: float) -> float:
        """Returns when a chunk of `size` bytes arrives whose last byte departs at `departs`.

        A lost packet costs another RTT each time it is lost, and everything behind it waits, as with TCP.
        """
        spec, rng = self._spec, self._rng
        extra = rng.random() * spec.jitter_s / 2 if spec.jitter_s else 0.0
        if spec.loss:
            lost = 1.0 - (1.0 - spec.loss) ** math.ceil(size / PACKET_BYTES)
            while rng.random() < lost:
                extra += spec.rtt_s
                lost = spec.loss
        self._arrived = max(self._arrived, departs + spec.rtt_s / 2 + extra)
        return self._arrived
