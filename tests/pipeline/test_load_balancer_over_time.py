"""The routing table as the router uses it: who is known, what calls teach, what is forgotten."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from agora_protocol.ids import Span, microbatch_id

from agora.pipeline.load_balancer import (
    MAX_SPEED_RATIO,
    NEWCOMER_CALLS,
    Attempt,
    LoadBalancer,
    RouteHint,
    must_use_relay,
)
from agora.swarm.view import PeerView
from tests.pipeline.world import peer_id

ME, A, B, C = (peer_id(name) for name in ("me", "a", "b", "c"))
MB = microbatch_id(b"session0", 1)
PAYLOAD, STAGES = 1000, 3


def views(*peers: str, incarnation: int = 1) -> tuple[PeerView, ...]:
    return tuple(PeerView(peer, Span(1, 1), incarnation, state="serving") for peer in peers)


def table(*peers: str) -> LoadBalancer:
    made = LoadBalancer(ME, STAGES)
    made.update(1, views(*peers))
    return made


def send(made: LoadBalancer, peer: str, now: float = 100.0, deadline: float = 160.0) -> Attempt:
    return made.record_sent(now, 1, peer, PAYLOAD, deadline)


def chosen(made: LoadBalancer, now: float = 100.0) -> str | None:
    return made.choose(now, MB, 1, PAYLOAD, RouteHint()).peer


def test_a_peer_never_chooses_itself_nor_one_that_is_suspended() -> None:
    made = table(ME, A)
    assert set(made.callees(1)) == {A}
    made.update(1, views(ME, A), suspended={A})
    assert made.callees(1) == {}
    assert "is suspended" in made.choose(100.0, MB, 1, PAYLOAD, RouteHint()).reason
    made.update(1, views(ME, A))
    assert chosen(made) == A, "it enters again as a newcomer when it is not suspended any more"


def test_updating_with_the_same_replicas_changes_nothing() -> None:
    made, seen = LoadBalancer(ME, STAGES), views(A, B)
    made.update(1, seen)
    send(made, A)
    known = made.callees(1)
    made.update(1, seen)
    assert made.callees(1) == known


def test_a_call_charges_the_peer_and_a_refusal_gives_the_charge_back() -> None:
    made = table(A, B)
    attempt = send(made, A)
    assert made.callees(1)[A].virtual_s > 0
    assert made.callees(1)[A].open_calls == 1
    made.record_busy(100.5, attempt, 2.0)
    cost = made.callees(1)[A]
    assert (cost.virtual_s, cost.open_calls, cost.failures, cost.busy_until) == (0.0, 0, 0, 102.5)


def test_an_answer_teaches_speed_and_returns_the_time_on_the_link() -> None:
    made = table(A)
    attempt = send(made, A)
    made.record_accepted(100.2, attempt, 3, 0.2)
    assert math.isclose(made.record_answered(101.0, attempt, 0.5, 500, math.inf), 0.2)
    cost = made.callees(1)[A]
    assert (cost.service_s, cost.answers, cost.open_calls, cost.queue) == (0.5, 1, 0, 3)


def test_failures_back_off_and_a_useless_answer_counts_as_one() -> None:
    made = table(A, B)
    made.record_failed(100.0, send(made, A), wasted_s=0.0)
    assert chosen(made) == B
    made.record_rejected(100.0, 1, B)
    assert [cost.failures for cost in made.callees(1).values()] == [1, 1]
    assert chosen(made) is None
    assert chosen(made, 100.25) in (A, B)


def test_an_attempt_leaves_time_for_another_replica_only_when_there_is_a_healthy_one() -> None:
    made = table(A, B)
    assert send(made, A).until == 100.0 + 60.0 * 2 / 3, "two stages are left: two thirds of the time"
    made.record_rejected(100.0, 1, B)
    assert send(made, A).until == 160.0
    assert send(made, A).deadline_ms == 60_000


def test_a_peer_that_has_gone_is_forgotten_when_its_last_call_has_ended() -> None:
    made = table(A, B)
    first, second = send(made, A), send(made, A)
    made.update(1, views(B))
    assert set(made.callees(1)) == {B}
    made.record_answered(101.0, first, 0.1, 0, math.inf)
    made.update(1, views(A, B))
    assert made.callees(1)[A].answers == 1, "it came back while a call was open"
    made.update(1, views(B))
    made.record_abandoned(second)
    made.update(1, views(A, B))
    assert made.callees(1)[A].answers == 0, "a newcomer"


def test_a_restarted_peer_is_forgiven_and_a_newcomer_gets_two_calls_until_its_first_answer() -> None:
    made = table(A)
    attempt = send(made, A)
    made.record_answered(101.0, attempt, 0.1, 0, math.inf)
    made.record_failed(101.0, send(made, A, 101.0), 30.0)
    made.update(1, views(A, incarnation=2))
    assert (made.callees(1)[A].failures, made.callees(1)[A].answers) == (0, 1)
    made.update(1, views(A, B, incarnation=2))
    for _ in range(NEWCOMER_CALLS):
        send(made, B, 102.0)
    made.record_rejected(102.0, 1, A)
    assert chosen(made, 102.1) is None, "one backs off, the other is new and has its two calls"


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_peer_that_says_it_needs_no_time_gets_a_bounded_share(others: int) -> None:
    liar, *honest = names = [peer_id(f"p{number}") for number in range(others + 1)]
    made, counts, now = table(*names), Counter[str](), 0.0
    for number in range(2000):
        peer = made.choose(now, microbatch_id(b"session0", number), 1, PAYLOAD, RouteHint()).peer
        assert peer is not None
        attempt = send(made, peer, now, now + 60.0)
        made.record_accepted(now, attempt, 0, 0.0)
        now += 0.1
        made.record_answered(now, attempt, 0.0 if peer == liar else 0.1, PAYLOAD, 0.1)
        counts[peer] += 1
    assert counts[liar] <= 1.05 * MAX_SPEED_RATIO * min(counts[peer] for peer in honest)
    assert counts[liar] <= 1.02 * 2000 * MAX_SPEED_RATIO / (MAX_SPEED_RATIO + others)


def shares_of_a_stage(
    odd_s: float, honest: int, *, load: float, lies: bool, downstream_s: float = 0.0, joins_at: int = 0
) -> tuple[float, float, float]:
    """Serial devices in virtual time: the share of one that needs `odd_s`, the mean share of those that need 0.25 s and
    are called, and the seconds of work that wait at the end. lies: the one says 0 ms, no queue, and 10^9 a second."""
    odd, *others = names = [peer_id(f"odd {number}") for number in range(honest + 1)]
    claims = {peer: 1e9 if lies and peer == odd else 4.0 for peer in names}
    service, free_at, counts = dict.fromkeys(others, 0.25) | {odd: odd_s}, dict.fromkeys(names, 0.0), Counter[str]()
    made, now, open_calls = LoadBalancer(ME, STAGES), 0.0, list[tuple[float, int, Attempt]]()
    for number in range(1600):
        present = others if number < joins_at else names
        rate = sum(1.0 / service[peer] for peer in present[:8])
        now += 1.0 / rate / load
        for call in sorted((call for call in open_calls if call[0] <= now), key=lambda call: call[:2]):
            open_calls.remove(call)
            said = 0.0 if lies and call[2].peer == odd else service[call[2].peer]
            made.record_answered(call[0], call[2], said, PAYLOAD, 1.0)
        views = tuple(PeerView(peer, Span(1, 1), 1, state="serving", capacity=claims[peer]) for peer in present)
        made.update(1, views)
        peer = made.choose(now, microbatch_id(b"session0", number), 1, PAYLOAD, RouteHint()).peer
        if peer is None:
            continue
        attempt = send(made, peer, now, now + 60.0)
        queue = 0 if lies and peer == odd else int(max(0.0, free_at[peer] - now) / service[peer])
        made.record_accepted(now + 0.01, attempt, queue, 0.01)
        counts[peer] += number >= 600
        free_at[peer] = max(now, free_at[peer]) + service[peer]
        open_calls.append((free_at[peer] + downstream_s + 0.01, number, attempt))
    called = [counts[peer] / counts.total() for peer in others if counts[peer]]
    return counts[odd] / counts.total(), sum(called) / len(called), max(free_at.values()) - now


@pytest.mark.parametrize("joins_at", [0, 400])
@pytest.mark.parametrize("downstream_s", [0.0, 0.25])
@pytest.mark.parametrize("load", [0.5, 0.95])
@pytest.mark.parametrize("honest", [3, 15])
def test_a_liar_that_says_it_needs_no_time_and_has_no_queue_gets_what_its_equals_get(
    honest: int, load: float, downstream_s: float, joins_at: int
) -> None:
    liar, equal, waiting_s = shares_of_a_stage(
        0.25, honest, load=load, lies=True, downstream_s=downstream_s, joins_at=joins_at
    )
    assert liar <= equal + 0.02
    assert waiting_s < 2.0, "it was sent no more than it can do"


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_a_liar_that_answers_without_work_gets_what_an_honest_peer_of_that_speed_gets(load: float) -> None:
    liar, others, _ = shares_of_a_stage(0.02, 3, load=load, lies=True)
    honest, _, _ = shares_of_a_stage(0.02, 3, load=load, lies=False)
    assert liar <= honest + 0.02 and others > 0.05, "and the others are asked"


@pytest.mark.parametrize("load", [0.5, 0.95])
@pytest.mark.parametrize("downstream_s", [0.0, 0.25])
@pytest.mark.parametrize("service_s", [0.025, 2.5])
def test_honest_peers_ten_times_as_fast_or_slow_as_others_get_that_share(
    service_s: float, downstream_s: float, load: float
) -> None:
    odd, others, _ = shares_of_a_stage(service_s, 3, load=load, lies=False, downstream_s=downstream_s)
    assert odd / others == pytest.approx(0.25 / service_s, rel=0.05)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ("public", "relayed", False),
        ("relayed", "public", False),
        ("punched", "punched", False),
        ("unknown", "unknown", False),
        ("punched", "relayed", True),
        ("relayed", "relayed", True),
        ("unreachable", "punched", True),
    ],
)
def test_two_peers_meet_through_a_relay_when_neither_can_be_dialled_and_one_opens_no_holes(
    mine: str, theirs: str, expected: bool
) -> None:
    assert must_use_relay(mine, theirs) is expected


def test_a_peer_that_is_reached_directly_gets_more_than_one_behind_a_relay() -> None:
    made = LoadBalancer(ME, STAGES)
    replicas = tuple(replace(view, reachability=r) for view, r in zip(views(A, B), ("punched", "relayed"), strict=True))
    made.update(1, replicas, own_reachability="punched")
    sent = Counter[str]()
    for number in range(300):
        now, peer = 100.0 + number, made.choose(100.0 + number, MB, 1, PAYLOAD, RouteHint()).peer
        assert peer is not None
        sent[peer] += 1
        attempt = send(made, peer, now, now + 60.0)
        made.record_accepted(now, attempt, 0, 0.0)
        made.record_answered(now + 0.25, attempt, 0.25, PAYLOAD, 1.0)
    assert sent[A] / sent[B] == pytest.approx(1.5, rel=0.1)
