"""What members and owners of gradient rounds feed back: no gradient is lost to quantisation or to being late."""

from __future__ import annotations

import asyncio

import pytest
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.tensors import WireTensor

from agora.averaging.contributions import GradientContributions
from agora.averaging.kinds import INT8_ROUNDS, GradientRound, Part, RoundConfig
from agora.averaging.wire import NORMAL_BITS, PartCodec
from agora.observe.events import RoundDone
from tests.averaging.world import RUN, Member, World, identities
from tests.pipeline.virtual_time import run

SIZE = 5 * QUANTISER_BLOCK + 7
FIRST = INT8_ROUNDS


def config(wire: str = "normal2") -> RoundConfig:
    me = identities(1)[0]
    return RoundConfig(me, RUN, "mean", "int8", 20.0, 1e9, gradient_wire=wire)  # type: ignore[arg-type]


def part(number: int, stage: int = 0) -> Part:
    return Part(stage, "gradient", number, 0)


def gradient(number: int, scale: float = 1e-4) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number)) * scale


# --- the codec


@pytest.mark.parametrize(("name", "lost"), [("normal2", 0.1175), ("normal3", 0.0345), ("normal4", 0.0095)])
def test_a_normal_distribution_loses_what_lloyd_and_max_computed(name: str, lost: float) -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1)) * 3e-7
    back = PartCodec(name).decode(PartCodec(name).encode(values), len(values))  # type: ignore[arg-type]
    share = float((back - values).square().mean() / values.square().mean())
    assert share == pytest.approx(lost, rel=0.06), "and the scales' rounding adds little"


@pytest.mark.parametrize("name", list(NORMAL_BITS))
def test_every_length_and_size_travels_in_its_bits(name: str) -> None:
    codec = PartCodec(name)  # type: ignore[arg-type]
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
    back = PartCodec("normal4").decode(PartCodec("normal4").encode(values), len(values))
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
    codec = PartCodec("normal2")
    with pytest.raises(ProtocolError, match=r"part|exponent"):
        codec.decode(change(*codec.encode(gradient(1))), SIZE)  # type: ignore[operator]


# --- a member


@pytest.mark.parametrize("name", list(NORMAL_BITS))
def test_what_quantisation_loses_is_added_to_the_next_gradient(name: str) -> None:
    """The sum of all that was sent stays within one contribution's error of the sum of all gradients."""
    terms, rounds = config(name), 200
    contributions = GradientContributions(terms)
    sent, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(FIRST, FIRST + rounds):
        made = contributions.make(part(number), gradient(number), 100.0)
        sent += terms.decode(part(number), made.wire, SIZE)
        wanted += gradient(number)
        assert contributions.settle(part(number), made, counted=True) == 0.0
    assert float((sent - wanted).norm()) < 1.5 * float(gradient(0).norm()), "which does not grow with the rounds"
    contributions.forget(0)
    assert torch.equal(contributions.make(part(FIRST), gradient(1), 1.0).values, gradient(1))


def test_the_first_gradients_travel_as_int8_and_leave_nothing() -> None:
    terms = config()
    contributions = GradientContributions(terms)
    made = contributions.make(part(FIRST - 1), gradient(1), 100.0)
    assert made.wire[0].dtype == "int8" and not terms.is_coarse(part(FIRST - 1)) and terms.is_coarse(part(FIRST))
    contributions.settle(part(FIRST - 1), made, counted=True)
    assert torch.equal(contributions.make(part(FIRST), gradient(2), 100.0).values, gradient(2))


def test_a_gradient_that_came_too_late_is_in_the_next_contribution_with_its_tokens() -> None:
    contributions = GradientContributions(config("float32"))
    late = contributions.make(part(5), gradient(1), 300.0)
    assert contributions.settle(part(5), late, counted=False) == 0.0
    both = contributions.make(part(6), gradient(2), 100.0)
    torch.testing.assert_close(both.values, (300 * gradient(1) + 100 * gradient(2)) / 400)
    assert (both.weight, both.late_tokens) == (400.0, 300.0)
    assert contributions.settle(part(6), both, counted=False) == 300.0, "late twice: the first of the two is lost"
    again = contributions.make(part(7), gradient(3), 0.0)
    torch.testing.assert_close(again.values, gradient(2))
    assert again.weight == 100.0
    contributions.settle(part(7), again, counted=None)
    assert contributions.make(part(8), gradient(3), 50.0).weight == 50.0, "what may have counted is not sent again"


def test_the_parts_and_stages_of_a_round_leave_their_own() -> None:
    contributions = GradientContributions(config("float32"))
    contributions.settle(part(5), contributions.make(part(5), gradient(1), 300.0), counted=False)
    assert contributions.make(part(6, stage=1), gradient(2), 1.0).weight == 1.0
    assert contributions.make(Part(0, "gradient", 6, 1), gradient(2), 1.0).weight == 1.0
    assert contributions.make(part(6), gradient(2), 1.0).weight == 301.0


# --- an owner


def test_an_owner_feeds_back_what_its_answer_loses() -> None:
    owner, rounds = GradientRound(config()), 100
    answered, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(FIRST, FIRST + rounds):
        values = [gradient(number), gradient(-number)]
        found = owner.combine(part(number), values, [1.0, 3.0], None)
        assert found is not None
        answered += found.values
        wanted += (values[0] + 3 * values[1]) / 4
        assert torch.equal(owner.decode_answer(part(number), owner.encode_answer(found, values[0]), SIZE), found.values)
    assert float((answered - wanted).norm()) < 1.5 * float(gradient(0).norm())


def test_a_mean_of_one_contribution_changes_nothing_for_the_next() -> None:
    owner, other = GradientRound(config()), GradientRound(config())
    owner.combine(part(FIRST), [gradient(1)], [1.0], None)
    means = [kind.combine(part(FIRST + 1), [gradient(2), gradient(3)], [1.0, 1.0], None) for kind in (owner, other)]
    assert means[0] is not None and means[1] is not None and torch.equal(means[0].values, means[1].values)


# --- rounds


@pytest.mark.parametrize("wire", ["normal2", "normal4", "int8"])
def test_all_members_get_the_same_bits_and_over_many_rounds_the_mean(wire: str) -> None:
    async def main() -> None:
        world = World(SIZE, gradient_wire=wire)
        members = world.add(*identities(3))
        total, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
        for number in range(FIRST, FIRST + 40):
            values = [gradient(number + 1000 * index) for index in range(3)]
            answers = await average(world, members, number, values)
            assert all(torch.equal(answer, answers[0]) for answer in answers)
            total, wanted = total + answers[0], wanted + sum(values) / 3
        assert float((total - wanted).norm()) < 1.5 * float(gradient(0).norm())

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


async def take_part(world: World, member: Member, number: int, values: torch.Tensor, weight: float) -> torch.Tensor:
    deadline = asyncio.get_running_loop().time() + world.round_s
    result = await member.take_part(0, "gradient", number, values, weight, member.view, deadline)
    assert result.failed_parts == 0
    return result.answer


async def average(world: World, members: list[Member], number: int, values: list[torch.Tensor]) -> list[torch.Tensor]:
    works = (take_part(world, m, number, v, 1.0) for m, v in zip(members, values, strict=True))
    return list(await asyncio.gather(*works))
