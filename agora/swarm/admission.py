"""Decides who is admitted to a run, and which revocations count; remembers revocations, own bans, and proofs.

Deterministic: `now_unix` is an argument, and an AdmissionBook changes only by the calls to it.

The rules are the tables of protocol/SPEC.md, section 4; each reason is a sentence.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from agora_protocol.errors import NotAdmitted, ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_REVOCATIONS
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import AdmissionSection
from agora_protocol.tickets import DELEGATE, MEMBER, READER, Revocation, Ticket, open_proof, open_revocation

OUR_SOFTWARE: Final = re.compile(r"agora (\d{1,4})\.(\d{1,4})\.(\d{1,4})\b")
OPEN: Final = "open"
LISTED: Final = "listed"
TICKET: Final = "ticket"
# Maximum number of peers whose proofs are remembered; the proof that was used longest ago is forgotten first.
MAX_PEERS: Final = 16_384
MAX_PROOFS: Final = 4096  # maximum number of proofs that are remembered as having valid signatures


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Who may take part in a run, as its manifest says. mode: OPEN (everyone), LISTED or TICKET.

    public_status: whether peers that are not admitted may read the status.
    """

    founder: PeerId
    mode: str = OPEN
    listed: frozenset[str] = frozenset()
    public_status: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> AdmissionPolicy:
        """manifest: as it is amended at the run's step. The founder is "" before the manifest is signed."""
        section = manifest.admission
        return cls(PeerId(manifest.founder), section.mode, frozenset(section.peers), section.public_status)


@dataclass(frozen=True, slots=True)
class Admission:
    """One peer is admitted. role: MEMBER or READER (may only read the status); DELEGATE only from `judge_proof`.

    until_unix: when the decision ends, or infinity. reason: in words, such as "it is the founder".
    """

    role: str
    until_unix: float
    reason: str

    @property
    def is_member(self) -> bool:
        return self.role == MEMBER


@dataclass(frozen=True, slots=True)
class NoAdmission:
    """One peer is not admitted. reason: in words for its owner; from `judge_admission` also whom to ask."""

    reason: str


@dataclass(frozen=True, slots=True)
class Revocations:
    """The accepted revocations of a run: by banned peer (or key of a bearer ticket), the peers that have banned it."""

    founder: PeerId
    issuers: Mapping[PeerId, frozenset[PeerId]] = field(default_factory=dict)

    def is_banned(self, subject: PeerId, *, by_founder: bool = False) -> bool:
        """Returns whether the founder has banned `subject`, or a delegate that the founder has not banned.

        by_founder: counts only the founder's revocations, since only the founder can ban a delegate.
        """
        issuers = self.issuers.get(subject, frozenset())
        return any(
            issuer == self.founder or (not by_founder and not self.is_banned(issuer, by_founder=True))
            for issuer in issuers
        )

    def with_new(self, subject: PeerId, issuer: PeerId) -> Revocations:
        """Returns a copy with one more ban, which `judge_revocation` must have accepted."""
        known = self.issuers.get(subject, frozenset())
        return replace(self, issuers={**self.issuers, subject: known | {issuer}})

    def without(self, subject: PeerId, issuer: PeerId) -> Revocations:
        left = {**self.issuers, subject: self.issuers.get(subject, frozenset()) - {issuer}}
        return replace(self, issuers={banned: by for banned, by in left.items() if by})

    @property
    def count(self) -> int:
        return sum(map(len, self.issuers.values()))


def judge_admission(
    proof: Sequence[Ticket], peer: PeerId, now_unix: float, policy: AdmissionPolicy, revocations: Revocations
) -> Admission | NoAdmission:
    """Returns how `peer` is admitted, as MEMBER or READER, or why not.

    proof: the tickets that the peer itself shows, the founder's first; their signatures must have been verified.
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
        return Admission(MEMBER, math.inf, "the run lists it")
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
    """Returns the Admission that a chain of tickets gives to `peer`, also as DELEGATE, or why it gives none.

    It holds until the first ticket of the chain expires, and CLOCK_TOLERANCE_S longer. The signatures must have been
    verified.
    """
    if not proof:
        return NoAdmission("it shows no ticket")
    parent: Ticket | None = None
    for ticket in proof:
        if problem := _issuing_problem(ticket, parent, revocations.founder):
            return NoAdmission(problem)
        if ticket.not_after + CLOCK_TOLERANCE_S < now_unix:
            # With both times, since often the clock is wrong and not the ticket old.
            ended, now = (_minute(at) for at in (ticket.not_after, now_unix))
            clock = f"the clock of the peer that refuses it shows {now}"
            return NoAdmission(f"its ticket has expired: it ended at {ended}, and {clock}")
        if revocations.is_banned(ticket.holder, by_founder=ticket.role == DELEGATE):
            return NoAdmission("its ticket was revoked")
        parent = ticket
    last = proof[-1]
    if last.bearer or last.holder != peer:
        return NoAdmission("its ticket is for another peer")
    until_unix = min(ticket.not_after for ticket in proof) + CLOCK_TOLERANCE_S
    return Admission(last.role, until_unix, f"it has a ticket of {proof[0].issuer}")


def _minute(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(" ", "minutes")


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
    """Returns why `revocation` does not count, in words; "" if it does.

    proof: the issuer's tickets, () for the founder; judged as of when it signed. The signatures must have been
    verified.
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
    """What decides whom this peer admits to one run: revocations, own bans and the proofs of others, in memory only.

    policy: may be replaced at any time, as an amendment of it comes into force. banned_here: peers that the owner of
    this machine has banned; may be changed at any time.
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
        """Returns how `peer` is admitted, as MEMBER or READER; remembers the proof of a MEMBER.

        proof: the signed tickets that the peer shows, b"" for none. Raises NotAdmitted with the reason, and
        ProtocolError for a malformed proof or a wrong signature in it.
        """
        found = self._judge(peer, proof, now_unix)
        if isinstance(found, NoAdmission):
            raise NotAdmitted(found.reason)
        if proof and found.is_member:
            self._proofs[peer] = proof
            self._proofs.move_to_end(peer)
            if len(self._proofs) > MAX_PEERS:
                self._proofs.popitem(last=False)
        return found

    def _judge(self, peer: PeerId, proof: bytes, now_unix: float) -> Admission | NoAdmission:
        tickets = self._verify(proof)
        if peer in self.banned_here:
            return NoAdmission("this machine's owner has banned that peer")
        return judge_admission(tickets, peer, now_unix, self.policy, self._revocations)

    def admits_signer(self, peer: PeerId, proof: bytes, now_unix: float) -> bool:
        """Returns whether `peer` is a member by the proof in what it has signed once; that proof is not remembered,
        since the peer may have a newer one.
        """
        try:
            found = self._judge(peer, proof, now_unix)
        except ProtocolError:
            return False
        return isinstance(found, Admission) and found.is_member

    def is_member(self, peer: PeerId, now_unix: float) -> bool:
        """Returns whether `peer` is a member now, judged by its remembered proof; counts as a use of that proof."""
        try:
            return self.judge(peer, self._proofs.get(peer, b""), now_unix).is_member
        except NotAdmitted:
            return False

    def is_member_by_proof(self, peer: PeerId, proof: bytes, now_unix: float) -> bool:
        """Returns whether `peer` is a member by `proof`, which its claim carries; False also for a malformed one."""
        try:
            return self.judge(peer, proof, now_unix).is_member
        except (NotAdmitted, ProtocolError):
            return False

    def refusal_reason(self, peer: PeerId, now_unix: float) -> str:
        """Returns why this peer must not connect to `peer`, in words; "" if it may.

        In mode TICKET a peer of which no proof is known may be called, since its HELLO will carry its proof.
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
        """Verifies a signed revocation, adds it, and returns it; None if it is known already.

        Raises ProtocolError for a malformed one or a wrong signature, and NotAdmitted for one that does not count.
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

    def is_banned(self, peer: PeerId) -> bool:
        return peer in self.banned_here or self._revocations.is_banned(peer)

    def has_founder_banned(self, peer: PeerId) -> bool:
        return self._revocations.is_banned(peer, by_founder=True)

    def signed_revocations(self) -> list[bytes]:
        """Returns the accepted revocations as they were signed, the oldest first."""
        return list(self._signed_revocations.values())

    def _forget_one(self) -> None:
        # A delegate's revocation goes first: only the founder may push out another's.
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


# --- versions


def is_outdated(software: str, section: AdmissionSection) -> bool:
    """Returns whether a peer with this `software` of HELLO must be upgraded. Other programs are not judged."""
    match = OUR_SOFTWARE.match(software)
    if match is None or not section.oldest_version:
        return False
    return tuple(map(int, match.groups())) < tuple(map(int, section.oldest_version.split(".")))


def refusal_of_version(software: str, section: AdmissionSection, now_unix: float) -> str:
    """Returns why a peer with this `software` may not take part now; "" if it may."""
    if not is_outdated(software, section) or now_unix < first_second(section.oldest_version_from):
        return ""
    return (
        f"the run asks for agora {section.oldest_version} or later, and this is {software}; "
        "run pip install --upgrade agora-swarm and join again"
    )


def first_second(day: str) -> float:
    """Returns the unix time at which a day such as 2027-02-28 begins in UTC; 0 for "", and for a day that is none."""
    try:
        return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() if day else 0.0
    except ValueError:
        return 0.0
