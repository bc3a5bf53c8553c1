"""Which weights a round averages, and which replica reduces which shard.

Pure: all peers compute the same, so none of it is sent (protocol/SPEC.md, section 12).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import SLICE_BLOCK
from numpy.typing import NDArray

from agora.replica.shard_codec import Shard
from agora.replica.trust import believed_bandwidths

# Number of successive rounds, of gradients or of one fragment, in which a shard has the same reducer: a reducer keeps
# the residual of its means for the next round.
ROUNDS_PER_REDUCER: Final = 16
# What a replica's bandwidth is multiplied by if others reach it only through a relay.
RELAYED_BANDWIDTH_FACTOR: Final = 0.25


class FragmentDivision:
    """The division of a vector into `count` fragments of whole blocks; sync number r averages fragment r mod `count`.

    Block i, of SLICE_BLOCK elements, is in fragment ((a i + b) mod blocks) mod count. The last fragments may be empty.
    """

    def __init__(self, numel: int, count: int, seed: int) -> None:
        """seed: the run's, of which a and b are hashes: every version of every library computes the same."""
        if numel <= 0 or numel % SLICE_BLOCK:
            raise ValueError(f"{numel} elements are not a multiple of {SLICE_BLOCK}")
        self._blocks = numel // SLICE_BLOCK
        self.count = count
        digest = hashlib.sha256(f"agora slices 1\0{seed}\0{numel}".encode()).digest()
        self._factor = int.from_bytes(digest[:8], "big") % self._blocks
        while math.gcd(self._factor, self._blocks) != 1:
            self._factor = (self._factor + 1) % self._blocks
        self._offset = int.from_bytes(digest[8:16], "big") % self._blocks

    def blocks(self, number: int) -> NDArray[np.int64]:
        """Returns the indices of the blocks that sync `number` averages: int64 [n], ascending, maybe empty."""
        inverse = pow(self._factor, -1, self._blocks) if self._blocks > 1 else 0
        positions = range(number % self.count, self._blocks, self.count)
        return np.array(sorted(inverse * (at - self._offset) % self._blocks for at in positions), np.int64)

    def numel_of(self, number: int) -> int:
        return SLICE_BLOCK * len(range(number % self.count, self._blocks, self.count))


# The members of a round by id, with bandwidths in bytes per second: 0 if unknown, None if the member reduces no shard.
Members = Mapping[PeerId, float | None]


def reducing_bandwidths(
    claimed: Mapping[PeerId, tuple[float, str]], networks: Mapping[PeerId, str] = MappingProxyType({})
) -> dict[PeerId, float]:
    """Returns the bandwidths by which reducers are to be chosen, in bytes per second, by id; see believed_bandwidths.

    claimed: by id, bandwidth and reachability as the replica claims them; 0 is unknown and counts as the median.
    """
    believed = believed_bandwidths({peer: bandwidth for peer, (bandwidth, _) in claimed.items()}, networks)
    known = [bandwidth for bandwidth in believed.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    return {
        peer: (believed[peer] or median)
        * (RELAYED_BANDWIDTH_FACTOR if reachability in ("relayed", "unreachable") else 1.0)
        for peer, (_, reachability) in claimed.items()
    }


def reducing_epoch(number: int, fragments: int) -> str:
    """Returns the label of the ROUNDS_PER_REDUCER rounds, of gradients or one fragment, in which reducers stay."""
    if not fragments:
        return str(number // ROUNDS_PER_REDUCER)
    return f"{number % fragments}.{number // fragments // ROUNDS_PER_REDUCER}"


def reducers_of(run: RunId, shard: Shard, members: Members) -> tuple[PeerId, PeerId | None]:
    """Returns the first and the second reducer of a shard, by a weighted rendezvous hash.

    They have the least -ln(u) / bandwidth, so that a peer reduces shards in proportion to its bandwidth; u in (0, 1) is
    a hash. If no member may reduce shards, all may; if only one may, there is no second one.
    """
    eligible = {peer: bandwidth for peer, bandwidth in members.items() if bandwidth is not None}
    eligible = eligible or dict.fromkeys(members, 0.0)
    known = [bandwidth for bandwidth in eligible.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    epoch = reducing_epoch(shard.round, shard.fragments)
    label = f"agora owner 1\0{run}\0{shard.stage}\0{shard.wire_kind}\0{epoch}\0{shard.position}\0"

    def rendezvous_key(peer: PeerId) -> tuple[float, PeerId]:
        hashed = int.from_bytes(hashlib.sha256((label + peer).encode()).digest()[:8], "big")
        return -math.log((hashed + 0.5) / 2.0**64) / (eligible[peer] or median), peer

    order = sorted(eligible, key=rendezvous_key)
    return order[0], order[1] if len(order) > 1 else None
