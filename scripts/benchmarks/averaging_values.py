"""What the members of a benchmarked round hold, and how near they come to the true mean.

Only child processes import it.

Every member holds the same pseudo-random values, moved by an offset of its own, as replicas of one model lie near one
another. So each element of a result says which members' values are in it: it is an offset again, and the true mean of
the offsets is known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SPREAD = 0.25  # how far an offset of 1 moves the values, whose root mean square is 1
NEAR = 0.25  # an element has been averaged if the offset of the elements around it is this near to the true mean
AROUND = 64  # elements over which an offset is the mean: few bits round each of them by more than NEAR


class Holding:
    """One member's values, float32 [numel]."""

    def __init__(self, numel: int, offset: float, true_mean: float) -> None:
        """offset: this member's; true_mean: of the offsets of all members."""
        self._common = torch.randn(numel, generator=torch.Generator().manual_seed(7))
        self._offset, self._true = offset, true_mean

    def put(self, into: Tensor) -> None:
        """Writes the member's values before a round into a tensor."""
        torch.add(self._common, SPREAD * self._offset, out=into)

    def found(self, values: Tensor) -> dict[str, float]:
        """Returns the share of elements that a round `averaged`, and the root mean square `error` in offsets of 1."""
        away = (values - self._common).div_(SPREAD).sub_(self._true)
        around = away[: len(away) // AROUND * AROUND].view(-1, AROUND).mean(dim=1)
        return {
            "averaged": float((around.abs() < NEAR).float().mean()),
            "error": float(torch.linalg.vector_norm(away)) / math.sqrt(len(away)),
        }
