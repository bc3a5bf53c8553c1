"""Remembers what a peer knows about who is admitted: revocations, own bans, and the proofs that others have shown.

Deterministic: an AdmissionBook changes only by the calls to it; `now_unix` is an argument.

Knows: tickets' bytes, the rules of admission.py. Must not know: files, the network, a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from agora_protocol.errors import NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_REVOCATIONS
from agora_protocol.tickets import Revocation, Ticket, open_proof, open_revocation

from agora.swarm.admission import (
    Admission,
    AdmissionPolicy,
    NoAdmission,
    Revocations,
    judge_admission,
    judge_revocation,
)

MAX_PEERS: Final = 16_384
"""Maximum number of peers whose proofs are remembered; those that showed theirs longest ago are forgotten first."""
MAX_PROOFS: Final = 4096
"""Maximum number of proofs of which it is remembered that their signatures are valid."""


class AdmissionBook:
    """Says who is admitted to one run, and remembers proofs and revocations, in memory only.

    banned_here: peers that the owner of this machine has banned; may be changed at any time.
    """

    def __init__(self, run: RunId, policy: AdmissionPolicy, banned_here: Iterable[PeerId] = ()) -> None:
        self.policy = policy
        self.banned_here = set(banned_here)
        self._run = run
        self._revocations = Revocations(policy.founder)
        self._sealed: OrderedDict[tuple[PeerId, PeerId], bytes] = OrderedDict()
        self._proofs: OrderedDict[PeerId, bytes] = OrderedDict()
        self._opened: OrderedDict[bytes, tuple[Ticket, ...]] = OrderedDict()

    def judge(self, peer: PeerId, proof: bytes, now_unix: float) -> Admission:
        """Returns how `peer` is admitted, and remembers its proof if it makes the peer a member.

        proof: the signed tickets that the peer shows, b"" for none; signatures are checked here. Raises NotAdmitted
        with the reason, and ProtocolError for a malformed proof or a wrong signature in it.
        """
        tickets = self._open(proof)
        if peer in self.banned_here:
            raise NotAdmitted("this machine's owner has banned that peer")
        found = judge_admission(tickets, peer, now_unix, self.policy, self._revocations)
        if isinstance(found, NoAdmission):
            raise NotAdmitted(found.reason)
        if proof and found.is_member:
            self._proofs[peer] = proof
            self._proofs.move_to_end(peer)
            if len(self._proofs) > MAX_PEERS:
                self._proofs.popitem(last=False)
        return found

    def is_member(self, peer: PeerId, now_unix: float) -> bool:
        """Returns whether `peer` is a member by its last proof that counted, or without one if it has shown none."""
        try:
            return self.judge(peer, self._proofs.get(peer, b""), now_unix).is_member
        except NotAdmitted:
            return False

    def is_member_by_proof(self, peer: PeerId, proof: bytes, now_unix: float) -> bool:
        """Returns whether `peer` is a member by `proof`, which its claim carries; remembers the proof if so.

        Unlike `judge` raises nothing: returns False for a malformed proof too.
        """
        try:
            return self.judge(peer, proof, now_unix).is_member
        except (NotAdmitted, ProtocolError):
            return False

    def why_not_to_call(self, peer: PeerId, now_unix: float) -> str:
        """Returns why this peer must not even connect to `peer`, "" if it may.

        Judged by the proof that `peer` has shown before. In mode ticket a peer that has shown none yet may be called,
        since its HELLO will carry one.
        """
        if peer in self.banned_here:
            return "this machine's owner has banned it"
        known = self._proofs.get(peer, b"")
        found = judge_admission(self._open(known), peer, now_unix, self.policy, self._revocations)
        if isinstance(found, Admission) and found.is_member:
            return ""
        if self.policy.mode == "ticket" and not known and not self._revocations.is_banned(peer):
            return ""
        return found.reason if isinstance(found, NoAdmission) else "it may only read the status"

    def add_revocation(self, sealed: bytes, now_unix: float) -> Revocation | None:
        """Checks a signed revocation, adds it to those that count, and returns it; None if it is known already.

        Beyond MAX_REVOCATIONS the oldest one of a delegate is forgotten for it. Raises ProtocolError for a malformed
        one or a wrong signature, NotAdmitted for one that does not count.
        """
        revocation = open_revocation(sealed, self._run)
        key = (revocation.subject, revocation.issuer)
        if key in self._sealed:
            return None
        proof = open_proof(revocation.proof, self._run)
        if problem := judge_revocation(revocation, proof, now_unix, self._revocations):
            raise NotAdmitted(f"the revocation of {revocation.subject} does not count: {problem}")
        if self._revocations.count >= MAX_REVOCATIONS:
            self._forget_one()
        self._sealed[key] = sealed
        self._revocations = self._revocations.with_new(*key)
        return revocation

    def sealed_revocations(self) -> list[bytes]:
        """Returns the bytes of all signed revocations, in the order in which they were accepted."""
        return list(self._sealed.values())

    def _forget_one(self) -> None:
        """Forgets the oldest revocation by a delegate; if there is none, the oldest by the founder."""
        by_delegates = (key for key in self._sealed if key[1] != self.policy.founder)
        key = next(by_delegates, next(iter(self._sealed)))
        del self._sealed[key]
        self._revocations = self._revocations.without(*key)

    def _open(self, proof: bytes) -> tuple[Ticket, ...]:
        """Returns the tickets in a proof, after checking its signatures, unless they were checked before; () for b"".

        Raises ProtocolError for a malformed proof or a wrong signature.
        """
        if not proof:
            return ()
        known = self._opened.get(proof)
        if known is None:
            known = self._opened[proof] = open_proof(proof, self._run)
            if len(self._opened) > MAX_PROOFS:
                self._opened.popitem(last=False)
        return known
