"""An owner's side of a round: takes the members' values of a part, averages those that came in time, answers each.

A part is a shard of what a round averages; its owner is the reducer of the shard.

| a part | is averaged |
|---|---|
| to which every expected member has contributed | immediately |
| whose window, which its first contribution opened, is over | from the contributions that came |
| of which this peer is the second owner | likewise, but if a member has the first owner's mean (Recall), that is used |

A contribution that is late, or of a peer that is not a member, is answered by the mean without being in it. After a
mean of one peer's contribution alone, later contributions are averaged again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, cast

from agora_protocol.codec_names import WireName
from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.core.calls import Caller
from agora.core.clock import loop_time
from agora.observe import faults
from agora.replica.aggregate import PartMean
from agora.replica.part_averager import Part, PartAverager, RoundConfig
from agora.replica.part_codec import EncodedPart
from agora.replica.partition import MAX_RUNNING_SLICE_ROUNDS, Members
from agora.replica.round_record import KeptPartMean, RoundRecord, averaged_from, drop_oldest_means

# Fraction of round_s for which a part's first owner waits for further contributions after the first one.
FIRST_OWNER_WINDOW: Final = 0.4
# Fraction of round_s for which a part's second owner waits for further contributions after the first one.
SECOND_OWNER_WINDOW: Final = 0.2
# The window ends early so that every contributor gets its answer with a third of its time to its deadline left.
MAX_TIMEOUT_FRACTION: Final = 2 / 3
RECALL_FRACTION: Final = 0.1  # fraction of round_s in which the members asked by Recall must answer
MAX_GATHERINGS: Final = 4096  # maximum number of parts whose contributions are collected at the same time
# A round is remembered for this many times round_s after it began here, for late contributions and for Recall.
RECORD_LIFETIME: Final = 10.0


class ReducerView(Protocol):
    """Protocol: what an owner asks of its group of replicas; implemented by ReplicaGroup."""

    def members(self, stage: int) -> Members:
        """Returns the members of a stage's rounds, this peer included, with bandwidths."""

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round of a stage may take."""

    def peers_not_awaited(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` for whose contributions the owner of `part` need not wait."""

    def check_part(self, part: Part) -> int:
        """Returns the number of elements of `part`; raises Refused or ProtocolError if it is not averaged now."""

    def wanted_slices(self, part: Part) -> int:
        """Returns in how many slices the part's stage should agree later, or EXACT; see step_kinds."""


@dataclass(slots=True)
class _Gathering:
    """The collection of the members' contributions to one part, while this owner waits for more of them.

    numel: elements of the part.
    expected: the members that are waited for.
    result: the future mean, which all contributors await.
    timer: ends the window.
    values, weights: the contributions so far, by member.
    recall: the task that asks the members for the mean that the part's first owner may have given them, or None.
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
        return self.expected <= self.values.keys()

    @property
    def is_recalling(self) -> bool:
        return self.recall is not None and not self.recall.done()


class PartReducer:
    """Averages the parts that this peer owns: gathers the members' contributions, and answers each with the mean.

    One for all stages of a span. Keeps means for a while, for late contributions and recalls: also means of other
    owners, see keep_mean. reach_fault: is called at named points of the work, where tests may inject faults.
    """

    def __init__(
        self, config: RoundConfig, caller: Caller, view: ReducerView, reach_fault: faults.ReachFault = faults.reach
    ) -> None:
        self.config = config
        self.caller = caller
        self.reach_fault = reach_fault
        self.averager = PartAverager(config)
        self._view = view
        self._gatherings: dict[Part, _Gathering] = {}
        self._rounds: dict[tuple[int, str, int], RoundRecord] = {}

    def mark_unresponsive(self, peer: PeerId, part: Part) -> None:
        """Records that a member does not answer: no part of `part`'s round waits for it, until it contributes again.

        Parts of that round for which it was the last one missing are averaged now.
        """
        self._round_record(part).unresponsive.add(peer)
        for gathered, gathering in list(self._gatherings.items()):
            if gathered.round_key == part.round_key:
                self._stop_expecting(gathered, gathering, peer)

    def has_waiting_contributions(self, first_part: Part) -> bool:
        """Returns whether members wait here for the mean of any part of a round. first_part: part 0 of the round."""
        return any(part.round_key == first_part.round_key for part in self._gatherings)

    async def close(self) -> None:
        """Cancels all gatherings and recalls, and awaits the recalls; callers waiting for a mean get CancelledError."""
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
        """Adds a member's values to a part, waits for the part's mean, and returns that: a message and tensors.

        The message's `counted` is whether the values are in the mean: not if they came too late, or from a peer that is
        not a member. Raises Refused when every weight is 0, when the mean is not finite, and when the round is too far
        from this peer's own; Busy when too many parts are gathered here; ProtocolError for too large a weight, values
        of a wrong form, a part that this peer does not average, and one to which `peer` has contributed before;
        TimeoutError if there is no mean by the loop time `deadline`.
        """
        mean = await self._average_with(peer, message, tensors, deadline)
        return mean.message, list(mean.encoded.tensors if mean.encoded else ())

    async def contribute_own(self, message: Contribute, tensors: Sequence[WireTensor], deadline: float) -> PartMean:
        """Adds this peer's own values to a part that it owns, waits for the part's mean, and returns that mean.

        Raises TimeoutError if there is no mean by the loop time `deadline`, and Refused, Busy or ProtocolError in the
        cases that answer_contribution lists.
        """
        return await self._average_with(self.config.me, message, tensors, deadline)

    async def _average_with(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> PartMean:
        part = Part(message.stage, message.what, message.round, message.part, message.slices)
        numel = self._view.check_part(part)
        if message.weight > self.config.max_weight:
            raise ProtocolError("bad-message", f"a weight of {message.weight:.3g} tokens is more than a round can have")
        values = self.config.decode_part(part, EncodedPart(cast("WireName", message.wire), tensors), numel)
        self._record_contribution(peer, part)
        await self.reach_fault("averaging.received")
        kept = self._find_kept_mean(part)
        if kept:
            mean = self.averager.decode_mean(part, kept.tensors, kept.numel, kept.message)
        else:
            mean = await self._gather(peer, message, part, values, deadline)
        counted = kept is None and peer in self._remember_members(part)
        await self.reach_fault("averaging.gathered")
        await self.reach_fault("averaging.answered")  # nothing is done between these two
        return replace(mean, message=replace(mean.message, counted=counted))

    def answer_recall(self, message: Recall) -> tuple[Recalled, list[WireTensor]]:
        """Returns the answer to Recall: the part's kept mean, or a message without tensors if none is kept here."""
        part = Part(message.stage, message.what, message.round, message.part, message.slices)
        kept = self._find_kept_mean(part)
        return (Recalled(0, 0, 0.0, "float32"), []) if kept is None else (kept.recalled(), list(kept.tensors))

    def keep_mean(self, part: Part, mean: PartMean) -> None:
        """Keeps a part's mean for late contributions and recalls, if it is encoded and none of the part is kept yet.

        Then drops means of the oldest rounds of the stage and kind, see drop_oldest_means.
        """
        record = self._round_record(part)
        if part.position in record.means or mean.encoded is None:
            return
        record.means[part.position] = KeptPartMean(mean.message, mean.encoded.tensors, len(mean.values), part.slices)
        record.nbytes += mean.encoded.nbytes
        drop_oldest_means({name[2]: kept for name, kept in self._rounds.items() if name[:2] == part[:2]})

    def _find_kept_mean(self, part: Part) -> KeptPartMean | None:
        record = self._rounds.get(part.round_key)
        kept = record.means.get(part.position) if record else None
        return kept if kept is not None and kept.slices == part.slices else None

    # --- gathering

    def _round_record(self, part: Part) -> RoundRecord:
        if part.round_key not in self._rounds:
            self._rounds[part.round_key] = RoundRecord()
            asyncio.get_running_loop().call_later(
                RECORD_LIFETIME * self.config.round_s, self._rounds.pop, part.round_key
            )
        return self._rounds[part.round_key]

    def _remember_members(self, part: Part) -> Members:
        record = self._round_record(part)
        record.members = {**self._view.members(part.stage), **record.members}
        return record.members

    def _record_contribution(self, peer: PeerId, part: Part) -> None:
        record = self._round_record(part)
        if peer in record.contributed[part.position]:
            raise ProtocolError("bad-message", "this part was contributed before")
        record.contributed[part.position].add(peer)
        record.unresponsive.discard(peer)
        running_rounds = MAX_RUNNING_SLICE_ROUNDS if part.kind == "slice" else 1
        for gathered, gathering in list(self._gatherings.items()):
            if gathered[:2] == part[:2] and gathered.round <= part.round - running_rounds:
                self._stop_expecting(gathered, gathering, peer)

    def _stop_expecting(self, part: Part, gathering: _Gathering, peer: PeerId) -> None:
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.is_complete and not gathering.is_recalling:
                self._average_and_close(part, gathering)

    async def _gather(self, peer: PeerId, message: Contribute, part: Part, values: Tensor, deadline: float) -> PartMean:
        is_second = message.first_owner_failed and self._first_owner(part) != self.config.me
        gathering = self._gatherings.get(part) or self._open_gathering(part, peer, len(values), is_second)
        if is_member := peer in self._remember_members(part):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
        if is_member and is_second and gathering.recall is None:
            gathering.recall = asyncio.create_task(self._recall_mean(part, gathering))
        elif gathering.is_complete:
            self._average_and_close(part, gathering)
        now = loop_time()
        self._shorten_window(part, gathering, now + MAX_TIMEOUT_FRACTION * (deadline - now))
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _open_gathering(self, part: Part, peer: PeerId, numel: int, is_second: bool) -> _Gathering:
        if len(self._gatherings) >= MAX_GATHERINGS:
            raise Busy("too many parts are being averaged here; ask the second owner", 1000)
        loop = asyncio.get_running_loop()
        expected = self._expected_members(part, peer, is_second)
        window_s = (SECOND_OWNER_WINDOW if is_second else FIRST_OWNER_WINDOW) * self._view.round_s(part.stage)
        result, timer = loop.create_future(), loop.call_later(window_s, self._end_window, part)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        gathering = self._gatherings[part] = _Gathering(numel, expected, result, timer)
        return gathering

    def _shorten_window(self, part: Part, gathering: _Gathering, at: float) -> None:
        if at < gathering.timer.when() and part in self._gatherings:
            gathering.timer.cancel()
            gathering.timer = asyncio.get_running_loop().call_at(at, self._end_window, part)

    def _expected_members(self, part: Part, peer: PeerId, is_second: bool) -> frozenset[PeerId]:
        members = frozenset(self._view.members(part.stage))
        awaited = members - self._view.peers_not_awaited(part, members)
        expected = awaited if len(awaited) > 1 else members
        expected -= self._round_record(part).unresponsive
        expected -= self._round_record(part).contributed[part.position] - {peer}  # they got the mean of one alone
        return expected - {self._first_owner(part)} if is_second else expected

    def _first_owner(self, part: Part) -> PeerId:
        return self.config.owners(part, self._remember_members(part))[0]

    def _end_window(self, part: Part) -> None:
        gathering = self._gatherings[part]
        missing = gathering.expected - gathering.values.keys() if self.config.me in gathering.values else ()
        self._average_and_close(part, gathering)
        for peer in missing:
            self.mark_unresponsive(peer, part)

    def _average_and_close(self, part: Part, gathering: _Gathering) -> None:
        me = self.config.me
        weights = list(gathering.weights.values())
        center = gathering.values[me] if gathering.weights.get(me, 0.0) > 0 else None
        mean = self.averager.average(part, list(gathering.values.values()), weights, center)
        if mean is not None:
            mean = replace(mean, message=replace(mean.message, wanted_slices=self._view.wanted_slices(part)))
        self._close_gathering(part, gathering, mean)

    def _close_gathering(self, part: Part, gathering: _Gathering, mean: PartMean | None) -> None:
        if self._gatherings.get(part) is not gathering:
            return
        del self._gatherings[part]
        gathering.timer.cancel()
        if gathering.recall is not None:  # it may be the task that runs this method; that returns right after
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
        """Asks a member by Recall for a part's mean of `numel` elements, and returns it.

        Returns None when the member keeps none or sends a malformed one, and when the call fails or has no answer by
        the loop time `deadline`.
        """
        request = Recall(*part, max(1, int(1000 * (deadline - loop_time()))))
        try:
            reply = await self.caller.call(peer, request, (), deadline=deadline)
            if not isinstance(reply.message, Recalled) or not reply.tensors:
                return None
            return self.averager.decode_mean(part, reply.tensors, numel, averaged_from(reply.message))
        except AgoraError:
            return None
