"""One liar among the replicas of a stage: whatever it answers and claims, the stage moves as without it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from agora_protocol.errors import PeerFailed
from agora_protocol.ids import PeerId
from agora_protocol.limits import PART_ELEMENTS
from agora_protocol.manifest import Manifest
from agora_protocol.messages import Averaged, Contribute, GossipedSteps, GossipSteps, Recall, Recalled
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.observe.events import RoundDone, StageDiverged
from agora.replica.number_formats import NumberFormat
from agora.replica.reducers import reducers_of
from agora.replica.rounds import RoundResult
from agora.replica.shard_codec import EncodedShard, Shard, ShardMean
from agora.replica.stage_view import may_sign
from agora.swarm.peer_score import Violation
from agora.train.history_hash import INITIAL_HASH, extend_history, hash_of
from agora.train.stage import StageProgress
from tests.replica.group_world import NUMEL, FakeStage, GroupPeer, GroupWorld
from tests.replica.test_stage_replicas import assert_equal_bits, at_one_step
from tests.replica.world import Member, World, identities, signed_by
from tests.virtual_time import run

COMMON = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000))
FALSE = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1001))


class AlikeStage(FakeStage):
    """Its gradients are those of the others, but for a little noise."""

    lies_of_progress = False

    def __init__(self, number: int, rate: float, manifest: Manifest) -> None:
        super().__init__(number, rate, manifest)
        noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
        self.gradient = COMMON + 0.02 * noise

    def progress(self) -> list[StageProgress]:
        (told,) = super().progress()
        if self.lies_of_progress:
            told = replace(
                told,
                open_step=told.step + 2,
                tokens_in_share=2**40,
                tokens_counted=10**6 * told.tokens_counted,
            )
        return [told]


# --- what a liar does; each takes the peer that lies, and lets it


def changes_means(change: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Callable[[GroupPeer], None]:
    """As a reducer it signs and answers change(mean, round, number of the asking peer)."""

    def lie(liar: GroupPeer) -> None:
        honest, codec = liar.group.stages[0].all_reduce.answer_contribution, liar.group.stages[0].all_reduce.codec

        async def answer(peer: PeerId, message: Contribute, tensors: Sequence[WireTensor], deadline: float) -> Reply:
            reply = await honest(peer, message, tensors, deadline)
            said, shard = reply.message, Shard.of_message(message)
            if not isinstance(said, Averaged) or said.reducer != liar.peer:
                return reply
            mean = codec.decode_mean(shard, reply.tensors, NUMEL, said)
            values = change(mean.values, message.round, list(liar.world.peers).index(peer))
            false = ShardMean(
                values, replace(said, wire="float32"), EncodedShard("float32", NumberFormat("float32").encode(values))
            )
            false = signed_by(liar.peer, codec, shard, false)
            assert false.encoded is not None
            return Reply(false.message, list(false.encoded.tensors))

        liar.group.stages[0].all_reduce.answer_contribution = answer

    return lie


def claims_tokens(liar: GroupPeer) -> None:
    """It contributes its gradient as that of as many tokens as are not refused."""
    codec = liar.group.stages[0].all_reduce.codec
    honest = codec.make_contribution

    def contribution(shard: Shard, values: torch.Tensor, weight: float, wire: object = None):
        made = honest(shard, values, weight)
        return replace(made, weight=0.9 * liar.group.stages[0].all_reduce.config.max_weight)

    codec.make_contribution = contribution


def tells_tokens_of_means(liar: GroupPeer) -> None:
    """As a reducer it answers true means, of a tenth of their tokens."""
    codec = liar.group.stages[0].all_reduce.codec
    honest = codec.average

    def mean(*arguments: Any) -> ShardMean | None:
        made = honest(*arguments)
        return made and replace(made, message=replace(made.message, weight=0.1 * made.message.weight))

    codec.average = mean


def tells_false_progress(liar: GroupPeer) -> None:
    """Its shares are always closed, have all tokens, and its rate is a million times as high."""
    assert isinstance(liar.stage, AlikeStage)
    liar.stage.lies_of_progress = True


def answers_recalls(liar: GroupPeer) -> None:
    """It answers every recall with a mean of its own, signed by itself."""
    codec = liar.group.stages[0].all_reduce.codec

    def answer(message: Recall) -> Reply:
        shard = Shard.of_message(message)
        said = Averaged(in_mean=4, contributors=4, weight=1024.0, counted=True, wire="float32")
        false = ShardMean(FALSE, said, EncodedShard("float32", NumberFormat("float32").encode(FALSE)))
        false = signed_by(liar.peer, codec, shard, false)
        assert false.encoded is not None
        recalled = Recalled(4, 4, 1024.0, "float32", reducer=liar.peer, signature=false.message.signature)
        return Reply(recalled, list(false.encoded.tensors))

    liar.group.stages[0].all_reduce.kept_means.answer_recall = answer


def tells_another_history(liar: GroupPeer) -> None:
    """Whoever gossips with it hears that it has applied other means, another one at each step."""
    gossip = liar.group.stages[0].gossip
    honest = gossip.answer

    def answer(peer: PeerId, message: GossipSteps) -> GossipedSteps:
        (own, *others) = honest(peer, message).replicas
        return GossipedSteps(((*own[:6], 1 + own[5], *own[7:]), *others))

    gossip.answer = answer


def huge(mean: torch.Tensor, number: int, asker: int) -> torch.Tensor:
    return 400 * FALSE  # also in a synchronous run more than could come of what others sent


def large(mean: torch.Tensor, number: int, asker: int) -> torch.Tensor:
    return 6 * FALSE


def another_for_each(mean: torch.Tensor, number: int, asker: int) -> torch.Tensor:
    changed = mean.clone()
    changed[0] += 1e-4 * (1 + asker)
    return changed


HUGE, OTHER = "huge means, recalls and tokens", "another mean for each, recalls and tokens"
LIES: dict[str, tuple[tuple[Callable[[GroupPeer], None], ...], Violation]] = {
    HUGE: (
        (changes_means(huge), answers_recalls, claims_tokens),
        Violation.FALSE_MEAN,
    ),
    OTHER: (
        (changes_means(another_for_each), answers_recalls, claims_tokens),
        Violation.EQUIVOCATION,
    ),
}


@dataclass
class Outcome:
    """Steps; movement per step along what all learn, and aside of it, by its largest share; violations."""

    steps: list[int]
    along: list[float]
    aside: list[float]
    violations: set[tuple[bool, Violation]]
    fetches: int
    calls: int  # of all replicas


async def train(replicas: int, schedule: str, lies: Sequence[Callable[[GroupPeer], None]]) -> Outcome:
    rate, settled_s, seconds = 256.0, 5.0, 30.0 if replicas == 4 else 15.0
    if (replicas, schedule) == (16, "synchronous"):  # they gossip fifty times a second, which costs the test time
        rate, settled_s, seconds = 2048.0, 1.0, 2.0
    averaging = {"exact_steps": 10**9, "gradient_wire": "float32"}
    if schedule == "synchronous":
        averaging = {}
    target = 256 * replicas
    async with GroupWorld(
        [rate] * replicas, target, AlikeStage, schedule={"kind": schedule}, averaging=averaging
    ) as world:
        world.suspends = True
        await asyncio.sleep(settled_s)  # what is usual is known
        liar, *honest = world.all
        world.bandwidths |= dict.fromkeys(world.peers, 1.0) | {liar.peer: 1e12}  # from now on it reduces every shard
        for lie in lies:
            lie(liar)
        await asyncio.sleep(seconds)
        steps = [peer.stage.step for peer in honest]
        moved = [-peer.stage.weights / (0.01 * peer.stage.step) for peer in honest]
        along = [float(it @ COMMON / (COMMON @ COMMON)) for it in moved]
        aside = [float((it - share * COMMON).norm() / COMMON.norm()) for it, share in zip(moved, along, strict=True)]
        violations = {(peer == liar.peer, violation) for it in honest for peer, violation, _ in it.violations}
        return Outcome(steps, along, aside, violations, sum(len(it.fetches) for it in honest), world.calls.total())


@pytest.mark.parametrize(
    ("lies", "replicas", "schedule"),
    [
        (HUGE, 4, "asynchronous"),
        (HUGE, 4, "synchronous"),
        (HUGE, 16, "asynchronous"),
        (HUGE, 16, "synchronous"),
        (OTHER, 4, "asynchronous"),
        (OTHER, 4, "synchronous"),
        (OTHER, 16, "asynchronous"),
    ],
)
def test_one_liar_moves_the_stage_no_further_than_honest_replicas_would_and_pays(
    lies: str, replicas: int, schedule: str
) -> None:
    told, violation = LIES[lies]
    outcome = run(train(replicas, schedule, told))
    assert min(outcome.steps) >= (20 if replicas == 4 else 10), outcome
    for along, aside in zip(outcome.along, outcome.aside, strict=True):
        assert abs(along - 1.0) < 0.02 and aside < 0.02, outcome
    assert all(is_liar for is_liar, _ in outcome.violations), "nobody honest pays"
    assert (True, violation) in outcome.violations
    assert outcome.fetches <= 3 * replicas, "the stage is one again after a few steps, and stays so"


def sends_nothing(liar: GroupPeer) -> None:
    """It contributes zeros, over all its tokens."""
    codec = liar.group.stages[0].all_reduce.codec
    honest = codec.make_contribution
    codec.make_contribution = lambda shard, values, weight, wire=None: honest(shard, 0 * values, weight)


@pytest.mark.parametrize(
    ("lies", "least"),
    [
        ((changes_means(large),), 0.98),
        ((changes_means(large), answers_recalls, claims_tokens), 0.98),
        ((sends_nothing,), 0.72),  # three quarters, since it is a fourth of the mean
    ],
    ids=["means six times as large", "with recalls and tokens", "nothing"],
)
def test_a_liar_that_is_not_shown_to_lie_moves_nothing_and_costs_no_honest_replica_a_point(
    lies: tuple[Callable[[GroupPeer], None], ...], least: float
) -> None:
    outcome = run(train(4, "asynchronous", lies))
    assert min(outcome.steps) >= 20
    for along, aside in zip(outcome.along, outcome.aside, strict=True):
        assert least <= along <= 1.02 and aside < 0.02, outcome
    assert not outcome.violations and outcome.fetches <= 12


@pytest.mark.parametrize("kept_by", [1, 2])
def test_a_recall_is_believed_if_the_reducer_signed_it_or_two_members_keep_the_same(kept_by: int) -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        asker, liar, *others = world.add(*identities(5))
        shard = next(
            shard
            for shard in (Shard(0, "gradient", 16 * epoch, 0) for epoch in range(100))
            if liar.peer not in reducers_of(asker.all_reduce.config.run, shard, asker.view)
        )

        def keep(member: Member, value: float, signer: PeerId) -> None:
            values = torch.full((PART_ELEMENTS,), value)
            encoded = EncodedShard("float32", NumberFormat("float32").encode(values))
            mean = ShardMean(values, Averaged(4, 4, 4.0, True, "float32"), encoded)
            member.all_reduce.kept_means.keep(shard, signed_by(signer, member.all_reduce.codec, shard, mean))

        async def recall() -> RoundResult:
            result = RoundResult.of_failed_shards(torch.zeros(PART_ELEMENTS), 0)
            await asker.all_reduce.kept_means.recall_failed_shards(shard, result)
            return result

        keep(liar, 1e30, liar.peer)
        assert (await recall()).failed_shards == 1, "nobody else has it, and the liar is no reducer of it"
        gone = identities(6)[-1]  # a member of the round that has left
        for member in others[:kept_by]:
            keep(member, 1.0, gone)
        result = await recall()
        assert result.failed_shards == (kept_by < 2) and (kept_by < 2 or float(result.mean[0]) == 1.0)
        first, _ = reducers_of(asker.all_reduce.config.run, shard, asker.view)
        keep(others[2], 2.0, first)
        if kept_by < 2:
            assert float((await recall()).mean[0]) == 2.0
        await world.close()

    run(main())


Signed = Literal["by one that is gone", "by nobody", "by nobody, and zero", "falsely"]


@pytest.mark.parametrize("signed", get_args(Signed))
@pytest.mark.parametrize("other", [None, "keeps none", "is gone", "keeps another"])
def test_what_the_only_other_replica_keeps_is_believed_and_what_another_could_contradict_is_not(
    signed: Signed, other: str | None
) -> None:
    """As a newcomer asks, whose only source has means of members that are gone, and zeros of rounds that failed."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        asker, keeper, *others = world.add(*identities(2 if other is None else 3))
        shard, codec = Shard(0, "gradient", 5, 0), keeper.all_reduce.codec
        gone = identities(6)[-1]

        def kept(value: float) -> ShardMean:
            if signed == "by nobody, and zero":
                return codec.make_zero_mean(shard, PART_ELEMENTS)
            values = torch.full((PART_ELEMENTS,), value)
            encoded = EncodedShard("float32", NumberFormat("float32").encode(values))
            mean = ShardMean(values, Averaged(3, 3, 3.0, True, "float32"), encoded)
            if signed == "by nobody":
                return mean
            mean = signed_by(gone, codec, shard, mean)
            if signed == "falsely":
                mean = replace(mean, message=replace(mean.message, weight=4.0))
            return mean

        keeper.all_reduce.kept_means.keep(shard, kept(1.0))
        if other == "keeps another" and signed != "by nobody, and zero":
            others[0].all_reduce.kept_means.keep(shard, kept(2.0))
        if other == "is gone":
            world.network.dead.add(others[0].peer)
        result = RoundResult.of_failed_shards(torch.zeros(PART_ELEMENTS), 0)
        await asker.all_reduce.kept_means.recall_failed_shards(shard, result)
        is_believed = other in (None, "is gone") and signed != "falsely"
        assert result.failed_shards == (not is_believed)
        if is_believed:
            assert bool((result.mean == (0.0 if signed == "by nobody, and zero" else 1.0)).all())
        await world.close()

    run(main())


def test_who_began_with_a_later_state_is_not_asked_for_a_mean_and_says_nothing_against_one() -> None:
    async def main() -> None:
        averaging = {"exact_steps": 10**9, "gradient_wire": "float32"}
        async with GroupWorld([512.0] * 3, 1024, FakeStage, averaging=averaging) as world:
            await asyncio.sleep(20.0)
            first, second, late = world.all
            known = first.group.stages[0].gossip.known_progress()
            began = 10
            report = replace(known[late.peer].direct, start_step=began)
            first.group.stages[0].gossip.known_progress = lambda: {
                **known,
                late.peer: replace(known[late.peer], direct=report),
            }
            keepers = [
                first.group.stages[0].round_contexts.context_of(Shard(0, "gradient", n, 0)).live_others for n in (9, 10)
            ]
            assert keepers == [{second.peer}, {second.peer, late.peer}]

    run(main())


def test_a_newcomer_that_others_take_for_a_reducer_signs_nothing_offends_nobody_and_is_one_with_them() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        newcomer, *others = members = world.add(*identities(3))
        for member in members:
            member.sees = {peer: 1e15 if peer == newcomer.peer else 1.0 for peer in world.members}
        newcomer.may_sign_mean = False
        for number in range(4):
            deadline = asyncio.get_running_loop().time() + world.round_s
            works = []
            for at, member in enumerate(members):
                values = torch.full((PART_ELEMENTS,), 1.0 + at)
                works.append(member.take_part(0, "gradient", number, values, 1.0, dict(member.view), deadline))
            for member, result in zip(members, await asyncio.gather(*works), strict=True):
                assert not result.failed_shards and float(result.mean[0]) == 2.0
                kept = member.all_reduce.kept_means.answer_recall(Recall(0, "gradient", number, 0, 0)).message
                assert isinstance(kept, Recalled) and kept.reducer in {other.peer for other in others}
                assert not member.violations
        await world.close()

    run(main())


def test_a_first_reducer_that_failed_its_members_cannot_give_them_a_mean_through_the_second() -> None:
    """A member of another view asks the second reducer as the first; the others come once the liar has failed them."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        liar, second, early, late = members = world.add(*identities(4))
        for member in members:
            member.sees = dict.fromkeys(world.members, 1.0) | {liar.peer: 1e30, second.peer: 1e15}
        early.sees = dict.fromkeys(world.members, 1.0) | {second.peer: 1e15}
        codec, shard = liar.all_reduce.codec, Shard(0, "gradient", 0, 0)

        async def fail(*_: object) -> Reply:
            raise PeerFailed("as the liar wants it")

        def answer(_: Recall) -> Reply:
            values = torch.full((PART_ELEMENTS,), 2.5)  # as large as an honest mean
            said = Averaged(in_mean=4, contributors=4, weight=4.0, counted=True, wire="float32")
            encoded = EncodedShard("float32", NumberFormat("float32").encode(values))
            false = signed_by(liar.peer, codec, shard, ShardMean(values, said, encoded))
            recalled = Recalled(4, 4, 4.0, "float32", reducer=liar.peer, signature=false.message.signature)
            return Reply(recalled, list(encoded.tensors))

        liar.all_reduce.answer_contribution = fail
        liar.all_reduce.kept_means.answer_recall = answer
        deadline = asyncio.get_running_loop().time() + world.round_s

        async def take_part(member: Member, value: float, after_s: float) -> RoundResult:
            await asyncio.sleep(after_s)
            values = torch.full((PART_ELEMENTS,), value)
            return await member.take_part(0, "gradient", 0, values, 1.0, dict(member.view), deadline)

        works = take_part(early, 1.0, 0.0), take_part(second, 2.0, 0.1), take_part(late, 3.0, 0.2)
        results = await asyncio.gather(*works)
        assert [float(result.mean[0]) for result in results] == [2.0, 2.0, 2.0]
        await world.close()

    run(main())


@pytest.mark.parametrize("first_to_come", ["the liar", "the reducer"])
def test_a_member_whose_deadline_is_short_ends_its_own_wait_and_not_that_of_the_others(first_to_come: str) -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        reducer, liar, *late = members = world.add(*identities(5))
        for member in members:
            member.sees = dict.fromkeys(world.members, 1.0) | {reducer.peer: 1e15}
        began = asyncio.get_running_loop().time()

        async def take_part(member: Member, value: float, after_s: float, until_s: float) -> RoundResult:
            await asyncio.sleep(after_s)
            values = torch.full((PART_ELEMENTS,), value)
            return await member.take_part(0, "gradient", 0, values, 1.0, dict(member.view), began + until_s)

        at_once = {"the liar": (0.2, 0.0), "the reducer": (0.0, 0.2)}[first_to_come]
        works = [
            take_part(reducer, 1.0, at_once[0], world.round_s),
            take_part(liar, 1.0, at_once[1], at_once[1] + 0.5),
            *(take_part(member, 4.0, 0.1 * world.round_s, world.round_s) for member in late),
        ]
        first, _, *others = await asyncio.gather(*works)
        assert first.contributors >= 4
        for result in (first, *others):
            assert not result.failed_shards and not result.lost_tokens
            assert float(result.mean[0]) == float(first.mean[0]) >= 2.75, "with the three that came later"
        await world.close()

    run(main())


@pytest.mark.parametrize(("start_step", "signs"), [(0, range(20)), (1, range(4, 20)), (10, range(13, 20))])
def test_a_replica_signs_means_of_rounds_that_it_cannot_have_seen_before_a_restart(
    start_step: int, signs: range
) -> None:
    assert [step for step in range(20) if may_sign(step, start_step)] == list(signs)


def test_a_reducer_that_keeps_its_mean_no_longer_signs_no_second_one() -> None:
    """The means of large rounds are dropped early; a contribution that comes after that must not make it a liar."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        reducer, *others = world.add(*identities(5))
        for member in world.members.values():
            member.sees = {peer: 1e15 if peer == reducer.peer else 1.0 for peer in world.members}
        signatures = []
        for early in (others[:2], others[2:]):
            deadline = asyncio.get_running_loop().time() + world.round_s
            values = torch.ones(PART_ELEMENTS) * len(signatures)
            works = [it.take_part(0, "gradient", 0, values, 1.0, dict(it.view), deadline) for it in early]
            await asyncio.gather(*works)
            kept = reducer.all_reduce.kept_means.answer_recall(Recall(0, "gradient", 0, 0, 0)).message
            assert isinstance(kept, Recalled)
            assert (kept.contributors == 2) == bool(kept.signature), "what it does not sign, nobody may recall"
            signatures.append(kept.signature)
            for record in reducer.all_reduce.kept_means._rounds.values():
                record.means.clear()
        assert len(signatures[0]) == 64 and not signatures[1]
        await world.close()

    run(main())


def test_a_signed_mean_takes_the_place_of_an_unsigned_one_and_no_other_takes_its_place() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        (member,) = world.add(*identities(1))
        codec, shard = member.all_reduce.codec, Shard(0, "gradient", 3, 0)

        def mean_of(value: float) -> ShardMean:
            values = torch.full((PART_ELEMENTS,), value)
            encoded = EncodedShard("float32", NumberFormat("float32").encode(values))
            return ShardMean(values, Averaged(4, 4, 4.0, True, "float32"), encoded)

        def kept() -> float:
            reply = member.all_reduce.kept_means.answer_recall(Recall(0, "gradient", 3, 0, 0))
            return float(codec.decode(shard, EncodedShard("float32", reply.tensors), PART_ELEMENTS)[0])

        member.all_reduce.kept_means.keep(shard, mean_of(1.0))
        member.all_reduce.kept_means.keep(shard, mean_of(2.0))
        assert kept() == 1.0
        member.all_reduce.kept_means.keep(shard, signed_by(member.peer, codec, shard, mean_of(3.0)))
        member.all_reduce.kept_means.keep(shard, signed_by(member.peer, codec, shard, mean_of(4.0)))
        member.all_reduce.kept_means.keep(shard, mean_of(5.0))
        assert kept() == 3.0
        await world.close()

    run(main())


def test_weights_beyond_what_a_member_can_have_counted_are_lowered_and_exact_ones_are_not() -> None:
    async def main(exact: bool, claimed: float) -> float:
        world = World(PART_ELEMENTS, exact=exact)
        members = world.add(*identities(4))
        for member in members:
            member.token_bounds = dict.fromkeys(identities(4), 3.0)
            member.all_reduce.config = replace(member.all_reduce.config, step_tokens=lambda _: 4.0)
        deadline = asyncio.get_running_loop().time() + world.round_s
        ones = torch.ones(PART_ELEMENTS)
        works = [m.take_part(0, "gradient", 0, ones, 1.0, dict(m.view), deadline) for m in members[:3]]
        liar = members[3].take_part(0, "gradient", 0, -ones, claimed, dict(members[3].view), deadline)
        results = await asyncio.gather(*works, liar)
        await world.close()
        return float(results[0].mean[0])

    assert run(main(exact=True, claimed=1.0)) == pytest.approx((3 - 1) / 4)
    assert run(main(exact=True, claimed=1.9)) == pytest.approx((3 - 1.9) / 4.9), "within what a step may have"
    assert run(main(exact=True, claimed=1e8)) == pytest.approx(0.0, abs=1e-6)
    assert run(main(exact=False, claimed=1e8)) == pytest.approx((3 - 1.8) / 4.8), "three eighths of four"


def patched(data: bytearray, wanted: int) -> bytes:
    """The data with its last four bytes such that its CRC-32 is `wanted`: four equations, solved backwards."""
    data = data[:-4]
    state, register = zlib.crc32(bytes(data)) ^ 0xFFFFFFFF, wanted ^ 0xFFFFFFFF
    picked = []
    for _ in range(4):
        at = next(i for i in range(256) if _table(i) >> 24 == register >> 24)
        picked.append(at)
        register = ((register ^ _table(at)) << 8) & 0xFFFFFFFF
    tail = bytearray()
    for at in reversed(picked):
        tail.append((state ^ at) & 0xFF)
        state = (state >> 8) ^ _table((state ^ tail[-1]) & 0xFF)
    return bytes(data + tail)


def _table(index: int) -> int:
    value = index
    for _ in range(8):
        value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
    return value


def test_two_means_that_were_made_to_have_one_crc_have_two_history_hashes() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(0, 1e-3, 4096).astype("<f4").tobytes()
    other = patched(bytearray((-5 * np.frombuffer(mean, "<f4")).tobytes()), zlib.crc32(mean))
    assert other != mean and zlib.crc32(other) == zlib.crc32(mean), "as a reducer can choose it"
    first, second = (extend_history({0: INITIAL_HASH}, 1, hash_of(data)) for data in (mean, other))
    assert first[1] != second[1]


def test_a_signature_holds_for_one_shard_one_round_and_one_mean() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        (member,) = world.add(*identities(1))
        codec, shard = member.all_reduce.codec, Shard(0, "gradient", 3, 0)
        values = torch.ones(PART_ELEMENTS)
        encoded = EncodedShard("float32", NumberFormat("float32").encode(values))
        mean = signed_by(member.peer, codec, shard, ShardMean(values, Averaged(4, 4, 4.0, True, "float32"), encoded))
        assert codec.is_signed(shard, mean)
        for elsewhere in (shard._replace(round=4), shard._replace(position=1), Shard(0, "fragment", 3, 0, 2)):
            assert not codec.is_signed(elsewhere, mean)
        for said in (
            replace(mean.message, weight=5.0),
            replace(mean.message, wanted_slices=2),
            replace(mean.message, reducer=identities(2)[1]),
            replace(mean.message, reducer=""),
            replace(mean.message, signature=b""),
        ):
            assert not codec.is_signed(shard, replace(mean, message=said))
        assert codec.is_signed(shard, replace(mean, message=replace(mean.message, counted=False))), (
            "one for all members"
        )
        await world.close()

    run(main())


@pytest.mark.parametrize("rates", [[256.0] * 4, [1000.0, 300.0, 100.0, 30.0], [2000.0, 20.0, 20.0, 20.0]])
@pytest.mark.parametrize("schedule", ["asynchronous", "synchronous"])
def test_honest_replicas_of_any_speed_offend_nobody(rates: list[float], schedule: str) -> None:
    async def main() -> None:
        averaging = {"exact_steps": 10**9, "gradient_wire": "float32"} if schedule == "asynchronous" else {}
        seconds = 60.0 if schedule == "asynchronous" else 15.0
        async with GroupWorld(rates, 1024, FakeStage, schedule={"kind": schedule}, averaging=averaging) as world:
            world.suspends = True
            await asyncio.sleep(seconds)
            await world.kill(world.all[2])
            await asyncio.sleep(seconds)
            for peer in world.all:
                assert not peer.violations
                assert not peer.of(StageDiverged)
            rounds = [done for peer in world.all for done in peer.of(RoundDone)]
            assert sum(done.failed_parts for done in rounds) <= 0.05 * len(rounds)

    run(main())


COMBINED: dict[str, tuple[Callable[[GroupPeer], None], ...]] = {
    "asynchronous": (claims_tokens, tells_tokens_of_means, tells_false_progress, tells_another_history),
    # The tokens that it reports of a synchronous step are believed, see docs/understand/limits.md.
    "synchronous": (claims_tokens, tells_tokens_of_means, tells_another_history),
}


@pytest.mark.parametrize("replicas", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", COMBINED)
def test_a_liar_that_combines_what_is_no_violation_leaves_steps_movement_and_traffic_as_they_are(
    schedule: str, replicas: int
) -> None:
    """It claims all bandwidth, another history, tokens of its own share and of steps, closed shares and speed."""
    honest = run(train(replicas, schedule, ()))
    beside_it = run(train(replicas, schedule, COMBINED[schedule]))
    assert min(beside_it.steps) == pytest.approx(min(honest.steps), rel=0.02)
    assert max(beside_it.steps) == pytest.approx(max(honest.steps), rel=0.02)
    assert min(beside_it.along) == pytest.approx(min(honest.along), rel=0.02)
    assert max(beside_it.aside) <= max(honest.aside) + 0.02
    assert not beside_it.fetches and beside_it.calls <= 1.02 * honest.calls


@pytest.mark.parametrize("schedule", COMBINED)
def test_a_newcomer_beside_a_liar_that_combines_its_lies_becomes_what_the_honest_replicas_are(schedule: str) -> None:
    averaging = {"exact_steps": 10**9, "gradient_wire": "float32"} if schedule == "asynchronous" else {}

    async def main() -> None:
        world = GroupWorld([256.0] * 5, 1024, AlikeStage, schedule={"kind": schedule}, averaging=averaging)
        world.suspends = True
        liar, *honest, newcomer = world.all
        async with world:
            await world.kill(newcomer)
            await asyncio.sleep(5.0)
            world.bandwidths |= dict.fromkeys(world.peers, 1.0) | {liar.peer: 1e12}
            for lie in COMBINED[schedule]:
                lie(liar)
            await asyncio.sleep(10.0)
            world.network.dead.clear()
            newcomer.start()
            await asyncio.sleep(20.0)
            await at_one_step(*honest, newcomer)
            assert newcomer.stage.step >= 20 and len(newcomer.fetches) <= 2
            assert_equal_bits(*honest, newcomer)
            assert not any(peer.of(StageDiverged) or peer.fetches for peer in honest)

    run(main())
