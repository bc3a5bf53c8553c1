"""Lays out a stage's weights and moments in flat arrays, in named tensors, and in chunks of bytes.

Knows: elements, names, and which elements a chunk carries. Must not know: files, peers, or how anything is trained.

Chunk i holds elements [i*m, (i+1)*m) of the weights, then of the means, then of the squares, float32 little-endian,
with m = STATE_CHUNK_BYTES // 12. So chunks of different replicas' snapshots may be mixed: no element gets its weight
from one replica and its moments from another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from agora_protocol.limits import SLICE_BLOCK, STATE_CHUNK_BYTES
from numpy.typing import NDArray

Flat = NDArray[np.float32]
"""float32 [numel]: a value for every element of a stage's weights, padding included."""

ALIGNMENT: Final = 16  # elements: tensors start on 64-byte borders, as matrix kernels like it; the gaps remain zero
ELEMENT_BYTES: Final = 12  # a weight, its mean and its square
CHUNK_ELEMENTS: Final = STATE_CHUNK_BYTES // ELEMENT_BYTES
HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class StageState:
    """Everything that a stage has learnt, in flat arrays: its weights and the optimizer's two moments.

    step: the stage's optimizer steps. updates: those that went into the moments. tokens_total: the supervised tokens
    behind them, 0 when unknown.
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
        """How many elements the stage has, padding included."""
        return self.weights.size

    @property
    def nbytes(self) -> int:
        """How many bytes the weights and the moments have together."""
        return ELEMENT_BYTES * self.numel


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one named tensor in a stage's flat arrays: `offset` and its size are elements, not bytes.

    is_hidden_matrix: as the model's family says it, see agora.model.Stage.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    is_hidden_matrix: bool = False

    @property
    def elements(self) -> slice:
        """The tensor's elements in a flat array: `flat[slot.elements].reshape(slot.shape)` is the tensor."""
        return slice(self.offset, self.offset + math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a stage's named tensors inside `numel` elements. Elements that no slot covers are padding: zero."""

    numel: int
    slots: Sequence[Slot]

    def ranges(self, chosen: Callable[[Slot], bool]) -> list[slice]:
        """Returns the element ranges of the chosen tensors, each with the padding behind it; adjacent ones joined."""
        ranges: list[slice] = []
        for slot, following in pairwise([*self.slots, Slot("", self.numel, ())]):
            if chosen(slot):
                adjacent = bool(ranges) and ranges[-1].stop == slot.offset
                start = ranges.pop().start if adjacent else slot.offset
                ranges.append(slice(start, following.offset))
        return ranges

    def named(self, flat: Flat) -> dict[str, NDArray[np.float32]]:
        """Returns the tensors inside `flat` [numel] by name, as views."""
        return {slot.name: flat[slot.elements].reshape(slot.shape) for slot in self.slots}

    def flat(self, tensors: Mapping[str, NDArray[np.float32]]) -> Flat:
        """Returns the flat array of `tensors`, the inverse of `named`. Raises ValueError if one is missing or wrong."""
        flat = np.zeros(self.numel, np.float32)
        views = self.named(flat)
        if unmatched := sorted(views.keys() ^ tensors.keys()):
            problem = "missing" if unmatched[0] in views else "no tensor of this stage"
            raise ValueError(f"{unmatched[0]} is {problem}")
        for name, view in views.items():
            tensor = tensors[name]
            if tensor.shape != view.shape or tensor.dtype != np.float32:
                raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, not float32 {view.shape}")
            view[...] = tensor
        return flat


def lay_out(shapes: Iterable[tuple[str, Sequence[int]]], hidden_matrices: Collection[str] = ()) -> Layout:
    """Returns a layout that places tensors of these names and shapes one after another: matrices first, then vectors.

    Each begins at a multiple of ALIGNMENT elements; numel is rounded up to a multiple of SLICE_BLOCK. hidden_matrices:
    names of those tensors.
    """
    slots: list[Slot] = []
    end = 0
    for name, shape in sorted(shapes, key=lambda item: len(item[1]) < 2):  # stable: matrices first
        slots.append(Slot(name, end, tuple(shape), name in hidden_matrices))
        end = -(-slots[-1].elements.stop // ALIGNMENT) * ALIGNMENT
    return Layout(-(-end // SLICE_BLOCK) * SLICE_BLOCK, slots)


def chunk_count(numel: int) -> int:
    """Returns how many chunks a snapshot of `numel` elements has."""
    return -(-numel // CHUNK_ELEMENTS)


def chunk_range(chunk: int, numel: int) -> slice:
    """Returns the range of a flat array's elements that chunk number `chunk` carries; the last chunk may be shorter."""
    return slice(chunk * CHUNK_ELEMENTS, min((chunk + 1) * CHUNK_ELEMENTS, numel))


def pack_chunk(state: StageState, chunk: int) -> bytearray:
    """Returns the bytes of chunk number `chunk`: its elements' weights, then means, then squares, as float32."""
    elements = chunk_range(chunk, state.numel)
    arrays = (state.weights, state.mean, state.square)
    return bytearray().join(np.ascontiguousarray(array[elements], "<f4").data.cast("B") for array in arrays)


def unpack_chunk(data: memoryview) -> tuple[Flat, Flat, Flat]:
    """Returns the weights, means and squares in a chunk of whole elements, as views of `data`."""
    weights, mean, square = np.frombuffer(data, "<f4").reshape(3, -1)
    return weights, mean, square


def chunk_hashes(state: StageState) -> bytes:
    """Returns the SHA-256 of each chunk of `state`, one after another. Blocks for about a second per gigabyte."""
    chunks = range(chunk_count(state.numel))
    return b"".join(hashlib.sha256(pack_chunk(state, chunk)).digest() for chunk in chunks)
