"""An all-reduce among the replicas of a stage: shards and their reducers, both sides of a round, kept means."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, cast

import numpy as np
import torch
from agora_protocol.codec_names import WireName
from agora_protocol.errors import AgoraError, Busy, PeerFailed, ProtocolError, Refused
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor

from agora.core.calls import Caller, ConnectionBroken
from agora.core.clock import loop_time
from agora.core.sync_mode import EXACT, ChangeRule
from agora.observe import events, faults
from agora.replica.decide import ReplicaUplink, Wish, wanted_slices
from agora.replica.gossip import StepGossip
from agora.replica.replicated_stages import ReplicaListing, ReplicatedStages
from agora.replica.shard_codec import (
    Contribution,
    EncodedPart,
    Part,
    PartAverager,
    PartMean,
    RoundConfig,
    cut_into_parts,
)
from agora.replica.view import (
    NEWCOMER_STEPS,
    StepMeter,
    lagging_or_unheard_replicas,
    lagging_replicas,
    live_replicas,
    newcomers,
    round_members,
    unreachable_replicas,
)

# --- partition

# Computes which weights a round averages, in which parts, and which peer owns each part. Pure.
#
# All peers compute the same
# result, so none of it is sent: SPEC.md, section 12.

# Number of successive rounds, of gradients or of one slice, in which a part has the same owner: an owner keeps the
# residual of its means for the next round.
ROUNDS_PER_OWNER: Final = 16
RELAYED_SHARE: Final = 0.25  # fraction of a replica's bandwidth that counts if others reach it only through a relay
MAX_RUNNING_SLICE_ROUNDS: Final = 4  # maximum number of slice rounds that one replica may be running at the same time


class Slices:
    """The division of a vector into `count` slices of whole blocks; slice round r averages slice r mod `count`.

    A block has SLICE_BLOCK elements. Block i is in slice ((a i + b) mod blocks) mod count. If there are fewer blocks
    than slices, the last slices are empty. a and b are integers from a hash of the run's seed, so that every version of
    every library computes the same.
    """

    def __init__(self, numel: int, count: int, seed: int) -> None:
        """seed: the run's. Raises ValueError if `numel` is not a positive multiple of SLICE_BLOCK."""
        if numel <= 0 or numel % SLICE_BLOCK:
            raise ValueError(f"{numel} elements are not a multiple of {SLICE_BLOCK}")
        self._blocks = numel // SLICE_BLOCK
        self.count = count
        digest = hashlib.sha256(f"agora slices 1\0{seed}\0{numel}".encode()).digest()
        self._factor = int.from_bytes(digest[:8], "big") % self._blocks
        while math.gcd(self._factor, self._blocks) != 1:
            self._factor = (self._factor + 1) % self._blocks
        self._offset = int.from_bytes(digest[8:16], "big") % self._blocks

    def blocks(self, number: int) -> NDArray[np.int64]:
        """Returns the indices of the blocks that slice round `number` averages: int64 [n], ascending, maybe empty."""
        inverse = pow(self._factor, -1, self._blocks) if self._blocks > 1 else 0
        positions = range(number % self.count, self._blocks, self.count)
        return np.array(sorted(inverse * (at - self._offset) % self._blocks for at in positions), np.int64)

    def numel_of(self, number: int) -> int:
        """Returns the number of elements that slice round `number` averages."""
        return SLICE_BLOCK * len(range(number % self.count, self._blocks, self.count))


def ownership_epoch(number: int, slices: int) -> str:
    """Returns the label of the epoch that round `number` belongs to. Within an epoch a part keeps its owners.

    An epoch is ROUNDS_PER_OWNER rounds of gradients, or of one slice. slices: of the stage, 0 for gradients.

    | round | label |
    |---|---|
    | of gradients | number // ROUNDS_PER_OWNER |
    | of a slice | (number % slices).(number // slices // ROUNDS_PER_OWNER) |
    """
    if not slices:
        return str(number // ROUNDS_PER_OWNER)
    return f"{number % slices}.{number // slices // ROUNDS_PER_OWNER}"


# The members of a round by id, with bandwidths in bytes per second: 0 if unknown, None if the member owns no part.
Members = Mapping[PeerId, float | None]


def owning_bandwidths(claimed: Mapping[PeerId, tuple[float, str]]) -> dict[PeerId, float]:
    """Returns for each replica, by id, the bandwidth by which owners are to be chosen, in bytes per second.

    claimed: by id, (bandwidth, reachability) of the replica's claim; a bandwidth of 0 is unknown and counts as the
    median of the known ones, or as 1.0 if none is known. The bandwidth of a relayed or unreachable replica is
    multiplied by RELAYED_SHARE, so that most parts go to directly reachable ones.
    """
    known = [bandwidth for bandwidth, _ in claimed.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    return {
        peer: (bandwidth or median) * (RELAYED_SHARE if reachability in ("relayed", "unreachable") else 1.0)
        for peer, (bandwidth, reachability) in claimed.items()
    }


def choose_owners(
    run: RunId, stage: int, kind: str, epoch: str, part: int, members: Members
) -> tuple[PeerId, PeerId | None]:
    """Returns the first and the second owner of a part in an epoch (`ownership_epoch`), by a weighted rendezvous hash.

    The member with the least -ln(u) / bandwidth is the first owner, the next one the second; u in (0, 1) is the hash of
    (run, stage, kind, epoch, part, peer). So a peer owns parts in proportion to its bandwidth. An unknown bandwidth
    counts as the median of the known ones. If no member may own parts, all may. The second owner is None if only one
    member may own parts. `members` must not be empty.
    """
    eligible = {peer: bandwidth for peer, bandwidth in members.items() if bandwidth is not None}
    eligible = eligible or dict.fromkeys(members, 0.0)
    known = [bandwidth for bandwidth in eligible.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    label = f"agora owner 1\0{run}\0{stage}\0{kind}\0{epoch}\0{part}\0"

    def rendezvous_key(peer: PeerId) -> tuple[float, PeerId]:
        hashed = int.from_bytes(hashlib.sha256((label + peer).encode()).digest()[:8], "big")
        return -math.log((hashed + 0.5) / 2.0**64) / (eligible[peer] or median), peer

    order = sorted(eligible, key=rendezvous_key)
    return order[0], order[1] if len(order) > 1 else None


def owners_of(config: RoundConfig, part: Part, members: Members) -> tuple[PeerId, PeerId | None]:
    """Returns the part's first and second owner among the members, see choose_owners."""
    epoch = ownership_epoch(part.round, part.slices)
    return choose_owners(config.run, part.stage, part.kind, epoch, part.position, members)


# --- round_record

# What an owner remembers of a round: its members, which of them have contributed to which part.
#
# And the parts' means.

# Number of newest rounds of a stage and kind ("gradient" or "slice") whose means are kept, whatever their size.
MIN_KEPT_ROUNDS: Final = 4
# Bytes of kept means of a stage and kind, beyond which the means of older rounds are dropped. Means are kept because a
# replica that has just joined asks for the means of the steps that were taken while it fetched the state.
MAX_KEPT_BYTES: Final = 2**28


class KeptPartMean(NamedTuple):
    """A part's mean of `numel` elements, encoded by its owner as `tensors`, with the owner's message about it.

    slices: of the part, since parts of other slices have other elements.
    """

    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int
    slices: int

    def recalled(self) -> Recalled:
        """Returns the message that answers Recall with this mean."""
        counts = self.message
        return Recalled(counts.in_mean, counts.contributors, counts.weight, counts.wire, counts.wanted_slices)


def averaged_from(recalled: Recalled) -> Averaged:
    """Returns the owner's message about a mean that a member has sent as `recalled`: the reverse of recalled()."""
    numbers = recalled.in_mean, recalled.contributors, recalled.weight
    return Averaged(*numbers, counted=True, wire=recalled.wire, wanted_slices=recalled.wanted_slices)


@dataclass(slots=True)
class RoundRecord:
    """What a replica remembers of one round, above all as an owner of parts.

    members: by id, with bandwidths as in partition.Members.
    unresponsive: members that no part waits for.
    contributed: by part index, the peers that have contributed.
    means: by part index, the kept means, `nbytes` bytes together.
    """

    members: dict[PeerId, float | None] = field(default_factory=dict)
    unresponsive: set[PeerId] = field(default_factory=set)
    contributed: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    means: dict[int, KeptPartMean] = field(default_factory=dict)
    nbytes: int = 0

    def drop_means(self) -> None:
        """Drops the kept means; keeps the other fields, so that a second contribution is still noticed."""
        self.means.clear()
        self.nbytes = 0


def drop_oldest_means(rounds: Mapping[int, RoundRecord]) -> None:
    """Drops kept means beyond MAX_KEPT_BYTES, oldest rounds first, but not those of the newest MIN_KEPT_ROUNDS.

    rounds: the records of a stage and kind, by the round's number. Changes them in place.
    """
    numbers, total = sorted(rounds, reverse=True), 0
    for number in numbers:
        total += rounds[number].nbytes
        if total > MAX_KEPT_BYTES and number <= numbers[0] - MIN_KEPT_ROUNDS:
            rounds[number].drop_means()


# --- rounds

# A member's side of a round: sends each part to its first or second owner, and concatenates the means.

# Fraction of a round's remaining time for which a member waits for the first owner before it asks the second.
FIRST_OWNER_FRACTION: Final = 0.6
MAX_OPEN_PARTS: Final = 8  # maximum number of parts that a peer sends, or asks for, at the same time
MIN_CALL_S: Final = 0.05  # seconds before the round's deadline in which no further owner is asked
NO_ANSWER: Final = (
    ConnectionBroken.code,
    "deadline",
)  # codes of calls whose peer is gone or hangs


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
            for rank, owner in enumerate(owners_of(config, part, self.members)):
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


# --- reducer

# An owner's side of a round: takes the members' values of a part, averages those that came in time, answers each.
#
# A part is a shard of what a round averages; its owner is the reducer of the shard.
#
# | a part | is averaged |
# |---|---|
# | to which every expected member has contributed | immediately |
# | whose window, which its first contribution opened, is over | from the contributions that came |
# | of which this peer is the second owner | likewise, but if a member has the first owner's mean (Recall), that is
# used |
#
# A contribution that is late, or of a peer that is not a member, is answered by the mean without being in it. After a
# mean of one peer's contribution alone, later contributions are averaged again.

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
        return owners_of(self.config, part, self._remember_members(part))[0]

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


# --- recall

# Asks the other replicas for the means that they keep of a round's parts, where those parts have no mean here.

RECALL_PAUSE: Final = 0.0625  # pause before failed parts are asked for again, as a fraction of round_s
MAX_RECALLS: Final = 8  # maximum number of times that failed parts are asked for: others may get the mean later


async def recall_repeatedly(rounds: RoundGroup, first_part: Part, result: RoundResult) -> None:
    """Asks the other members for the means of a round's failed parts, up to MAX_RECALLS times; see recall_failed_parts.

    Stops when no part is failed, or no other member is left. Sleeps RECALL_PAUSE * round_s before each further time.
    Changes `result` in place.
    """
    for attempt in range(MAX_RECALLS):
        if attempt:
            await asyncio.sleep(RECALL_PAUSE * rounds.round_s(first_part.stage))
        await recall_failed_parts(rounds, first_part, result)
        if not result.failed_parts or len(rounds.members(first_part.stage)) == 1:
            return


async def recall_failed_parts(rounds: RoundGroup, first_part: Part, result: RoundResult) -> None:
    """Asks live replicas for the means of a round's failed parts, and puts plausible ones into `result`, in place.

    Asks for several parts at the same time. Marks each part that got a mean as averaged, and sets the result's weight
    to that of the last mean that has contributions, at most RoundConfig.max_weight; the zero mean of a part that no
    owner could average has no contributions. Returns after at most one round_s, even if parts are still failed.
    first_part: part 0 of the round. result: its failed parts hold this replica's own values, and keep them if no mean
    is found.
    """
    sources = sorted(rounds.live_others(first_part.stage))
    cuts = cut_into_parts(len(result.mean))
    deadline = loop_time() + rounds.round_s(first_part.stage)
    free_calls = asyncio.Semaphore(MAX_OPEN_PARTS)

    async def recall(index: int) -> None:
        part = first_part._replace(position=index)
        own = result.mean[cuts[index]]
        async with free_calls:
            for attempt in range(len(sources)):
                source = sources[(index + attempt) % len(sources)]
                mean = await rounds.reducer.recall_from(source, part, len(own), deadline)
                if mean is not None and _is_plausible(rounds.reducer, part, own, mean):
                    result.mean[cuts[index]], result.averaged[index] = mean.values, True
                    result.wanted[index] = mean.message.wanted_slices
                    if mean.message.in_mean:
                        result.weight = min(mean.message.weight, rounds.reducer.config.max_weight)
                    return

    await asyncio.gather(*(recall(index) for index, is_averaged in enumerate(result.averaged) if not is_averaged))


def _is_plausible(reducer: PartReducer, part: Part, own: Tensor, mean: PartMean) -> bool:
    with contextlib.suppress(PeerFailed):
        reducer.averager.check_magnitude(part, own, mean.values)
        return True
    return False


# --- stage_rounds

# The rounds of this peer's stages: who is a member, which parts are averaged now, how long a round may take.

# An owner refuses a part more than this many gradient rounds, or passes over all slices, away from its own round.
MAX_ROUNDS_APART: Final = 2
# Steps by which a replica's last report may lag behind the step of a slice round in which it takes part.
MAX_REPORT_LAG: Final = 2
# A round of an asynchronous run may take max(MIN_ROUND_S, ROUND_STEPS * the average duration of a step).
ROUND_STEPS: Final = 2.0
MIN_ROUND_S: Final = 4.0


class StageRounds:
    """The replicas of this peer's stages, as its rounds see them; holds the PartReducer that averages its own parts.

    Implements ReducerView and RoundGroup.
    """

    def __init__(
        self,
        signed: SignedManifest,
        me: PeerId,
        stages: ReplicatedStages,
        gossip: StepGossip,
        listing: ReplicaListing,
        meters: Mapping[int, StepMeter],
        caller: Caller,
        report: events.Report,
    ) -> None:
        """meters: by stage, the measured durations of its steps and this replica's rate."""
        manifest = signed.manifest
        self.reducer = PartReducer(RoundConfig.from_manifest(signed, me), caller, self)
        self._slices: dict[tuple[int, int], Slices] = {}
        self._seed = manifest.seed
        self._change_rule = ChangeRule.from_manifest(manifest)
        self._me = me
        self._synchronous = manifest.schedule.kind == "synchronous"
        self._every = manifest.averaging.every
        self._manifest_round_s = manifest.averaging.round_s
        self._stages = stages
        self._gossip = gossip
        self._listing = listing
        self._meters = meters
        self._report = report
        self._start_steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._wishes = {stage: Wish(since=loop_time()) for stage in stages.span.stages}

    # --- members

    def live_others(self, stage: int) -> set[PeerId]:
        """Returns the ids of the stage's other replicas that are both listed and live."""
        known, listed = self._gossip.known_progress(stage), self._gossip.others_in_view(stage)
        return set(live_replicas(known, listed, loop_time()))

    def members(self, stage: int) -> Members:
        """Returns the members of the stage's next round, with this peer, by id, and their bandwidths, see `Members`.

        Newcomers own no part. In asynchronous runs lagging replicas are not members at exact steps: they replay them.
        """
        listed, known = self._listing.replicas_in_view(stage), self._gossip.known_progress(stage)
        step = self._stages.step_of(stage)
        others = round_members(known, self._gossip.others_in_view(stage), loop_time())
        if not self._stages.step_plan(stage).is_local(step) and not self._synchronous:
            others -= lagging_replicas(known, others, step)
        new = newcomers(known, others, step)
        if self._start_steps[stage] > step - NEWCOMER_STEPS >= 0:
            new.add(self._me)
        return {peer: None if peer in new else listed.get(peer, 0.0) for peer in {*others, self._me}}

    def peers_not_awaited(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` whose contributions to `part` need not be waited for: the unreachable ones.

        In asynchronous runs also others that have not reported yet (after step 0), or whose last report was more than 1
        step (for slices MAX_REPORT_LAG + 1) behind the part's step. A slice's step is part.round * averaging.every.
        """
        known = self._gossip.known_progress(part.stage)
        not_awaited = unreachable_replicas(known, peers, loop_time())
        if not self._synchronous:
            step = part.round if part.kind == "gradient" else part.round * self._every - MAX_REPORT_LAG
            not_awaited |= lagging_or_unheard_replicas(known, set(peers) - {self._me}, step)
        return not_awaited

    # --- rounds

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round may take: the manifest's `averaging.round_s`.

        In an asynchronous run at most max(MIN_ROUND_S, ROUND_STEPS * a recent step's seconds), once these are known.
        """
        step_s = self._meters[stage].step_s.value
        if self._synchronous or step_s is None:
            return self._manifest_round_s
        return min(self._manifest_round_s, max(MIN_ROUND_S, ROUND_STEPS * step_s))

    def check_part(self, part: Part) -> int:
        """Checks that `part` can be averaged here now, and returns its number of elements.

        Raises ProtocolError if no stage here has such a part, Refused if its round is too far from this peer's. For a
        part of another number of slices than the stage has at that step, raises Refused if that number may change.
        """
        if part.stage not in self._stages.span or (part.kind == "gradient") != (part.slices == EXACT):
            raise ProtocolError("bad-message", f"no {part.kind} of {part.slices} slices is averaged in {part.stage}")
        is_gradient = part.kind == "gradient"
        averaged_step = part.round if is_gradient else part.round * self._every - 1
        if self._stages.step_plan(part.stage).slices_at(averaged_step) != part.slices:
            problem = f"stage {part.stage} averages no {part.kind} {part.round} here"
            raise Refused(problem) if self._change_rule.may_change else ProtocolError("bad-message", problem)
        slices = None if is_gradient else self.slices(part.stage, part.round)
        numel = self._stages.layout(part.stage).numel if slices is None else slices.numel_of(part.round)
        cuts = cut_into_parts(numel)
        if part.position >= len(cuts):
            raise ProtocolError("bad-message", f"round {part.round} has {len(cuts)} parts, not {part.position + 1}")
        step = self._stages.step_of(part.stage)
        own_number = step if is_gradient else step // self._every
        if abs(part.round - own_number) > MAX_ROUNDS_APART * max(part.slices, 1):
            raise Refused(f"round {part.round} is too far from this peer's round {own_number}")
        return len(range(numel)[cuts[part.position]])

    def slices(self, stage: int, number: int) -> Slices:
        """Returns the slices of the stage, of which slice round `number` averages one."""
        count = self._stages.step_plan(stage).slices_at(number * self._every - 1)
        if (stage, count) not in self._slices:
            self._slices[stage, count] = Slices(self._stages.layout(stage).numel, count, self._seed)
        return self._slices[stage, count]

    async def run_round(
        self, stage: int, kind: str, number: int, values: Tensor, weight: float, slices: int = EXACT
    ) -> RoundResult:
        """Averages `values`, float32 [n], with those of the present members, within round_s seconds; see Round."""
        deadline = loop_time() + self.round_s(stage)
        who = self.reducer, self._report, stage, kind, number, weight, self.members(stage)
        return await Round(*who, deadline, slices).run(values)

    # --- exact or local steps

    def wanted_slices(self, part: Part) -> int:
        """Returns in how many slices the part's stage should agree later, or EXACT; see step_kinds.

        That is the part's own number, which asks for no change, until the wish for a change is held.
        """
        wanted = self.update_wish(part.stage, part.slices)
        return wanted if self._wishes[part.stage].is_held(loop_time()) else part.slices

    def update_wish(self, stage: int, present: int) -> int:
        """Returns how many slices this peer wants for a stage that has `present`, or EXACT; notes since when it does.

        Called at least after every step: a wish is held only if nothing else was wanted in between.
        """
        if not self._change_rule.may_change:
            return present
        wanted, _ = self.explain_slices(stage, present)
        self._wishes[stage] = self._wishes[stage].after(present, wanted, loop_time())
        return wanted

    def explain_slices(self, stage: int, present: int) -> tuple[int, str]:
        """Returns wanted_slices for a stage, by what its live replicas have reported, with its reason.

        present: the number of slices that the stage has now, or EXACT.
        """
        known, listed = self._gossip.known_progress(stage), self._gossip.others_in_view(stage)
        live = live_replicas(known, listed, loop_time())
        uplinks = [ReplicaUplink(each.direct.rate.per_second, each.counts.bytes_carried) for each in live.values()]
        uplinks.append(ReplicaUplink(self._meters[stage].rate.per_second, self._gossip.own_counts(stage).bytes_carried))
        return wanted_slices(present, uplinks, self._change_rule.most_slices)
