"""Lays out a stage's tensors in flat arrays, and converts between these, named tensors, and a snapshot's chunks.

Chunk i holds the values of the stage's elements [i*m, (i+1)*m) in the weights, then in each moment that has values for
them, float32 little-endian, with m = STATE_CHUNK_BYTES // (4 * arrays). So chunks of snapshots of one history may be
mixed: no element gets its weight from one replica and its moments from another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
from agora_protocol.limits import SLICE_BLOCK, STATE_CHUNK_BYTES
from numpy.typing import NDArray

from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule

# float32 [n]: a value for every element of a stage's weights, padding included, or for those that a moment has.
Flat = NDArray[np.float32]

ALIGNMENT: Final = 16  # elements: tensors start at multiples of 64 bytes, which matrix kernels prefer; gaps are zero
VALUE_BYTES: Final = 4
HASH_BYTES: Final = 32
AVERAGE: Final = "average"  # the name of the moment that holds the moving average of the weights
# The names of the moments that a stage has during DiLoCo's inner steps only; files call outer parameters an anchor.
OUTER_PARAMETERS: Final = "anchor"
VELOCITY: Final = "velocity"


class FlatArray(Protocol):
    """Protocol: a flat array of numpy, or a tensor of torch, which this package must not import."""

    def __setitem__(self, elements: slice, value: float, /) -> None: ...


@dataclass(frozen=True, slots=True)
class StageState:
    """Everything that a stage has learnt, in flat arrays: its weights, and name -> optimizer moment of `layout`.

    step: how many optimizer steps the stage has taken.
    updates: how many of these steps went into the moments.
    tokens_total: the supervised tokens behind the steps, 0 when unknown.
    agreed_step: the last step whose mean over all replicas is in the state.
    history_hash: a digest of all means up to `agreed_step`, 0 when unknown, equal in replicas that agree; see
        train.history_hash.
    sync_schedule: which steps are inner steps. If step `step` is one, `layout` has the moments OUTER_PARAMETERS and
        VELOCITY.
    """

    stage: int
    step: int
    updates: int
    tokens_total: int
    layout: Layout
    weights: Flat
    moments: Mapping[str, Flat]
    agreed_step: int = 0
    history_hash: int = 0
    sync_schedule: SyncSchedule = ONLY_ALL_REDUCE

    @property
    def averaged_weights(self) -> Flat:
        return self.moments.get(AVERAGE, self.weights)

    @property
    def arrays(self) -> dict[str, Flat]:
        return {"weights": self.weights, **{moment.name: self.moments[moment.name] for moment in self.layout.moments}}


@dataclass(frozen=True, slots=True)
class MomentSpec:
    """Describes a flat array that the optimizer keeps besides the weights; does not hold the array's values.

    name: unique in the stage. ranges: which of the stage's elements have a value in the array, ascending; the array has
    the values of the first range, then those of the second, and so on. is_square: a negative value is an error.
    root_bound: of a square; a mean of the same element, the first moment, larger than this many times the square's root
    is an error too.
    """

    name: str
    ranges: Sequence[slice]
    is_square: bool = False
    root_bound: float = math.inf

    def array_range(self, elements: slice) -> slice:
        """Converts a range of the stage's elements to the range of this array that has their values.

        Elements without a value in the array are left out, so the result may be shorter, or empty.
        """
        start, stop = (
            sum(max(min(part.stop, end) - part.start, 0) for part in self.ranges)
            for end in (elements.start, elements.stop)
        )
        return slice(start, stop)

    @property
    def numel(self) -> int:
        return sum(part.stop - part.start for part in self.ranges)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of one named tensor in a stage's flat arrays: `offset` and `elements` count elements, not bytes.

    is_hidden_matrix: whether the model family marks the tensor as a hidden matrix, see agora.model.StageModule.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    is_hidden_matrix: bool = False

    @property
    def elements(self) -> slice:
        return slice(self.offset, self.offset + math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a stage's named tensors in a flat array of `numel` elements, and the chunks of its snapshots.

    slots: the tensors' places, ascending. moments: describes the optimizer's arrays, whose values travel in the same
    chunks as the weights. Elements that no slot covers are padding, and are zero.
    """

    numel: int
    slots: Sequence[TensorSlot]
    moments: Sequence[MomentSpec] = ()

    @property
    def nbytes(self) -> int:
        return VALUE_BYTES * (self.numel + sum(moment.numel for moment in self.moments))

    @property
    def chunk_count(self) -> int:
        return -(-self.numel // self._chunk_elements)

    @property
    def _chunk_elements(self) -> int:
        return STATE_CHUNK_BYTES // (VALUE_BYTES * (1 + len(self.moments)))

    def chunk_places(self, chunk: int) -> list[slice]:
        """Returns the ranges that chunk number `chunk` carries: of the weights' array, then of each moment's array."""
        start = chunk * self._chunk_elements
        elements = slice(start, min(start + self._chunk_elements, self.numel))
        return [elements, *(moment.array_range(elements) for moment in self.moments)]

    def of_moment(self, moment: MomentSpec) -> Layout:
        """Returns the layout of the moment's own array: the places of the tensors that have values in it."""
        slots = [slot for slot in self.slots if any(part.start <= slot.offset < part.stop for part in moment.ranges)]
        return Layout(moment.numel, [replace(slot, offset=moment.array_range(slot.elements).start) for slot in slots])

    def at_step(self, step: int, sync_schedule: SyncSchedule) -> Layout:
        """The layout after `step` steps: with two moments more if step number `step` is an inner step.

        self: the stage's layout during all-reduce steps.
        """
        if not sync_schedule.is_inner(step):
            return self
        everything = [slice(0, self.numel)]
        outer = (MomentSpec(name, everything) for name in (OUTER_PARAMETERS, VELOCITY))
        return replace(self, moments=(*self.moments, *outer))

    def ranges(self, chosen: Callable[[TensorSlot], bool]) -> list[slice]:
        """Returns the element ranges of the tensors for which `chosen(slot)` is true, each with the padding after it.

        Adjacent ranges are joined.
        """
        ranges: list[slice] = []
        for slot, next_slot in pairwise([*self.slots, TensorSlot("", self.numel, ())]):
            if chosen(slot):
                adjacent = bool(ranges) and ranges[-1].stop == slot.offset
                start = ranges.pop().start if adjacent else slot.offset
                ranges.append(slice(start, next_slot.offset))
        return ranges

    def clear_padding(self, flat: FlatArray) -> None:
        """Sets the padding elements of `flat` [numel], a numpy array or a torch tensor, to zero in place."""
        for slot, next_slot in pairwise([*self.slots, TensorSlot("", self.numel, ())]):
            flat[slot.elements.stop : next_slot.offset] = 0.0

    def views(self, flat: Flat) -> dict[str, NDArray[np.float32]]:
        """Returns name -> tensor inside `flat` [numel], reshaped; these are views: changing one changes `flat`."""
        return {slot.name: flat[slot.elements].reshape(slot.shape) for slot in self.slots}

    def flatten(self, tensors: Mapping[str, NDArray[np.float32]]) -> Flat:
        """Returns a new flat array [numel] with the values of `tensors`; padding is zero. The inverse of `views`.

        Raises ValueError if a tensor is missing, unknown, or of a wrong shape or dtype.
        """
        flat = np.zeros(self.numel, np.float32)
        views = self.views(flat)
        if unmatched := sorted(views.keys() ^ tensors.keys()):
            problem = "missing" if unmatched[0] in views else "not a tensor of this stage"
            raise ValueError(f"{unmatched[0]} is {problem}")
        for name, view in views.items():
            tensor = tensors[name]
            if tensor.shape != view.shape or tensor.dtype != np.float32:
                raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, not float32 {view.shape}")
            view[...] = tensor
        return flat


def lay_out(shapes: Iterable[tuple[str, Sequence[int]]], hidden_matrices: Collection[str] = ()) -> Layout:
    """Returns a layout, without moments, that places tensors of these names and shapes one after another.

    Each begins at a multiple of ALIGNMENT elements. Tensors of two or more dimensions come first, then the others; each
    group is in the given order. numel is rounded up to a multiple of SLICE_BLOCK. hidden_matrices: the names of the
    tensors to mark as such.
    """
    slots: list[TensorSlot] = []
    end = 0
    for name, shape in sorted(shapes, key=lambda item: len(item[1]) < 2):  # stable: matrices first
        slots.append(TensorSlot(name, end, tuple(shape), name in hidden_matrices))
        end = -(-slots[-1].elements.stop // ALIGNMENT) * ALIGNMENT
    return Layout(-(-end // SLICE_BLOCK) * SLICE_BLOCK, slots)


def chunk_arrays(state: StageState, chunk: int) -> list[Flat]:
    """Returns the chunk's values in the weights and in each moment: views."""
    places = state.layout.chunk_places(chunk)
    return [array[place] for array, place in zip(state.arrays.values(), places, strict=True)]


def pack_chunk(state: StageState, chunk: int) -> bytearray:
    """Returns the bytes of chunk number `chunk`: the weights of the chunk's elements, then their values in each moment.

    All values are float32 little-endian.
    """
    parts = (np.ascontiguousarray(values, "<f4") for values in chunk_arrays(state, chunk))
    return bytearray().join(values.data.cast("B") for values in parts)


def unpack_chunk(data: memoryview, layout: Layout, chunk: int) -> list[Flat]:
    """Splits `data`, the bytes of chunk number `chunk`, into the weights and each moment's values: views of `data`."""
    sizes = [place.stop - place.start for place in layout.chunk_places(chunk)]
    return np.split(np.frombuffer(data, "<f4"), np.cumsum(sizes)[:-1])


def chunk_hashes(state: StageState) -> bytes:
    """Returns the SHA-256 digests of all chunks of `state`, concatenated. Blocks for about a second per gigabyte."""
    chunks = range(state.layout.chunk_count)
    return b"".join(hashlib.sha256(pack_chunk(state, chunk)).digest() for chunk in chunks)
