"""Which span a peer claims, and who gives way when several chose at once."""

from __future__ import annotations

import random

from agora_protocol.ids import RunId, Span
from hypothesis import given, settings
from hypothesis import strategies as st

from agora.swarm.placement import (
    MAX_SETTLING_ROUNDS,
    Placement,
    Settling,
    choose_placement,
    hash_order,
    holders_by_stage,
    judge_collision,
    next_settling_step,
    pinned_span,
)
from agora.swarm.view import View
from tests.swarm.makers import RUN, seen, view


def choose(peers: View, stages: int, length: int = 1, seed: int = 0):
    return choose_placement(peers, stages, length, random.Random(seed))


def test_the_first_peer_may_take_any_stage_and_ties_are_broken_by_the_generator() -> None:
    assert {choose(View(), 4, seed=seed).span.first for seed in range(50)} == {0, 1, 2, 3}


def test_the_thinnest_stage_is_raised() -> None:
    placement = choose(view(seen("a", "0"), seen("b", "2")), 3)
    assert placement.span == Span(1, 1) and placement.reason == "stage 1 is the thinnest, held by nobody"


def test_of_spans_with_the_same_thinnest_stage_the_next_thinnest_decides() -> None:
    peers = view(seen("a", "0"), seen("b", "0"), seen("c", "2"), seen("d", "3"), seen("e", "3"))
    assert choose(peers, 4, length=2).span == Span(1, 2)


def test_joining_peers_count_and_leaving_ones_do_not() -> None:
    assert choose(view(seen("a", "0", "joining"), seen("b", "1", "leaving")), 2).span == Span(1, 1)


def test_a_span_longer_than_the_pipeline_is_the_whole_pipeline() -> None:
    assert choose(View(), 3, length=9).span == Span(0, 2)


def test_a_pinned_span_is_taken_and_its_meaning_said() -> None:
    peers = view(seen("a", "0"), seen("b", "1"), seen("c", "1"))
    assert pinned_span(peers, 2, Span(1, 1)).reason == "as asked for; stage 1 is held by 2 peers"
    assert pinned_span(peers, 2, Span(0, 0)).reason == "as asked for; stage 0 is the thinnest, held by 1 peer"


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_peers_that_come_one_after_another_hold_all_stages_about_equally(stages, length, peers, seed) -> None:
    rng, now = random.Random(seed), View()
    for i in range(peers):
        span = choose_placement(now, stages, length, rng).span
        now = View({**now.peers, f"p{i}": seen(f"p{i}", str(span))})
    holders = holders_by_stage(now, stages)
    assert sum(holders) == peers * min(length, stages)
    if length == 1:
        assert max(holders) - min(holders) <= 1
    covering = -(-stages // min(length, stages))
    assert peers < 2 * covering or min(holders) >= 1, "every stage is covered by twice as many peers as could cover it"


def test_who_stands_well_stays_whatever_the_order() -> None:
    peers = view(*(seen(f"p{i}", str(i % 2), "joining") for i in range(6)))
    for me in peers.peers.values():
        assert judge_collision(peers, me, 2, RUN).span == me.span


def test_of_two_that_chose_at_once_the_later_in_the_hash_order_chooses_again() -> None:
    peers = view(seen("a", "0", "joining"), seen("b", "0", "joining"))
    verdicts = {p.peer: judge_collision(peers, p, 2, RUN) for p in peers.peers.values()}
    first, second = sorted(verdicts, key=lambda peer: hash_order(RUN, peer))
    assert (verdicts[first].span, verdicts[second].span) == (Span(0, 0), Span(1, 1))
    assert "come first" in verdicts[second].reason and "give way" in verdicts[first].reason


def test_the_order_is_another_in_every_run() -> None:
    peers = [seen(f"p{i}", "0").peer for i in range(8)]
    orders = {tuple(sorted(peers, key=lambda p: hash_order(RunId(f"{r:064x}"), p))) for r in range(20)}
    assert len(orders) > 15


def test_a_joiner_gives_way_to_those_who_serve() -> None:
    peers = view(seen("a", "0"), seen("b", "0", "joining"))
    assert judge_collision(peers, peers.peers[seen("b", "0").peer], 2, RUN).span == Span(1, 1)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 10), st.integers(0, 5), st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_joiners_that_all_choose_at_once_settle_and_leave_no_stage_thinner_than_need_be(
    stages: int, length: int, joiners: int, serving: int, seed: int
) -> None:
    rng = random.Random(seed)
    length = min(length, stages)
    now = View()
    for i in range(serving):
        span = choose_placement(now, stages, 1, rng).span
        now = View({**now.peers, f"s{i}": seen(f"s{i}", str(span))})
    base = dict(now.peers)
    names = [f"j{i}" for i in range(joiners)]
    spans = {name: choose_placement(now, stages, length, rng).span for name in names}
    for _ in range(3):
        peers = {name: seen(name, str(span), "joining") for name, span in spans.items()}
        now = View({p.peer: p for p in [*base.values(), *peers.values()]})
        verdicts = {name: judge_collision(now, p, stages, RUN) for name, p in peers.items()}
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
        judge_collision(peers, me, 2, RUN)


CLAIMED = Settling(Placement(Span(0, 0), "chosen"))
KEPT, LAST_KEPT = (Placement(Span(0, 0), "others give way", is_final=last) for last in (False, True))
MOVED, BACK = (Placement(Span(stage, stage), "others come first") for stage in (1, 0))


def settle(*judged: Placement, settling: Settling = CLAIMED) -> Settling:
    for placement in judged:
        assert not settling.settled
        settling = next_settling_step(settling, placement)
    return settling


def test_a_span_is_settled_at_once_when_no_joiner_has_to_choose_again() -> None:
    assert settle(LAST_KEPT) == Settling(CLAIMED.placement, rounds=1, kept=1, settled=True)


def test_a_span_that_was_kept_three_times_in_a_row_is_settled_although_others_still_choose() -> None:
    assert not settle(KEPT, KEPT).settled
    assert settle(KEPT, KEPT, KEPT).settled


def test_a_joiner_that_must_choose_again_claims_the_other_span_and_begins_to_count_anew() -> None:
    moved = settle(KEPT, KEPT, MOVED)
    assert moved == Settling(Placement(Span(1, 1), "others come first"), rounds=3, kept=0, settled=False)
    assert not settle(KEPT, KEPT, settling=moved).settled


def test_settling_ends_after_its_last_round_whatever_others_do() -> None:
    moved = settle(*[MOVED, BACK] * (MAX_SETTLING_ROUNDS // 2))
    assert moved.settled and moved.placement == BACK
    assert settle(*[KEPT, MOVED, MOVED, BACK] * (MAX_SETTLING_ROUNDS // 4)).settled
