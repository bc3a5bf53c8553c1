"""When a stage steps, by what its replicas have heard of each other."""

from __future__ import annotations

import random

import pytest

from agora.replica.stage_view import (
    GONE_AFTER_S,
    GOSSIP_FANOUT,
    SILENCE_TIMEOUT_S,
    DirectReport,
    ReplicaCounts,
    ReplicaProgress,
    choose_targets,
    closing_times,
    compose_gossip,
    count_tokens,
    lagging_replicas,
    leading_step,
    live_replicas,
    merge_gossip,
    missing_tokens,
    newcomers,
    reached_step,
    record_failure,
    record_view,
    round_members,
    suspected_replicas,
    unreachable_replicas,
)
from tests.replica.world import identities

ME, A, B, C = identities(4)


def known(*numbers: tuple[str, int, int, int], at: float = 0.0) -> dict:
    """As each said itself: its id, step, tokens, and the tokens of its share before."""
    return {
        peer: ReplicaProgress(
            ReplicaCounts(step, step, tokens, tokens), at, before, direct=DirectReport(step, step, tokens, at)
        )
        for peer, step, tokens, before in numbers
    }


def entry(
    peer: str, step: int, tokens: int, age_ms: int, counted: int | None = None, open_step: int | None = None
) -> tuple:
    """A gossiped entry of a replica that has counted nothing before, and whose share is that of its next step."""
    open_step = step if open_step is None else open_step
    return peer, step, open_step, tokens, tokens if counted is None else counted, 0, 0, 0, 0, age_ms


def test_what_the_others_have_counted_need_not_be_counted_here() -> None:
    others = known((A, 5, 300, 0), (B, 5, 200, 0))
    assert missing_tokens(others, 5, 1000) == 500
    assert missing_tokens(others, 6, 1000) == 1000, "counts of an earlier step are of no use"
    assert missing_tokens(known((A, 5, 5000, 0)), 5, 1000) == 1, "who has counted anything at all steps"


def test_a_replica_that_has_stepped_took_its_tokens_with_it() -> None:
    table = merge_gossip(known((A, 5, 300, 0)), [entry(A, 6, 10, 0, counted=310)], A, ME, 1.0)
    assert count_tokens(table, 5) == 300
    assert count_tokens(table, 6) == 10
    table = merge_gossip(table, [entry(A, 9, 4, 0)], A, ME, 2.0)
    assert count_tokens(table, 8) == 0, "of a jump nothing is known"
    assert count_tokens(known((A, 9, 4, 300)), 5) == 0, "nor of an earlier step"


def test_a_replica_that_has_closed_its_share_counts_with_what_it_held() -> None:
    table = merge_gossip(known((A, 5, 300, 0)), [entry(A, 5, 40, 0, counted=380, open_step=6)], A, ME, 1.0)
    assert count_tokens(table, 5) == 340
    assert count_tokens(table, 6) == 40
    assert closing_times(table, 5) == [1.0]
    assert closing_times(table, 4) == [1.0], "of a step before, only the time of the present open step is known"
    assert closing_times(table, 6) == []
    later = merge_gossip(table, [entry(A, 5, 90, 0, counted=430, open_step=6)], A, ME, 2.0)
    assert closing_times(later, 5) == [1.0], "since it was first said"
    both = merge_gossip(known((A, 5, 300, 0), (B, 5, 300, 0)), [entry(B, 5, 0, 0, open_step=6)], B, ME, 3.0)
    both = merge_gossip(both, [entry(A, 5, 0, 0, open_step=7)], A, ME, 2.0)
    assert closing_times(both, 5) == [2.0, 3.0]
    told = merge_gossip(known((A, 5, 300, 0)), [entry(A, 5, 40, 0, counted=380, open_step=6)], B, ME, 1.0)
    assert closing_times(told, 5) == [], "others' word is not enough"


def test_the_rate_of_a_replica_is_measured_by_what_it_reports_itself() -> None:
    table = known((A, 5, 0, 0))
    for tick in range(1, 41):
        table = merge_gossip(table, [entry(A, 5, 50 * tick, 0)], A, ME, 0.5 * tick)
    assert table[A].direct.meter.per_second == pytest.approx(100.0)
    lied = merge_gossip(table, [entry(A, 5, 10**9, 0)], B, ME, 20.0)
    assert lied[A].direct.meter.per_second == pytest.approx(100.0)
    assert merge_gossip(table, [entry(A, 0, 10, 0)], A, ME, 21.0)[A].direct.meter.per_second is None, "it has restarted"


def test_old_gossip_keeps_nobody_alive_and_changes_nothing() -> None:
    table = known((A, 5, 300, 0))
    soon = merge_gossip(table, [entry(A, 5, 200, 0)], B, ME, 1.0)
    assert soon[A] == table[A], "a third peer's lower number"
    late = merge_gossip(table, [entry(A, 5, 300, 1500)], B, ME, SILENCE_TIMEOUT_S)
    assert late[A].reported_at == SILENCE_TIMEOUT_S - 1.5, "as old as it was when it was told"
    assert merge_gossip(table, [entry(A, 5, 300, 7000)], B, ME, SILENCE_TIMEOUT_S) == table
    assert live_replicas(table, [A, B], SILENCE_TIMEOUT_S + 0.1) == {}
    assert live_replicas(table, [B], 0.0) == {}


def test_two_that_tell_each_other_of_a_dead_one_forget_it_in_time() -> None:
    tables = {ME: known((A, 5, 300, 0)), B: known((A, 5, 200, 0), at=-3.0)}
    for tick in range(40):
        now = 0.25 * tick
        for one, other in ((ME, B), (B, ME)):
            news = compose_gossip(tables[one], one, ReplicaCounts(5, 5, tick, tick), [ME, A, B], now)
            tables[other] = merge_gossip(tables[other], news, one, other, now)
    for peer, table in tables.items():
        assert A not in live_replicas(table, [ME, A, B], 0.25 * 39), peer
        assert unreachable_replicas(table, [ME, A, B], 0.25 * 39) == {A}


def test_a_replica_that_did_not_answer_is_unreachable_until_it_reports_again() -> None:
    table = record_failure(known((A, 5, 300, 0)), A, 1.0)
    assert unreachable_replicas(table, [A, B], 1.0) == {A}
    assert live_replicas(table, [A], 1.0) == {}
    assert unreachable_replicas(merge_gossip(table, [entry(A, 5, 300, 500)], B, ME, 1.2), [A], 1.2) == {A}, (
        "it spoke before it was lost"
    )
    assert unreachable_replicas(merge_gossip(table, [entry(A, 5, 310, 100)], B, ME, 1.2), [A], 1.2) == set()
    assert unreachable_replicas(merge_gossip(table, [entry(A, 5, 300, 0)], A, ME, 1.2), [A], 1.2) == set()
    assert unreachable_replicas(record_failure({}, A, 1.0), [A, B], 1.0) == {A}, (
        "it was never heard; of the other nothing is known"
    )


def test_a_replica_to_which_connections_break_for_a_second_is_gone_until_it_is_heard_again() -> None:
    table = known((A, 5, 300, 0), at=10.0)
    for seconds, others in ((0.1, {A}), (0.6, {A}), (1.0, {A}), (0.1 + GONE_AFTER_S, set())):
        table = record_failure(table, A, 10.0 + seconds, broken=True)
        assert round_members(table, {A}, 10.0 + seconds) == others, seconds
    old = merge_gossip(table, [entry(A, 5, 300, 1500)], B, ME, 11.2)
    assert not round_members(old, {A}, 11.2), "what another one heard before"
    new = merge_gossip(table, [entry(A, 5, 300, 0)], B, ME, 11.2)
    assert round_members(new, {A}, 11.2) == {A}
    again = record_failure(new, A, 11.3, broken=True)
    assert round_members(again, {A}, 11.3) == {A}, "it has another second"


def test_a_replica_is_a_newcomer_for_its_first_three_steps_and_before_it_has_reported() -> None:
    table = known((A, 40, 0, 0), (B, 40, 0, 0))
    joined = (*entry(B, 41, 0, 0)[:-3], 38, 0, 0)
    table = merge_gossip(table, [joined], B, ME, 0.0)
    assert newcomers(table, [A, B, C], 40) == {B, C}
    assert newcomers(table, [A, B, C], 41) == {C}
    assert newcomers(known((A, 0, 0, 0)), [A, C], 0) == set(), "at the first step all are"
    early = merge_gossip(known((A, 2, 0, 0)), [(*entry(B, 2, 0, 0)[:-3], 1, 0, 0)], B, ME, 0.0)
    assert [newcomers(early, [A, B, C], step) for step in (1, 2, 3, 4)] == [{B, C}, {B, C}, {B, C}, {C}]
    assert newcomers(record_failure({}, A, 0.0), [A], 40) == {A}, "it has reported nothing"
    assert lagging_replicas(known((A, 38, 0, 0), (B, 39, 0, 0)), [A, B, C], 40) == {A}


def test_a_replica_that_does_not_answer_in_time_is_not_gone() -> None:
    table = known((A, 5, 300, 0), at=10.0)
    for seconds in range(1, 6):
        table = record_failure(table, A, 10.0 + seconds)
        assert round_members(table, {A}, 10.0 + seconds) == suspected_replicas(table, {A}, 10.0 + seconds) == {A}
    assert not round_members(table, {A}, 16.1)
    assert not suspected_replicas(table, {A}, 16.1)


def test_a_replica_that_started_again_says_so_itself() -> None:
    table = known((A, 50, 300, 0))
    assert merge_gossip(table, [entry(A, 0, 0, 0)], B, ME, 1.0)[A].counts.step == 50
    assert merge_gossip(table, [entry(A, 0, 0, 0)], A, ME, 1.0)[A].counts.step == 0


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([6, 5, 5], 6), ([5, 5, 5], 5), ([10**9, 5, 5], 5), ([9, 9, 5], 9), ([4, 4, 4], 5), ([10**9], 10**9), ([], 5)],
)
def test_whom_a_replica_follows(steps: list[int], expected: int) -> None:
    others = known(*((peer, step, 400, 400) for peer, step in zip((A, B, C), steps, strict=False)))
    assert reached_step(others, len(steps), 5, 100, 1000) == expected


def test_one_that_steps_without_tokens_carries_nobody() -> None:
    others = known((A, 6, 0, 0), (B, 5, 10, 0), (C, 5, 10, 0))
    assert reached_step(others, 3, 5, 10, 1000) == 5


def test_one_that_is_heard_first_is_no_majority() -> None:
    for step in (6, 7, 10**9):
        assert reached_step(known((A, step, 400, 400)), 5, 5, 100, 1000) == 5
    assert reached_step(known((A, 9, 4, 4), (B, 8, 4, 4)), 4, 5, 100, 1000) == 8


def test_gossip_about_others_is_no_majority() -> None:
    table = known((A, 5, 100, 0), (B, 5, 100, 0), (C, 5, 100, 0))
    lies = merge_gossip(table, [entry(C, 155, 1, 0), entry(A, 155, 1, 0), entry(B, 155, 1, 0)], C, ME, 1.0)
    assert lies[A].counts.step == 155, "believed until it speaks itself"
    assert reached_step(live_replicas(lies, [A, B, C], 1.0), 3, 5, 100, 1000) == 5
    near = merge_gossip(table, [entry(C, 6, 1, 0), entry(A, 6, 1, 0), entry(B, 6, 1, 0)], C, ME, 1.0)
    assert reached_step(live_replicas(near, [A, B, C], 1.0), 3, 5, 10, 2000) == 5, (
        "nor one step ahead, without its tokens"
    )
    said = merge_gossip(near, [entry(A, 6, 1, 0)], A, ME, 1.0)
    assert reached_step(live_replicas(said, [A, B, C], 1.0), 3, 5, 10, 2000) == 6


def test_a_replica_whose_call_failed_belongs_to_an_all_reduce_step_until_it_is_silent() -> None:
    table = record_failure(known((A, 5, 300, 0)), A, 1.0)
    assert unreachable_replicas(table, [A], 1.0) == {A}
    assert round_members(table, [A, B], SILENCE_TIMEOUT_S) == {A, B}, (
        "it may be alive; of the other nothing is known yet"
    )
    assert round_members(table, [A, B], SILENCE_TIMEOUT_S + 0.1) == {B}
    never_heard = record_failure({}, A, 1.0)
    assert round_members(never_heard, [A], 1.0 + SILENCE_TIMEOUT_S) == {A}
    assert not round_members(never_heard, [A], 7.1)


def test_a_replica_that_the_view_does_not_list_yet_belongs_to_an_all_reduce_step_and_one_that_has_left_does_not() -> (
    None
):
    table = known((A, 5, 300, 0))
    assert round_members(table, [], 1.0) == {A}, "the view lags"
    assert round_members(merge_gossip({}, [entry(A, 5, 300, 0)], B, ME, 0.0), [], 1.0) == set(), (
        "others' word is not enough"
    )
    assert round_members(table, [], SILENCE_TIMEOUT_S + 0.1) == set()
    listed = record_view(table, [A], 1.0)
    assert listed[A].listed
    assert round_members(record_view(listed, [], 2.0), [], 2.0) == set()


def test_what_is_known_of_those_that_are_neither_listed_nor_live_is_forgotten() -> None:
    table = known((A, 5, 300, 0), (B, 5, 300, 0))
    assert set(record_view(table, [A], SILENCE_TIMEOUT_S)) == {A, B}
    assert set(record_view(table, [A], SILENCE_TIMEOUT_S + 0.1)) == {A}


def test_few_replicas_are_all_gossiped_to_and_of_many_a_few() -> None:
    rng = random.Random(0)
    assert set(choose_targets([ME, A, B, C], ME, rng)) == {A, B, C}
    many = identities(40)
    assert len(set(choose_targets(many, many[0], rng))) == GOSSIP_FANOUT
    assert compose_gossip(known((A, 5, 1, 0)), ME, ReplicaCounts(5, 5, 2, 9), [A], 0.0) == (
        (ME, 5, 5, 2, 9, 0, 0, 0, 0, 0),
        entry(A, 5, 1, 0),
    )


@pytest.mark.parametrize("replicas", [3, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_replicas_that_lose_a_fifth_of_their_messages_step_together(replicas: int) -> None:
    """A simulation of ticks: everyone counts at its own pace, gossips as StepGossip does, and steps by the rules."""
    rng, peers, target = random.Random(1), identities(replicas), 1000 * replicas
    step = dict.fromkeys(peers, 0)
    tokens, counted = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
    tables: dict = {peer: {} for peer in peers}
    spent: list[int] = []
    for tick in range(200):
        now = 0.25 * tick
        for peer in peers:
            tokens[peer] += rng.randrange(0, 200)
        for peer in peers:
            for other in choose_targets(peers, peer, rng):
                if rng.random() > 0.2:
                    own = ReplicaCounts(step[peer], step[peer], tokens[peer], counted[peer] + tokens[peer])
                    news = compose_gossip(tables[peer], peer, own, peers, now)
                    tables[other] = merge_gossip(tables[other], news, peer, other, now)
        for peer in peers:
            others = live_replicas(tables[peer], peers, now)
            reached = reached_step(others, replicas - 1, step[peer], tokens[peer], target)
            if tokens[peer] >= missing_tokens(others, step[peer], target):
                reached = max(reached, step[peer] + 1)
            if reached > step[peer]:
                spent.append(tokens[peer])
                counted[peer] += tokens[peer]
                step[peer], tokens[peer] = reached, 0
        assert max(step.values()) - min(step.values()) <= 2
    per_step = sum(spent) / max(step.values())
    assert 0.97 * target <= per_step <= 1.35 * target, per_step / target


def test_the_furthest_stage_is_not_what_a_single_replica_claims() -> None:
    assert leading_step([[40, 40, 41], [20, 10**12], []]) == 40
    assert leading_step([[3], [7]]) == 7
    assert leading_step([[], []]) == 0
