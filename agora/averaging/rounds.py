"""A member's side of a round: sends each part to its owner, or to the second one, and puts the answers together.

Knows: parts, owners, deadlines, what can be believed. Must not know: weights and gradients as such, steps, the view.
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

from agora.averaging.aggregate import magnitude, root_mean_square
from agora.averaging.drift import Drift, Norm
from agora.averaging.owner import Owner
from agora.averaging.ownership import owners
from agora.averaging.slices import parts
from agora.averaging.terms import FIRST_PATIENCE, Average, AveragingTerms, Part
from agora.calls import Caller
from agora.observe import events
from agora.observe.events import Report
from agora.observe.faults import ReachFault

PARTS_AT_ONCE: Final = 8
LEAST_S: Final = 0.05
NO_ANSWER: Final = ("broken", "deadline")
"""The codes of the errors by which a call ends when its peer is gone, or hangs."""


@dataclass(slots=True)
class RoundResult:
    """answer, float32 [n]: of weights, what to add to the values that were given, 0 where a part failed; of a gradient,
    the mean, the values that were given where a part failed.

    `present`, who brought their values in time, is a mean over all parts, with 0 for a failed one; `members`, those of
    them who are in the average, `weight` and the `distance`s (root mean square to the average: own, and the median of
    those in it) are means over the others.
    """

    answer: Tensor
    done: list[bool]
    present: float = 0.0
    members: float = 0.0
    weight: float = 0.0
    distance: float = 0.0
    distance_others: float = 0.0
    bytes_out: int = 0

    @property
    def failed_parts(self) -> int:
        """Parts that stayed as they were."""
        return self.done.count(False)

    def averaged_blocks(self) -> NDArray[np.int64]:
        """Those of the slice's blocks of SLICE_BLOCK elements that are in a part that was averaged; rising."""
        done = np.repeat(self.done, PART_ELEMENTS // SLICE_BLOCK)[: len(self.answer) // SLICE_BLOCK]
        return np.flatnonzero(done)


@dataclass(frozen=True, slots=True)
class _Got:
    """A part's answer that is used. distance: root mean square of (values - average)."""

    answer: Tensor
    message: Averaged
    distance: float


@dataclass(slots=True)
class _Round:
    """What is the same for every part of a round."""

    stage: int
    what: str
    number: int
    weight: float
    members: Mapping[PeerId, float]
    deadline: float
    drift: Drift
    bytes_out: int = 0
    moved: list[float] = field(default_factory=list)
    seats: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARTS_AT_ONCE))


class _TooFar(PeerFailed):
    """An average that is not believed; `counted`: what the part goes into the stage's usual drift as, if at all."""

    def __init__(self, why: str, counted: float | None) -> None:
        super().__init__(why)
        self.counted = counted


class Rounds:
    """Takes part in rounds; one instance for each daemon."""

    def __init__(
        self, terms: AveragingTerms, caller: Caller, owner: Owner, report: Report, fault: ReachFault | None = None
    ) -> None:
        self._terms = terms
        self._caller = caller
        self._owner = owner
        self._report = report
        self._fault = fault
        self._drift: dict[int, Drift] = {}
        self._norms: dict[tuple[int, int], Norm] = {}

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
        """The round of `values`, float32 [n], finite, on the CPU, with `members` (this peer included); ends by
        `deadline` (loop time), whoever is missing. `values` are not to be changed afterwards: they may be recalled.
        """
        began = asyncio.get_running_loop().time()
        drift = self._drift.get(stage, Drift())
        this = _Round(stage, what, number, weight, members, deadline, drift)
        cuts = parts(len(values))
        got = await asyncio.gather(*(self._part(this, index, values[cut]) for index, cut in enumerate(cuts)))
        result = _put_together(got, [values[cut] for cut in cuts], what)
        result.bytes_out = this.bytes_out
        if this.moved:
            self._drift[stage] = drift.seen(statistics.median(this.moved))
        seconds = asyncio.get_running_loop().time() - began
        self._report(
            events.RoundDone(
                stage=stage,
                what=what,
                round=number,
                parts=len(cuts),
                failed_parts=result.failed_parts,
                members=result.present,
                expected=len(members),
                weight=weight,
                seconds=seconds,
                bytes_out=result.bytes_out,
                distance=result.distance,
                distance_others=result.distance_others,
            )
        )
        return result

    async def _part(self, this: _Round, index: int, values: Tensor) -> _Got | None:
        """One part's answer; None when it stays as it is."""
        part = Part(this.stage, this.what, this.number, index)
        async with this.seats:
            codec = self._terms.codec
            sent = codec.encode(values, self._terms.dither(part))
            reasons: list[str] = []
            refused: float | None = None
            for second, owner in enumerate(
                owners(self._terms.run, part.stage, part.what, part.number, index, this.members)
            ):
                if owner is None or self._owner.is_lost(owner, part):
                    continue
                try:
                    got = await self._ask(this, part, owner, bool(second), sent, values)
                    self._believe(this, part, got, values)
                except (AgoraError, TimeoutError) as error:
                    if isinstance(error, _TooFar):
                        refused = refused or error.counted
                    if owner != self._terms.me and getattr(error, "code", "") in NO_ANSWER:
                        self._owner.lost(owner, part)
                    reasons.append(f"{owner}: {error or 'no answer in time'}")
                    continue
                if got.message.present < 2 and len(this.members) > 1:
                    reasons.append(f"{owner}: nobody else contributed in time")
                    break
                if part.what == "weights" and got.message.members > 1:
                    this.moved.append(Drift.believed(got.distance, got.message.distance))
                return self._kept(part, got, sent, len(values))
        if refused is not None:
            this.moved.append(refused)
        self._report(events.PartFailed(part.stage, part.what, part.number, part.part, "; ".join(reasons)[:500]))
        return None

    async def _ask(
        self, this: _Round, part: Part, owner: PeerId, second: bool, sent: Sequence[WireTensor], values: Tensor
    ) -> _Got:
        now = asyncio.get_running_loop().time()
        left = this.deadline - now
        if left < LEAST_S:
            raise PeerFailed("the round's time is over")
        deadline = this.deadline if second else now + FIRST_PATIENCE * left
        request = Contribute(
            part.stage,
            part.what,
            part.number,
            part.part,
            this.weight,
            second,
            max(1, int(1000 * (deadline - now))),
        )
        if self._fault is not None:
            await self._fault("averaging.sending")
        if owner == self._terms.me:
            message, answer = await self._owner.contribute_own(request, sent, deadline)
        else:
            this.bytes_out += sum(tensor.nbytes for tensor in sent)
            reply = await self._caller.call(owner, request, sent, deadline=deadline)
            if not isinstance(reply.message, Averaged):
                raise PeerFailed(f"the owner answered by {type(reply.message).__name__}")
            message, answer = reply.message, self._terms.answered(part, reply.tensors, len(values))
        apart = magnitude(answer) if part.what == "weights" else root_mean_square(answer, values)
        return _Got(answer, message, apart)

    def _believe(self, this: _Round, part: Part, got: _Got, values: Tensor) -> None:
        """Raises _TooFar for an average where no replica can be, or a gradient much larger than it ever is."""
        if self._terms.as_it_is(part.what):
            return
        own = magnitude(values)
        if part.what == "weights":
            if why := this.drift.unbelievable(got.distance, own):
                raise _TooFar(why, this.drift.counted(own) if got.message.members > 1 else None)
            return
        size, norm = magnitude(got.answer), self._norms.get((part.stage, part.part), Norm())
        if why := norm.unbelievable(size, own):
            raise _TooFar(why, None)
        self._norms[part.stage, part.part] = norm.seen(size, own)

    def _kept(self, part: Part, got: _Got, sent: Sequence[WireTensor], numel: int) -> _Got:
        """Remembers how to have the average, for a second owner that asks for it."""
        it = got.message
        known = (it.members, it.present, it.weight, it.distance)

        def average() -> Average:
            values = self._terms.codec.decode(list(sent), numel, self._terms.dither(part))
            return Average(values + got.answer, *known)

        self._owner.keep(part, average if part.what == "weights" else partial(Average, got.answer, *known))
        return got


def _put_together(got: Sequence[_Got | None], given: Sequence[Tensor], what: str) -> RoundResult:
    """given: each part's values."""
    answers = [_unchanged(values, what) if it is None else it.answer for it, values in zip(got, given, strict=True)]
    result = RoundResult(torch.cat(answers), [it is not None for it in got])
    used = [it for it in got if it is not None]
    if used:
        result.present = sum(it.message.present for it in used) / len(got)
        result.members = statistics.fmean(it.message.members for it in used)
        result.weight = statistics.fmean(it.message.weight for it in used)
        result.distance = statistics.fmean(it.distance for it in used)
        result.distance_others = statistics.fmean(it.message.distance for it in used)
    return result


def _unchanged(values: Tensor, what: str) -> Tensor:
    """The answer of a part that failed."""
    return torch.zeros_like(values) if what == "weights" else values
