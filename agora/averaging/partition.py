"""Computes which weights a round averages, in which parts, and which peer averages each part. Pure.

Knows: numbers of blocks, peers by id and bandwidth. Must not know: weights, calls, time. All peers compute the same,
so that nothing of it is sent: SPEC.md, section 12.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from typing import Final

import numpy as np
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK
from numpy.typing import NDArray

OWNED_ROUNDS: Final = 16
"""Rounds of gradients, or of one slice, for which a part keeps its owner: it feeds back what its answers lose."""


SLICES_AT_ONCE: Final = 4
"""Rounds of slices that a replica may have begun and not ended."""


class Slices:
    """Says which blocks of SLICE_BLOCK elements, of a vector of `numel`, round `number` averages: slice number % count.

    Block i is in slice ((a i + b) mod blocks) mod count. `count` rounds average each element once; slices beyond the
    number of blocks are empty. a and b come from the run's seed, in whole numbers alone, so that every version of every
    library computes the same.
    """

    def __init__(self, numel: int, fraction: float, seed: int) -> None:
        if numel <= 0 or numel % SLICE_BLOCK:
            raise ValueError(f"{numel} elements are no multiple of {SLICE_BLOCK}")
        self._blocks = numel // SLICE_BLOCK
        self.count = slice_count(fraction)
        digest = hashlib.sha256(f"agora slices 1\0{seed}\0{numel}".encode()).digest()
        self._factor = int.from_bytes(digest[:8], "big") % self._blocks
        while math.gcd(self._factor, self._blocks) != 1:
            self._factor = (self._factor + 1) % self._blocks
        self._offset = int.from_bytes(digest[8:16], "big") % self._blocks

    def blocks(self, number: int) -> NDArray[np.int64]:
        """Returns the numbers of the blocks that round `number` averages, rising; int64 [n]."""
        inverse = pow(self._factor, -1, self._blocks) if self._blocks > 1 else 0
        places = range(number % self.count, self._blocks, self.count)
        return np.array(sorted(inverse * (place - self._offset) % self._blocks for place in places), np.int64)

    def numel_of(self, number: int) -> int:
        """Returns the number of elements that round `number` averages."""
        return SLICE_BLOCK * len(range(number % self.count, self._blocks, self.count))


def slice_count(fraction: float) -> int:
    """Returns the number of slices that have this fraction of the weights each: ceil(1 / fraction)."""
    return math.ceil(round(1.0 / fraction, 9))


def cut_into_parts(numel: int) -> list[slice]:
    """Returns the parts of a vector of `numel` elements as slices of PART_ELEMENTS each; the last has what is left."""
    return [slice(start, min(start + PART_ELEMENTS, numel)) for start in range(0, numel, PART_ELEMENTS)]


def ownership_turn(what: str, number: int, slices: int) -> str:
    """Returns a text that names the turn of owners which round `number` belongs to, the same for OWNED_ROUNDS rounds.

    Of gradients it is number // 16; of slices, each of which has its own owners, "slice.turn".
    """
    if what == "gradient":
        return str(number // OWNED_ROUNDS)
    return f"{number % slices}.{number // slices // OWNED_ROUNDS}"


Members = Mapping[PeerId, float | None]
"""The members of a round with their bandwidths in bytes per second, 0 when unknown; None of those that own no part."""


def choose_owners(
    run: RunId, stage: int, what: str, turn: str, part: int, members: Members
) -> tuple[PeerId, PeerId | None]:
    """Returns the first and the second owner of a part in a turn (`ownership_turn`), by a rendezvous hash.

    An unknown bandwidth counts as the median of the known ones. Where no member may own parts, all may. The member with
    the least -ln(u) / bandwidth comes first, u in (0, 1) being the hash of (run, stage, what, turn, part, peer): a peer
    wins parts in proportion to its bandwidth. The second owner is None where one member alone may own parts.
    """
    able = {peer: bandwidth for peer, bandwidth in members.items() if bandwidth is not None}
    able = able or dict.fromkeys(members, 0.0)
    known = [bandwidth for bandwidth in able.values() if bandwidth > 0]
    usual = statistics.median(known) if known else 1.0
    label = f"agora owner 1\0{run}\0{stage}\0{what}\0{turn}\0{part}\0"

    def place(peer: PeerId) -> tuple[float, PeerId]:
        """Returns the key by which owners are sorted: -ln(u) / bandwidth, then the id."""
        whole = int.from_bytes(hashlib.sha256((label + peer).encode()).digest()[:8], "big")
        return -math.log((whole + 0.5) / 2.0**64) / (able[peer] or usual), peer

    order = sorted(able, key=place)
    return order[0], order[1] if len(order) > 1 else None
