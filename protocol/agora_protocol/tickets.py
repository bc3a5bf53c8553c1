"""Tickets, by which a founder admits peers to a run, and revocations, by which it bans them: bytes and signatures.

A ticket is msgpack [payload, signature]; payload is msgpack [1, fields]; the signature is over b"agora ticket 1\0" ||
run (32 bytes) || payload, by `issuer`. A proof is msgpack [ticket, ...]: the holder of each has issued the next, and
the last one's holder is the peer that shows it. A revocation is sealed like a ticket, under a tag of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeVar

from agora_protocol.errors import InputError, ProtocolError
from agora_protocol.fields import (
    Structure,
    bool_field,
    bytes_field,
    choice_field,
    int_field,
    peer_id_field,
)
from agora_protocol.identity import Identity, verify
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_PROOF_BYTES, MAX_REVOCATION_BYTES, MAX_TICKETS
from agora_protocol.packing import is_version, pack, unpack

TICKET_TAG: Final = b"agora ticket 1\0"
REVOCATION_TAG: Final = b"agora revocation 1\0"
HELLO_TAG: Final = b"agora hello 1\0"
TICKET_VERSION: Final = 1
SIGNATURE_BYTES: Final = 64
SECRET_BYTES: Final = 32
MAX_UNIX: Final = 2**40  # the largest time of a ticket, in unix seconds: none that a sane clock shows

MEMBER: Final = "member"
READER: Final = "reader"
DELEGATE: Final = "delegate"
ROLES: Final = (MEMBER, READER, DELEGATE)


class Ticket(Structure):
    """Says that `issuer` gives `holder` a role in the run. It counts only if the issuer may give it: section 4."""

    ERROR: ClassVar[str] = "bad-ticket"
    issuer: PeerId = peer_id_field(doc="who signs the ticket: the founder, a delegate, or the key of a bearer ticket")
    holder: PeerId = peer_id_field(doc="the peer that may use it; of a bearer ticket, the key in the invite")
    bearer: bool = bool_field(doc="whether the holder may pass the role on to the peer that it is used by")
    role: str = choice_field(
        *ROLES,
        doc="member: takes part; reader: reads status and manifest; delegate: member that signs tickets and bans",
    )
    not_after: int = int_field(0, MAX_UNIX, doc="unix seconds after which the ticket counts no more")

    def find_problem(self) -> str | None:
        # Such a ticket would make whoever finds it a delegate.
        return "is a bearer ticket of a delegate" if self.bearer and self.role == DELEGATE else None


class Revocation(Structure):
    """Says that `issuer` bans `subject` from the run for good. It counts only if the issuer may ban: section 4."""

    ERROR: ClassVar[str] = "bad-ticket"
    issuer: PeerId = peer_id_field(doc="who signs it: the founder or a delegate")
    subject: PeerId = peer_id_field(doc="the banned peer, or the key of a bearer ticket: all who used that are banned")
    issued_unix: int = int_field(0, MAX_UNIX, doc="unix seconds when it was signed")
    proof: bytes = bytes_field(most=MAX_PROOF_BYTES, doc="the proof by which the issuer is a delegate; founder: empty")


_DAMAGED: Final = "The invite's ticket is damaged; copy the whole line that `swarm invite` printed."
Sealed = TypeVar("Sealed", bound=Structure)


def run_token(run: RunId, salt: bytes, sender: PeerId, receiver: PeerId) -> bytes:
    """Returns the 32 bytes by which a HELLO names its run; only those who know the run's id can tell which it is."""
    return hashlib.sha256(HELLO_TAG + salt + bytes.fromhex(run) + sender.encode() + receiver.encode()).digest()


def seal_ticket(ticket: Ticket, run: RunId, issuer: Identity) -> bytes:
    """Returns the signed bytes of a ticket. Raises ProtocolError "wrong-key" unless `issuer` is the ticket's."""
    return seal(ticket, TICKET_TAG, run, issuer)


def make_proof(*tickets: bytes) -> bytes:
    """Returns a proof of sealed tickets, to be given in order: the one that the founder signed first. b"" for none."""
    return pack(tickets) if tickets else b""


def extend_proof(proof: bytes, ticket: bytes) -> bytes:
    """Returns `proof` with one more sealed ticket at its end. Raises ProtocolError for a malformed proof."""
    return make_proof(*_tickets_in(proof), ticket)


def open_proof(data: bytes, run: RunId) -> tuple[Ticket, ...]:
    """Decodes a proof, verifies each ticket's signature by its issuer for this run, and returns the tickets.

    Returns () for b"". Raises ProtocolError: "too-large", "bad-ticket", "bad-signature". Whether an issuer may issue
    its ticket is not judged here.
    """
    return tuple(open_sealed(sealed, Ticket, TICKET_TAG, run, MAX_PROOF_BYTES)[0] for sealed in _tickets_in(data))


def seal_revocation(revocation: Revocation, run: RunId, issuer: Identity) -> bytes:
    """Returns the signed bytes of a revocation. Raises ProtocolError "wrong-key" unless `issuer` is its issuer."""
    return seal(revocation, REVOCATION_TAG, run, issuer)


def open_revocation(data: bytes, run: RunId) -> Revocation:
    """Returns a revocation whose signature is its issuer's for this run; whether the issuer may ban is not judged.

    Raises ProtocolError: "too-large", "bad-ticket", "bad-signature".
    """
    return open_sealed(data, Revocation, REVOCATION_TAG, run, MAX_REVOCATION_BYTES)[0]


@dataclass(frozen=True, slots=True)
class InviteTicket:
    """The part of an invite that admits: a proof and, if its last ticket is a bearer ticket, that ticket's private key.

    Immutable. secret: the raw 32 bytes of that key; b"" for a proof that is for one peer.
    """

    proof: bytes
    secret: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(pack((self.proof, self.secret))).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> InviteTicket:
        """Reads what `str` wrote. Raises InputError for anything else."""
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            proof, secret = _pair(unpack(data, MAX_PROOF_BYTES + 64, "bad-ticket"))
            _tickets_in(proof)
        except (binascii.Error, ValueError, ProtocolError):
            raise InputError(_DAMAGED) from None
        ticket = cls(proof, secret)
        if not proof or len(secret) not in (0, SECRET_BYTES) or str(ticket) != text:
            raise InputError(_DAMAGED)
        return ticket

    def proof_for(self, peer: PeerId, run: RunId) -> bytes:
        """Returns the proof with which `peer` asks for admission.

        With a bearer ticket, that is the invite's proof and one more ticket, signed here with the bearer's key for
        `peer`.

        Raises InputError when the ticket is for another peer, or of another run.
        """
        try:
            last = open_proof(self.proof, run)[-1]
        except ProtocolError as error:
            raise InputError(f"The invite's ticket is not one of this run ({error}); ask for another.") from None
        if not self.secret:
            if last.holder != peer:
                raise InputError(f"The invite is for {last.holder}, and this machine is {peer}; ask for its own.")
            return self.proof
        key = Identity(self.secret)
        if not last.bearer or last.holder != key.peer:
            raise InputError("The invite's ticket and its key do not belong together; ask for another.")
        bound = Ticket(key.peer, peer, False, last.role, last.not_after)
        return extend_proof(self.proof, seal_ticket(bound, run, key))


def _pair(value: object, code: str = "bad-ticket") -> tuple[bytes, bytes]:
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(part, bytes) for part in value):
        raise ProtocolError(code, "It must be a list of two byte strings.")
    return value


def _tickets_in(proof: bytes) -> tuple[bytes, ...]:
    if not proof:
        return ()
    parts = unpack(proof, MAX_PROOF_BYTES, "bad-ticket")
    if not isinstance(parts, tuple) or not 1 <= len(parts) <= MAX_TICKETS:
        raise ProtocolError("bad-ticket", f"A proof must be a list of 1 to {MAX_TICKETS} tickets.")
    if not all(isinstance(part, bytes) for part in parts):
        raise ProtocolError("bad-ticket", "A ticket in a proof must be bytes.")
    return parts


def seal(structure: Structure, tag: bytes, run: RunId, issuer: Identity) -> bytes:
    """Returns the signed bytes of a structure with a field `issuer`. Raises ProtocolError "wrong-key" for another key.

    tag: begins what is signed, so that no signature can be taken for one of something else.
    """
    fields = structure.to_fields()
    if fields["issuer"] != issuer.peer:
        raise ProtocolError("wrong-key", f"{_a(type(structure))} can only be sealed by its issuer.")
    payload = pack((TICKET_VERSION, fields))
    return pack((payload, issuer.sign(tag + bytes.fromhex(run) + payload)))


def open_sealed(data: bytes, kind: type[Sealed], tag: bytes, run: RunId, most: int) -> tuple[Sealed, bytes]:
    """Returns what `seal` has sealed, once its issuer's signature is verified, and the payload that was signed.

    most: bytes of `data`. Raises ProtocolError: "too-large", "bad-signature", and the kind's own code.
    """
    payload, signature = _pair(unpack(data, most, kind.ERROR), kind.ERROR)
    if len(signature) != SIGNATURE_BYTES:
        raise ProtocolError("bad-signature", f"A signature has {SIGNATURE_BYTES} bytes.")
    parts = unpack(payload, most, kind.ERROR)
    if not isinstance(parts, tuple) or len(parts) != 2 or not is_version(parts[0], TICKET_VERSION):
        raise ProtocolError(kind.ERROR, f"{_a(kind)} must be a list of 1 and fields.")
    opened = kind.from_fields(parts[1])
    if not verify(opened.to_fields()["issuer"], tag + bytes.fromhex(run) + payload, signature):
        raise ProtocolError("bad-signature", f"The {kind.__name__}'s signature is not its issuer's for this run.")
    return opened, payload


def _a(kind: type[Structure]) -> str:
    return f"{'An' if kind.__name__[0] in 'AE' else 'A'} {kind.__name__}"
