"""The groups that a search begins from: by rate, by memory, or around the fewest holders of all stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from agora_protocol.ids import Span
from numpy.typing import NDArray

from agora.planning.local_search import IDLE_GROUP, WHOLE_MODEL, Cuts, Groups, rates_in_groups
from agora.planning.plan import Plan
from agora.planning.span_rates import Rates

# Maximum number of sets of machines that are extended in parallel. With few kinds of machines no set is left out; then
# the result is exact.
MAX_CANDIDATES: Final = 32

# How far a machine's memory goes: for each first stage, the stage after the last one that it can hold from there.
#
# Machines with the same reach are interchangeable: they are of one kind.
Reach: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Machines, by index, in the order of the adjacent spans that they can hold from stage 0 on. Immutable.

    ends[i]: the stage after the span of machine machines[i]; its span begins where the one before ends.
    """

    machines: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def reached(self) -> int:
        return self.ends[-1] if self.ends else 0


def fewest_holders(rates: Rates) -> Coverage:
    """Returns a coverage of all stages by the fewest machines found; if that is impossible, of the most stages found.

    rates: as span_rates returns them; a rate above 0 says that the span fits. A beam search: machines are added one by
    one to at most MAX_CANDIDATES sets. Machines with the same reach are interchangeable. Of two orders of the same
    machines only the one that reaches further matters, because a machine whose span begins later never has to end it
    earlier.
    """
    stages = rates.shape[-1] - 1
    reaches = [tuple(reach) for reach in ((rates > 0).sum(axis=2) + np.arange(stages + 1)).tolist()]
    candidates: dict[tuple[Reach, ...], Coverage] = {(): Coverage()}
    best = Coverage()
    while best.reached < stages and candidates:
        candidates = _extend_by_one(candidates, reaches)
        best = max([best, *candidates.values()], key=lambda coverage: coverage.reached)
    return best


def _extend_by_one(
    candidates: dict[tuple[Reach, ...], Coverage], reaches: Sequence[Reach]
) -> dict[tuple[Reach, ...], Coverage]:
    longer: dict[tuple[Reach, ...], Coverage] = {}
    for kinds, coverage in candidates.items():
        for reach, machine in _unused_kinds(coverage, reaches).items():
            end = reach[coverage.reached]
            key = tuple(sorted((*kinds, reach)))
            if end > coverage.reached and (key not in longer or end > longer[key].reached):
                longer[key] = Coverage((*coverage.machines, machine), (*coverage.ends, end))
    kept = sorted(longer.items(), key=lambda item: -item[1].reached)[:MAX_CANDIDATES]
    return dict(kept)


def _unused_kinds(coverage: Coverage, reaches: Sequence[Reach]) -> dict[Reach, int]:
    used = set(coverage.machines)
    unused: dict[Reach, int] = {}
    for machine, reach in enumerate(reaches):
        if machine not in used:
            unused.setdefault(reach, machine)
    return unused


MachineMask: TypeAlias = NDArray[np.bool_]  # A mask: for each machine, whether it is selected


def initial_groups(rates: Rates, group_count: int, holders: Coverage, alone: MachineMask) -> Iterator[Groups]:
    """Yields three divisions of the machines into `group_count` groups, each as the group number of every machine.

    The machines are divided by rate, by memory, and by rate around `holders`: a small set of machines that can hold all
    stages together. Each of the first `group_count` of these begins a group of its own. alone: machines that are
    WHOLE_MODEL in all three.
    """
    weights = _weights(rates, group_count)
    order = np.argsort(-weights, kind="stable")
    unplaced = np.where(alone, WHOLE_MODEL, IDLE_GROUP)
    yield _deal_out(weights, order, unplaced, group_count)
    yield np.where(alone, WHOLE_MODEL, _by_memory(rates, np.where(alone, 0.0, weights), group_count))
    seeds = unplaced.copy()
    for group, machine in enumerate(holders.machines[:group_count]):
        seeds[machine] = group
    yield _deal_out(weights, order, seeds, group_count)


def split_groups(rates: Rates, group_of: Groups, cuts: Cuts) -> Iterator[Groups]:
    """Yields divisions with one more group than `cuts`, each as the group number of every machine.

    group_of: the groups at present, whose spans are those of `cuts`. Unused machines are idle or cannot hold their
    group's span. If there are any, one division makes all of them the new group before group 0, another makes them the
    one before group 1, and so on, the last one after all groups. Among these divisions are those that split one group
    of two or more used machines into two of about equal rate.
    """
    at_span = rates_in_groups(rates, cuts)[np.arange(len(group_of)), np.maximum(group_of, 0)]
    idle = (at_span <= 0) & (group_of != WHOLE_MODEL)
    group_count = len(cuts.spans)
    for group in range(group_count + 1):
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

    Machines with the same span are one group. Those with the whole model are WHOLE_MODEL, or group 0 if no other span
    is held. A machine that is idle, or comes after those of the plan, has IDLE_GROUP. Returns None if the groups' spans
    overlap or leave out a stage.
    """
    every_stage = Span(0, len(plan.stage_rates) - 1)
    held = {assignment.span for assignment in plan.assignments if assignment.span is not None}
    spans = sorted(held - {every_stage} or held, key=lambda span: span.first)
    if [stage for span in spans for stage in span.stages] != list(every_stage.stages):
        return None
    numbers: dict[Span | None, int] = {every_stage: WHOLE_MODEL}
    numbers.update((span, number) for number, span in enumerate(spans))
    groups = np.full(machines, IDLE_GROUP)
    for index, assignment in enumerate(plan.assignments[:machines]):
        groups[index] = numbers.get(assignment.span, IDLE_GROUP)
    return groups, len(spans)


def _weights(rates: Rates, group_count: int) -> Rates:
    length = max(1, round((rates.shape[-1] - 1) / group_count))
    at_length = np.diagonal(rates, offset=length, axis1=1, axis2=2).max(axis=1)
    at_one = np.diagonal(rates, offset=1, axis1=1, axis2=2).max(axis=1)
    weights: Rates = np.where(at_length > 0, at_length, at_one / length)
    return weights


def _deal_out(weights: Rates, order: Groups, seeds: Groups, group_count: int) -> Groups:
    group_of = seeds.copy()
    totals = np.bincount(seeds[seeds >= 0], weights[seeds >= 0], minlength=group_count)
    for machine in order:
        if group_of[machine] == IDLE_GROUP:
            group_of[machine] = group = int(totals.argmin())
            totals[group] += weights[machine]
    return group_of


def _by_memory(rates: Rates, weights: Rates, group_count: int) -> Groups:
    held = (rates > 0).sum(axis=(1, 2))
    order = np.argsort(-held, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    group_of = np.empty(len(weights), dtype=np.int64)
    group_of[order] = np.minimum((before * group_count / max(weights.sum(), 1e-300)).astype(np.int64), group_count - 1)
    return group_of
