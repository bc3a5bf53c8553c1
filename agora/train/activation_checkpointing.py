"""Runs a stage's layers so that autograd keeps one layer's graph at a time, or measures the graphs' bytes.

repeat_in_backward and GraphMeasure.run_layer are each a RunLayer, which a StageModule calls for each of its layers.
torch.utils.checkpoint is not used: its first call imports torch._dynamo, which takes seconds and some 60 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agora.train.memory import measure_saved_bytes


def repeat_in_backward(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Returns compute(hidden); keeps only `hidden` for the backward, which runs `compute` again. This is a RunLayer.

    With gradients disabled, nothing is kept. Gradients reach `hidden` and the layer's trained parameters, and nothing
    else that `compute` uses. The second run has the same random numbers and the same autocast. Source: gradient
    checkpointing, arXiv 1604.06174.
    """
    if not torch.is_grad_enabled():
        return compute(hidden)
    repeatable = _RepeatableFunction.record(compute, hidden)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    output: Tensor = _RepeatedLayer.apply(repeatable, hidden, *trained)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True)
class _RepeatableFunction:
    """A function of a layer's input, with the random state and the autocast of its first run, to be run again.

    random_states: torch's for the CPU, then that of the CUDA device if the input is on one. autocast_dtype: None if
    autocast was off.
    """

    compute: Callable[[Tensor], Tensor]
    device: torch.device
    random_states: tuple[Tensor, ...]
    autocast_dtype: torch.dtype | None

    @classmethod
    def record(cls, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> _RepeatableFunction:
        device = hidden.device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        is_cast = torch.is_autocast_enabled(device.type)
        return cls(compute, device, tuple(states), torch.get_autocast_dtype(device.type) if is_cast else None)

    def run_again(self, hidden: Tensor) -> Tensor:
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
    def forward(context: Any, repeatable: _RepeatableFunction, hidden: Tensor, *trained: Tensor) -> Tensor:
        context.repeatable = repeatable
        context.save_for_backward(hidden, *trained)
        return repeatable.compute(hidden)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *trained = context.saved_tensors
        needs_input = context.needs_input_grad[1]
        layer_input = hidden.detach().requires_grad_(needs_input)
        output = context.repeatable.run_again(layer_input)
        inputs = [layer_input, *trained] if needs_input else trained
        computed = list(torch.autograd.grad([output], inputs, gradients))
        input_gradient = computed.pop(0) if needs_input else None
        return None, input_gradient, *computed


class GraphMeasure:
    """Runs layers and measures their graphs; each graph is dropped before the next layer runs, so no backward follows.

    layer_bytes: how many bytes the graph of each layer kept alive, in the order of the layers.
    """

    def __init__(self, not_counted: Set[int]) -> None:
        """not_counted: data pointers of storages whose bytes are not counted, because they are alive anyway."""
        self._not_counted = not_counted
        self.layer_bytes: list[int] = []

    def run_layer(self, layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Runs `compute` with its graph, appends the graph's bytes to layer_bytes, and returns the output without it.

        The output still requires a gradient if it did before. This is a RunLayer.
        """
        output, size = measure_saved_bytes(lambda: compute(hidden), self._not_counted)
        self.layer_bytes.append(size)
        return output.detach().requires_grad_(output.requires_grad)
