"""A state is believed when samples of it lie as near another source's as replicas do; who gives another one pays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from agora.state.sample_check import FAR, ChunkSample, distance, judge_sample
from agora.state.state_fetch import StateFetch
from tests.state.world import CHANGE_RULE, World, chunks, layout_of, state
from tests.virtual_time import run

NUMEL = chunks(5.5)
RANDOM = np.random.default_rng(7)
TRUE = RANDOM.normal(0, 0.02, 4096).astype(np.float32)
GARBAGE = RANDOM.normal(0, 0.02, 4096).astype(np.float32)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Virtual time must not pass while a real thread works."""

    async def inline(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    return


def drifted(by: float) -> np.ndarray:
    return (TRUE + by * 0.02 * RANDOM.normal(0, 1, TRUE.size)).astype(np.float32)


def test_distances_are_relative_to_the_larger_of_the_two() -> None:
    assert distance(TRUE, TRUE) == 0.0 and distance(0 * TRUE, 0 * TRUE) == 0.0
    assert distance(TRUE, 0 * TRUE) == pytest.approx(1.0) and 1.3 < distance(TRUE, GARBAGE) < 1.5
    assert distance(TRUE, 1e30 * TRUE) == pytest.approx(1.0) and distance(TRUE, np.inf * TRUE) == np.inf


@pytest.mark.parametrize(
    ("own", "others", "verdict"),
    [
        (TRUE, [], "plausible"),
        (TRUE, [drifted(0.1)], "plausible"),
        (TRUE, [GARBAGE], "undecided"),
        (0 * TRUE, [TRUE], "undecided"),
        (drifted(0.02), [TRUE, TRUE], "plausible"),
        (drifted(0.3), [drifted(0.3), drifted(0.3)], "plausible"),
        (GARBAGE, [TRUE, drifted(0.1)], "corrupt"),
        (2 * TRUE, [TRUE, TRUE], "corrupt"),
        (0 * TRUE, [TRUE, TRUE], "corrupt"),
        (TRUE, [GARBAGE, drifted(0.1)], "plausible"),
    ],
)
def test_a_chunk_is_plausible_when_it_is_near_another_ones(
    own: np.ndarray, others: list[np.ndarray], verdict: str
) -> None:
    assert judge_sample(ChunkSample(own, 10), [ChunkSample(other, 10) for other in others]) == verdict


def test_replicas_of_different_steps_may_differ_more_but_not_without_bound() -> None:
    apart = drifted(0.3)
    assert judge_sample(ChunkSample(apart, 10), [ChunkSample(TRUE, 10), ChunkSample(TRUE, 10)]) == "corrupt"
    assert judge_sample(ChunkSample(apart, 18), [ChunkSample(TRUE, 10), ChunkSample(TRUE, 10)]) == "plausible"
    assert distance(GARBAGE, TRUE) > FAR
    assert judge_sample(ChunkSample(GARBAGE, 10_000), [ChunkSample(TRUE, 10), ChunkSample(TRUE, 10)]) == "corrupt"


async def fetched(world: World, **options: object):
    fetch = StateFetch(world, 0, layout_of(NUMEL), world.report_violation, CHANGE_RULE, **options)  # type: ignore[arg-type]
    return await fetch.run(list(world.replicas), deadline=asyncio.get_running_loop().time() + 300.0)


@pytest.mark.parametrize("honest", [2, 3])
def test_whoever_offers_a_later_step_with_other_weights_pays_and_the_state_is_the_honest_ones(honest: int) -> None:
    async def work() -> None:
        world = World()
        for number in range(honest):
            world.add(f"honest {number}", state(NUMEL, value=1.0, step=100, agreed=100, history_hash=5))
        world.add("liar", state(NUMEL, value=-40.0, step=105, agreed=105, history_hash=6))
        got = await fetched(world)
        assert got.step == 100 and np.array_equal(got.weights, world.replicas["honest 0"].state.weights)  # type: ignore[index]
        assert {peer for peer, _ in world.offences} == {"liar"}

    run(work())


def test_a_liar_that_claims_the_others_history_gets_no_chunk_in() -> None:
    async def work() -> None:
        world = World()
        for number in range(2):
            world.add(f"honest {number}", state(NUMEL, value=1.0, step=100, agreed=100, history_hash=5))
        world.add("liar", state(NUMEL, value=-40.0, step=100, agreed=100, history_hash=5))
        got = await fetched(world)
        assert np.array_equal(got.weights, world.replicas["honest 0"].state.weights)  # type: ignore[index]
        assert {peer for peer, _ in world.offences} == {"liar"}

    run(work())


def test_of_two_that_disagree_the_later_step_is_not_taken_and_nobody_pays() -> None:
    async def work() -> None:
        world = World()
        world.add("honest", state(NUMEL, value=1.0, step=100, agreed=100, history_hash=5))
        world.add("liar", state(NUMEL, value=-40.0, step=105, agreed=105, history_hash=6))
        got = await fetched(world)
        assert got.step == 100 and not world.offences

    run(work())


def test_a_state_at_the_median_and_799_is_not_even_fetched() -> None:
    async def work() -> None:
        world = World()
        for number in range(2):
            world.add(f"honest {number}", state(NUMEL, value=1.0, step=100, agreed=100, history_hash=5))
        liar = world.add("liar", state(NUMEL, value=-40.0, step=899, agreed=899, history_hash=6))
        got = await fetched(world, highest_plausible_step=lambda: 200.0)
        assert got.step == 100 and not liar.calls["GetChunk"]

    run(work())


def test_equal_chunks_are_compared_without_being_fetched_twice() -> None:
    async def work() -> None:
        world = World()
        for name in "abc":
            world.add(name, state(NUMEL))
        await fetched(world)
        assert world.asked() == 6

    run(work())
