"""A member's side of a round: sends each part to its first or second owner, and concatenates the means."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import torch
from agora_protocol.errors import AgoraError, PeerFailed
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute
from torch import Tensor

from agora.core.calls import BROKEN
from agora.core.clock import loop_time
from agora.core.sync_mode import EXACT
from agora.observe import events, faults
from agora.replica.aggregate import PartMean
from agora.replica.contributions import Contribution
from agora.replica.part_averager import Part
from agora.replica.partition import Members, Slices, cut_into_parts
from agora.replica.reducer import PartReducer

# Fraction of a round's remaining time for which a member waits for the first owner before it asks the second.
FIRST_OWNER_FRACTION: Final = 0.6
MAX_OPEN_PARTS: Final = 8  # maximum number of parts that a peer sends, or asks for, at the same time
MIN_CALL_S: Final = 0.05  # seconds before the round's deadline in which no further owner is asked
NO_ANSWER: Final = (BROKEN, "deadline")  # codes of the errors with which a call ends when its peer is gone or hangs


@dataclass(slots=True)
class RoundResult:
    """The result of a round for one member. recall_failed_parts changes it in place.

    mean: float32 [n]; in a failed part, this replica's own values.
    averaged: for each part, whether it was averaged.
    slices: how many the stage has in this round, EXACT for a gradient.
    wanted: for each part, how many its owner wants later, see step_kinds; of a failed part the present number.
    contributors: average over all parts of the number of members that contributed in time, 0 for a failed part.
    lost: average over all parts of this peer's tokens that were too late for this round and the one before.
    weight: average over the averaged parts of the tokens behind their means, each at most RoundConfig.max_weight.
    """

    mean: Tensor
    averaged: list[bool]
    slices: int
    wanted: list[int]
    contributors: float = 0.0
    lost: float = 0.0
    weight: float = 0.0

    @property
    def failed_parts(self) -> int:
        return self.averaged.count(False)

    @property
    def wanted_slices(self) -> int:
        return max(self.wanted) if self.wanted and self.slices not in self.wanted else self.slices

    @classmethod
    def of_failed_parts(cls, own: Tensor, slices: int) -> RoundResult:
        """Returns the result of a round over `own`, float32 [n], in which every part has failed."""
        parts = len(cut_into_parts(len(own)))
        return cls(own, [False] * parts, slices, [slices] * parts)


class RoundGroup(Protocol):
    """Protocol: the replicas of a stage, as this peer sees them; implemented by StageRounds."""

    @property
    def reducer(self) -> PartReducer:
        """Averages the parts that this peer owns; keeps means for other replicas."""

    def live_others(self, stage: int) -> Collection[PeerId]:
        """Returns the ids of the stage's other replicas that are live."""

    def members(self, stage: int) -> Members:
        """Returns the members of the stage's rounds, this peer included, with bandwidths."""

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round of the stage may take."""

    def slices(self, stage: int, number: int) -> Slices:
        """Returns the slices of the stage, of which slice round `number` averages one."""

    async def run_round(
        self, stage: int, kind: str, number: int, values: Tensor, weight: float, slices: int = EXACT
    ) -> RoundResult:
        """Averages `values` with those of the present members in one round and returns the result; see Round."""


class _PartAnswer(NamedTuple):
    """An owner's mean of one part. lost: tokens of this peer that no mean will contain, see record_outcome."""

    mean: PartMean
    lost: float = 0.0


@dataclass(slots=True)
class Round:
    """One round in which this peer is a member; call `run` once.

    reducer: averages the parts that this peer owns.
    kind: "gradient" or "slice".
    number: counts the rounds of the stage and kind.
    weight: tokens behind the values; with 0 they do not enter the mean.
    members: this peer included, with bandwidths.
    deadline: loop time by which the round ends, whichever owners have answered.
    slices: how many the stage has, EXACT for a gradient.
    """

    reducer: PartReducer
    report: events.Report
    stage: int
    kind: str
    number: int
    weight: float
    members: Members
    deadline: float
    slices: int = EXACT
    _bytes_out: int = field(default=0, init=False)
    _unresponsive: set[PeerId] = field(default_factory=set, init=False)
    _free_calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPEN_PARTS), init=False)

    async def run(self, values: Tensor) -> RoundResult:
        """Averages `values` with those of the other members, reports RoundDone, and returns the result by the deadline.

        Averages up to MAX_OPEN_PARTS parts at the same time. Parts that were not averaged keep this peer's values.
        values: float32 [n], finite, on the CPU; must not be changed afterwards, because they may be kept for later.
        """
        started_at = loop_time()
        parts = [values[cut] for cut in cut_into_parts(len(values))]
        answers = await asyncio.gather(*(self._average_part(*part) for part in enumerate(parts)))
        means = [own if answer is None else answer.mean.values for answer, own in zip(answers, parts, strict=True)]
        wanted = [self.slices if answer is None else answer.mean.message.wanted_slices for answer in answers]
        averaged = [answer is not None for answer in answers]
        result = RoundResult(torch.cat([*means, values[:0]]), averaged, self.slices, wanted)
        _set_statistics(result, [answer for answer in answers if answer is not None], self.reducer.config.max_weight)
        self.report(
            events.RoundDone(
                stage=self.stage,
                what=self.kind,
                round=self.number,
                parts=len(parts),
                failed_parts=result.failed_parts,
                contributors=result.contributors,
                members=len(self.members),
                weight=self.weight,
                lost=result.lost,
                seconds=loop_time() - started_at,
                bytes_out=self._bytes_out,
            )
        )
        return result

    async def _average_part(self, index: int, values: Tensor) -> _PartAnswer | None:
        part = Part(self.stage, self.kind, self.number, index, self.slices)
        averager, config = self.reducer.averager, self.reducer.config
        async with self._free_calls:
            scale = faults.say("averaging.scale", 1.0)
            contribution = averager.build_contribution(part, values if scale == 1.0 else values * scale, self.weight)
            reasons: list[str] = []
            for rank, owner in enumerate(config.owners(part, self.members)):
                if owner is None or owner in self._unresponsive:
                    continue
                try:
                    mean = await self._send_to_owner(part, owner, rank == 1, contribution)
                    if mean.message.contributors < 2 and len(self.members) > 1:
                        reasons.append(f"{owner}: nobody else contributed in time")
                        break
                    averager.check_magnitude(part, contribution.values, mean.values)
                except (AgoraError, TimeoutError) as error:
                    if owner != config.me and getattr(error, "code", "") in NO_ANSWER:
                        self._unresponsive.add(owner)
                        self.reducer.mark_unresponsive(owner, part)
                    reasons.append(f"{owner}: {str(error) or 'no answer in time'}")
                    continue
                self.reducer.keep_mean(part, mean)
                lost = averager.contributions.record_outcome(part, contribution, mean.message.counted)
                return _PartAnswer(mean, lost)
        averager.contributions.record_outcome(part, contribution, None)
        self.report(events.PartFailed(*part[:4], "; ".join(reasons)[:500]))
        return None

    async def _send_to_owner(self, part: Part, owner: PeerId, is_second: bool, contribution: Contribution) -> PartMean:
        now = loop_time()
        left_s = self.deadline - now
        if left_s < MIN_CALL_S:
            raise PeerFailed("the round's time is over")
        deadline = self.deadline if is_second else now + FIRST_OWNER_FRACTION * left_s
        left_ms = max(1, int(1000 * (deadline - now)))
        encoded = contribution.encoded
        request = Contribute(*part, contribution.weight, is_second, encoded.wire, left_ms)
        await self.reducer.reach_fault("averaging.sending")
        if owner == self.reducer.config.me:
            return await self.reducer.contribute_own(request, encoded.tensors, deadline)
        self._bytes_out += encoded.nbytes
        reply = await self.reducer.caller.call(owner, request, encoded.tensors, deadline=deadline)
        if not isinstance(reply.message, Averaged):
            raise PeerFailed(f"the owner answered by {type(reply.message).__name__}")
        return self.reducer.averager.decode_mean(part, reply.tensors, len(contribution.values), reply.message)


def _set_statistics(result: RoundResult, answers: Sequence[_PartAnswer], max_weight: float) -> None:
    if answers:
        result.lost = sum(answer.lost for answer in answers) / len(result.averaged)
        messages = [answer.mean.message for answer in answers]
        result.contributors = sum(message.contributors for message in messages) / len(result.averaged)
        result.weight = statistics.fmean(min(message.weight, max_weight) for message in messages)
