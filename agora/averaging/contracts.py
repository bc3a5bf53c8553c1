"""What averaging asks of the rooms that it must not know: stages in training, states of other replicas, the view.

Knows: the methods' forms. train.Compute is a ReplicatedStages, state.StateKeeper a StateFetcher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from agora_protocol.ids import PeerId, Span
from numpy.typing import NDArray
from torch import Tensor

from agora.stepping import StepPolicy


class ReplicatedStages(Protocol):
    """The stages of this peer's span (train.Compute). Each method raises NotMyStage for a stage that is not held."""

    @property
    def span(self) -> Span: ...
    def layout(self, stage: int) -> Any:
        """Returns a description of the stage's flat weights; `numel` is their number of elements."""

    def progress(self) -> Sequence[Any]:
        """Returns for each stage its number `stage`, `step`, and `tokens_in_step`."""

    def step_of(self, stage: int) -> int:
        """Returns the optimizer steps that the stage has taken."""

    def publish_policy(self, stage: int, policy: StepPolicy) -> None:
        """Replaces what decides when the stage steps by itself."""

    async def snapshot_blocks(self, stage: int, blocks: NDArray[Any]) -> tuple[Tensor, int]:
        """Returns a copy of the weights in `blocks`, and the step they are of."""

    async def apply_average(self, stage: int, blocks: NDArray[Any], delta: Tensor, snapshot: Tensor, rule: Any) -> None:
        """Takes in an average that differs from `snapshot` by `delta`."""

    async def catch_up(self, stage: int, step: int) -> None:
        """Sets the stage to the number of steps that other replicas have taken, and takes an own step that is due."""

    async def take_mean_gradient(self, stage: int) -> Any:
        """Returns this replica's share of the next step (train.MeanGradient), and keeps the stage from taking it."""

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes step `number` along the mean over `tokens` tokens of all replicas."""


class StateFetcher(Protocol):
    """Fetches states from other replicas (state.StateKeeper). fetched: the stages whose state came from others."""

    fetched: set[int]

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Replaces the stage's state by one of at least `at_least` steps. Raises Unavailable when no source has one."""


class ReplicaListing(Protocol):
    """What this peer's view of the run says of replicas."""

    def listed(self, stage: int) -> Mapping[PeerId, float]:
        """Returns a stage's replicas, with their bandwidths in bytes per second, 0 when unknown."""

    def steps_of_run(self) -> Collection[Collection[int]]:
        """Returns, for each stage of the run, the steps that its replicas have taken."""
