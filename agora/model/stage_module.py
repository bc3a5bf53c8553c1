"""The module of a stage, whatever its family, and the loss after the last stage.

Knows: the shapes that enter and leave a stage. Must not know: how any family computes.
"""

from __future__ import annotations

import abc

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -1


class Stage(nn.Module, abc.ABC):
    """Consecutive layers of a model; the first stage holds the embedding, the last the final norm and the head.

    Parameters carry their full names in the model ("layers.7.attention.query.weight"), so that a cut changes no name.
    A family makes its stages on the meta device: a constructor computes no values.
    """

    def __init__(self, layer_range: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layer_range = layer_range
        self.is_first = is_first
        self.is_last = is_last

    @abc.abstractmethod
    def forward(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Returns the boundary [b, s, k] that leaves the stage, from the boundary [b, s, k] that enters it.

        tokens: the microbatch's input ids [b, s], any integer type; a negative one, which marks an ignored target, is
        read as 0. The first stage takes them for `hidden`; the last stage returns logits [b, s, vocabulary].
        """

    def fill_buffers(self, seed: int) -> None:
        """Fills the buffers, if the family has any, with what sizes and the run's seed decide; they never change."""

    @abc.abstractmethod
    def initial_std(self, name: str) -> float | None:
        """Returns the standard deviation of the initial values of the named parameter; None: all values are one."""


def stage_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the tokens' cross entropies, a float32 scalar.

    logits: [b, s, vocabulary], any float type; targets: [b, s], any integer type, -1 where nothing is supervised.
    """
    with torch.autocast(logits.device.type, enabled=False):
        flat = logits.flatten(0, -2).float()
        return F.cross_entropy(flat, targets.flatten().long(), ignore_index=IGNORED, reduction="sum")
