"""Decides which amendments of a run count, and remembers them. Deterministic.

The rules are those of protocol/SPEC.md, section 4.

Peers that know the same amendments and bans have the same chain, in whatever order these came: a founder need not be
there, and two halves of a run that was split agree again once they have told each other what they know.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from agora_protocol.amendments import Amendment, SealedAmendment, check_follows, open_amendment
from agora_protocol.errors import AmendmentError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_KEPT_AMENDMENTS, MAX_RIVALS
from agora_protocol.manifest import Manifest
from agora_protocol.tickets import DELEGATE, open_proof

from agora.swarm.admission import Admission, Revocations, judge_proof

IsBanned = Callable[[PeerId], bool]  # whether the founder has banned a delegate
Chain = tuple[SealedAmendment, ...]


def choose_chain(known: Collection[SealedAmendment], run: RunId, founder: PeerId, is_banned: IsBanned) -> Chain:
    """Returns the amendments that count, in order. Of several that follow the same one, the first of this order counts.

    | goes before | because |
    |---|---|
    | the one that leads to the highest number that the founder has signed, itself included | he has confirmed it |
    | then the one with the lowest hash | one must be chosen, by all peers alike |

    An amendment of a delegate that the founder has banned counts only if the founder has signed one that follows it.
    known: amendments in any order; each names the one that it follows, which may not be known.
    """
    successors = defaultdict[bytes, list[SealedAmendment]](list)
    confirmed_to: dict[bytes, int] = {}
    for each in sorted(known, key=lambda each: -each.amendment.number):
        own = each.amendment.number if each.amendment.issuer == founder else 0
        confirmed_to[each.hash] = max([own, *(confirmed_to[after.hash] for after in successors[each.hash])])
        successors[each.amendment.previous].append(each)
    chain = list[SealedAmendment]()
    previous = bytes.fromhex(run)
    while True:
        counting = [
            each for each in successors[previous] if confirmed_to[each.hash] or not is_banned(each.amendment.issuer)
        ]
        if not counting:
            return tuple(chain)
        chain.append(min(counting, key=lambda each: (-confirmed_to[each.hash], each.hash)))
        previous = chain[-1].hash


@dataclass(frozen=True, slots=True)
class ChainChange:
    """What a new amendment has changed. dropped: the amendments that no longer count."""

    added: Chain
    dropped: Chain


class AmendmentBook:
    """The amendments of a run that this peer knows, those that count (`chain`), and the others (`not_counting`)."""

    def __init__(self, run: RunId, core: Manifest, is_banned: IsBanned = lambda _: False) -> None:
        self.chain: Chain = ()
        self._run = run
        self._core = core
        self._founder = PeerId(core.founder)
        self._is_banned = is_banned
        self._known: dict[bytes, SealedAmendment] = {}

    @property
    def not_counting(self) -> Chain:
        counting = {each.hash for each in self.chain}
        return tuple(each for each in self._in_order() if each.hash not in counting)

    def add(self, sealed: bytes, now_unix: float) -> SealedAmendment | None:
        """Verifies a sealed amendment and keeps it; returns None if it is known. `choose` then says what counts.

        Raises ProtocolError for an amendment that is malformed or whose signature is wrong. Raises AmendmentError,
        which says what to do, for one that this run does not allow: neither founder nor a delegate has signed it, it
        follows one that is not known, its first step is too near the step at which it was signed, its values do not
        fit, or it is one too many.
        """
        opened = open_amendment(sealed, self._run)
        if opened.hash in self._known:
            return None
        amendment = opened.amendment
        self._check_issuer(amendment, now_unix)
        before = self._before(amendment)
        check_follows(amendment, self._core, [each.amendment for each in before])
        self._make_room(opened)
        self._known[opened.hash] = opened
        return opened

    def choose(self) -> ChainChange:
        """Decides anew which amendments count, by all that are known and banned now, and returns what that changed."""
        before, self.chain = self.chain, choose_chain(self._known.values(), self._run, self._founder, self._is_banned)
        former, present = {each.hash for each in before}, {each.hash for each in self.chain}
        added = tuple(each for each in self.chain if each.hash not in former)
        return ChainChange(added, tuple(each for each in before if each.hash not in present))

    def sealed(self) -> list[bytes]:
        """Returns all that are known as they were signed, the lowest number first."""
        return [each.sealed for each in self._in_order()]

    def digest(self) -> bytes:
        """Returns a hash that is equal at peers that know the same amendments."""
        return hashlib.sha256(b"".join(sorted(self._known))).digest()

    def knows(self, digest: bytes) -> bool:
        return digest in self._known

    def next_amendment(self) -> tuple[int, bytes]:
        """Returns number and `previous` of an amendment that follows the chain."""
        return len(self.chain) + 1, self.chain[-1].hash if self.chain else bytes.fromhex(self._run)

    def _in_order(self) -> list[SealedAmendment]:
        return sorted(self._known.values(), key=lambda each: (each.amendment.number, each.hash))

    def _check_issuer(self, amendment: Amendment, now_unix: float) -> None:
        if amendment.issued_unix > now_unix + CLOCK_TOLERANCE_S:
            raise AmendmentError("It was signed in the future; correct the clock of the machine that signs.")
        if amendment.issuer == self._founder:
            return
        proof = open_proof(amendment.proof, self._run)
        shown = judge_proof(proof, amendment.issuer, amendment.issued_unix, Revocations(self._founder))
        if not isinstance(shown, Admission) or shown.role != DELEGATE:
            raise AmendmentError(
                f"{amendment.issuer} is neither the founder nor a delegate; only {self._founder}, or whom it has named "
                "by `swarm invite --role delegate`, can amend the run."
            )

    def _before(self, amendment: Amendment) -> list[SealedAmendment]:
        path = list[SealedAmendment]()
        previous = amendment.previous
        while previous != bytes.fromhex(self._run):
            if previous not in self._known:
                raise AmendmentError(
                    f"Amendment {amendment.number} follows one that is not known here; fetch the others first."
                )
            path.insert(0, self._known[previous])
            previous = path[0].amendment.previous
        if amendment.number != len(path) + 1:
            raise AmendmentError(f"Amendment {amendment.number} follows {len(path)} others; sign it with that number.")
        return path

    def _make_room(self, new: SealedAmendment) -> None:
        rivals = [each for each in self._known.values() if each.amendment.number == new.amendment.number]
        if len(rivals) < MAX_RIVALS and len(self._known) < MAX_KEPT_AMENDMENTS:
            return
        # Only the founder may push out another's: a delegate, of whom none counts and none follows.
        led_on = {each.amendment.previous for each in self._known.values()} | {each.hash for each in self.chain}
        places = rivals if len(rivals) >= MAX_RIVALS else list(self._known.values())
        spare = [each for each in places if each.hash not in led_on and each.amendment.issuer != self._founder]
        if new.amendment.issuer != self._founder or not spare:
            raise AmendmentError(
                f"Too many amendments of number {new.amendment.number} are known, or {MAX_KEPT_AMENDMENTS} in all; "
                "only the founder can add one, in place of one that does not count."
            )
        del self._known[max(spare, key=lambda each: each.hash).hash]


def describe_changes(amendment: Amendment) -> str:
    """Returns the new values in words, such as "optimizer.total_steps = 4000"."""
    return ", ".join(f"{key} = {value}" for key, value in sorted(amendment.values.items()))
