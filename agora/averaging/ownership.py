"""Who averages a part of a round, and who does when that one fails: weighted rendezvous hashing. Pure.

Knows peers by id and bandwidth. Must not know calls, weights or time. Whoever sees the same members computes the same
owners; a member more or less changes the owner only of the parts that it wins or won.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping

from agora_protocol.ids import PeerId, RunId


def owners(
    run: RunId, stage: int, what: str, number: int, part: int, members: Mapping[PeerId, float]
) -> tuple[PeerId, PeerId | None]:
    """The first and the second owner (None where there is one member) of a part of round `number`.

    members: each peer's bandwidth in bytes per second; 0 is unknown and counts as the median of the known. A peer wins
    parts in proportion to it. Of the members the one with the least -ln(u) / bandwidth comes first, u in (0, 1) being
    the hash of (run, stage, what, number, part, peer). Raises ValueError without members.
    """
    if not members:
        raise ValueError("a part has no owner without members")
    known = [bandwidth for bandwidth in members.values() if bandwidth > 0]
    usual = statistics.median(known) if known else 1.0
    label = f"agora owner 1\0{run}\0{stage}\0{what}\0{number}\0{part}\0"
    order = sorted(members, key=lambda peer: (_height(label + peer) / (members[peer] or usual), peer))
    return order[0], order[1] if len(order) > 1 else None


def _height(text: str) -> float:
    """-ln(u) for the u in (0, 1) that the text hashes to: exponentially distributed."""
    whole = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return -math.log((whole + 0.5) / 2.0**64)
