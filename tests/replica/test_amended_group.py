"""Claims about replicas of an amended run: they change together, and one that did not know of it is found out."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
import torch
from agora_protocol.ids import PeerId
from agora_protocol.messages import Contribute

from agora.core.calls import Reply
from agora.observe.events import StageDiverged
from agora.replica.shard_codec import INT8_ROUNDS
from agora.state.layout import OUTER_PARAMETERS
from tests.replica.group_world import GroupPeer, GroupWorld
from tests.replica.test_fragment_syncs import assert_equal_outer_parameters, at_one_fragment
from tests.replica.test_stage_replicas import assert_equal_bits, at_one_step
from tests.train.test_amended_steps import amendment
from tests.virtual_time import run

FROM_STEP, AMENDED = 20, 4096
AFTER_INT8 = INT8_ROUNDS + 15  # the first rounds are sent as int8 where later ones take fewer bits
VALUES: dict[str, Any] = {"optimizer.target_tokens": AMENDED}


def amend(world: GroupWorld, *peers: GroupPeer, values: dict[str, Any] = VALUES, from_step: int = FROM_STEP) -> None:
    made = amendment(world.signed.manifest, values, from_step)
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


def sent_wires(world: GroupWorld) -> dict[int, set[str]]:
    """Collects, by number of the round, the formats of what peers contribute from now on."""
    wires = defaultdict[int, set[str]](set)

    def note(peer: GroupPeer) -> None:
        answer = peer.group.answer

        async def noting(sender: PeerId, message: Any, *rest: Any) -> Reply:
            if isinstance(message, Contribute):
                wires[message.round].add(message.wire)
            return await answer(sender, message, *rest)

        peer.group.answer = noting

    for peer in world.all:
        note(peer)
    return wires


def test_gradients_travel_in_the_amended_format_from_the_same_step_on_and_replicas_stay_equal() -> None:
    async def main() -> None:
        async with GroupWorld([1000, 2000, 1500], averaging={"gradient_wire": "bf16"}) as world:
            amend(world, *world.all, values={"averaging.gradient_wire": "normal2"}, from_step=AFTER_INT8)
            wires = sent_wires(world)
            await steps(world, AFTER_INT8 + 15)
            assert wires.keys() >= {AFTER_INT8 - 1, AFTER_INT8}
            for number, found in wires.items():
                assert found == {"bf16" if number < AFTER_INT8 else "normal2"}, number
            assert not any(peer.of(StageDiverged) for peer in world.all)
            await at_one_step(*world.all)
            assert_equal_bits(*world.all)

    run(main())


def test_fragments_are_synced_by_the_amended_rate_and_format_and_replicas_stay_equal() -> None:
    values = {"averaging.outer_rate": 0.5, "averaging.outer_momentum": 0.05, "averaging.slice_wire": "int8"}

    async def main(values: dict[str, Any]) -> torch.Tensor:
        averaging = {"exact_steps": 0, "fraction": 0.25, "round_s": 3.0, "slice_wire": "float32"}
        async with GroupWorld([4000, 2000, 6000], target=AMENDED, averaging=averaging) as world:
            amend(world, *world.all, values=values, from_step=FROM_STEP)
            wires = sent_wires(world)
            await steps(world, FROM_STEP + 20)
            await at_one_fragment(*world.all)
            assert_equal_outer_parameters(*world.all)
            assert not any(peer.of(StageDiverged) for peer in world.all)
            if "averaging.slice_wire" in values:
                # Sync r comes after r steps, the last of which has the number r - 1.
                assert wires.keys() >= {FROM_STEP, FROM_STEP + 1}
                for number, found in wires.items():
                    assert found == {"float32" if number <= FROM_STEP else "int8"}, number
            return world.all[0].stage.outer.moments[OUTER_PARAMETERS]

    assert not torch.equal(run(main(values)), run(main({"averaging.round_s": 3.0})))
