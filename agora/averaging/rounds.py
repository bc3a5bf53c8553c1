"""A member's side of a round: sends each part to its owner, or to the second one, and puts the answers together.

Knows: parts, owners, deadlines, bytes. Must not know: what the values are of, steps, the view.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from agora_protocol.errors import AgoraError, PeerFailed
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute
from torch import Tensor

from agora.averaging.aggregate import Average
from agora.averaging.contributions import Contribution
from agora.averaging.exchange import Part
from agora.averaging.owner import Owner
from agora.averaging.partition import Members, cut_into_parts
from agora.calls import BROKEN
from agora.clock import loop_time
from agora.observe import events

FIRST_PATIENCE: Final = 0.6
"""Share of the round's remaining time for which a member waits for the first owner, before it asks the second."""
PARTS_AT_ONCE: Final = 8
LEAST_S: Final = 0.05
NO_ANSWER: Final = (BROKEN, "deadline")
"""Codes of the errors by which a call ends when its peer is gone or hangs."""


@dataclass(slots=True)
class RoundResult:
    """What a round brought. mean: float32 [n]; of a part that failed, this replica's own values.

    done: for each part, whether it was averaged. present: mean contributions in time to a part, 0 to a failed one.
    lost: own tokens that came too late for this round and the one before, the mean over the parts. Means over the
    averaged parts are: members, those in the average; weight, the sum of theirs.
    """

    mean: Tensor
    done: list[bool]
    present: float = 0.0
    lost: float = 0.0
    members: float = 0.0
    weight: float = 0.0

    @property
    def failed_parts(self) -> int:
        """The number of parts that were not averaged."""
        return self.done.count(False)


class _PartAnswer(NamedTuple):
    """An owner's answer for one part. lost: tokens of this peer that are now in no average, see Contribution."""

    average: Average
    lost: float = 0.0


@dataclass(slots=True)
class Round:
    """One round in which this peer is a member: sends each part to its owner, else to the second; call `run` once.

    owner: averages the parts that this peer owns itself. what: "gradient" or "slice". weight: tokens behind the values;
    with 0 they do not count. members: this peer included, with their bandwidths. deadline: time of the event loop.
    """

    owner: Owner
    report: events.Report
    stage: int
    what: str
    number: int
    weight: float
    members: Members
    deadline: float
    _bytes_out: int = field(default=0, init=False)
    _unanswering: set[PeerId] = field(default_factory=set, init=False)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARTS_AT_ONCE))

    async def run(self, values: Tensor) -> RoundResult:
        """Sends all parts of `values` to be averaged with the others', and returns by the deadline, whoever is missing.

        Reports RoundDone at the end.

        values: float32 [n], finite, on the CPU; not to be changed afterwards, because they may be asked for again.
        """
        began = loop_time()
        pieces = [values[cut] for cut in cut_into_parts(len(values))]
        answers = await asyncio.gather(*(self._average_part(*piece) for piece in enumerate(pieces)))
        flats = [piece if found is None else found.average.values for found, piece in zip(answers, pieces, strict=True)]
        result = RoundResult(torch.cat([*flats, values[:0]]), [found is not None for found in answers])
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
            )
        )
        return result

    async def _average_part(self, index: int, values: Tensor) -> _PartAnswer | None:
        """Returns one part's answer from its first or second owner; reports PartFailed and returns None without one.

        An implausible answer is not used; nor is an average of this peer alone if there are others, after which the
        second is not asked. An owner that does not answer is given up. A used average is kept for Recall.
        """
        part = Part(self.stage, self.what, self.number, index)
        exchange, config = self.owner.exchange, self.owner.config
        async with self._slots:
            made = exchange.contribution(part, values, self.weight)
            reasons: list[str] = []
            for second, owner in enumerate(config.owners(part, self.members)):
                if owner is None or owner in self._unanswering:
                    continue
                try:
                    average = await self._ask(part, owner, bool(second), made)
                    if average.message.present < 2 and len(self.members) > 1:
                        reasons.append(f"{owner}: nobody else contributed in time")
                        break
                    exchange.check_and_record(part, made.values, average.values)
                except (AgoraError, TimeoutError) as error:
                    if owner != config.me and getattr(error, "code", "") in NO_ANSWER:
                        self._unanswering.add(owner)
                        self.owner.give_up_on(owner, part)
                    reasons.append(f"{owner}: {error or 'no answer in time'}")
                    continue
                self.owner.keep(part, average)
                return _PartAnswer(average, exchange.settle(part, made, average.message.counted))
        exchange.settle(part, made, None)
        self.report(events.PartFailed(*part, "; ".join(reasons)[:500]))
        return None

    async def _ask(self, part: Part, owner: PeerId, second: bool, made: Contribution) -> Average:
        """Sends a part to an owner; returns its answer. Raises an AgoraError, or TimeoutError.

        The first owner gets FIRST_PATIENCE of the time left, the second all. An own part goes to `owner` directly.
        """
        now = loop_time()
        left = self.deadline - now
        if left < LEAST_S:
            raise PeerFailed("the round's time is over")
        deadline = self.deadline if second else now + FIRST_PATIENCE * left
        left_ms = max(1, int(1000 * (deadline - now)))
        request = Contribute(*part, made.weight, second, made.wire.name, left_ms)
        await self.owner.reach("averaging.sending")
        if owner == self.owner.config.me:
            return await self.owner.contribute_own(request, made.wire.tensors, deadline)
        self._bytes_out += made.wire.nbytes
        reply = await self.owner.caller.call(owner, request, made.wire.tensors, deadline=deadline)
        if not isinstance(reply.message, Averaged):
            raise PeerFailed(f"the owner answered by {type(reply.message).__name__}")
        return self.owner.exchange.decode_mean(part, reply.tensors, len(made.values), reply.message)


def _add_means(result: RoundResult, averaged: Sequence[_PartAnswer]) -> None:
    """Sets the means in a round's result from the answers to its averaged parts; without any they stay 0."""
    if averaged:
        result.lost = sum(found.lost for found in averaged) / len(result.done)
        messages = [found.average.message for found in averaged]
        result.present = sum(message.present for message in messages) / len(result.done)
        result.members = statistics.fmean(message.members for message in messages)
        result.weight = statistics.fmean(message.weight for message in messages)
