"""Runs a stage's layers so that autograd keeps one layer's graph at a time, or measures the graphs' bytes.

repeat_in_backward and GraphMeasure.run_layer are each a RunLayer, which Stage.forward calls for each of its layers.
torch.utils.checkpoint is not used: its first call imports torch._dynamo, which takes seconds and some 60 MB. Knows:
autograd. Must not know: models, peers.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agora.train.memory import measure_saved_bytes


def repeat_in_backward(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Returns compute(hidden); only `hidden` is kept for the backward, which runs `compute` again.

    Gradients reach `hidden` and the layer's trained parameters, and nothing else that `compute` uses. The second run
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
    """A function of a layer's input, with the random state and the autocast of its first run, so it can be repeated.

    random_states: torch's for the CPU, then that of the CUDA device if the input is on one. autocast_dtype: None if
    autocast was off.
    """

    compute: Callable[[Tensor], Tensor]
    device: torch.device
    random_states: tuple[Tensor, ...]
    autocast_dtype: torch.dtype | None

    @classmethod
    def of(cls, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> _Repeated:
        """Returns `compute` with the present random state and autocast, so that a repetition draws the same."""
        device = hidden.device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        is_cast = torch.is_autocast_enabled(device.type)
        return cls(compute, device, tuple(states), torch.get_autocast_dtype(device.type) if is_cast else None)

    def run_again(self, hidden: Tensor) -> Tensor:
        """Returns compute(hidden) with its graph, computed as the first time; torch's random states are restored."""
        cast = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        is_cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if is_cuda else []), cast, torch.enable_grad():
            torch.set_rng_state(self.random_states[0])
            if is_cuda:
                torch.cuda.set_rng_state(self.random_states[1], self.device)
            return self.compute(hidden)


class _RepeatedLayer(torch.autograd.Function):
    """Autograd function: a layer that keeps only its input; its backward computes the output again, with a graph."""

    @staticmethod
    def forward(context: Any, repeated: _Repeated, hidden: Tensor, *trained: Tensor) -> Tensor:
        """Returns the layer's output.

        The parameters are saved so that autograd raises if they change before backward.
        """
        context.repeated = repeated
        context.save_for_backward(hidden, *trained)
        return repeated.compute(hidden)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients with respect to the input (None if it needs none) and to the parameters."""
        hidden, *trained = context.saved_tensors
        needs_entry = context.needs_input_grad[1]
        entry = hidden.detach().requires_grad_(needs_entry)
        output = context.repeated.run_again(entry)
        found = list(torch.autograd.grad([output], [entry, *trained] if needs_entry else trained, gradients))
        by_entry = found.pop(0) if needs_entry else None
        return None, by_entry, *found


class GraphMeasure:
    """Runs layers and measures their graphs; each graph is dropped before the next layer runs, so no backward follows.

    layer_bytes: how many bytes the graph of each layer kept alive, in the order of the layers.
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
