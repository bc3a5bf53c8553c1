"""Which of many peers a caller calls: few, spread by capacity, and stable while peers come and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from agora_protocol.ids import PeerId, Span, microbatch_id

from agora.pipeline.load_balancer import (
    MAX_CALLEES,
    MAX_TIMES_MEDIAN,
    MIN_TIMES_MEDIAN,
    LoadBalancer,
    RouteHint,
    choose_callees,
    rendezvous_key,
)
from agora.swarm.view import PeerView

CALLERS = [PeerId(f"caller-{number}") for number in range(400)]
MB = microbatch_id(b"session0", 1)


def peers(count: int, capacity: float = 1.0) -> dict[PeerId, PeerView]:
    """Returns `count` replicas of stage 1, each with this capacity."""
    ids = [PeerId(f"peer-{number:03d}") for number in range(count)]
    return {peer: PeerView(peer, Span(1, 1), 1, state="serving", capacity=capacity) for peer in ids}


def called(me: PeerId, live: dict[PeerId, PeerView], failing: set[PeerId] | None = None) -> set[PeerId]:
    """Returns the callees of `me`."""
    return choose_callees(live, {peer: rendezvous_key(me, peer) for peer in live}, failing or set())


def test_of_a_few_peers_all_are_called() -> None:
    live = peers(MAX_CALLEES)
    assert called(CALLERS[0], live) == set(live)


def test_the_callers_of_many_peers_call_different_ones_and_nobody_is_left_out() -> None:
    live = peers(60)
    counts = Counter(peer for caller in CALLERS for peer in called(caller, live))
    assert sum(counts.values()) == len(CALLERS) * MAX_CALLEES
    usual = len(CALLERS) * MAX_CALLEES / len(live)
    assert set(counts) == set(live) and max(counts.values()) < 2.0 * usual and min(counts.values()) > 0.4 * usual


def test_a_peer_that_goes_is_replaced_without_changing_the_others() -> None:
    live = peers(40)
    before = called(CALLERS[0], live)
    gone = min(before)
    after = called(CALLERS[0], {peer: view for peer, view in live.items() if peer != gone})
    assert before - after == {gone} and len(after) == MAX_CALLEES


def test_a_failing_peer_is_kept_and_a_further_one_is_called() -> None:
    live = peers(40)
    before = called(CALLERS[0], live)
    failing = set(sorted(before)[:3])
    after = called(CALLERS[0], live, failing)
    assert before < after and len(after - failing) == MAX_CALLEES
    assert called(CALLERS[0], live, set(live)) == set(live), "if all fail, all are tried"


@pytest.mark.parametrize(("capacity", "times"), [(4.0, 4.0), (0.01, MIN_TIMES_MEDIAN)])
def test_a_peer_has_callers_in_proportion_to_its_capacity(capacity: float, times: float) -> None:
    live = peers(80)
    unusual = min(live)
    live[unusual] = replace(live[unusual], capacity=capacity)
    count = sum(unusual in called(caller, live) for caller in CALLERS)
    assert count == pytest.approx(times * len(CALLERS) * MAX_CALLEES / len(live), rel=0.4)


def test_a_claim_of_more_than_the_bound_brings_no_more_callers() -> None:
    live = peers(80)
    liar = min(live)
    bounded, wild = (live | {liar: replace(live[liar], capacity=c)} for c in (MAX_TIMES_MEDIAN, 1e9))
    assert all(called(caller, bounded) == called(caller, wild) for caller in CALLERS[:50])


def test_a_peer_whose_capacity_is_unknown_counts_as_usual() -> None:
    live, unknown = peers(40, capacity=2.0), PeerId("peer-007")
    assert called(CALLERS[0], live | {unknown: replace(live[unknown], capacity=0.0)}) == called(CALLERS[0], live)


def test_the_peer_that_already_holds_a_microbatch_is_asked_although_it_is_no_callee() -> None:
    live, me = peers(40), CALLERS[0]
    table = LoadBalancer(me, 3)
    table.update(1, tuple(live.values()))
    assert set(table.callees(1)) == called(me, live)
    other = min(set(live) - set(table.callees(1)))
    assert table.choose(100.0, MB, 1, 1000, RouteHint({1: other}, {other})).peer == other
    gone = PeerId("peer-999")
    assert table.choose(100.0, MB, 1, 1000, RouteHint({1: gone}, {gone})).peer in live
