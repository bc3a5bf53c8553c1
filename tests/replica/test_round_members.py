"""Who is a member of a round, whom a reducer waits for, and how long a round may take."""

from __future__ import annotations

import asyncio

import pytest
from agora_protocol.manifest import preset
from agora_protocol.parts import fragment_count
from agora_protocol.presets import PRESETS

from agora.core.moving_average import MovingAverage
from agora.replica.round_contexts import MIN_ROUND_TIMEOUT_S, ROUND_STEPS
from agora.replica.shard_codec import Shard
from agora.replica.stage_view import NEWCOMER_STEPS
from tests.replica.group_world import GroupWorld
from tests.virtual_time import run


def test_nobody_waits_for_a_replica_that_is_listed_and_has_never_reported() -> None:
    """It may be there, so no step is taken as if it were not; but it reduces no shard, and no reducer waits for it."""

    async def main() -> None:
        world = GroupWorld([4000.0, 4000.0, 4000.0])
        first, second, silent = world.all
        world.network.dead.add(silent.peer)
        first.start()
        second.start()
        await asyncio.sleep(2.0)
        step = first.stage.step
        assert step > NEWCOMER_STEPS
        view = first.group.stages[0].round_contexts.context_of(Shard(0, "gradient", step, 0))
        assert view.members == {first.peer: 0.0, second.peer: 0.0, silent.peer: None}
        assert view.do_not_wait_for == {silent.peer}
        await first.stop()
        await second.stop()

    run(main())


def test_a_replica_that_fetches_a_state_is_no_member_of_the_steps_meanwhile_and_not_waited_for() -> None:
    async def main() -> None:
        async with GroupWorld([500.0, 500.0]) as world:
            first, behind = world.all
            await asyncio.sleep(10.0)
            loop, shard = first.group.stages[0], Shard(0, "gradient", first.stage.step, 0)
            view = loop.round_contexts.context_of(shard)
            assert {*view.members} == {first.peer, behind.peer} and not view.do_not_wait_for
            first.stage.step += 3
            later = loop.round_contexts.context_of(shard._replace(round=first.stage.step))
            assert {*later.members} - later.do_not_wait_for == {first.peer} == {*loop.round_contexts.members()}

    run(main())


@pytest.mark.parametrize(("kind", "expected"), [("asynchronous", 2 * 7.0), ("synchronous", 20.0)])
def test_a_round_may_take_as_long_as_some_steps_last(kind: str, expected: float) -> None:
    """At least MIN_ROUND_TIMEOUT_S, at most the manifest's seconds; in synchronous runs always these."""

    async def main() -> None:
        (peer,) = GroupWorld([0.0], schedule={"kind": kind}).all
        rounds, meter = peer.group.stages[0].round_contexts, peer.group.stages[0].pacing
        assert rounds.allowed_s() == 20.0, "nothing is measured yet"
        for step_s, round_s in ((7.0, expected), (0.1, min(expected, MIN_ROUND_TIMEOUT_S)), (1000.0, 20.0)):
            meter.step_s = MovingAverage(0.2).with_sample(step_s)
            assert rounds.allowed_s() == (round_s if kind == "asynchronous" else 20.0)
        assert ROUND_STEPS == 2.0

    run(main())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_train_with_muon_and_no_weight_waits_for_more_than_twenty_inner_steps(name: str) -> None:
    manifest = preset(name)
    assert manifest.optimizer.name == "muon"
    assert fragment_count(manifest.averaging.fraction) * manifest.averaging.every <= 20
