"""What the replicas of a stage need of the stages held here, and of the room that fetches states, as protocols.

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
        """Returns for each stage its number `stage`, `step`, `part`, `tokens_in_part`, `tokens_counted`, `lineages`."""

    def step_of(self, stage: int) -> int: ...
    def publish_policy(self, stage: int, policy: StepPolicy) -> None: ...
    async def snapshot_blocks(self, stage: int, blocks: NDArray[Any]) -> tuple[Tensor, int]:
        """Returns a flat copy of the weights in `blocks`, and the number of steps they have taken."""

    async def apply_average(self, stage: int, blocks: NDArray[Any], delta: Tensor, snapshot: Tensor, rule: Any) -> None:
        """Changes the weights in `blocks` by an average, which is snapshot + delta, as `rule` says."""

    async def catch_up(self, stage: int, step: int) -> None:
        """Follows the others to `step`: one behind, it steps along its sum; else it drops that. Takes a due step."""

    async def take_mean_gradient(self, stage: int) -> Any:
        """Returns this replica's share of the next step, a train.MeanGradient; only `step_with_gradient` takes it."""

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes the next step, `number`, along the mean over all replicas' `tokens`; with 0 tokens only counts it."""


class StateFetcher(Protocol):
    """Fetches states from other replicas (state.StateKeeper). fetched: the stages whose state came from others."""

    fetched: set[int]

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Replaces the stage's state by one of at least `at_least` steps. Raises Unavailable when no source has one."""
