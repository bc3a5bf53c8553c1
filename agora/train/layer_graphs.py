"""Runs a stage's layers so that autograd keeps one layer's graph at a time, or measures the graphs' bytes.

Both are a RunLayer, which Stage.forward calls for each of its layers. Knows: autograd. Must not know: models,
microbatches, peers.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agora.train.memory import measure_saved_bytes


def repeat_in_backward(compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Returns compute(hidden); of its graph only `hidden` is kept, and the backward runs `compute` again.

    The repetition has the same random numbers and the same autocast. Without gradients this is compute(hidden). Source:
    gradient checkpointing, arXiv 1604.06174.
    """
    if not torch.is_grad_enabled():
        return compute(hidden)
    output: Tensor = checkpoint(compute, hidden, use_reentrant=False)
    return output


class GraphMeasure:
    """Runs layers with gradients on and drops each layer's graph before the next one runs. Gradients cannot be had.

    layer_bytes: what the graph of each layer kept alive, in the order of the layers.
    """

    def __init__(self, not_counted: Set[int]) -> None:
        """not_counted: as for measure_saved_bytes."""
        self._not_counted = not_counted
        self.layer_bytes: list[int] = []

    def run_layer(self, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Returns compute(hidden) without a graph, and records the bytes of the graph that it had."""
        output, size = measure_saved_bytes(lambda: compute(hidden), self._not_counted)
        self.layer_bytes.append(size)
        return output.detach().requires_grad_(output.requires_grad)
