"""Which span a peer claims, and who gives way when several chose at once."""

from __future__ import annotations

import random

import pytest
from agora_protocol.ids import RunId, Span
from hypothesis import given, settings
from hypothesis import strategies as st

from agora.swarm.placement import (
    MAX_SETTLING_TURNS,
    Placement,
    Settling,
    choose_placement,
    holders_by_stage,
    judge_collision,
    next_settling,
    place_as_pinned,
    settling_order_key,
)
from agora.swarm.stage_capacity import MachineCapacity, StageCapacity, StageNeeds, equal_needs, spans_that_fit
from agora.swarm.view import StageEstimate, View
from tests.swarm.makers import RUN, seen, view


def up_to(length: int, stages: int, speed: float = 0.0, bandwidth: float = 0.0) -> MachineCapacity:
    """A machine into whose memory `length` stages fit."""
    return MachineCapacity(speed, bandwidth, tuple(min(length, stages - first) for first in range(stages)))


def choose(peers: View, stages: int, length: int = 1, seed: int = 0):
    return choose_placement(peers, equal_needs(stages), up_to(length, stages), random.Random(seed))


def test_the_first_peer_may_take_any_stage_and_ties_are_broken_by_the_generator() -> None:
    assert {choose(View(), 4, seed=seed).span.first for seed in range(50)} == {0, 1, 2, 3}


def test_the_thinnest_stage_is_raised() -> None:
    placement = choose(view(seen("a", "0"), seen("b", "2")), 3)
    assert placement.span == Span(1, 1)
    assert placement.reason == "stage 1 is the thinnest, held by nobody"


def test_of_spans_with_the_same_thinnest_stage_the_next_thinnest_decides() -> None:
    peers = view(seen("a", "0"), seen("b", "0"), seen("c", "2"), seen("d", "3"), seen("e", "3"))
    assert choose(peers, 4, length=2).span == Span(1, 2)


def test_the_first_of_two_that_could_cover_the_run_leaves_a_gap_that_one_peer_can_fill() -> None:
    assert {choose(View(), 4, length=2, seed=seed).span for seed in range(20)} == {Span(0, 1), Span(2, 3)}


def test_stages_with_one_holder_come_before_slow_ones() -> None:
    peers = view(*(seen(name, "0", capacity=0.1) for name in "ab"), seen("c", "1", capacity=100.0))
    assert choose(peers, 2).span == Span(1, 1)


def test_the_slowest_stage_is_raised_although_it_has_more_holders() -> None:
    slow = [seen(f"s{i}", "0", capacity=1.0) for i in range(4)]
    fast = [seen(f"f{i}", "1", capacity=10.0) for i in range(2)]
    assert choose(view(*slow, *fast), 2).span == Span(0, 0)


def test_a_stage_of_more_work_needs_more_holders() -> None:
    needs = StageNeeds((0.5, 1.5), 0.0, (0.0, 0.0))
    peers = view(*(seen(f"a{i}", "0") for i in range(2)), *(seen(f"b{i}", "1") for i in range(3)))
    assert choose_placement(peers, needs, up_to(1, 2), random.Random(0)).span == Span(1, 1)


def test_a_machine_with_a_slow_uplink_goes_to_an_end_or_takes_longer_spans() -> None:
    """At an end of the model it sends one boundary for each microbatch, in the middle two."""
    needs = StageNeeds((1.0,) * 3, 100.0, (0.0,) * 3)
    peers = view(*(seen(f"p{i}", str(i % 3), capacity=10.0) for i in range(6)))
    spans = {choose_placement(peers, needs, up_to(1, 3, 10.0, 100.0), random.Random(n)).span for n in range(20)}
    assert spans == {Span(0, 0), Span(2, 2)}
    assert choose_placement(peers, needs, up_to(3, 3, 10.0, 100.0), random.Random(0)).span == Span(0, 2)


def test_a_claim_of_an_absurd_speed_does_not_hide_that_its_stage_is_slow() -> None:
    honest = [seen(f"h{i}", str(i % 2), capacity=1.0) for i in range(2)]
    many = [seen(f"m{i}", "0", capacity=1.0) for i in range(200)]
    assert choose(view(*honest, *many, seen("liar", "1", capacity=1e9)), 2).span == Span(1, 1)


def test_a_machine_that_no_stage_fits_stands_by() -> None:
    placement = choose(View(), 2, length=0)
    assert placement.span is None
    assert "fits into this machine's memory" in placement.reason


def test_a_machine_with_less_than_two_percent_of_the_median_rate_stands_by_while_no_stage_is_thin() -> None:
    peers = [seen(f"p{i}", str(i % 2), capacity=10.0) for i in range(4)]
    slow, needs = up_to(1, 2, speed=0.19), equal_needs(2)
    placement = choose_placement(view(*peers), needs, slow, random.Random(0))
    assert placement.span is None
    assert placement.reason.startswith("it would do 1.9% of what others do")
    assert choose_placement(view(*peers), needs, up_to(1, 2, speed=0.21), random.Random(0)).span is not None
    assert choose_placement(view(*peers[:3]), needs, slow, random.Random(0)).span == Span(1, 1), "a thin stage"
    assert choose_placement(view(*peers), needs, up_to(1, 2), random.Random(0)).span is not None, "unknown speed"
    crowd = view(*(seen(f"p{i}", "0", capacity=10.0) for i in range(200)))
    assert choose(crowd, 1).span is not None, "one of very many is still as useful as the others"


def test_of_many_lengths_not_all_are_tried_but_always_the_longest() -> None:
    spans = spans_that_fit(tuple(200 - first for first in range(200)))
    assert len(spans) < 200 * 25
    assert {Span(0, 199), Span(199, 199), Span(0, 7)} <= set(spans)


def test_joining_peers_count_and_leaving_ones_do_not() -> None:
    assert choose(view(seen("a", "0", "joining"), seen("b", "1", "leaving")), 2).span == Span(1, 1)


def test_a_span_longer_than_the_pipeline_is_the_whole_pipeline() -> None:
    assert choose(View(), 3, length=9).span == Span(0, 2)


def test_a_pinned_span_is_taken_and_its_meaning_said() -> None:
    peers = view(seen("a", "0"), seen("b", "1"), seen("c", "1"))
    assert place_as_pinned(peers, 2, Span(1, 1)).reason == "as asked for; stage 1 is held by 2 peers"
    assert place_as_pinned(peers, 2, Span(0, 0)).reason == "as asked for; stage 0 is the thinnest, held by 1 peer"


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=60)
def test_peers_that_come_one_after_another_hold_all_stages_about_equally(stages, length, peers, seed) -> None:
    rng, now = random.Random(seed), View()
    for i in range(peers):
        span = choose_placement(now, equal_needs(stages), up_to(length, stages), rng).span
        now = View({**now.peers, f"p{i}": seen(f"p{i}", str(span))})
    holders = holders_by_stage(now, stages)
    if length == 1:
        assert sum(holders) == peers
        assert max(holders) - min(holders) <= 1
    covering = -(-stages // min(length, stages))
    assert peers < 2 * covering or min(holders) >= 1, "every stage is covered by twice as many peers as could cover it"


def test_who_stands_well_stays_whatever_the_order() -> None:
    peers = view(*(seen(f"p{i}", str(i % 2), "joining") for i in range(6)))
    for me in peers.peers.values():
        assert judge_collision(peers, me, equal_needs(2), RUN).span == me.span


def test_of_two_that_chose_at_once_the_later_in_the_hash_order_chooses_again() -> None:
    peers = view(seen("a", "0", "joining"), seen("b", "0", "joining"))
    verdicts = {p.peer: judge_collision(peers, p, equal_needs(2), RUN) for p in peers.peers.values()}
    first, second = sorted(verdicts, key=lambda peer: settling_order_key(RUN, peer))
    assert (verdicts[first].span, verdicts[second].span) == (Span(0, 0), Span(1, 1))
    assert verdicts[second].reason.startswith("placed after 1 peer that chose at the same time")
    assert "give way" in verdicts[first].reason


def test_the_order_is_another_in_every_run() -> None:
    peers = [seen(f"p{i}", "0").peer for i in range(8)]
    orders = {tuple(sorted(peers, key=lambda p: settling_order_key(RunId(f"{r:064x}"), p))) for r in range(20)}
    assert len(orders) > 15


def test_a_joiner_gives_way_to_those_who_serve() -> None:
    peers = view(seen("a", "0"), seen("b", "0", "joining"))
    assert judge_collision(peers, peers.peers[seen("b", "0").peer], equal_needs(2), RUN).span == Span(1, 1)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 10), st.integers(0, 5), st.integers(0, 999))
@settings(max_examples=80)
def test_joiners_that_all_choose_at_once_settle_and_leave_no_stage_thinner_than_need_be(
    stages: int, length: int, joiners: int, serving: int, seed: int
) -> None:
    rng = random.Random(seed)
    length = min(length, stages)
    now = View()
    for i in range(serving):
        span = choose_placement(now, equal_needs(stages), up_to(1, stages), rng).span
        now = View({**now.peers, f"s{i}": seen(f"s{i}", str(span))})
    base = dict(now.peers)
    names = [f"j{i}" for i in range(joiners)]
    spans = {name: choose_placement(now, equal_needs(stages), up_to(length, stages), rng).span for name in names}
    for _ in range(3):
        peers = {name: seen(name, str(span), "joining") for name, span in spans.items()}
        now = View({p.peer: p for p in [*base.values(), *peers.values()]})
        verdicts = {name: judge_collision(now, p, equal_needs(stages), RUN) for name, p in peers.items()}
        former, spans = spans, {name: verdict.span for name, verdict in verdicts.items()}
        if spans == former:
            break
    else:
        raise AssertionError("they did not settle")
    holders = holders_by_stage(now, stages)
    if length == 1:
        assert max(holders) - min(holders) <= 1


def test_a_claim_of_stages_that_the_run_does_not_have_harms_nobody() -> None:
    peers = view(seen("a", "0", "joining"), seen("b", "0-900", "joining"))
    for me in peers.peers.values():
        judge_collision(peers, me, equal_needs(2), RUN)


CLAIMED = Settling(Placement(Span(0, 0), "chosen"))
KEPT, LAST_KEPT = (Placement(Span(0, 0), "others give way", is_final=last) for last in (False, True))
MOVED, BACK = (Placement(Span(stage, stage), "others come first") for stage in (1, 0))


def settle(*judged: Placement, settling: Settling = CLAIMED) -> Settling:
    for placement in judged:
        assert not settling.settled
        settling = next_settling(settling, placement)
    return settling


def test_a_span_is_settled_at_once_when_no_joiner_has_to_choose_again() -> None:
    assert settle(LAST_KEPT) == Settling(CLAIMED.placement, turns=1, kept=1, settled=True)


def test_a_span_that_was_kept_three_times_in_a_row_is_settled_although_others_still_choose() -> None:
    assert not settle(KEPT, KEPT).settled
    assert settle(KEPT, KEPT, KEPT).settled


def test_a_joiner_that_must_choose_again_claims_the_other_span_and_begins_to_count_again() -> None:
    moved = settle(KEPT, KEPT, MOVED)
    assert moved == Settling(Placement(Span(1, 1), "others come first"), turns=3, kept=0, settled=False)
    assert not settle(KEPT, KEPT, settling=moved).settled


def test_settling_ends_after_its_last_turn_whatever_others_do() -> None:
    moved = settle(*[MOVED, BACK] * (MAX_SETTLING_TURNS // 2))
    assert moved.settled
    assert moved.placement == BACK
    assert settle(*[KEPT, MOVED, MOVED, BACK] * (MAX_SETTLING_TURNS // 4)).settled


def test_in_a_run_that_is_not_read_whole_a_stages_peers_are_estimated() -> None:
    known = View({f"p{number}": seen(f"p{number}", "0") for number in range(4)}, {0: StageEstimate(40.0, 8.0)})
    assert holders_by_stage(known, 2) == [40, 0]
    assert "stage 0 is held by 40 peers" in place_as_pinned(known, 2, Span(0, 0)).reason


@pytest.mark.parametrize("claim", [5.0, 64.0, 1e12])
@pytest.mark.parametrize("honest", [3, 15])
def test_a_claimed_speed_counts_as_at_most_four_times_the_median(claim: float, honest: int) -> None:
    peers = [seen(f"p{n}", str(n % 2), capacity=1.0) for n in range(honest)]
    capacity = StageCapacity(view(*peers, seen("liar", "1", capacity=claim)), equal_needs(2))
    served = sum(1 for peer in peers if peer.span.first == 1)
    assert capacity.rates[1] / capacity.rates[0] == pytest.approx((served + 4.0) / (honest - served))
