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
    admits,
    judge_revocation,
)

MAX_PEERS: Final = 16_384
"""Peers whose proofs are remembered, at most; those that showed theirs longest ago are forgotten first."""
MAX_PROOFS: Final = 4096
"""Proofs whose signatures are remembered as verified, at most."""


class AdmissionBook:
    """Says who is admitted to one run. banned_here: peers that the owner of this machine has banned."""

    def __init__(self, run: RunId, policy: AdmissionPolicy, banned_here: Iterable[PeerId] = ()) -> None:
        self.policy = policy
        self.banned_here = set(banned_here)
        self._run = run
        self._revocations = Revocations(policy.founder)
        self._sealed: OrderedDict[tuple[PeerId, PeerId], bytes] = OrderedDict()
        self._proofs: OrderedDict[PeerId, bytes] = OrderedDict()
        self._opened: OrderedDict[bytes, tuple[Ticket, ...]] = OrderedDict()

    def judge(self, peer: PeerId, proof: bytes, now_unix: float) -> Admission:
        """Returns the admission of `peer`, which shows `proof` (b"": none), and remembers the proof if it counts.

        Raises NotAdmitted with the reason, ProtocolError for a malformed proof or a wrong signature in it.
        """
        tickets = self._open(proof)
        if peer in self.banned_here:
            raise NotAdmitted("this machine's owner has banned that peer")
        found = admits(tickets, peer, now_unix, self.policy, self._revocations)
        if isinstance(found, NoAdmission):
            raise NotAdmitted(found.reason)
        if proof and found.is_member:
            self._proofs[peer] = proof
            self._proofs.move_to_end(peer)
            if len(self._proofs) > MAX_PEERS:
                self._proofs.popitem(last=False)
        return found

    def is_member(self, peer: PeerId, now_unix: float) -> bool:
        """Returns whether `peer` takes part, by the last proof that it has shown, or without any."""
        try:
            return self.judge(peer, self._proofs.get(peer, b""), now_unix).is_member
        except NotAdmitted:
            return False

    def takes_part(self, peer: PeerId, proof: bytes, now_unix: float) -> bool:
        """Returns whether `peer` takes part by the `proof` that its claim carries; False for a malformed one."""
        try:
            return self.judge(peer, proof, now_unix).is_member
        except (NotAdmitted, ProtocolError):
            return False

    def why_not_called(self, peer: PeerId, now_unix: float) -> str:
        """Returns why `peer` must not even be asked for its HELLO, "" if it may: what is known of it without a proof.

        In mode ticket a peer that has shown nothing yet may be asked.
        """
        if peer in self.banned_here:
            return "this machine's owner has banned it"
        known = self._proofs.get(peer, b"")
        found = admits(self._open(known), peer, now_unix, self.policy, self._revocations)
        if isinstance(found, Admission) and found.is_member:
            return ""
        if self.policy.mode == "ticket" and not known and not self._revocations.bans(peer):
            return ""
        return found.reason if isinstance(found, NoAdmission) else "it may only read the status"

    def take(self, sealed: bytes, now_unix: float) -> Revocation | None:
        """Takes a revocation that counts, and returns it; None when it is known already.

        Raises ProtocolError for a malformed one, NotAdmitted for one that does not count.
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
        """Returns all revocations as they were signed, the newest last."""
        return list(self._sealed.values())

    def _forget_one(self) -> None:
        """Forgets the oldest revocation of a delegate; where there is none, the founder's oldest."""
        by_delegates = (key for key in self._sealed if key[1] != self.policy.founder)
        key = next(by_delegates, next(iter(self._sealed)))
        del self._sealed[key]
        self._revocations = self._revocations.without(*key)

    def _open(self, proof: bytes) -> tuple[Ticket, ...]:
        """Returns the tickets in a proof. Raises ProtocolError. Remembers what was verified."""
        if not proof:
            return ()
        known = self._opened.get(proof)
        if known is None:
            known = self._opened[proof] = open_proof(proof, self._run)
            if len(self._opened) > MAX_PROOFS:
                self._opened.popitem(last=False)
        return known
