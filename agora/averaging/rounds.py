"""A member's side of a round: sends each part to its owner, or to the second one, and puts the answers together.

Knows: parts, owners, deadlines, bytes. Must not know: what the values are of (RoundKind), steps, the view.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from agora_protocol.errors import AgoraError, PeerFailed
from agora_protocol.ids import PeerId
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor

from agora.averaging.contributions import Contribution
from agora.averaging.kinds import Part
from agora.averaging.owner import Owner
from agora.averaging.partition import choose_owners, cut_into_parts
from agora.clock import loop_time
from agora.observe import events

FIRST_PATIENCE: Final = 0.6
"""Share of the round's remaining time for which a member waits for the first owner, before it asks the second."""
PARTS_AT_ONCE: Final = 8
LEAST_S: Final = 0.05
NO_ANSWER: Final = ("broken", "deadline")
"""Codes of the errors by which a call ends when its peer is gone or hangs."""


@dataclass(slots=True)
class RoundResult:
    """What a round brought. answer: float32 [n], average - values in a round of weights, the mean in one of gradients.

    done: for each part, whether it was averaged. present: mean contributions in time to a part, 0 to a failed one.
    lost: own tokens that came too late for this round and the one before, the mean over the parts. Means over the
    averaged parts are: members, those in the average; weight, the sum of theirs; distance and distance_others, the root
    mean square of (values - average) here, and its median over the members.
    """

    answer: Tensor
    done: list[bool]
    present: float = 0.0
    lost: float = 0.0
    members: float = 0.0
    weight: float = 0.0
    distance: float = 0.0
    distance_others: float = 0.0

    @property
    def failed_parts(self) -> int:
        """The number of parts that were not averaged."""
        return self.done.count(False)

    def averaged_blocks(self) -> NDArray[np.int64]:
        """Returns the indices of the slice's blocks of SLICE_BLOCK elements whose part was averaged; rising."""
        return np.flatnonzero(np.repeat(self.done, PART_ELEMENTS // SLICE_BLOCK)[: len(self.answer) // SLICE_BLOCK])


class _PartAnswer(NamedTuple):
    """An owner's answer for one part, decoded, with its message. distance: root mean square of (values - average).

    lost: tokens of this peer that are now in no average, see Contribution.
    """

    answer: Tensor
    message: Averaged
    distance: float
    lost: float = 0.0


@dataclass(slots=True)
class Round:
    """One round in which this peer is a member: sends each part to its owner, else to the second; call `run` once.

    owner: averages the parts that this peer owns itself. what: "weights" or "gradient". weight: tokens behind the
    values; with 0 they count only in an average of weights to which all contribute with 0. members: this peer included,
    with their bandwidths. deadline: time of the event loop.
    """

    owner: Owner
    report: events.Report
    stage: int
    what: str
    number: int
    weight: float
    members: Mapping[PeerId, float]
    deadline: float
    _bytes_out: int = field(default=0, init=False)
    _unanswering: set[PeerId] = field(default_factory=set, init=False)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARTS_AT_ONCE))

    async def run(self, values: Tensor) -> RoundResult:
        """Sends all parts of `values` to be averaged with the others', and returns by the deadline, whoever is missing.

        A part that fails is answered by the kind's `answer_of_failed`. Reports RoundDone at the end.

        values: float32 [n], finite, on the CPU; not to be changed afterwards, because they may be asked for again.
        """
        began, kind = loop_time(), self.owner.kinds[self.what]
        pieces = [values[cut] for cut in cut_into_parts(len(values))]
        answers = await asyncio.gather(*(self._average_part(*piece) for piece in enumerate(pieces)))
        kind.end_round(self.stage)
        flats = [
            kind.answer_of_failed(piece) if found is None else found.answer
            for found, piece in zip(answers, pieces, strict=True)
        ]
        result = RoundResult(torch.cat(flats), [found is not None for found in answers])
        _add_means(result, [found for found in answers if found is not None])
        self.report(
            events.RoundDone(
                stage=self.stage,
                what=self.what,
                round=self.number,
                parts=len(pieces),
                failed_parts=result.failed_parts,
                members=result.present,
                expected=len(self.members),
                weight=self.weight,
                lost=result.lost,
                seconds=loop_time() - began,
                bytes_out=self._bytes_out,
                distance=result.distance,
                distance_others=result.distance_others,
            )
        )
        return result

    async def _average_part(self, index: int, values: Tensor) -> _PartAnswer | None:
        """Returns one part's answer from its first or second owner; reports PartFailed and returns None without one.

        An implausible answer is not used; nor is an average of this peer alone if there are others, after which the
        second is not asked. An owner that does not answer is given up. A used average is kept for Recall.
        """
        part = Part(self.stage, self.what, self.number, index)
        kind, config = self.owner.kinds[self.what], self.owner.config
        async with self._slots:
            made = kind.contribution(part, values, self.weight)
            reasons: list[str] = []
            for second, owner in enumerate(choose_owners(config.run, *part, self.members)):
                if owner is None or owner in self._unanswering:
                    continue
                try:
                    answer, message, tensors = await self._ask(part, owner, bool(second), made)
                    if message.present < 2 and len(self.members) > 1:
                        reasons.append(f"{owner}: nobody else contributed in time")
                        break
                    distance = kind.check_and_record(part, made.values, answer, message)
                except (AgoraError, TimeoutError) as error:
                    if owner != config.me and getattr(error, "code", "") in NO_ANSWER:
                        self._unanswering.add(owner)
                        self.owner.give_up_on(owner, part)
                    reasons.append(f"{owner}: {error or 'no answer in time'}")
                    continue
                if tensors:  # else this peer is the owner, and has kept it
                    kept = kind.kept_answer(part, made.wire, tensors, answer, message)
                    self.owner.keep(part, kept, sum(tensor.nbytes for tensor in tensors))
                return _PartAnswer(answer, message, distance, kind.settle(part, made, message.counted))
        kind.settle(part, made, None)
        self.report(events.PartFailed(*part, "; ".join(reasons)[:500]))
        return None

    async def _ask(
        self, part: Part, owner: PeerId, second: bool, made: Contribution
    ) -> tuple[Tensor, Averaged, Sequence[WireTensor]]:
        """Sends a part to an owner; returns its answer decoded, and as it came. Raises an AgoraError, or TimeoutError.

        The first owner gets FIRST_PATIENCE of the time left, the second all. An own part goes to `owner` directly.
        """
        now = loop_time()
        left = self.deadline - now
        if left < LEAST_S:
            raise PeerFailed("the round's time is over")
        deadline = self.deadline if second else now + FIRST_PATIENCE * left
        request = Contribute(*part, made.weight, second, max(1, int(1000 * (deadline - now))))
        await self.owner.reach("averaging.sending")
        if owner == self.owner.config.me:
            return *await self.owner.contribute_own(request, made.wire, deadline), ()
        self._bytes_out += sum(tensor.nbytes for tensor in made.wire)
        reply = await self.owner.caller.call(owner, request, made.wire, deadline=deadline)
        if not isinstance(reply.message, Averaged):
            raise PeerFailed(f"the owner answered by {type(reply.message).__name__}")
        answer = self.owner.kinds[self.what].decode_answer(part, reply.tensors, len(made.values))
        return answer, reply.message, reply.tensors


def _add_means(result: RoundResult, averaged: Sequence[_PartAnswer]) -> None:
    """Sets the means in a round's result from the answers to its averaged parts; without any they stay 0."""
    if averaged:
        result.lost = sum(found.lost for found in averaged) / len(result.done)
        result.present = sum(found.message.present for found in averaged) / len(result.done)
        result.members = statistics.fmean(found.message.members for found in averaged)
        result.weight = statistics.fmean(found.message.weight for found in averaged)
        result.distance = statistics.fmean(found.distance for found in averaged)
        result.distance_others = statistics.fmean(found.message.distance for found in averaged)
