"""What this peer lets other peers cost it, and how patient it is with them.

Knows: numbers. Must not know: who keeps to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agora_protocol import limits
from agora_protocol.frames import FrameLimits


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Bounds of one peer's network, in bytes, counts and seconds."""

    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES  # of one frame, as the run's manifest implies
    max_held_bytes: int = 2 * limits.MAX_PAYLOAD_BYTES  # of all payloads that have come, or begun to, and are in use
    max_calls: int = limits.MAX_CALLS_PER_CONNECTION  # open at once on one connection, each way
    max_connections: int = 512
    patience_s: float = 0.25  # how long a request may wait for payload bytes before it is refused Busy
    dial_s: float = 10.0
    hello_s: float = limits.HANDSHAKE_TIMEOUT_S
    silence_s: float = limits.PING_AFTER_SILENCE_S  # of a peer that owes an answer, before it is pinged
    answer_s: float = limits.PING_ANSWER_S  # for the peer to answer that ping

    def frames(self) -> FrameLimits:
        """Returns the limits that a frame's prefix is checked against: payloads of at most `max_payload_bytes`."""
        return FrameLimits(max_payload_bytes=self.max_payload_bytes)
