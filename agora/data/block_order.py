"""Decides in which order an origin takes the blocks of an epoch, and which of two origins precedes in a block. Pure.

Knows: the hash of (seed, epoch, block, origin). Must not know: what is taken or done. This is rendezvous hashing
(Thaler and Ravishankar, IEEE/ACM Trans. Networking 1998): origins that agree on who is live agree on the owner of each
block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from agora.data.hashing import Hashes, mix

KEPT_ORDERS: Final = 128


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The blocks of an epoch in one origin's order: by how many live origins have a lower hash, then by its own hash.

    blocks: all block numbers in this order. own: its blocks, in the same order, as keys: no live origin has a lower
    hash for them. hashes: this origin's hash of each block, indexed by block number.
    """

    blocks: list[int]
    own: dict[int, None]
    hashes: list[int]


class BlockOrder:
    """Computes one origin's order of the blocks of every epoch, and keeps up to KEPT_ORDERS results.

    seed: the run's. me: the origin's name. blocks: how many blocks an epoch has.
    """

    def __init__(self, seed: int, me: str, blocks: int) -> None:
        self._seed = seed
        self._me = me
        self._blocks = blocks
        self._kept: dict[tuple[int, frozenset[str]], EpochOrder] = {}

    def order(self, epoch: int, live: frozenset[str]) -> EpochOrder:
        """Returns this origin's order of an epoch's blocks, given the names of the live origins.

        First come the blocks for which its hash is the lowest of all, in the order of its hashes, then those for which
        it is the second lowest, and so on. Keeps the latest KEPT_ORDERS orders.
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

    def comes_after(self, name: str, epoch: int, block: int) -> bool:
        """Returns whether this origin comes after origin `name` in a block: whether the other has the lower hash."""
        other, mine = int(self.hashes(epoch, name)[block]), int(self.hashes(epoch, self._me)[block])
        return (other, name) < (mine, self._me)
