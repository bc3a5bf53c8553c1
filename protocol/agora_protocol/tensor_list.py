"""The tensor list of a base model: name, dtype, shape and hashes of its tensors, in the canonical form that is hashed.

Peers that lack the model's files fetch tensors by it, in pieces: piece i of a tensor is its bytes from
i * STATE_CHUNK_BYTES on, at most that many, raw little endian as in a safetensors file. Each piece has a hash of its
own, so each is checked without the others.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from agora_protocol.errors import ProtocolError
from agora_protocol.fields import describe
from agora_protocol.limits import (
    MAX_BASE_TENSORS,
    MAX_DIMENSION,
    MAX_DIMENSIONS,
    MAX_TENSOR_LIST_BYTES,
    STATE_CHUNK_BYTES,
)
from agora_protocol.packing import is_version, pack, unpack

VERSION: Final = 1
HASH_BYTES: Final = 32
# The dtypes of listed tensors, as safetensors calls them, and the bytes of a value.
LISTED_DTYPES: Final = {"F32": 4, "BF16": 2, "F16": 2}
TENSOR_NAME: Final = re.compile(r"[!-~]{1,256}", re.ASCII)
_MAX_VALUES: Final = 3 + MAX_BASE_TENSORS * (5 + MAX_DIMENSIONS)


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One tensor of the list; immutable. dtype: one of LISTED_DTYPES. hashes: the SHA-256 of every piece, joined."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hashes: bytes

    @property
    def nbytes(self) -> int:
        return size_in_bytes(self.dtype, self.shape)

    @property
    def piece_count(self) -> int:
        return count_pieces(self.nbytes)

    def piece_bytes(self, piece: int) -> int:
        """Returns the bytes of piece number `piece`: STATE_CHUNK_BYTES, except for the last one."""
        return min(STATE_CHUNK_BYTES, self.nbytes - piece * STATE_CHUNK_BYTES)

    def is_piece(self, piece: int, data: bytes | memoryview) -> bool:
        """Returns whether `data` has the SHA-256 of piece number `piece`."""
        return hashlib.sha256(data).digest() == self.hashes[HASH_BYTES * piece :][:HASH_BYTES]


@dataclass(frozen=True, slots=True)
class TensorList:
    """The listed tensors of a base model, sorted by name; a tensor's number is its index, from 0. Immutable."""

    tensors: tuple[ListedTensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[ListedTensor]) -> Self:
        """Returns the list of these tensors, given in any order. Raises ProtocolError if from_bytes would refuse it."""
        made = cls(tuple(sorted(tensors, key=lambda tensor: tensor.name)))
        return cls.from_bytes(made.to_bytes())

    def to_bytes(self) -> bytes:
        """Returns the list's canonical form: msgpack [1, [[name, dtype, shape, hashes], ...]]."""
        return pack([VERSION, [[t.name, t.dtype, t.shape, t.hashes] for t in self.tensors]])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Returns the list in `data`. Raises ProtocolError: "too-large", or "bad-message" unless it is canonical.

        Sizes are bounded before anything is built, by MAX_TENSOR_LIST_BYTES and MAX_BASE_TENSORS.
        """
        value = unpack(data, MAX_TENSOR_LIST_BYTES, max_items=MAX_BASE_TENSORS, max_values=_MAX_VALUES)
        if not isinstance(value, tuple) or len(value) != 2 or not is_version(value[0], VERSION):
            raise ProtocolError("bad-message", f"A tensor list is [{VERSION}, tensors].")
        rows = value[1]
        if not isinstance(rows, tuple) or not 1 <= len(rows) <= MAX_BASE_TENSORS:
            raise ProtocolError("bad-message", f"A tensor list has 1 to {MAX_BASE_TENSORS} tensors.")
        made = cls(tuple(_read_row(row) for row in rows))
        if any(one.name >= other.name for one, other in zip(made.tensors, made.tensors[1:], strict=False)):
            raise ProtocolError("bad-message", "The tensors of a list are not sorted, or one is there twice.")
        if made.to_bytes() != data:
            raise ProtocolError("bad-message", "A tensor list is not in its one form.")
        return made


def can_be_listed(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Returns whether a list may contain such a tensor, by its name, its dtype, and a shape without dimensions of 0."""
    fits = len(shape) <= MAX_DIMENSIONS and all(type(n) is int and 1 <= n <= MAX_DIMENSION for n in shape)
    return dtype in LISTED_DTYPES and TENSOR_NAME.fullmatch(name) is not None and fits


def size_in_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor of one of LISTED_DTYPES."""
    return LISTED_DTYPES[dtype] * math.prod(shape)


def count_pieces(nbytes: int) -> int:
    """Returns how many pieces a tensor of `nbytes` bytes has."""
    return -(-nbytes // STATE_CHUNK_BYTES)


def _read_row(row: Any) -> ListedTensor:
    if not isinstance(row, tuple) or len(row) != 4:
        raise ProtocolError("bad-message", f"A listed tensor is [name, dtype, shape, hashes], not {describe(row)}.")
    name, dtype, shape, hashes = row
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, tuple):
        raise ProtocolError("bad-message", f"The listed tensor {describe(name)} has fields of other types.")
    if not can_be_listed(name, dtype, shape):
        raise ProtocolError("bad-message", f"The listed tensor {describe(name)} has a name, dtype or shape of no list.")
    needed = HASH_BYTES * count_pieces(size_in_bytes(dtype, shape))
    if not isinstance(hashes, bytes) or len(hashes) != needed:
        raise ProtocolError("bad-message", f"The listed tensor {describe(name)} needs {needed} bytes of hashes.")
    return ListedTensor(name, dtype, shape, hashes)


# --- which tensors a peer has


def held_to_bits(held: Collection[int], count: int) -> bytes:
    """Returns the numbers `held`, each below `count`, as ceil(count / 8) bytes of bits.

    Bit n mod 8, counted from the lowest, of byte n // 8 is set if `held` contains n.
    """
    bits = bytearray(-(-count // 8))
    for number in held:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


def bits_to_held(bits: bytes | memoryview, count: int) -> frozenset[int]:
    """Returns the numbers below `count` whose bits are set, as held_to_bits has set them.

    Raises ProtocolError for another length than ceil(count / 8) bytes, and for a set bit at `count` or above.
    """
    if len(bits) != -(-count // 8):
        raise ProtocolError("bad-tensor", f"{len(bits)} bytes of bits do not fit {count} tensors.")
    held = frozenset(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)
    if max(held, default=-1) >= count:
        raise ProtocolError("bad-tensor", f"A bit is set of a tensor that is not among {count}.")
    return held
