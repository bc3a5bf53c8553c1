"""Checks what sources of state answered: offers of a snapshot, chunks of it, and chunks of slices.

Knows what an answer must be. Must not know who was asked, how calls travel, or what becomes of the values.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.errors import ProtocolError, Refused
from agora_protocol.messages import Chunk, Slice, StateIndex

from agora.calls import Reply
from agora.state.layout import ELEMENT_BYTES, Flat, chunk_count, unpack_chunk

HASH_BYTES: Final = 32


class FalseStateError(ProtocolError):
    """A source sent bytes that cannot be the state it was asked for. No fault of a network causes this."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a source can give, and the SHA-256 of each of its chunks."""

    index: StateIndex
    hashes: list[bytes]


def check_offer(reply: Reply, numel: int) -> Offer:
    """Returns the offer in the answer to GetState for a stage of `numel` elements.

    Raises Refused when the source has no snapshot, FalseStateError when the offer cannot be true.
    """
    index = reply.message
    if not isinstance(index, StateIndex):
        raise FalseStateError("bad-message", f"GetState was answered by {type(index).__name__}.")
    if index.size == 0:
        raise Refused("has no snapshot of this stage to give")
    if index.size != ELEMENT_BYTES * numel:
        raise FalseStateError(
            "bad-tensor", f"The snapshot has {index.size} bytes; the stage has {ELEMENT_BYTES * numel}."
        )
    tensor = reply.tensors[0] if reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("uint8", (chunk_count(numel), HASH_BYTES)):
        raise FalseStateError("bad-tensor", f"The snapshot's index is not {chunk_count(numel)} hashes.")
    hashes = bytes(tensor.data)
    if hashlib.sha256(hashes).digest() != index.snapshot:
        raise FalseStateError("bad-tensor", "The snapshot's name is not the hash of its chunks' hashes.")
    return Offer(index, [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)])


def check_chunk(reply: Reply, expected: bytes, nbytes: int) -> tuple[Flat, Flat, Flat]:
    """Returns weights, means and squares in the answer to GetChunk. expected: SHA-256 of the chunk of `nbytes`.

    Raises FalseStateError when the bytes have another hash or size, or hold values that no optimizer produces.
    """
    tensor = reply.tensors[0] if isinstance(reply.message, Chunk) and reply.tensors else None
    if tensor is None or tensor.dtype != "uint8" or tensor.nbytes != nbytes:
        raise FalseStateError("bad-tensor", f"A chunk is not uint8 [{nbytes}].")
    if (digest := hashlib.sha256(tensor.data).digest()) != expected:
        raise FalseStateError("bad-tensor", f"A chunk's SHA-256 should be {expected.hex()}, and is {digest.hex()}.")
    _, _, square = values = unpack_chunk(tensor.data)
    if not all(np.isfinite(array).all() for array in values) or square.min() < 0:
        raise FalseStateError("bad-tensor", "A chunk holds values that are not finite, or a negative square.")
    return values


def check_slice(reply: Reply, size: int) -> Flat:
    """Returns the `size` values in the answer to GetSlice.

    Raises FalseStateError for another answer, another size, or values that are not finite.
    """
    tensor = reply.tensors[0] if reply.tensors else None
    if not isinstance(reply.message, Slice) or tensor is None:
        raise FalseStateError("bad-message", f"GetSlice was answered by {type(reply.message).__name__}.")
    if (tensor.dtype, tensor.shape) != ("float32", (size,)):
        raise FalseStateError(
            "bad-tensor", f"A chunk of a slice is {tensor.dtype} {tensor.shape}, not float32 [{size}]."
        )
    values = np.frombuffer(tensor.data, "<f4")
    if not np.isfinite(values).all():
        raise FalseStateError("bad-tensor", "A slice holds values that are not finite.")
    return values
