"""What the cost model says of graphs between forward and backward: operations, bytes, and which way a machine takes."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from agora_protocol.errors import OutOfMemory
from agora_protocol.ids import Span
from benchmarks.plan_brute_force import brute_force_rate
from benchmarks.plan_cases import random_machines, random_run

from agora.cost.run_cost import ALL_ACTIVATIONS, Activations, Machine, RunCost, StageCost
from agora.planning.search import make_plan
from agora.planning.span_rates import span_rates

STAGE = StageCost(
    10.0,
    20.0,
    trained_bytes=100.0,
    optimizer_bytes=50.0,
    kept_bytes=40.0,
    peak_bytes=5.0,
    version_bytes=30.0,
    layer_inputs_bytes=4.0,
    first_input_bytes=1.0,
    layer_peak_bytes=15.0,
)
LAST = replace(STAGE, forward_flops=13.0, head_flops=3.0)
INSIDE, AT_END = Span(0, 1), Span(1, 2)


def run_of(activations: Activations | None, *, can_offload: bool = False) -> RunCost:
    return RunCost(
        [STAGE, STAGE, LAST],
        forward_bytes=1.0,
        backward_bytes=1.0,
        tokens=1,
        in_flight=3,
        activations=activations,
        can_offload=can_offload,
    )


@pytest.mark.parametrize(
    ("way", "inside", "at_end"), [("keep", 60, 63), ("recompute", 80, 63), ("inputs", 80, 83), ("layers", 100, 83)]
)
def test_a_span_that_ends_with_the_model_computes_one_forward_less_in_all_its_stages(
    way: Activations, inside: float, at_end: float
) -> None:
    """The head's forward is never repeated."""
    cost = run_of(way)
    assert (cost.flops(INSIDE), cost.flops(AT_END)) == (inside, at_end)


def test_the_last_layer_of_a_repeated_forward_keeps_its_graph_where_no_loss_follows() -> None:
    stages = [replace(STAGE, last_layer_flops=5.0), replace(STAGE, last_layer_flops=4.0), LAST]
    cost = RunCost(stages, forward_bytes=1.0, backward_bytes=1.0, tokens=1, in_flight=3, activations=None)
    assert [cost.flops(INSIDE, way) for way in ALL_ACTIVATIONS] == [60, 80, 80, 100 - 4]
    assert cost.flops(Span(0, 0), "layers") == 50 - 5
    assert [cost.flops(AT_END, way) for way in ALL_ACTIVATIONS] == [63, 63, 83, 83]


@pytest.mark.parametrize(
    ("way", "inside", "at_end"),
    [
        ("keep", 2 * 30 + 3 * 80 + 5, 80 + 5),
        ("recompute", 80 + 5, 80 + 5),
        # Of three in flight, of one of them also that of the first layer; and a second version of the weights.
        ("inputs", 3 * (2 * 4 - 1) + 1 + 2 * 30 + 15, 2 * 4 + 15),
        ("layers", 2 * 4 + 15, 2 * 4 + 15),
    ],
)
def test_graphs_take_the_memory_of_all_in_flight_of_one_or_of_one_layer(
    way: Activations, inside: float, at_end: float
) -> None:
    cost, weights, boundaries = run_of(way), 2 * 150.0, 3 * 2.0
    assert cost.memory(INSIDE).device == weights + boundaries + inside
    assert cost.memory(AT_END).device == weights + boundaries + at_end


@pytest.mark.parametrize("fraction", [0.5, 0.85])
def test_a_machine_that_chooses_keeps_what_fits_and_leaves_room_for_one_graph_and_for_others(fraction: float) -> None:
    """Of three microbatches in flight; each that is not kept costs a second forward."""
    cost = RunCost(
        [STAGE, STAGE, LAST],
        forward_bytes=1.0,
        backward_bytes=1.0,
        tokens=1,
        in_flight=3,
        activations=None,
        can_offload=False,
        graphs_fraction=fraction,
    )
    rest, graph, versions = 2 * 150.0 + 3 * 2.0 + 5.0, 80, 60
    for graphs, way, flops in (
        ((3 + 1) * graph + versions, "keep", 60),
        ((2 + 1) * graph + versions, "recompute", 60 + 20 / 3),
        ((1 + 1) * graph + versions, "recompute", 60 + 40 / 3),
        (graph, "recompute", 80),
    ):
        rate = cost.rate(Machine("m", 600.0, rest + graphs / fraction + 1e-6), INSIDE)
        assert (rate.activations, rate.microbatches) == (way, pytest.approx(600.0 / flops))
        below = cost.rate(Machine("m", 600.0, rest + graphs / fraction - 1), INSIDE)
        assert below.microbatches < rate.microbatches
    assert (below.activations, below.microbatches) == ("layers", pytest.approx(6.0))
    assert cost.rate(Machine("m", 600.0, cost.memory(INSIDE).device), INSIDE).activations == "layers"
    assert cost.rate(Machine("m", 600.0, cost.memory(INSIDE).device - 1), INSIDE).limit == "memory"


def test_a_machine_without_room_for_one_graph_keeps_the_inputs_of_layers_if_it_has_room_for_those() -> None:
    stages = [replace(stage, kept_bytes=1000.0) for stage in (STAGE, STAGE, LAST)]
    cost = RunCost(
        stages,
        forward_bytes=1.0,
        backward_bytes=1.0,
        tokens=1,
        in_flight=3,
        activations=None,
        can_offload=False,
    )
    inputs, rest, layer = 3 * (2 * 4 - 1) + 1 + 2 * 30, 2 * 150.0 + 3 * 2.0, 15.0
    need = rest + (inputs + layer) / 0.5
    rate = cost.rate(Machine("m", 600.0, need), INSIDE)
    assert (rate.activations, rate.microbatches) == ("inputs", pytest.approx(600.0 / 80))
    assert cost.rate(Machine("m", 600.0, need - 1), INSIDE).activations == "layers"
    assert cost.rate(Machine("m", 600.0, need), AT_END).activations == "layers", "no backward comes later there"


def test_optimizer_state_lies_in_host_memory_only_where_the_run_allows_it() -> None:
    machine = Machine("m", 600.0, run_of("layers").memory(INSIDE).device - 1, host_memory=1000.0)
    assert run_of("layers").rate(machine, INSIDE).microbatches == 0.0
    assert run_of("layers", can_offload=True).rate(machine, INSIDE).in_host


@pytest.mark.parametrize("activations", [None, *ALL_ACTIVATIONS])
def test_the_array_of_rates_is_that_of_the_single_formula(activations: Activations | None) -> None:
    cost, rng = run_of(activations, can_offload=True), random.Random(1)
    machines = [Machine("m", 600.0, rng.uniform(100, 800), host_memory=rng.choice([0, 200])) for _ in range(20)]
    rates = span_rates(cost, machines)
    for number, machine in enumerate(machines):
        for span in (Span(0, 0), INSIDE, AT_END, Span(0, 2)):
            assert rates[number, span.first, span.last + 1] == cost.rate(machine, span).microbatches


def test_plans_of_machines_that_choose_for_themselves_are_near_the_best_of_all_plans() -> None:
    of_best = []
    for seed in range(8):
        rng = random.Random(seed)
        drawn = random_run(rng, rng.randint(4, 8))
        stages = [replace(s, kept_bytes=8e7, layer_inputs_bytes=1e6, layer_peak_bytes=1e8) for s in drawn.stages]
        sent = drawn.forward_bytes
        cost = RunCost(stages, forward_bytes=sent, backward_bytes=sent, tokens=1, in_flight=4, activations=None)
        machines = random_machines(rng, cost, rng.randint(2, 5))
        try:
            of_best.append(make_plan(cost, machines, random.Random(0)).rate / brute_force_rate(cost, machines))
        except OutOfMemory:
            assert brute_force_rate(cost, machines) == 0.0
    assert len(of_best) > 4
    assert max(of_best) <= 1 + 1e-9 and min(of_best) >= 0.95 and statistics.mean(of_best) >= 0.99
