"""The search for a plan: near the best of all plans, within memory, never worse for one machine more."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache

import pytest
from agora_protocol.errors import InputError, OutOfMemory
from agora_protocol.ids import Span
from benchmarks.plan_brute_force import brute_force_rate
from benchmarks.plan_cases import random_machines, random_run

from agora.cost.run_cost import Activations, Machine, RunCost, StageCost
from agora.planning.plan import Plan, plan_of_spans
from agora.planning.search import explain_bottleneck, gain_of_one_more, make_plan
from agora.planning.span_rates import rate_upper_bound

SEEDS = range(14)
LAYER = StageCost(1e12, 2e12, 4e8, 1e7, 2e7, 1e6, 1e8)


def drawn(seed: int) -> tuple[RunCost, list[Machine]]:
    rng = random.Random(seed)
    cost = random_run(rng, rng.randint(3, 8))
    return cost, random_machines(rng, cost, rng.randint(2, 6))


@cache
def planned(seed: int) -> Plan | None:
    """The plan for the swarm of a seed, or None if its machines cannot hold the model."""
    cost, machines = drawn(seed)
    try:
        return make_plan(cost, machines, random.Random(0))
    except OutOfMemory:
        return None


def plans() -> list[tuple[int, Plan]]:
    return [(seed, plan) for seed in SEEDS if (plan := planned(seed)) is not None]


def even_run(layers: int = 12, boundary: float = 1e5) -> RunCost:
    return run_of([LAYER] * layers, boundary, "recompute")


def run_of(stages: list[StageCost], boundary: float, activations: Activations) -> RunCost:
    return RunCost(
        stages, forward_bytes=boundary, backward_bytes=boundary, tokens=1000, in_flight=4, activations=activations
    )


def test_plans_for_small_swarms_are_near_the_best_of_all_plans() -> None:
    of_best = [plan.rate / brute_force_rate(*drawn(seed)) for seed, plan in plans()]
    assert len(of_best) > 9
    assert max(of_best) <= 1 + 1e-9 and min(of_best) >= 0.95 and statistics.mean(of_best) >= 0.99


def test_only_swarms_that_cannot_hold_the_model_have_no_plan() -> None:
    without = [seed for seed in SEEDS if planned(seed) is None]
    assert without, "some of the random swarms are too small"
    assert all(brute_force_rate(*drawn(seed)) == 0 for seed in without)


def test_every_machine_fits_its_span_and_every_stage_is_held() -> None:
    for seed, plan in plans():
        cost, machines = drawn(seed)
        assert [found.machine for found in plan.assignments] == machines
        held = set()
        for found in plan.assignments:
            if found.span is not None:
                assert cost.memory(found.span, in_host=found.rate.in_host).fits(found.machine)
                assert found.rate == cost.rate(found.machine, found.span)
                held.update(found.span.stages)
        assert held == set(range(cost.stage_count))
        assert plan.rate == min(plan.stage_rates) == plan.stage_rates[plan.bottleneck.stages.first]


def test_the_shares_of_a_stages_holders_are_in_proportion_to_their_rates_and_add_up_to_one() -> None:
    for _, plan in plans():
        for stage in range(len(plan.stage_rates)):
            holders = [found for found in plan.assignments if found.span is not None and stage in found.span]
            assert sum(found.share for found in holders) == pytest.approx(1.0)
            for span in {found.span for found in holders}:
                alike = [found for found in holders if found.span == span]
                assert len({round(found.share / found.rate.microbatches, 9) for found in alike}) == 1


def test_one_more_machine_never_lowers_the_rate() -> None:
    for seed, plan in plans():
        cost, _ = drawn(seed)
        newcomer = random_machines(random.Random(1000 + seed), cost, 1)[0]
        gain = gain_of_one_more(cost, plan, newcomer, random.Random(0))
        assert gain.factor >= 1.0 and gain.rate_without == plan.rate


def test_more_memory_never_lowers_the_rate() -> None:
    for seed, plan in plans():
        cost, machines = drawn(seed)
        richer = [replace(machine, memory=1.5 * machine.memory) for machine in machines]
        assert make_plan(cost, richer, random.Random(0), start=plan).rate >= plan.rate


def test_the_same_machines_and_seed_give_the_same_plan() -> None:
    cost, machines = even_run(), random_machines(random.Random(5), even_run(), 9)
    assert make_plan(cost, machines, random.Random(3)) == make_plan(cost, machines, random.Random(3))


def test_a_large_mixed_swarm_comes_near_the_bound_of_its_computing() -> None:
    rng = random.Random(2)
    cost = even_run(40)
    machines = random_machines(rng, cost, 32)
    assert make_plan(cost, machines, rng).rate >= 0.97 * rate_upper_bound(cost, machines)
    kept = run_of([LAYER] * 40, 1e5, "keep")
    assert make_plan(kept, machines, rng).rate >= 0.98 * rate_upper_bound(kept, machines)


def test_no_more_groups_than_memory_asks_for_where_links_are_slow() -> None:
    """Two machines that hold the whole model each need no boundary at all."""
    cost = even_run(boundary=1e8)
    large = [Machine(f"large{number}", 1e14, 8e9, upload=1e7, download=1e7) for number in range(2)]
    plan = make_plan(cost, large, random.Random(0))
    assert [found.span for found in plan.assignments] == [Span(0, 11), Span(0, 11)]


def test_machines_that_fit_the_whole_model_stand_beside_small_ones_that_need_each_other() -> None:
    cost = even_run(boundary=1e8)
    machines = [
        Machine("large", 1e14, 8e9, upload=1e6, download=1e6),
        *[Machine(f"small{number}", 1e13, 3.8e9) for number in range(2)],
    ]
    plan = make_plan(cost, machines, random.Random(0))
    assert [str(found.span) for found in plan.assignments] == ["0-11", "0-5", "6-11"]
    large, first_half, last_half = (
        cost.rate(machine, found.span).microbatches for machine, found in zip(machines, plan.assignments, strict=True)
    )
    assert first_half < last_half, "who holds the last stage repeats no forward"
    assert plan.rate == pytest.approx(large + first_half)
    assert [found.share * plan.rate for found in plan.assignments] == pytest.approx([large, first_half, first_half])


def test_a_machine_that_fits_no_stage_stays_idle() -> None:
    cost = even_run()
    plan = make_plan(cost, [Machine("large", 1e14, 8e9), Machine("tiny", 1e15, 1e6)], random.Random(0))
    assert plan.assignments[1].span is None and plan.assignments[1].share == 0


def test_optimizer_state_lies_in_host_memory_only_where_it_would_not_fit_otherwise() -> None:
    cost = RunCost([replace(LAYER, optimizer_bytes=4e8)] * 4, forward_bytes=0, backward_bytes=0, tokens=1, in_flight=1)
    roomy, narrow = Machine("roomy", 1e14, 8e9, host_memory=8e9), Machine("narrow", 1e14, 2e9, host_memory=8e9)
    plan = make_plan(cost, [roomy, narrow], random.Random(0))
    assert [(str(found.span), found.rate.in_host) for found in plan.assignments] == [("0-3", False), ("0-3", True)]


def test_machines_that_cannot_hold_the_model_are_told_how_much_lacks() -> None:
    with pytest.raises(
        OutOfMemory, match=r"of 12 stages 8 fit into their 4\.2 GB together, and the others need 1\.8 GB"
    ):
        make_plan(even_run(), [Machine(f"m{number}", 1e14, 2.1e9) for number in range(2)], random.Random(0))


def test_a_plan_without_machines_is_refused() -> None:
    with pytest.raises(InputError, match="name at least one"):
        make_plan(even_run(), [], random.Random(0))


def test_the_bottleneck_is_explained_with_its_limit() -> None:
    cost = even_run(boundary=1e8)
    half = Machine("half", 1e14, 3.5e9, upload=1e6, download=1e9)
    plan = make_plan(cost, [half, replace(half, name="other")], random.Random(0))
    assert plan.bottleneck.limit == "upload"
    assert explain_bottleneck(cost, plan) == (
        f"stages {plan.bottleneck.stages} with 1 machine: 10 tokens/s, 100% of it limited by upload; machines with "
        "more upload, or a boundary codec with fewer bytes, help."
    )


def test_spans_of_any_shape_are_judged_by_their_slowest_stage() -> None:
    cost = even_run(3, boundary=0)
    machines = [Machine(str(number), 4e12, 8e9) for number in range(2)]
    plan = plan_of_spans(cost, machines, [Span(0, 1), Span(1, 2)])
    last = 4 / 6  # a span that ends with the model repeats no forward: 6 of 8 parts of the work of two stages
    assert plan.stage_rates == pytest.approx((0.5, 0.5 + last, last)) and plan.rate == pytest.approx(0.5)
