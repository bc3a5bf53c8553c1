"""The shards of a stage's records: which part of the DHT keys of a stage a peer belongs to, by a hash of its id.

Knows: the hash, shards and their key texts' parts. Must not know: records, the DHT, how many shards there should be.

A shard of depth b holds the peers whose hash begins with its b bits. The shard of depth 0 holds all of them.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_SHARD_BITS

SHARD_TAG: Final = b"agora shard 1\0"
HASH_BITS: Final = 64
HASHES: Final = 1 << HASH_BITS
"""How many hashes there are: a shard hash is below it."""


class Shard(NamedTuple):
    """A part of one stage's peers. bits: a text of "0" and "1", with which their hashes begin; empty for all peers."""

    stage: int
    bits: str = ""

    @property
    def depth(self) -> int:
        """How many bits name the shard; it holds 1 / 2^depth of the stage's peers."""
        return len(self.bits)

    @property
    def first_hash(self) -> int:
        """The least hash that belongs to the shard."""
        return int(self.bits or "0", 2) << (HASH_BITS - self.depth)

    def holds(self, peer_hash: int) -> bool:
        """Returns whether the peer with this hash belongs to the shard."""
        return shard_bits(peer_hash, self.depth) == self.bits


def shard_hash(run: RunId, peer: PeerId) -> int:
    """Returns the hash, below 2^64, that says in which shards of a run a peer is: SHA-256's first 8 bytes, big-endian.

    It differs from run to run, so that ids made to be least in one run are not in another.
    """
    digest = hashlib.sha256(SHARD_TAG + bytes.fromhex(run) + peer.encode("ascii")).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")


def shard_bits(peer_hash: int, depth: int) -> str:
    """Returns the first `depth` bits of a hash as text."""
    return format(peer_hash >> (HASH_BITS - depth), f"0{depth}b") if depth else ""


def is_shard_bits(text: str) -> bool:
    """Returns whether `text` names a shard below depth 0: 1 to MAX_SHARD_BITS of "0" and "1"."""
    return 0 < len(text) <= MAX_SHARD_BITS and set(text) <= {"0", "1"}
