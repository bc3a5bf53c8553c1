"""Which peer is asked, when, and until when: the pure decisions of the load balancer."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace

from agora_protocol.ids import PeerId, Span, microbatch_id
from hypothesis import given, settings
from hypothesis import strategies as st

from agora.pipeline.load_balancer import (
    MAX_BACKOFF_IF_ALL_FAIL_S,
    MAX_BACKOFF_S,
    MAX_SPEED_RATIO,
    NEWCOMER_CALLS,
    Attempt,
    LoadBalancer,
    PeerStats,
    RouteHint,
    attempt_deadline,
    choose_next,
    deadline_for_others,
    deadline_to_send,
    list_candidates,
    newcomer_stats,
)
from agora.swarm.view import PeerView
from tests.pipeline.world import peer_id

A, B, C = peer_id("a"), peer_id("b"), peer_id("c")
NONE = RouteHint()
MB = microbatch_id(b"session0", 1)
PAYLOAD = 1000


def measured(service_s: float, **rest) -> PeerStats:
    return PeerStats(service_s=service_s, answers=50, acceptances=50, **rest)


def table_of(costs: dict[PeerId, PeerStats], incarnation: int = 0) -> LoadBalancer:
    """A routing table in which stage 1 is served by copies of these peers, with PAYLOAD bytes in each microbatch."""
    made = LoadBalancer(peer_id("me"), 2)
    made.update(1, tuple(PeerView(peer, Span(1, 1), incarnation) for peer in costs))
    for peer, known in made.callees(1).items():
        for each in fields(PeerStats):
            setattr(known, each.name, getattr(costs[peer], each.name))
    return made


def sent(made: LoadBalancer, now: float = 100.0, peer: PeerId = A) -> Attempt:
    return made.record_sent(now, 1, peer, PAYLOAD, now + 60.0)


def choose(costs, now=100.0, microbatch=MB, hint=NONE):
    return choose_next(now, microbatch, 1, list_candidates(now, costs, PAYLOAD), hint)


def spread(costs: dict, count: int, *, answered: bool = True) -> Counter:
    """`count` microbatches, each answered before the next is sent: light load."""
    shares, made = Counter(), table_of(costs)
    for i in range(count):
        now = 100.0 + i
        peer = made.choose(now, microbatch_id(b"session0", i), 1, PAYLOAD, NONE).peer
        shares[peer] += 1
        attempt = sent(made, now, peer)
        if answered:
            made.record_answered(now + attempt.stats.service_s, attempt, attempt.stats.service_s, 0, math.inf)
            attempt.stats.sent_since = 0
    return shares


def test_shares_follow_measured_speeds_at_light_load() -> None:
    shares = spread({A: measured(0.1), B: measured(0.2)}, 300)
    assert 1.9 <= shares[A] / shares[B] <= 2.1


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6))
@settings(max_examples=25)
def test_shares_are_inverse_to_service_times_for_any_stage(services: list[float]) -> None:
    services = [max(s, max(services) / MAX_SPEED_RATIO) for s in services]  # nobody counts as faster than that
    costs = {peer_id(str(i)): measured(s) for i, s in enumerate(services)}
    shares = spread(dict(costs), 400)
    total = sum(1.0 / s for s in services)
    for peer, cost in costs.items():
        assert abs(shares[peer] - 400 / cost.service_s / total) <= 4 + 0.02 * 400


def test_a_slow_link_costs_a_peer_its_share_as_a_slow_device_does() -> None:
    shares = spread({A: measured(0.1), B: measured(0.1, bytes_per_s=PAYLOAD / 0.2)}, 300)
    assert 1.8 <= shares[A] / shares[B] <= 2.2


def test_a_long_round_trip_alone_costs_a_peer_no_share() -> None:
    shares = spread({A: measured(0.05), B: measured(0.05, round_trip_s=0.3)}, 300)
    assert 0.9 <= shares[A] / shares[B] <= 1.1


def test_a_queue_made_by_others_turns_microbatches_away() -> None:
    costs = {A: measured(0.1, queue=50, queue_at=100.0), B: measured(0.1)}
    shares = Counter(choose(costs, 100.0, microbatch_id(b"session0", i)).peer for i in range(20))
    assert shares == {B: 20}
    drained = choose(costs, 120.1)
    assert drained.peer in (A, B)
    assert math.isclose(list_candidates(120.1, costs, PAYLOAD)[0].finish_s, 0.1)


def test_a_newcomer_enters_at_the_median_and_gets_work_at_once_but_no_flood() -> None:
    costs = {A: measured(0.1, virtual_s=5000.0), B: measured(0.1, virtual_s=5000.1)}
    costs[C] = newcomer_stats(costs.values(), 7)
    assert costs[C].virtual_s == 5000.05
    assert costs[C].service_s == 0.1
    assert costs[C].incarnation == 7
    shares = spread(dict(costs), 30)
    assert 8 <= shares[C] <= 12
    shares = spread(dict(costs), 30, answered=False)
    assert shares[C] == NEWCOMER_CALLS, "until its first answer"


def test_a_peer_may_say_that_it_is_slow_but_not_that_it_is_fast() -> None:
    known = [measured(0.1)]
    assert newcomer_stats(known, 1, capacity=1000.0).service_s == 0.1
    assert newcomer_stats(known, 1, capacity=2.0).service_s == 0.5
    assert newcomer_stats([], 1, capacity=2.0).service_s == 0.5


def test_a_peer_that_was_away_for_hours_does_not_get_everything_when_it_returns() -> None:
    costs = {A: measured(0.1, virtual_s=9000.0), B: measured(0.1, virtual_s=10.0)}
    shares = spread(costs, 100)
    assert shares[B] <= 55


def test_busy_is_no_failure_and_gives_the_charge_back() -> None:
    made = table_of({A: measured(0.1, virtual_s=7.0, open_calls=3)})
    attempt, cost = sent(made), made.callees(1)[A]
    made.record_busy(100.0, attempt, 0.5)
    assert (cost.failures, cost.open_calls, cost.sent_since) == (0, 3, 0)
    assert math.isclose(cost.virtual_s, 7.0)
    assert cost.call_limit == 3.0
    assert cost.busy_until == 100.5
    assert choose({A: cost}, 100.6).peer is None, "three of ours are there, and that is all it takes"
    made.record_answered(101.0, attempt, 0.1, 0, math.inf)
    assert choose({A: cost}, 100.6).peer == A
    assert cost.call_limit > 3.0, "the limit is probed again"


def test_busy_peers_are_asked_again_after_the_wait_they_named() -> None:
    made = table_of({A: measured(0.1)})
    made.record_busy(100.0, sent(made), 0.5)
    choice = choose(made.callees(1), 100.1)
    assert choice.peer is None
    assert choice.look_again_at == 100.5
    assert "busy" in choice.reason
    assert choose(made.callees(1), 100.5).peer == A


def test_failures_back_off_exponentially_and_an_answer_forgives() -> None:
    made, waits = table_of({A: measured(0.1)}), []
    now, cost = 100.0, made.callees(1)[A]
    for _ in range(12):
        made.record_failed(now, sent(made, now), 0.0)
        waits.append(list_candidates(now, {A: cost, B: measured(0.1)}, PAYLOAD)[0].ready_at - now)
        now += waits[-1]
    assert [round(w, 6) for w in waits[:5]] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == MAX_BACKOFF_S
    assert math.isclose(cost.virtual_s, 0.0, abs_tol=1e-9)
    assert cost.open_calls == 0
    made.record_answered(now, sent(made, now), 0.1, 0, math.inf)
    assert cost.failures == 0


def test_the_only_replica_of_a_stage_is_not_left_alone_for_long() -> None:
    cost = replace(measured(0.1), failures=30, failed_at=100.0)
    choice = choose({A: cost}, 100.0)
    assert choice.peer is None
    assert choice.look_again_at == 100.0 + MAX_BACKOFF_IF_ALL_FAIL_S


def test_one_broken_connection_counts_once_however_many_calls_it_carried() -> None:
    made = table_of({A: measured(0.1)})
    for attempt in [sent(made) for _ in range(8)]:
        made.record_failed(100.0, attempt, 0.0)
    assert (made.callees(1)[A].failures, made.callees(1)[A].open_calls) == (1, 0)


def test_a_peer_that_kept_us_waiting_is_asked_as_much_more_rarely_and_one_call_at_a_time() -> None:
    made = table_of({A: measured(0.1), B: measured(0.1)})
    cost = made.callees(1)[A]
    made.record_failed(100.0, sent(made), 20.0)
    assert list_candidates(100.0, made.callees(1), PAYLOAD)[0].ready_at == 120.0
    assert list_candidates(100.0, {A: cost}, PAYLOAD)[0].ready_at == 104.0, "the only replica is asked soon"
    attempt = sent(made, 120.0)
    assert list_candidates(130.0, made.callees(1), PAYLOAD)[0].ready_at == math.inf, (
        "on trial until that call has ended"
    )
    made.record_answered(131.0, attempt, 0.1, 0, math.inf)
    assert (cost.failures, cost.wasted_s) == (0, 0.0)


def test_a_newer_incarnation_starts_with_a_clean_record() -> None:
    made = table_of({A: replace(measured(0.1), failures=9, failed_at=100.0, call_limit=1.0, busy_until=500.0)})
    made.update(1, (PeerView(A, Span(1, 1), 2),))
    assert choose(made.callees(1), 100.0).peer == A
    assert made.callees(1)[A].answers == 50


def test_a_peer_that_already_has_the_microbatch_is_preferred_however_loaded() -> None:
    costs = {A: measured(0.1, queue=99, queue_at=100.0), B: measured(0.1)}
    assert choose(costs, hint=RouteHint({1: A}, {A})).reason == "already holds the result of this microbatch"
    assert choose(costs, hint=RouteHint({1: A})).peer == A
    assert choose(costs, hint=RouteHint({2: A})).peer == B
    assert choose(costs, hint=RouteHint({1: C})).peer == B, "nobody outside the view is ever asked"


def test_who_holds_the_result_is_worth_a_short_wait_but_not_a_long_one() -> None:
    once = replace(measured(0.1), failures=1, failed_at=100.0)
    choice = choose({A: once, B: measured(0.1)}, 100.1, hint=RouteHint({1: A}, {A}))
    assert choice.peer is None
    assert choice.look_again_at == 100.25
    assert choose({A: once, B: measured(0.1)}, 100.1, hint=RouteHint({1: A})).peer == B
    often = replace(once, failures=5)
    assert choose({A: often, B: measured(0.1)}, 100.1, hint=RouteHint({1: A}, {A})).peer == B


def test_reasons_say_what_is_going_on() -> None:
    assert choose({}).reason == "no live peer holds stage 1"
    costs = {A: replace(measured(0.1), failures=1, failed_at=100.0), B: replace(measured(0.1), busy_until=101.0)}
    assert choose(costs).reason == "all 2 peers of stage 1 are not ready (backing off, busy); next in 0.25 s"
    assert choose({A: measured(0.1)}).reason == (
        "finishes in 0.100 s, with 0.000 s charged ahead: the least sum of 1 ready peers"
    )


def test_equal_peers_are_told_apart_by_the_microbatch_so_that_callers_do_not_herd() -> None:
    costs = {A: PeerStats(), B: PeerStats(), C: PeerStats()}
    first = Counter(choose(costs, microbatch=microbatch_id(b"session0", i)).peer for i in range(300))
    assert min(first[p] for p in (A, B, C)) > 50


def test_links_are_split_into_round_trip_and_bandwidth_where_the_round_trip_is_known() -> None:
    made = table_of({A: PeerStats(), B: PeerStats()})
    unknown, known = made.callees(1)[A], made.callees(1)[B]
    made.record_accepted(1.0, sent(made, 0.5, A), 4, None)
    assert (unknown.round_trip_s, unknown.bytes_per_s) == (0.5, math.inf)
    made.record_accepted(1.0, sent(made, 0.5, B), 4, 0.1)
    assert known.round_trip_s == 0.1
    assert math.isclose(known.bytes_per_s, 2500.0)
    assert (known.queue, known.queue_at, known.sent_since) == (4, 1.0, 0)
    made.record_accepted(2.0, sent(made, 1.7, B), 0, 0.1)
    assert math.isclose(1000 / known.bytes_per_s, 0.3), "the mean of 0.4 s and 0.2 s"


def test_a_peer_cannot_claim_less_than_no_time_nor_more_than_the_whole_call() -> None:
    for claimed, believed in ((-5.0, 1e-6), (1e9, 1.0)):
        made = table_of({A: PeerStats()})
        made.record_answered(101.0, sent(made), claimed, 0, math.inf)
        assert math.isclose(made.callees(1)[A].service_s, believed, rel_tol=1e-6)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "accepted", "answered", "busy", "failed", "abandoned"]),
            st.floats(0.0, 10.0),
            st.integers(0, 1 << 20),
        ),
        max_size=60,
    )
)
@settings(max_examples=100)
def test_no_sequence_of_news_makes_a_cost_that_cannot_be_ranked(news: list[tuple[str, float, int]]) -> None:
    made, now, attempts = table_of({A: PeerStats()}), 100.0, []
    cost = made.callees(1)[A]
    for what, number, count in news:
        now += number
        if what == "sent":
            attempts.append(made.record_sent(now, 1, A, count, now + 60.0))
        elif attempts:
            attempt = attempts[-1] if what == "accepted" else attempts.pop()
            {
                "accepted": lambda: made.record_accepted(now, attempt, count, 0.01),
                "answered": lambda: made.record_answered(now, attempt, number, count, number),
                "busy": lambda: made.record_busy(now, attempt, number),
                "failed": lambda: made.record_failed(now, attempt, number),
                "abandoned": lambda: made.record_abandoned(attempt),
            }[what]()
        candidate = list_candidates(now, {A: cost, B: PeerStats()}, PAYLOAD)[0]
        assert (
            math.isfinite(candidate.lead_s + candidate.finish_s)
            and candidate.lead_s >= 0.0
            and not math.isnan(candidate.ready_at)
        )
        assert cost.open_calls >= 0
        assert cost.sent_since >= 0
        assert cost.call_limit >= 1.0
        assert cost.service_s > 0


# --- deadlines


def test_an_attempt_gets_everything_when_alone_and_a_share_when_not() -> None:
    assert attempt_deadline(100.0, 160.0, 1.0, others=0, depth=1) == 160.0
    assert attempt_deadline(100.0, 160.0, 1.0, others=1, depth=1) == 130.0
    assert attempt_deadline(100.0, 160.0, 1.0, others=5, depth=2) == 140.0
    assert attempt_deadline(100.0, 160.0, 10.0, others=1, depth=1) == 140.0, "four times what it usually takes"
    assert attempt_deadline(100.0, 160.0, 99.0, others=1, depth=1) == 160.0
    assert attempt_deadline(100.0, 90.0, 1.0, others=1, depth=1) == 90.0


@given(st.integers(1, 64), st.floats(1.0, 600.0))
def test_every_caller_along_the_way_keeps_an_equal_part_for_a_retry(stages: int, total: float) -> None:
    deadline = total
    for stage in range(stages):
        mine, deadline = deadline, attempt_deadline(0.0, deadline, 0.0, others=1, depth=stages - stage)
        assert math.isclose(mine - deadline, total / (stages + 1), rel_tol=1e-6)
    assert math.isclose(deadline, total / (stages + 1), rel_tol=1e-6)


@given(st.floats(0.0, 1e4), st.floats(-10.0, 1e3), st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.integers(0, 9))
def test_deadlines_only_shrink_and_never_by_more_than_they_may(now, remaining, own, expected, others) -> None:
    deadline = now + remaining
    below = deadline_for_others(now, deadline, own)
    assert below <= deadline
    assert below >= deadline - 0.25 * max(0.0, remaining) - 1e-6
    attempt = attempt_deadline(now, below, expected, others, 3)
    assert attempt <= max(below, now) + 1e-6
    assert others or attempt == below
    told = deadline_to_send(now, attempt, expected)
    assert 1 <= told <= 600_000
    assert told <= max(1.0, 1000.0 * (attempt - now)) + 1
