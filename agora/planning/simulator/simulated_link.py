"""A simulated machine's access link, with the rates and delays of net/shaping/link.py."""

from __future__ import annotations

import random

from agora.net.shaping.link import DelayLine, LinkSpec, TokenBucket


class SimulatedLink:
    """One machine's link: a queue in each direction at the link's rate, then latency, jitter and retransmissions.

    Each queue is first come, first served. sent_bytes, received_bytes: of all messages since the start.
    """

    __slots__ = ("_down", "_up", "received_bytes", "sent_bytes", "spec")

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._up, self._down = TokenBucket(spec.rate), TokenBucket(spec.rate)
        self.sent_bytes = 0.0
        self.received_bytes = 0.0

    def send(self, to: SimulatedLink, size: float, now: float, rng: random.Random) -> float:
        """Sends a message of `size` bytes at `now`; returns when its last byte arrives, in simulated seconds.

        Reserves this link's upload and the download of `to`; the two transfers overlap, so that the slower one decides.
        Jitter and loss are drawn from `rng`. Adds the size to this link's sent_bytes and to the received_bytes of `to`.
        """
        whole_bytes = int(size)
        self.sent_bytes += size
        to.received_bytes += size
        sent_at = self._up.take(whole_bytes, now)
        taken_at = to._down.take(whole_bytes, max(now, sent_at - size / self.spec.rate))
        return DelayLine(self.spec, rng).arrival(whole_bytes, max(sent_at, taken_at))

    def outward_delay_s(self) -> float:
        """Returns the seconds that a message without bytes takes to any machine: half of this link's round trip.

        The answer takes half of the other link's round trip, so that both together are `round_trip_to`.
        """
        return self.spec.rtt_s / 2.0

    def round_trip_to(self, to: SimulatedLink) -> float:
        """Returns the seconds of a round trip on idle links: (rtt_a + rtt_b) / 2, see docs/use/links.md."""
        return (self.spec.rtt_s + to.spec.rtt_s) / 2.0
