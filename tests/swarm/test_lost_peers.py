"""Which peers count as gone before their claims end."""

from __future__ import annotations

from dataclasses import replace

from agora_protocol.ids import PeerId, Span

from agora.swarm.lost_peers import LOST_LIFETIME_S, MAX_BROKEN_DIALS, LostPeers
from agora.swarm.view import PeerView, View

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def seen(peer: PeerId, incarnation: int = 1) -> PeerView:
    return PeerView(peer, Span(0, 0), incarnation, (f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",), "serving")


def view(*peers: PeerId) -> View:
    return View({peer: seen(peer) for peer in peers})


def lost(peer: PeerId = A, *, connected: frozenset[PeerId] = frozenset({B})) -> LostPeers:
    """After `peer` was connected, is no longer, and could not be dialled, at time 1."""
    peers = LostPeers()
    assert peers.update_connected(0.0, connected | {peer}, view(A, B, C)) == []
    assert [due.peer for due in peers.update_connected(1.0, connected, view(A, B, C))] == [peer]
    peers.record_failed_dial(1.0, peer, 1)
    return peers


def test_a_peer_whose_connection_broke_is_dialled_once() -> None:
    peers = LostPeers()
    peers.update_connected(0.0, {A, B}, view(A, B))
    assert peers.update_connected(1.0, {B}, view(A, B)) == [seen(A)]
    assert peers.update_connected(2.0, {B}, view(A, B)) == []
    assert not peers.is_lost(seen(A)), "no dial has failed"


def test_a_peer_that_cannot_be_dialled_is_lost() -> None:
    assert lost().is_lost(seen(A))
    assert not lost().is_lost(seen(B))


def test_a_peer_that_was_never_connected_is_not_suspected() -> None:
    peers = LostPeers()
    assert peers.update_connected(0.0, {A}, view(A, B)) == peers.update_connected(1.0, {A}, view(A, B)) == []


def test_a_connection_of_somebody_who_is_no_peer_of_the_view_is_nobodys_concern() -> None:
    peers = LostPeers()
    peers.update_connected(0.0, {A, B, C}, view(A))
    assert [due.peer for due in peers.update_connected(1.0, set(), view(A))] == [A]


def test_a_peer_that_said_that_it_leaves_is_not_dialled() -> None:
    peers, leaving = LostPeers(), View({A: replace(seen(A), state="leaving"), B: seen(B)})
    peers.update_connected(0.0, {A, B}, view(A, B))
    assert peers.update_connected(1.0, {B}, leaving) == peers.update_connected(2.0, {B}, leaving) == []
    assert not peers.is_lost(seen(A))


def test_nobody_is_lost_while_this_machine_has_no_connection_at_all() -> None:
    peers = LostPeers()
    peers.update_connected(0.0, {A, B}, view(A, B))
    assert len(peers.update_connected(1.0, set(), view(A, B))) == 2
    assert not peers.record_failed_dial(1.0, A, 1)
    assert not peers.is_lost(seen(A))


def test_a_lost_peer_that_connects_again_is_there_again() -> None:
    peers = lost()
    peers.update_connected(2.0, {A, B}, view(B))
    assert not peers.is_lost(seen(A))


def test_a_peer_that_connected_while_it_was_dialled_is_not_lost() -> None:
    peers = LostPeers()
    peers.update_connected(0.0, {A, B}, view(A, B))
    peers.update_connected(1.0, {B}, view(A, B))
    peers.update_connected(2.0, {A, B}, view(A, B))
    assert not peers.record_failed_dial(3.0, A, 1)


def test_a_later_claim_brings_a_lost_peer_back_and_an_older_one_does_not() -> None:
    peers = lost()
    assert not peers.is_lost(seen(A, incarnation=2))
    assert peers.is_lost(seen(A, incarnation=0))


def test_after_a_while_a_claim_is_believed_again() -> None:
    peers = lost()
    peers.update_connected(LOST_LIFETIME_S, {B}, view(B))
    assert peers.is_lost(seen(A))
    peers.update_connected(1.0 + LOST_LIFETIME_S, {B}, view(B))
    assert not peers.is_lost(seen(A))


def test_many_broken_connections_are_dialled_a_few_at_a_time_and_nobody_is_left_out() -> None:
    many = [PeerId(f"peer {number:02}") for number in range(3 * MAX_BROKEN_DIALS - 1)]
    peers, everybody = LostPeers(), view(*many, B)
    peers.update_connected(0.0, {*many, B}, everybody)
    dialled = [peers.update_connected(1.0 + turn, {B}, everybody) for turn in range(4)]
    assert [len(turn) for turn in dialled] == [MAX_BROKEN_DIALS, MAX_BROKEN_DIALS, MAX_BROKEN_DIALS - 1, 0]
    assert {due.peer for turn in dialled for due in turn} == set(many)
