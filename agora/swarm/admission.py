"""Decides who is admitted to a run, and which revocations count. Pure: `now_unix` is an argument.

Knows: the manifest's admission section, tickets, revocations. Must not know: bytes, signatures (agora_protocol.tickets
checks them), files, the network. The rules are the tables of protocol/SPEC.md, section 4; each reason is a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agora_protocol.ids import PeerId
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_REVOCATIONS
from agora_protocol.manifest import Manifest
from agora_protocol.tickets import DELEGATE, MEMBER, READER, Revocation, Ticket

OPEN: Final = "open"
LISTED: Final = "listed"
TICKET: Final = "ticket"


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What the manifest says of admission. Immutable.

    founder: who may admit and ban. mode: OPEN, LISTED or TICKET. listed: the peers of mode LISTED. public_status:
    whether everyone may read the status.
    """

    founder: PeerId
    mode: str = OPEN
    listed: frozenset[str] = frozenset()
    public_status: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> AdmissionPolicy:
        """Returns the policy of a signed manifest."""
        section = manifest.admission
        return cls(PeerId(manifest.founder), section.mode, frozenset(section.peers), section.public_status)


@dataclass(frozen=True, slots=True)
class Admission:
    """A peer is admitted, and why. Immutable.

    role: MEMBER (takes part) or READER (may read the status); from `judge_proof` also DELEGATE. until_unix: unix
    seconds until which this holds; infinity if it has no end.
    """

    role: str
    until_unix: float
    reason: str

    @property
    def is_member(self) -> bool:
        """Whether the peer takes part in the run."""
        return self.role == MEMBER


@dataclass(frozen=True, slots=True)
class NoAdmission:
    """A peer is not admitted. reason: a sentence for its owner: what the peer lacks, and who can give it that."""

    reason: str


@dataclass(frozen=True, slots=True)
class Revocations:
    """The revocations that count. Immutable: `with_new` and `without` return copies; neither judges a revocation.

    issuers: by banned peer (or key of a bearer ticket), who has banned it.
    """

    founder: PeerId
    issuers: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=dict)

    def is_banned(self, subject: PeerId, *, by_founder: bool = False) -> bool:
        """Returns whether `subject` is banned: by the founder, or by a delegate that the founder has not banned.

        by_founder: count the founder's revocations only; delegates can be banned by nobody else.
        """
        issuers = self.issuers.get(subject, frozenset())
        return any(
            issuer == self.founder or (not by_founder and not self.is_banned(issuer, by_founder=True))
            for issuer in issuers
        )

    def with_new(self, subject: PeerId, issuer: PeerId) -> Revocations:
        """Returns a copy with one more revocation; the caller has had it accepted by `judge_revocation`."""
        known = self.issuers.get(subject, frozenset())
        return replace(self, issuers={**self.issuers, subject: known | {issuer}})

    def without(self, subject: PeerId, issuer: PeerId) -> Revocations:
        """Returns a copy without the revocation of `subject` by `issuer`."""
        left = {**self.issuers, subject: self.issuers.get(subject, frozenset()) - {issuer}}
        return replace(self, issuers={banned: by for banned, by in left.items() if by})

    @property
    def count(self) -> int:
        """The number of revocations; a peer that two have banned counts twice."""
        return sum(map(len, self.issuers.values()))


def judge_admission(
    proof: Sequence[Ticket], peer: PeerId, now_unix: float, policy: AdmissionPolicy, revocations: Revocations
) -> Admission | NoAdmission:
    """Returns how `peer` is admitted (as MEMBER or READER), or why it is not: both are true as conditions.

    The founder is always a member, a ban goes before every mode, and with `public_status` whoever the mode does not
    admit is a READER.
    proof: the chain of tickets that the peer shows, the founder's first, () for none. The caller must have verified
    their signatures (agora_protocol.tickets.open_proof) and that it is `peer` who shows them.
    """
    if peer == policy.founder:
        return Admission(MEMBER, math.inf, "it is the founder")
    shown = judge_proof(proof, peer, now_unix, revocations)
    is_delegate = isinstance(shown, Admission) and shown.role == DELEGATE
    if revocations.is_banned(peer, by_founder=is_delegate):
        return NoAdmission("the run's founder, or a delegate, has banned this peer; ask them")
    allowed = _ADMITTED_BY_MODE[policy.mode](peer, policy, shown)
    if isinstance(allowed, Admission):
        return replace(allowed, role=MEMBER) if allowed.role == DELEGATE else allowed
    return Admission(READER, math.inf, "everyone may read the status") if policy.public_status else allowed


ProofVerdict = Admission | NoAdmission
"""What `judge_proof` returns about the tickets that a peer shows."""


def _admit_everyone(peer: PeerId, policy: AdmissionPolicy, shown: ProofVerdict) -> ProofVerdict:
    """Mode open: admits everyone as a member."""
    return Admission(MEMBER, math.inf, "the run is open to everyone")


def _admit_listed(peer: PeerId, policy: AdmissionPolicy, shown: ProofVerdict) -> ProofVerdict:
    """Mode listed: admits the peers that the manifest lists; tickets have no effect."""
    if peer in policy.listed:
        return Admission(MEMBER, math.inf, "the manifest lists it")
    return NoAdmission(f"the run admits only listed peers, and {peer} is none of them; ask its founder")


def _admit_by_ticket(peer: PeerId, policy: AdmissionPolicy, shown: ProofVerdict) -> ProofVerdict:
    """Mode ticket: admits with the role of the tickets, if `judge_proof` has accepted them."""
    if isinstance(shown, Admission):
        return shown
    advice = f"ask the founder for an invite by `swarm invite RUN --peer {peer}`"
    return NoAdmission(f"the run admits only who has a ticket: {shown.reason}; {advice}")


_ADMITTED_BY_MODE: Final[Mapping[str, Callable[[PeerId, AdmissionPolicy, ProofVerdict], ProofVerdict]]] = {
    OPEN: _admit_everyone,
    LISTED: _admit_listed,
    TICKET: _admit_by_ticket,
}


def judge_proof(
    proof: Sequence[Ticket], peer: PeerId, now_unix: float, revocations: Revocations
) -> Admission | NoAdmission:
    """Judges a chain of tickets whose signatures the caller has verified: returns the role that it gives to `peer`.

    The role may be DELEGATE. Returns NoAdmission with the reason if the chain is empty, broken, expired or revoked, or
    is for another peer. Bans of `peer` itself are judged by `judge_admission`, except those of a holder in the chain.
    """
    if not proof:
        return NoAdmission("it shows no ticket")
    giver: Ticket | None = None
    for ticket in proof:
        if problem := _issuing_problem(ticket, giver, revocations.founder):
            return NoAdmission(problem)
        if ticket.not_after + CLOCK_TOLERANCE_S < now_unix:
            return NoAdmission("its ticket has expired")
        if revocations.is_banned(ticket.holder, by_founder=ticket.role == DELEGATE):
            return NoAdmission("its ticket was revoked")
        giver = ticket
    last = proof[-1]
    if last.bearer or last.holder != peer:
        return NoAdmission("its ticket is for another peer")
    until_unix = min(ticket.not_after for ticket in proof) + CLOCK_TOLERANCE_S
    return Admission(last.role, until_unix, f"it has a ticket of {proof[0].issuer}")


def _issuing_problem(ticket: Ticket, giver: Ticket | None, founder: PeerId) -> str:
    """Returns why the issuer of `ticket` may not give it, "" if it may. giver: the ticket before it in the chain."""
    if giver is None:
        return "" if ticket.issuer == founder else "its ticket is not signed by the founder or a delegate"
    if ticket.issuer != giver.holder:
        return "its tickets do not follow from each other"
    if giver.bearer:
        is_passed_on = ticket.role == giver.role and not ticket.bearer
        return "" if is_passed_on else "its bearer ticket was made into something else"
    if giver.role != DELEGATE:
        return "its ticket is not signed by the founder or a delegate"
    return "its ticket makes a delegate, which only the founder can" if ticket.role == DELEGATE else ""


def judge_revocation(revocation: Revocation, proof: Sequence[Ticket], now_unix: float, revocations: Revocations) -> str:
    """Returns why a revocation does not count, "" if it does.

    proof: the tickets by which its issuer is a delegate, () for the founder. The caller must have verified the
    signatures of the revocation and of the tickets. revocations: those that count by now; this one is not added to
    them.
    """
    founder = revocations.founder
    if revocation.subject == founder:
        return "the founder cannot be banned"
    if revocation.issued_unix > now_unix + CLOCK_TOLERANCE_S:
        return "it was signed in the future"
    if revocation.issuer == founder:
        return ""
    shown = judge_proof(proof, revocation.issuer, revocation.issued_unix, revocations)
    if not isinstance(shown, Admission) or shown.role != DELEGATE:
        return "its issuer is neither the founder nor a delegate"
    if revocations.count >= MAX_REVOCATIONS:
        return f"{MAX_REVOCATIONS} revocations are known; only the founder can add more"
    return ""
