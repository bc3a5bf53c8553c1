"""The cuts of a model for given groups: as good as trying them all, never a span that does not fit."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from agora_protocol.ids import Span
from benchmarks.plan_cases import random_machines, random_run

from agora.cost.run_cost import Machine, RunCost, StageCost
from agora.planning.initial_groups import fewest_holders
from agora.planning.local_search import cut_for_groups
from agora.planning.span_rates import span_rates

SEEDS = range(60)


def all_cuts(stages: int, groups: int) -> list[list[Span]]:
    inner = itertools.combinations(range(1, stages), groups - 1)
    return [[Span(a, b - 1) for a, b in itertools.pairwise([0, *ends, stages])] for ends in inner]


def slowest(cost: RunCost, groups: list[list[Machine]], spans: list[Span]) -> float:
    """The rate of the slowest group, asked of the cost model machine by machine."""
    return min(
        sum(cost.rate(machine, span).microbatches for machine in group)
        for group, span in zip(groups, spans, strict=True)
    )


def drawn(seed: int) -> tuple[RunCost, list[list[Machine]]]:
    rng = random.Random(seed)
    cost = random_run(rng, rng.randint(3, 8))
    machines = random_machines(rng, cost, 6)
    count = rng.randint(1, 3)
    return cost, [machines[number::count] for number in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cuts_are_as_good_as_the_best_of_all_cuts(seed: int) -> None:
    cost, groups = drawn(seed)
    best = max(slowest(cost, groups, spans) for spans in all_cuts(cost.stage_count, len(groups)))
    found = cut_for_groups(cost, groups)
    if best == 0:
        assert found is None
    else:
        assert found is not None
        assert found.rate == pytest.approx(best, rel=1e-12) == slowest(cost, groups, list(found.spans))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_spans_cover_every_stage_once_in_order(seed: int) -> None:
    cost, groups = drawn(seed)
    found = cut_for_groups(cost, groups)
    if found is not None:
        assert [stage for span in found.spans for stage in span.stages] == list(range(cost.stage_count))


def test_the_looked_up_rates_are_those_of_the_cost_model() -> None:
    rng = random.Random(1)
    cost = random_run(rng, 7)
    machines = random_machines(rng, cost, 5)
    rates = span_rates(cost, machines)
    for machine, of_machine in zip(machines, rates, strict=True):
        for begin, end in itertools.product(range(8), range(8)):
            true = cost.rate(machine, Span(begin, end - 1)).microbatches if begin < end else 0.0
            assert of_machine[begin, end] == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_more_machine_or_more_memory_in_a_group_never_lowers_the_rate(seed: int) -> None:
    cost, groups = drawn(seed)
    found = cut_for_groups(cost, groups)
    before = found.rate if found is not None else 0.0
    rng = random.Random(seed)
    larger = [[*groups[0], *random_machines(rng, cost, 1)], *groups[1:]]
    richer = [[Machine(m.name, m.flops, 2 * m.memory, 0.0, m.upload, m.download) for m in group] for group in groups]
    for changed in (larger, [[*a, *b] for a, b in zip(groups, richer, strict=True)]):
        after = cut_for_groups(cost, changed)
        assert (after.rate if after is not None else 0.0) >= before * (1 - 1e-12)


def test_a_group_with_a_slow_link_stands_at_the_end_of_the_model_at_full_speed_but_not_in_the_middle() -> None:
    """The ends send one tensor for each microbatch, a group in the middle two."""
    cost = RunCost([StageCost(1.0, 1.0)] * 6, forward_bytes=1.0, backward_bytes=1.0, tokens=1, in_flight=1)
    fast, slow = Machine("fast", 1e6, 1e9), Machine("slow link", 1e6, 1e9, upload=1.0)
    at_end = cut_for_groups(cost, [[fast], [fast], [slow]])
    in_middle = cut_for_groups(cost, [[fast], [slow], [fast]])
    assert at_end is not None and in_middle is not None
    assert at_end.rate == pytest.approx(1.0) and in_middle.rate == pytest.approx(0.5)


def test_more_groups_than_stages_have_no_cuts() -> None:
    cost = RunCost([StageCost(1.0, 1.0)] * 2, forward_bytes=1.0, backward_bytes=1.0, tokens=1, in_flight=1)
    assert cut_for_groups(cost, [[Machine("m", 1.0, 1e9)]] * 3) is None


def test_a_large_machine_is_kept_for_the_heavy_end_of_the_model() -> None:
    """Two small machines must hold the first stages, though the large one alone would reach further than either."""
    stages = [StageCost(1.0, 1.0, frozen_bytes=size) for size in (1.0, 1.0, 1.0, 2.0)]
    cost = RunCost(stages, forward_bytes=0.0, backward_bytes=0.0, tokens=1, in_flight=1)
    found = fewest_holders(span_rates(cost, [Machine("large", 1.0, 3.0), *[Machine("small", 1.0, 1.0)] * 2]))
    assert found.machines == (1, 2, 0) and found.ends == (1, 2, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fewest_holders_are_as_few_as_any_order_of_machines_allows(seed: int) -> None:
    rng = random.Random(seed)
    cost = random_run(rng, rng.randint(3, 8))
    rates = span_rates(cost, random_machines(rng, cost, 4))
    found = fewest_holders(rates)
    furthest = dict.fromkeys(range(5), 0)
    for count in range(1, 5):
        for order in itertools.permutations(range(4), count):
            reached = 0
            for machine in order:
                reached += int((rates[machine, reached] > 0).sum())
            furthest[count] = max(furthest[count], reached)
    assert found.reached == max(furthest.values())
    assert len(found.machines) == min(count for count, reached in furthest.items() if reached == found.reached)
    begins = [0, *found.ends[:-1]]
    assert np.all(rates[list(found.machines), begins, list(found.ends)] > 0)
