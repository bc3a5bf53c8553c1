"""Protocols of what averaging calls in other packages: this peer's stages, its view, and the fetching of a state.

Knows: flat weights by element, steps by number. Must not know: who implements them. The daemon passes in train.Compute
and state.StateKeeper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from agora_protocol.ids import PeerId, Span
from numpy.typing import NDArray
from torch import Tensor

from agora.stepping import StepPolicy


class ReplicatedStages(Protocol):
    """Protocol: what averaging calls on the stages of this peer's span; implemented by train.Compute.

    Each method raises NotMyStage for a stage that is not held. step_of: returns how many optimizer steps the stage has
    taken. set_step_policy: replaces the rule by which the device thread closes shares and takes steps by itself.
    """

    @property
    def span(self) -> Span: ...
    def layout(self, stage: int) -> Any:
        """Returns the stage's state.Layout: which tensors its flat weights hold; `numel` counts their elements."""

    def progress(self) -> Sequence[Any]:
        """Returns one train.StageProgress for each held stage: steps taken, tokens counted, lineage."""

    def step_of(self, stage: int) -> int: ...
    def set_step_policy(self, stage: int, policy: StepPolicy) -> None: ...
    async def difference_to_anchor(self, stage: int, blocks: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Returns anchor - weights in the numbered `blocks`, float32 [n], and a copy of these weights, float32 [n].

        The anchor is the state on which all replicas last agreed; see train.outer_step.
        """

    async def step_anchor(
        self,
        stage: int,
        step: int,
        blocks: NDArray[Any],
        snapshot: Tensor,
        averaged: tuple[Tensor, tuple[bool, ...]] | None,
    ) -> None:
        """Moves anchor and weights in `blocks` by a round's mean difference; does nothing if already done for `step`.

        averaged: the mean difference, and for each part whether it was averaged. None means that there is no other
        replica: then the weights become the anchor. snapshot: the weights that the round began with.
        """

    async def catch_up(self, stage: int, step: int) -> None:
        """Brings the stage to step number `step`, which the others have reached; see train.TrainedStage.catch_up.

        One step behind, or with local steps, it first steps along its own gradient; it skips the steps still missing.
        """

    async def take_gradient_share(self, stage: int) -> Any:
        """Returns this replica's train.GradientShare of the next step, to be averaged for `step_with_gradient`.

        Closes the share if it is still open.
        """

    async def step_with_gradient(self, stage: int, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Takes step `number`, the next one, along the mean gradient of all replicas, computed over `tokens` tokens.

        With 0 tokens the step is counted, and the weights stay as they are.
        """


class ReplicaListing(Protocol):
    """Protocol: what this peer's view says of the run; implemented by the daemon.

    replicas_in_view: returns the stage's replicas by id, with their bandwidths in bytes per second, 0 when unknown.
    """

    def replicas_in_view(self, stage: int) -> Mapping[PeerId, float]: ...
    def uplink(self) -> float | None:
        """Returns this peer's measured uplink in bytes per second; None while nothing is queued to be sent."""

    def is_connected(self) -> bool:
        """Returns whether this peer has a connection to any other peer of the run now."""

    def steps_of_run(self) -> Collection[Collection[int]]:
        """Returns one collection for each stage of the run: the numbers of steps that its replicas have taken."""


class StateFetcher(Protocol):
    """Protocol: fetches a stage's state from other replicas; implemented by state.StateKeeper."""

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Fetches a state that has taken at least `at_least` steps from one of `sources`; replaces the stage's own.

        Raises Unavailable when no source has such a state.
        """
