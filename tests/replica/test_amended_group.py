"""Claims about replicas of an amended run: they change together, and one that did not know of it is found out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agora.observe.events import StageDiverged
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.replica.test_stage_replicas import assert_equal_bits, at_one_step
from tests.train.test_amended_steps import amendment
from tests.virtual_time import run

FROM_STEP, AMENDED = 20, 4096
VALUES: dict[str, Any] = {"optimizer.target_tokens": AMENDED}


def amend(world: GroupWorld, *peers: GroupPeer) -> None:
    made = amendment(world.signed.manifest, VALUES, FROM_STEP)
    for peer in peers:
        peer.stage.live.amend([made])


async def steps(world: GroupWorld, least: int) -> None:
    async with asyncio.timeout(3600):
        while min(peer.stage.step for peer in world.all) < least:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_the_replicas_count_the_amended_tokens_from_the_same_step_on(kind: str) -> None:
    async def main() -> None:
        async with GroupWorld([1000, 2000, 1500], schedule={"kind": kind}) as world:
            amend(world, *world.all)
            await steps(world, 32)
            per_step = [sum(peer.stage.closed[step] for peer in world.all) for step in range(31)]
            before, after = per_step[4:FROM_STEP], per_step[FROM_STEP:]
            assert sum(before) / len(before) == pytest.approx(1024, rel=0.3)
            assert sum(after) / len(after) == pytest.approx(AMENDED, rel=0.3)
            if kind == "synchronous":
                assert min(after) >= AMENDED > max(before)
            for peer in world.all:
                assert not peer.of(StageDiverged)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)

    run(main())


def test_a_replica_that_missed_an_amendment_is_known_as_diverged_and_fetches_once_it_has_it() -> None:
    async def main() -> None:
        async with GroupWorld([1000, 1000, 1000]) as world:
            *knowing, late = world.all
            amend(world, *knowing)
            await steps(world, FROM_STEP + 3)
            amend(world, late)
            await steps(world, FROM_STEP + 10)
            assert late.of(StageDiverged) and late.fetches
            assert not any(peer.of(StageDiverged) for peer in knowing), "the largest group is right"
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)
            assert len({peer.stage.history[peer.stage.agreed_step] for peer in world.all}) == 1

    run(main())
