"""Protocols of what averaging calls in other packages: this peer's stages, its view, and the fetching of a state.

The daemon passes in train.DeviceWorker
and state.StateKeeper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from agora_protocol.ids import PeerId, Span
from numpy.typing import NDArray
from torch import Tensor

from agora.core.sync_mode import StepPlan, StepPolicy


class ReplicatedStages(Protocol):
    """Protocol: what averaging calls on the stages of this peer's span; implemented by train.DeviceWorker.

    Each method raises NotMyStage for a stage that is not held.
    """

    @property
    def span(self) -> Span:
        """The held stages."""

    def layout(self, stage: int) -> Any:
        """Returns the stage's state.Layout: which tensors its flat weights hold; `numel` counts their elements."""

    def progress(self) -> Sequence[Any]:
        """Returns one train.StageProgress for each held stage: steps taken, tokens counted, lineage."""

    def step_of(self, stage: int) -> int:
        """Returns how many optimizer steps the stage has taken."""

    def step_plan(self, stage: int) -> StepPlan:
        """Returns which steps of the stage are local; a change of it is part of what the stage has learnt."""

    def set_step_policy(self, stage: int, policy: StepPolicy) -> None:
        """Replaces the policy by which the device thread closes the stage's shares and takes its steps by itself."""

    async def outer_gradient(self, stage: int, blocks: NDArray[Any]) -> tuple[Tensor, Tensor] | None:
        """Returns anchor - weights in the numbered `blocks`, float32 [n], and a copy of these weights, float32 [n].

        The anchor is the state on which all replicas last agreed; see train.diloco. None if the stage takes exact
        steps now, for which there is no anchor.
        """

    async def outer_step(
        self,
        stage: int,
        step: int,
        blocks: NDArray[Any],
        snapshot: Tensor,
        averaged: tuple[Tensor, tuple[bool, ...]] | None,
        wanted_slices: int,
    ) -> None:
        """Moves anchor and weights in `blocks` by a round's mean difference; does nothing if already done for `step`.

        step: the step after which the round was due. averaged: the mean difference, and for each part whether it was
        averaged. None means that there is no other replica: then the weights become the anchor. snapshot: the weights
        that the round began with. wanted_slices: in how many slices all means of the round want to agree later.
        """

    async def catch_up(self, stage: int, step: int) -> None:
        """Raises the stage's step count to `step`, that of the other replicas, without their means or states.

        A stage that is one step behind, or takes local steps, first steps along its own gradient sum; then the
        steps still missing are skipped, and the sum is dropped. Does nothing if the stage is not behind or has a
        closed share.
        """

    async def take_gradient_share(self, stage: int) -> Any:
        """Returns this replica's train.GradientShare (values and tokens) of the next step, to be averaged.

        First closes the share if it is still open; later gradients then go to the share of the step after it.
        """

    async def step_with_gradient(
        self, stage: int, step: int, mean_gradient: Tensor, tokens: int, wanted_slices: int
    ) -> None:
        """Takes step `step`, the next one, along the mean gradient of all replicas, computed over `tokens` tokens.

        Drops this replica's closed share of this step. With 0 tokens the step is counted, and the weights stay as they
        are. wanted_slices: in how many slices all means of the step want to agree later. Takes no step and
        raises LocalError if another step is next, ProtocolError for an unusable gradient.
        """


class ReplicaListing(Protocol):
    """Protocol: what this peer's view shows of the run, and this peer's uplink; implemented by the daemon."""

    def replicas_in_view(self, stage: int) -> Mapping[PeerId, float]:
        """Returns the stage's serving replicas in the view by id, this peer included if it serves, with bandwidths.

        The bandwidths, in bytes per second, choose the owners of parts: see partition.owning_bandwidths.
        """

    def uplink_bytes_per_s(self) -> float | None:
        """Returns this peer's uplink in bytes per second, measured while data waits for it; None otherwise."""

    def has_connections(self) -> bool:
        """Returns whether this peer has a connection to any other peer of the run now."""

    def steps_of_run(self) -> Collection[Collection[int]]:
        """Returns for each stage of the run a collection: the number of steps that each of its replicas has taken."""


class StateFetcher(Protocol):
    """Protocol: fetches a stage's state from other replicas; implemented by state.StateKeeper."""

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Fetches from `sources` a state that has taken at least `at_least` steps; replaces the stage's state with it.

        Returns a description of the fetch. Raises Unavailable when no source has such a state.
        """
