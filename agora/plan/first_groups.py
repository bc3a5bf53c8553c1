"""Groups to begin a search from: machines dealt out by rate, by memory, or around holders of all stages. Pure.

Knows: the rates of machines at spans. Must not know: how groups are improved, or which is chosen in the end.
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
"""Of each machine, whether it is meant."""


def first_groups(rates: Rates, count: int, holders: Coverage, alone: Machines) -> Iterator[Groups]:
    """Yields groups to begin from, `count` of them, each with the group of every machine.

    holders: machines that can hold all stages together, as few as possible; they are always in groups. alone: whether
    each machine holds the whole model beside the groups.
    """
    weights = _weights(rates, count)
    order = np.argsort(-weights, kind="stable")
    unplaced = np.where(alone, ALONE, IDLE_GROUP)
    yield _dealt(weights, order, unplaced, count)
    yield np.where(alone, ALONE, _by_memory(rates, np.where(alone, 0.0, weights), count))
    seeds = unplaced.copy()
    for group, machine in enumerate(holders.machines[:count]):
        seeds[machine] = group
    yield _dealt(weights, order, seeds, count)


def split_groups(rates: Rates, group_of: Groups, cuts: Cuts) -> Iterator[Groups]:
    """Yields groupings with one group more: one group dealt into two, or all idle machines together at some place."""
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
            halves = _dealt(at_span[members], order, np.full(len(members), IDLE_GROUP), 2)
            split = later.copy()
            split[members] = group + halves
            yield split


def groups_of_plan(plan: Plan, machines: int) -> tuple[Groups, int] | None:
    """Returns the groups of a plan for the first ones of `machines`, and how many they are; None if spans overlap.

    Machines that are idle, or that the plan does not know, are in no group.
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
    """Returns what each machine is worth: its best rate at a span of the mean length, or at one stage if none fits."""
    length = max(1, round((rates.shape[-1] - 1) / count))
    at_length = np.diagonal(rates, offset=length, axis1=1, axis2=2).max(axis=1)
    at_one = np.diagonal(rates, offset=1, axis1=1, axis2=2).max(axis=1)
    weights: Rates = np.where(at_length > 0, at_length, at_one / length)
    return weights


def _dealt(weights: Rates, order: Groups, seeds: Groups, count: int) -> Groups:
    """Returns groups by longest processing time: in `order`, each machine goes to the group that weighs least so far.

    seeds: the group of machines that are placed already, or that stay beside the groups; IDLE_GROUP for the others.
    """
    group_of = seeds.copy()
    totals = np.bincount(seeds[seeds >= 0], weights[seeds >= 0], minlength=count)
    for machine in order:
        if group_of[machine] == IDLE_GROUP:
            group_of[machine] = group = int(totals.argmin())
            totals[group] += weights[machine]
    return group_of


def _by_memory(rates: Rates, weights: Rates, count: int) -> Groups:
    """Returns groups of equal weight with like memory: small machines can share short spans, large ones long."""
    held = (rates > 0).sum(axis=(1, 2))
    order = np.argsort(-held, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    group_of = np.empty(len(weights), dtype=np.int64)
    group_of[order] = np.minimum((before * count / max(weights.sum(), 1e-300)).astype(np.int64), count - 1)
    return group_of
