"""Remembers the signed results of evaluations in a run, and decides which are published. Deterministic.

The rules are those of protocol/SPEC.md, section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.directory_shards import shard_hash
from agora_protocol.errors import ProtocolError
from agora_protocol.evaluations import Evaluation, evaluator_rank, open_evaluation
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import (
    CLOCK_TOLERANCE_S,
    MAX_EVALUATIONS_OF_ISSUER,
    MAX_KEPT_EVALUATIONS,
    MAX_SHARED_EVALUATIONS,
)
from agora_protocol.manifest_sections import EvaluationSection

COPIES: Final = 3  # peers that publish another's result

Admits = Callable[[PeerId, bytes], bool]  # whether the run admits a peer as a member now, by its proof


@dataclass(frozen=True, slots=True)
class SealedEvaluation:
    """A verified result, with its signed bytes."""

    evaluation: Evaluation
    sealed: bytes


class EvaluationBook:
    """The results that this peer knows: of each member the last of each task, within the limits of the protocol."""

    def __init__(self, run: RunId, admits: Admits) -> None:
        self._run = run
        self._admits = admits
        self._kept: dict[tuple[PeerId, str], SealedEvaluation] = {}

    def add(self, sealed: bytes, now_unix: float) -> Evaluation | None:
        """Verifies a sealed result and keeps it; returns None for one that is known, older than a known one, or one too
        many.

        Raises ProtocolError for one that is malformed, falsely signed, signed in the future or not by a member.
        """
        if any(each.sealed == sealed for each in self._kept.values()):
            return None
        found = open_evaluation(sealed, self._run)
        if found.issued_unix > now_unix + CLOCK_TOLERANCE_S:
            raise ProtocolError("bad-record", "An evaluation was signed in the future.")
        if not self._admits(found.issuer, found.proof):
            raise ProtocolError("bad-record", "An evaluation is not signed by a member of the run.")
        key = found.issuer, found.task
        known, new = self._kept.get(key), SealedEvaluation(found, sealed)
        if known is not None and _age(known) >= _age(new):
            return None
        self._kept[key] = new
        self._make_room()
        return found if self._kept.get(key) is new else None

    def forget_refused(self) -> None:
        """Drops the results of peers that the run does not admit any more."""
        for key, each in list(self._kept.items()):
            if not self._admits(each.evaluation.issuer, each.evaluation.proof):
                del self._kept[key]

    def known(self) -> list[SealedEvaluation]:
        """Returns all results, the one that was signed last first."""
        return sorted(self._kept.values(), key=_age, reverse=True)

    def _make_room(self) -> None:
        while True:
            counts = Counter(issuer for issuer, _ in self._kept)
            issuer, most = max(counts.items(), key=lambda item: (item[1], item[0]))
            if most <= MAX_EVALUATIONS_OF_ISSUER and len(self._kept) <= MAX_KEPT_EVALUATIONS:
                return
            del self._kept[min((key for key in self._kept if key[0] == issuer), key=lambda key: _age(self._kept[key]))]


def _age(each: SealedEvaluation) -> tuple[int, int, bytes]:
    return each.evaluation.issued_unix, each.evaluation.step, each.sealed


def choose_published(
    known: Iterable[SealedEvaluation], lists: Mapping[PeerId, Sequence[bytes]], me: PeerId, run: RunId
) -> list[bytes]:
    """Returns the results that this peer publishes: its own, then those of others that too few peers publish.

    A peer passes on another's result unless COPIES peers of smaller hashes do; so those of the smallest hashes do in
    the end, and it outlives its issuer. known: the newest first. lists: what each peer publishes.
    """
    own_hash = shard_hash(run, me)
    before = [sealed for peer, sealed in lists.items() if peer != me and shard_hash(run, peer) < own_hash]
    copies = Counter(data for sealed in before for data in set(sealed))
    own, others = list[bytes](), list[bytes]()
    for each in known:
        if each.evaluation.issuer == me:
            own.append(each.sealed)
        elif copies[each.sealed] < COPIES:
            others.append(each.sealed)
    return [*own, *others][:MAX_SHARED_EVALUATIONS]


# --- who evaluates


def due_tasks(
    section: EvaluationSection,
    step: int,
    me: PeerId,
    origins: Collection[PeerId],
    known: Iterable[Evaluation],
    run: RunId,
) -> list[str]:
    """Returns the tasks that this peer, which serves stage 0, is to evaluate now.

    It is its turn while no serving peer of stage 0 goes before it in the round of `step`, so that the next takes over
    from one that has gone. A result counts as the round's only if its issuer goes before this peer, or is it: anybody
    can sign one. section: as it is at `step`, the steps that stage 0 has taken. known: results that members signed.
    """
    number = step // section.every
    own = evaluator_rank(run, number, me)
    if not section.tasks or number == 0 or any(evaluator_rank(run, number, peer) < own for peer in origins):
        return []
    of_round = [each for each in known if each.step // section.every == number]
    done = {each.task for each in of_round if evaluator_rank(run, number, each.issuer) <= own}
    return [task for task in section.tasks if task not in done]
