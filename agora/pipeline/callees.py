"""Decides which peers of a stage one caller calls, where there are more than it needs. Pure.

Knows: ids, claimed capacities. Must not know: how one of them is chosen for a microbatch (peer_choice.py), clocks.

A caller of hundreds of peers hears from each of them every few minutes, and knows nothing of their queues. With
MAX_CALLEES it hears of each queue about as often as that queue is served. docs/routing.md has the figures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from statistics import median_low

from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView

MAX_CALLEES = 8
"""Peers of one stage that a caller calls, besides those that fail."""
MAX_TIMES_MEDIAN = 16.0
"""A peer's claimed capacity counts as at most this many times the median."""
MIN_TIMES_MEDIAN = 0.5
"""It counts as at least this: a slow peer has fewer callers than others, but hardly ever none."""


def choose_callees(
    live: Mapping[PeerId, PeerView], places: Mapping[PeerId, float], failing: Collection[PeerId]
) -> set[PeerId]:
    """Returns the ids of those of `live` that are called: MAX_CALLEES that do not fail, or all if there are fewer.

    They are the first in a weighted rendezvous order: each peer's place is drawn by a hash, and peers of twice the
    capacity come first twice as often. So the callers of a stage are spread over its peers by capacity, and one that
    goes is replaced without changing the others. Failing peers that come before the last one are kept, so that they
    are tried again. places: of each live peer, as place_of returns it. failing: ids of those whose last call failed.
    """
    if len(live) <= MAX_CALLEES:
        return set(live)
    usual = median_low([view.capacity for view in live.values() if view.capacity > 0] or [1.0])
    ranked = sorted([(places[peer] / _capacity_weight(view.capacity, usual), peer) for peer, view in live.items()])
    chosen, healthy = set(), 0
    for _, peer in ranked:
        chosen.add(peer)
        healthy += peer not in failing
        if healthy == MAX_CALLEES:
            break
    return chosen


@lru_cache(maxsize=4096)
def _capacity_weight(capacity: float, usual: float) -> float:
    """Returns capacity / usual, clamped to [MIN_TIMES_MEDIAN, MAX_TIMES_MEDIAN] and rounded to a power of two.

    1.0 for an unknown capacity (0 or less). It is rounded so that small changes do not matter.
    """
    if capacity <= 0.0:
        return 1.0
    ratio = min(max(capacity / usual, MIN_TIMES_MEDIAN), MAX_TIMES_MEDIAN)
    return 2.0 ** round(math.log2(ratio))


def place_of(me: PeerId, peer: PeerId) -> float:
    """Returns an exponentially distributed number that a hash of the two ids decides; the least comes first."""
    digest = hashlib.blake2b(f"agora callee 1\0{me}\0{peer}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / 2**64)
