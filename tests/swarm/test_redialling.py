"""Which peers are dialled again, when, and for how long; and that two halves of a swarm so find each other."""

from __future__ import annotations

import random

import pytest
from agora_protocol.ids import PeerId, Span

from agora.swarm.redialling import (
    FIRST_REDIAL_DELAY_S,
    JITTER,
    MAX_DIALS,
    MAX_REDIAL_DELAY_S,
    MAX_REMEMBERED,
    MEMORY_LIFETIME_S,
    Redialling,
)
from agora.swarm.view import PeerView, View

ME = PeerId("me")


def seen(name: str, state: str = "serving") -> PeerView:
    return PeerView(PeerId(name), Span(0, 0), 1, (f"/ip4/127.0.0.1/tcp/1/p2p/{name}",), state)


def view(*peers: PeerView) -> View:
    return View({peer.peer: peer for peer in peers})


def book() -> Redialling:
    return Redialling(ME, random.Random(0))


def test_a_peer_in_sight_is_not_dialled_and_one_out_of_sight_is() -> None:
    redialling = book()
    redialling.remember_view(0.0, view(seen("a"), seen("b")))
    assert redialling.take_due_peers(FIRST_REDIAL_DELAY_S, view(seen("a"))) == [PeerId("b")]
    assert redialling.addresses_of(PeerId("b")) == seen("b").addresses


def test_waits_double_up_to_the_longest_and_begin_anew_after_the_peer_was_seen() -> None:
    redialling, dials, now = book(), [], 0.0
    redialling.remember_view(now, view(seen("a")))
    while len(dials) < 8:
        now += 0.5
        if redialling.take_due_peers(now, View()):
            dials.append(now)
    gaps = [later - earlier for earlier, later in zip(dials, dials[1:], strict=False)]
    for index, gap in enumerate(gaps):
        wait = min(FIRST_REDIAL_DELAY_S * 2**index, MAX_REDIAL_DELAY_S)
        assert wait * (1 - JITTER) <= gap <= wait * (1 + JITTER) + 0.5
    redialling.remember_view(now, view(seen("a")))
    assert redialling.take_due_peers(now + FIRST_REDIAL_DELAY_S, View()) == [PeerId("a")]


def test_who_has_left_and_who_was_away_for_a_day_is_not_dialled() -> None:
    redialling = book()
    redialling.remember_view(0.0, view(seen("a"), seen("b")))
    redialling.remember_view(1.0, view(seen("a", "leaving")))
    assert redialling.take_due_peers(10.0, View()) == [PeerId("b")]
    redialling.remember_view(MEMORY_LIFETIME_S + 2.0, view(seen("c")))
    assert redialling.take_due_peers(MEMORY_LIFETIME_S + 3.0, view(seen("c"))) == []


def test_a_machine_that_was_offline_for_days_still_dials_those_that_it_saw_last() -> None:
    redialling = book()
    redialling.remember_view(0.0, view(seen("a")))
    redialling.remember_view(3 * MEMORY_LIFETIME_S, View())
    assert redialling.take_due_peers(3 * MEMORY_LIFETIME_S, View()) == [PeerId("a")]


def test_this_peer_is_never_dialled_and_those_of_the_invite_at_once() -> None:
    redialling = book()
    redialling.remember_view(0.0, view(seen("me")))
    redialling.learn(0.0, ME, ["/ip4/127.0.0.1/tcp/1/p2p/me"])
    redialling.learn(0.0, PeerId("a"), ["/ip4/127.0.0.1/tcp/1/p2p/a"])
    assert redialling.take_due_peers(0.0, View()) == [PeerId("a")]


def test_few_are_dialled_at_once_all_in_turn_and_only_the_last_seen_are_remembered() -> None:
    redialling = book()
    redialling.remember_view(0.0, view(*(seen(f"old{number}") for number in range(MAX_REMEMBERED))))
    redialling.remember_view(1.0, view(*(seen(f"new{number}") for number in range(2 * MAX_DIALS))))
    assert len(redialling.remembered_peers()) == MAX_REMEMBERED
    assert {f"new{number}" for number in range(2 * MAX_DIALS)} <= set(redialling.remembered_peers())
    dialled = [peer for _ in range(MAX_REMEMBERED // MAX_DIALS) for peer in redialling.take_due_peers(100.0, View())]
    assert sorted(dialled) == sorted(redialling.remembered_peers())


@pytest.mark.parametrize("apart_s", [60.0, 900.0, 6 * 3600.0])
def test_two_halves_dial_each_other_within_a_minute_of_their_links_return(apart_s: float) -> None:
    whole = [seen(name) for name in "abcdef"]
    books = {peer.peer: Redialling(peer.peer, random.Random(peer.peer)) for peer in whole}
    now = 0.0
    for redialling in books.values():
        redialling.remember_view(now, view(*whole))
    halves = {peer.peer: view(*whole[:3]) if index < 3 else view(*whole[3:]) for index, peer in enumerate(whole)}
    while now < apart_s:
        now += 5.0
        for peer, redialling in books.items():
            redialling.remember_view(now, halves[peer])
            redialling.take_due_peers(now, halves[peer])
    until, crossing = now + 60.0, set()
    while now < until:
        now += 5.0
        for peer, redialling in books.items():
            redialling.remember_view(now, halves[peer])
            crossing |= {(peer, other) for other in redialling.take_due_peers(now, halves[peer])}
    assert len(crossing) == 18, "everyone of each half has dialled everyone of the other"
