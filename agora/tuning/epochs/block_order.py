"""Decides in which order an origin takes the blocks of an epoch, and which of two origins precedes in a block.

Deterministic. This is rendezvous hashing (Thaler and Ravishankar, IEEE/ACM Trans. Networking 1998): origins that agree
on which of them are live agree on the owner of each block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from agora.data.hashing import Hashes, mix

KEPT_ORDERS: Final = 128  # maximum number of orders that a BlockOrder caches


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order in which one origin prefers the blocks of an epoch, by rendezvous hashing.

    The first sort key is the number of other live origins whose hash of the block is lower than this origin's, the
    second is this origin's hash. blocks: all block numbers in this order. own: the blocks for which no live origin has
    a lower hash, in the same order, as keys of a dict whose values are None. hashes: this origin's hash of each block,
    indexed by block number.
    """

    blocks: list[int]
    own: dict[int, None]
    hashes: list[int]


class BlockOrder:
    """Computes in which order one origin prefers the blocks of each epoch, and caches up to KEPT_ORDERS results.

    seed: the run's seed. me: the origin's name. blocks: how many blocks an epoch has.
    """

    def __init__(self, seed: int, me: str, blocks: int) -> None:
        self._seed = seed
        self._me = me
        self._blocks = blocks
        self._kept: dict[tuple[int, frozenset[str]], EpochOrder] = {}

    def order(self, epoch: int, live: frozenset[str]) -> EpochOrder:
        """Returns this origin's order of an epoch's blocks.

        First come the blocks for which this origin's hash is the lowest of all live origins' hashes, sorted by this
        origin's hash, then the blocks for which it is the second lowest, and so on. live: the names of the live
        origins; this one always counts as live. Caches the result; a full cache is emptied first.
        """
        key = epoch, live
        if key not in self._kept:
            if len(self._kept) >= KEPT_ORDERS:
                self._kept.clear()
            mine = self.hashes(epoch, self._me)
            ranks = np.zeros(self._blocks, np.int64)
            for name in live - {self._me}:
                ranks += self.hashes(epoch, name) < mine
            blocks = np.lexsort((mine, ranks)).tolist()
            own = dict.fromkeys(block for block in blocks if ranks[block] == 0)
            self._kept[key] = EpochOrder(blocks, own, mine.tolist())
        return self._kept[key]

    def hashes(self, epoch: int, name: str) -> Hashes:
        """Returns origin `name`'s hash of each block of an epoch, uint64 [blocks]: uniform, equal on every machine."""
        digest = hashlib.sha256(f"agora epoch share 1\0{self._seed}\0{epoch}\0{name}".encode()).digest()
        return mix(np.arange(self._blocks, dtype=np.uint64), int.from_bytes(digest[:8], "little"))

    def is_preceded_by(self, name: str, epoch: int, block: int) -> bool:
        """Returns whether origin `name` takes precedence over this origin in a block of an epoch.

        True if the block's hash of `name` is lower than this origin's hash; with equal hashes, if `name` sorts first.
        """
        other, mine = int(self.hashes(epoch, name)[block]), int(self.hashes(epoch, self._me)[block])
        return (other, name) < (mine, self._me)
