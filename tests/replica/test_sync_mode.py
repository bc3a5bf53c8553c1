"""All-reduce or inner steps: the rule, and replicas whose uplinks get slow, and fast again, while they train."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
from agora_protocol.errors import Refused
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import ALL_STEPS

from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import (
    ALL_REDUCE,
    MIN_STEPS_BETWEEN,
    NOTICE_PASSES,
    NOTICE_STEPS,
    ONLY_ALL_REDUCE,
    SyncChangeRule,
    SyncSchedule,
    first_sync_schedule,
)
from agora.observe.events import PartFailed, RoundDone, StageDiverged, StepPlanChanged, StepsSkipped
from agora.replica.pacing import TokenRate
from agora.replica.shard_codec import Shard
from agora.replica.sync_rules import (
    MIN_WISH_AGE_S,
    RETURN_FACTOR,
    ReplicaUplink,
    Wish,
    carried_by_most,
    choose_fragment_count,
)
from agora.train.stage import StageProgress
from tests.replica.group_world import FakeStage, GroupPeer, GroupWorld
from tests.train.support import small_manifest
from tests.train.test_amended_steps import amendment
from tests.virtual_time import run

TARGET = 4096
FRAGMENTS = 4
RULE = SyncChangeRule(may_change=True, every=1, most_fragments=20)
SLOW, FAST = 2_000.0, 1e9
"""Uplinks in bytes per second: of 4,096 values in a step of a third of a second, 2 bits are 1.1 kB."""


# --- the rule


def test_a_plan_says_of_each_step_in_how_many_fragments_it_is_taken() -> None:
    sync_schedule = SyncSchedule(ALL_REDUCE, 3, 20)
    assert [sync_schedule.fragments_at(step) for step in (2, 3, 4)] == [ALL_REDUCE, 20, 20]
    assert [sync_schedule.is_inner(step) for step in (2, 3)] == [False, True]
    assert not ONLY_ALL_REDUCE.is_inner(0) and not ONLY_ALL_REDUCE.is_inner(ALL_STEPS - 1)


@pytest.mark.parametrize(
    ("sections", "sync_schedule", "may_change"),
    [
        ({}, ONLY_ALL_REDUCE, True),
        ({"averaging": {"local_steps": "never"}}, ONLY_ALL_REDUCE, False),
        ({"averaging": {"fraction": 1.0}}, ONLY_ALL_REDUCE, False),
        ({"averaging": {"exact_steps": 5}}, SyncSchedule(ALL_REDUCE, 5, 20), False),
        ({"averaging": {"exact_steps": 0, "fraction": 0.5}}, SyncSchedule(ALL_REDUCE, 0, 2), False),
        ({"schedule": {"kind": "synchronous"}}, ONLY_ALL_REDUCE, False),
        ({"schedule": {"kind": "synchronous"}, "averaging": {"exact_steps": 5}}, ONLY_ALL_REDUCE, False),
    ],
)
def test_stages_change_only_where_the_manifest_leaves_it_to_the_links(
    sections: dict, sync_schedule: SyncSchedule, may_change: bool
) -> None:
    manifest: Manifest = small_manifest(**sections)
    assert (first_sync_schedule(manifest), SyncChangeRule.from_manifest(manifest).may_change) == (
        sync_schedule,
        may_change,
    )


def uplinks_of(count: int, *carried: float, rate: float | None = 50.0) -> list[ReplicaUplink]:
    """Replicas of one rate, the first of which carry so many bytes; nothing waits for the other uplinks."""
    return [ReplicaUplink(rate, carried[index] if index < len(carried) else math.inf) for index in range(count)]


def test_slower_uplinks_count_once_their_replicas_do_a_quarter_of_the_work() -> None:
    assert carried_by_most(uplinks_of(4, 0.1)) == 0.1
    assert carried_by_most(uplinks_of(8, 0.1)) == math.inf
    assert carried_by_most(uplinks_of(8, 0.1, 0.2)) == 0.2, "the slower one is left behind"
    assert carried_by_most(uplinks_of(3, 0.1, rate=None)) == 0.1
    assert carried_by_most([ReplicaUplink(10.0, 0.1), ReplicaUplink(90.0, 0.2)]) == 0.2, "it does a tenth of the work"
    one_unknown = [ReplicaUplink(None, 0.1), ReplicaUplink(300.0), ReplicaUplink(100.0)]
    assert carried_by_most(one_unknown) == 0.1, "an unknown rate is the median"
    assert carried_by_most([]) == math.inf


@pytest.mark.parametrize(
    ("present", "carried", "wanted"),
    [
        (ALL_REDUCE, 0.3, ALL_REDUCE),
        (ALL_REDUCE, 0.266, ALL_REDUCE),
        (ALL_REDUCE, 0.265, 2),
        (ALL_REDUCE, 0.1, 3),
        (ALL_REDUCE, 0.05, 6),
        (ALL_REDUCE, 0.0133, 20),
        (ALL_REDUCE, 0.001, 20),
        (ALL_REDUCE, 0.0, 20),
        (6, 0.05, 6),
        (6, 0.04, 6),
        (6, 0.025, 11),
        (6, 0.09, 3),
        (6, 0.39, 2),
        (6, 0.4, ALL_REDUCE),
        (20, math.inf, ALL_REDUCE),
    ],
)
def test_the_number_of_fragments_is_what_the_uplinks_carry(present: int, carried: float, wanted: int) -> None:
    found, reason = choose_fragment_count(present, uplinks_of(4, carried), 20)
    assert found == wanted
    assert ("never full" in reason) == math.isinf(carried) and (math.isinf(carried) or f"{carried:.2g}" in reason)


def test_a_stage_with_more_fragments_than_an_amendment_allows_wants_as_many_as_it_does() -> None:
    assert choose_fragment_count(20, uplinks_of(4, 0.0), 15)[0] == 15
    assert choose_fragment_count(15, uplinks_of(4, 0.0), 20)[0] == 15, "a little more is not worth a change"


def test_a_change_obeys_the_most_fragments_of_its_step_and_a_state_those_of_any() -> None:
    core = small_manifest(averaging={"fraction": 0.25})
    live = LiveManifest(core, [amendment(core, {"averaging.fraction": 0.125}, 30)])
    before, after = (SyncChangeRule.from_manifest(live.at(step)) for step in (29, 30))
    assert before.after_all_reduce(ONLY_ALL_REDUCE, 29, 8) == ONLY_ALL_REDUCE
    changed = after.after_all_reduce(ONLY_ALL_REDUCE, 30, 8)
    assert changed == SyncSchedule(ALL_REDUCE, 30 + NOTICE_STEPS, 8)
    assert SyncChangeRule.of_run(live).is_possible(changed, 31)
    assert SyncChangeRule.of_run(live).is_possible(SyncSchedule(ALL_REDUCE, 10, 4), 31)
    assert not SyncChangeRule.of_run(LiveManifest(core)).is_possible(changed, 31)


def test_a_replica_without_others_keeps_its_inner_steps() -> None:
    assert choose_fragment_count(20, uplinks_of(1), 20)[0] == 20


def test_the_first_inner_step_comes_after_the_shares_that_may_be_closed_already() -> None:
    decided = RULE.after_all_reduce(ONLY_ALL_REDUCE, 40, 6)
    assert decided == SyncSchedule(ALL_REDUCE, 40 + NOTICE_STEPS, 6)
    assert RULE.after_all_reduce(ONLY_ALL_REDUCE, 40, ALL_REDUCE) == ONLY_ALL_REDUCE
    assert RULE.after_all_reduce(decided, 41, 12) == decided, "it is decided once"


def test_inner_steps_change_after_every_fragment_had_its_turn_twice() -> None:
    sync_schedule = SyncSchedule(ALL_REDUCE, 10, 6)
    step = 10 + MIN_STEPS_BETWEEN
    for wanted in (ALL_REDUCE, 12):
        decided = RULE.after_fragment_sync(sync_schedule, step, wanted)
        assert decided == SyncSchedule(6, step + 6 * NOTICE_PASSES, wanted)
        assert RULE.after_fragment_sync(decided, step + 1, 2) == decided, "it is decided once"
    assert RULE.after_fragment_sync(sync_schedule, step, 6) == sync_schedule


def test_a_stage_that_may_not_change_does_not() -> None:
    fixed = SyncChangeRule(may_change=False, every=1, most_fragments=20)
    assert fixed.after_all_reduce(ONLY_ALL_REDUCE, 40, 6) == ONLY_ALL_REDUCE
    sync_schedule = SyncSchedule(ALL_REDUCE, 10, 6)
    assert fixed.after_fragment_sync(sync_schedule, 10 + MIN_STEPS_BETWEEN, ALL_REDUCE) == sync_schedule


def test_a_stage_can_have_only_the_first_plan_and_those_that_the_rule_makes() -> None:
    sync_schedule = RULE.after_fragment_sync(RULE.after_all_reduce(ONLY_ALL_REDUCE, 40, 6), 60, 12)
    for step in (60, 10**6):
        assert RULE.is_possible(ONLY_ALL_REDUCE, step) and RULE.is_possible(sync_schedule, step)
    assert not RULE.is_possible(sync_schedule, sync_schedule.change_at - 6 * NOTICE_PASSES - 1), (
        "it is decided no earlier"
    )
    fixed = SyncChangeRule(may_change=False, every=1, most_fragments=20, first=SyncSchedule(ALL_REDUCE, 5, 20))
    assert fixed.is_possible(SyncSchedule(ALL_REDUCE, 5, 20), 0) and not fixed.is_possible(ONLY_ALL_REDUCE, 0)
    assert not fixed.is_possible(SyncSchedule(ALL_REDUCE, 5, 4), 6) and not fixed.is_possible(sync_schedule, 60)


@pytest.mark.parametrize("wanted", [1, 21, 1000])
def test_no_reducer_can_ask_for_more_fragments_than_the_manifest_has(wanted: int) -> None:
    assert RULE.after_all_reduce(ONLY_ALL_REDUCE, 40, wanted) == ONLY_ALL_REDUCE
    sync_schedule = SyncSchedule(ALL_REDUCE, 10, 6)
    assert RULE.after_fragment_sync(sync_schedule, 10 + MIN_STEPS_BETWEEN, wanted) == sync_schedule


def test_a_change_is_asked_for_once_it_was_wanted_without_a_break() -> None:
    wish = Wish().after(6, 12, 100.0)
    assert wish.kind == "more fragments" and not wish.is_held(100.0 + MIN_WISH_AGE_S - 0.1)
    assert wish.after(6, 9, 110.0) == wish and wish.is_held(100.0 + MIN_WISH_AGE_S), "how many more does not matter"
    for other, kind in ((6, "none"), (ALL_REDUCE, "all-reduces"), (3, "fewer fragments")):
        assert wish.after(6, other, 110.0) == Wish(kind, 110.0)
    assert (
        Wish().after(ALL_REDUCE, 2, 5.0) == Wish("more fragments", 5.0)
        and Wish().after(ALL_REDUCE, ALL_REDUCE, 5.0) == Wish()
    )


def test_no_stall_keeps_rates_wrong_for_as_long_as_a_wish_must_be_held() -> None:
    """After a stall of any length a rate is within RETURN_FACTOR of what it was long before MIN_WISH_AGE_S."""
    for stalled_s in (5.0, 60.0, 3600.0):
        rate = TokenRate().after(100_000, 100.0).after(0, stalled_s)
        for _ in range(12):
            rate = rate.after(1000, 1.0)
        assert rate.per_second is not None and 1000.0 / RETURN_FACTOR < rate.per_second <= 1000.0
    assert MIN_WISH_AGE_S >= 12.0


def test_changes_lie_apart() -> None:
    sync_schedule = SyncSchedule(ALL_REDUCE, 10, 6)
    assert RULE.after_fragment_sync(sync_schedule, 9 + MIN_STEPS_BETWEEN, ALL_REDUCE) == sync_schedule
    assert RULE.after_fragment_sync(sync_schedule, 9 + 6 * NOTICE_PASSES, 12) == sync_schedule
    assert RULE.after_fragment_sync(sync_schedule, 10 + 6 * NOTICE_PASSES, 12).later_fragments == 12, (
        "no state need be fetched"
    )
    past = SyncSchedule(6, 200, ALL_REDUCE)
    assert RULE.after_all_reduce(past, 199 + MIN_STEPS_BETWEEN, 6) == past
    assert RULE.after_all_reduce(past, 200 + MIN_STEPS_BETWEEN, 6).change_at == 200 + MIN_STEPS_BETWEEN + NOTICE_STEPS


# --- replicas


def world_of(*rates: float, stage_type: type[FakeStage] = FakeStage) -> GroupWorld:
    section = {"fraction": 1 / FRAGMENTS, "round_s": 3.0}
    return GroupWorld(rates, target=TARGET, stage_type=stage_type, averaging=section)


def set_uplinks(world: GroupWorld, *uplinks: float) -> None:
    for peer, uplink in zip(world.all, uplinks, strict=True):
        peer.uplink_rate = uplink


async def until(condition, limit_s: float = 600.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


def are_equal(*peers: GroupPeer) -> bool:
    first = peers[0].stage
    return all(
        peer.stage.step == first.step and (peer.stage.weights == first.weights).all().item() for peer in peers[1:]
    )


def have_one_history(one: GroupPeer, other: GroupPeer) -> bool:
    """Whether both have applied the same means up to the same step."""
    return (one.stage.agreed_step, one.stage.history[one.stage.agreed_step]) == (
        other.stage.agreed_step,
        other.stage.history[other.stage.agreed_step],
    )


def changes_of(peer: GroupPeer) -> list[SyncSchedule]:
    return [SyncSchedule(event.slices, event.change_at, event.later_slices) for event in peer.of(StepPlanChanged)]


def test_replicas_with_slow_uplinks_change_to_inner_steps_at_the_same_step_and_lose_no_token() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(10.0)
            set_uplinks(world, SLOW, SLOW, FAST)
            await until(lambda: all(changes_of(peer) for peer in world.all))
            (sync_schedule,) = {changes_of(peer)[0] for peer in world.all}
            await until(lambda: all(peer.stage.step > sync_schedule.change_at + 2 * FRAGMENTS for peer in world.all))
            for peer in world.all:
                assert min(peer.stage.alone_at) == sync_schedule.change_at, "the steps before were taken together"
                rounds = [done for done in peer.of(RoundDone) if done.what == "slice"]
                assert rounds[0].round == sync_schedule.change_at + 1 and rounds[-1].contributors == 3
                assert not peer.of(PartFailed) and not peer.of(StageDiverged) and not peer.of(StepsSkipped)
                assert sum(peer.stage.closed) == peer.stage.counted - peer.stage.tokens
                assert "most uplinks carry" in peer.of(StepPlanChanged)[0].reason

    run(main())


def test_one_slow_uplink_of_many_does_not_make_all_take_inner_steps() -> None:
    async def main() -> None:
        async with world_of(*[2000.0] * 5) as world:
            await asyncio.sleep(10.0)
            set_uplinks(world, SLOW, FAST, FAST, FAST, FAST)
            await asyncio.sleep(60.0)
            assert not any(changes_of(peer) for peer in world.all)
            assert [peer.group.stages[0].sync_choice.compression.fits for peer in world.all] == [False, *[True] * 4]

    run(main())


def test_replicas_return_to_all_reduce_steps_and_are_equal_again_once_the_slow_one_is_gone() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(10.0)
            first, second, slow = world.all
            set_uplinks(world, FAST, FAST, SLOW)
            await until(lambda: all(changes_of(peer) for peer in world.all))
            began = changes_of(first)[0].change_at
            await until(lambda: first.stage.step > began + 10)
            await world.kill(slow)
            await until(lambda: all(len(changes_of(peer)) == 2 for peer in (first, second)))
            (end,) = {changes_of(peer)[1].change_at for peer in (first, second)}
            assert end >= began + MIN_STEPS_BETWEEN
            await until(lambda: min(first.stage.step, second.stage.step) > end + 10)
            await until(lambda: are_equal(first, second), 30.0)
            fetched = [peer for peer in (first, second) if peer.fetches]
            assert fetched == [max((first, second), key=lambda peer: peer.peer)], "one keeps its state"
            rounds = [done for done in first.of(RoundDone) if done.what == "gradient"]
            assert rounds[-1].contributors == 2 and not rounds[-1].failed_parts

    run(main())


def test_a_replica_that_joins_during_inner_steps_takes_them_over_with_the_state() -> None:
    """It joins when a change is allowed again. As long as its rate is unknown, uplinks carry what they carried."""

    async def main() -> None:
        world = world_of(4000.0, 4000.0, 4000.0)
        async with world:
            late = world.all[2]
            await world.kill(late)
            set_uplinks(world, SLOW, SLOW, FAST)
            first = world.all[0]
            past = MIN_STEPS_BETWEEN + 30
            await until(lambda: bool(changes_of(first)) and first.stage.step > changes_of(first)[0].change_at + past)
            world.network.dead.clear()
            late.start()
            await asyncio.sleep(10.0)
            assert late.fetches and late.stage.sync_schedule == first.stage.sync_schedule
            last = [done for done in late.of(RoundDone) if done.what == "slice"][-1]
            assert last.contributors == 3
            await until(lambda: have_one_history(late, first), 5.0)
            assert all(change.later_fragments != ALL_REDUCE for change in changes_of(first)[1:])

    run(main())


class TwoStages(FakeStage):
    """Stage 1 goes with stage 0, and is nobody else's."""

    span = Span(0, 1)

    def progress(self) -> list[StageProgress]:
        (stage_0,) = super().progress()
        return [stage_0, dataclasses.replace(stage_0, stage=1)]


def test_a_stage_without_replicas_says_nothing_of_what_its_peers_uplink_carries() -> None:
    """Each stage has its own choice, and only what is sent has to fit."""

    async def main() -> None:
        async with world_of(4000.0, 4000.0, stage_type=TwoStages) as world:
            for peer in world.all:
                peer.alone_in.add(1)
            await asyncio.sleep(10.0)
            set_uplinks(world, 3_000.0, FAST)
            await asyncio.sleep(2.0)
            slow = world.all[0].group
            slow.stages[1].on_stepped(world.all[0].stage.step, 0)
            assert (
                slow.stages[0].sync_choice.compression.is_limited
                and not slow.stages[1].sync_choice.compression.is_limited
            )
            assert "MB in a step" in slow.stages[0].sync_choice.compression.reason
            (carried,) = {slow.stages[0].sync_choice.compression.carried}
            assert 0.1 < carried < 0.3 and slow.stages[1].sync_choice.compression.carried == math.inf
            told = world.all[1].group.stages[0].gossip.known_progress()[world.all[0].peer].counts.bytes_carried
            assert told == pytest.approx(carried, rel=0.2)

    run(main())


def test_a_replica_that_missed_the_decision_is_brought_back_to_the_others() -> None:
    """It is cut off while the others change, and comes back when they take inner steps."""

    async def main() -> None:
        async with world_of(4000.0, 4000.0, 4000.0) as world:
            await asyncio.sleep(10.0)
            first, second, away = world.all
            set_uplinks(world, SLOW, SLOW, FAST)
            world.network.broken |= {frozenset((away.peer, other.peer)) for other in (first, second)}
            await until(lambda: bool(changes_of(first)) and first.stage.step > changes_of(first)[0].change_at + 5)
            world.network.broken.clear()
            await until(lambda: away.stage.sync_schedule == first.stage.sync_schedule, 60.0)
            await until(lambda: have_one_history(away, first), 60.0)
            await asyncio.sleep(10.0)
            await until(lambda: have_one_history(away, first), 5.0)

    run(main())


def test_a_part_of_the_other_kind_is_refused_without_a_violation_where_stages_may_change() -> None:
    async def main() -> None:
        async with world_of(4000.0, 4000.0) as world:
            await asyncio.sleep(5.0)
            loop, step = world.all[0].group.stages[0], world.all[0].stage.step
            refused = loop.round_contexts.context_of(Shard(0, "fragment", step, 0, FRAGMENTS)).refusal
            assert isinstance(refused, Refused) and "averages no fragment" in str(refused)
            accepted = loop.round_contexts.context_of(Shard(0, "gradient", step, 0))
            assert accepted.refusal is None and accepted.numel > 0

    run(main())
