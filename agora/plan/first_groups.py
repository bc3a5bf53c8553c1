"""Makes the groups of machines that a search begins from: by rate, by memory, or around holders of all stages. Pure.

Knows: the rates of machines at spans. Must not know: how groups are improved, or which are chosen in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray

from agora.plan.assignment import Plan
from agora.plan.coverage import Coverage
from agora.plan.cuts import ALONE, IDLE_GROUP, Cuts, Groups, rates_in_groups
from agora.plan.span_rates import Rates

Machines: TypeAlias = NDArray[np.bool_]
"""A mask: for each machine, whether it is selected."""


def first_groups(rates: Rates, count: int, holders: Coverage, alone: Machines) -> Iterator[Groups]:
    """Yields three divisions of the machines into `count` groups, each as the group number of every machine.

    holders: few machines that can hold all stages together; in the third division each of them is in a group of its
    own. alone: machines that hold the whole model by themselves; they are in no group.
    """
    weights = _weights(rates, count)
    order = np.argsort(-weights, kind="stable")
    unplaced = np.where(alone, ALONE, IDLE_GROUP)
    yield _deal_out(weights, order, unplaced, count)
    yield np.where(alone, ALONE, _by_memory(rates, np.where(alone, 0.0, weights), count))
    seeds = unplaced.copy()
    for group, machine in enumerate(holders.machines[:count]):
        seeds[machine] = group
    yield _deal_out(weights, order, seeds, count)


def split_groups(rates: Rates, group_of: Groups, cuts: Cuts) -> Iterator[Groups]:
    """Yields divisions with one more group, as the group number of every machine.

    Each group in turn is split into two; and if machines are idle, they become a new group, at each place in turn.
    """
    at_span = rates_in_groups(rates, cuts)[np.arange(len(group_of)), np.maximum(group_of, 0)]
    idle = (at_span <= 0) & (group_of != ALONE)
    count = len(cuts.spans)
    for group in range(count + 1):
        later = group_of + (group_of >= group)
        if idle.any():
            yield np.where(idle, group, later)
        members = np.flatnonzero((group_of == group) & ~idle)
        if len(members) > 1:
            order = np.argsort(-at_span[members], kind="stable")
            halves = _deal_out(at_span[members], order, np.full(len(members), IDLE_GROUP), 2)
            split = later.copy()
            split[members] = group + halves
            yield split


def groups_of_plan(plan: Plan, machines: int) -> tuple[Groups, int] | None:
    """Returns the group number of each of `machines` machines in a plan, and the number of groups.

    Machines that are idle, or that come after those of the plan, are in no group. Returns None if spans of the plan
    overlap, other than those of the whole model, or leave out a stage.
    """
    every_stage = Span(0, len(plan.stage_rates) - 1)
    held = {found.span for found in plan.assignments if found.span is not None}
    spans = sorted(held - {every_stage} or held, key=lambda span: span.first)
    if [stage for span in spans for stage in span.stages] != list(every_stage.stages):
        return None
    numbers: dict[Span | None, int] = {every_stage: ALONE}
    numbers.update((span, number) for number, span in enumerate(spans))
    groups = np.full(machines, IDLE_GROUP)
    for index, found in enumerate(plan.assignments[:machines]):
        groups[index] = numbers.get(found.span, IDLE_GROUP)
    return groups, len(spans)


def _weights(rates: Rates, count: int) -> Rates:
    """Returns each machine's weight: its best rate at a span of the mean length.

    If no such span fits, its best rate at one stage, divided by that length. count: the number of groups.
    """
    length = max(1, round((rates.shape[-1] - 1) / count))
    at_length = np.diagonal(rates, offset=length, axis1=1, axis2=2).max(axis=1)
    at_one = np.diagonal(rates, offset=1, axis1=1, axis2=2).max(axis=1)
    weights: Rates = np.where(at_length > 0, at_length, at_one / length)
    return weights


def _deal_out(weights: Rates, order: Groups, seeds: Groups, count: int) -> Groups:
    """Returns groups by the longest-processing-time rule: in `order`, each machine joins the group of least weight.

    seeds: the group of machines that are placed already, ALONE for those in no group; IDLE_GROUP for those to place.
    """
    group_of = seeds.copy()
    totals = np.bincount(seeds[seeds >= 0], weights[seeds >= 0], minlength=count)
    for machine in order:
        if group_of[machine] == IDLE_GROUP:
            group_of[machine] = group = int(totals.argmin())
            totals[group] += weights[machine]
    return group_of


def _by_memory(rates: Rates, weights: Rates, count: int) -> Groups:
    """Returns groups of equal weight and similar memory: small machines share short spans, large ones long spans."""
    held = (rates > 0).sum(axis=(1, 2))
    order = np.argsort(-held, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    group_of = np.empty(len(weights), dtype=np.int64)
    group_of[order] = np.minimum((before * count / max(weights.sum(), 1e-300)).astype(np.int64), count - 1)
    return group_of
