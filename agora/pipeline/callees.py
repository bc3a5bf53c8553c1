"""Decides which peers of a stage one caller calls, where there are more than it needs. Pure.

A caller of hundreds of peers gets an answer of each only every few minutes, and knows nothing of their queues. With
MAX_CALLEES it learns each queue's length about as often as that queue is served.
docs/understand/routing.md has the figures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from functools import lru_cache
from statistics import median_low

from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView

MAX_CALLEES = 8  # number of peers of one stage that a caller calls; peers whose last call failed come in addition
MAX_TIMES_MEDIAN = 16.0  # A peer's claimed capacity counts as at most this many times the median
# A capacity counts as at least this many times the median: a slow peer has few callers, but hardly ever none.
MIN_TIMES_MEDIAN = 0.5


def choose_callees(
    live: Mapping[PeerId, PeerView], rendezvous_keys: Mapping[PeerId, float], failing: Collection[PeerId]
) -> set[PeerId]:
    """Returns the ids of those peers of a stage that one caller calls: all of `live` if they are at most MAX_CALLEES.

    Otherwise takes peers by weighted rendezvous hashing, lowest rendezvous key / capacity weight first, until it has
    MAX_CALLEES that do not fail. Failing peers that it meets on the way are returned too, so that they are tried again.
    So the callers of a stage are spread over its peers by capacity, and when a peer leaves, only that one is replaced.
    rendezvous_keys: for each live peer, its rendezvous_key for this caller. failing: peers whose last call failed.
    """
    if len(live) <= MAX_CALLEES:
        return set(live)
    median_capacity = median_low([view.capacity for view in live.values() if view.capacity > 0] or [1.0])
    weights = {peer: _capacity_weight(view.capacity, median_capacity) for peer, view in live.items()}
    ranked = sorted([(rendezvous_keys[peer] / weight, peer) for peer, weight in weights.items()])
    chosen = set()
    healthy = 0
    for _, peer in ranked:
        chosen.add(peer)
        healthy += peer not in failing
        if healthy == MAX_CALLEES:
            break
    return chosen


@lru_cache(maxsize=4096)
def _capacity_weight(capacity: float, median_capacity: float) -> float:
    if capacity <= 0.0:
        return 1.0
    ratio = min(max(capacity / median_capacity, MIN_TIMES_MEDIAN), MAX_TIMES_MEDIAN)
    return 2.0 ** round(math.log2(ratio))


def rendezvous_key(me: PeerId, peer: PeerId) -> float:
    """Returns the key of `peer` for the caller `me`: their hash, mapped to an exponential variate of mean 1.

    The same caller and peer always have the same key. The key divided by the peer's weight is the sort key of weighted
    rendezvous hashing, lowest first.
    """
    digest = hashlib.blake2b(f"agora callee 1\0{me}\0{peer}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / 2**64)
