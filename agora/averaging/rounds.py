"""A member's side of a round: sends each part to its owner, or to the second one, and puts the answers together.

Knows: parts, owners, deadlines, bytes. Must not know: what the values are of (RoundKind), steps, the view.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import torch
from agora_protocol.errors import AgoraError, PeerFailed
from agora_protocol.ids import PeerId
from agora_protocol.limits import PART_ELEMENTS, SLICE_BLOCK
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor

from agora.averaging.kinds import Part, RoundKind
from agora.averaging.owner import Owner
from agora.averaging.partition import choose_owners, cut_into_parts
from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report

FIRST_PATIENCE: Final = 0.6
"""Share of the round's remaining time for which a member waits for the first owner, before it asks the second."""
PARTS_AT_ONCE: Final = 8
LEAST_S: Final = 0.05
NO_ANSWER: Final = ("broken", "deadline")
"""Codes of the errors by which a call ends when its peer is gone or hangs."""


@dataclass(slots=True)
class RoundResult:
    """What a round brought. answer: float32 [n], see WeightRound and GradientRound.

    done: for each part, whether it was averaged. present: mean contributions in time to a part, 0 to a failed one.
    Means over the averaged parts are: members, those in the average; weight, the sum of theirs; distance and
    distance_others, the root mean square of (values - average) here, and its median over the members.
    """

    answer: Tensor
    done: list[bool]
    present: float = 0.0
    members: float = 0.0
    weight: float = 0.0
    distance: float = 0.0
    distance_others: float = 0.0

    @property
    def failed_parts(self) -> int:
        """The number of parts that were not averaged."""
        return self.done.count(False)

    def averaged_blocks(self) -> NDArray[np.int64]:
        """Returns which of the slice's blocks of SLICE_BLOCK elements are in a part that was averaged; rising."""
        done = np.repeat(self.done, PART_ELEMENTS // SLICE_BLOCK)[: len(self.answer) // SLICE_BLOCK]
        return np.flatnonzero(done)


@dataclass(frozen=True, slots=True)
class _PartAnswer:
    """An owner's answer, decoded. distance: root mean square of (values - average)."""

    answer: Tensor
    message: Averaged
    distance: float


@dataclass(slots=True)
class _Round:
    """What all parts of a round share. number: the round's. deadline: of the whole round, time of the event loop."""

    stage: int
    kind: RoundKind
    what: str
    number: int
    weight: float
    members: Mapping[PeerId, float]
    deadline: float
    bytes_out: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARTS_AT_ONCE))


class Rounds:
    """Takes part in averaging rounds as a member: sends each part to its owner and puts the answers together."""

    def __init__(self, owner: Owner, report: Report) -> None:
        """owner: averages the parts that this peer owns itself."""
        self._config = owner.config
        self._owner = owner
        self._report = report

    async def run(
        self,
        stage: int,
        what: str,
        number: int,
        values: Tensor,
        weight: float,
        members: Mapping[PeerId, float],
        deadline: float,
    ) -> RoundResult:
        """Takes part in one round, and returns by `deadline` (time of the event loop), whoever is missing.

        what: "weights" or "gradient". values: float32 [n], finite, on the CPU; not to be changed afterwards. weight:
        tokens behind them; with 0 they are in no average. members: this peer included, with their bandwidths.
        """
        began, kind = loop_time(), self._owner.kinds[what]
        round_ = _Round(stage, kind, what, number, weight, members, deadline)
        pieces = [values[cut] for cut in cut_into_parts(len(values))]
        answers = await asyncio.gather(*(self._average_part(round_, *piece) for piece in enumerate(pieces)))
        kind.end_round(stage)
        result = _put_together(kind, answers, pieces)
        self._report(
            events.RoundDone(
                stage=stage,
                what=what,
                round=number,
                parts=len(pieces),
                failed_parts=result.failed_parts,
                members=result.present,
                expected=len(members),
                weight=weight,
                seconds=loop_time() - began,
                bytes_out=round_.bytes_out,
                distance=result.distance,
                distance_others=result.distance_others,
            )
        )
        return result

    async def _average_part(self, round_: _Round, index: int, values: Tensor) -> _PartAnswer | None:
        """Returns one part's answer from its first or second owner; None when neither gave a usable one."""
        part = Part(round_.stage, round_.what, round_.number, index)
        async with round_.slots:
            sent = self._config.encode(part, values)
            reasons: list[str] = []
            for second, owner in enumerate(choose_owners(self._config.run, *part, round_.members)):
                if owner is None or self._owner.is_lost(owner, part):
                    continue
                try:
                    answer, message = await self._ask(round_, part, owner, bool(second), sent, len(values))
                    if message.present < 2 and len(round_.members) > 1:
                        reasons.append(f"{owner}: nobody else contributed in time")
                        break
                    distance = round_.kind.judge(part, values, answer, message)
                except (AgoraError, TimeoutError) as error:
                    if owner != self._config.me and getattr(error, "code", "") in NO_ANSWER:
                        self._owner.lost(owner, part)
                    reasons.append(f"{owner}: {error or 'no answer in time'}")
                    continue
                self._owner.keep(part, partial(round_.kind.recalled, part, sent, answer, message))
                return _PartAnswer(answer, message, distance)
        self._report(events.PartFailed(*part, "; ".join(reasons)[:500]))
        return None

    async def _ask(
        self, round_: _Round, part: Part, owner: PeerId, second: bool, sent: Sequence[WireTensor], numel: int
    ) -> tuple[Tensor, Averaged]:
        """Sends a part to an owner and returns its answer. Raises an AgoraError, or TimeoutError, without one."""
        now = loop_time()
        left = round_.deadline - now
        if left < LEAST_S:
            raise PeerFailed("the round's time is over")
        deadline = round_.deadline if second else now + FIRST_PATIENCE * left
        request = Contribute(*part, round_.weight, second, max(1, int(1000 * (deadline - now))))
        await self._owner.reach("averaging.sending")
        if owner == self._config.me:
            return await self._owner.contribute_own(request, sent, deadline)
        round_.bytes_out += sum(tensor.nbytes for tensor in sent)
        reply = await self._owner.caller.call(owner, request, sent, deadline=deadline)
        if not isinstance(reply.message, Averaged):
            raise PeerFailed(f"the owner answered by {type(reply.message).__name__}")
        return round_.kind.decode_answer(part, reply.tensors, numel), reply.message


def _put_together(kind: RoundKind, answers: Sequence[_PartAnswer | None], pieces: Sequence[Tensor]) -> RoundResult:
    """Returns a round's result. pieces: the values of each part."""
    flats = [
        kind.answer_of_failed(values) if found is None else found.answer
        for found, values in zip(answers, pieces, strict=True)
    ]
    result = RoundResult(torch.cat(flats), [found is not None for found in answers])
    averaged = [found for found in answers if found is not None]
    if averaged:
        result.present = sum(found.message.present for found in averaged) / len(answers)
        result.members = statistics.fmean(found.message.members for found in averaged)
        result.weight = statistics.fmean(found.message.weight for found in averaged)
        result.distance = statistics.fmean(found.distance for found in averaged)
        result.distance_others = statistics.fmean(found.message.distance for found in averaged)
    return result
