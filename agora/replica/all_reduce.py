"""An all-reduce among the replicas of a stage: members send shards to their reducers, which answer with the means.

In the order in which the bytes go: a member sends; a reducer gathers, averages and answers; means that were missed are
asked for again. docs/understand/journeys.md has the sequence as a picture.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, NamedTuple, TypeVar, cast

import torch
from agora_protocol.codec_names import NumberFormatName
from agora_protocol.errors import AgoraError, Busy, PeerFailed, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute, Recall, Recalled
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.core.calls import ConnectionBroken, PeerCaller, Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester, SharedCapacity
from agora.core.step_schedule import ALL_REDUCE
from agora.observe import events, faults
from agora.replica.reducers import Members, reducers_of
from agora.replica.shard_codec import (
    WIRE_KINDS,
    Contribution,
    EncodedShard,
    ImplausibleMean,
    RoundKey,
    RoundKind,
    Shard,
    ShardCodec,
    ShardMean,
    WeightedValues,
    cut_into_shards,
)
from agora.replica.trust import MAX_PROGRESS_RATIO, believed_weights, update_accepted_fractions
from agora.swarm.peer_score import ReportViolation, Violation

MAX_RUNNING_SYNCS: Final = 4  # maximum number of fragment syncs that one replica may be running at the same time

# Fraction of a round's remaining time for which a member waits for the first reducer before it asks the second.
FIRST_REDUCER_FRACTION: Final = 0.6
MAX_OPEN_SHARDS: Final = 8  # maximum number of shards that a peer sends, or asks for, at the same time
MIN_CALL_S: Final = 0.05  # seconds before the round's deadline in which no further reducer is asked
# Codes of the errors with which a call ends when its peer is gone or hangs.
NO_ANSWER: Final = (ConnectionBroken.code, "deadline")

# Fraction of allowed_s for which a shard's first reducer waits for further contributions after the first one.
FIRST_REDUCER_WINDOW: Final = 0.4
# Fraction of allowed_s for which a shard's second reducer waits for further contributions after the first one.
SECOND_REDUCER_WINDOW: Final = 0.2
# The window ends early so that every contributor gets its answer with a third of its time to its deadline left.
MAX_WINDOW_FRACTION: Final = 2 / 3
RECALL_FRACTION: Final = 0.1  # fraction of allowed_s in which the members asked by Recall must answer
# Bytes of all contributions that wait here for their means, decoded; beyond half of them each contributor has an equal
# part.
MAX_GATHERED_BYTES: Final = 2**30
# The fraction of these that one contributor may have: the shards that a member sends at a time, of the rounds that it
# may be running, are half of that.
MAX_GATHERED_FRACTION: Final = 2**-3
CONTRIBUTION_BYTES: Final = 4096  # bytes that a contribution takes beside its values

# Which reducer of a shard has signed a mean, as far as this peer knows the reducers. "nobody": the mean is unsigned, as
# that of a newcomer, or the zeros of a shard that no reducer could average.
Signer = Literal["first", "second", "other", "nobody", "invalid"]

# A round is remembered for this many times round_s after it began here, for late contributions and for Recall.
RECORD_LIFETIME_ROUNDS: Final = 10.0
# Number of newest rounds of a stage and kind whose means are kept, whatever their size.
MIN_KEPT_ROUNDS: Final = 4
# Bytes of kept means of a stage and kind, beyond which the means of older rounds are dropped. Means are kept because a
# replica that has just joined asks for the means of the steps that were taken while it fetched the state.
MAX_KEPT_BYTES: Final = 2**28
RECALL_PAUSE: Final = 0.0625  # pause before failed shards are asked for again, as a fraction of allowed_s
MAX_RECALLS: Final = 8  # maximum number of times that failed shards are asked for: others may get the mean later

T = TypeVar("T")
# The work on a shard's values takes 2 to 5 ms, for which the event loop, and each microbatch's message, would wait. All
# stages share these threads, so that rounds take at most so many cores from the device thread.
_ARRAY_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="averaging")


async def off_loop(work: Callable[[], T]) -> T:
    """Runs work on arrays on one of the averaging threads; returns its result. It must not use state of the loop."""
    return await asyncio.get_running_loop().run_in_executor(_ARRAY_THREADS, work)


# --- what a round is given, and gives


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What this peer knows of a shard's round now."""

    members: Members  # this peer included
    live_others: frozenset[PeerId]  # those that may keep the round's means
    do_not_wait_for: frozenset[PeerId]  # members whose contributions need not be waited for
    allowed_s: float  # seconds that the round may take
    # By member, the most tokens that can be behind its contribution; a member that is not in it has no bound.
    token_bounds: Mapping[PeerId, float] = field(default_factory=dict)
    cannot_have_signed: bool = True  # whether this peer cannot have signed a mean of the round before a restart
    numel: int = 0  # elements of the shard
    refusal: AgoraError | None = None  # why the shard is not averaged here now


@dataclass(slots=True)
class RoundResult:
    """The result of a round for one member. Failed shards are filled in later, in place."""

    mean: Tensor  # float32 [n]; in a failed shard, this replica's own values until the shard is filled in
    averaged: list[bool]  # for each shard
    fragments: int  # how many the stage has in this round, ALL_REDUCE for a gradient
    wanted_fragments_by_shard: list[int]  # how many its reducer wants later; of a failed shard the present number
    contributors: float = 0.0  # members that contributed in time: average over all shards, 0 for a failed one
    # This peer's tokens that were too late for this round and the one before: average over shards.
    lost_tokens: float = 0.0
    # For each averaged shard, the tokens that its mean was computed over, as its reducer reported.
    reported_weights: dict[int, float] = field(default_factory=dict)
    weight: float = 0.0  # the lower median of reported_weights, as far as it is believed
    is_weight_confirmed: bool = False  # whether two reducers have reported nearly that weight
    own_weight: float = 0.0  # tokens that this replica's own values were computed over

    @property
    def failed_shards(self) -> int:
        return self.averaged.count(False)

    @property
    def wanted_fragments(self) -> int:
        # The present number, unless the means of all shards want others: so no single reducer forces a change.
        wanted = self.wanted_fragments_by_shard
        return max(wanted) if wanted and self.fragments not in wanted else self.fragments

    @classmethod
    def of_failed_shards(cls, own: Tensor, fragments: int) -> RoundResult:
        shards = len(cut_into_shards(len(own)))
        return cls(own, [False] * shards, fragments, [fragments] * shards)


class RepeatedContribution(ProtocolError):
    """Raised for a shard that the same peer has contributed before."""


# A reducer's answer. lost_tokens: tokens of this peer that no mean will contain, see record_outcome.
class _Answer(NamedTuple):
    message: Averaged
    lost_tokens: float = 0.0


# --- a member: sends each shard to its first or second reducer, and puts the means together


@dataclass(slots=True)
class Round:
    """One round in which this peer is a member; call `run` once."""

    all_reduce: AllReduce
    stage: int
    kind: RoundKind
    number: int  # counts the rounds of the stage and kind
    weight: float  # tokens that the values were computed over; with 0 they do not enter the mean
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
        mean = torch.empty_like(values)
        cuts = cut_into_shards(len(values))
        answers = await asyncio.gather(
            *(self._average_shard(at, values[cut], mean[cut]) for at, cut in enumerate(cuts))
        )
        result = RoundResult(
            mean,
            averaged=[answer is not None for answer in answers],
            fragments=self.fragments,
            wanted_fragments_by_shard=[
                self.fragments if answer is None else answer.message.wanted_slices for answer in answers
            ],
            own_weight=self.weight,
        )
        if averaged := [answer for answer in answers if answer is not None]:
            messages = [answer.message for answer in averaged]
            result.reported_weights = {at: answer.message.weight for at, answer in enumerate(answers) if answer}
            reported = self.all_reduce.set_weight(Shard(self.stage, self.kind, self.number, 0), result)
            near = [
                message.reducer for message in messages if reported <= message.weight <= MAX_PROGRESS_RATIO * reported
            ]
            result.is_weight_confirmed = len({*near} - {""}) > 1
            result.contributors = sum(message.contributors for message in messages) / len(answers)
            result.lost_tokens = sum(answer.lost_tokens for answer in averaged) / len(answers)
        self.all_reduce.report(
            events.RoundDone(
                stage=self.stage,
                what=WIRE_KINDS[self.kind],
                round=self.number,
                parts=len(cuts),
                failed_parts=result.failed_shards,
                contributors=result.contributors,
                members=len(self.members),
                weight=self.weight,
                lost=result.lost_tokens,
                seconds=loop_time() - started_at,
                bytes_out=self._bytes_out,
            )
        )
        return result

    async def _average_shard(self, position: int, values: Tensor, into: Tensor) -> _Answer | None:
        shard = Shard(self.stage, self.kind, self.number, position, self.fragments)
        codec = self.all_reduce.codec
        async with self._free_calls:
            scale = faults.falsify("averaging.scale", 1.0)
            sent = values if scale == 1.0 else values * scale
            contribution = await off_loop(partial(codec.make_contribution, shard, sent, self.weight))
            reasons: list[str] = []
            rejected: ImplausibleMean | None = None  # why the first reducer's mean is not believed
            first, second = reducers_of(self.all_reduce.config.run, shard, self.members)
            for is_second, reducer in ((False, first), (True, second)):
                if reducer is None or reducer in self._unresponsive:
                    continue
                try:
                    mean = await self._send(shard, reducer, is_second, contribution)
                    if mean.message.contributors < 2 and len(self.members) > 1:
                        # The shard failed, although there is an answer: the others may have the second reducer's mean.
                        reasons.append(f"{reducer}: nobody else contributed in time")
                        break
                    # A mean of one contribution is never signed. The only member keeps its own, so that a newcomer can
                    # ask for it.
                    is_own = reducer == self.all_reduce.config.me
                    needs_signature = not is_own or (len(self.members) > 1 and not mean.message.signature)
                    signers = {reducer, first, second} if needs_signature else None
                    lost = await off_loop(partial(self._take_mean, shard, mean, contribution, signers, into))
                except ImplausibleMean as error:
                    rejected = error
                    reasons.append(f"{reducer}: {error}")
                    continue
                except (AgoraError, TimeoutError) as error:
                    if reducer != self.all_reduce.config.me and getattr(error, "code", "") in NO_ANSWER:
                        self._unresponsive.add(reducer)
                        self.all_reduce.mark_unresponsive(reducer, shard)
                    reasons.append(f"{reducer}: {str(error) or 'no answer in time'}")
                    continue
                if rejected is not None:
                    # Reported only now: if both reducers' means were rejected, this replica's own values may be the
                    # outlier.
                    self.all_reduce.report_reducer(first, shard, f"{rejected}, and {reducer} answered otherwise")
                self.all_reduce.keep_mean(shard, mean)
                return _Answer(mean.message, lost)
            await off_loop(partial(into.copy_, values))
        codec.record_outcome(shard, contribution, None)
        self.all_reduce.report(
            events.PartFailed(self.stage, shard.wire_kind, self.number, position, "; ".join(reasons)[:500])
        )
        return None

    def _take_mean(
        self, shard: Shard, mean: ShardMean, sent: Contribution, signers: set[PeerId | None] | None, into: Tensor
    ) -> float:
        codec = self.all_reduce.codec
        if signers is not None:
            # Without one it is no violation: the reducer may be a newcomer that this replica took for a member.
            codec.check_signature(shard, mean, signers)
        codec.check_magnitude(shard, WeightedValues(sent.values, sent.weight), mean.values, len(self.members))
        into.copy_(mean.values)
        return codec.record_outcome(shard, sent, mean.message.counted)

    async def _send(self, shard: Shard, reducer: PeerId, is_second: bool, contribution: Contribution) -> ShardMean:
        now = loop_time()
        left_s = self.deadline - now
        if left_s < MIN_CALL_S:
            raise PeerFailed("the round's time is over")
        deadline = self.deadline if is_second else now + FIRST_REDUCER_FRACTION * left_s
        encoded = contribution.encoded
        request = Contribute(
            stage=shard.stage,
            what=shard.wire_kind,
            round=shard.round,
            part=shard.position,
            slices=shard.fragments,
            weight=contribution.weight,
            first_owner_failed=is_second,
            wire=encoded.wire,
            deadline_ms=max(1, int(1000 * (deadline - now))),
        )
        await self.all_reduce.inject_fault("averaging.sending")
        if reducer == self.all_reduce.config.me:
            return await self.all_reduce.contribute(reducer, request, encoded.tensors, deadline)
        self._bytes_out += encoded.nbytes
        reply = await self.all_reduce.peer_caller.call(reducer, request, encoded.tensors, deadline=deadline)
        if not isinstance(reply.message, Averaged):
            raise PeerFailed(f"the reducer answered by {type(reply.message).__name__}")
        numel = len(contribution.values)
        return await off_loop(partial(self.all_reduce.codec.decode_mean, shard, reply.tensors, numel, reply.message))


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
    averaging: asyncio.Task[ShardMean | None] | None = None  # computes the mean; no further contribution enters it

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
    signed: set[Shard] = field(default_factory=set)  # of which this peer has signed a mean, kept or not any more
    nbytes: int = 0


class AllReduce:
    """Both sides of the rounds of one stage: takes part in them, and reduces the shards assigned to this peer.

    A shard is averaged when every expected member has contributed, or when the window that its first contribution
    opened is over. Means, also those of other reducers, are kept for a while, for late contributions and recalls.
    """

    def __init__(
        self,
        codec: ShardCodec,
        peer_caller: PeerCaller,
        context_of: Callable[[Shard], RoundContext],
        wanted_fragments: Callable[[int], int],
        sign: Callable[[bytes], bytes],
        report: events.Report,
        report_violation: ReportViolation,
        inject_fault: faults.InjectFault = faults.inject_fault,
    ) -> None:
        """wanted_fragments: how many fragments, or ALL_REDUCE, this replica wants later, given the present number.

        sign: returns this peer's signature of a message.
        """
        self.config = codec.config
        self.peer_caller = peer_caller
        self.report = report
        self._report_violation = report_violation
        self.inject_fault = inject_fault
        self.codec = codec
        self.context_of = context_of
        self._wanted_fragments = wanted_fragments
        self._sign = sign
        self._gatherings: dict[Shard, _Gathering] = {}
        self._gathered_bytes = SharedCapacity(MAX_GATHERED_BYTES, MAX_GATHERED_FRACTION)
        self._rounds: dict[RoundKey, _RoundRecord] = {}
        # By stage and kind, the fractions of all tokens that members contributed, see update_accepted_fractions.
        self._accepted_weights: defaultdict[tuple[int, RoundKind], dict[PeerId, float]] = defaultdict(dict)

    async def run(
        self, stage: int, kind: RoundKind, number: int, values: Tensor, weight: float, fragments: int = ALL_REDUCE
    ) -> RoundResult:
        """Averages `values`, float32 [n], with those of the present members, within allowed_s seconds; see Round."""
        context = self.context_of(Shard(stage, kind, number, 0, fragments))
        deadline = loop_time() + context.allowed_s
        return await Round(self, stage, kind, number, weight, context.members, deadline, fragments).run(values)

    def report_reducer(self, reducer: PeerId, shard: Shard, text: str) -> None:
        """Reports that a reducer has answered with a mean that it cannot have averaged; at most once for a round."""
        dedup_key = f"stage {shard.stage}, mean of {shard.wire_kind} {shard.round}"
        self._report_violation(reducer, Violation.FALSE_MEAN, f"shard {shard.position}: {text}", dedup_key)

    async def close(self) -> None:
        """Cancels all gatherings, averages and recalls; callers waiting for a mean get CancelledError."""
        for gathering in self._gatherings.values():
            gathering.timer.cancel()
            gathering.result.cancel()
        both = [task for gathering in self._gatherings.values() for task in (gathering.recall, gathering.averaging)]
        tasks = [task for task in both if task is not None]
        self._gatherings.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def answer_contribution(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> Reply:
        """Answers a member's Contribute with the shard's mean; raises what `contribute` raises.

        Reports a ProtocolError as a violation, once for a round, however many of its shards are wrong.
        """
        try:
            mean = await self.contribute(peer, message, tensors, deadline)
        except RepeatedContribution:
            # No violation: a restarted peer sends its shards again, and so does a second machine with its key.
            raise
        except ProtocolError as error:
            dedup_key = f"stage {message.stage}, {message.what}, round {message.round}"
            self._report_violation(peer, Violation.BAD_AVERAGE, f"{error.code}: {error}", dedup_key)
            raise
        return Reply(mean.message, list(mean.encoded.tensors if mean.encoded else ()))

    async def contribute(
        self, peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float
    ) -> ShardMean:
        """Adds a member's values to a shard, waits for the shard's mean, and returns that.

        Raises Refused when there is no mean, or the round is too far from this peer's own; Busy when the contributions
        that wait here, or this peer's, take too many bytes; ProtocolError for what no member may send; TimeoutError at
        the loop time `deadline`.
        """
        shard = Shard.of_message(message)
        context = self.context_of(shard)
        if context.refusal is not None:
            raise context.refusal
        if message.weight > self.config.weight_limit:
            raise ProtocolError("bad-message", f"A weight of {message.weight:.3g} tokens is more than a round has.")
        with self._holding_bytes(peer, 4 * context.numel + CONTRIBUTION_BYTES):
            sent = EncodedShard(cast("NumberFormatName", message.wire), tensors)
            values = await off_loop(partial(self.codec.decode, shard, sent, context.numel))
            self._record_contribution(peer, shard)
            await self.inject_fault("averaging.received")
            if (gathering := self._gatherings.get(shard)) and gathering.averaging:
                await asyncio.wait([gathering.result], timeout=deadline - loop_time())
            kept = self._find_kept_mean(shard)
            if kept:
                mean = await off_loop(partial(self.codec.decode_mean, shard, kept.tensors, kept.numel, kept.message))
            else:
                mean = await self._gather(peer, message, shard, values, deadline)
        # A contribution that is late, or of a peer that is not a member, is answered without being in the mean.
        counted = kept is None and peer in self._remember_members(shard)
        await self.inject_fault("averaging.answered")
        return replace(mean, message=replace(mean.message, counted=counted))

    @contextlib.contextmanager
    def _holding_bytes(self, peer: PeerId, size: int) -> Iterator[None]:
        # A gathering ends before its contributors' deadlines, and so holds their values no longer than they wait.
        requester = Requester("", peer)
        if peer != self.config.me and not self._gathered_bytes.acquire(requester, size):
            raise Busy("waiting contributions take all the memory allowed here; ask the second reducer", 1000)
        try:
            yield
        finally:
            if peer != self.config.me:
                self._gathered_bytes.release(requester, size)

    def _record_contribution(self, peer: PeerId, shard: Shard) -> None:
        record = self._record_of(shard)
        if peer in record.contributed[shard.position]:
            raise RepeatedContribution("bad-message", "This shard was contributed before.")
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
        window_end = now + MAX_WINDOW_FRACTION * (deadline - now)
        if window_end < gathering.timer.when() and not gathering.averaging:
            gathering.timer.cancel()
            gathering.timer = asyncio.get_running_loop().call_at(window_end, self._end_window, shard)
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(gathering.result)

    def _open_gathering(self, shard: Shard, peer: PeerId, numel: int, is_second: bool) -> _Gathering:
        loop, context, record = asyncio.get_running_loop(), self.context_of(shard), self._record_of(shard)
        # Members that are not awaited may still be alive: they are waited for if there is nobody else.
        members = frozenset(context.members)
        awaited = members - context.do_not_wait_for
        expected = awaited if len(awaited) > 1 else members
        expected -= record.unresponsive
        expected -= record.contributed[shard.position] - {peer}  # they got the mean of one alone
        if is_second:
            expected -= {self._first_reducer(shard)}
        window_s = (SECOND_REDUCER_WINDOW if is_second else FIRST_REDUCER_WINDOW) * context.allowed_s
        result, timer = loop.create_future(), loop.call_later(window_s, self._end_window, shard)
        # Retrieves the exception, so that asyncio does not log one that nobody awaits any more.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        gathering = self._gatherings[shard] = _Gathering(numel, expected, result, timer)
        return gathering

    def _end_window(self, shard: Shard) -> None:
        gathering = self._gatherings[shard]
        # Nobody is marked unresponsive if this peer has not contributed itself: the window may have been opened by a
        # member that is far ahead.
        missing = gathering.expected - gathering.values.keys() if self.config.me in gathering.values else ()
        self._average_and_close(shard, gathering)
        for peer in missing:
            self.mark_unresponsive(peer, shard)

    def _average_and_close(self, shard: Shard, gathering: _Gathering) -> None:
        def close(done: asyncio.Task[ShardMean | None]) -> None:
            if not done.cancelled():
                nothing = Refused("nobody has anything to average yet")
                self._close_gathering(shard, gathering, done.exception() or done.result() or nothing)

        if gathering.averaging is None:
            gathering.timer.cancel()
            gathering.averaging = asyncio.create_task(self._average(shard, gathering))
            gathering.averaging.add_done_callback(close)

    async def _average(self, shard: Shard, gathering: _Gathering) -> ShardMean | None:
        me, record = self.config.me, self._record_of(shard)
        planned, accepted = self.config.planned_tokens(shard), self._accepted_weights[shard.stage, shard.kind]
        weights = believed_weights(gathering.weights, planned, self.context_of(shard).token_bounds, accepted)
        self._accepted_weights[shard.stage, shard.kind] = update_accepted_fractions(
            accepted, gathering.weights, planned
        )
        values, center = list(gathering.values.values()), gathering.values[me] if weights.get(me, 0.0) > 0 else None
        wanted = self._wanted_fragments(shard.fragments)

        def average() -> tuple[ShardMean, bytes] | None:
            mean = self.codec.average(shard, values, list(weights.values()), center)
            if mean is None:
                return None
            mean = replace(mean, message=replace(mean.message, wanted_slices=wanted))
            return mean, self.codec.signed_bytes(shard, mean)

        averaged = await off_loop(average)
        if averaged is None:
            return None
        mean, statement = averaged
        # A mean of one contribution is not signed, since later ones may give another; nor is one that a recalled mean
        # has overtaken.
        is_signed = mean.message.contributors > 1 and self._gatherings.get(shard) is gathering
        if is_signed and shard not in record.signed and self.context_of(shard).cannot_have_signed:
            record.signed.add(shard)
            mean = replace(mean, message=replace(mean.message, reducer=me, signature=self._sign(statement)))
        return mean

    def _close_gathering(self, shard: Shard, gathering: _Gathering, mean: ShardMean | BaseException) -> None:
        if self._gatherings.get(shard) is not gathering:
            return
        del self._gatherings[shard]
        gathering.timer.cancel()
        if gathering.recall is not None and gathering.recall is not asyncio.current_task():
            gathering.recall.cancel()
        if isinstance(mean, BaseException):
            gathering.result.set_exception(mean)
        else:
            # After the mean of one contribution alone, later ones are averaged again.
            if mean.message.contributors > 1:
                self.keep_mean(shard, mean)
            gathering.result.set_result(mean)
        gathering.values.clear()

    def mark_unresponsive(self, peer: PeerId, shard: Shard) -> None:
        """Records that a member does not answer: no shard of that round waits for it, until it contributes again."""
        self._record_of(shard).unresponsive.add(peer)
        for gathered, gathering in list(self._gatherings.items()):
            if gathered.round_key == shard.round_key:
                self._stop_expecting(gathered, gathering, peer)

    def _stop_expecting(self, shard: Shard, gathering: _Gathering, peer: PeerId) -> None:
        if peer in gathering.expected - gathering.values.keys():
            gathering.expected -= {peer}
            if gathering.is_complete and not gathering.is_recalling:
                self._average_and_close(shard, gathering)

    def has_waiting_contributions(self, first_shard: Shard) -> bool:
        """Returns whether members wait here for the mean of any shard of the round that begins with `first_shard`."""
        return any(shard.round_key == first_shard.round_key for shard in self._gatherings)

    # --- what is remembered of a round

    def _record_of(self, shard: Shard) -> _RoundRecord:
        if shard.round_key not in self._rounds:
            self._rounds[shard.round_key] = _RoundRecord()
            asyncio.get_running_loop().call_later(
                RECORD_LIFETIME_ROUNDS * self.config.round_s, self._rounds.pop, shard.round_key
            )
        return self._rounds[shard.round_key]

    def _remember_members(self, shard: Shard) -> Members:
        record = self._record_of(shard)
        record.members = {**self.context_of(shard).members, **record.members}
        return record.members

    def _first_reducer(self, shard: Shard) -> PeerId:
        return reducers_of(self.config.run, shard, self._remember_members(shard))[0]

    def keep_mean(self, shard: Shard, mean: ShardMean) -> None:
        """Keeps a shard's encoded mean for late contributions and recalls. Only a signed one replaces a kept one."""
        record = self._record_of(shard)
        kept = record.means.get(shard.position)
        if mean.encoded is None or (kept and (kept.message.signature or not mean.message.signature)):
            return
        if kept:
            record.nbytes -= sum(tensor.nbytes for tensor in kept.tensors)
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

    def answer_recall(self, request: Recall) -> Reply:
        """Returns the shard's kept mean, or a message without tensors if none is kept here."""
        kept = self._find_kept_mean(Shard.of_message(request))
        if kept is None:
            return Reply(Recalled(0, 0, 0.0, "float32"))
        message = kept.message
        recalled = Recalled(
            in_mean=message.in_mean,
            contributors=message.contributors,
            weight=message.weight,
            wire=message.wire,
            wanted_slices=message.wanted_slices,
            reducer=message.reducer,
            signature=message.signature,
        )
        return Reply(recalled, list(kept.tensors))

    async def recall_from(self, peer: PeerId, shard: Shard, numel: int, deadline: float) -> ShardMean | None:
        """Returns the mean of `numel` elements that a member keeps of a shard, None if it keeps none.

        Raises AgoraError if it does not answer in time, or not as it must.
        """
        request = Recall(
            stage=shard.stage,
            what=shard.wire_kind,
            round=shard.round,
            part=shard.position,
            slices=shard.fragments,
            deadline_ms=max(1, int(1000 * (deadline - loop_time()))),
        )
        reply = await self.peer_caller.call(peer, request, (), deadline=deadline)
        recalled = reply.message
        if not isinstance(recalled, Recalled) or not reply.tensors:
            return None
        message = Averaged(
            in_mean=recalled.in_mean,
            contributors=recalled.contributors,
            weight=recalled.weight,
            counted=True,
            wire=recalled.wire,
            wanted_slices=recalled.wanted_slices,
            reducer=recalled.reducer,
            signature=recalled.signature,
        )
        return await off_loop(partial(self.codec.decode_mean, shard, reply.tensors, numel, message))

    async def _recall_mean(self, shard: Shard, gathering: _Gathering) -> None:
        # This peer is the second reducer: some members may have the first one's mean already, which must win.
        deadline = loop_time() + RECALL_FRACTION * self.context_of(shard).allowed_s
        others = gathering.expected - {self.config.me}
        calls = [asyncio.create_task(self.recall_from(peer, shard, gathering.numel, deadline)) for peer in others]
        try:
            for answer in asyncio.as_completed(calls):
                with contextlib.suppress(AgoraError):
                    mean = await answer
                    # Only what the first reducer has signed: else any member could answer for it.
                    if mean is None:
                        continue
                    if await off_loop(partial(self._find_signer, shard, mean, self._known_reducers(shard))) == "first":
                        self._close_gathering(shard, gathering, mean)
                        return
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if gathering.is_complete:
            self._average_and_close(shard, gathering)

    def _known_reducers(self, shard: Shard) -> tuple[PeerId, PeerId | None]:
        record = self._rounds.get(shard.round_key)
        members = record.members if record and record.members else self.context_of(shard).members
        return reducers_of(self.config.run, shard, members)

    def _find_signer(self, shard: Shard, mean: ShardMean, reducers: tuple[PeerId, PeerId | None]) -> Signer:
        message = mean.message
        if not message.contributors and mean.values.any():
            return "invalid"
        if not message.reducer and not message.signature:
            return "nobody"
        if not self.codec.is_signed(shard, mean):
            return "invalid"
        first, second = reducers
        return "first" if message.reducer == first else "second" if message.reducer == second else "other"

    async def expose_equivocation(self, peer: PeerId, first_shard: Shard) -> bool:
        """Compares the means that this peer keeps of a round with those of another member whose history differs.

        Reports a reducer that has signed two different means of a shard, and returns whether there is one.
        first_shard: of the round.
        """
        record = self._rounds.get(first_shard.round_key)
        deadline = loop_time() + self.context_of(first_shard).allowed_s
        for position, kept in sorted(record.means.items()) if record else ():
            shard = first_shard._replace(position=position)
            reducer = PeerId(kept.message.reducer)
            if kept.fragments != shard.fragments or not kept.message.signature or reducer == self.config.me:
                continue
            try:
                other = await self.recall_from(peer, shard, kept.numel, deadline)
            except AgoraError:
                continue
            if other is None or other.message.reducer != reducer:
                continue
            if await off_loop(partial(self._contradicts, shard, kept, other)):
                text = f"signed two different means of shard {position} of {shard.wire_kind} {shard.round}"
                dedup_key = f"stage {shard.stage}, two means of {shard.wire_kind} {shard.round}"
                self._report_violation(reducer, Violation.EQUIVOCATION, text, dedup_key)
                return True
        return False

    def _contradicts(self, shard: Shard, kept: _KeptMean, other: ShardMean) -> bool:
        own = self.codec.decode_mean(shard, kept.tensors, kept.numel, kept.message)
        is_signed = self.codec.is_signed(shard, other)
        return is_signed and self.codec.signed_bytes(shard, own) != self.codec.signed_bytes(shard, other)

    async def recall_repeatedly(self, first_shard: Shard, result: RoundResult) -> None:
        """Calls recall_failed_shards up to MAX_RECALLS times, with pauses."""
        for attempt in range(MAX_RECALLS):
            if attempt:
                await asyncio.sleep(RECALL_PAUSE * self.context_of(first_shard).allowed_s)
            await self.recall_failed_shards(first_shard, result)
            if not result.failed_shards or len(self.context_of(first_shard).members) == 1:
                return

    async def _recall_shard(
        self, shard: Shard, sources: Sequence[PeerId], own: WeightedValues, members: int, deadline: float
    ) -> ShardMean | None:
        # | the mean is | it is believed |
        # |---|---|
        # | signed by the shard's first reducer | at once |
        # | signed by anybody, or by nobody | if two replicas keep the same: their views of the reducers may differ |
        # | signed by the second reducer | if nobody keeps another one |
        # | any other | if only one replica answered: this one would have to believe its state as well |
        found: dict[bytes, tuple[ShardMean, Signer]] = {}
        answered = 0
        for source in sources:
            try:
                mean = await self.recall_from(source, shard, len(own.values), deadline)
            except AgoraError as error:
                answered += getattr(error, "code", "") not in NO_ANSWER
                continue
            answered += 1
            if mean is None:
                continue
            judge = partial(self._judge_recalled, shard, mean, self._known_reducers(shard), own, members)
            signer, statement = await off_loop(judge)
            if signer == "invalid":
                continue
            if signer == "first" or statement in found:
                return mean
            found[statement] = mean, signer
        if len(found) != 1:
            return None
        ((mean, signer),) = found.values()
        return mean if signer == "second" or answered == 1 else None

    def _judge_recalled(
        self,
        shard: Shard,
        mean: ShardMean,
        reducers: tuple[PeerId, PeerId | None],
        own: WeightedValues,
        members: int,
    ) -> tuple[Signer, bytes]:
        signer = self._find_signer(shard, mean, reducers)
        if signer == "invalid" or self.codec.why_implausible(shard, own, mean.values, members):
            return "invalid", b""
        return signer, self.codec.signed_bytes(shard, mean)

    def set_weight(self, first_shard: Shard, result: RoundResult) -> float:
        """Sets `result.weight` of a round with averaged shards; returns it as reported. first_shard: of the round."""
        # The median: whoever reduces fewer than half of the shards cannot choose it.
        reported = statistics.median_low(result.reported_weights.values())
        result.weight = self.config.believed_weight(first_shard, reported)
        return reported

    async def recall_failed_shards(self, first_shard: Shard, result: RoundResult) -> None:
        """Asks live replicas for the means of a round's failed shards, and puts plausible ones into `result`, in place.

        Returns after at most allowed_s seconds, even if shards are still failed. first_shard: of the round.
        """
        context = self.context_of(first_shard)
        sources, members = sorted(context.live_others), len(context.members)
        cuts = cut_into_shards(len(result.mean))
        deadline = loop_time() + context.allowed_s
        free_calls = asyncio.Semaphore(MAX_OPEN_SHARDS)

        async def recall(index: int) -> None:
            shard = first_shard._replace(position=index)
            own = result.mean[cuts[index]]
            turn = index % max(1, len(sources))
            async with free_calls:
                weighted = WeightedValues(own, result.own_weight)
                order = [*sources[turn:], *sources[:turn]]
                if (mean := await self._recall_shard(shard, order, weighted, members, deadline)) is not None:
                    await off_loop(partial(own.copy_, mean.values))
                    result.averaged[index] = True
                    result.wanted_fragments_by_shard[index] = mean.message.wanted_slices
                    if mean.message.in_mean:  # not the zero mean of a shard that no reducer could average
                        result.reported_weights[index] = mean.message.weight

        await asyncio.gather(*(recall(index) for index, is_averaged in enumerate(result.averaged) if not is_averaged))
        if result.reported_weights:
            self.set_weight(first_shard, result)
