"""DiLoCo's outer optimizer: while replicas take steps of their own, it moves parameters that are equal at all of them.

A fragment's sync gives each replica the mean g of outer - s over the replicas, the same bytes at all of them; s is a
replica's snapshot of its weights w when the round began. With velocity v (Nesterov momentum), and a momentum that is
the manifest's outer_momentum for each step that a pass over all fragments takes:

    v = momentum * v + g
    new = outer - rate * (g + momentum * v)
    w = w + new - s
    outer = new

In states the outer parameters are called anchor. Source: Streaming DiLoCo (Douillard et al., arXiv 2501.18512), without
its overlap's mixing factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest_sections import AveragingSection
from agora_protocol.parts import shard_elements
from torch import Tensor

from agora.state.layout import OUTER_PARAMETERS, VELOCITY, Layout

MAX_MOMENTUM: Final = 0.9


class OuterStep(NamedTuple):
    """New values of the outer parameters and velocity in `blocks`, float32 [blocks, SLICE_BLOCK], not yet taken."""

    blocks: Tensor
    outer: Tensor
    velocity: Tensor
    change: Tensor  # what to add to the weights: new outer parameters - snapshot, float32 [blocks * SLICE_BLOCK]


class OuterOptimizer:
    """The outer optimizer of one stage. moments: outer parameters and velocity by name, float32 [numel], on the CPU.

    The outer parameters start as a copy of the weights, the velocity as zeros. The weights are never changed here.
    """

    def __init__(self, layout: Layout, weights: Tensor) -> None:
        self._layout = layout
        self.moments: Mapping[str, Tensor] = {
            OUTER_PARAMETERS: weights.to("cpu", copy=True),
            VELOCITY: torch.zeros(len(weights)),
        }

    def outer_gradient(self, blocks: Tensor, snapshot: Tensor) -> Tensor:
        """Returns outer parameters - snapshot in these blocks, float32 [blocks * SLICE_BLOCK].

        snapshot: weights of these blocks only, of the same shape.
        """
        return self._blocks_of(OUTER_PARAMETERS)[blocks].flatten() - snapshot

    def prepare(
        self,
        section: AveragingSection,
        blocks: Tensor,
        snapshot: Tensor,
        mean: Tensor,
        has_mean: tuple[bool, ...],
        pass_steps: int,
    ) -> OuterStep:
        """Returns the step of outer parameters and velocity in `blocks` along `mean`; changes nothing.

        section: has the outer rate and momentum.
        snapshot, mean: float32 [n]. has_mean: for each shard of shard_elements(n) elements, whether the round gave a
        mean; where it did not, nothing changes. pass_steps: in which every fragment is synced once. Raises
        ProtocolError for a mean of another shape or dtype, and when the change of the weights is not finite.
        """
        if mean.shape != (len(blocks) * SLICE_BLOCK,) or mean.dtype != torch.float32:
            raise ProtocolError(
                "bad-tensor", f"{mean.dtype} {tuple(mean.shape)} is not a fragment of {len(blocks)} blocks."
            )
        momentum = min(section.outer_momentum * pass_steps, MAX_MOMENTUM)
        blocks_of_part = shard_elements(len(mean)) // SLICE_BLOCK
        block_has_mean = torch.tensor(has_mean, dtype=torch.bool).repeat_interleave(blocks_of_part)
        moves = block_has_mean[: len(blocks), None]
        outer = self._blocks_of(OUTER_PARAMETERS)[blocks]
        velocity = self._blocks_of(VELOCITY)[blocks]
        mean = mean.view(-1, SLICE_BLOCK)
        new_velocity = momentum * velocity + mean
        new_outer = outer - section.outer_rate * (mean + momentum * new_velocity)
        change = torch.where(moves, new_outer - snapshot.view(-1, SLICE_BLOCK), 0.0).flatten()
        if not bool(change.isfinite().all()):
            raise ProtocolError("bad-tensor", "The weights that a round gives would not be finite.")
        return OuterStep(
            blocks, torch.where(moves, new_outer, outer), torch.where(moves, new_velocity, velocity), change
        )

    def take(self, step: OuterStep) -> None:
        """Takes a step that `prepare` has returned; allocates nothing."""
        self._blocks_of(OUTER_PARAMETERS)[step.blocks] = step.outer
        self._blocks_of(VELOCITY)[step.blocks] = step.velocity
        for values in self.moments.values():  # a mean that was sent in few bits is not exactly 0 in the padding
            self._layout.clear_padding(values)

    def restart(self, blocks: Tensor, snapshot: Tensor) -> None:
        """Makes the snapshot the outer parameters in these blocks, with zero velocity.

        snapshot: the only replica's weights there, float32 [n].
        """
        self._blocks_of(OUTER_PARAMETERS)[blocks] = snapshot.view(-1, SLICE_BLOCK)
        self._blocks_of(VELOCITY)[blocks] = 0.0

    def _blocks_of(self, moment: str) -> Tensor:
        return self.moments[moment].view(-1, SLICE_BLOCK)
