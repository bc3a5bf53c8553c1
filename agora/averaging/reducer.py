"""An owner's side of a round: takes the members' values of a part, averages what came in time, answers each.

Knows: contributions, who is expected, when to stop waiting. Must not know: how calls travel, steps, the view.

| a part | is averaged |
|---|---|
| to which every expected member has contributed | at once |
| whose window, which its first contribution opened, is over | from the contributions that came |
| of which this peer is the second owner | likewise, unless a member has the first owner's mean (Recall): that is used |

A contribution that is late, or of a peer that is no member, is answered by the mean without being in it. After a mean
of one peer's contribution alone, later contributors are averaged anew.
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

from agora.averaging.aggregate import PartMean
from agora.averaging.exchange import Exchange, Part, RoundConfig
from agora.averaging.part_codec import EncodedPart
from agora.averaging.partition import MAX_RUNNING_SLICE_ROUNDS, Members
from agora.calls import Caller
from agora.clock import loop_time
from agora.observe import faults

FIRST_OWNER_WINDOW: Final = 0.4
"""Fraction of round_s for which a first owner waits for contributions after the first one."""
SECOND_OWNER_WINDOW: Final = 0.2
MAX_PATIENCE_FRACTION: Final = 2 / 3
"""The window ends after this fraction of any contributor's time until its deadline, if that is sooner."""
RECALL_FRACTION: Final = 0.1
"""Fraction of round_s in which the members asked by Recall must answer."""
MAX_GATHERINGS: Final = 4096
"""Parts that may be gathered at once."""
RECORD_LIFETIME: Final = 10.0
"""Times round_s for which a round is remembered after it began here, for late contributions and for Recall."""
MIN_KEPT_ROUNDS: Final = 4
"""The means of the newest so many rounds of a stage and kind are kept, whatever their size."""
MAX_KEPT_BYTES: Final = 2**28
"""Bytes of means of a stage and kind beyond which those of older rounds are dropped. A replica that has just joined
asks for the means of the steps that were taken while it fetched the state."""


class ReducerView(Protocol):
    """What an owner asks of its group of replicas; ReplicaGroup has the methods.

    members: those of a stage's rounds, with bandwidths. round_s: seconds that a round may take. not_awaited: which of
    `peers` a part need not wait for. numel_of: a part's number of elements; raises Refused or ProtocolError for a part
    that is not averaged now.
    """

    def members(self, stage: int) -> Members: ...
    def round_s(self, stage: int) -> float: ...
    def not_awaited(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]: ...
    def numel_of(self, part: Part) -> int: ...


class KeptPartMean(NamedTuple):
    """A part's mean of `numel` elements, encoded by its owner, with the owner's message."""

    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int


@dataclass(slots=True)
class _Gathering:
    """A part whose contributions this owner collects. result: the mean, which all contributors await.

    expected: members whose contributions are awaited. timer: ends the window. recall: asks the members for the mean
    that the part's first owner may have given.
    """

    numel: int
    expected: frozenset[PeerId]
    result: asyncio.Future[PartMean]
    timer: asyncio.TimerHandle
    values: dict[PeerId, Tensor] = field(default_factory=dict)
    weights: dict[PeerId, float] = field(default_factory=dict)
    recall: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every expected member has contributed, so that only a running recall delays the mean."""
        return self.expected <= self.values.keys()


@dataclass(slots=True)
class _RoundRecord:
    """What is known of a round. members: with bandwidths. unresponsive: members that no part waits for.

    By part index: the peers that have `contributed`, and the kept `means`, of `nbytes` in all.
    """

    members: dict[PeerId, float | None] = field(default_factory=dict)
    unresponsive: set[PeerId] = field(default_factory=set)
    contributed: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    means: dict[int, KeptPartMean] = field(default_factory=dict)
    nbytes: int = 0

    def drop_means(self) -> None:
        """Drops the means, not who has contributed."""
        self.means.clear()
        self.nbytes = 0


class PartReducer:
    """Averages the parts that this peer owns: gathers the members' contributions, and answers each with the mean.

    It keeps means for a while, for late contributions and recalls. `close` ends it.
    """

    def __init__(
        self, config: RoundConfig, caller: Caller, view: ReducerView, reach_fault: faults.ReachFault = faults.reach
    ) -> None:
        self.config = config
        self.caller = caller
        self.reach_fault = reach_fault
        self.exchange = Exchange(config)
        self._view = view
        self._gatherings: dict[Part, _Gathering] = {}
        self._rounds: dict[tuple[int, str, int], _RoundRecord] = {}

    def mark_unresponsive(self, peer: PeerId, part: Part) -> None:
        """Records that a member does not answer: no part of this round waits for it, until it contributes again.

        Parts of the round for which it was the last one missing are averaged now.
        """
        self._round(part).unresponsive.add(peer)
        for gathered, gathering in list(self._gatherings.items()):
            if gathered.round == part.round:
                self._stop_expecting(gathered, gathering, peer)

    async def close(self) -> None:
        """Cancels all gatherings and recalls: whoever still waits for a mean gets CancelledError."""
        for gathering in self._gatherings.values():
            gathering.timer.cancel()
            gathering.result.cancel()
        recalls = [gathering.recall for gathering in self._gatherings.values() if gathering.recall is not None]
        self._gatherings.clear()
        for task in recalls:
            task.cancel()
        await asyncio.gather(*recalls, return_exceptions=True)

    async def answer_contribution(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> tuple[Averaged, list[WireTensor]]:
        """Takes a member's values, waits until the part is averaged, and returns the encoded answer for that member.

        Raises Refused when there is nothing to average, Busy when too many parts are gathered here, ProtocolError as
        `_average_with` does, and TimeoutError without a mean by the loop time `deadline`.
        """
        mean = await self._average_with(peer, message, tensors, deadline)
        return mean.message, list(mean.encoded.tensors if mean.encoded else ())

    async def contribute_own(self, message: Contribute, tensors: Sequence[WireTensor], deadline: float) -> PartMean:
        """Does as `answer_contribution` for this peer's own values, and returns the mean itself."""
        return await self._average_with(self.config.me, message, tensors, deadline)

    async def _average_with(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> PartMean:
        """Returns the mean of the part contributed to: the kept one, else the one that is gathered now.

        `counted` in its message is this peer's. Raises ProtocolError for too large a weight, values of a wrong form, or
        a part contributed before.
        """
        part = Part(message.stage, message.what, message.round, message.part)
        numel = self._view.numel_of(part)
        if message.weight > self.config.max_weight:
            raise ProtocolError("bad-message", f"a weight of {message.weight:.3g} tokens is more than a round can have")
        values = self.config.decode_part(part, EncodedPart(cast("WireName", message.wire), tensors), numel)
        self._record_contribution(peer, part)
        await self.reach_fault("averaging.received")
        kept = self._kept_mean(part)
        if kept:
            mean = self.exchange.decode_mean(part, kept.tensors, kept.numel, kept.message)
        else:
            mean = await self._gather(peer, message, part, values, deadline)
        counted = kept is None and peer in self._members(part)
        await self.reach_fault("averaging.gathered")
        await self.reach_fault("averaging.answered")
        return replace(mean, message=replace(mean.message, counted=counted))

    def answer_recall(self, message: Recall) -> tuple[Recalled, list[WireTensor]]:
        """Answers Recall: returns the part's mean if it is kept here, else no tensor."""
        part = Part(message.stage, message.what, message.round, message.part)
        kept = self._kept_mean(part)
        if kept is None:
            return Recalled(0, 0, 0.0, "float32"), []
        counts = kept.message
        return Recalled(counts.in_mean, counts.contributors, counts.weight, counts.wire), list(kept.tensors)

    def keep_mean(self, part: Part, mean: PartMean) -> None:
        """Keeps a part's encoded mean, unless one is kept, and drops means beyond MAX_KEPT_BYTES, the oldest first."""
        record = self._round(part)
        if part.part in record.means or mean.encoded is None:
            return
        record.means[part.part] = KeptPartMean(mean.message, mean.encoded.tensors, len(mean.values))
        record.nbytes += mean.encoded.nbytes
        total = 0
        numbers = sorted((name[2] for name in self._rounds if name[:2] == part[:2]), reverse=True)
        for number in numbers:
            kept_round = self._rounds[part.stage, part.what, number]
            total += kept_round.nbytes
            if total > MAX_KEPT_BYTES and number <= numbers[0] - MIN_KEPT_ROUNDS:
                kept_round.drop_means()

    def _kept_mean(self, part: Part) -> KeptPartMean | None:
        """Returns the mean of the part that is kept here; None without one."""
        return self._rounds[part.round].means.get(part.part) if part.round in self._rounds else None

    # --- gathering

    def _round(self, part: Part) -> _RoundRecord:
        """Returns the record of the part's round; made at first use, forgotten RECORD_LIFETIME * round_s later."""
        if part.round not in self._rounds:
            self._rounds[part.round] = _RoundRecord()
            asyncio.get_running_loop().call_later(RECORD_LIFETIME * self.config.round_s, self._rounds.pop, part.round)
        return self._rounds[part.round]

    def _members(self, part: Part) -> Members:
        """Returns all that were members since the round began here, with the bandwidths that they had first."""
        record = self._round(part)
        record.members = {**self._view.members(part.stage), **record.members}
        return record.members

    def _record_contribution(self, peer: PeerId, part: Part) -> None:
        """Records that a peer contributes a part: it is responsive, and earlier rounds stop waiting for it.

        Raises ProtocolError for a part that it contributed before.
        """
        record = self._round(part)
        if peer in record.contributed[part.part]:
            raise ProtocolError("bad-message", "this part was contributed before")
        record.contributed[part.part].add(peer)
        record.unresponsive.discard(peer)
        running_rounds = MAX_RUNNING_SLICE_ROUNDS if part.what == "slice" else 1
        for gathered, gathering in list(self._gatherings.items()):
            if gathered[:2] == part[:2] and gathered.number <= part.number - running_rounds:
                self._stop_expecting(gathered, gathering, peer)

    def _stop_expecting(self, part: Part, gathering: _Gathering, peer: PeerId) -> None:
        """Stops waiting for a member whose values have not come.

        Averages now if it was the last one missing and no recall is running.
        """
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.is_complete and gathering.recall is None:
                self._average_and_close(part, gathering)

    async def _gather(self, peer: PeerId, message: Contribute, part: Part, values: Tensor, deadline: float) -> PartMean:
        """Adds a contribution, if the peer is a member, and returns the part's mean; waits for that until `deadline`.

        When it was the last one missing, the part is averaged at once. When it came to this peer as second owner, a
        recall is started instead.
        """
        is_second = message.first_owner_failed and self._first_owner(part) != self.config.me
        gathering = self._gatherings.get(part) or self._open_gathering(part, peer, len(values), is_second)
        if is_member := peer in self._members(part):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
        if is_member and is_second and gathering.recall is None:
            gathering.recall = asyncio.create_task(self._recall_mean(part, gathering))
        elif gathering.is_complete:
            self._average_and_close(part, gathering)
        now = loop_time()
        self._shorten_window(part, gathering, now + MAX_PATIENCE_FRACTION * (deadline - now))
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _open_gathering(self, part: Part, peer: PeerId, numel: int, is_second: bool) -> _Gathering:
        """Opens the gathering of a part and starts its window's timer. Raises Busy when MAX_GATHERINGS are open."""
        if len(self._gatherings) >= MAX_GATHERINGS:
            raise Busy("too many parts are being averaged here; ask the second owner", 1000)
        loop, expected = asyncio.get_running_loop(), self._expected_members(part, peer, is_second)
        window_s = (SECOND_OWNER_WINDOW if is_second else FIRST_OWNER_WINDOW) * self._view.round_s(part.stage)
        result, timer = loop.create_future(), loop.call_later(window_s, self._end_window, part)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        gathering = self._gatherings[part] = _Gathering(numel, expected, result, timer)
        return gathering

    def _shorten_window(self, part: Part, gathering: _Gathering, at: float) -> None:
        """Ends the window at loop time `at`, if it would end later: a contributor with shorter steps waits less."""
        if at < gathering.timer.when() and part in self._gatherings:
            gathering.timer.cancel()
            gathering.timer = asyncio.get_running_loop().call_at(at, self._end_window, part)

    def _expected_members(self, part: Part, peer: PeerId, is_second: bool) -> frozenset[PeerId]:
        """Returns the members to wait for: all but unresponsive ones and those that were answered before.

        Those not awaited (see ReducerView) are waited for only if there are no others: they may be alive. A second
        owner does not wait for the first.
        """
        members = frozenset(self._view.members(part.stage))
        awaited = members - self._view.not_awaited(part, members)
        expected = awaited if len(awaited) > 1 else members
        expected -= self._round(part).unresponsive
        expected -= self._round(part).contributed[part.part] - {peer}  # to a mean of one contribution
        return expected - {self._first_owner(part)} if is_second else expected

    def _first_owner(self, part: Part) -> PeerId:
        """Returns the part's first owner in this peer's view."""
        return self.config.owners(part, self._members(part))[0]

    def _end_window(self, part: Part) -> None:
        """Called at the window's end: averages what came. If this peer contributed, the missing are unresponsive."""
        gathering = self._gatherings[part]
        missing = gathering.expected - gathering.values.keys() if self.config.me in gathering.values else ()
        self._average_and_close(part, gathering)
        for peer in missing:
            self.mark_unresponsive(peer, part)

    def _average_and_close(self, part: Part, gathering: _Gathering) -> None:
        """Averages what has come and closes the gathering. A clip begins at this peer's own values, if they count."""
        me, weights = self.config.me, list(gathering.weights.values())
        center = gathering.values[me] if gathering.weights.get(me, 0.0) > 0 else None
        mean = self.exchange.average(part, list(gathering.values.values()), weights, center)
        self._close_gathering(part, gathering, mean)

    def _close_gathering(self, part: Part, gathering: _Gathering, mean: PartMean | None) -> None:
        """Gives all contributors the mean, None: Refused; cancels timer and recall. Does nothing if closed before.

        The mean is kept, unless it is of one peer's contribution alone.
        """
        if self._gatherings.get(part) is not gathering:
            return
        del self._gatherings[part]
        gathering.timer.cancel()
        if gathering.recall is not None:  # also where that is the running task, which then returns
            gathering.recall.cancel()
        if mean is None:
            gathering.result.set_exception(Refused("nobody has anything to average yet"))
        else:
            if mean.message.contributors > 1:
                self.keep_mean(part, mean)
            gathering.result.set_result(mean)
        gathering.values.clear()

    # --- as second owner

    async def _recall_mean(self, part: Part, gathering: _Gathering) -> None:
        """Asks the gathering's other members for the mean that the first owner may have given them before it failed.

        They have RECALL_FRACTION of a round to answer. The first mean closes the gathering; without any, the part is
        averaged here as soon as all have contributed.
        """
        deadline = loop_time() + RECALL_FRACTION * self._view.round_s(part.stage)
        others = gathering.expected - {self.config.me}
        calls = [asyncio.create_task(self.recall_from(peer, part, gathering.numel, deadline)) for peer in others]
        try:
            for answer in asyncio.as_completed(calls):
                if (mean := await answer) is not None:
                    self._close_gathering(part, gathering, mean)
                    return
        finally:
            for call in calls:
                call.cancel()
        if gathering.is_complete:
            self._average_and_close(part, gathering)

    async def recall_from(self, peer: PeerId, part: Part, numel: int, deadline: float) -> PartMean | None:
        """Asks a member, by Recall, for the mean that it keeps; None when it has none, fails, or sends a bad one."""
        request = Recall(*part, max(1, int(1000 * (deadline - loop_time()))))
        try:
            reply = await self.caller.call(peer, request, (), deadline=deadline)
            if not isinstance(reply.message, Recalled) or not reply.tensors:
                return None
            counts = reply.message
            message = Averaged(counts.in_mean, counts.contributors, counts.weight, counted=True, wire=counts.wire)
            return self.exchange.decode_mean(part, reply.tensors, numel, message)
        except AgoraError:
            return None
