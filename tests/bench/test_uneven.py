"""`./scripts/bench uneven`: its swarms hold every stage, its baseline shares out evenly, its sums are right."""

from __future__ import annotations

from collections import Counter

import pytest
from agora_protocol.ids import MicrobatchId, PeerId, Span
from benchmarks.simulate_real import Observation
from benchmarks.uneven import (
    BASE,
    FACTORS,
    STAGES,
    equal_case,
    make_planned_case,
    manifest,
    one_stage_case,
    plan_spans,
    possible_rate,
)
from benchmarks.uniform_node import EvenBalancer

from agora.cost.manifest_cost import run_cost
from agora.pipeline.load_balancer import RouteHint
from agora.swarm.view import PeerView


def test_every_swarm_holds_every_stage_and_has_the_same_machines() -> None:
    plan = plan_spans(run_cost(manifest()), 2e10)
    for case in (make_planned_case(plan), equal_case(), one_stage_case()):
        assert {stage for peer in case.peers for stage in Span.parse(peer.stages).stages} == set(range(STAGES))
    for case in (make_planned_case(plan), equal_case()):
        assert sorted(peer.slowdown for peer in case.peers) == sorted(BASE * factor for factor in FACTORS)
    assert len({peer.stages for peer in make_planned_case(plan).peers}) > 1, "a pipeline, not eight whole models"


def test_even_routing_asks_a_slow_peer_as_often_as_a_fast_one() -> None:
    table, asked = EvenBalancer(PeerId("me"), 2), Counter[PeerId]()
    peers = tuple(PeerView(PeerId(name), Span(1, 1), 1, state="serving") for name in ("fast", "slow"))
    table.update(1, peers)
    for number in range(20):
        now = float(10 * number)
        chosen = table.choose(now, MicrobatchId(bytes([number]) * 16), 1, 100, RouteHint())
        assert chosen.peer is not None
        asked[chosen.peer] += 1
        attempt = table.record_sent(now, 1, chosen.peer, 100, now + 60.0)
        table.record_accepted(now, attempt, 0, 0.0)
        table.record_answered(now + 9.0, attempt, 0.1 if chosen.peer == "fast" else 8.0, 100, 1.0)
    assert asked == {"fast": 10, "slow": 10}


def test_a_busy_peer_is_waited_for_and_a_refused_microbatch_is_not_counted() -> None:
    table = EvenBalancer(PeerId("me"), 2)
    table.update(1, tuple(PeerView(PeerId(name), Span(1, 1), 1, state="serving") for name in ("a", "b")))
    table.record_busy(0.0, table.record_sent(0.0, 1, PeerId("a"), 100, 60.0), 2.0)
    waits = table.choose(1.0, MicrobatchId(bytes(16)), 1, 100, RouteHint())
    assert waits.peer is None and waits.look_again_at == 2.0
    assert table.choose(2.0, MicrobatchId(bytes(16)), 1, 100, RouteHint()).peer == "a"


def test_what_is_possible_is_the_slowest_stage_of_devices_that_always_work() -> None:
    spans = (Span(0, STAGES - 2), Span(0, STAGES - 2), Span(STAGES - 1, STAGES - 1))
    seen = Observation(1.0, (0.5, 1.0, 0.4), spans, ("",) * 3, 1.0)
    assert possible_rate(seen) == pytest.approx(2.5)
