"""A round ends by its deadline; a part is the mean of at least the live members, or of this replica alone."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from agora_protocol.errors import AgoraError, ProtocolError
from agora_protocol.ids import PeerId
from agora_protocol.limits import PART_ELEMENTS
from agora_protocol.messages import Averaged, Contribute, Recall
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agora.core.calls import Reply
from agora.observe.events import PartFailed, RoundDone
from agora.replica import all_reduce, kept_means
from agora.replica.all_reduce import MAX_RUNNING_SYNCS, RECALL_FRACTION
from agora.replica.kept_means import MIN_KEPT_ROUNDS
from agora.replica.number_formats import NumberFormat
from agora.replica.reducers import ROUNDS_PER_REDUCER, reducers_of
from agora.replica.rounds import RoundResult
from agora.replica.shard_codec import (
    INT8_ROUNDS,
    WIRE_KINDS,
    EncodedShard,
    RoundKind,
    Shard,
    ShardCodec,
    ShardMean,
    cut_into_shards,
)
from agora.replica.trust import MagnitudeBound
from agora.swarm.peer_score import Violation
from tests.replica.world import RUN, Member, World, identities, signed_by
from tests.virtual_time import run

SIZE = 3 * PART_ELEMENTS + 1024


def values_of(index: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(index)) * 0.01 + torch.linspace(-1, 1, SIZE)


async def one_round(
    world: World,
    members: list[Member],
    weights: list[float],
    number: int = 0,
    kind: RoundKind = "fragment",
    values: list[torch.Tensor] | None = None,
) -> list[RoundResult]:
    """Of all members, each with its `values_of` unless told."""
    values = values or [values_of(i) for i in range(len(members))]
    deadline = asyncio.get_running_loop().time() + world.round_s
    works = [
        m.take_part(0, kind, number, v, w, m.view, deadline) for m, v, w in zip(members, values, weights, strict=True)
    ]
    results = await asyncio.gather(*works)
    assert asyncio.get_running_loop().time() <= deadline + 0.1, "a round ends by its deadline"
    return results


def mean_of(indices: list[int], weights: list[float]) -> torch.Tensor:
    total = sum(weights[i] for i in indices)
    return sum(values_of(i) * (weights[i] / total) for i in indices)


def reducers_in(world: World, part: int, number: int = 0, kind: RoundKind = "fragment") -> tuple[PeerId, PeerId]:
    config = next(iter(world.members.values())).all_reduce.config
    first, second = reducers_of(
        config.run, Shard(0, kind, number, part, world.fragments_in(kind)), dict.fromkeys(world.members, 0.0)
    )
    assert second is not None
    return first, second


def reducer_of_shard(world: World, part: int, number: int = 0) -> tuple[Member, Member]:
    first, second = reducers_in(world, part, number)
    return world.members[first], world.members[second]


@pytest.mark.parametrize("kind", ["fragment", "gradient"])
@pytest.mark.parametrize(("wire", "tolerance"), [("float32", 1e-6), ("bf16", 1.2e-2), ("int8", 3.2e-2)])
def test_everyone_gets_the_same_bits_near_the_weighted_mean(wire: str, tolerance: float, kind: RoundKind) -> None:
    async def main() -> None:
        world = World(SIZE, fragment_wire=wire, gradient_wire=wire)
        members = world.add(*identities(4))
        weights, began = [100.0, 100.0, 150.0, 50.0], asyncio.get_running_loop().time()
        results = await one_round(world, members, weights, kind=kind)
        true = mean_of([0, 1, 2, 3], weights)
        for result in results:
            assert result.failed_shards == 0 and result.contributors == 4 and result.weight == 400.0
            assert result.is_weight_confirmed, "more than one of them has reduced a shard"
            assert torch.equal(result.mean, results[0].mean), "also of the parts that it reduces itself"
        wrong = results[0].mean - true
        assert float(wrong.abs().max()) < tolerance, "two steps of the lattice at values near 1"
        assert abs(float(wrong.mean())) < 2e-4, "and right in the mean"
        assert asyncio.get_running_loop().time() < began + 1.0, "nobody waits for a window when everyone is there"
        await world.close()

    run(main())


def test_int8_rounds_once_where_members_agree() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS, "int8")
        members = world.add(*identities(3))
        same, part = values_of(1)[:PART_ELEMENTS], Shard(0, "fragment", 0, 0, 1)
        codec = members[0].all_reduce.codec
        sent = codec.decode(part, codec.encode(part, same, "int8"), PART_ELEMENTS)
        for result in await one_round(world, members, [1.0] * 3, values=[same] * 3):
            moved = float((result.mean != sent).double().mean())
            assert moved < 0.01, "only blocks whose exponent is another by then are rounded again"
        await world.close()

    run(main())


def test_a_member_that_fills_a_reducer_with_contributions_has_a_part_of_its_memory_and_takes_nothing_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sends all shards of five rounds at once; each is refused before it is decoded."""
    shard_bytes = 4 * PART_ELEMENTS + all_reduce.CONTRIBUTION_BYTES
    monkeypatch.setattr(all_reduce, "MAX_GATHERED_BYTES", 48 * shard_bytes)

    async def main() -> None:
        world = World(3 * PART_ELEMENTS)
        reducer, greedy, honest = world.add(*identities(3))
        own, decoded = reducer.all_reduce, 0
        true_decode = own.codec.decode

        def decode(*arguments: Any) -> torch.Tensor:
            nonlocal decoded
            decoded += arguments[1].tensors is tensors
            return true_decode(*arguments)

        own.codec.decode = decode
        tensors = NumberFormat("float32").encode(torch.zeros(PART_ELEMENTS))

        async def send(member: Member, number: int, position: int) -> str:
            message = Contribute(
                stage=0,
                what="slice",
                round=number,
                part=position,
                slices=1,
                weight=1.0,
                first_owner_failed=False,
                wire="float32",
                deadline_ms=1000,
            )
            try:
                await own.contribute(member.peer, message, tensors, asyncio.get_running_loop().time() + 1.0)
            except (AgoraError, TimeoutError) as error:
                return getattr(error, "code", "timeout")
            return ""

        sent = [send(greedy, number, position) for number in range(5) for position in range(3)]
        answers = await asyncio.gather(*sent, *(send(honest, 2, position) for position in range(3)))
        assert answers[:15].count("busy") == 9 and decoded == 6 + 3, "a sixth of the bytes each, of which it wants more"
        assert "busy" not in answers[15:]
        assert not own._gathered_bytes.held
        await world.close()

    run(main())


def test_no_weight_counts_for_more_than_two_nths_and_who_weighs_nothing_takes_without_giving() -> None:
    async def main() -> None:
        world = World(SIZE)
        members = world.add(*identities(4))
        weights = [1000.0, 1.0, 1.0, 0.0]
        results = await one_round(world, members, weights)
        capped = [4.0, 1.0, 1.0]
        true = mean_of([0, 1, 2], capped)
        assert torch.allclose(results[3].mean, true, atol=1e-6)
        assert results[3].contributors == 4
        await world.close()

    run(main())


@pytest.mark.parametrize("kind", ["fragment", "gradient"])
def test_when_all_weigh_nothing_there_is_no_mean(kind: RoundKind) -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(3))
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(3)]
        for own, result in zip(chosen, await one_round(world, members, [0.0] * 3, 0, kind, chosen), strict=True):
            assert result.failed_shards == 1 and torch.equal(result.mean, own), "each has its own values"
        await world.close()

    run(main())


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_count_by_their_tokens_in_synchronous_runs_and_are_capped_in_others(exact: bool) -> None:
    async def main() -> None:
        world = World(SIZE, exact=exact)
        members = world.add(*identities(3))
        weights = [1000.0, 1.0, 1.0]
        results = await one_round(world, members, weights, kind="gradient")
        true = mean_of([0, 1, 2], weights if exact else [4.0, 1.0, 1.0])
        assert all(torch.allclose(result.mean, true, atol=1e-6) for result in results)
        await world.close()

    run(main())


@pytest.mark.parametrize("kind", ["fragment", "gradient"])
def test_a_reducer_keeps_its_shard_for_sixteen_rounds_and_then_it_is_anothers_turn(kind: RoundKind) -> None:
    async def main() -> None:
        world = World(SIZE, slices=5)
        world.add(*identities(4))
        every, firsts = 5 if kind == "fragment" else 1, set()
        for turn in range(20):
            numbers = range(turn * ROUNDS_PER_REDUCER, (turn + 1) * ROUNDS_PER_REDUCER)
            ((first, _),) = {reducers_in(world, 2, every * number, kind) for number in numbers}
            firsts.add(first)
        assert firsts == set(world.members), "everybody in its turn"
        assert len({reducers_in(world, 2, number) for number in range(5)}) > 1, "slices have each their own"

    run(main())


def test_a_reducer_that_is_dead_costs_its_shards_a_second_reducer() -> None:
    async def main() -> None:
        world = World(SIZE)
        members = world.add(*identities(4))
        weights = [1.0] * 4
        victim, _ = reducer_of_shard(world, 0)
        world.network.dead.add(victim.peer)
        living = [i for i, m in enumerate(members) if m is not victim]
        results = await one_round(world, members, weights)
        for index in living:
            assert results[index].failed_shards == 0
            assert torch.allclose(results[index].mean, mean_of(living, weights), atol=1e-6)
        assert results[members.index(victim)].failed_shards == 4
        await world.close()

    run(main())


def test_a_second_reducer_whose_recall_has_ended_waits_no_longer_than_for_the_last_member() -> None:
    """The first reducer is dead; the last member contributes nothing and turns out not to answer after the recall."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(3))
        first, second = reducer_of_shard(world, 0)
        (last,) = (member for member in members if member not in (first, second))
        world.network.dead.add(first.peer)
        part, loop, values = Shard(0, "fragment", 0, 0, 1), asyncio.get_running_loop(), values_of(0)[:PART_ELEMENTS]
        began = loop.time()
        sent = NumberFormat("float32").encode(values)
        own = second.all_reduce.contribute(second.peer, asking(0, second=True), sent, began + world.round_s)
        waiting = asyncio.create_task(own)
        await asyncio.sleep(RECALL_FRACTION * world.round_s)
        assert not waiting.done(), "the last member is waited for"
        second.all_reduce.mark_unresponsive(last.peer, part)
        mean = await waiting
        assert loop.time() - began < 1.5 * RECALL_FRACTION * world.round_s
        assert torch.equal(mean.values, values)
        await world.close()

    run(main())


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_reducer_that_dies_after_some_answers_leaves_one_average_for_all(nth: int) -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(4))
        victim, _ = reducer_of_shard(world, 0)
        victim.dies_at = ("averaging.answered", nth)
        deadline = asyncio.get_running_loop().time() + world.round_s
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(4)]
        works = [m.take_part(0, "fragment", 0, v, 1.0, m.view, deadline) for m, v in zip(members, chosen, strict=True)]
        results = await asyncio.gather(*works)
        assert asyncio.get_running_loop().time() <= deadline
        living = [i for i, m in enumerate(members) if m is not victim]
        ends = [results[i].mean for i in living]
        assert all(results[i].failed_shards == 0 for i in living)
        assert all(torch.allclose(end, ends[0], atol=1e-6) for end in ends), "survivors hold one average"
        everyone, survivors = sum(chosen) / 4, sum(chosen[i] for i in living) / 3
        assert torch.allclose(ends[0], everyone, atol=1e-6) or torch.allclose(ends[0], survivors, atol=1e-6)
        await world.close()

    run(main())


def test_a_hanging_reducer_and_a_hanging_member_hold_nobody_beyond_the_deadline() -> None:
    async def main() -> None:
        world = World(SIZE)
        members = world.add(*identities(4))
        victim, _ = reducer_of_shard(world, 1)
        world.network.silent.add(victim.peer)
        living = [i for i, m in enumerate(members) if m is not victim]
        deadline = asyncio.get_running_loop().time() + world.round_s
        works = [members[i].take_part(0, "fragment", 0, values_of(i), 1.0, members[i].view, deadline) for i in living]
        results = await asyncio.gather(*works)
        assert asyncio.get_running_loop().time() <= deadline
        for index, result in zip(living, results, strict=True):
            assert result.failed_shards == 0 and result.contributors == 3
            assert torch.allclose(result.mean, mean_of(living, [1.0] * 4), atol=1e-6)
        await world.close()

    run(main())


def test_a_sender_that_dies_between_its_shards_is_in_those_it_sent() -> None:
    async def main() -> None:
        world = World(SIZE)
        members = world.add(*identities(4))
        victim = members[2]
        victim.dies_at = ("averaging.sending", 3)
        results = await one_round(world, members, [1.0] * 4)
        for index in (0, 1, 3):
            assert results[index].failed_shards == 0
            for part, cut in enumerate(torch.arange(SIZE).split(PART_ELEMENTS)):
                end = results[index].mean[cut]
                true = [mean_of(who, [1.0] * 4)[cut] for who in ([0, 1, 2, 3], [0, 1, 3])]
                assert any(torch.allclose(end, it, atol=1e-6) for it in true), part
        await world.close()

    run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_one_that_is_gone_is_waited_for_once_and_not_at_every_shard(hangs: bool) -> None:
    """Many more parts than are asked for at once: else a window each would be longer than the round."""

    async def main() -> None:
        world = World(60 * PART_ELEMENTS, "float32")
        members = world.add(*identities(4))
        victim = members[3]
        (world.network.silent if hangs else world.network.dead).add(victim.peer)
        values = [torch.full((world.size,), float(i)) for i in (5, 6, 7)]
        began = asyncio.get_running_loop().time()
        works = [
            m.take_part(0, "fragment", 0, v, 1.0, m.view, began + world.round_s)
            for m, v in zip(members, values, strict=False)
        ]
        results = await asyncio.gather(*works)
        took = asyncio.get_running_loop().time() - began
        assert took < (0.95 if hangs else 0.5) * world.round_s
        for result in results:
            assert result.failed_shards == 0 and result.contributors == 3
            torch.testing.assert_close(result.mean, torch.full((world.size,), 6.0))

    run(main())


def test_members_with_different_views_get_smaller_averages_and_never_wait_beyond_the_deadline() -> None:
    async def main() -> None:
        world = World(SIZE)
        members = world.add(*identities(4))
        a, b, c, d = (m.peer for m in members)
        members[0].sees = members[1].sees = {a: 0.0, b: 0.0}
        members[2].sees = {b: 0.0, c: 0.0, d: 0.0}
        results = await one_round(world, members, [1.0] * 4)
        for index, result in enumerate(results):
            assert math.isfinite(float(result.mean.abs().max())) and result.failed_shards == 0
            assert float((result.mean - torch.linspace(-1, 1, SIZE)).abs().max()) < 0.06
        await world.close()

    run(main())


def asking(part: int, number: int = 0, second: bool = False) -> Contribute:
    return Contribute(0, "slice", number, part, 1, 1.0, second, "float32", 15_000)


@pytest.mark.parametrize("liar_begins", [True, False])
def test_nobody_makes_a_first_reducer_ask_for_averages_that_it_has_not_given(liar_begins: bool) -> None:
    """A member that says it comes to the second reducer would be asked what the first one gave, whatever it is."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(4))
        first, _ = reducer_of_shard(world, 0)
        liar = next(m for m in members if m is not first)
        false = torch.full((PART_ELEMENTS,), 3.0)
        encoded = EncodedShard("float32", NumberFormat("float32").encode(false))
        liar.all_reduce.kept_means.keep(
            Shard(0, "fragment", 0, 0, 1), ShardMean(false, Averaged(4, 4, 4.0, True, "float32"), encoded)
        )
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(4)]
        honest = [i for i, m in enumerate(members) if m is not liar]
        deadline = asyncio.get_running_loop().time() + world.round_s
        sent = NumberFormat("float32").encode(chosen[members.index(liar)])

        async def lies() -> None:
            await asyncio.sleep(0.0 if liar_begins else 0.015)
            await liar.port.call(first.peer, asking(0, second=True), sent, deadline=deadline)

        async def others() -> list[RoundResult]:
            works = [members[i].take_part(0, "fragment", 0, chosen[i], 1.0, members[i].view, deadline) for i in honest]
            return await asyncio.gather(*works)

        results, _ = await asyncio.gather(others(), lies())
        for index, result in zip(honest, results, strict=True):
            assert result.failed_shards == 0 and result.contributors == 4
            assert torch.allclose(result.mean, sum(chosen) / 4, atol=1e-6)
        await world.close()

    run(main())


def test_a_member_that_comes_long_before_the_others_leaves_them_their_average() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(4))
        first, _ = reducer_of_shard(world, 0)
        early = next(m for m in members if m is not first)
        sent = NumberFormat("float32").encode(values_of(9)[:PART_ELEMENTS])
        loop = asyncio.get_running_loop()
        reply = await early.port.call(first.peer, asking(0), sent, deadline=loop.time() + 15.0)
        assert isinstance(reply.message, Averaged) and reply.message.contributors == 1
        on_time = [m for m in members if m is not early]
        began, chosen = loop.time(), [values_of(i)[:PART_ELEMENTS] for i in range(3)]
        results = await one_round(world, on_time, [1.0] * 3, values=chosen)
        assert loop.time() < began + 1.0, "nobody waits for it"
        for result in results:
            assert result.failed_shards == 0 and result.contributors == 3
            assert torch.allclose(result.mean, sum(chosen) / 3, atol=1e-6)
        await world.close()

    run(main())


def test_a_peer_that_is_no_member_may_have_an_average_and_is_in_none() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(4))
        inside, stranger = members[:3], members[3]
        for member in inside:
            member.sees = dict.fromkeys((m.peer for m in inside), 0.0)
        first, _ = reducers_of(stranger.all_reduce.config.run, Shard(0, "fragment", 0, 0, 1), inside[0].view)
        sent = NumberFormat("float32").encode(torch.full((PART_ELEMENTS,), 7.0))
        deadline = asyncio.get_running_loop().time() + world.round_s
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(3)]
        asked = asyncio.create_task(stranger.port.call(first, asking(0), sent, deadline=deadline))
        results = await one_round(world, inside, [1.0] * 3, values=chosen)
        for result in results:
            assert result.failed_shards == 0 and result.contributors == 3
            assert torch.allclose(result.mean, sum(chosen) / 3, atol=1e-6)
        reply = await asked
        told = NumberFormat("float32").decode(reply.tensors, PART_ELEMENTS)
        assert isinstance(reply.message, Averaged) and not reply.message.counted
        assert torch.equal(told, results[0].mean), "the same bytes as everybody's"
        await world.close()

    run(main())


def test_what_no_member_may_send_is_refused_and_a_strike() -> None:
    async def main() -> None:
        world = World(SIZE)
        members = world.add(*identities(3))
        honest, hostile = members[0], members[2]
        part = reducer_of_shard(world, 0)[0]
        bad_nan = torch.full((PART_ELEMENTS,), float("nan"))
        codec = NumberFormat("float32")
        good = codec.encode(values_of(0)[:PART_ELEMENTS])
        loop = asyncio.get_running_loop()

        def ask(weight: float = 1.0, index: int = 0, wire: str = "float32") -> Contribute:
            return Contribute(0, "slice", 0, index, 1, weight, False, wire, 15_000)

        for request, tensors in (
            (ask(), codec.encode(bad_nan)),
            (ask(), codec.encode(values_of(0)[:100])),
            (ask(), NumberFormat("bf16").encode(values_of(0)[:PART_ELEMENTS])),
            (ask(wire="bf16"), good),
            (ask(wire="normal2"), NumberFormat("normal3").encode(values_of(0)[:PART_ELEMENTS])),
            (ask(), good + good),
            (ask(1e12), good),
            (ask(1.0, 99), good),
        ):
            with pytest.raises(ProtocolError):
                await hostile.port.call(part.peer, request, tensors, deadline=loop.time() + 1)
        for wrong in (-1.0, math.nan, math.inf):
            with pytest.raises(ProtocolError):
                ask(wrong)
        waiting = asyncio.create_task(honest.port.call(part.peer, ask(), good, deadline=loop.time() + 15))
        await asyncio.sleep(0.1)
        with pytest.raises(ProtocolError):
            await honest.port.call(part.peer, ask(), good, deadline=loop.time() + 1)
        await waiting
        assert len(world.strikes) == 9
        await world.close()

    run(main())


@pytest.mark.parametrize("kind", ["fragment", "gradient"])
@pytest.mark.parametrize("where", [slice(None), slice(1, None, 16)], ids=["everywhere", "between"])
def test_an_absurd_mean_is_rejected_and_the_own_values_stay(
    where: slice, kind: RoundKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(MagnitudeBound, "largest_to_send", lambda bound, sent: math.inf)  # heeds nothing
        world = World(PART_ELEMENTS)
        members = world.add(*identities(2))
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(2)]
        for number in range(2):
            if number == 1:
                chosen[1] = chosen[1].clone()
                chosen[1][where] += 50.0
            results = await one_round(world, members, [1.0] * 2, number, kind, chosen)
            done = [event for event in members[0].events if isinstance(event, RoundDone)]
            assert done[-1].failed_parts == number == results[0].failed_shards
        assert torch.equal(results[0].mean, chosen[0])
        assert "the mean has" in [e for e in members[0].events if isinstance(e, PartFailed)][0].reason
        await world.close()

    run(main())


def test_a_shard_that_this_peer_itself_has_no_mean_of_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def contribute(*_: object) -> ShardMean:
        raise TimeoutError

    async def main() -> None:
        world = World(PART_ELEMENTS)
        (alone,) = world.add(*identities(1))
        monkeypatch.setattr(alone.all_reduce, "contribute", contribute)
        (result,) = await one_round(world, [alone], [1.0], values=[values_of(0)[:PART_ELEMENTS]])
        (failed,) = [event for event in alone.events if isinstance(event, PartFailed)]
        assert result.failed_shards == 1 and failed.reason == f"{alone.peer}: no answer in time"
        await world.close()

    run(main())


def keep_means(keeper: Member, first: Shard, weight: float) -> None:
    """The member keeps a mean for each part of a round, said to be over `weight` tokens; of the last one, 0."""
    cuts = cut_into_shards(SIZE)
    for index, cut in enumerate(cuts):
        part, values = first._replace(position=index), values_of(0)[cut]
        mean = keeper.all_reduce.codec.average(part, [values, values], [300.0, 200.0], None)
        assert mean is not None
        mean = replace(mean, message=replace(mean.message, weight=weight))
        reducer, _ = reducers_of(keeper.all_reduce.config.run, part, keeper.view)
        mean = signed_by(reducer, keeper.all_reduce.codec, part, mean)
        is_last = index == len(cuts) - 1
        keeper.all_reduce.kept_means.keep(
            part, keeper.all_reduce.codec.make_zero_mean(part, len(values)) if is_last else mean
        )


@pytest.mark.parametrize(("said", "counts_as"), [(500.0, 500.0), (1e21, 1e9)])
def test_a_recalled_step_has_the_tokens_of_the_shards_that_were_averaged_but_no_absurd_number(
    said: float, counts_as: float
) -> None:
    """A part that nobody could average has no tokens; the step is not empty for that."""

    async def main() -> None:
        world = World(SIZE)
        keeper, asker = world.add(*identities(2))
        first = Shard(0, "gradient", 5, 0)
        keep_means(keeper, first, said)

        cuts = cut_into_shards(SIZE)
        result = RoundResult.of_failed_shards(torch.zeros(SIZE), 0)
        await asker.all_reduce.kept_means.recall_failed_shards(first, result)
        assert not result.failed_shards and not result.mean[cuts[-1]].any() and result.mean[cuts[0]].any()
        assert result.weight == counts_as == min(said, asker.all_reduce.config.max_weight)
        await world.close()

    run(main())


def test_the_tokens_of_a_step_are_the_median_of_all_its_shards_however_few_were_recalled() -> None:
    """The last shard that is recalled decides them as little as any other."""

    async def main() -> None:
        world = World(SIZE)
        keeper, asker = world.add(*identities(2))
        first = Shard(0, "gradient", 5, 0)
        keep_means(keeper, first, 900.0)
        result = RoundResult.of_failed_shards(torch.zeros(SIZE), 0)
        shards = len(result.averaged)
        assert shards >= 3
        for position in range(1, shards):
            result.averaged[position], result.reported_weights[position] = True, 500.0
        await asker.all_reduce.kept_means.recall_failed_shards(first, result)
        assert not result.failed_shards and result.reported_weights[0] == 900.0 and result.weight == 500.0
        await world.close()

    run(main())


@pytest.mark.parametrize("exact", [False, True])
def test_the_means_of_an_only_member_are_kept_for_who_comes_later(exact: bool) -> None:
    """It has stepped along them: a newcomer whose state is some steps older has to step along the same."""

    async def main() -> None:
        world = World(SIZE, exact=exact)
        keeper, newcomer = world.add(*identities(2))
        keeper.sees = {keeper.peer: 0.0}
        taken = await keeper.take_part(
            0, "gradient", 5, values_of(0), 64.0, keeper.sees, asyncio.get_running_loop().time() + 5
        )
        assert not taken.failed_shards and taken.weight == 64.0 and torch.equal(taken.mean, values_of(0))
        assert not [event for event in keeper.events if isinstance(event, PartFailed)]

        recalled = RoundResult.of_failed_shards(torch.zeros(SIZE), 0)
        await newcomer.all_reduce.kept_means.recall_failed_shards(Shard(0, "gradient", 5, 0), recalled)
        assert not recalled.failed_shards and torch.equal(recalled.mean, taken.mean) and recalled.weight == 64.0
        await world.close()

    run(main())


def test_a_reducer_that_makes_up_tokens_makes_no_absurd_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2^63 of them would not fit into any record."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(2))
        reducer, _ = reducer_of_shard(world, 0)
        average = reducer.all_reduce.codec.average

        def lie(*arguments: Any) -> ShardMean | None:
            mean = average(*arguments)
            return mean and replace(mean, message=replace(mean.message, weight=1e21))

        monkeypatch.setattr(reducer.all_reduce.codec, "average", lie)
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(2)]
        for result in await one_round(world, members, [1.0] * 2, values=chosen):
            assert result.weight == reducer.all_reduce.config.weight_limit and not result.failed_shards
        await world.close()

    run(main())


@pytest.mark.parametrize(("size", "is_false"), [(7.0, False), (70.0, True)])
def test_a_liar_that_reduces_every_shard_never_raises_what_is_accepted(size: float, is_false: bool) -> None:
    """Its answers are refused, the second reducer's are taken: only these count as usual."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(3))
        liar, lies = members[2], 0
        for member in members:
            member.sees = {peer.peer: 1e15 if peer is liar else 1.0 for peer in members}
        contribute = liar.all_reduce.answer_contribution

        async def lying(peer: PeerId, message: Contribute, *rest: Any) -> Reply:
            nonlocal lies
            answer = await contribute(peer, message, *rest)
            if peer == liar.peer or message.round == 0:
                return answer
            lies += 1
            shard, codec = Shard.of_message(message), liar.all_reduce.codec
            tensors = NumberFormat("float32").encode(torch.full((PART_ELEMENTS,), size))
            assert isinstance(answer.message, Averaged)
            lie = signed_by(liar.peer, codec, shard, codec.decode_mean(shard, tensors, PART_ELEMENTS, answer.message))
            return Reply(lie.message, tensors)

        liar.all_reduce.answer_contribution = lying
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(3)]
        for number in range(6):
            results = await one_round(world, members, [1.0] * 3, number, values=chosen)
            for result in results:
                assert float((result.mean - torch.linspace(-1, 1, SIZE)[:PART_ELEMENTS]).abs().max()) < 0.06
        assert lies == 10
        for member in members[:2]:
            assert member.violations == [(liar.peer, Violation.FALSE_MEAN)] * (5 * is_false)
        assert not liar.violations
        await world.close()

    run(main())


def kept_rounds(member: Member, kind: RoundKind) -> list[int]:
    recalls = [Recall(0, WIRE_KINDS[kind], number, 0, int(kind == "fragment")) for number in range(12)]
    return [recall.round for recall in recalls if member.all_reduce.kept_means.answer_recall(recall).tensors]


@pytest.mark.parametrize("kind", ["fragment", "gradient"])
@pytest.mark.parametrize("rounds_kept", [1, 6, 12])
def test_means_are_kept_up_to_a_limit_of_bytes(
    rounds_kept: int, kind: RoundKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(kept_means, "MAX_KEPT_BYTES", 4 * SIZE * rounds_kept)
        world = World(SIZE)
        members = world.add(*identities(2))
        for number in range(12):
            await one_round(world, members, [1.0, 1.0], number, kind)
        expected = list(range(12 - max(rounds_kept, MIN_KEPT_ROUNDS), 12))
        assert all(kept_rounds(member, kind) == expected for member in members)
        await world.close()

    run(main())


@pytest.mark.parametrize("kind", ["fragment", "gradient"])
def test_a_clip_keeps_a_liar_from_moving_the_others(kind: RoundKind) -> None:
    async def main() -> None:
        moved = {}
        for rule in ("mean", "clip"):
            world = World(PART_ELEMENTS, rule=rule)
            members = world.add(*identities(8))
            chosen = [values_of(i)[:PART_ELEMENTS] for i in range(8)]
            true = sum(chosen[:7]) / 7
            chosen[7] = chosen[7] + 1.0
            results = await one_round(world, members, [1.0] * 8, 0, kind, chosen)
            moved[rule] = float((results[0].mean - true).pow(2).mean().sqrt())
            await world.close()
        assert moved["clip"] < 0.2 * moved["mean"]

    run(main())


@pytest.mark.parametrize("alive", [True, False])
def test_a_reducer_waits_for_unreachable_members_when_they_are_all_the_others(alive: bool) -> None:
    """Of two members that could not reach each other lately: both average, or the one that lives knows it did not."""

    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(2))
        for member in members:
            member.suspects = set(world.members)
        taking_part = members if alive else [reducer_of_shard(world, 0)[0]]
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(len(taking_part))]
        for result in await one_round(world, taking_part, [1.0] * len(taking_part), values=chosen):
            assert (result.failed_shards, result.contributors) == ((0, 2.0) if alive else (1, 0.0))
        await world.close()

    run(main())


def test_a_reducer_does_not_wait_for_an_unreachable_member_beside_others() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(3))
        gone = next(member for member in members if member not in reducer_of_shard(world, 0))
        living = [member for member in members if member is not gone]
        for member in living:
            member.suspects = {gone.peer}
        began = asyncio.get_running_loop().time()
        results = await one_round(world, living, [1.0] * 2, values=[values_of(i)[:PART_ELEMENTS] for i in range(2)])
        assert asyncio.get_running_loop().time() < began + 1.0
        assert all(result.failed_shards == 0 and result.contributors == 2 for result in results)
        await world.close()

    run(main())


@pytest.mark.parametrize(
    ("kind", "further", "is_awaited"),
    [("gradient", 1, False), ("fragment", MAX_RUNNING_SYNCS - 1, True), ("fragment", MAX_RUNNING_SYNCS, False)],
)
def test_a_reducer_waits_no_more_for_a_member_whose_rounds_are_further(
    kind: RoundKind, further: int, is_awaited: bool
) -> None:
    """A replica may have begun MAX_RUNNING_SYNCS rounds of slices and not ended them; of gradients, one."""

    async def main() -> None:
        world = World(PART_ELEMENTS, slices=9)
        members = world.add(*identities(3))
        first, second = reducers_in(world, 0, 0, kind)
        ahead = next(member for member in members if member.peer not in (first, second))
        on_time, loop = [member for member in members if member is not ahead], asyncio.get_running_loop()
        began, sent = loop.time(), NumberFormat("float32").encode(values_of(0)[:PART_ELEMENTS])
        request = Contribute(0, WIRE_KINDS[kind], further, 0, world.fragments_in(kind), 1.0, False, "float32", 15_000)
        asked = asyncio.create_task(ahead.port.call(first, request, sent, deadline=began + 15.0))
        chosen = [values_of(i)[:PART_ELEMENTS] for i in range(2)]
        results = await one_round(world, on_time, [1.0] * 2, 0, kind, chosen)
        assert all(result.failed_shards == 0 and result.contributors == 2 for result in results)
        assert (loop.time() - began > all_reduce.FIRST_REDUCER_WINDOW * world.round_s) == is_awaited
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await world.close()

    run(main())


class _ArrayWork(TorchDispatchMode):
    """Records the operations on many values that the thread which enters it does itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = any(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        allocates = "empty" in str(function)
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        if not is_view and not allocates and any(tensor.numel() >= 1024 for tensor in tensors):
            self.found.append(str(function))
        return result


@pytest.mark.parametrize("wire", ["float32", "int8", "normal2"])
def test_no_work_on_the_arrays_of_a_round_is_done_by_the_thread_of_the_event_loop(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[str, threading.Thread]] = []
    for name in ("encode", "decode", "signed_bytes", "average", "check_magnitude"):

        def noted(*args: Any, name: str = name, method: Any = getattr(ShardCodec, name), **kwargs: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return method(*args, **kwargs)

        monkeypatch.setattr(ShardCodec, name, noted)

    async def main() -> None:
        world = World(SIZE, wire, gradient_wire=wire)
        members = world.add(*identities(3))
        values, late = [values_of(index) for index in range(3)], torch.zeros(SIZE)
        with _ArrayWork() as on_loop:
            values[0].clone()
            assert on_loop.found == ["aten.clone.default"], "what this thread does is seen"
            on_loop.found.clear()
            results = await one_round(world, members, [1.0] * 3, number=INT8_ROUNDS, kind="gradient", values=values)
            recalled = RoundResult.of_failed_shards(late, 0)
            await members[0].all_reduce.kept_means.recall_failed_shards(Shard(0, "gradient", INT8_ROUNDS, 0), recalled)
            done_on_loop = list(on_loop.found)
        assert not any(result.failed_shards for result in (*results, recalled))
        assert torch.equal(recalled.mean, results[0].mean)
        assert done_on_loop == []
        await world.close()

    asyncio.run(main())
    assert {name for name, _ in threads} == {"encode", "decode", "signed_bytes", "average", "check_magnitude"}
    assert {thread is threading.main_thread() for _, thread in threads} == {False}


def test_a_contribution_that_comes_while_the_mean_is_computed_gets_that_mean_and_is_not_in_it() -> None:
    async def main() -> None:
        world = World(PART_ELEMENTS)
        members = world.add(*identities(3))
        early, late = members[:2], members[2]
        for member in members:
            member.sees = {member.peer: 0.0 for member in early}
        first, _ = reducers_of(RUN, Shard(0, "fragment", 0, 0, 1), late.view)
        reducer = world.members[first]
        computing, may_end = asyncio.Event(), asyncio.Event()
        gathered = reducer.all_reduce

        async def paused(work: Any) -> Any:
            if "average" in getattr(work, "__qualname__", ""):
                computing.set()
                await may_end.wait()
            return work()

        with mock.patch.object(all_reduce, "off_loop", paused):
            deadline = asyncio.get_running_loop().time() + world.round_s
            rounds = [
                asyncio.create_task(m.take_part(0, "fragment", 0, values_of(at)[:PART_ELEMENTS], 1.0, m.view, deadline))
                for at, m in enumerate(early)
            ]
            await computing.wait()
            shard = Shard(0, "fragment", 0, 0, 1)
            made = late.all_reduce.codec.make_contribution(shard, values_of(7)[:PART_ELEMENTS], 1.0)
            request = Contribute(
                stage=0, what="slice", round=0, part=0, slices=1, weight=1.0, first_owner_failed=False,
                wire=made.encoded.wire, deadline_ms=5000,
            )  # fmt: skip
            answer = asyncio.create_task(gathered.contribute(late.peer, request, made.encoded.tensors, deadline))
            await asyncio.sleep(0.1)
            assert not answer.done()
            may_end.set()
            mean = await answer
            results = await asyncio.gather(*rounds)
        assert mean.message.contributors == 2 and not mean.message.counted
        assert all(torch.equal(result.mean, mean.values) for result in results)
        await world.close()

    run(main())
