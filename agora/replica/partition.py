"""Computes which weights a round averages, in which parts, and which peer owns each part. Pure.

All peers compute the same
result, so none of it is sent: SPEC.md, section 12.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from typing import Final

import numpy as np
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.parts import part_elements
from numpy.typing import NDArray

# Number of successive rounds, of gradients or of one slice, in which a part has the same owner: an owner keeps the
# residual of its means for the next round.
ROUNDS_PER_OWNER: Final = 16
RELAYED_SHARE: Final = 0.25  # fraction of a replica's bandwidth that counts if others reach it only through a relay
MAX_RUNNING_SLICE_ROUNDS: Final = 4  # maximum number of slice rounds that one replica may be running at the same time


class Slices:
    """The division of a vector into `count` slices of whole blocks; slice round r averages slice r mod `count`.

    A block has SLICE_BLOCK elements. Block i is in slice ((a i + b) mod blocks) mod count. If there are fewer blocks
    than slices, the last slices are empty. a and b are integers from a hash of the run's seed, so that every version of
    every library computes the same.
    """

    def __init__(self, numel: int, count: int, seed: int) -> None:
        """seed: the run's. Raises ValueError if `numel` is not a positive multiple of SLICE_BLOCK."""
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
        """Returns the indices of the blocks that slice round `number` averages: int64 [n], ascending, maybe empty."""
        inverse = pow(self._factor, -1, self._blocks) if self._blocks > 1 else 0
        positions = range(number % self.count, self._blocks, self.count)
        return np.array(sorted(inverse * (at - self._offset) % self._blocks for at in positions), np.int64)

    def numel_of(self, number: int) -> int:
        """Returns the number of elements that slice round `number` averages."""
        return SLICE_BLOCK * len(range(number % self.count, self._blocks, self.count))


def cut_into_parts(numel: int) -> list[slice]:
    """Returns the parts of a vector of `numel` elements as Python slice objects, in order, each of part_elements.

    The last one may be shorter. Returns [] if `numel` is 0.
    """
    size = part_elements(numel)
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def ownership_epoch(number: int, slices: int) -> str:
    """Returns the label of the epoch that round `number` belongs to. Within an epoch a part keeps its owners.

    An epoch is ROUNDS_PER_OWNER rounds of gradients, or of one slice. slices: of the stage, 0 for gradients.

    | round | label |
    |---|---|
    | of gradients | number // ROUNDS_PER_OWNER |
    | of a slice | (number % slices).(number // slices // ROUNDS_PER_OWNER) |
    """
    if not slices:
        return str(number // ROUNDS_PER_OWNER)
    return f"{number % slices}.{number // slices // ROUNDS_PER_OWNER}"


# The members of a round by id, with bandwidths in bytes per second: 0 if unknown, None if the member owns no part.
Members = Mapping[PeerId, float | None]


def owning_bandwidths(claimed: Mapping[PeerId, tuple[float, str]]) -> dict[PeerId, float]:
    """Returns for each replica, by id, the bandwidth by which owners are to be chosen, in bytes per second.

    claimed: by id, (bandwidth, reachability) of the replica's claim; a bandwidth of 0 is unknown and counts as the
    median of the known ones, or as 1.0 if none is known. The bandwidth of a relayed or unreachable replica is
    multiplied by RELAYED_SHARE, so that most parts go to directly reachable ones.
    """
    known = [bandwidth for bandwidth, _ in claimed.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    return {
        peer: (bandwidth or median) * (RELAYED_SHARE if reachability in ("relayed", "unreachable") else 1.0)
        for peer, (bandwidth, reachability) in claimed.items()
    }


def choose_owners(
    run: RunId, stage: int, kind: str, epoch: str, part: int, members: Members
) -> tuple[PeerId, PeerId | None]:
    """Returns the first and the second owner of a part in an epoch (`ownership_epoch`), by a weighted rendezvous hash.

    The member with the least -ln(u) / bandwidth is the first owner, the next one the second; u in (0, 1) is the hash of
    (run, stage, kind, epoch, part, peer). So a peer owns parts in proportion to its bandwidth. An unknown bandwidth
    counts as the median of the known ones. If no member may own parts, all may. The second owner is None if only one
    member may own parts. `members` must not be empty.
    """
    eligible = {peer: bandwidth for peer, bandwidth in members.items() if bandwidth is not None}
    eligible = eligible or dict.fromkeys(members, 0.0)
    known = [bandwidth for bandwidth in eligible.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    label = f"agora owner 1\0{run}\0{stage}\0{kind}\0{epoch}\0{part}\0"

    def rendezvous_key(peer: PeerId) -> tuple[float, PeerId]:
        hashed = int.from_bytes(hashlib.sha256((label + peer).encode()).digest()[:8], "big")
        return -math.log((hashed + 0.5) / 2.0**64) / (eligible[peer] or median), peer

    order = sorted(eligible, key=rendezvous_key)
    return order[0], order[1] if len(order) > 1 else None
