"""Runs a stage's layers so that autograd keeps one layer's graph at a time, or measures the graphs' bytes.

Both are a RunLayer, which Stage.forward calls for each of its layers. torch.utils.checkpoint is not used: its first
call imports torch._dynamo, which takes seconds and some 60 MB. Knows: autograd. Must not know: models, peers.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agora.train.memory import measure_saved_bytes


def repeat_in_backward(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Returns compute(hidden); of its graph only `hidden` is kept, and the backward runs `compute` again.

    Gradients reach `hidden` and the layer's trained parameters, and nothing else that `compute` uses. The repetition
    has the same random numbers and the same autocast. Source: gradient checkpointing, arXiv 1604.06174.
    """
    if not torch.is_grad_enabled():
        return compute(hidden)
    repeated = _Repeated.of(compute, hidden)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    output: Tensor = _RepeatedLayer.apply(repeated, hidden, *trained)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A computation with the random state and the autocast that it began with.

    random_states: torch's for the CPU, and that of the device if it is another one.
    """

    compute: Callable[[Tensor], Tensor]
    device: torch.device
    random_states: tuple[Tensor, ...]
    autocast_dtype: torch.dtype | None

    @classmethod
    def of(cls, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> _Repeated:
        """Returns `compute` with what holds now."""
        device = hidden.device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        is_cast = torch.is_autocast_enabled(device.type)
        return cls(compute, device, tuple(states), torch.get_autocast_dtype(device.type) if is_cast else None)

    def run_again(self, hidden: Tensor) -> Tensor:
        """Returns compute(hidden) with its graph; torch's random states are afterwards what they were before."""
        cast = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        is_cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if is_cuda else []), cast, torch.enable_grad():
            torch.set_rng_state(self.random_states[0])
            if is_cuda:
                torch.cuda.set_rng_state(self.random_states[1], self.device)
            return self.compute(hidden)


class _RepeatedLayer(torch.autograd.Function):
    """A layer that keeps its input, and in the backward computes its output again with a graph of its own."""

    @staticmethod
    def forward(context: Any, repeated: _Repeated, hidden: Tensor, *trained: Tensor) -> Tensor:
        """Returns the layer's output. The parameters are saved so that autograd raises if they change meanwhile."""
        context.repeated = repeated
        context.save_for_backward(hidden, *trained)
        return repeated.compute(hidden)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients by the input, None if it needs none, and by the parameters."""
        hidden, *trained = context.saved_tensors
        needs_entry = context.needs_input_grad[1]
        entry = hidden.detach().requires_grad_(needs_entry)
        output = context.repeated.run_again(entry)
        found = list(torch.autograd.grad([output], [entry, *trained] if needs_entry else trained, gradients))
        by_entry = found.pop(0) if needs_entry else None
        return None, by_entry, *found


class GraphMeasure:
    """Runs layers with gradients on and drops each layer's graph before the next one runs. Gradients cannot be had.

    layer_bytes: what the graph of each layer kept alive, in the order of the layers.
    """

    def __init__(self, not_counted: Set[int]) -> None:
        """not_counted: as for measure_saved_bytes."""
        self._not_counted = not_counted
        self.layer_bytes: list[int] = []

    def run_layer(self, layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Returns compute(hidden) without a graph, and records the bytes of the graph that it had."""
        output, size = measure_saved_bytes(lambda: compute(hidden), self._not_counted)
        self.layer_bytes.append(size)
        return output.detach().requires_grad_(output.requires_grad)
