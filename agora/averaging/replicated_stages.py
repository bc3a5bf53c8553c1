"""Protocols of what this room calls in others: the stages of this peer, and the fetching of a state.

Knows: flat weights by element, steps by number. Must not know: who implements it. The daemon passes in train.Compute
and state.StateKeeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from agora_protocol.ids import PeerId, Span
from numpy.typing import NDArray
from torch import Tensor

from agora.stepping import StepPolicy


class ReplicatedStages(Protocol):
    """The stages of this peer's span (train.Compute). Each method raises NotMyStage for a stage that is not held.

    step_of: returns the optimizer steps taken. publish_policy: replaces what decides when the stage steps by itself.
    """

    @property
    def span(self) -> Span: ...
    def layout(self, stage: int) -> Any:
        """Returns a description of the stage's flat weights; `numel` is their number of elements."""

    def progress(self) -> Sequence[Any]:
        """Returns for each stage a train.StageProgress."""

    def step_of(self, stage: int) -> int: ...
    def publish_policy(self, stage: int, policy: StepPolicy) -> None: ...
    async def difference_to_anchor(self, stage: int, blocks: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Returns anchor - weights in `blocks`, float32 [n], and a copy of these weights."""

    async def step_anchor(
        self,
        stage: int,
        step: int,
        blocks: NDArray[Any],
        snapshot: Tensor,
        averaged: tuple[Tensor, tuple[bool, ...]] | None,
    ) -> None:
        """Moves anchor and weights in `blocks` by a round's mean difference; does nothing if it did before for `step`.

        averaged: the mean difference, and for each of its parts whether it has one; None without another replica: the
        weights become the anchor. snapshot: the weights that the round began with.
        """

    async def catch_up(self, stage: int, step: int) -> None:
        """Brings the stage to the `step` steps that the others have taken, see train.TrainedStage."""

    async def take_gradient_share(self, stage: int) -> Any:
        """Returns this replica's share of the next step, a train.GradientShare, for `step_with_gradient`."""

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes the next step, `number`, along the mean over all replicas' `tokens`; with 0 tokens only counts it."""


class StateFetcher(Protocol):
    """Fetches states from other replicas (state.StateKeeper)."""

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Fetches a state of at least `at_least` steps from `sources`, and replaces the stage's own by it.

        Raises Unavailable when none of them has one.
        """
