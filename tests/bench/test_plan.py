"""The benchmark of plans: brute force leaves nothing out, other rules are judged as ours is, rows say who is first."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from agora_protocol.ids import Span
from benchmarks.plan import Comparison, compare, of_brute_force, standing
from benchmarks.plan_baselines import (
    baseline_rates,
    one_chain_rate,
    petals_rate,
    proportional_rate,
    ring_rate,
    zorse_rate,
)
from benchmarks.plan_brute_force import brute_force_rate
from benchmarks.plan_cases import random_machines, random_run
from benchmarks.plan_workloads import CLUSTERS, HOME_SWARMS, MODELS, machines_of, tuning_cost

from agora.cost.run_cost import Machine, RunCost, StageCost
from agora.planning.local_search import cut_for_groups

PARAMETERS = {"7B": 6.74e9, "13B": 13.0e9, "33B": 32.5e9, "70B": 69.0e9}


def even_run(stages: int = 4, boundary: float = 0.0) -> RunCost:
    layers = [StageCost(1.0, 2.0, frozen_bytes=1.0)] * stages
    return RunCost(layers, forward_bytes=boundary, backward_bytes=boundary, tokens=2**10, in_flight=0)


@pytest.mark.parametrize("seed", range(8))
def test_brute_force_is_the_best_of_every_assignment_to_groups_and_beside_them(seed: int) -> None:
    rng = random.Random(seed)
    cost = random_run(rng, 5)
    machines = random_machines(rng, cost, 4)
    rates = [0.0]
    for count in range(1, 5):
        for assigned in itertools.product(range(-1, count), repeat=4):
            alone, *groups = (
                [m for m, group in zip(machines, assigned, strict=True) if group == n] for n in range(-1, count)
            )
            cuts = cut_for_groups(cost, groups) if all(groups) else None
            beside = sum(cost.rate(machine, Span(0, 4)).microbatches for machine in alone)
            rates.append(cuts.rate + beside if cuts is not None else 0.0)
    assert brute_force_rate(cost, machines) == pytest.approx(max(rates))


def test_our_plans_are_never_better_than_brute_force() -> None:
    found = of_brute_force(12)
    assert len(found) > 8 and max(found) <= 1 + 1e-9 and min(found) > 0.9


@pytest.mark.parametrize("model", MODELS)
def test_a_models_frozen_weights_are_those_of_its_parameters(model: str) -> None:
    cost, decoder = tuning_cost(model), MODELS[model]
    tables = 2 * 32_000 * decoder.width
    frozen = sum(stage.frozen_bytes for stage in cost.stages)
    assert (frozen - 2 * tables) / 0.516 + tables == pytest.approx(PARAMETERS[model], rel=0.01)


def test_a_measured_machine_takes_its_measured_time_for_a_layer() -> None:
    cost = tuning_cost("13B")
    a10g = next(m for m in machines_of("8 A100, 16 A10G, 16 V100, 24 T4", "13B") if m.name.startswith("A10G"))
    assert cost.flops(Span(1, 1), "recompute") / a10g.flops == pytest.approx((11.52 + 23.74) / 1000)


def test_the_swarms_are_as_large_as_their_names_say_and_always_the_same() -> None:
    assert [len(machines_of(swarm, "7B")) for swarm in (*CLUSTERS, *HOME_SWARMS)] == [20, 64, 32, 32]
    assert all(machines_of(swarm, "70B") == machines_of(swarm, "70B") for swarm in HOME_SWARMS)


def test_a_proportional_chain_counts_as_nothing_where_its_share_does_not_fit() -> None:
    fast, slow = Machine("fast", 3.0, memory=9.0), Machine("slow", 1.0, memory=9.0)
    assert proportional_rate(even_run(), [fast, slow]) == pytest.approx(1 / 4)
    assert proportional_rate(even_run(), [replace(fast, memory=2.0), slow]) == 0


def test_a_chain_gives_every_machine_a_stage() -> None:
    machines = [Machine("fast", 30.0, memory=9.0), Machine("slow", 1.0, memory=9.0)]
    assert one_chain_rate(even_run(), machines) == pytest.approx(1 / 3), (
        "the slow one has the last stage: no forward twice"
    )


def test_petals_peers_take_the_stages_that_are_weakest() -> None:
    machines = [Machine(str(number), 4.0, memory=2.0) for number in range(4)]
    assert petals_rate(even_run(), machines, random.Random(0)) == pytest.approx(1.0), "two peers for each half"
    assert petals_rate(even_run(), [Machine("tiny", 4.0, memory=0.5)], random.Random(0)) == 0


def test_groups_of_one_kind_share_the_layers_by_their_speed() -> None:
    fast = [Machine(f"fast{number}", 6.0, memory=3.0) for number in range(2)]
    slow = [Machine(f"slow{number}", 2.0, memory=3.0) for number in range(2)]
    assert zorse_rate(even_run(), [*fast, *slow]) == pytest.approx(1.0)


def test_a_ring_gathers_its_weights_over_the_slowest_link() -> None:
    machines = [Machine(str(number), 1e12, memory=3.5, upload=1e-3, download=1.0) for number in range(2)]
    gathering = 4.0 / 2 / 1e-3
    assert ring_rate(even_run(), machines) == pytest.approx(2**10 / (2 * gathering), rel=1e-3)
    quick = [replace(machine, upload=1e12, download=1e12, flops=8.0) for machine in machines]
    assert ring_rate(even_run(), quick) == pytest.approx(2 * 8.0 / (4 * 4.0)), "two forwards and a backward"
    assert ring_rate(even_run(), [replace(machine, memory=2.0) for machine in machines]) == 0


def test_no_rule_passes_the_bound_and_ours_is_first_at_home() -> None:
    found = compare(HOME_SWARMS[0], "70B")
    assert set(found.theirs) == set(baseline_rates(even_run(), [Machine("one", 1.0, 9.0)]))
    assert max(found.ours, *found.theirs.values()) <= 1 + 1e-9
    assert standing(found) == "yes" and found.spans > 1


def test_a_row_says_who_is_faster_than_ours_and_why() -> None:
    found = Comparison("s", "m", 1.0, 1, 0.5, {"cephalo": 0.6, "zorse": 0.1})
    assert standing(found).startswith("no: cephalo by 20.0%; its ring does not cut the model")
