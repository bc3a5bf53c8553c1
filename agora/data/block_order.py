"""Decides in which order an origin comes to the blocks of an epoch, and which of two origins has a block before. Pure.

Knows: the hash of (seed, epoch, block, origin). Must not know: what is taken or done. This is rendezvous hashing
(Thaler and Ravishankar, IEEE/ACM Trans. Networking 1998): origins that agree on who is live agree on whose a block is.
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
    """The blocks of an epoch in one origin's order: by the number of live origins with a lower hash, then by its own.

    own: those of them, in order, for which no live origin has a lower hash. hashes: this origin's, by block.
    """

    blocks: list[int]
    own: dict[int, None]
    hashes: list[int]


class BlockOrder:
    """One origin's order of the blocks of every epoch."""

    def __init__(self, seed: int, me: str, blocks: int) -> None:
        self._seed = seed
        self._me = me
        self._blocks = blocks
        self._kept: dict[tuple[int, frozenset[str]], EpochOrder] = {}

    def order(self, epoch: int, live: frozenset[str]) -> EpochOrder:
        """Returns this origin's order of an epoch's blocks while these origins are live."""
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
        """Returns the hash of each block [blocks] for one origin: uniform, and the same on every machine."""
        digest = hashlib.sha256(f"agora epoch share 1\0{self._seed}\0{epoch}\0{name}".encode()).digest()
        return mix(np.arange(self._blocks, dtype=np.uint64), int.from_bytes(digest[:8], "little"))

    def comes_after(self, name: str, epoch: int, block: int) -> bool:
        """Returns whether another origin has a lower hash for a block than this one."""
        other, mine = int(self.hashes(epoch, name)[block]), int(self.hashes(epoch, self._me)[block])
        return (other, name) < (mine, self._me)
