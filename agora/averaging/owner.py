"""An owner's side of a round: takes the members' values of a part, averages what came in time, answers each.

Knows: contributions, who is expected, when to stop waiting. Must not know: how calls travel, steps, the view.

| a part | is averaged |
|---|---|
| to which every expected member has contributed | at once |
| whose window, which its first contribution opened, is over | with what is there |
| of which this peer is the second owner | unless a member has the first owner's average (Recall), then for all |

A contribution that is late, or of a peer that is no member, is answered by the average without being in it. Where one
peer alone had come in time, the others make a new one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, cast

from agora_protocol.codec_names import WireName
from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.averaging.aggregate import Average
from agora.averaging.exchange import Exchange, Part, RoundConfig
from agora.averaging.partition import SLICES_AT_ONCE, Members
from agora.averaging.wire import Encoded
from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import faults

FIRST_WINDOW: Final = 0.4
"""Share of a round's time for which a first owner waits for contributions, counted from the first one."""
SECOND_WINDOW: Final = 0.2
USED_PATIENCE: Final = 2 / 3
"""The window lasts at most this share of the time for which a contributor waits, however long rounds may take here."""
RECALL_SHARE: Final = 0.1
"""Share of a round's time in which the members asked by Recall must answer."""
MAX_OPEN: Final = 4096
"""Parts that may be gathered at once."""
KEPT_ROUNDS: Final = 10.0
"""Times round_s for which a round is remembered after it began here, for late contributions and for Recall."""
KEPT_NUMBERS: Final = 4
"""Rounds of a kind whose averages are kept at least, for a second owner and for replicas that are late."""
KEPT_BYTES: Final = 2**28
"""Bytes of means of a stage and kind beyond which older rounds are dropped; replicas that have just joined ask for
those of the steps that were taken while they fetched the state."""


class RoundView(Protocol):
    """What an owner asks of its group of replicas; ReplicaGroup has the methods.

    members: who takes part in a stage's rounds, with bandwidths. round_s: seconds that a round may take. absent: which
    of `peers` a part need not wait for. numel_of: a part's number of elements; raises Refused or
    ProtocolError for one not averaged now.
    """

    def members(self, stage: int) -> Members: ...
    def round_s(self, stage: int) -> float: ...
    def absent(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]: ...
    def numel_of(self, part: Part) -> int: ...


class KeptMean(NamedTuple):
    """The bytes of a part's mean of `numel` elements, as its owner has sent them, with its message."""

    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int


@dataclass(slots=True)
class _Gathering:
    """A part that is being averaged: who is expected, what has come, and the future that all contributors await.

    timer: ends the wait for those missing. recall: asks the members for the first owner's average.
    """

    numel: int
    expected: frozenset[PeerId]
    result: asyncio.Future[Average]
    timer: asyncio.TimerHandle
    values: dict[PeerId, Tensor] = field(default_factory=dict)
    weights: dict[PeerId, float] = field(default_factory=dict)
    recall: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every expected member has contributed, so that nothing but a recall can hold up the average."""
        return self.expected <= self.values.keys()


@dataclass(slots=True)
class _RoundRecord:
    """What is known of a round. members: with bandwidths. given_up: members that no part waits for.

    By part index: who has `contributed`, and the bytes of the `averages`, `nbytes` in all.
    """

    members: dict[PeerId, float | None] = field(default_factory=dict)
    given_up: set[PeerId] = field(default_factory=set)
    contributed: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    averages: dict[int, KeptMean] = field(default_factory=dict)
    nbytes: int = 0

    def drop_averages(self) -> None:
        """Forgets the averages, not who has contributed."""
        self.averages.clear()
        self.nbytes = 0


class Owner:
    """Averages the parts that this peer owns: gathers members' values until all or a window's end, answers each.

    It remembers rounds for a while, with averages for late contributions and recalls. As second owner it first asks the
    members for the average of the first. `close` ends it.
    """

    def __init__(
        self, config: RoundConfig, caller: Caller, view: RoundView, reach: faults.ReachFault = faults.reach
    ) -> None:
        self.config = config
        self.caller = caller
        self.reach = reach
        self.exchange = Exchange(config)
        self._view = view
        self._open: dict[Part, _Gathering] = {}
        self._rounds: dict[tuple[int, str, int], _RoundRecord] = {}

    def give_up_on(self, peer: PeerId, part: Part) -> None:
        """Records that a member does not answer: no part of this round waits for it, until it contributes again.

        Open parts of the round for which it was the last one missing are averaged now.
        """
        self._round(part).given_up.add(peer)
        for other, gathering in list(self._open.items()):
            if other.round == part.round:
                self._expect_no_more(other, gathering, peer)

    async def close(self) -> None:
        """Cancels all gatherings and recalls: whoever still waits for an average gets CancelledError."""
        for gathering in self._open.values():
            gathering.timer.cancel()
            gathering.result.cancel()
        recalls = [gathering.recall for gathering in self._open.values() if gathering.recall is not None]
        self._open.clear()
        for task in recalls:
            task.cancel()
        await asyncio.gather(*recalls, return_exceptions=True)

    async def contribute(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Averaged, list[WireTensor]]:
        """Takes a member's values, waits until the part is averaged, and returns the encoded answer for that member.

        Raises Refused, Busy or ProtocolError, and TimeoutError at the deadline.
        """
        average = await self._average_with(peer, message, tensors, deadline)
        await self.reach("averaging.answered")
        return average.message, list(average.wire.tensors if average.wire else ())

    async def contribute_own(self, message: Contribute, tensors: Sequence[WireTensor], deadline: float) -> Average:
        """Does as `contribute` for this peer's own values, and returns the mean itself."""
        average = await self._average_with(self.config.me, message, tensors, deadline)
        await self.reach("averaging.answered")
        return average

    async def _average_with(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> Average:
        """Returns the average of the part contributed to: the one kept already, else the one now gathered.

        Its message says whether it has this peer's values, for all that is known here. Raises ProtocolError
        for too large a weight, values of a wrong form, or a part contributed before.
        """
        part = Part(message.stage, message.what, message.round, message.part)
        numel = self._view.numel_of(part)
        if message.weight > self.config.max_weight:
            raise ProtocolError("bad-message", f"a weight of {message.weight:.3g} tokens is more than a round can have")
        values = self.config.decode(part, Encoded(cast("WireName", message.wire), tensors), numel)
        self._note_contribution(peer, part)
        await self.reach("averaging.received")
        kept = self._kept(part)
        if kept:
            average = self.exchange.decode_mean(part, kept.tensors, kept.numel, kept.message)
        else:
            average = await self._gather(peer, message, part, values, deadline)
        counted = kept is None and peer in self._members(part)
        await self.reach("averaging.gathered")
        return replace(average, message=replace(average.message, counted=counted))

    def recall(self, message: Recall) -> tuple[Recalled, list[WireTensor]]:
        """Answers Recall: returns the part's average if it is kept here, else no tensor."""
        part = Part(message.stage, message.what, message.round, message.part)
        kept = self._kept(part)
        if kept is None:
            return Recalled(0, 0, 0.0, "float32"), []
        counts = kept.message
        return Recalled(counts.members, counts.present, counts.weight, counts.wire), list(kept.tensors)

    def keep(self, part: Part, average: Average) -> None:
        """Keeps the bytes of a part's average for a while, for late contributions and for Recall.

        The first one stays. Of a stage and kind the newest rounds stay, up to KEPT_BYTES, KEPT_NUMBERS at least.
        """
        record = self._round(part)
        if part.part in record.averages or average.wire is None:
            return
        record.averages[part.part] = KeptMean(average.message, average.wire.tensors, len(average.values))
        record.nbytes += average.wire.nbytes
        total = 0
        numbers = sorted((name[2] for name in self._rounds if name[:2] == part[:2]), reverse=True)
        for number in numbers:
            kept = self._rounds[part.stage, part.what, number]
            total += kept.nbytes
            if total > KEPT_BYTES and number <= numbers[0] - KEPT_NUMBERS:
                kept.drop_averages()

    def _kept(self, part: Part) -> KeptMean | None:
        """Returns what `keep` was given for the part; None without it."""
        return self._rounds[part.round].averages.get(part.part) if part.round in self._rounds else None

    # --- gathering

    def _round(self, part: Part) -> _RoundRecord:
        """Returns the record of the part's round; makes it at first use, and forgets it KEPT_ROUNDS * round_s later."""
        if part.round not in self._rounds:
            self._rounds[part.round] = _RoundRecord()
            asyncio.get_running_loop().call_later(KEPT_ROUNDS * self.config.round_s, self._rounds.pop, part.round)
        return self._rounds[part.round]

    def _members(self, part: Part) -> Members:
        """Returns all who were members at any look since the round began here, with the bandwidths they had first."""
        record = self._round(part)
        record.members = {**self._view.members(part.stage), **record.members}
        return record.members

    def _note_contribution(self, peer: PeerId, part: Part) -> None:
        """Records that the peer contributes the part: its round no longer gives it up, older ones stop waiting.

        Raises ProtocolError for a part that it contributed before.
        """
        record = self._round(part)
        if peer in record.contributed[part.part]:
            raise ProtocolError("bad-message", "this part was contributed before")
        record.contributed[part.part].add(peer)
        record.given_up.discard(peer)
        at_once = SLICES_AT_ONCE if part.what == "slice" else 1
        for other, gathering in list(self._open.items()):
            if other[:2] == part[:2] and other.number <= part.number - at_once:
                self._expect_no_more(other, gathering, peer)

    def _expect_no_more(self, part: Part, gathering: _Gathering, peer: PeerId) -> None:
        """Stops waiting for a member; averages now if it was the last one missing and no recall is running."""
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.is_complete and gathering.recall is None:
                self._average(part, gathering)

    async def _gather(self, peer: PeerId, message: Contribute, part: Part, values: Tensor, deadline: float) -> Average:
        """Adds a contribution, if the peer is a member, and waits until `deadline` for the average.

        Averages at once when it was the last one missing. Sent to the second owner because the first failed, it starts
        a recall instead, unless this peer is the first owner in its own view.
        """
        second = message.first_owner_failed and self._first_owner(part) != self.config.me
        gathering = self._open.get(part) or self._begin(part, peer, len(values), second)
        if is_member := peer in self._members(part):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
        if is_member and second and gathering.recall is None:
            gathering.recall = asyncio.create_task(self._recall_average(part, gathering))
        elif gathering.is_complete:
            self._average(part, gathering)
        now = loop_time()
        self._end_by(part, gathering, now + USED_PATIENCE * (deadline - now))
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _begin(self, part: Part, peer: PeerId, numel: int, second: bool) -> _Gathering:
        """Opens the gathering of a part and starts its window's timer. Raises Busy when MAX_OPEN are open."""
        if len(self._open) >= MAX_OPEN:
            raise Busy("too many parts are being averaged here; ask the second owner", 1000)
        loop, window = asyncio.get_running_loop(), SECOND_WINDOW if second else FIRST_WINDOW
        window_s = window * self._view.round_s(part.stage)
        result, timer = loop.create_future(), loop.call_later(window_s, self._end_window, part)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        gathering = self._open[part] = _Gathering(numel, self._expected(part, peer, second), result, timer)
        return gathering

    def _end_by(self, part: Part, gathering: _Gathering, at: float) -> None:
        """Has the window end at a time, if it would end later: a contributor with shorter steps waits no longer."""
        if at < gathering.timer.when() and part in self._open:
            gathering.timer.cancel()
            gathering.timer = asyncio.get_running_loop().call_at(at, self._end_window, part)

    def _expected(self, part: Part, peer: PeerId, second: bool) -> frozenset[PeerId]:
        """Returns whom to wait for: the members, less those that are given up or were answered before.

        A second owner does not wait for the first. Absent members are waited for only when they are all the others
        there are: they may be alive.
        """
        members = frozenset(self._view.members(part.stage))
        reachable = members - self._view.absent(part, members)
        expected = reachable if len(reachable) > 1 else members
        expected -= self._round(part).given_up
        expected -= self._round(part).contributed[part.part] - {peer}  # of an average that nobody shared
        return expected - {self._first_owner(part)} if second else expected

    def _first_owner(self, part: Part) -> PeerId:
        """Returns the part's first owner in this peer's view."""
        return self.config.owners(part, self._members(part))[0]

    def _end_window(self, part: Part) -> None:
        """Called when the window is over: averages what came; gives up those missing if this peer contributed."""
        gathering = self._open[part]
        missing = gathering.expected - gathering.values.keys() if self.config.me in gathering.values else ()
        self._average(part, gathering)
        for peer in missing:
            self.give_up_on(peer, part)

    def _average(self, part: Part, gathering: _Gathering) -> None:
        """Averages what has come and ends the gathering. A clip begins at this peer's own values, if they count."""
        me, weights = self.config.me, list(gathering.weights.values())
        center = gathering.values[me] if gathering.weights.get(me, 0.0) > 0 else None
        average = self.exchange.combine(part, list(gathering.values.values()), weights, center)
        self._end(part, gathering, average)

    def _end(self, part: Part, gathering: _Gathering, average: Average | None) -> None:
        """Closes a gathering, cancels its timer and recall, and gives all who wait the average, or Refused for None.

        The average is kept, unless one peer alone contributed to it. Does nothing when the gathering was ended before.
        """
        if self._open.get(part) is not gathering:
            return
        del self._open[part]
        gathering.timer.cancel()
        if gathering.recall is not None:  # also where that is the running task, which then returns
            gathering.recall.cancel()
        if average is None:
            gathering.result.set_exception(Refused("nobody has anything to average yet"))
        else:
            if average.message.present > 1:
                self.keep(part, average)
            gathering.result.set_result(average)
        gathering.values.clear()

    # --- as second owner

    async def _recall_average(self, part: Part, gathering: _Gathering) -> None:
        """Asks the other members for the average that the first owner may have given them before it failed.

        The first one found ends the gathering; without any, it is averaged here as soon as it is complete.
        """
        deadline = loop_time() + RECALL_SHARE * self._view.round_s(part.stage)
        others = gathering.expected - {self.config.me}
        calls = [asyncio.create_task(self.recall_from(peer, part, gathering.numel, deadline)) for peer in others]
        try:
            for answer in asyncio.as_completed(calls):
                if (average := await answer) is not None:
                    self._end(part, gathering, average)
                    return
        finally:
            for call in calls:
                call.cancel()
        if gathering.is_complete:
            self._average(part, gathering)

    async def recall_from(self, peer: PeerId, part: Part, numel: int, deadline: float) -> Average | None:
        """Asks a member, by Recall, for the average that it has; None when it has none, fails, or sends a bad one."""
        request = Recall(*part, max(1, int(1000 * (deadline - loop_time()))))
        try:
            reply = await self.caller.call(peer, request, (), deadline=deadline)
            if not isinstance(reply.message, Recalled) or not reply.tensors:
                return None
            counts = reply.message
            message = Averaged(counts.members, counts.present, counts.weight, counted=True, wire=counts.wire)
            return self.exchange.decode_mean(part, reply.tensors, numel, message)
        except AgoraError:
            return None
