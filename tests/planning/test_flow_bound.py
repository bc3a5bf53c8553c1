"""The flow bound: exact, by comparison with every cut of small pipelines."""

from __future__ import annotations

import random

import pytest
from agora_protocol.ids import Span

from agora.planning.simulator.flow_bound import best_whole_placement, flow_bound


def min_cut(holders: list[tuple[Span, float]], work: list[float]) -> float:
    """The maximum flow by its minimum cut: over all sets of stages, the speed of their holders by their work."""
    stages = range(len(work))
    sets = [[s for s in stages if bits >> s & 1] for bits in range(1, 1 << len(work))]
    return min(
        sum(speed for span, speed in holders if any(s in span for s in chosen)) / sum(work[s] for s in chosen)
        for chosen in sets
    )


@pytest.mark.parametrize("seed", range(200))
def test_the_bound_is_the_least_cut(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(1, 7)
    work = [rng.uniform(0.2, 3.0) for _ in range(stages)]
    holders = []
    for _ in range(rng.randint(1, 8)):
        first = rng.randrange(stages)
        holders.append((Span(first, rng.randint(first, stages - 1)), rng.uniform(0.1, 5.0)))
    assert flow_bound(holders, work) == pytest.approx(min_cut(holders, work), rel=1e-4)


def test_a_stage_without_holders_stops_everything() -> None:
    assert flow_bound([(Span(0, 0), 5.0), (Span(2, 2), 5.0)], [1.0, 1.0, 1.0]) == 0.0


def test_a_holder_of_two_stages_helps_the_one_that_lacks_speed() -> None:
    holders = [(Span(0, 0), 1.0), (Span(1, 1), 2.0), (Span(0, 1), 3.0)]
    assert flow_bound(holders, [1.0, 1.0]) == pytest.approx(3.0, rel=1e-5)


def test_the_best_placement_of_equal_machines_leaves_no_stage_behind() -> None:
    assert best_whole_placement([2.0] * 11, [1.0] * 4) == 4.0
    assert best_whole_placement([2.0] * 3, [1.0] * 4) == 0.0
