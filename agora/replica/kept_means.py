"""The means that a stage's replicas keep of their rounds, for members that have missed one.

A replica keeps the means of its rounds for a while, gives them to others that ask for them (Recall), asks for those
that it has missed, and compares its own with those of a replica that has applied other ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId
from agora_protocol.messages import Averaged, Recall, Recalled
from agora_protocol.tensors import WireTensor

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.replica.background import off_loop
from agora.replica.rounds import MAX_OPEN_SHARDS, NO_ANSWER, RECORD_LIFETIME_ROUNDS, RoundContext, RoundResult
from agora.replica.shard_codec import RoundKey, Shard, ShardCodec, ShardMean, Signer, WeightedValues, cut_into_shards
from agora.swarm.peer_score import ReportViolation, Violation

# Number of newest rounds of a stage and kind whose means are kept, whatever their size.
MIN_KEPT_ROUNDS: Final = 4
# Bytes of kept means of a stage and kind, beyond which the means of older rounds are dropped. Means are kept because a
# replica that has just joined asks for the means of the steps that were taken while it fetched the state.
MAX_KEPT_BYTES: Final = 2**28
RECALL_PAUSE: Final = 0.0625  # pause before failed shards are asked for again, as a fraction of allowed_s
MAX_RECALLS: Final = 8  # maximum number of times that failed shards are asked for: others may get the mean later


class KeptMean(NamedTuple):
    """A shard's mean of `numel` elements as its reducer encoded it. Shards of other fragments have other elements."""

    message: Averaged
    tensors: Sequence[WireTensor]
    numel: int
    fragments: int


# The kept means of one round, by position of the shard.
@dataclass(slots=True)
class _KeptRound:
    means: dict[int, KeptMean] = field(default_factory=dict)
    nbytes: int = 0


class KeptMeans:
    """The means of one stage's rounds, whoever reduced them: those kept here, and those that others keep."""

    def __init__(
        self,
        codec: ShardCodec,
        peer_caller: PeerCaller,
        context_of: Callable[[Shard], RoundContext],
        reducers_of: Callable[[Shard], tuple[PeerId, PeerId | None]],
        report_violation: ReportViolation,
    ) -> None:
        """reducers_of: returns the first and the second reducer of a shard, as far as this peer knows its members."""
        self._codec = codec
        self._config = codec.config
        self._peer_caller = peer_caller
        self._context_of = context_of
        self._reducers_of = reducers_of
        self._report_violation = report_violation
        self._rounds: dict[RoundKey, _KeptRound] = {}

    def keep(self, shard: Shard, mean: ShardMean) -> None:
        """Keeps a shard's encoded mean for late contributions and recalls. Only a signed one replaces a kept one."""
        if shard.round_key not in self._rounds:
            self._rounds[shard.round_key] = _KeptRound()
            lifetime_s = RECORD_LIFETIME_ROUNDS * self._config.round_s
            asyncio.get_running_loop().call_later(lifetime_s, self._rounds.pop, shard.round_key)
        record = self._rounds[shard.round_key]
        kept = record.means.get(shard.position)
        if mean.encoded is None or (kept and (kept.message.signature or not mean.message.signature)):
            return
        if kept:
            record.nbytes -= sum(tensor.nbytes for tensor in kept.tensors)
        record.means[shard.position] = KeptMean(mean.message, mean.encoded.tensors, len(mean.values), shard.fragments)
        record.nbytes += mean.encoded.nbytes
        rounds = {number: each for (*of, number), each in self._rounds.items() if tuple(of) == shard[:2]}
        numbers, total = sorted(rounds, reverse=True), 0
        for number in numbers:
            total += rounds[number].nbytes
            if total > MAX_KEPT_BYTES and number <= numbers[0] - MIN_KEPT_ROUNDS:
                rounds[number].means.clear()
                rounds[number].nbytes = 0

    def find(self, shard: Shard) -> KeptMean | None:
        """Returns the shard's kept mean, None if none is kept here."""
        record = self._rounds.get(shard.round_key)
        kept = record.means.get(shard.position) if record else None
        return kept if kept is not None and kept.fragments == shard.fragments else None

    def answer_recall(self, request: Recall) -> Reply:
        """Returns the shard's kept mean, or a message without tensors if none is kept here."""
        kept = self.find(Shard.of_message(request))
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

    # --- asking others

    async def recall_repeatedly(self, first_shard: Shard, result: RoundResult) -> None:
        """Calls recall_failed_shards up to MAX_RECALLS times, with pauses."""
        for attempt in range(MAX_RECALLS):
            if attempt:
                await asyncio.sleep(RECALL_PAUSE * self._context_of(first_shard).allowed_s)
            await self.recall_failed_shards(first_shard, result)
            if not result.failed_shards or len(self._context_of(first_shard).members) == 1:
                return

    async def recall_failed_shards(self, first_shard: Shard, result: RoundResult) -> None:
        """Asks live replicas for the means of a round's failed shards, and puts plausible ones into `result`, in place.

        Returns after at most allowed_s seconds, even if shards are still failed. first_shard: of the round.
        """
        context = self._context_of(first_shard)
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
            result.set_weight(first_shard, self._config)

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
            judge = partial(self._judge_recalled, shard, mean, self._reducers_of(shard), own, members)
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
        signer = self._codec.find_signer(shard, mean, reducers)
        if signer == "invalid" or self._codec.why_implausible(shard, own, mean.values, members):
            return "invalid", b""
        return signer, self._codec.signed_bytes(shard, mean)

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
        reply = await self._peer_caller.call(peer, request, (), deadline=deadline)
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
        return await off_loop(partial(self._codec.decode_mean, shard, reply.tensors, numel, message))

    # --- comparing

    async def expose_equivocation(self, peer: PeerId, first_shard: Shard) -> bool:
        """Compares the means that this peer keeps of a round with those of another member whose history differs.

        Reports a reducer that has signed two different means of a shard, and returns whether there is one.
        first_shard: of the round.
        """
        record = self._rounds.get(first_shard.round_key)
        deadline = loop_time() + self._context_of(first_shard).allowed_s
        for position, kept in sorted(record.means.items()) if record else ():
            shard = first_shard._replace(position=position)
            reducer = PeerId(kept.message.reducer)
            if kept.fragments != shard.fragments or not kept.message.signature or reducer == self._config.me:
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

    def _contradicts(self, shard: Shard, kept: KeptMean, other: ShardMean) -> bool:
        own = self._codec.decode_mean(shard, kept.tensors, kept.numel, kept.message)
        is_signed = self._codec.is_signed(shard, other)
        return is_signed and self._codec.signed_bytes(shard, own) != self._codec.signed_bytes(shard, other)
