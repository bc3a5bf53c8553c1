"""Decides who is admitted to a run, and which revocations count; remembers revocations, own bans, and proofs.

Deterministic: `now_unix` is an argument, and an AdmissionBook changes only by the calls to it.

The rules are the tables of protocol/SPEC.md, section 4; each reason is a sentence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agora_protocol.errors import NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_REVOCATIONS
from agora_protocol.manifest import Manifest
from agora_protocol.tickets import DELEGATE, MEMBER, READER, Revocation, Ticket, open_proof, open_revocation

OPEN: Final = "open"
LISTED: Final = "listed"
TICKET: Final = "ticket"
# Maximum number of peers whose proofs are remembered; the proof that was used longest ago is forgotten first.
MAX_PEERS: Final = 16_384
MAX_PROOFS: Final = 4096  # maximum number of proofs that are remembered as having valid signatures


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Who may take part in a run, as its manifest says.

    founder: the peer that may admit and ban others, and make delegates. mode: OPEN (everyone), LISTED (the peers in
    `listed`) or TICKET (every peer that shows a ticket). public_status: whether peers that are not admitted may read
    the status.
    """

    founder: PeerId
    mode: str = OPEN
    listed: frozenset[str] = frozenset()
    public_status: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> AdmissionPolicy:
        """Returns the policy that `manifest` states; its founder is the manifest's founder, "" before it is signed."""
        section = manifest.admission
        return cls(PeerId(manifest.founder), section.mode, frozenset(section.peers), section.public_status)


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision that one peer is admitted.

    role: MEMBER (takes part) or READER (may only read the status). `judge_proof` also returns DELEGATE (may admit and
    ban others), for which `judge_admission` returns MEMBER. until_unix: unix seconds until which the decision holds;
    infinity if it has no end. reason: why the peer is admitted, in words, such as "it is the founder".
    """

    role: str
    until_unix: float
    reason: str

    @property
    def is_member(self) -> bool:
        return self.role == MEMBER


@dataclass(frozen=True, slots=True)
class NoAdmission:
    """The decision that one peer is not admitted.

    reason: why not, in words for the peer's owner; from `judge_admission` also which person or peer to ask.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Revocations:
    """The accepted revocations of a run; a revocation is one peer's ban of another.

    founder: the run's founder. issuers: for each banned peer (or key of a bearer ticket), the peers that have banned
    it. `with_new` and `without` return changed copies, and do not check whether a revocation is valid.
    """

    founder: PeerId
    issuers: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=dict)

    def is_banned(self, subject: PeerId, *, by_founder: bool = False) -> bool:
        """Returns whether `subject` is banned: by the founder, or by a delegate that the founder has not banned.

        by_founder: counts the founder's revocations only. Pass True for a delegate, which only the founder can ban.
        """
        issuers = self.issuers.get(subject, frozenset())
        return any(
            issuer == self.founder or (not by_founder and not self.is_banned(issuer, by_founder=True))
            for issuer in issuers
        )

    def with_new(self, subject: PeerId, issuer: PeerId) -> Revocations:
        """Returns a copy with the ban of `subject` by `issuer` added; `judge_revocation` must have accepted it."""
        known = self.issuers.get(subject, frozenset())
        return replace(self, issuers={**self.issuers, subject: known | {issuer}})

    def without(self, subject: PeerId, issuer: PeerId) -> Revocations:
        """Returns a copy without the ban of `subject` by `issuer`; an equal copy if there is none."""
        left = {**self.issuers, subject: self.issuers.get(subject, frozenset()) - {issuer}}
        return replace(self, issuers={banned: by for banned, by in left.items() if by})

    @property
    def count(self) -> int:
        return sum(map(len, self.issuers.values()))


def judge_admission(
    proof: Sequence[Ticket], peer: PeerId, now_unix: float, policy: AdmissionPolicy, revocations: Revocations
) -> Admission | NoAdmission:
    """Returns an Admission that says how `peer` is admitted, as MEMBER or READER, or a NoAdmission that says why not.

    The founder is always a MEMBER. A banned peer is not admitted in any mode, not even as a READER; a delegate can be
    banned by the founder only. Otherwise the policy's mode decides; a ticket's DELEGATE becomes MEMBER. With
    `public_status`, a peer that the mode does not admit is a READER.
    proof: the chain of tickets that the peer shows, the founder's first, () for none. The caller must have verified the
    tickets' signatures (agora_protocol.tickets.open_proof) and that `peer` itself shows them.
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


ProofVerdict = Admission | NoAdmission  # what `judge_proof` returns about the tickets that a peer shows


def _admit_everyone(peer: PeerId, policy: AdmissionPolicy, shown: ProofVerdict) -> ProofVerdict:
    return Admission(MEMBER, math.inf, "the run is open to everyone")


def _admit_listed(peer: PeerId, policy: AdmissionPolicy, shown: ProofVerdict) -> ProofVerdict:
    if peer in policy.listed:
        return Admission(MEMBER, math.inf, "the manifest lists it")
    return NoAdmission(f"the run admits only listed peers, and {peer} is not one of them; ask its founder")


def _admit_by_ticket(peer: PeerId, policy: AdmissionPolicy, shown: ProofVerdict) -> ProofVerdict:
    if isinstance(shown, Admission):
        return shown
    advice = f"ask the founder for an invite by `swarm invite RUN --peer {peer}`"
    return NoAdmission(f"the run admits only peers that have a ticket: {shown.reason}; {advice}")


_ADMITTED_BY_MODE: Final[Mapping[str, Callable[[PeerId, AdmissionPolicy, ProofVerdict], ProofVerdict]]] = {
    OPEN: _admit_everyone,
    LISTED: _admit_listed,
    TICKET: _admit_by_ticket,
}


def judge_proof(
    proof: Sequence[Ticket], peer: PeerId, now_unix: float, revocations: Revocations
) -> Admission | NoAdmission:
    """Returns the Admission that a chain of tickets gives to `peer`, or a NoAdmission with the reason.

    The role is that of the last ticket, also DELEGATE, and holds until the first ticket of the chain expires. The chain
    must start at the founder (`revocations.founder`). Returns NoAdmission if the chain is empty, if an issuer in it may
    not issue its ticket (`_issuing_problem`), if the last ticket is a bearer ticket or for another peer, and if a
    ticket has expired or its holder is banned. Each ticket stays valid for CLOCK_TOLERANCE_S seconds after its end. The
    caller must have verified the signatures.
    """
    if not proof:
        return NoAdmission("it shows no ticket")
    parent: Ticket | None = None
    for ticket in proof:
        if problem := _issuing_problem(ticket, parent, revocations.founder):
            return NoAdmission(problem)
        if ticket.not_after + CLOCK_TOLERANCE_S < now_unix:
            return NoAdmission("its ticket has expired")
        if revocations.is_banned(ticket.holder, by_founder=ticket.role == DELEGATE):
            return NoAdmission("its ticket was revoked")
        parent = ticket
    last = proof[-1]
    if last.bearer or last.holder != peer:
        return NoAdmission("its ticket is for another peer")
    until_unix = min(ticket.not_after for ticket in proof) + CLOCK_TOLERANCE_S
    return Admission(last.role, until_unix, f"it has a ticket of {proof[0].issuer}")


def _issuing_problem(ticket: Ticket, parent: Ticket | None, founder: PeerId) -> str:
    # A delegate may issue any ticket but that of a delegate. The key of a bearer ticket only passes on the ticket's own
    # role, to a named peer. parent: the ticket before in the chain.
    if parent is None:
        return "" if ticket.issuer == founder else "its ticket is not signed by the founder or a delegate"
    if ticket.issuer != parent.holder:
        return "its tickets do not follow from each other"
    if parent.bearer:
        is_passed_on = ticket.role == parent.role and not ticket.bearer
        return "" if is_passed_on else "its bearer ticket was made into something else"
    if parent.role != DELEGATE:
        return "its ticket is not signed by the founder or a delegate"
    return "its ticket makes a delegate, which only the founder can" if ticket.role == DELEGATE else ""


def judge_revocation(revocation: Revocation, proof: Sequence[Ticket], now_unix: float, revocations: Revocations) -> str:
    """Returns why `revocation` is to be rejected, in words; "" if it is to be accepted.

    The founder cannot be banned. The issuer must be the founder, or have been a delegate, by `proof`, when it signed;
    the signing may lie at most CLOCK_TOLERANCE_S seconds in the future. Once MAX_REVOCATIONS are accepted, only the
    founder can add one. proof: the issuer's tickets, () for the founder. revocations: the accepted ones, which are not
    changed. The caller must have verified the signatures of the revocation and of the tickets.
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
        # A delegate's first: only the founder may push out another's.
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
