"""A simulated machine's access link, with the rates and delays of net/link.py.

Knows: rates, delays, times. Must not know: what is sent, clocks.
"""

from __future__ import annotations

import random

from agora.net.link import DelayLine, LinkSpec, TokenBucket


class SimulatedLink:
    """What one machine sends and receives: each direction at the link's rate, first come first served."""

    __slots__ = ("_down", "_up", "received_bytes", "sent_bytes", "spec")

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._up, self._down = TokenBucket(spec.rate), TokenBucket(spec.rate)
        self.sent_bytes = self.received_bytes = 0.0

    def send(self, to: SimulatedLink, size: float, now: float, rng: random.Random) -> float:
        """Reserves both links for a message of `size` bytes; returns the time at which its last byte arrives.

        Upload and download overlap, so the slower one decides.
        """
        bytes_whole = int(size)
        self.sent_bytes += size
        to.received_bytes += size
        sent_at = self._up.take(bytes_whole, now)
        taken_at = to._down.take(bytes_whole, max(now, sent_at - size / self.spec.rate))
        return DelayLine(self.spec, rng).arrival(bytes_whole, max(sent_at, taken_at))

    def delay_to(self, to: SimulatedLink) -> float:
        """Returns the seconds that a message without bytes takes on an idle link: half of this link's round trip."""
        return self.spec.rtt_s / 2.0

    def round_trip_to(self, to: SimulatedLink) -> float:
        """Returns the round trip to another machine on idle links: (rtt_a + rtt_b) / 2, see docs/links.md."""
        return (self.spec.rtt_s + to.spec.rtt_s) / 2.0
