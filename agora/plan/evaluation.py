"""Evaluates chosen spans: computes rates, shares of the microbatches and the bottleneck, as a plan. Pure.

Knows: the cost model and the fields of a plan. Must not know: how the spans were chosen; the benchmark evaluates other
planners' spans with the same function.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from agora_protocol.ids import Span

from agora.plan.assignment import Assignment, Bottleneck, Plan
from agora.plan.cost import Limit, RunCost, SpanRate
from agora.plan.machine import Machine

IDLE = SpanRate(0.0, "memory")
"""The rate of a machine without a span."""


def plan_of_spans(cost: RunCost, machines: Sequence[Machine], spans: Sequence[Span | None]) -> Plan:
    """Returns the plan in which machine i holds span i of `spans`; None means that it is idle.

    A machine whose memory its span does not fit is idle too. The rate of the swarm is that of the stage whose holders
    are slowest together.
    """
    rates = [IDLE if span is None else cost.rate(m, span) for m, span in zip(machines, spans, strict=True)]
    stage_rates = [0.0] * cost.stage_count
    for rate, span in zip(rates, spans, strict=True):
        for stage in span.stages if span is not None else ():
            stage_rates[stage] += rate.microbatches
    shares = _shares(spans, rates, cost.stage_count)
    assignments = tuple(
        _assignment(machine, span, rate, share)
        for machine, span, rate, share in zip(machines, spans, rates, shares, strict=True)
    )
    return Plan(assignments, tuple(stage_rates), min(stage_rates), _bottleneck(assignments, stage_rates))


def integer_shares(rates: Sequence[float], microbatches: int) -> list[int]:
    """Returns how many of `microbatches` each replica gets, so that the last one is done as early as possible.

    rates: microbatches per second of each replica; one with 0 gets none. Each microbatch in turn goes to the replica
    that would finish it first, which is optimal. Raises ValueError if there are microbatches and no rate is above 0.
    """
    shares = [0] * len(rates)
    ends = [(1.0 / rate, replica) for replica, rate in enumerate(rates) if rate > 0]
    if microbatches and not ends:
        raise ValueError("no replica has a rate above 0")
    heapq.heapify(ends)
    for _ in range(microbatches):
        _, replica = ends[0]
        shares[replica] += 1
        heapq.heapreplace(ends, ((shares[replica] + 1) / rates[replica], replica))
    return shares


def _shares(spans: Sequence[Span | None], rates: Sequence[SpanRate], stage_count: int) -> list[float]:
    """Returns each machine's share of the microbatches, 0 to 1, so that the shares of each stage's holders add up to 1.

    Holders of longer spans come first: each gets its rate divided by the rate of the slowest stage of its span. What
    they leave is divided by rate among the others. Exact if of any two overlapping spans one contains the other.
    """
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
        most = min(left[span.first : span.last + 1])
        share_of[span] = most * totals[span] / min(unshared) if totals[span] > 0 else 0.0
        for stage in span.stages:
            left[stage] -= share_of[span]
    return [
        share_of[span] * rate.microbatches / totals[span] if span is not None and totals[span] > 0 else 0.0
        for span, rate in zip(spans, rates, strict=True)
    ]


def _assignment(machine: Machine, span: Span | None, rate: SpanRate, share: float) -> Assignment:
    """Returns the machine's assignment: idle without a span or with rate 0."""
    if span is None or rate.microbatches <= 0:
        return Assignment(machine, None, IDLE)
    return Assignment(machine, span, rate, share)


def _bottleneck(assignments: Sequence[Assignment], stage_rates: Sequence[float]) -> Bottleneck:
    """Returns the first consecutive stages with the lowest rate, and what limits most of the rate of their holders."""
    lowest = min(stage_rates) * (1 + 1e-9)
    first = next(stage for stage, rate in enumerate(stage_rates) if rate <= lowest)
    last = first
    while last + 1 < len(stage_rates) and stage_rates[last + 1] <= lowest:
        last += 1
    limited: dict[Limit, float] = {"memory": 0.0}
    for found in assignments:
        if found.span is not None and first in found.span:
            limited[found.rate.limit] = limited.get(found.rate.limit, 0.0) + found.rate.microbatches
    return Bottleneck(Span(first, last), max(limited, key=lambda limit: limited[limit]))
