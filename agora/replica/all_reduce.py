"""An all-reduce among the replicas of a stage: members send shards to their reducers, which answer with the means.

In the order in which the bytes go: a member sends; a reducer gathers, averages and answers. Means that a member has
missed it asks for later, see kept_means.py. docs/understand/journeys.md has the sequence as a picture.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, cast

import torch
from agora_protocol.codec_names import NumberFormatName
from agora_protocol.errors import AgoraError, Busy, PeerFailed, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Contribute
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import Requester, SharedCapacity
from agora.core.step_schedule import ALL_REDUCE
from agora.observe import events, faults
from agora.replica.background import off_loop
from agora.replica.kept_means import KeptMeans
from agora.replica.reducers import Members, reducers_of
from agora.replica.rounds import MAX_OPEN_SHARDS, NO_ANSWER, RECORD_LIFETIME_ROUNDS, RoundContext, RoundResult
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
MIN_CALL_S: Final = 0.05  # seconds before the round's deadline in which no further reducer is asked
# Fraction of allowed_s for which a shard's first reducer waits for further contributions after the first one.
FIRST_REDUCER_WINDOW: Final = 0.4
# Fraction of allowed_s for which a shard's second reducer waits for further contributions after the first one.
SECOND_REDUCER_WINDOW: Final = 0.2
# A contributor has time until its window ends: this fraction of the time to its deadline, so that its answer arrives.
MAX_WINDOW_FRACTION: Final = 2 / 3
RECALL_FRACTION: Final = 0.1  # fraction of allowed_s in which the members asked by Recall must answer
# Bytes of all contributions that wait here for their means, decoded; beyond half of them each contributor has an equal
# part.
MAX_GATHERED_BYTES: Final = 2**30
# The fraction of these that one contributor may take: twice what the shards take that a member sends at a time in all
# rounds that it may be running.
MAX_GATHERED_FRACTION: Final = 2**-3
CONTRIBUTION_BYTES: Final = 4096  # bytes that a contribution takes beside its values


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
            reported = result.set_weight(Shard(self.stage, self.kind, self.number, 0), self.all_reduce.config)
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
        reasons: list[str] = []  # why a reducer's mean could not be used
        async with self._free_calls:
            scale = faults.falsify("averaging.scale", 1.0)
            sent = values if scale == 1.0 else values * scale
            contribution = await off_loop(partial(codec.make_contribution, shard, sent, self.weight))
            if (answer := await self._ask_reducers(shard, contribution, into, reasons)) is not None:
                return answer
            await off_loop(partial(into.copy_, values))
        codec.record_outcome(shard, contribution, None)
        self.all_reduce.report(
            events.PartFailed(self.stage, shard.wire_kind, self.number, position, "; ".join(reasons)[:500])
        )
        return None

    async def _ask_reducers(
        self, shard: Shard, contribution: Contribution, into: Tensor, reasons: list[str]
    ) -> _Answer | None:
        me = self.all_reduce.config.me
        first, second = reducers_of(self.all_reduce.config.run, shard, self.members)
        rejected: ImplausibleMean | None = None  # why the first reducer's mean is not believed
        for is_second, reducer in ((False, first), (True, second)):
            if reducer is None or reducer in self._unresponsive:
                continue
            try:
                mean = await self._send(shard, reducer, is_second, contribution)
                if mean.message.contributors < 2 and len(self.members) > 1:
                    # The shard failed, although there is an answer: the others may have the second reducer's mean.
                    reasons.append(f"{reducer}: nobody else contributed in time")
                    return None
                # A mean of one contribution is never signed. The only member keeps its own, so that a newcomer can
                # ask for it.
                needs_signature = reducer != me or (len(self.members) > 1 and not mean.message.signature)
                signers = {reducer, first, second} if needs_signature else None
                lost = await off_loop(partial(self._take_mean, shard, mean, contribution, signers, into))
            except ImplausibleMean as error:
                rejected = error
                reasons.append(f"{reducer}: {error}")
                continue
            except (AgoraError, TimeoutError) as error:
                if reducer != me and getattr(error, "code", "") in NO_ANSWER:
                    self._unresponsive.add(reducer)
                    self.all_reduce.mark_unresponsive(reducer, shard)
                reasons.append(f"{reducer}: {str(error) or 'no answer in time'}")
                continue
            if rejected is not None and rejected.is_false:
                # Reported only now: if both means were rejected, this replica's own values may be the outlier.
                self.all_reduce.report_reducer(first, shard, f"{rejected}, and {reducer} answered otherwise")
            self.all_reduce.kept_means.keep(shard, mean)
            return _Answer(mean.message, lost)
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
    latest_end: float  # when the window ends, if contributors have time until then
    have_time_until: list[float] = field(default_factory=list)  # of each member's contribution, see MAX_WINDOW_FRACTION
    values: dict[PeerId, Tensor] = field(default_factory=dict)
    weights: dict[PeerId, float] = field(default_factory=dict)
    recall: asyncio.Task[None] | None = None  # asks for the mean that the first reducer may have given to members
    averaging: asyncio.Task[ShardMean | None] | None = None  # computes the mean; no further contribution enters it

    @property
    def is_complete(self) -> bool:
        return self.expected <= self.values.keys()

    @property
    def window_end(self) -> float:
        # Half of the contributors must be in a hurry: one alone, whose deadline may be false, ends its own wait only.
        return min(self.latest_end, statistics.median_high(self.have_time_until or [math.inf]))

    @property
    def is_recalling(self) -> bool:
        return self.recall is not None and not self.recall.done()


# What a reducer remembers of one round; some of it by position of the shard.
@dataclass(slots=True)
class _RoundRecord:
    members: dict[PeerId, float | None] = field(default_factory=dict)  # with bandwidths as they first were
    unresponsive: set[PeerId] = field(default_factory=set)  # members that no shard waits for
    contributed: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    signed: set[Shard] = field(default_factory=set)  # of which this peer has signed a mean, kept or not any more


class AllReduce:
    """Both sides of the rounds of one stage: takes part in them, and reduces the shards assigned to this peer.

    A shard is averaged when every expected member has contributed, or when the window that its first contribution
    opened is over. Means, also those of other reducers, are kept for late contributions and recalls, in `kept_means`.
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
        self.kept_means = KeptMeans(codec, peer_caller, context_of, self._known_reducers, report_violation)
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
            kept = self.kept_means.find(shard)
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
            raise Busy("waiting contributions take all the memory allowed here; ask the shard's other reducer", 1000)
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
        now = loop_time()
        if is_member := peer in self._remember_members(shard):
            gathering.values[peer], gathering.weights[peer] = values, message.weight
            gathering.have_time_until.append(now + MAX_WINDOW_FRACTION * (deadline - now))
        if is_member and is_second and gathering.recall is None:
            gathering.recall = asyncio.create_task(self._recall_mean(shard, gathering))
        elif gathering.is_complete:
            self._average_and_close(shard, gathering)
        if gathering.window_end != gathering.timer.when() and not gathering.averaging:
            gathering.timer.cancel()
            gathering.timer = asyncio.get_running_loop().call_at(gathering.window_end, self._end_window, shard)
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
        gathering = self._gatherings[shard] = _Gathering(numel, expected, result, timer, timer.when())
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
        if is_signed and shard not in record.signed and self.context_of(shard).may_sign_mean:
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
            # After the mean of one contribution alone, later ones are averaged again. No member takes a mean of several
            # that is not signed, so none may recall it either: this replica would step along zeros, and that one not.
            if mean.message.contributors > 1 and mean.message.signature:
                self.kept_means.keep(shard, mean)
            gathering.result.set_result(mean)
        gathering.values.clear()

    async def _recall_mean(self, shard: Shard, gathering: _Gathering) -> None:
        # This peer is the second reducer: some members may have the first one's mean already, which must win.
        deadline = loop_time() + RECALL_FRACTION * self.context_of(shard).allowed_s
        # The first one has failed the member that asks, whoever opened the gathering: a liar would answer with a mean
        # that it has given to nobody.
        others = gathering.expected - {self.config.me, self._first_reducer(shard)}
        calls = [
            asyncio.create_task(self.kept_means.recall_from(peer, shard, gathering.numel, deadline)) for peer in others
        ]
        try:
            for answer in asyncio.as_completed(calls):
                with contextlib.suppress(AgoraError):
                    mean = await answer
                    # Only what the first reducer has signed: else any member could answer for it.
                    if mean is None:
                        continue
                    find_signer = partial(self.codec.find_signer, shard, mean, self._known_reducers(shard))
                    if await off_loop(find_signer) == "first":
                        self._close_gathering(shard, gathering, mean)
                        return
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if gathering.is_complete:
            self._average_and_close(shard, gathering)

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
                RECORD_LIFETIME_ROUNDS * self.config.of_round(shard).round_s, self._rounds.pop, shard.round_key
            )
        return self._rounds[shard.round_key]

    def _remember_members(self, shard: Shard) -> Members:
        record = self._record_of(shard)
        record.members = {**self.context_of(shard).members, **record.members}
        return record.members

    def _first_reducer(self, shard: Shard) -> PeerId:
        return reducers_of(self.config.run, shard, self._remember_members(shard))[0]

    def _known_reducers(self, shard: Shard) -> tuple[PeerId, PeerId | None]:
        record = self._rounds.get(shard.round_key)
        members = record.members if record and record.members else self.context_of(shard).members
        return reducers_of(self.config.run, shard, members)
