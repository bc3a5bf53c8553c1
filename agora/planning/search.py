"""Finds the best plan for given machines, says what limits it, and what one more machine would add. Deterministic.

1. The fewest machines that can hold the model are the least number of groups (`initial_groups.py`).
2. For each number of groups the machines are divided, cut into spans exactly, and exchanged until no exchange helps
   (`local_search.py`).
3. The best groupings, of a few numbers of groups, are changed at random and improved again, within a budget.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from agora_protocol.errors import InputError, OutOfMemory
from agora_protocol.ids import Span

from agora.cost.run_cost import Limit, Machine, RunCost
from agora.planning.initial_groups import Coverage, fewest_holders, groups_of_plan, initial_groups, split_groups
from agora.planning.local_search import (
    IDLE_GROUP,
    WHOLE_MODEL,
    Grouping,
    assign_idle,
    best_cuts,
    improve,
    perturb,
    random_groups,
)
from agora.planning.plan import Plan, plan_of_spans
from agora.planning.span_rates import Rates, rate_upper_bound, span_rates

COUNTS_TRIED_ONE_BY_ONE: Final = 8  # the first numbers of groups are tried one by one
# Factor from one tried number of groups to the next, after the first ones: neighbours differ little.
COUNT_GROWTH: Final = 1.3
PROMISING: Final = 3  # number of best groupings that are searched further
GOOD_ENOUGH: Final = 0.9995  # the search ends when a plan reaches this part of the upper bound
# Upper bound on machines x stages^2 x random changes of one grouping: it limits the time for a swarm of any size.
SEARCH_WORK: Final = 24_000_000
MIN_PERTURBATIONS: Final = 10
MAX_PERTURBATIONS: Final = 150  # bounds on the number of random changes of one grouping, whatever SEARCH_WORK allows
# The probability that a random change starts from entirely random groups; in small swarms these reach groupings that
# exchanges do not.
RANDOM_RESTARTS: Final = 0.5


def make_plan(cost: RunCost, machines: Sequence[Machine], rng: random.Random, *, start: Plan | None = None) -> Plan:
    """The fastest plan found; the best one may be missed. start: a plan for the first ones of `machines`, from whose
    groups the search also begins. Raises OutOfMemory, or InputError without machines.
    """
    if not machines:
        raise InputError("A plan needs machines, and there is none; name at least one.")
    rates = span_rates(cost, machines)
    holders = fewest_holders(rates)
    if holders.reached < cost.stage_count:
        raise OutOfMemory(_explain_lack(cost, machines, holders))
    best = _best_grouping(rates, holders, rate_upper_bound(cost, machines) * GOOD_ENOUGH, rng, start)
    if best is None:
        raise OutOfMemory("The machines cannot hold the model in groups of one span each; add one with more memory.")
    best = assign_idle(rates, best)
    spans = {WHOLE_MODEL: Span(0, cost.stage_count - 1), IDLE_GROUP: None} | dict(enumerate(best.cuts.spans))
    return plan_of_spans(cost, machines, [spans[group] for group in best.group_of.tolist()])


def _best_grouping(
    rates: Rates, holders: Coverage, good_enough: float, rng: random.Random, start: Plan | None
) -> Grouping | None:
    best_of_count: dict[int, Grouping] = {}
    for grouping in _from_plan(rates, start):
        best_of_count[grouping.group_count] = grouping
    for group_count in _group_counts(len(holders.machines), min(len(rates), rates.shape[-1] - 1)):
        tried = [best_of_count.get(group_count), *_starting_groupings(rates, group_count, holders)]
        if group_count - 1 in best_of_count:
            tried.append(_best_split(rates, best_of_count[group_count - 1]))
        best = max((grouping for grouping in tried if grouping is not None), key=_preference, default=None)
        if best is not None:
            best_of_count[group_count] = best
            if best.rate >= good_enough:
                break
    finalists = sorted(best_of_count.values(), key=_preference, reverse=True)[:PROMISING]
    return max(
        (_search_from(rates, grouping, good_enough, rng) for grouping in finalists), key=_preference, default=None
    )


def _starting_groupings(rates: Rates, group_count: int, holders: Coverage) -> Iterator[Grouping | None]:
    alone = rates[:, 0, -1] > 0
    for groups in initial_groups(rates, group_count, holders, np.zeros_like(alone)):
        yield improve(rates, groups, group_count)
    if group_count > 1 and alone.any() and not alone.all():
        others = fewest_holders(np.where(alone[:, None, None], 0.0, rates))
        for groups in initial_groups(rates, group_count, others, alone):
            yield improve(rates, groups, group_count)


def _preference(grouping: Grouping) -> tuple[float, int]:
    return grouping.rate, -grouping.group_count


def _best_split(rates: Rates, grouping: Grouping) -> Grouping | None:
    group_count = grouping.group_count + 1
    max_candidates = max(MIN_PERTURBATIONS, SEARCH_WORK // (10 * _count_additions(rates)))
    candidates = list(islice(split_groups(rates, grouping.group_of, grouping.cuts), max_candidates))
    cut_rates = [(cuts.rate if (cuts := best_cuts(rates, groups, group_count)) else 0.0) for groups in candidates]
    promising = sorted(range(len(candidates)), key=lambda index: -cut_rates[index])[:PROMISING]
    tried = [improve(rates, candidates[index], group_count) for index in promising]
    return max((improved for improved in tried if improved is not None), key=_preference, default=None)


def _from_plan(rates: Rates, start: Plan | None) -> list[Grouping]:
    groups = groups_of_plan(start, len(rates)) if start is not None else None
    grouping = improve(rates, *groups) if groups is not None else None
    return [grouping] if grouping is not None else []


def _group_counts(fewest: int, most: int) -> Iterator[int]:
    count = fewest
    while count < most:
        yield count
        count = max(count + 1, int(count * COUNT_GROWTH) if count >= fewest + COUNTS_TRIED_ONE_BY_ONE else 0)
    yield most


def _search_from(rates: Rates, grouping: Grouping, good_enough: float, rng: random.Random) -> Grouping:
    # Ends early at the rate `good_enough`, and otherwise after the changes that SEARCH_WORK allows.
    best = current = grouping
    for _ in range(max(MIN_PERTURBATIONS, min(MAX_PERTURBATIONS, SEARCH_WORK // _count_additions(rates)))):
        if best.rate >= good_enough:
            break
        restarts = rng.random() < RANDOM_RESTARTS
        groups = random_groups(rates, grouping.group_count, rng) if restarts else perturb(rates, current, rng)
        improved = improve(rates, groups, grouping.group_count)
        if improved is not None and improved.rate >= current.rate:
            current = improved
            best = improved if improved.rate > best.rate else best
    return best


def _count_additions(rates: Rates) -> int:
    machines, begins, ends = rates.shape
    return int(machines * begins * ends)


def _explain_lack(cost: RunCost, machines: Sequence[Machine], holders: Coverage) -> str:
    rest = Span(holders.reached, cost.stage_count - 1)
    lacking = cost.memory(rest).device / 1e9
    together = sum(machine.memory for machine in machines) / 1e9
    return (
        f"The machines cannot hold the model: of {cost.stage_count} stages {holders.reached} fit into their "
        f"{together:.1f} GB together, and the others need {lacking:.1f} GB more; add machines with at least that."
    )


# What helps against each limit, as the end of a sentence.
REMEDIES: Final[Mapping[Limit, str]] = {
    "compute": "one more machine, or a faster one, helps",
    "upload": "machines with more upload, or a boundary codec with fewer bytes, help",
    "download": "machines with more download, or a boundary codec with fewer bytes, help",
    "memory": "no machine can hold them; one with more memory helps",
}


@dataclass(frozen=True, slots=True)
class MachineGain:
    """Microbatches per second of the swarm without and with `machine`; rate_with is never below rate_without."""

    machine: Machine
    rate_without: float
    rate_with: float

    @property
    def factor(self) -> float:
        # How many times as fast the swarm is with the machine: rate_with / rate_without, which must not be 0.
        return self.rate_with / self.rate_without


def explain_bottleneck(cost: RunCost, plan: Plan) -> str:
    """A sentence: stages, their machines, tokens per second, which part of the rate has which limit, a remedy."""
    stages, limit = plan.bottleneck.stages, plan.bottleneck.limit
    holders = [entry for entry in plan.assignments if entry.span is not None and stages.first in entry.span]
    limited = sum(holder.rate.microbatches for holder in holders if holder.rate.limit == limit)
    of_rate = limited / plan.rate if plan.rate > 0 else 1.0
    machines = "1 machine" if len(holders) == 1 else f"{len(holders)} machines"
    noun = "stage" if len(stages) == 1 else "stages"
    return (
        f"{noun} {stages} with {machines}: {plan.rate * cost.tokens:,.0f} tokens/s, {of_rate:.0%} of it limited by "
        f"{limit}; {REMEDIES[limit]}."
    )


def gain_of_one_more(cost: RunCost, plan: Plan, machine: Machine, rng: random.Random) -> MachineGain:
    """Plans again from `plan` with `machine` added; a slower result counts as no gain. Raises OutOfMemory."""
    machines = [assignment.machine for assignment in plan.assignments]
    extended = make_plan(cost, [*machines, machine], rng, start=plan)
    return MachineGain(machine, plan.rate, max(plan.rate, extended.rate))
