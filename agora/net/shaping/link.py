"""Computes when a chunk has left a link of a given rate and latency, and when it arrives.

Deterministic: its objects change only by the calls to them; times and the random generator are arguments.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.errors import InputError

EXAMPLES: Final = "write RATE,RTT[,JITTER[,LOSS]], such as 200Mbit,50ms or 20Mbit,100ms,10ms,0.1%"
STREAM_TURN_S: Final = 0.016  # seconds of each stream's turn
MIN_CHUNK: Final = 1_500  # bytes that a stream sends at its turn, at least
MAX_CHUNK: Final = 65_536  # bytes that a stream sends at its turn, at most
PACKET_BYTES: Final = 1_460  # bytes that TCP puts into one packet, each of which may be lost
SLOWEST: Final = 1_000  # the least rate of a link, in bytes per second
MAX_DELAY_S: Final = 10.0  # the longest round trip or jitter of a link, in seconds
MAX_LOSS: Final = 0.5  # the largest fraction of packets that a link may lose

# What a number in each unit is multiplied by, to give bytes per second, seconds, or a fraction.
_UNITS: Final = {"": 0.125, "k": 125.0, "m": 125e3, "g": 125e6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01}
_NUMBER: Final = r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)"
# What the parts of a link are, in order: name, example, pattern.
_PARTS: Final = (
    ("rate", "20Mbit", re.compile(_NUMBER + "(?P<unit>[kmg]?)bit(?:/s)?")),
    ("RTT", "50ms", re.compile(_NUMBER + "(?P<unit>us|ms|s)")),
    ("jitter", "50ms", re.compile(_NUMBER + "(?P<unit>us|ms|s)")),
    ("loss", "0.1%", re.compile(_NUMBER + "(?P<unit>%)")),
)


class LinkError(InputError):
    """Raised by `LinkSpec.parse` and `at_rate` for malformed text or extreme values; the text names what to write."""

    code = "bad-link"


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One peer's access link: `rate` bytes per second each way, with a delay (`rtt_s`), jitter and loss of packets.

    A round trip between peers a and b takes (rtt_a + rtt_b) / 2, plus up to (jitter_a + jitter_b) / 2. loss:
    fraction of packets, 0 to MAX_LOSS. text: what `parse` read, "" for a link that was made otherwise.
    """

    rate: float
    rtt_s: float
    jitter_s: float = 0.0
    loss: float = 0.0  # fraction of packets that have to be sent again
    text: str = field(default="", kw_only=True)  # what `parse` read; "" for a link made otherwise

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """Parses RATE,RTT[,JITTER[,LOSS]], such as "200Mbit,50ms" or "20Mbit,100ms,10ms,0.1%".

        Raises LinkError for any other text, a rate below SLOWEST, a delay above MAX_DELAY_S, or a loss above MAX_LOSS.
        """
        parts = [part.strip() for part in text.split(",")]
        if not 2 <= len(parts) <= 4:
            raise LinkError(f"{text!r} is not a link; {EXAMPLES}")
        values = []
        for part, (name, example, pattern) in zip(parts, _PARTS, strict=False):
            match = pattern.fullmatch(part.lower())
            if match is None:
                raise LinkError(f"{part.lower()!r} is not a valid {name} like {example}; {EXAMPLES}")
            values.append(float(match["number"]) * _UNITS[match["unit"]])
        spec = cls(*values, text=",".join(parts))
        if spec.rate < SLOWEST:
            raise LinkError(f"A rate of {parts[0]} is too slow to train over; write 8kbit or more.")
        if max(spec.rtt_s, spec.jitter_s) > MAX_DELAY_S:
            raise LinkError(f"{text!r} has a delay above {MAX_DELAY_S:.0f}s, where every call times out; write less.")
        if spec.loss > MAX_LOSS:
            raise LinkError(f"A loss of {parts[3]} is more than TCP survives; write at most {MAX_LOSS:.0%}.")
        return spec

    def at_rate(self, text: str) -> LinkSpec:
        """Returns the same link at the rate that `text` names, such as "20Mbit".

        Raises LinkError for malformed text, a rate below SLOWEST, and for a link that `parse` did not make.
        """
        return LinkSpec.parse(",".join([text.replace(",", " "), *self.text.split(",")[1:]]))

    @property
    def chunk_bytes(self) -> int:
        return max(MIN_CHUNK, min(MAX_CHUNK, int(self.rate * STREAM_TURN_S)))


class DelayLine:
    """Computes when chunks of one stream arrive: after half the RTT, random jitter and retransmissions, in order."""

    def __init__(self, spec: LinkSpec, rng: random.Random) -> None:
        self._spec = spec
        self._rng = rng
        self._arrived = -math.inf

    def arrival(self, size: int, departs: float) -> float:
        """Returns when a chunk of `size` bytes arrives whose last byte departs at `departs`, never before earlier ones.

        That is half a round trip later, plus random jitter, plus a round trip for each time that a packet is lost.
        """
        spec = self._spec
        rng = self._rng
        extra = rng.random() * spec.jitter_s / 2 if spec.jitter_s else 0.0
        if spec.loss:
            lost = 1.0 - (1.0 - spec.loss) ** math.ceil(size / PACKET_BYTES)
            while rng.random() < lost:
                extra += spec.rtt_s  # to send it again; what is behind it waits, as with TCP
                lost = spec.loss
        self._arrived = max(self._arrived, departs + spec.rtt_s / 2 + extra)
        return self._arrived
