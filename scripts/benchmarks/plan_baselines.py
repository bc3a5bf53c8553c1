"""Other planners' rules, as spans that the same cost model judges: what ours is compared with.

What a rule leaves open is tried, and the best counts.

| rule | who holds what |
|---|---|
| proportional | one chain of all machines, layers in proportion to FLOPs (what Zagora describes) |
| one chain | one chain of all machines, cuts by our exact dynamic program, the best of four orders |
| petals | each machine takes as many stages as fit, where their sorted rates are lowest; then all choose again |
| zorse | groups of machines of one kind, layers in proportion to group speed, the best of all group sizes |
| cephalo | one ring of all: weights shared out by memory and gathered in each pass, the batch by speed |
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from agora_protocol.ids import Span

from agora.cost.run_cost import Machine, RunCost
from agora.planning.local_search import cut_for_groups
from agora.planning.plan import plan_of_spans

# Of one optimizer step of the ring, which gathers the weights twice in each: as in Zorse's evaluation.
STEP_TOKENS: Final = 2**20
PETALS_TURNS: Final = 3


def baseline_rates(cost: RunCost, machines: Sequence[Machine]) -> Mapping[str, float]:
    """Returns the rate of each rule's plan, in microbatches per second; 0: no machine can hold some part of it."""
    return {
        "proportional": proportional_rate(cost, machines),
        "one_chain": one_chain_rate(cost, machines),
        "petals": petals_rate(cost, machines, random.Random(1)),
        "zorse": zorse_rate(cost, machines),
        "cephalo": ring_rate(cost, machines),
    }


def proportional_rate(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Returns the rate of one chain in the given order, stages by the largest remainders of the FLOPs."""
    counts = _largest_remainders([machine.flops for machine in machines], cost.stage_count)
    return plan_of_spans(cost, machines, _spans_of(counts)).rate


def one_chain_rate(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Returns the rate of one chain of all machines (the fastest, if there are more than stages), each with a stage."""
    fastest = sorted(machines, key=lambda machine: -machine.flops)[: cost.stage_count]
    given = [machine for machine in machines if machine in fastest]
    by_upload = sorted(fastest, key=lambda machine: machine.upload)
    slow_links_at_ends = [*by_upload[::2], *reversed(by_upload[1::2])]
    orders = [given, fastest, sorted(fastest, key=lambda machine: -machine.memory), slow_links_at_ends]
    found = [cut_for_groups(cost, [[machine] for machine in order]) for order in orders]
    return max(cuts.rate if cuts is not None else 0.0 for cuts in found)


def petals_rate(cost: RunCost, machines: Sequence[Machine], rng: random.Random) -> float:
    """Returns the best rate of Petals' placement: arrival in a random order, then turns in which each chooses again."""
    windows = [_windows(cost, machine) for machine in machines]
    order = list(range(len(machines)))
    rng.shuffle(order)
    chosen: list[Span | None] = [None] * len(machines)
    stage_rates = [0.0] * cost.stage_count
    best = 0.0
    for _ in range(1 + PETALS_TURNS):
        for index in order:
            _add(stage_rates, chosen[index], -_rate(cost, machines[index], chosen[index]))
            chosen[index] = min(
                windows[index], key=lambda span: sorted(stage_rates[span.first : span.last + 1]), default=None
            )
            _add(stage_rates, chosen[index], _rate(cost, machines[index], chosen[index]))
        best = max(best, plan_of_spans(cost, machines, chosen).rate)
    return best


def zorse_rate(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Returns the best rate of groups of one kind each, of every size, with layers in proportion to group speed."""
    best = 0.0
    for size in range(1, len(machines) + 1):
        groups = _groups_of_kinds(machines, size)
        if len(groups) <= cost.stage_count:
            fastest_first = sorted(groups, key=lambda group: -_speed(group))
            best = max(best, *(_by_group_speed(cost, order) for order in (fastest_first, fastest_first[::-1])))
    return best


def ring_rate(cost: RunCost, machines: Sequence[Machine]) -> float:
    """Returns the rate of one ring of all: compute and gathers overlap, gathers run at the ring's slowest link.

    A step takes max(gather, forward) + max(gather + reduce-random_groups, forward again and backward). A machine that
    has no room for one stage computes nothing. 0 if all memory together, less the working room, is less than the state.
    """
    working = max(cost.memory(Span(stage, stage)).device for stage in range(cost.stage_count))
    members = [machine for machine in machines if machine.memory > working]
    weights = sum(stage.frozen_bytes + stage.trained_bytes for stage in cost.stages)
    state = weights + sum(stage.optimizer_bytes for stage in cost.stages)
    if sum(machine.memory - working for machine in members) < state:
        return 0.0
    flops, link = _speed(members), min(min(machine.upload, machine.download) for machine in members)
    microbatches = STEP_TOKENS / cost.tokens
    forward = microbatches * sum(stage.forward_flops for stage in cost.stages) / flops
    rest = microbatches * sum(stage.forward_flops + stage.backward_flops for stage in cost.stages) / flops
    others = (len(members) - 1) / len(members)
    gather, scatter = others * weights / link, others * sum(stage.trained_bytes for stage in cost.stages) / link
    return microbatches / (max(gather, forward) + max(gather + scatter, rest))


def _by_group_speed(cost: RunCost, groups: Sequence[Sequence[Machine]]) -> float:
    counts = [1 + n for n in _largest_remainders([_speed(group) for group in groups], cost.stage_count - len(groups))]
    machines = [machine for group in groups for machine in group]
    spans = [span for group, span in zip(groups, _spans_of(counts), strict=True) for _ in group]
    return plan_of_spans(cost, machines, spans).rate


def _groups_of_kinds(machines: Sequence[Machine], size: int) -> list[list[Machine]]:
    kinds: dict[tuple[float, float], list[Machine]] = defaultdict(list)
    for machine in machines:
        kinds[machine.flops, machine.memory].append(machine)
    groups = []
    for members in kinds.values():
        count = -(-len(members) // size)
        groups += [members[number::count] for number in range(count)]
    return groups


def _speed(group: Sequence[Machine]) -> float:
    return sum(machine.flops for machine in group)


def _windows(cost: RunCost, machine: Machine) -> list[Span]:
    # Petals leaves these to its clients, so that there all windows have one length.
    last = cost.stage_count - 1
    fitting = [
        [
            span
            for first in range(last - length + 2)
            if _rate(cost, machine, span := Span(first, first + length - 1)) > 0
        ]
        for length in range(last + 1, 0, -1)
    ]
    longest = next((spans for spans in fitting if spans), [])
    at_first = [span for spans in fitting for span in spans if span.first == 0]
    at_last = [span for spans in fitting for span in spans if span.last == last]
    return list(dict.fromkeys([*longest, *at_first[:1], *at_last[:1]]))


def _rate(cost: RunCost, machine: Machine, span: Span | None) -> float:
    return cost.rate(machine, span).microbatches if span is not None else 0.0


def _add(stage_rates: list[float], span: Span | None, rate: float) -> None:
    for stage in span.stages if span is not None else ():
        stage_rates[stage] += rate


def _largest_remainders(weights: Sequence[float], total: int) -> list[int]:
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _spans_of(counts: Sequence[int]) -> list[Span | None]:
    spans: list[Span | None] = []
    begin = 0
    for count in counts:
        spans.append(Span(begin, begin + count - 1) if count else None)
        begin += count
    return spans
