"""What stages cost a machine: floating-point operations, bytes held, bytes sent; and the resulting rates. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from agora_protocol.ids import Span

Activations = Literal["keep", "recompute", "inputs", "layers"]
# From the fewest operations to the most. The last takes the least memory.
ALL_ACTIVATIONS: Final[tuple[Activations, ...]] = ("keep", "recompute", "inputs", "layers")
# How many forward passes of a microbatch the layers compute: in a span without the last stage, and in one with it. With
# "layers" a span without the last stage keeps the graph of its last layer in the second pass: that has no third one.
# With "inputs" it has kept the inputs of all layers; with the last stage, where a backward follows its forward at once,
# that is "layers".
FORWARDS: Final[Mapping[Activations, tuple[int, int]]] = {
    "keep": (1, 1),
    "recompute": (2, 1),
    "inputs": (2, 2),
    "layers": (3, 2),
}
# Where daemons choose which graphs they keep: what part of the memory that is free without them these may fill. Of a
# host's memory less, since other programs use it, too.
GRAPHS_FRACTION_OF_GPU: Final = 0.85
GRAPHS_FRACTION_OF_HOST: Final = 0.5
# In how many steps a machine's kept graphs are counted, from those of all microbatches in flight down to none.
KEPT_PARTS: Final = 8
# What bounds the rate of a machine at a span; memory: the span does not fit, so that its rate is 0.
Limit = Literal["compute", "upload", "download", "memory"]


def graphs_fraction(*, is_gpu: bool) -> float:
    return GRAPHS_FRACTION_OF_GPU if is_gpu else GRAPHS_FRACTION_OF_HOST


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, or one accelerator of it; immutable.

    flops: floating-point operations per second that it reaches on the run's own layers, not those of its data sheet.
    memory: bytes of the device that stages may take.
    host_memory: bytes of host memory for optimizer state; 0 where the device is the CPU, or where none is offered.
    upload, download: bytes per second.
    latency_s: seconds from this machine to any other machine, one way.
    """

    name: str
    flops: float
    memory: float
    host_memory: float = 0.0
    upload: float = math.inf
    download: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs the machine that holds it.

    forward_flops, backward_flops: for each microbatch; backward_flops does not contain recomputed forward passes.
    head_flops: the part of forward_flops after the last layer. last_layer_flops: the part of the last layer.
    frozen_bytes: of weights that never change, in the format in which they are kept.
    trained_bytes: of trained weights, their gradient sums and every copy that must be kept with them.
    version_bytes: of a second version of the weights, needed where graphs are kept while steps are taken.
    optimizer_bytes: of moments and of the moving average, which may be in host memory.
    kept_bytes: of the autograd graph of all layers for one microbatch.
    peak_bytes: in addition to all of the above, the most that a forward and a backward pass take temporarily.
    layer_inputs_bytes, layer_peak_bytes: instead of kept_bytes and peak_bytes where the graph of one layer is kept at a
        time.
    first_input_bytes: the part of layer_inputs_bytes of the first layer.
    state_bytes: what a newcomer fetches before it can begin.
    trained_values: for how many values replicas average the gradients.
    """

    forward_flops: float
    backward_flops: float
    frozen_bytes: float = 0.0
    trained_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    kept_bytes: float = 0.0
    peak_bytes: float = 0.0
    state_bytes: float = 0.0
    head_flops: float = 0.0
    last_layer_flops: float = 0.0
    version_bytes: float = 0.0
    layer_inputs_bytes: float = 0.0
    first_input_bytes: float = 0.0
    layer_peak_bytes: float = 0.0
    trained_values: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The bytes that training a span takes: on the device, and in addition in host memory. Immutable."""

    device: float
    host: float = 0.0

    def fits(self, machine: Machine) -> bool:
        return self.device <= machine.memory and self.host <= machine.host_memory


@dataclass(frozen=True, slots=True)
class SpanRate:
    """microbatches: per second; 0, with the limit "memory", where the span does not fit. in_host: of its optimizer
    state.
    """

    microbatches: float
    limit: Limit
    activations: Activations = "recompute"
    in_host: bool = False


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """One way to train a span. flops: of a microbatch, recomputed forwards included, the mean over all. need: may be
    more than the mode fills. kept: how many microbatches' graphs are kept; the others are as in `activations`.
    """

    activations: Activations
    in_host: bool
    flops: float
    need: MemoryNeed
    kept: int = 0


class RunCost:
    """The costs of all stages of a run, and of what two peers send each other; computes the costs of spans of stages.

    forward_bytes, backward_bytes: of one microbatch's boundary, and of the boundary's gradient.
    tokens: of one microbatch.
    in_flight: how many microbatches a peer holds between forward and backward.
    activations: how all peers keep graphs; with None each peer keeps those of as many microbatches as its memory has
        room for, as daemons do.
    graphs_fraction: the part of the free memory that graphs may take where each peer chooses.
    can_offload: optimizer state may be in host memory.
    has_dropout: then no peer keeps the inputs of layers.
    """

    def __init__(
        self,
        stages: Sequence[StageCost],
        *,
        forward_bytes: float,
        backward_bytes: float,
        tokens: int,
        in_flight: int,
        activations: Activations | None = "recompute",
        can_offload: bool = True,
        graphs_fraction: float = GRAPHS_FRACTION_OF_HOST,
        has_dropout: bool = False,
    ) -> None:
        self.graphs_fraction = graphs_fraction
        self.stages = tuple(stages)
        self.forward_bytes = forward_bytes
        self.backward_bytes = backward_bytes
        self.tokens = tokens
        self.in_flight = in_flight
        self.activations = activations
        self.activation_choices: tuple[Activations, ...] = (activations,) if activations else ALL_ACTIVATIONS
        if has_dropout and activations is None:
            self.activation_choices = tuple(way for way in ALL_ACTIVATIONS if way != "inputs")
        self._offloads = (False, True) if can_offload else (False,)
        self._layer_flops = _prefix_sums(stage.forward_flops - stage.head_flops for stage in self.stages)
        self._flops_once = _prefix_sums(stage.forward_flops + stage.backward_flops for stage in self.stages)
        self._version_bytes = _prefix_sums(stage.version_bytes for stage in self.stages)
        self._layer_inputs_bytes = _prefix_sums(stage.layer_inputs_bytes for stage in self.stages)
        self._weight_bytes = _prefix_sums(s.frozen_bytes + s.trained_bytes for s in self.stages)
        self._optimizer_bytes = _prefix_sums(stage.optimizer_bytes for stage in self.stages)
        self._kept_bytes = _prefix_sums(stage.kept_bytes for stage in self.stages)

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    def flops(self, span: Span, activations: Activations | None = None) -> float:
        """Forward, backward and recomputed forwards. activations: None means the cheapest that peers may choose."""
        # The head is never recomputed.
        chosen, has_last = activations or self.activation_choices[0], self._has_last_stage(span)
        repeated = (FORWARDS[chosen][has_last] - 1) * _sum_over(self._layer_flops, span)
        if chosen == "layers" and not has_last:
            repeated -= self.stages[span.last].last_layer_flops
        return _sum_over(self._flops_once, span) + repeated

    @property
    def work(self) -> tuple[float, ...]:
        # Of each stage when it is held alone, as a multiple of the mean over all stages.
        flops = [self.flops(Span(stage, stage)) for stage in range(self.stage_count)]
        mean = sum(flops) / self.stage_count
        return tuple(amount / mean for amount in flops)

    def upload_bytes(self, span: Span) -> float:
        """Returns how many bytes a holder of `span` sends for each microbatch: a boundary on, a gradient back."""
        return self._boundary_bytes(span, self.forward_bytes, self.backward_bytes)

    def download_bytes(self, span: Span) -> float:
        """Returns how many bytes a holder of `span` receives for each microbatch: a boundary, later a gradient."""
        return self._boundary_bytes(span, self.backward_bytes, self.forward_bytes)

    def memory(self, span: Span, activations: Activations | None = None, *, in_host: bool = False) -> MemoryNeed:
        """With boundaries of all microbatches in flight. activations: None means the least that peers may choose."""
        chosen = activations or self.activation_choices[-1]
        stages = self.stages[span.first : span.last + 1]
        device = _sum_over(self._weight_bytes, span) + self.in_flight * (self.forward_bytes + self.backward_bytes)
        if chosen in ("inputs", "layers"):
            device += self._waiting_bytes(span, chosen) + max(stage.layer_peak_bytes for stage in stages)
        else:
            device += self._autograd_graph_bytes(span, chosen) + max(stage.peak_bytes for stage in stages)
        optimizer = _sum_over(self._optimizer_bytes, span)
        return MemoryNeed(device, optimizer) if in_host else MemoryNeed(device + optimizer)

    def training_modes(self, span: Span) -> Iterator[TrainingMode]:
        """Yields the ways to train `span` that peers may choose: fewest operations first, then state on the device."""
        for kept in self._kept_choices(span):
            for in_host in self._offloads:
                yield self._keeping_mode(span, kept, in_host=in_host)
        for activations in self.activation_choices:
            if self.activations is None and activations == "keep":
                continue
            # Daemons that choose for themselves let graphs fill only a part of the free memory.
            reserve = self._reserve_for(span, activations)
            for in_host in self._offloads:
                need = self.memory(span, activations, in_host=in_host)
                need = MemoryNeed(need.device + reserve, need.host)
                kept = self.in_flight if activations == "keep" else 0
                is_by_layer = self.activations is None and activations == "inputs" and self._has_last_stage(span)
                yield TrainingMode(
                    "layers" if is_by_layer else activations, in_host, self.flops(span, activations), need, kept
                )

    def _kept_choices(self, span: Span) -> list[int]:
        # Where daemons choose, how many graphs are kept of those of all microbatches in flight, from all down to one.
        # As many for each span: arrays of rates have a row for each.
        if self.activations is not None:
            return []
        return [max(1, self.in_flight * part // KEPT_PARTS) for part in range(KEPT_PARTS, 0, -1)]

    def _keeping_mode(self, span: Span, kept: int, *, in_host: bool) -> TrainingMode:
        # With the last stage, a backward follows its forward at once: never more than one graph, which is never given
        # up. In other spans there is room for one more graph, in which the others are computed again.
        graph = _sum_over(self._kept_bytes, span)
        graphs, is_whole = graph, kept == self.in_flight
        if not self._has_last_stage(span):
            graphs = (kept + 1) * graph + _sum_over(self._version_bytes, span)
        need = self.memory(span, "recompute", in_host=in_host)  # with one graph
        need = MemoryNeed(need.device - graph + graphs + self._reserve(graphs), need.host)
        once, again = self.flops(span, "keep"), self.flops(span, "recompute")
        flops = once + (again - once) * (1 - kept / self.in_flight)
        return TrainingMode("keep" if is_whole else "recompute", in_host, flops, need, kept)

    def _reserve(self, graphs_bytes: float) -> float:
        # What must be free beside graphs.
        return graphs_bytes * (1 / self.graphs_fraction - 1) if self.activations is None else 0.0

    def _reserve_for(self, span: Span, activations: Activations) -> float:
        if activations == "layers" or (activations == "inputs" and self._has_last_stage(span)):
            return 0.0
        if activations == "inputs":
            layer = max(stage.layer_peak_bytes for stage in self.stages[span.first : span.last + 1])
            return self._reserve(self._waiting_bytes(span, activations) + layer)
        return self._reserve(self._autograd_graph_bytes(span, activations))

    def _waiting_bytes(self, span: Span, activations: Activations) -> float:
        # Of the inputs of layers, with "inputs" of all microbatches in flight, on weights of which a step makes others.
        inputs = _sum_over(self._layer_inputs_bytes, span)
        if activations != "inputs" or self._has_last_stage(span):
            return inputs
        first = self.stages[span.first].first_input_bytes
        return self.in_flight * (inputs - first) + first + _sum_over(self._version_bytes, span)

    def rate(self, machine: Machine, span: Span) -> SpanRate:
        """Returns the rate of `machine` at `span`, in the first of `training_modes` that fits the machine."""
        # Sending, receiving and computing overlap, since many microbatches are in flight: the longest of them counts.
        mode = next((mode for mode in self.training_modes(span) if mode.need.fits(machine)), None)
        if mode is None:
            return SpanRate(0.0, "memory")
        seconds: dict[Limit, float] = {
            "compute": mode.flops / machine.flops,
            "upload": self.upload_bytes(span) / machine.upload,
            "download": self.download_bytes(span) / machine.download,
        }
        limit = max(seconds, key=lambda name: seconds[name])
        return SpanRate(1.0 / seconds[limit], limit, mode.activations, mode.in_host)

    def _has_last_stage(self, span: Span) -> bool:
        return span.last == self.stage_count - 1

    def _autograd_graph_bytes(self, span: Span, activations: Activations) -> float:
        kept = _sum_over(self._kept_bytes, span)
        # With the last stage, a backward follows its forward at once: never more than one graph.
        if activations == "keep" and not self._has_last_stage(span):
            return self.in_flight * kept + _sum_over(self._version_bytes, span)
        return kept

    def _boundary_bytes(self, span: Span, at_end: float, at_start: float) -> float:
        # Nobody is beyond the run's first and last stage.
        return (at_end if span.last < self.stage_count - 1 else 0.0) + (at_start if span.first > 0 else 0.0)


def _prefix_sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _sum_over(sums: Sequence[float], span: Span) -> float:
    return sums[span.last + 1] - sums[span.first]
