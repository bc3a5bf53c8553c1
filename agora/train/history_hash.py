"""The history hash of a stage: a digest of the means that it has applied, `lineage` on the wire. Pure.

Equal hashes show equal means, not equal bytes of weights: equal steps round differently on different hardware. Inner
steps do not enter the hash; means of fragments do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

INITIAL_HASH: Final = 1  # the hash of the initial weights. 0 stands for an unknown one.
# How many last steps' hashes are kept: replicas at different steps compare those of an earlier one.
KEPT_STEPS: Final = 32


def extend_history(
    history: Mapping[int, int], step: int, checksum: int, last: int | None = None, amended: bytes = b""
) -> dict[int, int]:
    """Returns a copy of `history` (step -> hash) with that of `step` added; only the last KEPT_STEPS steps remain.

    step: 1 is the first. checksum: hash_of the step's mean. last: the agreed step before this one, by default step - 1.
    amended: the hash of the amendment in force at the step, b"" for none; replicas that took the step by different
    amendments get different hashes. hash(step) = SHA-256(hash(last), step, c), where c is `checksum`, or under an
    amendment hash_of(checksum, amended); it is 0 if hash(last) is unknown.
    """
    if amended:
        checksum = hash_of(checksum.to_bytes(32, "big"), amended)
    # A CRC could be kept the same by whoever sends replicas different means: the split would never be noticed.
    parent = history.get(step - 1 if last is None else last, 0)
    child = hash_of(parent.to_bytes(32, "big"), step.to_bytes(8, "big"), checksum.to_bytes(32, "big"))
    kept = {past: kept_hash for past, kept_hash in history.items() if step - KEPT_STEPS < past < step}
    return {**kept, step: child if parent else 0}


def hash_of(*data: bytes | memoryview) -> int:
    """Returns the SHA-256 of some bytes as a number."""
    digest = hashlib.sha256(b"agora history 1\0")
    for part in data:
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")
