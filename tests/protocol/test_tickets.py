"""Claims about tickets as bytes: what an invite's ticket becomes when it is used, and what is refused."""

from __future__ import annotations

import pytest
from agora_protocol.errors import InputError, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.limits import MAX_PROOF_BYTES, MAX_TICKETS
from agora_protocol.tickets import (
    InviteTicket,
    Revocation,
    Ticket,
    extend_proof,
    make_proof,
    open_proof,
    open_revocation,
    run_token,
    seal_revocation,
    seal_ticket,
)

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
FOUNDER, PEER, STRANGER = (Identity(bytes([n]) * 32) for n in range(1, 4))
SECRET = bytes([9]) * 32
BEARER = Identity(SECRET)


def proof(holder: Identity, *, bearer: bool = False, role: str = "member") -> bytes:
    return make_proof(seal_ticket(Ticket(FOUNDER.peer, holder.peer, bearer, role, 100), RUN, FOUNDER))


def test_a_bearer_ticket_is_bound_to_the_key_of_who_uses_it_and_its_secret_is_nowhere_in_the_proof() -> None:
    invite = InviteTicket.parse(str(InviteTicket(proof(BEARER, bearer=True, role="reader"), SECRET)))
    shown = invite.proof_for(PEER.peer, RUN)
    first, last = open_proof(shown, RUN)
    assert (first.holder, last.issuer, last.holder) == (BEARER.peer, BEARER.peer, PEER.peer)
    assert (last.role, last.not_after, last.bearer) == ("reader", 100, False)
    assert SECRET not in shown and SECRET.hex() not in repr(invite)


def test_a_ticket_for_one_peer_is_shown_as_it_is() -> None:
    invite = InviteTicket(proof(PEER))
    assert invite.proof_for(PEER.peer, RUN) == proof(PEER)
    with pytest.raises(InputError, match="The invite is for 12D3"):
        invite.proof_for(STRANGER.peer, RUN)


@pytest.mark.parametrize(
    ("ticket", "run", "says"),
    [
        (InviteTicket(proof(PEER)), OTHER_RUN, "not one of this run"),
        (InviteTicket(proof(PEER), SECRET), RUN, "do not belong together"),
        (InviteTicket(proof(BEARER, bearer=True), bytes(32)), RUN, "do not belong together"),
    ],
)
def test_an_invites_ticket_that_cannot_be_used_says_why(ticket: InviteTicket, run: RunId, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ticket.proof_for(PEER.peer, run)


@pytest.mark.parametrize("text", ["", "x", "====", str(InviteTicket(proof(PEER)))[:-4], str(InviteTicket(b"", SECRET))])
def test_a_damaged_ticket_says_what_to_do(text: str) -> None:
    with pytest.raises(InputError, match="copy the whole line"):
        InviteTicket.parse(text)


def test_nobody_seals_for_another_and_a_signature_is_of_one_run_and_one_kind() -> None:
    with pytest.raises(ProtocolError, match="only be sealed by its issuer"):
        seal_ticket(Ticket(FOUNDER.peer, PEER.peer, False, "member", 1), RUN, PEER)
    ban = seal_revocation(Revocation(FOUNDER.peer, PEER.peer, 5, b""), RUN, FOUNDER)
    assert open_revocation(ban, RUN).subject == PEER.peer
    for data, run in ((ban, OTHER_RUN), (ban[:-1] + bytes([ban[-1] ^ 1]), RUN)):
        with pytest.raises(ProtocolError) as caught:
            open_revocation(data, run)
        assert caught.value.code == "bad-signature"
    with pytest.raises(ProtocolError):
        open_proof(make_proof(ban), RUN)


def test_a_proof_is_short() -> None:
    longest = proof(PEER)
    for _ in range(MAX_TICKETS - 1):
        longest = extend_proof(
            longest, seal_ticket(Ticket(FOUNDER.peer, PEER.peer, False, "delegate", 1), RUN, FOUNDER)
        )
    assert len(open_proof(longest, RUN)) == MAX_TICKETS and len(longest) <= MAX_PROOF_BYTES
    with pytest.raises(ProtocolError, match="1 to 3 tickets|at most"):
        open_proof(extend_proof(longest, b""), RUN)
    assert open_proof(b"", RUN) == () and make_proof() == b""


def test_the_token_of_a_hello_differs_for_each_run_salt_sender_and_receiver() -> None:
    made = {
        run_token(run, salt, sender, receiver)
        for run in (RUN, OTHER_RUN)
        for salt in (bytes(16), bytes([1]) * 16)
        for sender, receiver in ((PEER.peer, STRANGER.peer), (STRANGER.peer, PEER.peer))
    }
    assert len(made) == 8 and all(bytes.fromhex(RUN) not in token for token in made)
