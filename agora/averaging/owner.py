"""An owner's side of a round: takes the members' values of a part, averages what came in time, answers each.

Knows: contributions, who is expected, when to stop waiting. Must not know: how calls travel, what the values are of.

A part is averaged when everyone expected has contributed, or when the window is over that its first contribution
opened. Whoever comes later still gets that average, and is not in it, unless it is one member's values alone: then the
others are averaged without that one. A second owner first asks the other members
whether one has had the average from the first; if so, that is the average for everyone. Who is no member may have an
average, and is in none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging.aggregate import aggregate
from agora.averaging.ownership import owners
from agora.averaging.terms import (
    FIRST_WINDOW,
    RECALL_SHARE,
    SECOND_WINDOW,
    Average,
    AveragingTerms,
    Members,
    Part,
    SizeOf,
)
from agora.averaging.wire import PartCodec
from agora.calls import Caller, Reply
from agora.codec import all_finite
from agora.observe.faults import ReachFault

MAX_OPEN: Final = 4096
"""Parts that may be gathered at once."""
KEPT_ROUNDS: Final = 2.0
"""Times round_s that an average is kept, for those who come late and for Recall."""
KEPT_NUMBERS: Final = 4
"""Rounds of a kind, of which exact steps have one after the other; nobody asks for one that is farther back."""


@dataclass(slots=True)
class _Gathering:
    """A part that is being averaged here."""

    numel: int
    expected: frozenset[PeerId]
    result: asyncio.Future[Average]
    values: dict[PeerId, Tensor] = field(default_factory=dict)
    weights: dict[PeerId, float] = field(default_factory=dict)
    recalling: bool = False
    timer: asyncio.TimerHandle | None = None


class Owner:
    """All parts that this peer averages, and the averages that it got from others, which it can be asked to recall."""

    def __init__(
        self, terms: AveragingTerms, caller: Caller, members: Members, size_of: SizeOf, fault: ReachFault | None = None
    ) -> None:
        self._terms = terms
        self._caller = caller
        self._members = members
        self._size_of = size_of
        self._fault = fault
        self._open: dict[Part, _Gathering] = {}
        self._done: dict[Part, Callable[[], Average]] = {}
        self._seen: dict[Part, set[PeerId]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest: dict[tuple[int, str], int] = {}
        self._silent: dict[tuple[int, str, int], set[PeerId]] = {}
        self._circles: dict[tuple[int, str, int], dict[PeerId, float]] = {}

    def newest(self, stage: int, what: str) -> int:
        """The highest round that somebody has contributed to here; -1 before the first."""
        return self._newest.get((stage, what), -1)

    def lost(self, peer: PeerId, part: Part) -> None:
        """A member does not answer: no part of this round waits for it any more, until it has contributed again."""
        round_ = part.stage, part.what, part.number
        if round_ not in self._silent:
            self._silent[round_] = set()
            later = KEPT_ROUNDS * self._terms.round_s
            asyncio.get_running_loop().call_later(later, self._silent.pop, round_, None)
        self._silent[round_].add(peer)
        for other, gathering in list(self._open.items()):
            if (other.stage, other.what, other.number) == round_:
                self._expect_no_more(other, gathering, peer)

    def is_lost(self, peer: PeerId, part: Part) -> bool:
        """Whether the part's round does not wait for the member."""
        return peer in self._silent.get((part.stage, part.what, part.number), ())

    async def close(self) -> None:
        """Answers nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for gathering in self._open.values():
            if gathering.timer is not None:
                gathering.timer.cancel()
            gathering.result.cancel()
        self._open.clear()

    async def contribute(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Averaged, list[WireTensor]]:
        """A member's values of a part; the answer is as AveragingTerms has it. Raises Refused, Busy, ProtocolError."""
        part, values, average = await self._averaged(peer, message, tensors, deadline)
        answer = self._terms.answer(part, average.values, values)
        await self._reach("averaging.answered")
        return _said(average), answer

    async def contribute_own(
        self, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Averaged, Tensor]:
        """The same for this peer's own values: the answer, float32 [n], needs no bytes."""
        part, values, average = await self._averaged(self._terms.me, message, tensors, deadline)
        answer = self._terms.own_answer(part, average.values, values)
        await self._reach("averaging.answered")
        return _said(average), answer

    async def _averaged(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Part, Tensor, Average]:
        """Which part it is, the values as they are decoded, and their average with those of the others."""
        part = Part(message.stage, message.what, message.round, message.part)
        numel = self._size_of(part)
        if message.weight > self._terms.max_weight:
            raise ProtocolError("bad-message", f"a weight of {message.weight:.3g} tokens is more than a round can have")
        values = self._terms.codec.decode(list(tensors), numel, self._terms.dither(part))
        self._note_once(peer, part)
        self._note_passed(peer, part)
        await self._reach("averaging.received")
        done = self._done.get(part)
        average = done() if done else await self._gathered(peer, message, part, values, deadline)
        await self._reach("averaging.gathered")
        return part, values, average

    def recall(self, message: Recall) -> tuple[Recalled, list[WireTensor]]:
        """The average of a part, if this peer has it."""
        done = self._done.get(Part(message.stage, message.what, message.round, message.part))
        if done is None:
            return Recalled(0, 0, 0.0, 0.0), []
        average = done()
        tensors = PartCodec("float32").encode(average.values)
        return Recalled(average.members, average.present, average.weight, average.distance), tensors

    def keep(self, part: Part, average: Callable[[], Average]) -> None:
        """Remembers for a while how to have an average: one that was made here, or that another owner gave."""
        if part in self._done:
            return
        self._done[part] = average
        self._done.pop(part._replace(number=part.number - KEPT_NUMBERS), None)
        asyncio.get_running_loop().call_later(KEPT_ROUNDS * self._terms.round_s, self._forget, part)

    # --- gathering

    def _circle(self, part: Part) -> Mapping[PeerId, float]:
        """Of the part's round: the members when it began here, also those that failed since, and newer ones."""
        round_ = part.stage, part.what, part.number
        if round_ not in self._circles:
            later = KEPT_ROUNDS * self._terms.round_s
            asyncio.get_running_loop().call_later(later, self._circles.pop, round_, None)
        circle = self._circles[round_] = {**self._members(part.stage), **self._circles.get(round_, {})}
        return circle

    def _note_once(self, peer: PeerId, part: Part) -> None:
        seen = self._seen.setdefault(part, set())
        if peer in seen:
            raise ProtocolError("bad-message", "this part was contributed before")
        seen.add(peer)
        if len(seen) == 1:
            asyncio.get_running_loop().call_later(KEPT_ROUNDS * self._terms.round_s, self._seen.pop, part, None)

    def _note_passed(self, peer: PeerId, part: Part) -> None:
        """Who is at a later round does not come to an earlier one any more."""
        kind = (part.stage, part.what)
        self._newest[kind] = max(self._newest.get(kind, -1), part.number)
        self._silent.get((*kind, part.number), set()).discard(peer)
        for other, gathering in list(self._open.items()):
            if (other.stage, other.what) == kind and other.number < part.number:
                self._expect_no_more(other, gathering, peer)

    def _expect_no_more(self, part: Part, gathering: _Gathering, peer: PeerId) -> None:
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.expected <= gathering.values.keys() and not gathering.recalling:
                self._close(part, gathering)

    async def _gathered(
        self, peer: PeerId, message: Contribute, part: Part, values: Tensor, deadline: float
    ) -> Average:
        second = message.second and self._first_owner(part) != self._terms.me
        gathering = self._open.get(part) or self._opened(part, peer, len(values), second)
        if member := peer in self._circle(part):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
        if member and second and not gathering.recalling:
            gathering.recalling = True
            self._spawn(self._recall(part, gathering))
        elif gathering.expected <= gathering.values.keys():
            self._close(part, gathering)
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _opened(self, part: Part, peer: PeerId, numel: int, second: bool) -> _Gathering:
        if len(self._open) >= MAX_OPEN:
            raise Busy("too many parts are being averaged here; ask the second owner", 1000)
        loop = asyncio.get_running_loop()
        expected = frozenset(self._members(part.stage))
        expected -= self._silent.get((part.stage, part.what, part.number), set())
        expected -= self._seen[part] - {peer}  # of an average that nobody shared
        if second:
            expected -= {self._first_owner(part)}
        gathering = self._open[part] = _Gathering(numel, expected, loop.create_future())
        window = (SECOND_WINDOW if second else FIRST_WINDOW) * self._terms.round_s
        gathering.timer = loop.call_later(window, self._window_over, part, gathering)
        gathering.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return gathering

    def _window_over(self, part: Part, gathering: _Gathering) -> None:
        """Who let one part's window pass holds up no other of the round, once this peer has begun it itself."""
        begun = self._terms.me in gathering.values
        missing = gathering.expected - gathering.values.keys()
        self._close(part, gathering)
        for peer in missing if begun else ():
            self.lost(peer, part)

    def _first_owner(self, part: Part) -> PeerId:
        return owners(self._terms.run, part.stage, part.what, part.number, part.part, self._circle(part))[0]

    def _close(self, part: Part, gathering: _Gathering) -> None:
        """Averages what is there."""
        if gathering.result.done():
            return
        peers = list(gathering.values)
        weights = [gathering.weights[peer] for peer in peers]
        if part.what == "weights" and len(peers) > 1 and not any(weights):
            weights = [1.0] * len(peers)  # newcomers among themselves
        found = aggregate(
            [gathering.values[peer] for peer in peers],
            weights,
            "mean" if self._terms.as_it_is(part.what) else self._terms.rule,
            center=self._center(gathering),
            cap=not self._terms.as_it_is(part.what),
        )
        if found is None:
            self._end(part, gathering, Refused("nobody has anything to average yet"))
        else:
            self._end(part, gathering, Average(found.average, found.members, len(peers), found.weight, found.distance))

    def _center(self, gathering: _Gathering) -> Tensor | None:
        """The own value, where it counts."""
        me = self._terms.me
        return gathering.values[me] if gathering.weights.get(me, 0.0) > 0 else None

    def _end(self, part: Part, gathering: _Gathering, outcome: Average | AgoraError) -> None:
        if gathering.result.done():
            return
        self._open.pop(part, None)
        if gathering.timer is not None:
            gathering.timer.cancel()
        if isinstance(outcome, AgoraError):
            gathering.result.set_exception(outcome)
        else:
            if outcome.present > 1:  # who came alone, and early perhaps, keeps nobody from averaging without it
                self.keep(part, lambda: outcome)
            gathering.result.set_result(outcome)
        gathering.values.clear()

    def _forget(self, part: Part) -> None:
        self._done.pop(part, None)

    # --- as second owner

    async def _recall(self, part: Part, gathering: _Gathering) -> None:
        """Asks the other members for the average that the first owner may have given them before it failed."""
        others = gathering.expected - {self._terms.me}
        deadline = asyncio.get_running_loop().time() + RECALL_SHARE * self._terms.round_s
        asking = [asyncio.create_task(self._ask(peer, part, gathering.numel, deadline)) for peer in others]
        try:
            for answer in asyncio.as_completed(asking):
                average = await answer
                if average is not None:
                    self._end(part, gathering, average)
                    return
        finally:
            for task in asking:
                task.cancel()
        if gathering.expected <= gathering.values.keys():
            self._close(part, gathering)

    async def _ask(self, peer: PeerId, part: Part, numel: int, deadline: float) -> Average | None:
        left_ms = max(1, int(1000 * (deadline - asyncio.get_running_loop().time())))
        request = Recall(part.stage, part.what, part.number, part.part, left_ms)
        try:
            reply = await self._caller.call(peer, request, (), deadline=deadline)
            return _recalled(reply, numel)
        except AgoraError:
            return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, point: str) -> None:
        if self._fault is not None:
            await self._fault(point)


def _said(average: Average) -> Averaged:
    return Averaged(average.members, average.present, average.weight, average.distance)


def _recalled(reply: Reply, numel: int) -> Average | None:
    message = reply.message
    if not isinstance(message, Recalled) or not reply.tensors:
        return None
    values = PartCodec("float32").decode(list(reply.tensors), numel)
    if not all_finite(values):
        return None
    return Average(values, message.members, message.present, message.weight, message.distance)
