"""A replica group with one liar takes nearly the steps that it takes with an honest one, whatever it says of itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from agora.replica.reducers import reducers_of
from agora.replica.shard_codec import Shard, ShardMean
from agora.train.stage import StageProgress
from tests.replica.group_world import FakeStage, GroupWorld
from tests.replica.test_stage_replicas import at_one_step
from tests.virtual_time import run

ALL_REDUCE: dict[str, Any] = {"averaging": {"exact_steps": 10**9, "gradient_wire": "float32"}}
RATE, HONEST_S, LYING_S = 1280.0, 10.0, 20.0

Lie = Callable[[StageProgress], StageProgress]
LIES: dict[str, Lie] = {
    "2^50 tokens": lambda told: replace(told, tokens_in_share=2**50 + told.step, tokens_counted=2**50 + told.step),
    "a million times its rate, and all tokens": lambda told: replace(
        told, tokens_counted=10**6 * told.tokens_counted, tokens_in_share=2**40
    ),
    "its share is always closed": lambda told: replace(told, open_step=told.step + 1, tokens_in_share=0),
    "two shares are always closed": lambda told: replace(told, open_step=told.step + 2, tokens_in_share=0),
    "nine shares are, of an unknown rate": lambda told: replace(
        told, open_step=told.step + 9, tokens_in_share=0, tokens_counted=2**40 - told.tokens_counted
    ),
}


class LyingStage(FakeStage):
    """Tells of its progress what `lie` makes of it."""

    lie: Lie | None = None

    def progress(self) -> list[StageProgress]:
        told = super().progress()
        return told if self.lie is None else [self.lie(told[0])]


class Taken(NamedTuple):
    """What an honest replica did while the other one lied: steps, and its tokens in one of them."""

    steps: int
    tokens: float
    fetches: int


@functools.cache
def taken(count: int, lie: str = "") -> Taken:
    async def main() -> Taken:
        async with GroupWorld([RATE] * count, target=512 * count, stage_type=LyingStage, **ALL_REDUCE) as world:
            await asyncio.sleep(HONEST_S)
            liar, honest, *_ = world.all
            assert isinstance(liar.stage, LyingStage)
            liar.stage.lie = LIES[lie] if lie else None
            step, shares = honest.stage.step, len(honest.stage.closed)
            await asyncio.sleep(LYING_S)
            closed = honest.stage.closed[shares:] or [0]
            return Taken(honest.stage.step - step, sum(closed) / len(closed), len(honest.fetches))

    return run(main())


@pytest.mark.parametrize("lie", LIES)
def test_one_liar_neither_rushes_nor_empties_steps(lie: str) -> None:
    honest, beside_it = taken(4), taken(4, lie)
    assert honest.steps >= 40
    # Beyond its true part the liar gets a microbatch a step, and then closes the others' shares as an honest one may.
    assert beside_it.steps == pytest.approx(honest.steps, rel=0.07)
    assert beside_it.tokens == pytest.approx(honest.tokens, rel=0.07)
    assert not beside_it.fetches, "nor does anybody fetch its state"


@pytest.mark.parametrize("lie", ["", "two shares are always closed"])
@pytest.mark.parametrize("times", [0.1, 0.92, 100.0])
def test_a_reducer_that_makes_up_the_tokens_of_a_round_changes_no_step(times: float, lie: str) -> None:
    """It reduces the only shard of sixteen rounds, and may lie of its own share besides."""

    async def main() -> float:
        async with GroupWorld([RATE] * 4, target=2048, stage_type=LyingStage, **ALL_REDUCE) as world:
            await asyncio.sleep(HONEST_S)
            shard = Shard(0, "gradient", world.all[0].stage.step + 1, 0)
            reducer, _ = reducers_of(
                world.all[0].group.stages[0].all_reduce.config.run, shard, dict.fromkeys(world.peers, 0.0)
            )
            liar = world.peers[reducer]
            honest = next(peer for peer in world.all if peer is not liar)
            codec, lies = liar.group.stages[0].all_reduce.codec, 0
            true_mean = codec.average

            def mean(*arguments: Any) -> ShardMean | None:
                nonlocal lies
                if (made := true_mean(*arguments)) is None:
                    return None
                lies += 1
                return replace(made, message=replace(made.message, weight=times * made.message.weight))

            codec.average = mean
            assert isinstance(liar.stage, LyingStage)
            liar.stage.lie = LIES[lie] if lie else None
            shares = len(honest.stage.closed)
            async with asyncio.timeout(60.0):
                while lies < 12:
                    await asyncio.sleep(0.1)
            closed = honest.stage.closed[shares:]
            return sum(closed) / len(closed)

    assert run(main()) == pytest.approx(taken(4).tokens, rel=0.02)


def test_one_honest_replica_that_is_64_times_as_fast_as_two_others_has_the_share_of_its_rate() -> None:
    """Steps have their target, and nobody waits."""

    async def main() -> None:
        target, rates = 65_984, [64_000.0, 1000.0, 1000.0]
        async with GroupWorld(rates, target=target, **ALL_REDUCE) as world:
            await asyncio.sleep(30.0)
            await at_one_step(*world.all)
            step = world.all[0].stage.step
            counted = sum(peer.stage.counted for peer in world.all)
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(60.0)
            await at_one_step(*world.all)
            seconds = asyncio.get_running_loop().time() - began
            taken = world.all[0].stage.step - step
            tokens = sum(peer.stage.counted for peer in world.all) - counted
            assert tokens == pytest.approx(sum(rates) * seconds, rel=0.02)
            assert tokens / taken == pytest.approx(target, rel=0.1)

    run(main())
