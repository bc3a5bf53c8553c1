"""The shards of a stage's records: under which DHT keys of a stage a peer's records are, by a hash of its id.

A shard of depth b holds the peers whose hash begins with its b bits. The shard of depth 0 holds all of them.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_SHARD_BITS

SHARD_TAG: Final = b"agora shard 1\0"
HASH_BITS: Final = 64
HASHES: Final = 1 << HASH_BITS  # the number of possible hashes; every shard hash is below it


class DirectoryShard(NamedTuple):
    """A part of one stage's peers: those whose hash begins with `bits`, a text of "0" and "1"; "" for all peers."""

    stage: int
    bits: str = ""

    @property
    def depth(self) -> int:
        return len(self.bits)

    @property
    def first_hash(self) -> int:
        return int(self.bits or "0", 2) << (HASH_BITS - self.depth)

    def contains(self, peer_hash: int) -> bool:
        """Returns whether the peer with this hash belongs to the shard."""
        return shard_bits(peer_hash, self.depth) == self.bits


def shard_hash(run: RunId, peer: PeerId) -> int:
    """Returns the hash, below 2^64, that decides in which shards of a run a peer is: 8 bytes of a SHA-256, big-endian.

    It differs from run to run, so that ids that were chosen for small hashes in one run have others in another.
    """
    digest = hashlib.sha256(SHARD_TAG + bytes.fromhex(run) + peer.encode("ascii")).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")


def shard_bits(peer_hash: int, depth: int) -> str:
    """Returns the first `depth` bits of a hash as a text of "0" and "1"; "" for 0."""
    return format(peer_hash >> (HASH_BITS - depth), f"0{depth}b") if depth else ""


def is_shard_bits(text: str) -> bool:
    """Returns whether `text` names a shard below depth 0: 1 to MAX_SHARD_BITS of "0" and "1"."""
    return 0 < len(text) <= MAX_SHARD_BITS and set(text) <= {"0", "1"}
