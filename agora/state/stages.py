"""Protocols of what this package is given: the stages of this peer, their slices, and the peers that hold each stage.

Knows shapes and units only. The daemon passes in train.Compute, averaging.Slices and swarm.View.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from agora_protocol.ids import PeerId, Span
from numpy.typing import NDArray

from agora.state.layout import Flat, Layout, StageState


class KeptStages(Protocol):
    """The stages of this peer's span, whose state can be read and replaced while they train."""

    @property
    def span(self) -> Span:
        """The stages held."""

    async def export_state(self, stage: int) -> StageState:
        """Returns a consistent copy of the stage's weights and moments as of its last step."""

    def layout(self, stage: int) -> Layout:
        """Returns where the stage's named tensors lie in its flat weights."""

    async def load_state(self, state: StageState) -> None:
        """Replaces the stage's weights, moments and step."""

    async def snapshot_blocks(self, stage: int, blocks: NDArray[np.int64]) -> tuple[Any, int]:
        """Returns a copy of the weights in `blocks`, a float32 [n] tensor on the CPU, and the step that they are of."""

    async def replace_blocks(self, stage: int, blocks: NDArray[np.int64], values: Flat) -> None:
        """Replaces the weights in `blocks`; values: float32 [n]."""

    async def catch_up(self, stage: int, step: int) -> None:
        """Brings a stage that is behind to `step`: one step along its own gradient sum, several only by counting."""


class StageSlices(Protocol):
    """The slices into which averaging cuts a stage's weights; round r averages slice r mod count."""

    count: int

    def blocks(self, number: int) -> NDArray[np.int64]:
        """Returns the ids of the blocks that round `number` averages, in ascending order."""

    def numel_of(self, number: int) -> int:
        """Returns how many elements round `number` averages."""


ClaimedSteps = Callable[[int], Mapping[PeerId, int]]
"""Returns, for a stage, the optimizer steps that each of its peers claims to have taken there."""


class StageHolders(NamedTuple):
    """Says which peers hold a stage and at which step they claim to be.

    serving: the peers that serve the stage. claimants: these and those that are joining, which may have a checkpoint to
    give. me: this peer, which both may include.
    """

    me: PeerId
    serving: ClaimedSteps
    claimants: ClaimedSteps
