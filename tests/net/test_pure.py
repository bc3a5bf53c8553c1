"""The network's decisions that need no network: who counts as gone, and where a peer can be dialled."""

from __future__ import annotations

import pytest
from agora_protocol.identity import Identity

from agora.net.rpc import dialling
from agora.net.rpc.dialling import AddressBook
from agora.net.rpc.liveness import LivenessCheck, Verdict


def judged(
    pulse: LivenessCheck, now: float, *, owed: bool = True, heard: float = 0.0, flushed: int = 0, backlog: int = 0
) -> str:
    return pulse.decide(now, owed=owed, heard_at=heard, flushed=flushed, backlog=backlog).name


def test_a_silent_peer_is_pinged_and_then_given_up() -> None:
    pulse = LivenessCheck(10.0, 5.0, 0.0)
    assert [judged(pulse, now) for now in (5.0, 10.0, 10.5, 11.0, 15.5, 15.6)] == [
        "ALIVE", "ALIVE", "PING", "ALIVE", "ALIVE", "GONE",
    ]  # fmt: skip
    assert pulse.alive_at == 0.0


def test_an_answer_in_the_very_moment_of_the_ping_counts() -> None:
    pulse = LivenessCheck(10.0, 5.0, 0.0)
    assert judged(pulse, 10.5) == "PING"
    assert judged(pulse, 16.0, heard=10.5) == "ALIVE"
    assert judged(pulse, 20.6, heard=10.5) == "PING"


def test_a_peer_that_owes_nothing_may_be_silent_and_its_silence_counts_from_the_next_call() -> None:
    pulse = LivenessCheck(10.0, 5.0, 0.0)
    assert judged(pulse, 100.0, owed=False) == "ALIVE"
    assert judged(pulse, 109.0) == "ALIVE"
    assert judged(pulse, 110.5) == "PING"
    assert judged(pulse, 111.0, owed=False) == "ALIVE"
    assert judged(pulse, 117.0) == "ALIVE"


def test_bytes_that_leave_a_backlog_are_a_sign_of_life_and_those_that_meet_none_are_not() -> None:
    slow, dead = LivenessCheck(10.0, 5.0, 0.0), LivenessCheck(10.0, 5.0, 0.0)
    for now in range(0, 40, 2):
        assert judged(slow, now, flushed=1000 * now, backlog=10**6) == "ALIVE"
    verdicts = [judged(dead, now, flushed=20 * now) for now in range(0, 40, 2)]  # its kernel takes our pings
    assert verdicts.index(Verdict.PING.name) < verdicts.index(Verdict.GONE.name)
    stuck = LivenessCheck(10.0, 5.0, 0.0)
    verdicts = [judged(stuck, now, flushed=500, backlog=10**6) for now in range(0, 40, 2)]
    assert Verdict.GONE.name in verdicts


def test_the_memory_of_strangers_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "MAX_PEERS", 10)
    book, strangers = AddressBook(), [Identity.generate().peer for _ in range(30)]
    for stranger in strangers:
        book.learn(stranger, [f"/ip4/10.0.0.1/tcp/1/p2p/{stranger}"])
    assert [bool(book.addresses(stranger)) for stranger in strangers] == [False] * 20 + [True] * 10


def test_only_addresses_that_lead_to_the_peer_are_learnt() -> None:
    peer, other = Identity.generate().peer, Identity.generate().peer
    book = AddressBook()
    good = f"/ip4/10.0.0.1/tcp/4001/p2p/{peer}"
    book.learn(peer, [f"/ip4/10.0.0.1/tcp/4001/p2p/{other}", "/unix/etc/passwd", good, "nonsense"])
    assert book.addresses(peer) == (good,)
    book.learn(peer, [])
    assert book.addresses(peer) == (good,)
    assert book.addresses(other) == ()
