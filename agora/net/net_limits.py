"""What this peer lets other peers cost it, and how patient it is with them.

Knows: numbers. Must not know: who keeps to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agora_protocol.frames import FrameLimits
from agora_protocol.limits import (
    HANDSHAKE_TIMEOUT_S,
    MAX_CALLS_PER_CONNECTION,
    MAX_PAYLOAD_BYTES,
    PING_AFTER_SILENCE_S,
    PING_ANSWER_S,
)


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Bounds of one peer's network, in bytes, counts and seconds."""

    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    """Of one frame, as the run's manifest implies."""
    max_held_bytes: int = 2 * MAX_PAYLOAD_BYTES
    """Payloads of all connections together that have arrived, or are about to, and are not released yet."""
    max_calls: int = MAX_CALLS_PER_CONNECTION
    """Open at once on one connection, each way."""
    max_connections: int = 512
    patience_s: float = 0.25
    """How long a request may wait for payload bytes to be released before it is refused Busy."""
    dial_s: float = 10.0
    hello_s: float = HANDSHAKE_TIMEOUT_S
    silence_s: float = PING_AFTER_SILENCE_S
    """Without a byte from a peer that owes an answer, before it is pinged."""
    answer_s: float = PING_ANSWER_S
    """For the peer to answer that ping."""

    def frames(self) -> FrameLimits:
        """Returns what the prefix of a frame may announce."""
        return FrameLimits(max_payload_bytes=self.max_payload_bytes)
