"""Claims about which amendments count: the same ones at all peers that know the same, whatever order they came in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
from agora_protocol.amendments import Amendment, SealedAmendment, open_amendment, seal_amendment
from agora_protocol.errors import AmendmentError, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_RIVALS
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.packing import pack_canonical
from agora_protocol.tickets import Ticket, make_proof, seal_ticket

from agora.core.live_manifest import LiveManifest
from agora.swarm.amendments import AmendmentBook, choose_chain

NOW = 1_790_000_000.0
FOUNDER, DELEGATE, OTHER_DELEGATE, MEMBER = (Identity(bytes([n]) * 32) for n in range(1, 5))
SIGNED = SignedManifest.sign(Manifest(), FOUNDER)
RUN = SIGNED.run_id
FIRST = bytes.fromhex(RUN)


def proof_for(holder: Identity, role: str = "delegate", lifetime_s: int = 1000) -> bytes:
    return make_proof(seal_ticket(Ticket(FOUNDER.peer, holder.peer, False, role, int(NOW) + lifetime_s), RUN, FOUNDER))


def made(
    by: Identity = FOUNDER,
    after: SealedAmendment | None = None,
    *,
    rate: float = 0.001,
    from_step: int = 100,
    proof: bytes | None = None,
    **fields: Any,
) -> SealedAmendment:
    shown = proof if proof is not None else b"" if by is FOUNDER else proof_for(by)
    values = {
        "number": after.amendment.number + 1 if after else 1,
        "previous": after.hash if after else FIRST,
        "signed_step": 10,
        "from_step": from_step,
        "issued_unix": int(NOW),
        "changes": pack_canonical({"optimizer.learning_rate": rate}),
        "proof": shown,
    } | fields
    return open_amendment(seal_amendment(Amendment(by.peer, **values), RUN, by), RUN)


def book_of(amendments: Iterable[SealedAmendment], *banned: PeerId) -> AmendmentBook:
    book = AmendmentBook(RUN, SIGNED.manifest, lambda peer: peer in banned)
    for each in amendments:
        book.add(each.sealed, NOW)
    book.choose()
    return book


def test_a_chain_grows_by_the_founder_and_by_delegates() -> None:
    first = made()
    second = made(DELEGATE, first, rate=0.002)
    book = book_of([first, second])
    assert book.chain == (first, second) and book.not_counting == ()
    assert book.next_amendment() == (3, second.hash)
    assert book.add(first.sealed, NOW) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (made(MEMBER, proof=b""), "neither the founder nor a delegate"),
        (made(MEMBER, proof=proof_for(MEMBER, "member")), "neither the founder nor a delegate"),
        (made(MEMBER, proof=proof_for(DELEGATE)), "neither the founder nor a delegate"),
        (made(DELEGATE, proof=proof_for(DELEGATE, lifetime_s=-1000)), "neither the founder nor a delegate"),
        (made(issued_unix=int(NOW) + 100), "signed in the future"),
        (made(previous=bytes(32)), "not known here"),
        (made(number=2), "follows 0 others"),
        (made(from_step=29), "too near"),
        (made(changes=pack_canonical({"optimizer.target_tokens": 1000})), "target_tokens = 1024"),
        (made(changes=pack_canonical({"optimizer.of_tomorrow": 1})), "does not know.*pip install --upgrade"),
        (made(changes=pack_canonical({"admission.oldest_version": "new"})), "oldest_version"),
    ],
)
def test_what_is_not_allowed_changes_nothing_and_says_what_to_do(wrong: SealedAmendment, says: str) -> None:
    book = book_of([])
    with pytest.raises(AmendmentError, match=says):
        book.add(wrong.sealed, NOW)
    assert not book.choose().added and book.sealed() == []


def test_the_oldest_version_is_amended_like_any_other_value() -> None:
    asked = {"admission.oldest_version": "0.2.0", "admission.oldest_version_from": "2027-02-28"}
    book = book_of([first := made(), made(after=first, changes=pack_canonical(asked))])
    live = LiveManifest(SIGNED.manifest, book.chain)
    assert live.last.admission.oldest_version == "0.2.0" and live.last.admission.oldest_version_from == "2027-02-28"
    assert live.core.admission.oldest_version == "" and live.core.run_id == RUN


@pytest.mark.parametrize(
    "values",
    [
        {"admission.mode": "listed", "admission.peers": [MEMBER.peer]},
        {"admission.mode": "ticket"},
        {"admission.public_status": True},
    ],
)
def test_who_takes_part_is_amended_by_the_founder_alone(values: dict[str, Any]) -> None:
    changes = pack_canonical(values)
    with pytest.raises(AmendmentError, match="by the founder alone"):
        book_of([]).add(made(DELEGATE, changes=changes).sealed, NOW)
    live = LiveManifest(SIGNED.manifest, book_of([made(changes=changes)]).chain)
    assert live.at(99).admission == SIGNED.manifest.admission
    for key, value in values.items():
        amended = getattr(live.at(100).admission, key.removeprefix("admission."))
        assert amended == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "values",
    [
        {"admission.mode": "listed"},  # nobody but the founder
        {"admission.peers": [MEMBER.peer]},  # without effect in mode open
        {"admission.mode": "listed", "admission.peers": ["me"]},
        {"admission.mode": "closed"},
    ],
)
def test_an_admission_that_does_not_fit_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(AmendmentError, match="do not fit the run"):
        book_of([]).add(made(changes=pack_canonical(values)).sealed, NOW)


def test_an_amendment_of_another_run_or_with_a_false_signature_is_malformed() -> None:
    other = SignedManifest.sign(Manifest(name="other"), FOUNDER).run_id
    foreign = seal_amendment(made().amendment, other, FOUNDER)
    for data in (foreign, made().sealed[:-1] + b"\0", b"\xc1"):
        with pytest.raises(ProtocolError):
            book_of([]).add(data, NOW)


def test_the_founder_overrules_a_delegate_and_of_two_delegates_the_lower_hash_goes_first() -> None:
    of_founder, of_delegate, of_other = made(rate=0.1), made(DELEGATE, rate=0.2), made(OTHER_DELEGATE, rate=0.3)
    lower, higher = sorted((of_delegate, of_other), key=lambda each: each.hash)
    for order in itertools.permutations((of_founder, of_delegate, of_other)):
        assert book_of(order).chain == (of_founder,)
        assert set(book_of(order).not_counting) == {lower, higher}
    assert book_of([higher, lower]).chain == (lower,)
    change = (book := book_of([lower])).add(of_founder.sealed, NOW) and book.choose()
    assert change and (change.added, change.dropped) == ((of_founder,), (lower,))


def test_what_the_founder_has_built_upon_stays_whatever_comes_later() -> None:
    rivals = sorted((made(rate=rate) for rate in (0.1, 0.2, 0.3)), key=lambda each: each.hash)
    last = made(after=rivals[-1], rate=0.5, from_step=120)
    assert book_of(rivals).chain == (rivals[0],)
    assert book_of([*rivals, last]).chain == (rivals[-1], last)


def test_a_ban_takes_back_what_a_delegate_has_signed_unless_the_founder_has_built_upon_it() -> None:
    by_delegate = made(DELEGATE)
    follows = made(DELEGATE, by_delegate, rate=0.002)
    assert book_of([by_delegate, follows], DELEGATE.peer).chain == ()
    confirmed = made(FOUNDER, by_delegate, rate=0.004)
    assert book_of([by_delegate, follows, confirmed], DELEGATE.peer).chain == (by_delegate, confirmed)
    # A newcomer that learns of the ban first comes to the same chain.
    assert book_of([by_delegate, confirmed], DELEGATE.peer).chain == (by_delegate, confirmed)


def test_all_orders_of_the_same_amendments_give_the_same_chain() -> None:
    rng = random.Random(3)
    for _ in range(60):
        known = list[SealedAmendment]()
        for _ in range(rng.randint(2, 8)):
            after = rng.choice([None, *known])
            by = rng.choice((FOUNDER, DELEGATE, OTHER_DELEGATE))
            number = after.amendment.number + 1 if after else 1
            if sum(each.amendment.number == number for each in known) < MAX_RIVALS:
                known.append(made(by, after, rate=rng.uniform(0.001, 1.0)))
        banned = rng.sample((DELEGATE.peer, OTHER_DELEGATE.peer), rng.randint(0, 2))
        expected = choose_chain(known, RUN, FOUNDER.peer, lambda peer: peer in banned)
        for _ in range(4):
            order = sorted(known, key=lambda each: (each.amendment.number, rng.random()))
            book = book_of(order, *banned)
            assert book.chain == expected
            assert book.digest() == book_of(known, *banned).digest()
        assert [each.amendment.number for each in expected] == list(range(1, len(expected) + 1))
        assert all(after.amendment.previous == each.hash for each, after in itertools.pairwise(expected))


def test_two_halves_of_a_split_choose_one_chain_once_they_have_met() -> None:
    common = made()
    here = [made(DELEGATE, common, rate=0.002), made(OTHER_DELEGATE, common, rate=0.003)]
    there = [made(FOUNDER, common, rate=0.004)]
    left, right = book_of([common, *here]), book_of([common, *there])
    assert left.chain != right.chain
    for book, others in ((left, right.sealed()), (right, left.sealed())):
        for sealed in others:
            book.add(sealed, NOW)
        book.choose()
    assert left.chain == right.chain == (common, *there) and left.digest() == right.digest()


def test_rivals_are_bounded_and_only_the_founder_gets_in_then() -> None:
    spam = [made(DELEGATE, rate=0.001 * n) for n in range(1, MAX_RIVALS + 1)]
    book = book_of(spam)
    with pytest.raises(AmendmentError, match="only the founder can add one"):
        book.add(made(DELEGATE, rate=0.5).sealed, NOW)
    of_founder = made(rate=0.6)
    assert book.add(of_founder.sealed, NOW) is not None
    book.choose()
    assert book.chain == (of_founder,) and len(book.sealed()) == MAX_RIVALS


def test_the_live_manifest_has_the_chains_values_hash_and_number_at_each_step() -> None:
    first, second = made(from_step=50), made(after=made(from_step=50), rate=0.002, from_step=90)
    live = LiveManifest(SIGNED.manifest, (first, second))
    rates = [live.at(step).optimizer.learning_rate for step in (0, 49, 50, 89, 90)]
    assert rates == [0.003, 0.003, 0.001, 0.001, 0.002]
    assert [live.number_at(step) for step in (49, 50, 90)] == [0, 1, 2]
    assert [live.hash_at(step) for step in (49, 50, 90)] == [b"", first.hash, second.hash]
    live.amend(())
    assert live.at(90) is SIGNED.manifest and live.hash_at(90) == b""


def test_two_amendments_from_one_step_are_both_in_force_there() -> None:
    first = made(from_step=50)
    second = made(after=first, from_step=50, changes=pack_canonical({"optimizer.total_steps": 9000}))
    optimizer = (live := LiveManifest(SIGNED.manifest, (first, second))).at(50).optimizer
    assert (optimizer.learning_rate, optimizer.total_steps) == (0.001, 9000)
    assert live.number_at(50) == 2 and live.number_at(49) == 0
    assert live.total_steps == 9000, "known before its step"
