"""A stage's gradients: which received ones are plausible, the sum for its next step, and the share closed with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from agora.state.layout import Layout
from agora.train.weight_versions import tensor_in

# One gradient of size 1e30 would outweigh all others in the sum of a step. So a gradient may be at most
# MAX_RECEIVED_RATIO times as large as the median of the last WINDOW. A rejected one is remembered with the size of the
# limit: if most gradients are larger, the limit rises to them, but a peer that sends less than half of a stage's
# gradients cannot raise it.
WINDOW: Final = 65
MIN_SAMPLES: Final = 5
MAX_RECEIVED_RATIO: Final = 100.0
# The limit before MIN_SAMPLES gradients were seen: the gradient of a sum of token losses is far smaller.
FIRST_LIMIT: Final = 1e4


class GradientMagnitudeBound:
    """The upper bound for the root mean square of the next gradient that comes from downstream."""

    def __init__(self) -> None:
        self._sizes: deque[float] = deque(maxlen=WINDOW)

    @property
    def limit(self) -> float:
        return MAX_RECEIVED_RATIO * median(self._sizes) if len(self._sizes) >= MIN_SAMPLES else FIRST_LIMIT

    def record_and_check(self, size: float) -> bool:
        """Returns whether a gradient of root mean square `size` may be used; False for NaN. Counts for later limits."""
        limit = self.limit
        if size > 0:
            self._sizes.append(min(size, limit))
        return size <= limit


# fp16 ends at 65,504 and below 6e-8. Powers of two, so that scaling rounds nothing.
FIRST_SCALE: Final = 2.0**10
MOST_SCALE: Final = 2.0**16
LEAST_SCALE: Final = 2.0**-14
# Backward passes without an overflow, after which the scale doubles, as in torch's GradScaler.
GROWS_AFTER: Final = 2000
MAX_HALVINGS: Final = 8  # of one microbatch; a gradient that is not finite then has another cause


class LossScale:
    """The factor of the gradients inside this peer's backward passes, so that fp16 holds them: a loss scale of one hop.

    A gradient that arrives is multiplied by it, and what leaves, or is added to a sum, divided: other peers do not know
    of it. value: 1 for products in another dtype than fp16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_used = dtype == torch.float16
        self.value = FIRST_SCALE if self.is_used else 1.0
        self._halvings = self._passes = 0

    def accepts(self, norm: Tensor) -> bool:
        """Returns whether gradients of this norm may be used; otherwise the pass is to be repeated with half the scale.

        Without a scale it reads nothing and accepts all. Accepts what is still not finite after MAX_HALVINGS, with the
        scale as it was before them: then the gradients themselves are not finite.
        """
        if not self.is_used:
            return True
        if math.isfinite(float(norm)):
            self._halvings, self._passes = 0, self._passes + 1
            if self._passes >= GROWS_AFTER:
                self._passes, self.value = 0, min(2 * self.value, MOST_SCALE)
            return True
        if self._halvings >= MAX_HALVINGS or self.value <= LEAST_SCALE:
            self.value *= 2.0**self._halvings
            self._halvings = 0
            return True
        self._halvings, self._passes, self.value = self._halvings + 1, 0, self.value / 2
        return False


@dataclass(frozen=True, slots=True)
class GradientShare:
    """A replica's share of a step: the mean gradient over its own tokens."""

    step: int  # 0 is the first
    tokens: int
    values: Tensor  # float32 [numel] on the CPU, finite, zeros if `tokens` is 0; do not change them


@dataclass(slots=True)
class SumTotals:
    """The totals of a gradient sum over its microbatches."""

    tokens: int = 0  # their weights, see Objective.loss_weight
    loss: float = 0.0
    microbatches: int = 0
    predicted_tokens: int = 0  # of those whose gradient was computed at predicted weights
    sum_of_forward_steps: int = 0  # sum of the step counts that the weights had at their forwards

    def staleness(self, step: int) -> float:
        """Returns the microbatches' mean age, in steps, at step number `step`; 0 without microbatches."""
        return step - self.sum_of_forward_steps / self.microbatches if self.microbatches else 0.0


class ClosedShare(NamedTuple):
    # Held until the mean over all replicas arrives.
    gradient: GradientShare
    totals: SumTotals


def add_gradients(sums: Sequence[Tensor], gradients: Sequence[Tensor], scale: float = 1.0) -> None:
    """Adds to each float32 sum its gradient, of any float dtype, divided by `scale`, in place.

    If memory lacks, no sum has changed.
    """
    pairs = list(zip(sums, gradients, strict=True))
    mixed = [(total, gradient) for total, gradient in pairs if gradient.dtype != total.dtype]
    converts = bool(mixed) and converts_before_adding(sums[0].device)
    scratch = sums[0].new_empty(max(len(total.flatten()) for total, _ in mixed) if converts else 0)
    if same := [(total, gradient) for total, gradient in pairs if gradient.dtype == total.dtype]:
        torch._foreach_add_(*map(list, zip(*same, strict=True)), alpha=1 / scale)
    for total, gradient in mixed:
        if converts:
            gradient = scratch[: total.numel()].view(total.shape).copy_(gradient)
        total.add_(gradient, alpha=1 / scale)


def converts_before_adding(device: torch.device) -> bool:
    """Returns whether torch adds tensors of two dtypes by way of a copy that it allocates; a GPU's kernels do not."""
    return device.type == "cpu"


class GradientSum:
    """The summed gradients of a stage's open share."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        # Views of `flat`, one for each parameter, in the layout's order.
        self.tensors = [tensor_in(self.flat, slot) for slot in layout.slots]
        self.totals = SumTotals()

    def mean(self) -> Tensor:
        """Returns the mean gradient over the tokens [numel], a new tensor; zeros without tokens."""
        return self.flat / max(self.totals.tokens, 1)

    def clear(self) -> SumTotals:
        """Sets the sum and its totals to zero; returns the totals that it had."""
        self.flat.zero_()
        totals, self.totals = self.totals, SumTotals()
        return totals
