"""The bound of computing: no plan passes it, and it is near the best that machines could do if they changed spans."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from agora_protocol.ids import Span
from benchmarks.plan_brute_force import brute_force_rate
from benchmarks.plan_cases import random_machines, random_run
from scipy.optimize import linprog

from agora.cost.run_cost import ALL_ACTIVATIONS, Machine, RunCost, StageCost
from agora.planning.span_rates import rate_upper_bound, span_rates

ROOMY = StageCost(1e12, 2e12, 1e8, kept_bytes=1e8, layer_peak_bytes=1e7)


def run_of(stages: int, activations: str | None = None) -> RunCost:
    """Stages that are all alike; boundaries have no size."""
    return RunCost([ROOMY] * stages, forward_bytes=0, backward_bytes=0, tokens=1, in_flight=4, activations=activations)


def best_of_changing_spans(cost: RunCost, machines: list[Machine]) -> float:
    """The rate of machines without links that divide their time among all spans as well as can be."""
    rates = span_rates(cost, [replace(machine, upload=1e30, download=1e30) for machine in machines])
    spans = [(m, b, e) for m, b, e in zip(*np.nonzero(rates), strict=True)]
    stages = cost.stage_count
    limits, allowed = np.zeros((stages + len(machines), len(spans) + 1)), np.zeros(stages + len(machines))
    for column, (m, b, e) in enumerate(spans):
        limits[b:e, column] = -rates[m, b, e]
        limits[stages + m, column] = 1.0
    limits[:stages, -1], allowed[stages:] = 1.0, 1.0
    wanted = np.zeros(len(spans) + 1)
    wanted[-1] = -1.0
    return float(-linprog(wanted, A_ub=limits, b_ub=allowed, method="highs").fun)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_passes_the_bound_and_the_bound_is_that_of_the_linear_program(seed: int) -> None:
    rng = random.Random(seed)
    cost = random_run(rng, rng.randint(3, 9))
    cost = RunCost(
        [replace(stage, kept_bytes=5e7, layer_peak_bytes=5e7) for stage in cost.stages],
        forward_bytes=0.0,
        backward_bytes=0.0,
        tokens=1,
        in_flight=8,
        activations=rng.choice([None, *ALL_ACTIVATIONS]),
    )
    machines = random_machines(rng, cost, rng.randint(2, 5))
    bound = rate_upper_bound(cost, machines)
    assert brute_force_rate(cost, machines) <= bound * (1 + 1e-9)
    best = best_of_changing_spans(cost, machines)
    assert best * (1 - 1e-9) <= bound <= best * 1.02


@pytest.mark.parametrize(("way", "forwards"), [("keep", 1), ("recompute", 1), ("inputs", 2), ("layers", 2)])
def test_one_machine_that_holds_the_whole_model_reaches_the_bound(way: str, forwards: int) -> None:
    cost, machine = run_of(4, way), Machine("one", 1e13, 1e10)
    assert rate_upper_bound(cost, [machine]) == pytest.approx(1e13 / (4 * (forwards + 2) * 1e12))
    assert cost.rate(machine, Span(0, 3)).microbatches == pytest.approx(rate_upper_bound(cost, [machine]))


def test_where_graphs_are_kept_the_bound_is_the_operations_of_all_by_those_of_a_microbatch() -> None:
    machines = [Machine(f"m{number}", 1e13 * (1 + number), 1e10) for number in range(5)]
    assert rate_upper_bound(run_of(8, "keep"), machines) == pytest.approx(15e13 / (8 * 3e12))


def test_machines_that_hold_no_stage_do_nothing() -> None:
    assert rate_upper_bound(run_of(3), [Machine("tiny", 1e15, 1e6)]) == 0.0
