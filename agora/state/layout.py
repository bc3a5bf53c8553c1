"""How a stage's weights and moments lie in flat arrays, in named tensors, and in chunks of bytes.

Knows: elements, names, and which elements a chunk carries. Must not know: files, peers, or how anything is trained.

A snapshot is cut so that a chunk carries the weights, the means and the squares of the SAME elements: chunk i holds
elements [i*m, (i+1)*m) of the weights, then of the means, then of the squares, float32 little-endian, with
m = STATE_CHUNK_BYTES // 12. So chunks of different replicas' snapshots may be mixed: no element gets its weight from
one replica and its moments from another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.limits import SLICE_BLOCK, STATE_CHUNK_BYTES
from numpy.typing import NDArray

Flat = NDArray[np.float32]
"""float32 [numel]: a value for every element of a stage's weights, padding included."""

ALIGNMENT: Final = 16
"""Elements: every tensor starts on a 64-byte border, as the matrix kernels like it. The gaps are and remain zero."""
ELEMENT_BYTES: Final = 12  # a weight, its mean and its square
CHUNK_ELEMENTS: Final = STATE_CHUNK_BYTES // ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class StageState:
    """Everything that a stage has learnt: what a checkpoint, a snapshot and a transfer carry.

    `weights`, `mean` and `square` are float32 [numel]. `step` counts the stage's optimizer steps, `updates` those of
    them in which these moments took part, `tokens_total` the supervised tokens behind them (0: unknown).
    """

    stage: int
    step: int
    updates: int
    tokens_total: int
    weights: Flat
    mean: Flat
    square: Flat

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.weights.size


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one named tensor in a stage's flat arrays: `offset` and its size are elements, not bytes."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> slice:
        """The tensor's elements in a flat array: `flat[slot.elements].reshape(slot.shape)` is the tensor."""
        return slice(self.offset, self.offset + math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Layout:
    """The named tensors of a stage inside `numel` elements. What no slot covers is padding, and is zero."""

    numel: int
    slots: Sequence[Slot]

    @property
    def matrices_end(self) -> int:
        """The first element after the matrices, which `lay_out` places first: weight decay applies before it only."""
        return min((slot.offset for slot in self.slots if len(slot.shape) < 2), default=self.numel)

    def named(self, flat: Flat) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors inside `flat` [numel] by name, as views."""
        return {slot.name: flat[slot.elements].reshape(slot.shape) for slot in self.slots}

    def flat(self, tensors: Mapping[str, NDArray[np.float32]]) -> Flat:
        """The inverse of `named`. Raises ValueError that names a tensor which is missing, too much, or misshapen."""
        flat = np.zeros(self.numel, np.float32)
        views = self.named(flat)
        if strange := sorted(views.keys() ^ tensors.keys()):
            raise ValueError(f"{strange[0]} is {'missing' if strange[0] in views else 'no tensor of this stage'}")
        for name, view in views.items():
            tensor = tensors[name]
            if tensor.shape != view.shape or tensor.dtype != np.float32:
                raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, not float32 {view.shape}")
            view[...] = tensor
        return flat


def lay_out(shapes: Iterable[tuple[str, Sequence[int]]]) -> Layout:
    """Returns the layout of a stage whose trainable tensors have these names and shapes.

    Matrices come first, each tensor starts on a border of ALIGNMENT elements, and the end is one of SLICE_BLOCK.
    """
    slots: list[Slot] = []
    end = 0
    for name, shape in sorted(shapes, key=lambda item: len(item[1]) < 2):  # stable: matrices first
        slots.append(Slot(name, end, tuple(shape)))
        end = _next_border(slots[-1].elements.stop, ALIGNMENT)
    return Layout(_next_border(end, SLICE_BLOCK), slots)


def _next_border(offset: int, border: int) -> int:
    return -(-offset // border) * border


def chunk_count(numel: int) -> int:
    """Chunks of a snapshot of `numel` elements."""
    return -(-numel // CHUNK_ELEMENTS)


def chunk_range(chunk: int, numel: int) -> slice:
    """The elements that a chunk carries."""
    return slice(chunk * CHUNK_ELEMENTS, min((chunk + 1) * CHUNK_ELEMENTS, numel))


def chunk_bytes(chunk: int, numel: int) -> int:
    """The bytes of a chunk."""
    return ELEMENT_BYTES * (min((chunk + 1) * CHUNK_ELEMENTS, numel) - chunk * CHUNK_ELEMENTS)


def pack_chunk(state: StageState, chunk: int) -> bytearray:
    """The bytes of a chunk of `state`."""
    elements = chunk_range(chunk, state.numel)
    return bytearray(b"".join(_little(array[elements]).data.cast("B") for array in _arrays(state)))


def unpack_chunk(data: memoryview) -> tuple[Flat, Flat, Flat]:
    """The weights, means and squares in a chunk of whole elements, as views of `data`."""
    weights, mean, square = np.frombuffer(data, "<f4").reshape(3, -1)
    return weights, mean, square


def chunk_hashes(state: StageState) -> list[bytes]:
    """SHA-256 of each chunk of `state`. About a second for each gigabyte: not for an event loop."""
    return [_chunk_hash(state, chunk) for chunk in range(chunk_count(state.numel))]


def snapshot_hash(hashes: Sequence[bytes]) -> bytes:
    """The name of a snapshot: SHA-256 over its chunks' hashes."""
    return hashlib.sha256(b"".join(hashes)).digest()


def _chunk_hash(state: StageState, chunk: int) -> bytes:
    digest = hashlib.sha256()
    for array in _arrays(state):
        digest.update(_little(array[chunk_range(chunk, state.numel)]).data.cast("B"))
    return digest.digest()


def _arrays(state: StageState) -> Iterator[Flat]:
    yield from (state.weights, state.mean, state.square)


def _little(array: Flat) -> Flat:
    """`array` in the byte order of the wire and of files; itself on every usual machine."""
    return np.ascontiguousarray(array, "<f4")
