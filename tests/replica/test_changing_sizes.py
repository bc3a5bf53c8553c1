"""When gradients change in size, as after an amendment of the text, nobody honest pays and replicas stay equal."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from agora_protocol.ids import PeerId
from agora_protocol.limits import PART_ELEMENTS
from agora_protocol.manifest import Manifest
from hypothesis import given
from hypothesis import strategies as st

from agora.core.clock import loop_time
from agora.observe.events import StageDiverged
from agora.replica.reducers import reducers_of
from agora.replica.rounds import RoundResult
from agora.replica.shard_codec import Shard, aggregate, magnitude
from agora.replica.trust import FALSE_TIMES, MAX_MEAN_RATIO, MAX_SENT_RATIO, MagnitudeBound
from tests.replica.group_world import NUMEL, FakeStage, GroupWorld
from tests.replica.test_stage_replicas import assert_equal_bits, at_one_step
from tests.replica.world import Member, World, identities
from tests.virtual_time import run

SIZES = st.floats(-6.0, 3.0).map(lambda exponent: 10.0**exponent)
DIRECTION = torch.randn(PART_ELEMENTS, generator=torch.Generator().manual_seed(1))


@given(usual=SIZES, sent=st.lists(SIZES, min_size=2, max_size=8))
def test_whatever_contributors_send_all_but_the_least_accept_an_honest_mean_and_nobody_calls_it_false(
    usual: float, sent: list[float]
) -> None:
    bound = MagnitudeBound(usual, usual)
    alike = torch.linspace(-1, 1, 64) / magnitude(torch.linspace(-1, 1, 64))
    made = aggregate([size * alike for size in sent], [1.0] * len(sent), "mean", center=None)
    assert made is not None
    mean = min(magnitude(made.values), bound.largest_to_send(sent))
    rejecting = [own for own in sorted(sent) if bound.why_implausible(mean, own)]
    assert len(rejecting) <= (len(sent) > 2)
    if len(sent) == 2:
        assert not any(bound.is_false(mean, own) for own in sent)


def test_one_contribution_of_nothing_lowers_no_mean_of_three_or_more() -> None:
    bound = MagnitudeBound(1e-3, 1e-3)
    assert bound.largest_to_send([0.0, 1.0, 1.0]) == MAX_SENT_RATIO
    assert bound.largest_to_send([0.0, 1e-3]) == MAX_SENT_RATIO * 1e-3, "of two, either could be right"
    assert bound.largest_to_send([0.0]) == math.inf and MagnitudeBound().largest_to_send([0.0, 1.0]) == math.inf


def test_means_that_are_held_down_by_contributions_of_nothing_grow_to_what_the_others_send() -> None:
    """However many send nothing: what is usual grows with what is sent."""
    bound = MagnitudeBound(1e-3, 1e-3)
    for _ in range(30):
        mean = min(0.5, bound.largest_to_send([0.0, 0.0, 1.0, 1.0]))
        bound = bound.after_accepted_mean(mean, 1.0)
    assert bound.usual > 0.4


def test_what_is_false_is_far_beyond_what_is_rejected() -> None:
    bound = MagnitudeBound(1.0, 1.0)
    rejected, false = 1.01 * MAX_MEAN_RATIO, 1.01 * FALSE_TIMES * MAX_MEAN_RATIO
    assert bound.why_implausible(rejected, 1.0) and not bound.is_false(rejected, 1.0)
    assert bound.is_false(false, 1.0) and not MagnitudeBound().is_false(false, 1e-9), "nothing is known yet"


async def rounds(world: World, sizes: dict[PeerId, float], first: int, count: int) -> list[RoundResult]:
    """Rounds in which every member sends as large values as `sizes` says; the last one's results."""
    view, results = dict.fromkeys(world.members, 0.0), []
    for number in range(first, first + count):
        deadline = loop_time() + 20.0
        results = await asyncio.gather(
            *(
                world.members[peer].take_part(0, "gradient", number, size * DIRECTION, 1.0, view, deadline)
                for peer, size in sizes.items()
            )
        )
    return results


@pytest.mark.parametrize("late", [1e-1, 1.0, 100.0])
@pytest.mark.parametrize("wire", ["float32", "normal2"])
def test_a_reducer_that_alone_still_has_large_values_is_believed_by_those_whose_values_have_become_tiny(
    late: float, wire: str
) -> None:
    """Of three, one contributes after the window: the mean is of two, of which either could be right."""

    async def main() -> None:
        world = World(PART_ELEMENTS, gradient_wire=wire)
        peers = identities(3)
        world.add(*peers)
        await rounds(world, dict.fromkeys(peers, 1.0), 0, 3)
        await rounds(world, dict.fromkeys(peers, 1e-4), 3, 37)
        view = dict.fromkeys(peers, 0.0)
        first, second = reducers_of(world.members[peers[0]].all_reduce.config.run, Shard(0, "gradient", 40, 0), view)
        assert second is not None
        (other,) = {*peers} - {first, second}

        async def take_part(member: Member, size: float, after_s: float) -> RoundResult:
            await asyncio.sleep(after_s)
            deadline = loop_time() + 20.0
            return await member.take_part(0, "gradient", 40, size * DIRECTION, 1.0, view, deadline)

        results = await asyncio.gather(
            take_part(world.members[first], late, 0.0),
            take_part(world.members[other], 1e-4, 0.0),
            take_part(world.members[second], 1e-4, 10.0),
        )
        assert not any(member.violations for member in world.members.values())
        assert all(result.averaged == [True] for result in results)
        assert all(torch.equal(result.mean, results[0].mean) for result in results)
        assert magnitude(results[0].mean) < 1e-2
        results = await rounds(world, dict.fromkeys(peers, 1.0), 41, 1)
        assert all(result.averaged == [True] for result in results), "a real change upwards is followed at once"
        assert magnitude(results[0].mean) > 0.5
        await world.close()

    run(main())


class VanishingStage(FakeStage):
    """From step 20 on, the text is a single letter: its gradients vanish in a few steps. Those of the first one are
    those of the old text for some steps more."""

    def __init__(self, number: int, rate: float, manifest: Manifest) -> None:
        super().__init__(number, rate, manifest)
        common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000))
        noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number))
        self.usual, self.number = common + 0.3 * noise, number

    @property
    def gradient(self) -> torch.Tensor:
        late = 6 if self.number == 1 else 0
        size = 0.3 ** max(0, self.step - 20 - late)
        return max(size, 1e-6) * self.usual if self.step < 60 else self.usual

    @gradient.setter
    def gradient(self, _: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["asynchronous", "synchronous"])
def test_gradients_that_vanish_and_come_back_cost_nobody_a_violation_and_replicas_stay_equal(
    schedule: str, count: int
) -> None:
    async def main() -> None:
        averaging = {} if schedule == "synchronous" else {"gradient_wire": "float32", "exact_steps": 10**9}
        async with GroupWorld(
            [512.0] * count, 512 * count, VanishingStage, schedule={"kind": schedule}, averaging=averaging
        ) as world:
            world.suspends = True
            async with asyncio.timeout(3600):
                while min(peer.stage.step for peer in world.all) < 80:
                    await asyncio.sleep(0.1)
            assert not any(peer.violations for peer in world.all)
            assert not any(peer.of(StageDiverged) or peer.fetches for peer in world.all)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)

    run(main())
