"""Remembers what decides which peers are admitted: revocations, own bans, and the proofs that others have shown.

Deterministic: an AdmissionBook changes only by the calls to it; `now_unix` is an argument.
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
    TICKET,
    Admission,
    AdmissionPolicy,
    NoAdmission,
    Revocations,
    judge_admission,
    judge_revocation,
)

# Maximum number of peers whose proofs are remembered; the proof that was used longest ago is forgotten first.
MAX_PEERS: Final = 16_384
MAX_PROOFS: Final = 4096  # maximum number of proofs that are remembered as having valid signatures


class AdmissionBook:
    """What decides which peers this peer admits to one run: revocations, own bans, and proofs, in memory only.

    A proof is a peer's chain of signed tickets. policy: the manifest's rules. banned_here: peers that the owner of this
    machine has banned, which no method admits; may be changed at any time.
    """

    def __init__(self, run: RunId, policy: AdmissionPolicy, banned_here: Iterable[PeerId] = ()) -> None:
        self.policy = policy
        self.banned_here = set(banned_here)
        self._run = run
        self._revocations = Revocations(policy.founder)
        self._signed_revocations: OrderedDict[tuple[PeerId, PeerId], bytes] = OrderedDict()
        self._proofs: OrderedDict[PeerId, bytes] = OrderedDict()
        self._verified_proofs: OrderedDict[bytes, tuple[Ticket, ...]] = OrderedDict()

    def judge(self, peer: PeerId, proof: bytes, now_unix: float) -> Admission:
        """Returns how `peer` is admitted, as MEMBER or READER; remembers the proof, unless b"", of a MEMBER.

        proof: the signed tickets that the peer shows, b"" for none; their signatures are checked here. Raises
        NotAdmitted with the reason if the peer is in `banned_here` or `judge_admission` does not admit it, and
        ProtocolError for a malformed proof or a wrong signature in it. Remembers at most MAX_PEERS peers' proofs: the
        one used longest ago is forgotten first.
        """
        tickets = self._verify(proof)
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
        """Returns whether `peer` is a member now, judged by its remembered proof, or without a proof if none is known.

        Returns False for a peer in `banned_here`. Counts as a use of the proof, so that the proof is forgotten later.
        """
        try:
            return self.judge(peer, self._proofs.get(peer, b""), now_unix).is_member
        except NotAdmitted:
            return False

    def is_member_by_proof(self, peer: PeerId, proof: bytes, now_unix: float) -> bool:
        """Returns whether `peer` is a member by `proof`, which its claim carries; if so, remembers the proof.

        Returns False for a peer that is not admitted or only a reader, and for a malformed or wrongly signed proof.
        """
        try:
            return self.judge(peer, proof, now_unix).is_member
        except (NotAdmitted, ProtocolError):
            return False

    def refusal_reason(self, peer: PeerId, now_unix: float) -> str:
        """Returns why this peer must not connect to `peer`, in words; "" if it may.

        A peer in `banned_here` must not be called. Any other is judged by its remembered proof, and may be called if
        that makes it a member: a peer that may only read the status is not called. In mode TICKET a peer of which no
        proof is known may be called unless the founder or a delegate has banned it, since its HELLO will carry its
        proof.
        """
        if peer in self.banned_here:
            return "this machine's owner has banned it"
        known = self._proofs.get(peer, b"")
        found = judge_admission(self._verify(known), peer, now_unix, self.policy, self._revocations)
        if isinstance(found, Admission) and found.is_member:
            return ""
        if self.policy.mode == TICKET and not known and not self._revocations.is_banned(peer):
            return ""
        return found.reason if isinstance(found, NoAdmission) else "it may only read the status"

    def add_revocation(self, signed: bytes, now_unix: float) -> Revocation | None:
        """Checks a signed revocation, adds it to the accepted ones, and returns it.

        Returns None, and changes nothing, if this issuer's revocation of this peer is known already. If there are
        MAX_REVOCATIONS, `_forget_one` makes room. Raises ProtocolError for a malformed revocation or a wrong signature,
        and NotAdmitted for one that `judge_revocation` rejects.
        """
        revocation = open_revocation(signed, self._run)
        key = (revocation.subject, revocation.issuer)
        if key in self._signed_revocations:
            return None
        proof = open_proof(revocation.proof, self._run)
        if problem := judge_revocation(revocation, proof, now_unix, self._revocations):
            raise NotAdmitted(f"the revocation of {revocation.subject} does not count: {problem}")
        if self._revocations.count >= MAX_REVOCATIONS:
            self._forget_one()
        self._signed_revocations[key] = signed
        self._revocations = self._revocations.with_new(*key)
        return revocation

    def signed_revocations(self) -> list[bytes]:
        """Returns the accepted revocations as they were signed, in the order in which they were added."""
        return list(self._signed_revocations.values())

    def _forget_one(self) -> None:
        by_delegates = (key for key in self._signed_revocations if key[1] != self.policy.founder)
        key = next(by_delegates, next(iter(self._signed_revocations)))
        del self._signed_revocations[key]
        self._revocations = self._revocations.without(*key)

    def _verify(self, proof: bytes) -> tuple[Ticket, ...]:
        if not proof:
            return ()
        known = self._verified_proofs.get(proof)
        if known is None:
            known = self._verified_proofs[proof] = open_proof(proof, self._run)
            if len(self._verified_proofs) > MAX_PROOFS:
                self._verified_proofs.popitem(last=False)
        return known
