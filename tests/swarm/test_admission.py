"""Claims about who is admitted: every mode, every rule of a ticket's chain, every rule of a revocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_REVOCATIONS
from agora_protocol.manifest import preset
from agora_protocol.manifest_sections import AdmissionSection
from agora_protocol.tickets import Revocation, Ticket

from agora.swarm.admission import (
    Admission,
    AdmissionPolicy,
    NoAdmission,
    Revocations,
    first_second,
    is_outdated,
    judge_admission,
    judge_proof,
    judge_revocation,
    refusal_of_version,
)

FOUNDER, DELEGATE, OTHER_DELEGATE, PEER, STRANGER, BEARER = (Identity(bytes([n]) * 32).peer for n in range(1, 7))
NOW = 1_790_000_000.0
LATER = int(NOW) + 1000
NONE = Revocations(FOUNDER)
OPEN = AdmissionPolicy(FOUNDER)
LISTED = AdmissionPolicy(FOUNDER, "listed", frozenset({PEER}))
BY_TICKET = AdmissionPolicy(FOUNDER, "ticket")
PUBLIC = replace(BY_TICKET, public_status=True)


def ticket(holder: PeerId, role: str = "member", *, by: PeerId = FOUNDER, bearer: bool = False, **more: Any) -> Ticket:
    return Ticket(by, holder, bearer, role, more.get("not_after", LATER))


def role(
    policy: AdmissionPolicy, peer: PeerId, *proof: Ticket, banned: Revocations = NONE, now: float = NOW
) -> str | None:
    """The role in which the peer is admitted, None if it is not."""
    found = judge_admission(proof, peer, now, policy, banned)
    return found.role if isinstance(found, Admission) else None


@pytest.mark.parametrize(
    ("policy", "peer", "expected"),
    [
        (OPEN, STRANGER, "member"),
        (LISTED, PEER, "member"),
        (LISTED, STRANGER, None),
        (LISTED, FOUNDER, "member"),
        (replace(LISTED, public_status=True), STRANGER, "reader"),
        (BY_TICKET, STRANGER, None),
        (BY_TICKET, FOUNDER, "member"),
        (PUBLIC, STRANGER, "reader"),
    ],
)
def test_without_a_ticket_the_manifest_alone_decides(policy: AdmissionPolicy, peer: PeerId, expected: str) -> None:
    assert role(policy, peer) == expected


def test_the_policy_is_the_manifests() -> None:
    manifest = preset("tiny", admission={"mode": "listed", "peers": [PEER], "public_status": True}, founder=FOUNDER)
    assert AdmissionPolicy.of(manifest) == replace(LISTED, public_status=True)


CHAINS: list[tuple[Sequence[Ticket], str | None]] = [
    ([ticket(PEER)], "member"),
    ([ticket(PEER, "reader")], "reader"),
    ([ticket(PEER, "delegate")], "member"),
    ([ticket(DELEGATE, "delegate"), ticket(PEER, by=DELEGATE)], "member"),
    ([ticket(BEARER, bearer=True), ticket(PEER, by=BEARER)], "member"),
    (
        [
            ticket(DELEGATE, "delegate"),
            ticket(BEARER, "reader", by=DELEGATE, bearer=True),
            ticket(PEER, "reader", by=BEARER),
        ],
        "reader",
    ),
]


@pytest.mark.parametrize(("chain", "expected"), CHAINS)
def test_a_chain_of_tickets_from_the_founder_admits(chain: Sequence[Ticket], expected: str) -> None:
    assert role(BY_TICKET, PEER, *chain) == expected
    assert role(BY_TICKET, STRANGER, *chain) is None, "a proof is worth nothing to who did not get it"
    expired = [replace(link, not_after=int(NOW) - CLOCK_TOLERANCE_S - 1) for link in chain[-1:]]
    assert role(BY_TICKET, PEER, *chain[:-1], *expired) is None
    for banned in {link.holder for link in chain}:
        assert role(BY_TICKET, PEER, *chain, banned=NONE.with_new(banned, FOUNDER)) is None
    assert role(LISTED, STRANGER, *[replace(link, holder=STRANGER) for link in chain[:1]]) is None, (
        "mode listed is strict"
    )


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ([ticket(PEER, by=STRANGER)], "not signed by the founder"),
        ([ticket(STRANGER), ticket(PEER, by=STRANGER)], "not signed by the founder"),
        ([ticket(DELEGATE, "delegate"), ticket(PEER, by=STRANGER)], "do not follow"),
        ([ticket(DELEGATE, "delegate"), ticket(PEER, "delegate", by=DELEGATE)], "makes a delegate"),
        ([ticket(BEARER, "reader", bearer=True), ticket(PEER, "member", by=BEARER)], "made into something else"),
        ([ticket(BEARER, bearer=True), ticket(PEER, by=BEARER, bearer=True)], "made into something else"),
        ([ticket(PEER, bearer=True)], "for another peer"),
        ([ticket(STRANGER)], "for another peer"),
        (
            [ticket(PEER, not_after=0)],
            "1970-01-01 00:00+00:00, and the clock of the peer that refuses it shows 20",
        ),
        ([ticket(DELEGATE, "delegate", not_after=0), ticket(PEER, by=DELEGATE)], "expired"),
        ([], "no ticket"),
    ],
)
def test_a_chain_that_breaks_a_rule_says_which(chain: Sequence[Ticket], why: str) -> None:
    found = judge_proof(chain, PEER, NOW, NONE)
    assert isinstance(found, NoAdmission) and why in found.reason
    refused = judge_admission(chain, PEER, NOW, BY_TICKET, NONE)
    assert isinstance(refused, NoAdmission) and why in refused.reason and "swarm invite" in refused.reason


def test_a_ticket_counts_to_its_end_and_as_long_as_clocks_may_differ() -> None:
    end = float(LATER + CLOCK_TOLERANCE_S)
    assert [role(BY_TICKET, PEER, ticket(PEER), now=now) for now in (end, end + 1)] == ["member", None]
    found = judge_admission([ticket(PEER)], PEER, NOW, BY_TICKET, NONE)
    assert isinstance(found, Admission) and found.until_unix == end


def test_a_ban_holds_in_every_mode_and_does_not_even_leave_the_status() -> None:
    banned = NONE.with_new(PEER, FOUNDER)
    for policy in (OPEN, LISTED, PUBLIC):
        assert role(policy, PEER, ticket(PEER), banned=banned) is None
        assert role(policy, FOUNDER, banned=NONE.with_new(FOUNDER, FOUNDER)) == "member"


def test_a_delegate_bans_peers_and_only_the_founder_bans_a_delegate() -> None:
    by_delegate = NONE.with_new(PEER, DELEGATE)
    assert role(OPEN, PEER, banned=by_delegate) is None
    own = ticket(DELEGATE, "delegate")
    assert role(BY_TICKET, DELEGATE, own, banned=NONE.with_new(DELEGATE, OTHER_DELEGATE)) == "member"
    fallen = by_delegate.with_new(DELEGATE, FOUNDER)
    assert role(BY_TICKET, DELEGATE, own, banned=fallen) is None
    assert role(OPEN, PEER, banned=fallen) == "member", "the bans of a banned delegate are void"
    assert role(OPEN, PEER, banned=fallen.with_new(PEER, FOUNDER)) is None


def revocation(subject: PeerId = PEER, issuer: PeerId = FOUNDER, at: float = NOW) -> Revocation:
    return Revocation(issuer, subject, int(at), b"")


@pytest.mark.parametrize(
    ("ban", "proof", "why"),
    [
        (revocation(), [], ""),
        (revocation(issuer=DELEGATE), [ticket(DELEGATE, "delegate")], ""),
        (revocation(issuer=DELEGATE), [ticket(DELEGATE)], "neither the founder nor a delegate"),
        (revocation(issuer=DELEGATE), [], "neither the founder nor a delegate"),
        (revocation(issuer=STRANGER), [ticket(DELEGATE, "delegate")], "neither the founder nor a delegate"),
        (revocation(issuer=DELEGATE, at=LATER + 61), [ticket(DELEGATE, "delegate")], "in the future"),
        (
            revocation(issuer=DELEGATE),
            [ticket(DELEGATE, "delegate", not_after=5)],
            "neither the founder nor a delegate",
        ),
        (revocation(FOUNDER), [], "the founder cannot be banned"),
        (revocation(at=NOW + CLOCK_TOLERANCE_S + 1), [], "in the future"),
    ],
)
def test_a_revocation_counts_by_the_founder_or_a_delegate(ban: Revocation, proof: Sequence[Ticket], why: str) -> None:
    problem = judge_revocation(ban, proof, NOW, NONE)
    assert (why in problem) if why else problem == ""


def test_when_all_room_for_revocations_is_taken_only_the_founder_adds_one() -> None:
    full = NONE
    for number in range(MAX_REVOCATIONS):
        full = full.with_new(PeerId(f"peer {number}"), DELEGATE)
    assert full.count == MAX_REVOCATIONS
    assert "only the founder" in judge_revocation(
        revocation(issuer=DELEGATE), [ticket(DELEGATE, "delegate")], NOW, full
    )
    assert judge_revocation(revocation(), [], NOW, full) == ""
    assert full.without(PeerId("peer 0"), DELEGATE).count == MAX_REVOCATIONS - 1


# --- versions

DAY = 1_803_772_800.0  # 2027-02-28, 00:00 UTC


@pytest.mark.parametrize(
    ("software", "outdated"),
    [
        ("agora 0.1.9", True),
        ("agora 0.2.0", False),
        ("agora 0.10.0", False),
        ("agora 1.0.0", False),
        ("agora 0.1.9+local", True),
        ("another program 0.0.1", False),
        ("agora of tomorrow", False),
        ("", False),
    ],
)
def test_a_version_is_outdated_by_its_number_and_programs_of_others_are_not_judged(
    software: str, outdated: bool
) -> None:
    section = AdmissionSection(oldest_version="0.2.0", oldest_version_from="2027-02-28")
    assert is_outdated(software, section) == outdated
    assert not is_outdated(software, AdmissionSection())
    assert not refusal_of_version(software, section, DAY - 1), "not before its day"
    refusal = refusal_of_version(software, section, DAY)
    assert bool(refusal) == outdated
    assert not outdated or ("0.2.0 or later" in refusal and "pip install --upgrade agora-swarm" in refusal)


def test_without_a_day_a_version_counts_at_once_and_a_day_that_is_none_too() -> None:
    assert first_second("") == first_second("2027-02-31") == 0.0 and first_second("2027-02-28") == DAY
    assert refusal_of_version("agora 0.1.0", AdmissionSection(oldest_version="0.2.0"), 1.0)
