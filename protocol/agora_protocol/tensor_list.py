"""The tensor list of a base model: name, dtype, shape and hashes of its tensors, in the one byte form that is hashed.

Peers that lack the model's files fetch tensors by it, in pieces: piece i of a tensor is its bytes from
i * STATE_CHUNK_BYTES on, at most that many, raw little endian as in a safetensors file. Each piece has a hash of its
own, so what one source sends is judged without the rest. Knows: the list, pieces, hashes. Must not know: files, peers.
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
LISTED_DTYPES: Final = {"F32": 4, "BF16": 2, "F16": 2}
"""The dtypes of listed tensors, as safetensors calls them, and the bytes of a value."""
TENSOR_NAME: Final = re.compile(r"[!-~]{1,256}", re.ASCII)
_MOST_VALUES: Final = 3 + MAX_BASE_TENSORS * (5 + MAX_DIMENSIONS)


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One tensor of the list. dtype: one of LISTED_DTYPES. hashes: the SHA-256 of each piece, back to back."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hashes: bytes

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return size_in_bytes(self.dtype, self.shape)

    @property
    def piece_count(self) -> int:
        """How many pieces the tensor has."""
        return count_pieces(self.nbytes)

    def piece_bytes(self, piece: int) -> int:
        """Returns the size of a piece; it is STATE_CHUNK_BYTES but for the last one."""
        return min(STATE_CHUNK_BYTES, self.nbytes - piece * STATE_CHUNK_BYTES)

    def is_piece(self, piece: int, data: bytes | memoryview) -> bool:
        """Returns whether `data` has the SHA-256 of this piece."""
        return hashlib.sha256(data).digest() == self.hashes[HASH_BYTES * piece :][:HASH_BYTES]


@dataclass(frozen=True, slots=True)
class TensorList:
    """The listed tensors of a base model, sorted by name. A tensor's number is its place among them, from 0."""

    tensors: tuple[ListedTensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[ListedTensor]) -> Self:
        """Returns the list of these tensors, in any order. Raises ProtocolError for what `from_bytes` would refuse."""
        made = cls(tuple(sorted(tensors, key=lambda tensor: tensor.name)))
        return cls.from_bytes(made.to_bytes())

    def to_bytes(self) -> bytes:
        """Returns the msgpack [1, [[name, dtype, shape, hashes], ...]], whose SHA-256 names the list."""
        return pack([VERSION, [[t.name, t.dtype, t.shape, t.hashes] for t in self.tensors]])

    @property
    def digest(self) -> str:
        """The SHA-256 of `to_bytes`, in hex: the manifest's `tensors_hash`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads the list. Raises ProtocolError: "too-large", or "bad-message" for any but the one form of a list.

        Sizes are bounded before anything is built: MAX_TENSOR_LIST_BYTES, MAX_BASE_TENSORS.
        """
        value = unpack(data, MAX_TENSOR_LIST_BYTES, most_items=MAX_BASE_TENSORS, most_values=_MOST_VALUES)
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
    """Returns whether a list may have such a tensor: dtype and name as above, 1 or more values, few dimensions."""
    fits = len(shape) <= MAX_DIMENSIONS and all(type(n) is int and 1 <= n <= MAX_DIMENSION for n in shape)
    return dtype in LISTED_DTYPES and TENSOR_NAME.fullmatch(name) is not None and fits


def size_in_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor of one of LISTED_DTYPES."""
    return LISTED_DTYPES[dtype] * math.prod(shape)


def count_pieces(nbytes: int) -> int:
    """Returns how many pieces so many bytes have."""
    return -(-nbytes // STATE_CHUNK_BYTES)


def _read_row(row: Any) -> ListedTensor:
    """Returns one row of a list as a tensor. Raises ProtocolError("bad-message")."""
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


# --- which of them a peer has


def held_to_bits(held: Collection[int], count: int) -> bytes:
    """Returns ceil(count / 8) bytes: bit n mod 8, the lowest first, of byte n // 8 says whether `held` has n."""
    bits = bytearray(-(-count // 8))
    for number in held:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


def bits_to_held(bits: bytes | memoryview, count: int) -> frozenset[int]:
    """Returns the numbers below `count` whose bits are set. Raises ProtocolError for other bytes than `held_to_bits`'s.

    These are another length, and a set bit at `count` or above.
    """
    if len(bits) != -(-count // 8):
        raise ProtocolError("bad-tensor", f"{len(bits)} bytes of bits do not fit {count} tensors.")
    held = frozenset(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1)
    if max(held, default=0) >= count:
        raise ProtocolError("bad-tensor", f"A bit is set of a tensor that is not among {count}.")
    return held
