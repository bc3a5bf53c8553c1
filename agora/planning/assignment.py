"""A plan: which machine holds which stages, what share of their microbatches it gets, and the resulting rates. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from agora_protocol.ids import Span

from agora.cost.run_cost import Limit, Machine, SpanRate


@dataclass(frozen=True, slots=True)
class Assignment:
    """One machine's place in a plan; immutable.

    span: the stages that the machine holds, None if it stays idle. rate: microbatches per second that the machine could
    do at its span, and what bounds that number. share: the part of its stages' microbatches that it gets, 0 to 1. An
    idle machine has the rate 0 and the share 0.
    """

    machine: Machine
    span: Span | None
    rate: SpanRate
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The slowest stages of a plan, and what limits them. Immutable.

    stages: the first consecutive ones with the plan's lowest rate. limit: what bounds most of the rate of the machines
    that hold the first of these stages.
    """

    stages: Span
    limit: Limit


@dataclass(frozen=True, slots=True)
class Plan:
    """Which machine holds which stages. Immutable.

    assignments: one for each machine, in the order in which the machines were given. stage_rates: microbatches per
    second of each stage's holders together. rate: microbatches per second of the whole swarm, the least of stage_rates.
    """

    assignments: tuple[Assignment, ...]
    stage_rates: tuple[float, ...]
    rate: float
    bottleneck: Bottleneck
