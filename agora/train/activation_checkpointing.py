"""Activation checkpointing: which graphs are kept until their backward, and which layers are computed again in it.

Source: arXiv 1604.06174. torch.utils.checkpoint is not used: its first call imports torch._dynamo, which takes seconds
and some 60 MB.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from agora.cost.run_cost import graphs_fraction
from agora.train import memory

MEMORY_READING_LIFETIME_S = 1.0  # for which a measurement of the available memory is used
# After memory has not sufficed, at most this part of the graphs that were kept then; with each one that is given up for
# it, the bound rises by this part of one.
SHORTAGE_FRACTION: Final = 0.75
RISE_FRACTION: Final = 1 / 8


class Kept(enum.Enum):
    """What a forward keeps for a backward that comes later, beside its entry."""

    NOTHING = enum.auto()
    INPUTS = enum.auto()  # of each layer, but that of the first, which follows from the entry
    GRAPH = enum.auto()


class GraphBudget:
    """Which graphs are kept: with "keep" all, with "recompute" none, with "auto" those for which memory suffices.

    With "auto", graphs fill graphs_fraction of the memory that would be available without them, and leave room for one
    more, in which a second forward may keep all its layers. Where not even one fits, the inputs of the layers are kept,
    and there is room for one layer's graph.
    """

    def __init__(self, activations: str, device: torch.device) -> None:
        self._activations = activations
        self._device = device
        self._fraction = graphs_fraction(is_gpu=device.type == "cuda")
        self._limit_bytes, self._measured_at = 0.0, -MEMORY_READING_LIFETIME_S
        self._most_bytes = math.inf  # after a shortage
        # With "auto": of one microbatch, by the stage that it entered, once measured: of its graph, of the inputs of
        # its layers, and of a second forward that keeps these and one layer's graph.
        self.bytes_by_entry: dict[int, int] = {}
        self._inputs_by_entry: dict[int, int] = {}
        self._layer_by_entry: dict[int, int] = {}

    def must_measure(self, entry_stage: int) -> bool:
        return self._activations == "auto" and entry_stage not in self.bytes_by_entry

    def record_measured(
        self, entry_stage: int, graph_bytes: int, inputs_bytes: int = 0, layer_bytes: int | None = None
    ) -> None:
        """inputs_bytes: of all layers but the first; 0: they cannot be kept. layer_bytes: of the largest layer's graph;
        None: that is the whole one.
        """
        self.bytes_by_entry[entry_stage] = graph_bytes
        self._inputs_by_entry[entry_stage] = inputs_bytes
        self._layer_by_entry[entry_stage] = graph_bytes if layer_bytes is None else inputs_bytes + layer_bytes

    def record_shortage(self, kept_bytes: int) -> None:
        """Call it when memory has not sufficed. kept_bytes: of the graphs that were kept then."""
        if kept_bytes:
            self._most_bytes = min(self._most_bytes, SHORTAGE_FRACTION * kept_bytes)
        self._measured_at = -MEMORY_READING_LIFETIME_S

    def keeps_one(self, entry_stage: int, kept_bytes: int = 0) -> bool:
        """Returns whether to keep the graph of a forward whose backward follows immediately."""
        if self._activations != "auto":
            return self._activations == "keep"
        return kept_bytes + self.bytes_by_entry[entry_stage] <= self._limit(kept_bytes)

    def choose(self, entry_stage: int, kept_bytes: int, version_bytes: int) -> Kept:
        """Returns what to keep of a forward whose backward comes later.

        kept_bytes: that all others keep. version_bytes: of second versions of the weights that may become necessary.
        """
        if self._activations != "auto":
            return Kept.GRAPH if self._activations == "keep" else Kept.NOTHING
        limit = self._limit(kept_bytes)
        # A second forward that keeps the graphs of all its layers costs no more than one of each layer in turn.
        kept = Kept.GRAPH if self.bytes_by_entry[entry_stage] <= limit else Kept.INPUTS
        own_bytes = self.bytes_of(entry_stage, kept)
        wanted = kept_bytes + own_bytes
        if wanted > self._most_bytes:
            self._most_bytes += RISE_FRACTION * own_bytes
            return Kept.NOTHING
        fits = wanted + self._spare_bytes(limit) + version_bytes <= limit
        return kept if fits and own_bytes else Kept.NOTHING

    def bytes_of(self, entry_stage: int, kept: Kept) -> int:
        """Returns the bytes that a microbatch keeps, as measured; 0 before it is."""
        sizes = {Kept.GRAPH: self.bytes_by_entry, Kept.INPUTS: self._inputs_by_entry}
        return sizes[kept].get(entry_stage, 0) if kept in sizes else 0

    def excess_bytes(self, kept_bytes: int) -> float:
        """Returns how many bytes of the kept graphs no longer fit, since others have taken memory; 0 if all fit."""
        if self._activations != "auto" or not kept_bytes:
            return 0.0
        limit = self._limit(kept_bytes)
        return max(0.0, kept_bytes + self._spare_bytes(limit) - limit)

    def _spare_bytes(self, limit: float) -> int:
        # Of a second forward: of all its layers at once, where that fits.
        sizes = self.bytes_by_entry.items()
        return max(size if size <= limit else self._layer_by_entry[entry] for entry, size in sizes)

    def _limit(self, kept_bytes: int) -> float:
        now = time.monotonic()
        if now - self._measured_at >= MEMORY_READING_LIFETIME_S:
            # Without the graphs that are kept: what they leave changes with each of them.
            free = memory.available_bytes(self._device) + kept_bytes
            self._limit_bytes, self._measured_at = self._fraction * free, now
        return self._limit_bytes


def checkpoint(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """A RunLayer: returns compute(hidden); keeps only `hidden` for the backward, which runs `compute` again.

    Gradients reach `hidden` and the layer's trained parameters, and nothing else that `compute` uses. The second run
    has the same random numbers and the same autocast.
    """
    return checkpoint_chunks(layer, [(compute, hidden)])


def checkpoint_chunks(layer: nn.Module, chunks: Sequence[tuple[Callable[[Tensor], Tensor], Tensor]]) -> Tensor:
    """As `checkpoint` of each chunk, one after the other: returns their results as one tensor, along dimension 0.

    The gradients of several chunks by a parameter are summed in float32, and rounded once to the parameter's dtype.
    """
    if not torch.is_grad_enabled():
        return _joined([compute(hidden) for compute, hidden in chunks])
    recorded = [_RecordedFunction.record(compute, hidden) for compute, hidden in chunks]
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    hiddens = [hidden for _, hidden in chunks]
    output: Tensor = _CheckpointedChunks.apply(recorded, None, *hiddens, *trained)  # type: ignore[no-untyped-call]
    return output


def replay(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor, output: Tensor) -> Tensor:
    """As `checkpoint`, of a layer without random numbers whose output for `hidden` is known: it runs in the backward
    alone.
    """
    recorded = [_RecordedFunction.record(compute, hidden)]
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    result: Tensor = _CheckpointedChunks.apply(recorded, output, hidden, *trained)  # type: ignore[no-untyped-call]
    return result


def _joined(outputs: list[Tensor]) -> Tensor:
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True, slots=True)
class _RecordedFunction:
    # A function of a layer's input, with the random state and the autocast of its first run, to be run again.

    compute: Callable[[Tensor], Tensor]
    device: torch.device
    random_states: tuple[Tensor, ...]  # of the CPU, then that of the CUDA device if the input is on one
    autocast_dtype: torch.dtype | None  # None: autocast was off

    @classmethod
    def record(cls, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> _RecordedFunction:
        device = hidden.device
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        is_cast = torch.is_autocast_enabled(device.type)
        return cls(compute, device, tuple(states), torch.get_autocast_dtype(device.type) if is_cast else None)

    def recompute(self, hidden: Tensor) -> Tensor:
        cast = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        is_cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if is_cuda else []), cast, torch.enable_grad():
            torch.set_rng_state(self.random_states[0])
            if is_cuda:
                torch.cuda.set_rng_state(self.random_states[1], self.device)
            return self.compute(hidden)


class _CheckpointedChunks(torch.autograd.Function):
    # A layer that keeps only its inputs; its backward computes the outputs again, with one chunk's graph at a time.

    @staticmethod
    def forward(context: Any, recorded: list[_RecordedFunction], known: Tensor | None, *tensors: Tensor) -> Tensor:
        # known: the output of the only chunk, if it need not be computed.
        context.recorded = recorded
        # The parameters are saved, so that autograd raises if they change before the backward.
        context.save_for_backward(*tensors)
        if known is not None:
            context.sizes = [len(known)]
            return known.detach()
        outputs = [function.compute(hidden) for function, hidden in zip(recorded, tensors, strict=False)]
        context.sizes = [len(output) for output in outputs]
        return _joined(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        count = len(context.recorded)
        hiddens, trained = context.saved_tensors[:count], context.saved_tensors[count:]
        parts = torch.split(gradient, context.sizes) if count > 1 else (gradient,)
        of_hiddens: list[Tensor | None] = []
        sums: list[Tensor] = []
        chunks = zip(context.recorded, hiddens, context.needs_input_grad[2 : 2 + count], parts, strict=True)
        for function, hidden, needs_input, part in chunks:
            chunk = hidden.detach().requires_grad_(needs_input)
            output = function.recompute(chunk)
            computed = list(torch.autograd.grad([output], [chunk, *trained] if needs_input else trained, [part]))
            of_hiddens.append(computed.pop(0) if needs_input else None)
            if sums:
                for total in sums:
                    total += computed.pop(0)
            else:
                sums = [found.float() for found in computed] if count > 1 else computed
            del output, computed  # or they would be in memory together with those of the next chunk
        rounded = (total.to(tensor.dtype) for total, tensor in zip(sums, trained, strict=True))
        return None, None, *of_hiddens, *rounded


class GraphMeasure:
    """Runs layers and measures their graphs, each of which is dropped before the next layer runs."""

    def __init__(self, not_counted: Set[int]) -> None:
        """not_counted: data pointers of storages whose bytes are not counted, because they are alive anyway."""
        self._not_counted = not_counted
        self.layer_bytes: list[int] = []  # that the graph of each layer kept alive
        self.output_bytes: list[int] = []  # of each layer

    def run_layer(self, layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """A RunLayer: runs `compute` with its graph, and returns the output without it."""
        output, size = measure_saved_bytes(lambda: compute(hidden), self._not_counted)
        self.layer_bytes.append(size)
        self.output_bytes.append(output.nbytes)
        return output.detach().requires_grad_(output.requires_grad)


def measure_saved_bytes(forward: Callable[[], Tensor], not_counted: Set[int]) -> tuple[Tensor, int]:
    """Calls `forward` with gradients enabled. Returns its result, with its graph, and how many bytes the graph keeps.

    Of each tensor that autograd saves, the whole storage counts, and each storage once. not_counted: data pointers of
    storages that are alive anyway (the weights).
    """
    sizes: dict[int, int] = {}

    def record_size(saved: Tensor) -> Tensor:
        # A node that holds its own output together with the output's history would never be freed.
        storage = saved.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return saved.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(record_size, lambda saved: saved):
        result = forward()
    return result, sum(size for pointer, size in sizes.items() if pointer not in not_counted)
