"""A stage's state that arrives chunk by chunk: the arrays, and which snapshot and source each chunk is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from agora_protocol.ids import PeerId
from agora_protocol.messages import StateIndex

from agora.core.sync_mode import StepPlan
from agora.state.chunk_schedule import ChunkSchedule
from agora.state.layout import Flat, Layout, StageState
from agora.state.offers import mixing_key


@dataclass(frozen=True, slots=True)
class ArrivedChunk:
    """Where a chunk came from: the snapshot, the source, and the chunk's SHA-256."""

    index: StateIndex
    peer: PeerId
    digest: bytes


class PartialState:
    """The arrays of a state of one layout, filled by chunks in any order.

    arrived: the chunks that are filled, by number. schedule: which chunks are missing or being fetched.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.schedule = ChunkSchedule(layout.chunk_count)
        self.arrived: dict[int, ArrivedChunk] = {}
        self._weights = np.empty(layout.numel, np.float32)
        self._moments = {moment.name: np.empty(moment.numel, np.float32) for moment in layout.moments}

    def store(self, chunk: int, arrived: ArrivedChunk, values: Sequence[Flat]) -> None:
        """Writes a chunk's values, as unpack_chunk returns them, into the arrays."""
        self.arrived[chunk] = arrived
        arrays = [self._weights, *self._moments.values()]
        for array, place, part in zip(arrays, self.layout.chunk_places(chunk), values, strict=True):
            array[place] = part

    def weights_of(self, chunk: int) -> Flat:
        """Returns the weights of a chunk that has arrived: a view."""
        return self._weights[self.layout.chunk_places(chunk)[0]]

    def chunks_by_peer(self) -> dict[PeerId, list[int]]:
        """Returns the numbers of the arrived chunks, by the source that gave them."""
        chunks: dict[PeerId, list[int]] = {}
        for chunk, arrived in self.arrived.items():
            chunks.setdefault(arrived.peer, []).append(chunk)
        return chunks

    def drop_unless(self, fits: Callable[[StateIndex], bool]) -> None:
        """Drops the arrived chunks whose snapshot does not satisfy `fits`; they are missing again."""
        self.drop([chunk for chunk, arrived in self.arrived.items() if not fits(arrived.index)])

    def drop(self, chunks: Sequence[int]) -> None:
        """Drops the arrived chunks with these numbers; they are missing again."""
        for chunk in chunks:
            self.schedule.discard(chunk)
            del self.arrived[chunk]

    def whole_state(self, stage: int) -> StageState:
        """Returns the state, whose chunks have all arrived, and all have one mixing key; its arrays are not copied.

        It has the lowest step and updates of the chunks' snapshots, and tokens_total 0, which means unknown.
        """
        indexes = [arrived.index for arrived in self.arrived.values()]
        step, updates = min(index.step for index in indexes), min(index.updates for index in indexes)
        ((agreed, lineage, _, *plan),) = {mixing_key(index) for index in indexes}
        arrays = self.layout, self._weights, self._moments
        return StageState(stage, step, updates, 0, *arrays, agreed, lineage, StepPlan(*plan))
