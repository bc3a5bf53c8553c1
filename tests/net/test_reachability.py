"""How reachable a peer is, at which relays it holds reservations, and what it announces."""

from __future__ import annotations

import pytest
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.core.calls import Announcement
from agora.net.nat.reachability import (
    RECHECK_INTERVAL_S,
    REFUSED_RELAY_PAUSE_S,
    RETRY_INTERVAL_S,
    Findings,
    RelayRefusals,
    build_announcement,
    choose_relays,
    classify_reachability,
    confirmed_addresses,
    needs_relays,
)

ME, *RELAYS = (Identity.generate().peer for _ in range(6))
OUTSIDE, INSIDE = "/ip4/44.77.0.1/tcp/4001", "/ip4/192.168.1.2/tcp/4001"


def relay(peer: PeerId, reachability: str = "public", relays_for: int = 16) -> tuple[PeerId, Announcement]:
    return peer, Announcement(reachability, (), relays_for)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (Findings(), "unknown"),
        (Findings(relays=(RELAYS[0],)), "unknown"),
        (Findings(10.0, reached=(OUTSIDE,)), "public"),
        (Findings(10.0, relays=(RELAYS[0],), was_punched=True), "punched"),
        (Findings(10.0, relays=(RELAYS[0],)), "relayed"),
        (Findings(10.0), "unreachable"),
        (Findings(10.0, was_punched=True), "unreachable"),
    ],
)
def test_reachability_is_what_others_have_shown(findings: Findings, expected: str) -> None:
    assert classify_reachability(findings) == expected


def test_neighbours_are_asked_again_sooner_when_none_has_reached_this_peer() -> None:
    assert Findings().is_due(0.0)
    assert not Findings(10.0).is_due(10.0 + RETRY_INTERVAL_S) and Findings(10.0).is_due(10.1 + RETRY_INTERVAL_S)
    reached = Findings(10.0, reached=(OUTSIDE,))
    assert not reached.is_due(10.0 + RECHECK_INTERVAL_S) and reached.is_due(10.1 + RECHECK_INTERVAL_S)
    assert Findings(10.0, reached=(OUTSIDE,), is_confirmed=False).is_due(10.1 + RETRY_INTERVAL_S)


def test_one_false_answer_neither_makes_nor_hides_an_address_at_which_others_reached_this_peer() -> None:
    stranger = "/ip4/44.77.0.99/tcp/4001"
    assert confirmed_addresses([{stranger}, {OUTSIDE}, {OUTSIDE}], (), 3) == (OUTSIDE,)
    assert confirmed_addresses([{stranger}, set(), set()], (), 3) == ()
    assert confirmed_addresses([{stranger}], (), 2) == (), "the other neighbour has not answered"
    assert confirmed_addresses([[stranger, stranger]], (), 2) == (), "a neighbour has one vote for an address"


def test_one_neighbour_is_enough_for_an_address_of_this_peers_own_or_when_there_is_no_other_neighbour() -> None:
    assert confirmed_addresses([{OUTSIDE}, set()], (OUTSIDE,), 2) == (OUTSIDE,)
    assert confirmed_addresses([{OUTSIDE}], (), 1) == (OUTSIDE,)


def test_a_peer_holds_two_relays_that_can_be_dialled_and_offer_it() -> None:
    known = dict(
        [
            relay(ME),
            relay(RELAYS[0], reachability="punched"),
            relay(RELAYS[1], relays_for=0),
            relay(RELAYS[2], reachability="relayed"),
            relay(RELAYS[3]),
            relay(RELAYS[4]),
        ]
    )
    assert set(choose_relays(ME, known, (), ())) == set(RELAYS[3:5])


def test_a_relay_that_is_held_stays_and_one_that_refused_is_left_out() -> None:
    known = dict(map(relay, RELAYS))
    held = choose_relays(ME, known, (), (), count=5)[-1]
    first, second = choose_relays(ME, known, [held], ())
    assert first == held
    assert second not in choose_relays(ME, known, [held], [second])


def test_peers_spread_over_the_relays() -> None:
    known = dict(map(relay, RELAYS))
    chosen = {choose_relays(Identity.generate().peer, known, (), ())[0] for _ in range(60)}
    assert chosen == set(RELAYS)


def test_a_refusal_is_forgotten_after_a_minute() -> None:
    refusals = RelayRefusals({RELAYS[0]: 0.0, RELAYS[1]: 30.0})
    assert refusals.refusing_relays(REFUSED_RELAY_PAUSE_S + 1.0) == {RELAYS[1]}


def test_a_public_peer_announces_where_it_was_reached_and_what_it_offers() -> None:
    told = build_announcement(ME, (INSIDE,), Findings(1.0, reached=(OUTSIDE,)), {}, 16)
    assert told.addresses == (f"{OUTSIDE}/p2p/{ME}", f"{INSIDE}/p2p/{ME}")
    assert (told.reachability, told.relays_for) == ("public", 16)


def test_a_peer_that_was_reached_only_behind_its_nat_has_relays_as_well() -> None:
    findings = Findings(1.0, reached=(OUTSIDE,), relays=(RELAYS[0],))
    assert needs_relays(findings, (INSIDE,)) and not needs_relays(findings, (INSIDE, OUTSIDE))
    told = build_announcement(ME, (), findings, {RELAYS[0]: (f"/ip4/44.77.0.9/tcp/1/p2p/{RELAYS[0]}",)}, 16)
    assert told.addresses == (f"{OUTSIDE}/p2p/{ME}", f"/ip4/44.77.0.9/tcp/1/p2p/{RELAYS[0]}/p2p-circuit/p2p/{ME}")


def test_another_announces_its_relays_and_offers_nothing() -> None:
    held, lost = RELAYS[:2]
    circuit = f"{OUTSIDE}/p2p/{held}"
    known = {held: (circuit, f"{circuit}/p2p-circuit/p2p/{held}"), lost: (f"{OUTSIDE}/p2p/{lost}",)}
    told = build_announcement(ME, (), Findings(1.0, relays=(held,)), known, 16)
    assert told.addresses == (f"{circuit}/p2p-circuit/p2p/{ME}",), "a relay behind a relay is none"
    assert (told.reachability, told.relays_for) == ("relayed", 0)
