"""What averaging asks of the worker of this peer's span: how far its stages are, gradients, and steps along means."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray
from torch import Tensor

from agora.core.step_instructions import StepInstructions
from agora.state.layout import Layout
from agora.train.gradients import GradientShare
from agora.train.stage import AveragedFragment, StageProgress


class StepWorker(Protocol):
    """The worker of this peer's span as its replicas use it: takes optimizer steps, and runs no microbatches.

    Raises NotMyStage for a stage that it does not hold.
    """

    @property
    def span(self) -> Span:
        """The held stages."""

    @property
    def predicts_weights(self) -> bool:
        """Whether gradients that count for a later step than the present one are computed at predicted weights."""

    def layout(self, stage: int) -> Layout:
        """Returns which tensors the stage's flat weights hold."""

    def step_of(self, stage: int) -> int:
        """Returns how many optimizer steps the stage has taken."""

    def progress_of(self, stage: int) -> StageProgress:
        """Returns how far the stage is, as one snapshot."""

    def set_step_instructions(self, stage: int, instructions: StepInstructions) -> None:
        """Replaces the instructions by which the device thread closes the stage's shares and takes steps by itself."""

    async def outer_gradient(self, stage: int, blocks: NDArray[np.int64]) -> tuple[Tensor, Tensor] | None:
        """Returns outer parameters - weights in the numbered `blocks`, and a copy of these weights, float32 [n] each.

        None if the stage takes all-reduces now, for which there are no outer parameters.
        """

    async def outer_step(
        self,
        stage: int,
        step: int,
        blocks: NDArray[np.int64],
        snapshot: Tensor,
        averaged: AveragedFragment | None,
        wanted_fragments: int,
    ) -> None:
        """Moves outer parameters and weights in `blocks` by a round's mean difference, unless already done for `step`.

        step: after which the round was due. averaged: the mean difference, and for each shard whether it was averaged.
        None if there is no other replica: then the snapshot becomes the outer parameters, and the weights stay.
        snapshot: the weights that the round began with. wanted_fragments: in how many fragments all means of the round
        want to agree.
        """

    async def catch_up(self, stage: int, step: int) -> None:
        """Raises the stage's step count to `step`, that of the other replicas, without their means or states.

        A stage that is one step behind, or takes inner steps, first steps along its own gradient sum. Does nothing if
        the stage is not behind or has a closed share.
        """

    async def close_share(self, stage: int) -> GradientShare:
        """Returns this replica's gradient and tokens of the next step, to be averaged; closes the share."""

    async def step_with_gradient(
        self, stage: int, step: int, mean_gradient: Tensor, tokens: int, wanted_fragments: int
    ) -> None:
        """Takes step `step`, the next one, along the mean gradient of all replicas, computed over `tokens` tokens.

        With 0 tokens the step is counted, and the weights stay as they are. wanted_fragments: in how many fragments all
        means of the step want to agree later. Raises ProtocolError for an unusable gradient.
        """
