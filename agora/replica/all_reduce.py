"""An all-reduce among the replicas of a stage: members send shards to their reducers, which answer with the means.

In the order in which the bytes go: which weights, shards and reducers; a member sends; a reducer gathers, averages and
answers; means that were missed are asked for again. docs/understand/averaging.md has the sequence as a picture.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from agora_protocol.codec_names import WireName
from agora_protocol.errors import AgoraError, Busy, PeerFailed, ProtocolError, Refused
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor

from agora.core.calls import Caller, ConnectionBroken, Reply
from agora.core.clock import loop_time
from agora.core.sync_mode import ALL_REDUCE
from agora.observe import events, faults
from agora.replica.shard_codec import (
    WIRE_KINDS,
    Contribution,
    EncodedShard,
    RoundConfig,
    RoundKind,
    Shard,
    ShardCodec,
    ShardMean,
    WeightedValues,
    cut_into_shards,
)
from agora.replica.trust import after_accepted_weights, believed_bandwidths, believed_weights
from agora.swarm.peer_score import ReportViolation, Violation

# Number of successive rounds, of gradients or of one fragment, in which a shard has the same reducer: a reducer keeps
# the residual of its means for the next round.
ROUNDS_PER_REDUCER: Final = 16
# What a replica's bandwidth is multiplied by if others reach it only through a relay.
RELAYED_BANDWIDTH_FACTOR: Final = 0.25
MAX_RUNNING_SYNCS: Final = 4  # maximum number of fragment syncs that one replica may be running at the same time

# Fraction of a round's remaining time for which a member waits for the first reducer before it asks the second.
FIRST_REDUCER_FRACTION: Final = 0.6
MAX_OPEN_SHARDS: Final = 8  # maximum number of shards that a peer sends, or asks for, at the same time
MIN_CALL_S: Final = 0.05  # seconds before the round's deadline in which no further reducer is asked
NO_ANSWER: Final = (
    ConnectionBroken.code,
    "deadline",
)  # codes of the errors with which a call ends when its peer is gone or hangs

# Fraction of round_s for which a shard's first reducer waits for further contributions after the first one.
FIRST_REDUCER_WINDOW: Final = 0.4
# Fraction of round_s for which a shard's second reducer waits for further contributions after the first one.
SECOND_REDUCER_WINDOW: Final = 0.2
# The window ends early so that every contributor gets its answer with a third of its time to its deadline left.
MAX_TIMEOUT_FRACTION: Final = 2 / 3
RECALL_FRACTION: Final = 0.1  # fraction of round_s in which the members asked by Recall must answer
MAX_GATHERINGS: Final = 4096  # maximum number of shards whose contributions are collected at the same time

# A round is remembered for this many times round_s after it began here, for late contributions and for Recall.
RECORD_LIFETIME: Final = 10.0
# Number of newest rounds of a stage and kind whose means are kept, whatever their size.
MIN_KEPT_ROUNDS: Final = 4
# Bytes of kept means of a stage and kind, beyond which the means of older rounds are dropped. Means are kept because a
# replica that has just joined asks for the means of the steps that were taken while it fetched the state.
MAX_KEPT_BYTES: Final = 2**28
RECALL_PAUSE: Final = 0.0625  # pause before failed shards are asked for again, as a fraction of round_s
MAX_RECALLS: Final = 8  # maximum number of times that failed shards are asked for: others may get the mean later


# --- which weights, which reducers: all peers compute the same result, so none of it is sent (SPEC.md, section 12)


class Fragments:
    """The division of a vector into `count` fragments of whole blocks; sync number r averages fragment r mod `count`.

    Block i, of SLICE_BLOCK elements, is in fragment ((a i + b) mod blocks) mod count. The last fragments may be empty.
    """

    def __init__(self, numel: int, count: int, seed: int) -> None:
        """seed: the run's, of which a and b are hashes: every version of every library computes the same."""
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
        """Returns the indices of the blocks that sync `number` averages: int64 [n], ascending, maybe empty."""
        inverse = pow(self._factor, -1, self._blocks) if self._blocks > 1 else 0
        positions = range(number % self.count, self._blocks, self.count)
        return np.array(sorted(inverse * (at - self._offset) % self._blocks for at in positions), np.int64)

    def numel_of(self, number: int) -> int:
        return SLICE_BLOCK * len(range(number % self.count, self._blocks, self.count))


# The members of a round by id, with bandwidths in bytes per second: 0 if unknown, None if the member reduces no shard.
Members = Mapping[PeerId, float | None]


def reducing_bandwidths(
    claimed: Mapping[PeerId, tuple[float, str]], networks: Mapping[PeerId, str] = MappingProxyType({})
) -> dict[PeerId, float]:
    """Returns the bandwidths by which reducers are to be chosen, in bytes per second, by id; see believed_bandwidths.

    claimed: by id, bandwidth and reachability as the replica claims them; 0 is unknown and counts as the median.
    """
    believed = believed_bandwidths({peer: bandwidth for peer, (bandwidth, _) in claimed.items()}, networks)
    known = [bandwidth for bandwidth in believed.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    return {
        peer: (believed[peer] or median)
        * (RELAYED_BANDWIDTH_FACTOR if reachability in ("relayed", "unreachable") else 1.0)
        for peer, (_, reachability) in claimed.items()
    }


def reducing_epoch(number: int, fragments: int) -> str:
    """Returns the label of the ROUNDS_PER_REDUCER rounds, of gradients or one fragment, in which reducers stay."""
    if not fragments:
        return str(number // ROUNDS_PER_REDUCER)
    return f"{number % fragments}.{number // fragments // ROUNDS_PER_REDUCER}"


def reducers_of(run: RunId, shard: Shard, members: Members) -> tuple[PeerId, PeerId | None]:
    """Returns the first and the second reducer of a shard, by a weighted rendezvous hash.

    They have the least -ln(u) / bandwidth, so that a peer reduces shards in proportion to its bandwidth; u in (0, 1) is
    a hash. If no member may reduce shards, all may; if only one may, there is no second one.
    """
    eligible = {peer: bandwidth for peer, bandwidth in members.items() if bandwidth is not None}
    eligible = eligible or dict.fromkeys(members, 0.0)
    known = [bandwidth for bandwidth in eligible.values() if bandwidth > 0]
    median = statistics.median(known) if known else 1.0
    epoch = reducing_epoch(shard.round, shard.fragments)
    label = f"agora owner 1\0{run}\0{shard.stage}\0{shard.what}\0{epoch}\0{shard.position}\0"

    def rendezvous_key(peer: PeerId) -> tuple[float, PeerId]:
        hashed = int.from_bytes(hashlib.sha256((label + peer).encode()).digest()[:8], "big")
        return -math.log((hashed + 0.5) / 2.0**64) / (eligible[peer] or median), peer

    order = sorted(eligible, key=rendezvous_key)
    return order[0], order[1] if len(order) > 1 else None


# --- what a round is given, and gives


@dataclass(frozen=True, slots=True)
class RoundView:
    """What this peer knows of a shard's round now."""

    members: Members  # this peer included
    live_others: frozenset[PeerId]
    not_awaited: frozenset[PeerId]  # members whose contributions need not be waited for
    round_s: float  # seconds that the round may take
    # By member, the most tokens that can be behind its contribution; a member that is not in it has no bound.
    token_bounds: Mapping[PeerId, float] = field(default_factory=dict)
    numel: int = 0  # elements of the shard
    refusal: AgoraError | None = None  # why the shard is not averaged here now


@dataclass(slots=True)
class RoundResult:
    """The result of a round for one member. AllReduce.recall_failed_shards changes it in place."""

    mean: Tensor  # float32 [n]; in a failed shard, this replica's own values
    averaged: list[bool]  # for each shard
    fragments: int  # how many the stage has in this round, ALL_REDUCE for a gradient
    wanted: list[int]  # for each shard, how many its reducer wants later; of a failed shard the present number
    contributors: float = 0.0  # members that contributed in time: average over all shards, 0 for a failed one
    lost: float = 0.0  # this peer's tokens that were too late for this round and the one before: average over shards
    weight: float = 0.0  # tokens behind the means: lower median over the averaged shards
    own_weight: float = 0.0  # tokens behind this replica's own values

    @property
    def failed_shards(self) -> int:
        return self.averaged.count(False)

    @property
    def wanted_fragments(self) -> int:
        # The present number, unless the means of all shards want others: so no single reducer forces a change.
        return max(self.wanted) if self.wanted and self.fragments not in self.wanted else self.fragments

    @classmethod
    def of_failed_shards(cls, own: Tensor, fragments: int) -> RoundResult:
        shards = len(cut_into_shards(len(own)))
        return cls(own, [False] * shards, fragments, [fragments] * shards)


class RepeatedContribution(ProtocolError):
    """Raised for a shard that the same peer has contributed before."""


# A reducer's mean of one shard. lost: tokens of this peer that no mean will contain, see record_outcome.
class _Answer(NamedTuple):
    mean: ShardMean
    lost: float = 0.0


# --- a member: sends each shard to its first or second reducer, and puts the means together


@dataclass(slots=True)
class Round:
    """One round in which this peer is a member; call `run` once."""

    all_reduce: AllReduce
    stage: int
    kind: RoundKind
    number: int  # counts the rounds of the stage and kind
    weight: float  # tokens behind the values; with 0 they do not enter the mean
    members: Members  # this peer included
    deadline: float  # loop time by which the round ends, whichever reducers have answered
    fragments: int = ALL_REDUCE
    _bytes_out: int = field(default=0, init=False)
    _unresponsive: set[PeerId] = field(default_factory=set, init=False)
    _free_calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPEN_SHARDS), init=False)

    async def run(self, values: Tensor) -> RoundResult:
        """Averages `values` with those of the other members, by the deadline.

        values: float32 [n], finite, on the CPU; must not be changed afterwards, because they may be kept for later.
        """
        started_at = loop_time()
        shards = [values[cut] for cut in cut_into_shards(len(values))]
        answers = await asyncio.gather(*(self._average_shard(at, shard) for at, shard in enumerate(shards)))
        means = [own if answer is None else answer.mean.values for answer, own in zip(answers, shards, strict=True)]
        result = RoundResult(
            torch.cat([*means, values[:0]]),
            averaged=[answer is not None for answer in answers],
            fragments=self.fragments,
            wanted=[self.fragments if answer is None else answer.mean.message.wanted_slices for answer in answers],
            own_weight=self.weight,
        )
        if averaged := [answer for answer in answers if answer is not None]:
            messages = [answer.mean.message for answer in averaged]
            # The median: whoever reduces fewer than half of the shards cannot choose it.
            told = statistics.median_low(message.weight for message in messages)
            result.weight = self.all_reduce.config.believed_weight(Shard(self.stage, self.kind, self.number, 0), told)
            result.contributors = sum(message.contributors for message in messages) / len(answers)
            result.lost = sum(answer.lost for answer in averaged) / len(answers)
        self.all_reduce.report(
            events.RoundDone(
                stage=self.stage,
                what=WIRE_KINDS[self.kind],
                round=self.number,
                parts=len(shards),
                failed_parts=result.failed_shards,
                contributors=result.contributors,
                members=len(self.members),
                weight=self.weight,
                lost=result.lost,
                seconds=loop_time() - started_at,
                bytes_out=self._bytes_out,
            )
        )
        return result

    async def _average_shard(self, position: int, values: Tensor) -> _Answer | None:
        shard = Shard(self.stage, self.kind, self.number, position, self.fragments)
        codec = self.all_reduce.codec
        async with self._free_calls:
            scale = faults.falsify("averaging.scale", 1.0)
            contribution = codec.contribution(shard, values if scale == 1.0 else values * scale, self.weight)
            reasons: list[str] = []
            rejected: PeerFailed | None = None  # why the first reducer's mean is not believed
            first, second = reducers_of(self.all_reduce.config.run, shard, self.members)
            for rank, reducer in enumerate((first, second)):
                if reducer is None or reducer in self._unresponsive:
                    continue
                try:
                    mean = await self._send(shard, reducer, rank == 1, contribution)
                    if mean.message.contributors < 2 and len(self.members) > 1:
                        # The shard failed, although there is an answer: the others may have the second reducer's mean.
                        reasons.append(f"{reducer}: nobody else contributed in time")
                        break
                    try:
                        own = WeightedValues(contribution.values, contribution.weight)
                        codec.check_magnitude(shard, own, mean.values, len(self.members))
                    except PeerFailed as error:
                        rejected = error
                        raise
                except (AgoraError, TimeoutError) as error:
                    if reducer != self.all_reduce.config.me and getattr(error, "code", "") in NO_ANSWER:
                        self._unresponsive.add(reducer)
                        self.all_reduce.mark_unresponsive(reducer, shard)
                    reasons.append(f"{reducer}: {str(error) or 'no answer in time'}")
                    continue
                if rejected is not None:
                    # Only now: where both means are rejected, this replica's own values may be the odd ones.
                    self.all_reduce.report_reducer(first, shard, f"{rejected}, and {reducer} answered otherwise")
                self.all_reduce.keep_mean(shard, mean)
                return _Answer(mean, codec.record_outcome(shard, contribution, mean.message.counted))
        codec.record_outcome(shard, contribution, None)
        self.all_reduce.report(
            events.PartFailed(self.stage, shard.what, self.number, position, "; ".join(reasons)[:500])
        )
        return None

    async def _send(self, shard: Shard, reducer: PeerId, is_second: bool, contribution: Contribution) -> ShardMean:
        now = loop_time()
        left_s = self.deadline - now
        if left_s < MIN_CALL_S:
            raise PeerFailed("the round's time is over")
        deadline = self.deadline if is_second else now + FIRST_REDUCER_FRACTION * left_s
        encoded = contribution.encoded
        request = Contribute(
            stage=shard.stage,
            what=shard.what,
            round=shard.round,
            part=shard.position,
            slices=shard.fragments,
            weight=contribution.weight,
            first_owner_failed=is_second,
            wire=encoded.wire,
            deadline_ms=max(1, int(1000 * (deadline - now))),
        )
        await self.all_reduce.reach_fault("averaging.sending")
        if reducer == self.all_reduce.config.me:
            return await self.all_reduce.contribute(reducer, request, encoded.tensors, deadline)
        self._bytes_out += encoded.nbytes
        reply = await self.all_reduce.caller.call(reducer, request, encoded.tensors, deadline=deadline)
        if not isinstance(reply.message, Averaged):
            raise PeerFailed(f"the reducer answered by {type(reply.message).__name__}")
        return self.all_reduce.codec.decode_mean(shard, reply.tensors, len(contribution.values), reply.message)


# --- a reducer: gathers the members' values of a shard, averages those that came in time, answers each


# The members' contributions to one shard, while this reducer waits for more of them.
@dataclass(slots=True)
class _Gathering:
    numel: int
    expected: frozenset[PeerId]  # the members that are waited for
    result: asyncio.Future[ShardMean]  # awaited by all contributors
    timer: asyncio.TimerHandle  # ends the window
    values: dict[PeerId, Tensor] = field(default_factory=dict)
    weights: dict[PeerId, float] = field(default_factory=dict)
    recall: asyncio.Task[None] | None = None  # asks for the mean that the first reducer may have given to members

    @property
    def is_complete(self) -> bool:
        return self.expected <= self.values.keys()

    @property
    def is_recalling(self) -> bool:
        return self.recall is not None and not self.recall.done()


# A shard's mean of `numel` elements as its reducer encoded it. Shards of other fragments have other elements.
class _KeptMean(NamedTuple):
    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int
    fragments: int


# What a replica remembers of one round, above all as a reducer; some of it by position of the shard.
@dataclass(slots=True)
class _RoundRecord:
    members: dict[PeerId, float | None] = field(default_factory=dict)  # with bandwidths as they first were
    unresponsive: set[PeerId] = field(default_factory=set)  # members that no shard waits for
    contributed: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    means: dict[int, _KeptMean] = field(default_factory=dict)
    nbytes: int = 0


class AllReduce:
    """Both sides of the rounds of all stages of a span: takes part in them, and reduces the shards assigned to it.

    A shard is averaged when every expected member has contributed, or when the window that its first contribution
    opened is over. Means, also those of other reducers, are kept for a while, for late contributions and recalls.
    """

    def __init__(
        self,
        config: RoundConfig,
        caller: Caller,
        view_of: Callable[[Shard], RoundView],
        wanted_fragments: Callable[[Shard], int],
        report: events.Report,
        report_violation: ReportViolation,
        reach_fault: faults.ReachFault = faults.reach,
    ) -> None:
        """wanted_fragments: in how many fragments the shard's stage should agree later, or ALL_REDUCE."""
        self.config = config
        self.caller = caller
        self.report = report
        self._report_violation = report_violation
        self.reach_fault = reach_fault
        self.codec = ShardCodec(config)
        self.view_of = view_of
        self._wanted_fragments = wanted_fragments
        self._gatherings: dict[Shard, _Gathering] = {}
        self._rounds: dict[tuple[int, RoundKind, int], _RoundRecord] = {}
        # By stage and kind, the fractions of all tokens that members contributed, see after_accepted_weights.
        self._accepted_weights: defaultdict[tuple[int, RoundKind], dict[PeerId, float]] = defaultdict(dict)

    async def run(
        self, stage: int, kind: RoundKind, number: int, values: Tensor, weight: float, fragments: int = ALL_REDUCE
    ) -> RoundResult:
        """Averages `values`, float32 [n], with those of the present members, within round_s seconds; see Round."""
        view = self.view_of(Shard(stage, kind, number, 0, fragments))
        members_round = Round(
            all_reduce=self,
            stage=stage,
            kind=kind,
            number=number,
            weight=weight,
            members=view.members,
            deadline=loop_time() + view.round_s,
            fragments=fragments,
        )
        return await members_round.run(values)

    def report_reducer(self, reducer: PeerId, shard: Shard, text: str) -> None:
        """Reports that a reducer has answered what it cannot have averaged; once a round, however many shards."""
        dedup_key = f"stage {shard.stage}, mean of {shard.what} {shard.round}"
        self._report_violation(reducer, Violation.FALSE_MEAN, f"shard {shard.position}: {text}", dedup_key)

    async def close(self) -> None:
        """Cancels all gatherings and recalls; callers waiting for a mean get CancelledError."""
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
    ) -> Reply:
        """Answers a member's Contribute with the shard's mean; raises what `contribute` raises."""
        mean = await self.contribute(peer, message, tensors, deadline)
        return Reply(mean.message, list(mean.encoded.tensors if mean.encoded else ()))

    async def contribute(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> ShardMean:
        """Adds a member's values to a shard, waits for the shard's mean, and returns that.

        Raises Refused when there is no mean, or the round is too far from this peer's own; Busy when too many shards
        are gathered here; ProtocolError for what no member may send; TimeoutError at the loop time `deadline`.
        """
        shard = Shard.of_message(message)
        view = self.view_of(shard)
        if view.refusal is not None:
            raise view.refusal
        if message.weight > self.config.max_weight:
            raise ProtocolError("bad-message", f"a weight of {message.weight:.3g} tokens is more than a round can have")
        values = self.codec.decode(shard, EncodedShard(cast("WireName", message.wire), tensors), view.numel)
        self._record_contribution(peer, shard)
        await self.reach_fault("averaging.received")
        kept = self._find_kept_mean(shard)
        if kept:
            mean = self.codec.decode_mean(shard, kept.tensors, kept.numel, kept.message)
        else:
            mean = await self._gather(peer, message, shard, values, deadline)
        # A contribution that is late, or of a peer that is not a member, is answered without being in the mean.
        counted = kept is None and peer in self._remember_members(shard)
        await self.reach_fault("averaging.answered")
        return replace(mean, message=replace(mean.message, counted=counted))

    def _record_contribution(self, peer: PeerId, shard: Shard) -> None:
        record = self._record(shard)
        if peer in record.contributed[shard.position]:
            raise RepeatedContribution("bad-message", "this shard was contributed before")
        record.contributed[shard.position].add(peer)
        record.unresponsive.discard(peer)
        # Whoever is in a later round by now has left the earlier ones. Syncs of fragments run side by side.
        running_rounds = MAX_RUNNING_SYNCS if shard.kind == "fragment" else 1
        for gathered, gathering in list(self._gatherings.items()):
            if gathered[:2] == shard[:2] and gathered.round <= shard.round - running_rounds:
                self._stop_expecting(gathered, gathering, peer)

    async def _gather(
        self, peer: PeerId, message: Contribute, shard: Shard, values: Tensor, deadline: float
    ) -> ShardMean:
        is_second = message.first_owner_failed and self._first_reducer(shard) != self.config.me
        gathering = self._gatherings.get(shard) or self._open_gathering(shard, peer, len(values), is_second)
        if is_member := peer in self._remember_members(shard):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
        if is_member and is_second and gathering.recall is None:
            gathering.recall = asyncio.create_task(self._recall_mean(shard, gathering))
        elif gathering.is_complete:
            self._average_and_close(shard, gathering)
        now = loop_time()
        window_end = now + MAX_TIMEOUT_FRACTION * (deadline - now)
        if window_end < gathering.timer.when() and shard in self._gatherings:
            gathering.timer.cancel()
            gathering.timer = asyncio.get_running_loop().call_at(window_end, self._end_window, shard)
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _open_gathering(self, shard: Shard, peer: PeerId, numel: int, is_second: bool) -> _Gathering:
        if len(self._gatherings) >= MAX_GATHERINGS:
            raise Busy("too many shards are being averaged here; ask the second reducer", 1000)
        loop, view, record = asyncio.get_running_loop(), self.view_of(shard), self._record(shard)
        # Members that are not awaited may still be alive: they are waited for if there is nobody else.
        members = frozenset(view.members)
        awaited = members - view.not_awaited
        expected = awaited if len(awaited) > 1 else members
        expected -= record.unresponsive
        expected -= record.contributed[shard.position] - {peer}  # they got the mean of one alone
        if is_second:
            expected -= {self._first_reducer(shard)}
        window_s = (SECOND_REDUCER_WINDOW if is_second else FIRST_REDUCER_WINDOW) * view.round_s
        result, timer = loop.create_future(), loop.call_later(window_s, self._end_window, shard)
        # A refusal that nobody awaits any more is no unhandled error.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        gathering = self._gatherings[shard] = _Gathering(numel, expected, result, timer)
        return gathering

    def _end_window(self, shard: Shard) -> None:
        gathering = self._gatherings[shard]
        # Without this peer's own contribution the window may have been opened by one that is far ahead.
        missing = gathering.expected - gathering.values.keys() if self.config.me in gathering.values else ()
        self._average_and_close(shard, gathering)
        for peer in missing:
            self.mark_unresponsive(peer, shard)

    def _average_and_close(self, shard: Shard, gathering: _Gathering) -> None:
        me = self.config.me
        planned, accepted = self.config.planned_tokens(shard), self._accepted_weights[shard.stage, shard.kind]
        weights = believed_weights(gathering.weights, planned, self.view_of(shard).token_bounds, accepted)
        self._accepted_weights[shard.stage, shard.kind] = after_accepted_weights(accepted, gathering.weights, planned)
        center = gathering.values[me] if weights.get(me, 0.0) > 0 else None
        mean = self.codec.mean(shard, list(gathering.values.values()), list(weights.values()), center)
        if mean is not None:
            mean = replace(mean, message=replace(mean.message, wanted_slices=self._wanted_fragments(shard)))
        self._close_gathering(shard, gathering, mean)

    def _close_gathering(self, shard: Shard, gathering: _Gathering, mean: ShardMean | None) -> None:
        if self._gatherings.get(shard) is not gathering:
            return
        del self._gatherings[shard]
        gathering.timer.cancel()
        if gathering.recall is not None:  # it may be the task that runs this method; that returns right after
            gathering.recall.cancel()
        if mean is None:
            gathering.result.set_exception(Refused("nobody has anything to average yet"))
        else:
            # After the mean of one contribution alone, later ones are averaged again.
            if mean.message.contributors > 1:
                self.keep_mean(shard, mean)
            gathering.result.set_result(mean)
        gathering.values.clear()

    def mark_unresponsive(self, peer: PeerId, shard: Shard) -> None:
        """Records that a member does not answer: no shard of that round waits for it, until it contributes again."""
        self._record(shard).unresponsive.add(peer)
        for gathered, gathering in list(self._gatherings.items()):
            if gathered.round_key == shard.round_key:
                self._stop_expecting(gathered, gathering, peer)

    def _stop_expecting(self, shard: Shard, gathering: _Gathering, peer: PeerId) -> None:
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.is_complete and not gathering.is_recalling:
                self._average_and_close(shard, gathering)

    def has_waiting_contributions(self, first: Shard) -> bool:
        """Returns whether members wait here for the mean of any shard of the round that has the shard `first`."""
        return any(shard.round_key == first.round_key for shard in self._gatherings)

    # --- what is remembered of a round

    def _record(self, shard: Shard) -> _RoundRecord:
        if shard.round_key not in self._rounds:
            self._rounds[shard.round_key] = _RoundRecord()
            asyncio.get_running_loop().call_later(
                RECORD_LIFETIME * self.config.round_s, self._rounds.pop, shard.round_key
            )
        return self._rounds[shard.round_key]

    def _remember_members(self, shard: Shard) -> Members:
        record = self._record(shard)
        record.members = {**self.view_of(shard).members, **record.members}
        return record.members

    def _first_reducer(self, shard: Shard) -> PeerId:
        return reducers_of(self.config.run, shard, self._remember_members(shard))[0]

    def keep_mean(self, shard: Shard, mean: ShardMean) -> None:
        """Keeps a shard's encoded mean for late contributions and recalls, if none of the shard is kept yet."""
        record = self._record(shard)
        if shard.position in record.means or mean.encoded is None:
            return
        record.means[shard.position] = _KeptMean(mean.message, mean.encoded.tensors, len(mean.values), shard.fragments)
        record.nbytes += mean.encoded.nbytes
        rounds = {number: kept for (*of, number), kept in self._rounds.items() if tuple(of) == shard[:2]}
        numbers, total = sorted(rounds, reverse=True), 0
        for number in numbers:
            total += rounds[number].nbytes
            if total > MAX_KEPT_BYTES and number <= numbers[0] - MIN_KEPT_ROUNDS:
                # The rest of the record stays, so that a second contribution is still noticed.
                rounds[number].means.clear()
                rounds[number].nbytes = 0

    def _find_kept_mean(self, shard: Shard) -> _KeptMean | None:
        record = self._rounds.get(shard.round_key)
        kept = record.means.get(shard.position) if record else None
        return kept if kept is not None and kept.fragments == shard.fragments else None

    # --- recalls: the means that other replicas keep

    def answer_recall(self, message: Recall) -> Reply:
        """Returns the shard's kept mean, or a message without tensors if none is kept here."""
        kept = self._find_kept_mean(Shard.of_message(message))
        if kept is None:
            return Reply(Recalled(0, 0, 0.0, "float32"))
        said = kept.message
        recalled = Recalled(said.in_mean, said.contributors, said.weight, said.wire, said.wanted_slices)
        return Reply(recalled, list(kept.tensors))

    async def recall_from(self, peer: PeerId, shard: Shard, numel: int, deadline: float) -> ShardMean | None:
        """Returns the mean of `numel` elements that a member keeps of a shard; None if it gives none in time."""
        request = Recall(
            stage=shard.stage,
            what=shard.what,
            round=shard.round,
            part=shard.position,
            slices=shard.fragments,
            deadline_ms=max(1, int(1000 * (deadline - loop_time()))),
        )
        try:
            reply = await self.caller.call(peer, request, (), deadline=deadline)
            said = reply.message
            if not isinstance(said, Recalled) or not reply.tensors:
                return None
            message = Averaged(
                in_mean=said.in_mean,
                contributors=said.contributors,
                weight=said.weight,
                counted=True,
                wire=said.wire,
                wanted_slices=said.wanted_slices,
            )
            return self.codec.decode_mean(shard, reply.tensors, numel, message)
        except AgoraError:
            return None

    async def _recall_mean(self, shard: Shard, gathering: _Gathering) -> None:
        # This peer is the second reducer: some members may have the first one's mean already, which must win.
        deadline = loop_time() + RECALL_FRACTION * self.view_of(shard).round_s
        others = gathering.expected - {self.config.me}
        calls = [asyncio.create_task(self.recall_from(peer, shard, gathering.numel, deadline)) for peer in others]
        try:
            for answer in asyncio.as_completed(calls):
                if (mean := await answer) is not None:
                    self._close_gathering(shard, gathering, mean)
                    return
        finally:
            for call in calls:
                call.cancel()
        if gathering.is_complete:
            self._average_and_close(shard, gathering)

    async def recall_repeatedly(self, first: Shard, result: RoundResult) -> None:
        """Calls recall_failed_shards up to MAX_RECALLS times, with pauses."""
        for attempt in range(MAX_RECALLS):
            if attempt:
                await asyncio.sleep(RECALL_PAUSE * self.view_of(first).round_s)
            await self.recall_failed_shards(first, result)
            if not result.failed_shards or len(self.view_of(first).members) == 1:
                return

    async def recall_failed_shards(self, first: Shard, result: RoundResult) -> None:
        """Asks live replicas for the means of a round's failed shards, and puts plausible ones into `result`, in place.

        Returns after at most one round_s, even if shards are still failed. first: shard 0 of the round.
        """
        view = self.view_of(first)
        sources, members = sorted(view.live_others), len(view.members)
        cuts = cut_into_shards(len(result.mean))
        deadline = loop_time() + view.round_s
        free_calls = asyncio.Semaphore(MAX_OPEN_SHARDS)

        async def recall(index: int) -> None:
            shard = first._replace(position=index)
            own = result.mean[cuts[index]]
            async with free_calls:
                for attempt in range(len(sources)):
                    source = sources[(index + attempt) % len(sources)]
                    mean = await self.recall_from(source, shard, len(own), deadline)
                    if mean is None:
                        continue
                    try:
                        self.codec.check_magnitude(shard, WeightedValues(own, result.own_weight), mean.values, members)
                    except PeerFailed:
                        continue
                    result.mean[cuts[index]], result.averaged[index] = mean.values, True
                    result.wanted[index] = mean.message.wanted_slices
                    if mean.message.in_mean:  # not the zero mean of a shard that no reducer could average
                        result.weight = self.config.believed_weight(shard, mean.message.weight)
                    return

        await asyncio.gather(*(recall(index) for index, is_averaged in enumerate(result.averaged) if not is_averaged))
