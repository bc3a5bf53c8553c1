"""An owner's side of a round: takes the members' values of a part, averages what came in time, answers each.

Knows: contributions, who is expected, when to stop waiting. Must not know: how calls travel, steps, the view.

| a part | is averaged |
|---|---|
| to which every expected member has contributed | at once |
| whose window, which its first contribution opened, is over | with what is there |
| of which this peer is the second owner | unless a member has the first owner's average (Recall), then for all |

| a contribution | is answered by |
|---|---|
| in time, of a member | the average that it is in |
| late | the same average, without being in it; the others make a new one where one peer alone had come in time |
| of a peer that is no member | the average, without being in it |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging.kinds import Average, Part, RoundConfig, round_kinds
from agora.averaging.partition import choose_owners
from agora.averaging.wire import PartCodec
from agora.calls import Caller, Reply
from agora.clock import loop_time
from agora.codec import all_finite
from agora.observe.faults import ReachFault

FIRST_WINDOW: Final = 0.4
"""Share of round_s for which a first owner waits for contributions, counted from the first one."""
SECOND_WINDOW: Final = 0.2
RECALL_SHARE: Final = 0.1
"""Share of round_s in which the members asked by Recall must answer."""
MAX_OPEN: Final = 4096
"""Parts that may be gathered at once."""
KEPT_ROUNDS: Final = 2.0
"""Times round_s for which what is known of a round is kept, for contributions that come late and for Recall."""
KEPT_NUMBERS: Final = 4
"""Rounds of a kind whose averages are kept; exact steps follow one another fast, and nobody asks for older ones."""


class RoundView(Protocol):
    """What an owner asks of the group of replicas that it belongs to."""

    def members(self, stage: int, what: str) -> Mapping[PeerId, float]:
        """Returns a round's members now, this peer included, with their bandwidths."""

    def unreachable(self, stage: int, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` that did not answer lately."""

    def numel_of(self, part: Part) -> int:
        """Returns a part's number of elements. Raises Refused when its round is too far away, else ProtocolError."""


@dataclass(slots=True)
class _Gathering:
    """A part that is being averaged. recalling: whether the members are being asked for the first owner's average."""

    numel: int
    expected: frozenset[PeerId]
    result: asyncio.Future[Average]
    values: dict[PeerId, Tensor] = field(default_factory=dict)
    weights: dict[PeerId, float] = field(default_factory=dict)
    recalling: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def is_complete(self) -> bool:
        """Whether everyone expected has contributed."""
        return self.expected <= self.values.keys()


@dataclass(slots=True)
class _RoundRecord:
    """What is known of a round. members: with their bandwidths, see `_members`. lost: those nobody waits for."""

    members: dict[PeerId, float] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)


class Owner:
    """Averages the parts of rounds that this peer owns, and keeps averages so that others can recall them."""

    def __init__(self, config: RoundConfig, caller: Caller, view: RoundView, reach: ReachFault | None = None) -> None:
        """reach: is awaited at the named fault points."""
        self._config = config
        self._caller = caller
        self._view = view
        self._reach_fault = reach
        self.kinds = round_kinds(config)
        self._open: dict[Part, _Gathering] = {}
        self._kept: dict[Part, Callable[[], Average]] = {}
        self._contributed: dict[Part, set[PeerId]] = {}
        self._rounds: dict[tuple[int, str, int], _RoundRecord] = {}
        self._newest: dict[tuple[int, str], int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def newest(self, stage: int, what: str) -> int:
        """Returns the highest round that anybody has contributed to here; -1 before the first."""
        return self._newest.get((stage, what), -1)

    def lost(self, peer: PeerId, part: Part) -> None:
        """Records that a member does not answer: no part of this round waits for it, until it contributes again."""
        self._round(part).lost.add(peer)
        for other, gathering in list(self._open.items()):
            if other.round == part.round:
                self._expect_no_more(other, gathering, peer)

    def is_lost(self, peer: PeerId, part: Part) -> bool:
        """Returns whether the part's round does not wait for the member."""
        return part.round in self._rounds and peer in self._rounds[part.round].lost

    async def close(self) -> None:
        """Ends everything; whoever still waits for an average gets none."""
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
        """Takes a member's values and returns its answer. Raises Refused, Busy, ProtocolError, TimeoutError."""
        part, values, average = await self._average_with(peer, message, tensors, deadline)
        answer = self.kinds[part.what].encode_answer(part, average.values, values)
        await self._reach("averaging.answered")
        return average.message, answer

    async def contribute_own(
        self, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Averaged, Tensor]:
        """Does the same for this peer's own values; the answer, float32 [n], needs no bytes."""
        part, values, average = await self._average_with(self._config.me, message, tensors, deadline)
        answer = self.kinds[part.what].own_answer(part, average.values, values)
        await self._reach("averaging.answered")
        return average.message, answer

    async def _average_with(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Part, Tensor, Average]:
        """Returns which part it is, the values as they are decoded, and their average with those of the others."""
        part = Part(message.stage, message.what, message.round, message.part)
        numel = self._view.numel_of(part)
        if message.weight > self._config.max_weight:
            raise ProtocolError("bad-message", f"a weight of {message.weight:.3g} tokens is more than a round can have")
        values = self._config.decode(part, tensors, numel)
        self._refuse_repeat(peer, part)
        self._note_round(peer, part)
        await self._reach("averaging.received")
        kept = self._kept.get(part)
        average = kept() if kept else await self._gather(peer, message, part, values, deadline)
        await self._reach("averaging.gathered")
        return part, values, average

    def recall(self, message: Recall) -> tuple[Recalled, list[WireTensor]]:
        """Returns the average of a part if this peer has it, else a message without a tensor."""
        kept = self._kept.get(Part(message.stage, message.what, message.round, message.part))
        if kept is None:
            return Recalled(0, 0, 0.0, 0.0), []
        average = kept()
        counts = average.message
        tensors = PartCodec("float32").encode(average.values)
        return Recalled(counts.members, counts.present, counts.weight, counts.distance), tensors

    def keep(self, part: Part, average: Callable[[], Average]) -> None:
        """Keeps for a while a function that returns a part's average, for late contributions and for Recall."""
        if part in self._kept:
            return
        self._kept[part] = average
        self._kept.pop(part._replace(number=part.number - KEPT_NUMBERS), None)
        self._forget_later(self._kept, part)

    # --- gathering

    def _round(self, part: Part) -> _RoundRecord:
        """Returns what is known of the part's round."""
        if part.round not in self._rounds:
            self._rounds[part.round] = _RoundRecord()
            self._forget_later(self._rounds, part.round)
        return self._rounds[part.round]

    def _members(self, part: Part) -> Mapping[PeerId, float]:
        """Returns the round's members: those there were when it began here, and those that came since."""
        record = self._round(part)
        record.members = {**self._view.members(part.stage, part.what), **record.members}
        return record.members

    def _forget_later(self, records: dict[Any, Any], key: object) -> None:
        """Removes an entry after KEPT_ROUNDS."""
        asyncio.get_running_loop().call_later(KEPT_ROUNDS * self._config.round_s, records.pop, key, None)

    def _refuse_repeat(self, peer: PeerId, part: Part) -> None:
        """Raises ProtocolError when the peer has contributed to this part before."""
        contributed = self._contributed.setdefault(part, set())
        if peer in contributed:
            raise ProtocolError("bad-message", "this part was contributed before")
        contributed.add(peer)
        if len(contributed) == 1:
            self._forget_later(self._contributed, part)

    def _note_round(self, peer: PeerId, part: Part) -> None:
        """Records which round the peer is at: it will not come to an earlier one any more."""
        kind = (part.stage, part.what)
        self._newest[kind] = max(self._newest.get(kind, -1), part.number)
        self._round(part).lost.discard(peer)
        for other, gathering in list(self._open.items()):
            if (other.stage, other.what) == kind and other.number < part.number:
                self._expect_no_more(other, gathering, peer)

    def _expect_no_more(self, part: Part, gathering: _Gathering, peer: PeerId) -> None:
        """Stops waiting for a member, and averages if it was the last one missing."""
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.is_complete and not gathering.recalling:
                self._average(part, gathering)

    async def _gather(self, peer: PeerId, message: Contribute, part: Part, values: Tensor, deadline: float) -> Average:
        """Adds a contribution and waits for the average. Who is the first owner in its own view never recalls."""
        second = message.first_owner_failed and self._first_owner(part) != self._config.me
        gathering = self._open.get(part) or self._begin(part, peer, len(values), second)
        if is_member := peer in self._members(part):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
        if is_member and second and not gathering.recalling:
            gathering.recalling = True
            self._spawn(self._recall_average(part, gathering))
        elif gathering.is_complete:
            self._average(part, gathering)
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _begin(self, part: Part, peer: PeerId, numel: int, second: bool) -> _Gathering:
        """Opens the gathering of a part. Raises Busy when too many are open."""
        if len(self._open) >= MAX_OPEN:
            raise Busy("too many parts are being averaged here; ask the second owner", 1000)
        loop = asyncio.get_running_loop()
        gathering = self._open[part] = _Gathering(numel, self._expected(part, peer, second), loop.create_future())
        window = (SECOND_WINDOW if second else FIRST_WINDOW) * self._config.round_s
        gathering.timer = loop.call_later(window, self._window_over, part, gathering)
        gathering.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return gathering

    def _expected(self, part: Part, peer: PeerId, second: bool) -> frozenset[PeerId]:
        """Returns whom to wait for: the members, without those that are known not to come.

        Unreachable ones are waited for only when they are all the others there are: they may be alive, and an average
        of one member is none.
        """
        members = frozenset(self._view.members(part.stage, part.what))
        reachable = members - self._view.unreachable(part.stage, members)
        expected = reachable if len(reachable) > 1 else members
        expected -= self._round(part).lost
        expected -= self._contributed[part] - {peer}  # of an average that nobody shared
        return expected - {self._first_owner(part)} if second else expected

    def _window_over(self, part: Part, gathering: _Gathering) -> None:
        """Averages without those that are missing; no other part waits for them, once this peer has begun the round."""
        begun = self._config.me in gathering.values
        missing = gathering.expected - gathering.values.keys()
        self._average(part, gathering)
        for peer in missing if begun else ():
            self.lost(peer, part)

    def _first_owner(self, part: Part) -> PeerId:
        """Returns the part's first owner in this peer's view."""
        return choose_owners(self._config.run, *part, self._members(part))[0]

    def _average(self, part: Part, gathering: _Gathering) -> None:
        """Averages what is there, and answers everyone who waits."""
        if gathering.result.done():
            return
        peers, me = list(gathering.values), self._config.me
        weights = [gathering.weights[peer] for peer in peers]
        center = gathering.values[me] if gathering.weights.get(me, 0.0) > 0 else None
        found = self.kinds[part.what].combine(list(gathering.values.values()), weights, center)
        if found is None:
            self._end(part, gathering, Refused("nobody has anything to average yet"))
        else:
            message = Averaged(found.members, len(peers), found.weight, found.distance)
            self._end(part, gathering, Average(found.average, message))

    def _end(self, part: Part, gathering: _Gathering, outcome: Average | AgoraError) -> None:
        """Ends a gathering; an average to which one peer alone contributed is not kept for those who come later."""
        if gathering.result.done():
            return
        self._open.pop(part, None)
        if gathering.timer is not None:
            gathering.timer.cancel()
        if isinstance(outcome, AgoraError):
            gathering.result.set_exception(outcome)
        else:
            if outcome.message.present > 1:
                self.keep(part, lambda: outcome)
            gathering.result.set_result(outcome)
        gathering.values.clear()

    # --- as second owner

    async def _recall_average(self, part: Part, gathering: _Gathering) -> None:
        """Asks the other members for the average that the first owner may have given them before it failed."""
        deadline = loop_time() + RECALL_SHARE * self._config.round_s
        others = gathering.expected - {self._config.me}
        asking = [asyncio.create_task(self._recall_from(peer, part, gathering.numel, deadline)) for peer in others]
        try:
            for answer in asyncio.as_completed(asking):
                average = await answer
                if average is not None:
                    self._end(part, gathering, average)
                    return
        finally:
            for task in asking:
                task.cancel()
        if gathering.is_complete:
            self._average(part, gathering)

    async def _recall_from(self, peer: PeerId, part: Part, numel: int, deadline: float) -> Average | None:
        """Asks a member, by Recall, for the average that it has; None when it has none or does not answer."""
        request = Recall(*part, max(1, int(1000 * (deadline - loop_time()))))
        try:
            return _recalled(await self._caller.call(peer, request, (), deadline=deadline), numel)
        except AgoraError:
            return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task that `close` ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reach(self, point: str) -> None:
        """Awaits a named fault point, at which tests make a daemon fail."""
        if self._reach_fault is not None:
            await self._reach_fault(point)


def _recalled(reply: Reply, numel: int) -> Average | None:
    """Returns the average in an answer to Recall, None without one. Raises ProtocolError."""
    message = reply.message
    if not isinstance(message, Recalled) or not reply.tensors:
        return None
    values = PartCodec("float32").decode(list(reply.tensors), numel)
    if not all_finite(values):
        return None
    return Average(values, Averaged(message.members, message.present, message.weight, message.distance))
