"""What members and reducers feed back: nothing is lost to quantisation, and no gradient to being late."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from agora_protocol.errors import PeerFailed, ProtocolError
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.manifest import SignedManifest
from agora_protocol.messages import Recall, Recalled
from agora_protocol.tensors import WireTensor

from agora.core.live_manifest import LiveManifest
from agora.observe.events import RoundDone
from agora.replica.number_formats import NORMAL_BITS, NumberFormat
from agora.replica.reducers import reducers_of
from agora.replica.shard_codec import (
    INT8_ROUNDS,
    WIRE_KINDS,
    EncodedShard,
    RoundConfig,
    RoundKind,
    Shard,
    ShardCodec,
    WeightedValues,
)
from tests.replica.world import RUN, Member, World, identities
from tests.train.support import small_manifest
from tests.train.test_amended_steps import FOUNDER, amendment
from tests.virtual_time import run

SIZE = 5 * QUANTISER_BLOCK + 7
FIRST = INT8_ROUNDS


def config(wire: str = "normal2") -> RoundConfig:
    me = identities(1)[0]
    return RoundConfig(me, RUN, "mean", 20.0, 1e9, gradient_wire=wire, fragment_wire=wire)


def part(number: int, stage: int = 0) -> Shard:
    return Shard(stage, "gradient", number, 0)


def fragment_shard(number: int) -> Shard:
    """Of three slices."""
    return Shard(0, "fragment", number, 0, fragments=3)


def gradient(number: int, scale: float = 1e-4) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number)) * scale


# --- the codec


def amended(values: dict[str, Any], from_step: int, **averaging: Any) -> ShardCodec:
    core = small_manifest(averaging={"exact_steps": 0, "every": 2, "fraction": 0.25, **averaging})
    signed = SignedManifest.sign(core, FOUNDER)
    live = LiveManifest(core, [amendment(core, values, from_step)])
    return ShardCodec(RoundConfig.from_manifest(signed, identities(1)[0], live))


def test_rounds_are_sent_as_the_manifest_at_their_step_says_whatever_was_chosen_before() -> None:
    codec = amended({"averaging.gradient_wire": "normal3", "averaging.slice_wire": "int8"}, 40, gradient_wire="bf16")
    assert [codec.format_of(part(number)) for number in (39, 40)] == ["bf16", "normal3"]
    # Sync r averages what the steps up to number 2 r - 1 have learnt.
    assert [codec.format_of(fragment_shard(number)) for number in (20, 21)] == ["normal2", "int8"]
    codec.send_gradients_as(0, "int8")
    assert [codec.format_of(part(number)) for number in (39, 40)] == ["int8", "normal3"]
    codec.send_gradients_as(0, "normal2")
    assert [codec.format_of(part(number)) for number in (39, 40)] == ["normal2", "normal2"], "it is at most that"


def test_the_reducer_averages_by_the_rule_in_force_at_the_rounds_step() -> None:
    codec = amended({"averaging.aggregation": "clip"}, 40, gradient_wire="float32")
    values = [torch.full((SIZE,), value) for value in (1.0, 1.0, 1.5)]
    means = [codec.average(part(number), values, [1.0, 1.0, 1.0], None) for number in (39, 40)]
    assert means[0] is not None and means[1] is not None
    assert float(means[0].values[0]) == pytest.approx(3.5 / 3) and float(means[1].values[0]) < 1.1


def test_a_fragment_has_the_tokens_since_its_last_sync_and_a_weight_those_of_the_most_fragments() -> None:
    codec = amended({"averaging.fraction": 0.125}, 40)
    few, more, most = (codec.config.planned_tokens(fragment_shard(20)._replace(fragments=of)) for of in (3, 6, 8))
    assert more == 2 * few
    assert codec.config.weight_limit == pytest.approx(64 * most)


@pytest.mark.parametrize(("name", "lost"), [("normal2", 0.1175), ("normal3", 0.0345), ("normal4", 0.0095)])
def test_a_normal_distribution_loses_what_lloyd_and_max_computed(name: str, lost: float) -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1)) * 3e-7
    back = NumberFormat(name).decode(NumberFormat(name).encode(values), len(values))
    share = float((back - values).square().mean() / values.square().mean())
    assert share == pytest.approx(lost, rel=0.06), "and the scales' rounding adds little"


@pytest.mark.parametrize("name", list(NORMAL_BITS))
def test_every_length_and_size_travels_in_its_bits(name: str) -> None:
    codec = NumberFormat(name)
    for numel in (1, 7, 63, 64, 65, 1000, 4096):
        for scale in (0.0, 1e-44, 1e-15, 1.0, 1e30, 3e38):
            values = torch.full((numel,), scale)
            values[1::2] *= -1
            sent = codec.encode(values)
            assert sent[1].nbytes <= numel * NORMAL_BITS[name] / 8 + 2
            assert sent[0].nbytes == 1 + -(-numel // QUANTISER_BLOCK)
            back = codec.decode(sent, numel)
            assert bool(back.isfinite().all()) and back.shape == values.shape
            if 1e-15 <= scale <= 1e30 and numel % 2 == 0:
                assert bool((back.sign() == values.sign()).all())
                assert bool((back.abs() <= 4 * scale).all()) and bool((back.abs() > scale / 8).all())
            if scale == 0.0:
                assert not back.any()


def test_blocks_of_very_different_sizes_keep_theirs() -> None:
    sizes = 2.0 ** -torch.arange(0, 40, 2.0).repeat_interleave(QUANTISER_BLOCK)
    values = torch.randn(len(sizes), generator=torch.Generator().manual_seed(3)) * sizes
    back = NumberFormat("normal4").decode(NumberFormat("normal4").encode(values), len(values))
    for block, (was, now) in enumerate(zip(values.split(QUANTISER_BLOCK), back.split(QUANTISER_BLOCK), strict=True)):
        error = float((was - now).norm() / was.norm())
        assert error < 0.2 if block < 16 else error <= 1.0, "2^32 times smaller than the largest, and it is zero"


@pytest.mark.parametrize(
    "change",
    [
        lambda scales, levels: [scales],
        lambda scales, levels: [levels, scales],
        lambda scales, levels: [WireTensor("int8", scales.shape, scales.data), levels],
        lambda scales, levels: [WireTensor("uint8", scales.shape, b"\x7f" + bytes(scales.data)[1:]), levels],
        lambda scales, levels: [scales, WireTensor("uint8", (levels.shape[0] - 1,), levels.data[1:])],
    ],
)
def test_another_form_is_refused(change: object) -> None:
    codec = NumberFormat("normal2")
    with pytest.raises(ProtocolError, match=r"shard|exponent"):
        codec.decode(change(*codec.encode(gradient(1))), SIZE)


# --- a member


@pytest.mark.parametrize("name", list(NORMAL_BITS))
def test_what_quantisation_loses_is_added_to_the_next_gradient(name: str) -> None:
    """The sum of all that was sent stays within one contribution's error of the sum of all gradients."""
    terms, rounds = config(name), 200
    contributions = ShardCodec(terms)
    sent, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(FIRST, FIRST + rounds):
        made = contributions.make_contribution(part(number), gradient(number), 100.0, name)
        sent += contributions.decode(part(number), made.encoded, SIZE)
        wanted += gradient(number)
        assert contributions.record_outcome(part(number), made, counted=True) == 0.0
    assert float((sent - wanted).norm()) < 1.5 * float(gradient(0).norm()), "which does not grow with the rounds"
    contributions.drop_stage(0)
    assert torch.equal(contributions.make_contribution(part(FIRST), gradient(1), 1.0, "normal2").values, gradient(1))


def test_the_first_gradients_travel_as_int8_and_leave_nothing() -> None:
    exchange = ShardCodec(config())
    assert [exchange.format_of(part(number)) for number in (0, FIRST - 1, FIRST)] == ["int8", "int8", "normal2"]
    made = exchange.make_contribution(part(FIRST - 1), gradient(1), 100.0)
    assert made.encoded.wire == "int8"
    exchange.record_outcome(part(FIRST - 1), made, counted=True)
    assert torch.equal(exchange.make_contribution(part(FIRST), gradient(2), 100.0).values, gradient(2))


def test_fragments_travel_in_few_bits_from_the_first_one_on() -> None:
    assert ShardCodec(config()).format_of(fragment_shard(0)) == "normal2"


def test_a_gradient_that_came_too_late_is_in_the_next_contribution_with_its_tokens() -> None:
    exchange = ShardCodec(config("float32"))
    late = exchange.make_contribution(part(5), gradient(1), 300.0)
    assert exchange.record_outcome(part(5), late, counted=False) == 0.0
    both = exchange.make_contribution(part(6), gradient(2), 100.0)
    torch.testing.assert_close(both.values, (300 * gradient(1) + 100 * gradient(2)) / 400)
    assert (both.weight, both.late_tokens) == (400.0, 300.0)
    assert exchange.record_outcome(part(6), both, counted=False) == 300.0, "late twice: the first of the two is lost"
    again = exchange.make_contribution(part(7), gradient(3), 0.0)
    torch.testing.assert_close(again.values, gradient(2))
    assert again.weight == 100.0
    exchange.record_outcome(part(7), again, counted=None)
    alone = exchange.make_contribution(part(8), gradient(3), 50.0)
    assert alone.weight == 50.0, "what may have counted is not sent again"


def test_the_shards_and_stages_of_a_round_leave_their_own() -> None:
    exchange = ShardCodec(config("float32"))
    late = exchange.make_contribution(part(5), gradient(1), 300.0)
    exchange.record_outcome(part(5), late, counted=False)
    assert exchange.make_contribution(part(6, stage=1), gradient(2), 1.0).weight == 1.0
    assert exchange.make_contribution(Shard(0, "gradient", 6, 1), gradient(2), 1.0).weight == 1.0
    assert exchange.make_contribution(part(6), gradient(2), 1.0).weight == 301.0


def test_two_fragments_do_not_mix_what_they_have_lost() -> None:
    """Of three slices round 9 is of round 6's: its difference has what that one has lost, and no other slice's."""
    exchange = ShardCodec(config())
    made = exchange.make_contribution(fragment_shard(6), gradient(1), 100.0)
    exchange.record_outcome(fragment_shard(6), made, counted=True)
    lost = gradient(1) - decoded(made.encoded)
    assert bool(lost.any())
    for number in (7, 8):
        assert torch.equal(exchange.make_contribution(fragment_shard(number), gradient(2), 100.0).values, gradient(2))
    assert torch.equal(exchange.make_contribution(fragment_shard(9), gradient(2), 100.0).values, gradient(2) + lost)
    gradient_of_the_same_number = exchange.make_contribution(Shard(0, "gradient", FIRST + 1, 0), gradient(2), 100.0)
    assert torch.equal(gradient_of_the_same_number.values, gradient(2)), "nor a gradient's"


def test_a_difference_that_came_too_late_is_not_added_to_the_next_which_has_it_anyway() -> None:
    exchange = ShardCodec(config())
    for counted in (False, None):
        made = exchange.make_contribution(fragment_shard(6), gradient(1), 300.0)
        assert exchange.record_outcome(fragment_shard(6), made, counted) == 0.0
        again = exchange.make_contribution(fragment_shard(9), gradient(2), 100.0)
        assert torch.equal(again.values, gradient(2)) and (again.weight, again.late_tokens) == (100.0, 0.0)


def test_what_was_lost_waits_for_a_contribution_that_counts() -> None:
    exchange = ShardCodec(config())
    made = exchange.make_contribution(fragment_shard(0), gradient(1), 1.0)
    exchange.record_outcome(fragment_shard(0), made, counted=True)
    lost = gradient(1) - decoded(made.encoded)
    for number, counted in ((3, False), (6, None)):
        made = exchange.make_contribution(fragment_shard(number), gradient(2), 1.0)
        assert torch.equal(made.values, gradient(2) + lost)
        exchange.record_outcome(fragment_shard(number), made, counted)
    assert torch.equal(exchange.make_contribution(fragment_shard(9), gradient(3), 1.0).values, gradient(3) + lost)


def decoded(sent: EncodedShard) -> torch.Tensor:
    return NumberFormat(sent.wire).decode(sent.tensors, SIZE)


# --- a reducer


def test_a_reducer_feeds_back_what_its_answer_loses() -> None:
    reducer, rounds = ShardCodec(config()), 100
    answered, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(FIRST, FIRST + rounds):
        values = [gradient(number), gradient(-number)]
        found = reducer.average(part(number), values, [1.0, 3.0], None)
        assert found is not None
        answered += found.values
        wanted += (values[0] + 3 * values[1]) / 4
        assert found.encoded is not None and found.message.wire == found.encoded.wire == "normal2"
        assert torch.equal(decoded(found.encoded), found.values), "it takes in itself what it sends"
    assert float((answered - wanted).norm()) < 1.5 * float(gradient(0).norm())


def test_a_mean_of_one_contribution_changes_nothing_for_the_next() -> None:
    reducer, other = ShardCodec(config()), ShardCodec(config())
    reducer.average(part(FIRST), [gradient(1)], [1.0], None)
    assert torch.equal(mean(reducer, part(FIRST + 1), 2), mean(other, part(FIRST + 1), 2))


def test_a_reducer_of_two_fragments_does_not_mix_what_its_answers_lost() -> None:
    reducer, other, last = ShardCodec(config()), ShardCodec(config()), ShardCodec(config())
    mean(reducer, fragment_shard(6), 1)
    assert torch.equal(mean(reducer, fragment_shard(7), 3), mean(other, fragment_shard(7), 3))
    assert not torch.equal(mean(reducer, fragment_shard(9), 3), mean(last, fragment_shard(9), 3)), (
        "its own next one has it"
    )
    for exchange in (reducer, last):
        exchange.drop_stage(0)
    assert torch.equal(mean(reducer, fragment_shard(12), 5), mean(last, fragment_shard(12), 5))


def mean(exchange: ShardCodec, of: Shard, seed: int) -> torch.Tensor:
    """A reducer's mean of two contributions."""
    found = exchange.average(of, [gradient(seed), gradient(seed + 1)], [1.0, 1.0], None)
    assert found is not None
    return found.values


# --- rounds


@pytest.mark.parametrize("kind", ["gradient", "fragment"])
@pytest.mark.parametrize("wire", ["normal2", "normal4", "int8"])
def test_all_members_get_the_same_bits_and_over_many_rounds_the_mean(wire: str, kind: RoundKind) -> None:
    async def main() -> None:
        world = World(SIZE, gradient_wire=wire, fragment_wire=wire)
        members = world.add(*identities(3))
        total, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
        for number in range(FIRST, FIRST + 40):
            values = [gradient(number + 1000 * index) for index in range(3)]
            answers = await average(world, members, number, values, kind)
            assert all(torch.equal(answer, answers[0]) for answer in answers)
            total, wanted = total + answers[0], wanted + sum(values) / 3
        assert float((total - wanted).norm()) < 1.5 * float(gradient(0).norm())

    run(main())


@pytest.mark.parametrize("wires", [("normal2", "float32", "int8"), ("float32", "normal2", "normal2")])
@pytest.mark.parametrize("kind", ["gradient", "fragment"])
def test_members_that_send_in_different_formats_get_the_same_bits_and_lose_nothing(
    wires: tuple[str, ...], kind: RoundKind
) -> None:
    """The reducer answers in the format that it sends in, whichever the members have chosen."""

    async def main() -> None:
        world = World(SIZE, slices=2)
        sends = dict(zip(identities(3), wires, strict=True))
        members = [world.add(peer, gradient_wire=wire, fragment_wire=wire)[0] for peer, wire in sends.items()]
        total, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
        for number in range(FIRST, FIRST + 80, 2):
            values = [gradient(number + 1000 * index) for index in range(3)]
            answers = await average(world, members, number, values, kind)
            assert all(torch.equal(answer, answers[0]) for answer in answers)
            total, wanted = total + answers[0], wanted + sum(values) / 3
        slices = world.fragments_in(kind)
        reducer, _ = reducers_of(members[0].all_reduce.config.run, Shard(0, kind, number, 0, slices), members[0].view)
        recall = Recall(0, WIRE_KINDS[kind], number, 0, slices)
        recalled = [member.all_reduce.kept_means.answer_recall(recall).message for member in members]
        kept = {answer.wire for answer in recalled if isinstance(answer, Recalled)}
        assert kept == {sends[reducer]}
        assert float((total - wanted).norm()) < 1.5 * float(gradient(0).norm())

    run(main())


@pytest.mark.parametrize(("at", "nth"), [("averaging.received", 1), ("averaging.answered", 2)])
def test_a_dead_reducer_loses_what_its_last_answer_lost_and_nothing_grows(at: str, nth: int) -> None:
    """It dies in the sixth of 200 rounds: before it has averaged, or between its answers. The others stay equal.

    The next reducer begins without a loss of its own, and in that round the dead one's gradient may count or not. So
    all that was answered differs from all means by one contribution's error, one answer's error and that gradient.
    """

    async def main() -> None:
        world = World(SIZE, gradient_wire="normal2")
        members = world.add(*identities(3))
        total, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
        config, view = members[0].all_reduce.config, members[0].view
        victim, _ = (world.members[peer] for peer in reducers_of(config.run, part(FIRST + 5), view))
        for number in range(FIRST, FIRST + 200):
            if number == FIRST + 5:
                victim.dies_at = (at, victim.at.get(at, 0) + nth)
            if number > FIRST + 5:
                for member in members:
                    member.sees = dict.fromkeys((other.peer for other in members), 0.0)
            values = {m.peer: gradient(number + 1000 * index) for index, m in enumerate(members)}
            works = asyncio.gather(
                *(take_part(world, m, number, values[m.peer], 1.0) for m in members if m is not victim)
            )
            if victim in members:
                deadline = asyncio.get_running_loop().time() + world.round_s
                await victim.take_part(0, "gradient", number, values[victim.peer], 1.0, victim.view, deadline)
            answers = await works
            assert all(torch.equal(answer, answers[0]) for answer in answers)
            total, wanted = total + answers[0], wanted + sum(values.values()) / len(values)
            members = [member for member in members if member.peer not in world.network.dead]
        assert len(members) == 2
        assert float((total - wanted).norm()) < 1.5 * float(gradient(0).norm())
        await world.close()

    run(main())


def test_who_comes_after_the_window_is_in_the_next_round_with_both_shares() -> None:
    """Its answer says that it did not count; the next mean holds the tokens of both of its shares."""

    async def main() -> None:
        world = World(SIZE, gradient_wire="float32")
        members = world.add(*identities(3))
        values = [torch.full((SIZE,), float(value)) for value in (3, 6, 30)]
        first = asyncio.gather(*(take_part(world, m, 30, v, 1.0) for m, v in zip(members[:2], values, strict=False)))
        await asyncio.sleep(0.5 * world.round_s)
        late = await take_part(world, members[2], 30, values[2], 2.0)
        assert all(torch.equal(answer, torch.full((SIZE,), 4.5)) for answer in [*await first, late])
        after = await average(world, members, 31, [torch.zeros(SIZE)] * 3)
        torch.testing.assert_close(after[0], torch.full((SIZE,), 30 * 2.0 / 5))
        done = [event for member in members for event in member.events if isinstance(event, RoundDone)]
        assert len(done) == 6 and not any(event.lost for event in done)

    run(main())


async def take_part(
    world: World, member: Member, number: int, values: torch.Tensor, weight: float, kind: RoundKind = "gradient"
) -> torch.Tensor:
    deadline = asyncio.get_running_loop().time() + world.round_s
    result = await member.take_part(0, kind, number, values, weight, member.view, deadline)
    assert result.failed_shards == 0
    return result.mean


async def average(
    world: World, members: list[Member], number: int, values: list[torch.Tensor], kind: RoundKind = "gradient"
) -> list[torch.Tensor]:
    works = (take_part(world, m, number, v, 1.0, kind) for m, v in zip(members, values, strict=True))
    return list(await asyncio.gather(*works))


def test_a_synchronous_run_accepts_a_mean_of_honest_gradients_that_are_far_larger_than_before() -> None:
    """Sizes as in a run of three at its eleventh step, whose mean was 5.2 times as large as usual, and honest."""
    shard, usual = part(10), WeightedValues(torch.full((64,), 0.0048), 512.0)
    exact, other = ShardCodec(replace(config("float32"), synchronous=True)), ShardCodec(config("float32"))
    for codec in (exact, other):
        codec.check_magnitude(shard, usual, usual.values, 3)
    mean = torch.full((64,), 0.025)
    exact.check_magnitude(shard, usual, mean, 3)
    with pytest.raises(PeerFailed, match=r"root mean square of 0\.025; at most 0\.0192"):
        other.check_magnitude(shard, usual, mean, 3)
    with pytest.raises(PeerFailed, match="is plausible"):
        exact.check_magnitude(shard, usual, 10 * mean, 3)
