"""Exact or local steps: the rule, and replicas whose uplinks get slow, and fast again, while they train."""

from __future__ import annotations

import asyncio

import pytest
from agora_protocol.errors import Refused
from agora_protocol.manifest import ALL_STEPS, Manifest

from agora.averaging.part_averager import Part
from agora.observe.events import PartFailed, RoundDone, StageDiverged, StepKindChanged, StepsSkipped
from agora.sim.virtual_time import run
from agora.step_kinds import (
    MIN_SLOW_SHARE,
    MIN_STEPS_BETWEEN,
    NO_LOCAL_STEPS,
    NOTICE_PASSES,
    NOTICE_STEPS,
    ChangeRule,
    LocalSteps,
    local_steps_of,
    may_change,
    slow_share,
    wants_change,
)
from tests.averaging.group_world import GroupPeer, GroupWorld
from tests.averaging.world import identities
from tests.train.support import small_manifest

A, B, C, D = identities(4)
TARGET = 4096
SLICES = 4
RULE = ChangeRule(may_change=True, pass_steps=20)
SLOW, FAST = 2_000.0, 1e9
"""Uplinks in bytes per second: of 4,096 values in a step of a third of a second, 2 bits are 1.1 kB."""


# --- the rule


def test_local_steps_are_a_range_of_numbers() -> None:
    local = LocalSteps(3, 5)
    assert [local.has(step) for step in range(2, 6)] == [False, True, True, False]
    assert not NO_LOCAL_STEPS.has(0) and not NO_LOCAL_STEPS.has(ALL_STEPS - 1)


@pytest.mark.parametrize(
    ("sections", "local", "changes"),
    [
        ({}, NO_LOCAL_STEPS, True),
        ({"averaging": {"local_steps": "never"}}, NO_LOCAL_STEPS, False),
        ({"averaging": {"exact_steps": 5}}, LocalSteps(5), False),
        ({"schedule": {"kind": "synchronous"}}, NO_LOCAL_STEPS, False),
        ({"schedule": {"kind": "synchronous"}, "averaging": {"exact_steps": 5}}, NO_LOCAL_STEPS, False),
    ],
)
def test_stages_change_only_where_the_manifest_leaves_it_to_the_links(
    sections: dict, local: LocalSteps, changes: bool
) -> None:
    manifest: Manifest = small_manifest(**sections)
    assert (local_steps_of(manifest), may_change(manifest)) == (local, changes)


def test_a_slow_replica_counts_by_its_share_of_the_rates_and_an_unknown_rate_as_the_median() -> None:
    assert slow_share({A: 100.0, B: 300.0}, {A}) == 0.25
    assert slow_share({A: None, B: 300.0, C: 100.0}, {A}) == pytest.approx(1 / 3)
    assert slow_share({A: None, B: None}, {A}) == 0.5
    assert slow_share({A: 0.0, B: 0.0}, {A}) == 0.0 == slow_share({A: 1.0}, {B})


def test_one_slow_replica_of_four_is_reason_for_local_steps_and_one_of_eight_is_none() -> None:
    wanted, reason = wants_change(False, dict.fromkeys((A, B, C, D), 50.0), {A})
    assert wanted and "25% of the stage's rate" in reason and MIN_SLOW_SHARE == 0.25
    eight = dict.fromkeys(identities(8), 50.0)
    assert not wants_change(False, eight, {A})[0] and wants_change(False, eight, {A, B})[0]


def test_local_steps_go_on_until_hardly_any_replica_is_slow() -> None:
    eight = dict.fromkeys(identities(8), 50.0)
    assert not wants_change(True, eight, {A})[0] and wants_change(True, eight, set())[0]
    assert wants_change(True, {**eight, A: 10.0}, {A})[0], "it does little of the work"
    assert not wants_change(True, {A: 50.0}, set())[0], "a replica without others averages nothing"


def test_the_first_local_step_comes_after_the_shares_that_may_be_closed_already() -> None:
    decided = RULE.after_exact_step(NO_LOCAL_STEPS, 40, True)
    assert decided == LocalSteps(40 + NOTICE_STEPS)
    assert RULE.after_exact_step(NO_LOCAL_STEPS, 40, False) == NO_LOCAL_STEPS
    assert RULE.after_exact_step(decided, 41, True) == decided, "it is decided once"


def test_local_steps_end_after_every_slice_had_its_turn_twice() -> None:
    local = LocalSteps(10)
    step = 10 + MIN_STEPS_BETWEEN
    assert RULE.after_slice_round(local, step, True) == LocalSteps(10, step + 20 * NOTICE_PASSES)
    assert RULE.after_slice_round(local, step, False) == local
    ending = LocalSteps(10, step + 40)
    assert RULE.after_slice_round(ending, step + 1, True) == ending, "it is decided once"


def test_a_stage_that_may_not_change_does_not() -> None:
    fixed = ChangeRule(may_change=False, pass_steps=20)
    assert fixed.after_exact_step(NO_LOCAL_STEPS, 40, True) == NO_LOCAL_STEPS
    assert fixed.after_slice_round(LocalSteps(10), 10 + MIN_STEPS_BETWEEN, True) == LocalSteps(10)


def test_changes_lie_apart() -> None:
    assert RULE.after_slice_round(LocalSteps(10), 9 + MIN_STEPS_BETWEEN, True) == LocalSteps(10)
    past = LocalSteps(10, 200)
    assert RULE.after_exact_step(past, 199 + MIN_STEPS_BETWEEN, True) == past
    assert RULE.after_exact_step(past, 200 + MIN_STEPS_BETWEEN, True).first == 200 + MIN_STEPS_BETWEEN + NOTICE_STEPS


# --- replicas


def world_of(*rates: float) -> GroupWorld:
    return GroupWorld(rates, target=TARGET, averaging={"fraction": 1 / SLICES, "round_s": 3.0})


def set_uplinks(world: GroupWorld, *uplinks: float) -> None:
    for peer, uplink in zip(world.all, uplinks, strict=True):
        peer.uplink_rate = uplink


async def until(condition, limit_s: float = 600.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


def are_equal(*peers: GroupPeer) -> bool:
    first = peers[0].stage
    return all(
        peer.stage.step == first.step and (peer.stage.weights == first.weights).all().item() for peer in peers[1:]
    )


def are_of_one_lineage(one: GroupPeer, other: GroupPeer) -> bool:
    """Whether both have applied the same means up to the same step."""
    return (one.stage.agreed, one.stage.lineages[one.stage.agreed]) == (
        other.stage.agreed,
        other.stage.lineages[other.stage.agreed],
    )


def changes_of(peer: GroupPeer) -> list[LocalSteps]:
    return [LocalSteps(event.first, event.end) for event in peer.of(StepKindChanged)]


def test_replicas_with_slow_uplinks_change_to_local_steps_at_the_same_step_and_lose_no_token() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(10.0)
            set_uplinks(world, SLOW, SLOW, FAST)
            await until(lambda: all(changes_of(peer) for peer in world.all))
            (local,) = {change for peer in world.all for change in changes_of(peer)}
            await until(lambda: all(peer.stage.step > local.first + 2 * SLICES for peer in world.all))
            for peer in world.all:
                assert min(peer.stage.alone_at) == local.first, "the steps before were taken together"
                rounds = [done for done in peer.of(RoundDone) if done.what == "slice"]
                assert rounds[0].round == local.first + 1 and rounds[-1].contributors == 3
                assert not peer.of(PartFailed) and not peer.of(StageDiverged) and not peer.of(StepsSkipped)
                assert sum(peer.stage.closed) == peer.stage.counted - peer.stage.tokens
                assert "67% of the stage's rate" in peer.of(StepKindChanged)[0].reason

    run(main())


def test_one_slow_uplink_of_many_does_not_make_all_take_local_steps() -> None:
    async def main() -> None:
        async with world_of(*[2000.0] * 5) as world:
            await asyncio.sleep(10.0)
            set_uplinks(world, SLOW, FAST, FAST, FAST, FAST)
            await asyncio.sleep(60.0)
            assert not any(changes_of(peer) for peer in world.all)
            assert not world.all[0].group.gradient_wire.fits and world.all[1].group.gradient_wire.fits

    run(main())


def test_replicas_return_to_exact_steps_and_are_equal_again_once_the_slow_one_is_gone() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(10.0)
            first, second, slow = world.all
            set_uplinks(world, FAST, FAST, SLOW)
            await until(lambda: all(changes_of(peer) for peer in world.all))
            began = changes_of(first)[0].first
            await until(lambda: first.stage.step > began + 10)
            await world.kill(slow)
            await until(lambda: all(len(changes_of(peer)) == 2 for peer in (first, second)))
            (end,) = {changes_of(peer)[1].end for peer in (first, second)}
            assert end >= began + MIN_STEPS_BETWEEN
            await until(lambda: min(first.stage.step, second.stage.step) > end + 10)
            await until(lambda: are_equal(first, second), 30.0)
            fetched = [peer for peer in (first, second) if peer.fetches]
            assert fetched == [max((first, second), key=lambda peer: peer.peer)], "one keeps its state"
            rounds = [done for done in first.of(RoundDone) if done.what == "gradient"]
            assert rounds[-1].contributors == 2 and not rounds[-1].failed_parts

    run(main())


def test_a_replica_that_joins_during_local_steps_takes_them_over_with_the_state() -> None:
    async def main() -> None:
        world = world_of(4000.0, 4000.0, 4000.0)
        async with world:
            late = world.all[2]
            await world.kill(late)
            set_uplinks(world, SLOW, SLOW, FAST)
            first = world.all[0]
            await until(lambda: bool(changes_of(first)) and first.stage.step > changes_of(first)[0].first + 30)
            world.network.dead.clear()
            late.start()
            await asyncio.sleep(10.0)
            assert late.fetches and late.stage.local == first.stage.local
            last = [done for done in late.of(RoundDone) if done.what == "slice"][-1]
            assert last.contributors == 3
            await until(lambda: are_of_one_lineage(late, first), 5.0)

    run(main())


def test_a_replica_that_missed_the_decision_is_brought_back_to_the_others() -> None:
    """It is cut off while the others change, and comes back when their steps are local."""

    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(10.0)
            first, second, away = world.all
            set_uplinks(world, SLOW, SLOW, FAST)
            world.network.broken |= {frozenset((away.peer, other.peer)) for other in (first, second)}
            await until(lambda: bool(changes_of(first)) and first.stage.step > changes_of(first)[0].first + 5)
            world.network.broken.clear()
            await until(lambda: away.stage.local == first.stage.local, 60.0)
            await until(lambda: are_of_one_lineage(away, first), 60.0)
            await asyncio.sleep(10.0)
            await until(lambda: are_of_one_lineage(away, first), 5.0)

    run(main())


def test_a_part_of_the_other_kind_is_refused_without_an_offence_where_stages_may_change() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0) as world:
            await asyncio.sleep(5.0)
            rounds, step = world.all[0].group.rounds, world.all[0].stage.step
            with pytest.raises(Refused, match="averages no slice"):
                rounds.check_part(Part(0, "slice", step, 0))
            assert rounds.check_part(Part(0, "gradient", step, 0)) > 0

    run(main())
