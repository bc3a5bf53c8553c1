"""What stages cost a machine: operations, bytes held, bytes sent; and how many microbatches a second come of it. Pure.

Knows: sums over the stages of a span. Must not know: model families (cost_of_run.py), devices, peers, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from agora_protocol.ids import Span

from agora.plan.machine import Machine

Activations = Literal["keep", "recompute"]
Limit = Literal["compute", "upload", "download", "memory"]
"""What bounds the rate of a machine at a span; memory: the span does not fit, so that its rate is 0."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs the machine that holds it.

    forward_flops, backward_flops: for each microbatch; the forward is not repeated in the backward's. frozen_bytes: of
    weights that never change, as they are kept. trained_bytes: of trained weights, their gradient sums and every copy
    that must lie beside them. optimizer_bytes: of moments and of the moving average, which may lie in host memory.
    kept_bytes: of the graph of one microbatch between forward and backward. peak_bytes: beyond all of these, the most
    that a forward and backward take for a moment. state_bytes: what a newcomer fetches to begin.
    """

    forward_flops: float
    backward_flops: float
    frozen_bytes: float = 0.0
    trained_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    kept_bytes: float = 0.0
    peak_bytes: float = 0.0
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The bytes that a span takes: on the device, and in host memory beside it."""

    device: float
    host: float = 0.0

    def fits(self, machine: Machine) -> bool:
        """Returns whether `machine` has these bytes."""
        return self.device <= machine.memory and self.host <= machine.host_memory


@dataclass(frozen=True, slots=True)
class Rate:
    """How many microbatches per second a machine does at a span, and what bounds it."""

    microbatches: float
    limit: Limit


class RunCost:
    """The costs of all stages of a run, and of what crosses between two peers.

    forward_bytes, backward_bytes: of one microbatch's boundary, and of its gradient. tokens: of one microbatch.
    in_flight: how many microbatches a peer holds between forward and backward.
    """

    def __init__(
        self,
        stages: Sequence[StageCost],
        *,
        forward_bytes: float,
        backward_bytes: float,
        tokens: int,
        in_flight: int,
        activations: Activations = "recompute",
    ) -> None:
        self.stages = tuple(stages)
        self.forward_bytes = forward_bytes
        self.backward_bytes = backward_bytes
        self.tokens = tokens
        self.in_flight = in_flight
        self.activations = activations
        self._flops = list(accumulate(map(self._stage_flops, range(len(self.stages))), initial=0.0))

    @property
    def stage_count(self) -> int:
        """Returns how many stages the run has."""
        return len(self.stages)

    def flops(self, span: Span) -> float:
        """Returns the operations of one microbatch in the stages of `span`, forward and backward."""
        return self._flops[span.last + 1] - self._flops[span.first]

    @property
    def work(self) -> tuple[float, ...]:
        """Returns the operations of one microbatch in each stage, as a multiple of their mean."""
        mean = self._flops[-1] / self.stage_count
        return tuple(self._stage_flops(stage) / mean for stage in range(self.stage_count))

    def upload_bytes(self, span: Span) -> float:
        """Returns the bytes that a holder of `span` sends for each microbatch: a boundary on, a gradient back."""
        return self._crossing(span, self.forward_bytes, self.backward_bytes)

    def download_bytes(self, span: Span) -> float:
        """Returns the bytes that a holder of `span` receives for each microbatch: a gradient, a boundary."""
        return self._crossing(span, self.backward_bytes, self.forward_bytes)

    def memory(self, span: Span, *, in_host: bool = False) -> MemoryNeed:
        """Returns the bytes that training `span` takes; in_host: optimizer state lies in host memory.

        A span that ends with the model goes backward right after its forward, so it has one graph at a time.
        """
        held = [self.stages[stage] for stage in span.stages]
        optimizer = sum(stage.optimizer_bytes for stage in held)
        kept = sum(stage.kept_bytes for stage in held)
        peak = max(stage.peak_bytes for stage in held)
        graphs = self.in_flight * kept if self.activations == "keep" and span.last < self.stage_count - 1 else kept
        boundaries = self.in_flight * (self.forward_bytes + self.backward_bytes)
        device = sum(stage.frozen_bytes + stage.trained_bytes for stage in held) + graphs + peak + boundaries
        return MemoryNeed(device, optimizer) if in_host else MemoryNeed(device + optimizer)

    def rate(self, machine: Machine, span: Span) -> Rate:
        """Returns the rate of `machine` at `span`: 1 / max(compute, upload, download), 0 where it does not fit.

        Source of the formula: sending, receiving and computing overlap, since many microbatches are on the way.
        """
        if not any(self.memory(span, in_host=in_host).fits(machine) for in_host in (False, True)):
            return Rate(0.0, "memory")
        seconds: dict[Limit, float] = {
            "compute": self.flops(span) / machine.flops,
            "upload": self.upload_bytes(span) / machine.upload,
            "download": self.download_bytes(span) / machine.download,
        }
        limit = max(seconds, key=lambda name: seconds[name])
        return Rate(1.0 / seconds[limit], limit)

    def _stage_flops(self, number: int) -> float:
        """Returns the operations of one microbatch in one stage, with the repeated forward where it is repeated.

        The last stage goes backward right after its forward and repeats nothing.
        """
        stage = self.stages[number]
        repeats = self.activations == "recompute" and number < self.stage_count - 1
        return stage.forward_flops * (2 if repeats else 1) + stage.backward_flops

    def _crossing(self, span: Span, at_end: float, at_start: float) -> float:
        """Returns the bytes for each microbatch in one direction, at the two ends that are not ends of the model."""
        return (at_end if span.last < self.stage_count - 1 else 0.0) + (at_start if span.first > 0 else 0.0)
