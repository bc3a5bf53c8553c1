"""A plan: who holds which stages, what share of the microbatches each gets, the rates, the bottleneck. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agora_protocol.ids import Span

from agora.cost.run_cost import Limit, Machine, RunCost, SpanRate


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
    """stages: the first consecutive ones with the lowest rate. limit: what bounds most of the rate of the first one's
    holders.
    """

    stages: Span
    limit: Limit


@dataclass(frozen=True, slots=True)
class Plan:
    """assignments: in the order of the machines. stage_rates, rate: microbatches per second, of each stage and of the
    slowest.
    """

    assignments: tuple[Assignment, ...]
    stage_rates: tuple[float, ...]
    rate: float
    bottleneck: Bottleneck


IDLE = SpanRate(0.0, "memory")  # the rate of a machine without a span


def plan_of_spans(cost: RunCost, machines: Sequence[Machine], spans: Sequence[Span | None]) -> Plan:
    """Returns the plan in which machine i holds span i of `spans`, with rates, shares and bottleneck.

    None in `spans` means that the machine is idle; one whose memory is too small for its span is idle too. The rate of
    the swarm is that of the stage whose holders are slowest together; 0 if a stage has no holder. Raises ValueError
    unless there is one span for each machine.
    """
    rates = [IDLE if span is None else cost.rate(m, span) for m, span in zip(machines, spans, strict=True)]
    stage_rates = [0.0] * cost.stage_count
    for rate, span in zip(rates, spans, strict=True):
        for stage in span.stages if span is not None else ():
            stage_rates[stage] += rate.microbatches
    shares = _shares(spans, rates, cost.stage_count)
    assignments = tuple(
        _make_assignment(machine, span, rate, share)
        for machine, span, rate, share in zip(machines, spans, rates, shares, strict=True)
    )
    return Plan(assignments, tuple(stage_rates), min(stage_rates), _find_bottleneck(assignments, stage_rates))


def _shares(spans: Sequence[Span | None], rates: Sequence[SpanRate], stage_count: int) -> list[float]:
    totals: dict[Span, float] = {}
    for span, rate in zip(spans, rates, strict=True):
        if span is not None:
            totals[span] = totals.get(span, 0.0) + rate.microbatches
    left = [1.0] * stage_count
    share_of: dict[Span, float] = {}
    for span in sorted(totals, key=lambda span: (-len(span), span.first)):
        unshared = [
            sum(total for other, total in totals.items() if stage in other and other not in share_of)
            for stage in span.stages
        ]
        unassigned = min(left[span.first : span.last + 1])
        share_of[span] = unassigned * totals[span] / min(unshared) if totals[span] > 0 else 0.0
        for stage in span.stages:
            left[stage] -= share_of[span]
    return [
        share_of[span] * rate.microbatches / totals[span] if span is not None and totals[span] > 0 else 0.0
        for span, rate in zip(spans, rates, strict=True)
    ]


def _make_assignment(machine: Machine, span: Span | None, rate: SpanRate, share: float) -> Assignment:
    if span is None or rate.microbatches <= 0:
        return Assignment(machine, None, IDLE)
    return Assignment(machine, span, rate, share)


def _find_bottleneck(assignments: Sequence[Assignment], stage_rates: Sequence[float]) -> Bottleneck:
    lowest = min(stage_rates) * (1 + 1e-9)
    first = next(stage for stage, rate in enumerate(stage_rates) if rate <= lowest)
    last = first
    while last + 1 < len(stage_rates) and stage_rates[last + 1] <= lowest:
        last += 1
    limited: dict[Limit, float] = {"memory": 0.0}
    for assignment in assignments:
        if assignment.span is not None and first in assignment.span:
            limited[assignment.rate.limit] = limited.get(assignment.rate.limit, 0.0) + assignment.rate.microbatches
    return Bottleneck(Span(first, last), max(limited, key=lambda limit: limited[limit]))
