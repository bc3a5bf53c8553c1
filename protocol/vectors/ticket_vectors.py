"""The vectors of admission: tickets, proofs, revocations, and how a HELLO names its run; `make.py` writes them."""

from __future__ import annotations

from typing import Any

import msgpack
from agora_protocol import messages
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.tickets import (
    REVOCATION_TAG,
    TICKET_TAG,
    InviteTicket,
    Revocation,
    Ticket,
    make_proof,
    open_proof,
    run_token,
    seal_revocation,
    seal_ticket,
)

BEARER_SECRET = bytes(range(100, 132))


def proofs(run: RunId, founder: Identity, other: Identity, until_unix: int) -> dict[str, bytes]:
    """Returns proofs by name: of a named peer, of a delegate, and of `founder` by a bearer ticket of the delegate."""
    named = seal_ticket(Ticket(founder.peer, other.peer, False, "member", until_unix), run, founder)
    delegate = seal_ticket(Ticket(founder.peer, other.peer, False, "delegate", until_unix), run, founder)
    bearer = Identity(BEARER_SECRET)
    reader = seal_ticket(Ticket(other.peer, bearer.peer, True, "reader", until_unix), run, other)
    invite = InviteTicket(make_proof(delegate, reader), BEARER_SECRET)
    return {
        "named": make_proof(named),
        "delegate": make_proof(delegate),
        "invite": invite.proof,
        "bearer": invite.proof_for(other.peer, run),
    }


def revocations(run: RunId, founder: Identity, other: Identity, now_unix: int) -> list[tuple[Revocation, bytes]]:
    """Returns revocations and their sealed bytes: by the founder, and by a delegate."""
    proof = proofs(run, founder, other, now_unix + 86_400)["delegate"]
    by_founder = Revocation(founder.peer, other.peer, now_unix, b"")
    by_delegate = Revocation(other.peer, Identity(BEARER_SECRET).peer, now_unix, proof)
    return [
        (by_founder, seal_revocation(by_founder, run, founder)),
        (by_delegate, seal_revocation(by_delegate, run, other)),
    ]


def invite_vectors(run: RunId, proof: bytes, addresses: tuple[str, str]) -> list[dict[str, Any]]:
    """Returns invites in their parts and as text; the last one has a bearer ticket with this proof."""
    made = [
        Invite(run, addresses[:1], "tiny"),
        Invite(run, addresses, "two words"),
        Invite(run, addresses[:1]),
        Invite(run, addresses[:1], "tiny", str(InviteTicket(proof, BEARER_SECRET))),
    ]
    keys = ("run", "name", "addresses", "ticket")
    return [{key: getattr(invite, key) for key in keys} | {"text": str(invite)} for invite in made]


def admission_frames(run: RunId, founder: Identity, other: Identity, now_unix: int, address: str) -> list[Any]:
    """Returns a frame of each message of admission: type, call, message, tensors."""
    salt, kind = bytes(range(16)), messages.FrameType
    token, bans = run_token(run, salt, founder.peer, other.peer), revocations(run, founder, other, now_unix)
    proof = proofs(run, founder, other, now_unix + 86_400)["bearer"]
    return [
        (kind.HELLO, 0, messages.Hello(1, salt, token, "member", b"", "agora 0.1.0", (address,)), []),
        (kind.HELLO, 0, messages.Hello(1, salt, token, "reader", proof, "light client", ()), []),
        (kind.REQUEST, 7, messages.ShareRevocations(tuple(sealed for _, sealed in bans)), []),
        (kind.REQUEST, 9, messages.ShareRevocations(()), []),
        (kind.ANSWER, 7, messages.TookRevocations(1, 1), []),
    ]


def ticket_vectors(run: RunId, founder: Identity, other: Identity, now_unix: int) -> dict[str, Any]:
    """Returns all vectors of admission: proofs with their tickets, an invite's ticket, revocations, a HELLO's run."""
    made, salt = proofs(run, founder, other, now_unix + 86_400), bytes(range(16))
    return {
        "run": run,
        "proofs": [
            {"name": name, "tickets": [ticket.to_fields() for ticket in open_proof(data, run)], "bytes": data}
            for name, data in made.items()
        ],
        "invite": {"secret": BEARER_SECRET, "text": str(InviteTicket(made["invite"], BEARER_SECRET))},
        "revocations": [
            {"fields": revocation.to_fields(), "sealed": sealed}
            for revocation, sealed in revocations(run, founder, other, now_unix)
        ],
        "hello": {
            "salt": salt,
            "sender": founder.peer,
            "receiver": other.peer,
            "run": run_token(run, salt, founder.peer, other.peer),
        },
    }


def bad_proofs(run: RunId, founder: Identity, other: Identity, until_unix: int) -> list[tuple[str, str, bytes]]:
    """Returns proofs that must be refused: what is wrong, the code, the bytes."""
    fields = Ticket(founder.peer, other.peer, False, "member", until_unix).to_fields()

    def sealed(payload: object, signer: Identity = founder, tag: bytes = TICKET_TAG) -> bytes:
        data = bytes(msgpack.packb(payload))
        ticket = bytes(msgpack.packb([data, signer.sign(tag + bytes.fromhex(run) + data)]))
        return bytes(msgpack.packb([ticket]))

    good = proofs(run, founder, other, until_unix)["named"]
    ticket = msgpack.unpackb(good)[0]
    return [
        ("signed by another key", "bad-signature", sealed([1, fields], other)),
        ("signed as a revocation", "bad-signature", sealed([1, fields], tag=REVOCATION_TAG)),
        ("unsigned", "bad-signature", bytes(msgpack.packb([msgpack.packb([msgpack.unpackb(ticket)[0], b""])]))),
        ("another version", "bad-ticket", sealed([2, fields])),
        ("an unknown role", "bad-ticket", sealed([1, {**fields, "role": "founder"}])),
        ("a bearer ticket of a delegate", "bad-ticket", sealed([1, {**fields, "role": "delegate", "bearer": True}])),
        ("four tickets", "bad-ticket", bytes(msgpack.packb([b""] * 4))),
        ("no tickets", "bad-ticket", bytes(msgpack.packb([]))),
        ("too many bytes", "too-large", good + bytes(1024)),
        ("no msgpack", "bad-ticket", b"\xc1"),
    ]
