"""Claims about what a peer remembers of admission: proofs that were shown, revocations, the owner's bans."""

from __future__ import annotations

import pytest
from agora_protocol.errors import NotAdmitted, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_REVOCATIONS
from agora_protocol.tickets import InviteTicket, Revocation, Ticket, make_proof, seal_revocation, seal_ticket

from agora.swarm import admission
from agora.swarm.admission import AdmissionBook, AdmissionPolicy

RUN = RunId("ab" * 32)
FOUNDER, DELEGATE, PEER, STRANGER = (Identity(bytes([n]) * 32) for n in range(1, 5))
NOW = 1_790_000_000.0
POLICY = AdmissionPolicy(FOUNDER.peer, "ticket")


def proof_for(holder: Identity, role: str = "member", lifetime_s: int = 1000) -> bytes:
    ticket = Ticket(FOUNDER.peer, holder.peer, False, role, int(NOW) + lifetime_s)
    return make_proof(seal_ticket(ticket, RUN, FOUNDER))


def ban_of(subject: PeerId, by: Identity = FOUNDER, proof: bytes = b"", run: RunId = RUN) -> bytes:
    return seal_revocation(Revocation(by.peer, subject, int(NOW), proof), run, by)


def book(mode: str = "ticket") -> AdmissionBook:
    return AdmissionBook(RUN, AdmissionPolicy(FOUNDER.peer, mode))


def test_a_peer_that_has_shown_its_ticket_is_a_member_until_the_ticket_ends() -> None:
    made = book()
    assert not made.is_member(PEER.peer, NOW)
    assert made.refusal_reason(PEER.peer, NOW) == ""
    assert made.judge(PEER.peer, proof_for(PEER), NOW).is_member
    assert made.is_member(PEER.peer, NOW)
    assert made.refusal_reason(PEER.peer, NOW) == ""
    assert not made.is_member(PEER.peer, NOW + 2000)
    assert "expired" in made.refusal_reason(PEER.peer, NOW + 2000)
    made.judge(PEER.peer, proof_for(PEER, lifetime_s=5000), NOW + 2000)
    assert made.is_member(PEER.peer, NOW + 2000)


def test_a_claim_takes_part_by_the_proof_in_it_and_a_forged_one_by_nothing() -> None:
    made, good = book(), proof_for(PEER)
    assert made.is_member_by_proof(PEER.peer, good, NOW)
    assert not made.is_member_by_proof(STRANGER.peer, good, NOW)
    assert not made.is_member_by_proof(PEER.peer, good[:-1] + bytes([good[-1] ^ 1]), NOW)
    assert not made.is_member_by_proof(PEER.peer, b"\xc1", NOW)
    with pytest.raises(ProtocolError):
        made.judge(PEER.peer, b"\xc1", NOW)


def test_a_bearer_invite_makes_a_proof_for_whoever_uses_it_and_its_ban_reaches_them_all() -> None:
    key = Identity(bytes([9]) * 32)
    bearer = Ticket(FOUNDER.peer, key.peer, True, "member", int(NOW) + 1000)
    invite = InviteTicket(make_proof(seal_ticket(bearer, RUN, FOUNDER)), bytes([9]) * 32)
    made = book()
    for user in (PEER, STRANGER):
        assert made.judge(user.peer, invite.proof_for(user.peer, RUN), NOW).is_member
    assert not made.is_member_by_proof(DELEGATE.peer, invite.proof_for(PEER.peer, RUN), NOW)
    made.add_revocation(ban_of(key.peer), NOW)
    assert not any(made.is_member(user.peer, NOW) for user in (PEER, STRANGER))


def test_a_revocation_is_taken_once_and_kept_as_it_was_signed() -> None:
    made, sealed = book("open"), ban_of(PEER.peer)
    taken = made.add_revocation(sealed, NOW)
    assert taken is not None
    assert taken.subject == PEER.peer
    assert made.add_revocation(sealed, NOW) is None
    assert made.signed_revocations() == [sealed]
    assert "banned" in made.refusal_reason(PEER.peer, NOW)
    with pytest.raises(NotAdmitted, match="banned"):
        made.judge(PEER.peer, b"", NOW)
    with pytest.raises(ProtocolError):
        made.add_revocation(ban_of(STRANGER.peer, run=RunId("cd" * 32)), NOW)
    with pytest.raises(NotAdmitted, match="does not count"):
        made.add_revocation(ban_of(STRANGER.peer, STRANGER), NOW)


def test_the_owners_ban_holds_against_everyone_but_needs_no_signature() -> None:
    made = AdmissionBook(RUN, AdmissionPolicy(FOUNDER.peer), [PEER.peer])
    assert "owner" in made.refusal_reason(PEER.peer, NOW)
    assert not made.is_member(PEER.peer, NOW)
    made.banned_here.add(FOUNDER.peer)
    assert not made.is_member(FOUNDER.peer, NOW)
    assert made.is_member(STRANGER.peer, NOW)


def test_in_mode_listed_who_is_not_listed_is_not_even_asked() -> None:
    policy = AdmissionPolicy(FOUNDER.peer, "listed", frozenset({PEER.peer}), public_status=True)
    made = AdmissionBook(RUN, policy)
    assert made.refusal_reason(PEER.peer, NOW) == ""
    assert made.refusal_reason(STRANGER.peer, NOW) == "it may only read the status"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PEERS", 2)
    monkeypatch.setattr(admission, "MAX_PROOFS", 2)
    made = book()
    for holder in (PEER, DELEGATE, STRANGER):
        made.judge(holder.peer, proof_for(holder), NOW)
    assert len(made._proofs) == len(made._verified_proofs) == 2
    assert not made.is_member(PEER.peer, NOW), "it shows its ticket again at its next HELLO"


def test_the_founder_finds_room_for_a_ban_where_delegates_have_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_REVOCATIONS > 2
    monkeypatch.setattr(admission, "MAX_REVOCATIONS", 2)
    made, proof = book("open"), proof_for(DELEGATE, "delegate")
    ids = [Identity(bytes([n]) * 32).peer for n in range(50, 53)]
    for subject in ids[:2]:
        made.add_revocation(ban_of(subject, DELEGATE, proof), NOW)
    made.add_revocation(ban_of(ids[2]), NOW)
    assert [made.is_member(peer, NOW) for peer in ids] == [True, False, False]
    assert len(made.signed_revocations()) == 2
