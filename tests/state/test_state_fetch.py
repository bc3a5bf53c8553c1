"""A state on its way: from several replicas, some of which die, lie, hang, or are behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from agora_protocol.errors import AgoraError, Busy, PeerFailed, Unavailable
from agora_protocol.ids import PeerId
from agora_protocol.messages import StateIndex

from agora.core.calls import Reply
from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule
from agora.state import chunk_fetch, state_fetch
from agora.state.layout import OUTER_PARAMETERS, StageState
from agora.state.state_fetch import StateFetch
from tests.state.world import CHANGE_RULE, WINDOW, World, chunks, flipped, layout_of, state
from tests.virtual_time import run

NUMEL = chunks(11.5)
COUNT = 12
STATE_BYTES = 12 * NUMEL


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Virtual time must not pass while a real thread works."""

    async def inline(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    return


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for once more to compare unlike states: tests/state/test_comparison.py."""
    monkeypatch.setattr(state_fetch, "MAX_WITNESSES", 0)


def fetcher(world: World) -> StateFetch:
    return StateFetch(world, 0, layout_of(NUMEL), world.report_violation, CHANGE_RULE)


async def fetched(world: World, fetch: StateFetch, *, within_s: float = 300.0, at_least: int = 0):
    """The state, and how long it took. Nothing may still be open afterwards."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        got = await fetch.run(list(world.replicas), deadline=began + within_s, at_least=at_least)
        return got, loop.time() - began
    finally:
        assert world.open == 0
        assert len(asyncio.all_tasks()) == 1


def assert_equal(got, expected) -> None:
    for name in ("weights", "mean", "square"):
        np.testing.assert_array_equal(got.arrays[name], expected.arrays[name])


def test_one_source_gives_exactly_what_it_has() -> None:
    async def work() -> None:
        world = World()
        replica = world.add("a", state(NUMEL))
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, replica.state)
        assert (got.stage, got.step, got.updates) == (0, 10, 7)
        assert world.asked() == COUNT
        assert world.peak_open == WINDOW

    run(work())


@pytest.mark.usefixtures("uncompared")
def test_several_sources_are_used_at_once_and_no_element_is_mixed() -> None:
    async def work() -> None:
        world = World()
        values = {"a": 1.0, "b": 2.0, "c": 3.0}
        for name, value in values.items():
            given = state(NUMEL, value=value, step=10 + int(value), updates=int(value), agreed_step=10, history_hash=5)
            world.add(name, given, uplink=8e6)
        got, took = await fetched(world, fetcher(world))
        for chunk in range(COUNT):
            elements, *_ = layout_of(NUMEL).chunk_places(chunk)
            source = next(r.state for r in world.replicas.values() if r.given[chunk])
            for name in ("weights", "mean", "square"):
                np.testing.assert_array_equal(got.arrays[name][elements], source.arrays[name][elements])
        assert all(len(replica.given) == COUNT / 3 for replica in world.replicas.values())
        assert took < 1.1 * STATE_BYTES / 24e6 + 0.1
        assert (got.step, got.updates) == (11, 1), "the least of those behind the chunks"
        assert (got.agreed_step, got.history_hash) == (10, 5)

    run(work())


def test_one_source_fills_a_link_of_200_mbit_with_50_ms() -> None:
    async def work() -> None:
        world = World(downlink=25e6)
        world.add("a", state(NUMEL), uplink=1e12)
        _, took = await fetched(world, fetcher(world))
        assert (
            took < 1.02 * STATE_BYTES / 25e6 + 0.1 + 0.05
        )  # two round trips: one for the offer, one for the first chunk

    run(work())


def test_a_thin_link_carries_nothing_twice() -> None:
    async def work() -> None:
        world = World(downlink=1e6)  # 8 Mbit/s
        for name in "abcde":
            world.add(name, state(NUMEL))
        fetch = fetcher(world)
        _, took = await fetched(world, fetch)
        assert world.asked() == COUNT
        assert took < 1.02 * STATE_BYTES / 1e6 + 0.2

    run(work())


@pytest.mark.parametrize("die_after", [2, 3])
def test_a_source_killed_in_the_middle_costs_exactly_its_open_chunks(die_after: int) -> None:
    async def work() -> None:
        world = World()
        killed = world.add("killed", state(NUMEL), die_after=die_after)
        for name in ("b", "c"):
            world.add(name, state(NUMEL))
        fetch = fetcher(world)
        got, _ = await fetched(world, fetch)
        assert_equal(got, killed.state)
        assert killed.dead
        assert 1 <= len(killed.open_at_death) <= WINDOW
        assert fetch.schedule.refetched == len(killed.open_at_death)
        assert fetch.schedule.duplicated == 0
        assert sum(sum(r.given.values()) for r in world.replicas.values()) == COUNT, "nothing arrived twice"
        assert not world.violations

    run(work())


def test_the_death_of_the_only_source_is_survived_by_what_had_arrived() -> None:
    async def work() -> None:
        world = World()
        first = world.add("first", state(NUMEL), die_after=5)
        fetch = fetcher(world)
        with pytest.raises(Unavailable, match="5 of 12 chunks came, and no source is left; first: "):
            await fetched(world, fetch)
        second = world.add("second", state(NUMEL))
        got, _ = await fetched(world, fetch)
        assert_equal(got, first.state)
        assert second.calls["GetChunk"] == COUNT - 5
        assert not set(second.given) & set(first.given)

    run(work())


def test_a_liar_is_named_and_costs_one_chunk_of_time() -> None:
    async def work() -> None:
        world = World()
        fired = []

        def lie(answer: Reply, nth: int) -> Reply:
            if isinstance(answer.message, StateIndex) or nth < 2:
                return answer
            fired.append(nth)
            return flipped(answer)

        liar = world.add("liar", state(NUMEL), fault=lie)
        world.add("b", state(NUMEL))
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, liar.state)
        assert fired
        assert [peer for peer, _ in world.violations] == ["liar"]
        assert world.violations[0][1].startswith("bad-tensor: ")
        assert "SHA-256 should be" in world.violations[0][1]
        assert liar.calls["GetState"] == 1 and liar.calls["GetChunk"] <= 2 * WINDOW, "a liar is not asked again"

    run(work())


def test_what_no_optimizer_leaves_is_a_lie_even_where_the_hash_is_right() -> None:
    async def work() -> None:
        for field, value in (("weights", np.nan), ("mean", np.inf), ("square", -1.0), ("mean", 5.0), ("square", 1e-8)):
            world = World()
            poisoned = state(NUMEL)
            poisoned.arrays[field][5] = value
            world.add("liar", poisoned)
            world.add("b", state(NUMEL))
            got, _ = await fetched(world, fetcher(world))
            assert_equal(got, state(NUMEL))
            assert [peer for peer, _ in world.violations] == ["liar"]

    run(work())


@pytest.mark.parametrize(("element", "is_taken"), [(500, True), (-500, True), (3_000, False), (-2_000, False)])
def test_a_mean_is_bounded_by_the_square_of_its_own_element_where_it_has_one(element: int, is_taken: bool) -> None:
    """Muon's matrices have no squares. The only source is not believed either."""

    async def work() -> None:
        world, layout = World(), layout_of(NUMEL, slice(1_000, NUMEL - 1_000))
        given = dataclasses.replace(state(NUMEL), layout=layout)
        moments = {**given.moments, "square": given.moments["square"][1_000:-1_000]}
        given = dataclasses.replace(given, moments=moments)
        given.moments["mean"][element] = 5.0
        world.add("only", given)
        fetch = StateFetch(world, 0, layout, world.report_violation, CHANGE_RULE)
        if is_taken:
            assert_equal((await fetched(world, fetch))[0], given)
        else:
            with pytest.raises(AgoraError):
                await fetched(world, fetch, within_s=5.0)
        assert bool(world.violations) != is_taken

    run(work())


def test_a_state_with_more_updates_than_steps_is_refused_before_a_byte_of_it_comes() -> None:
    async def work() -> None:
        world = World()
        liar = world.add("liar", state(NUMEL, step=10, updates=2**62))
        world.add("right", state(NUMEL, step=10, updates=10))
        got, _ = await fetched(world, fetcher(world))
        assert got.updates == 10 and not liar.calls["GetChunk"]
        assert [(peer, text[:13]) for peer, text in world.violations] == [("liar", "bad-message: ")]

    run(work())


def test_a_state_of_another_size_is_refused_before_a_byte_of_it_comes() -> None:
    async def work() -> None:
        world = World()
        world.add("larger", state(NUMEL + 1024))
        world.add("smaller", state(1024))
        world.add("misnamed", state(NUMEL), fault=lambda a, _: flipped(a) if isinstance(a.message, StateIndex) else a)
        right = world.add("right", state(NUMEL))
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, right.state)
        assert sorted(peer for peer, _ in world.violations) == ["larger", "misnamed", "smaller"]
        assert world.asked() == right.calls["GetChunk"] == COUNT

    run(work())


def test_a_slow_source_delays_the_end_by_little() -> None:
    async def work() -> None:
        world = World()
        slow = world.add("slow", state(NUMEL), uplink=0.1e6)  # 42 s for a chunk
        world.add("b", state(NUMEL), uplink=8e6)
        fetch = fetcher(world)
        got, took = await fetched(world, fetch)
        assert_equal(got, slow.state)
        assert took < 1.5 * STATE_BYTES / 8e6
        assert 1 <= fetch.schedule.duplicated <= WINDOW

    run(work())


def test_a_hung_source_is_worked_around() -> None:
    async def work() -> None:
        world = World()
        hung = world.add("hung", state(NUMEL), hang_after=2)
        world.add("b", state(NUMEL), uplink=8e6)
        fetch = fetcher(world)
        got, took = await fetched(world, fetch)
        assert_equal(got, hung.state)
        assert hung.given.total() == 2
        assert took < 1.5 * STATE_BYTES / 8e6
        assert fetch.schedule.duplicated == WINDOW

    run(work())


def test_a_waiting_source_replaces_one_that_hangs_and_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(chunk_fetch, "MAX_ACTIVE_SOURCES", 1)
        world = World()
        world.add("hung", state(NUMEL), hang_after=0)
        world.add("dead", state(NUMEL)).die()
        reserve = world.add("reserve", state(NUMEL), uplink=8e6)
        idle = world.add("idle", state(NUMEL))
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, reserve.state)
        assert reserve.given.total() == COUNT
        assert not idle.calls

    run(work())


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ({"agreed_step": 41, "history_hash": 5, "step": 40}, "other"),
        ({"agreed_step": 40, "history_hash": 6, "step": 41}, "other"),
        ({"agreed_step": 40, "history_hash": 6, "step": 39}, "usual"),
        ({"agreed_step": 39, "history_hash": 5, "step": 99}, "usual"),
        ({"agreed_step": 40, "history_hash": 0, "step": 40}, "usual"),
    ],
)
def test_of_snapshots_that_do_not_agree_only_the_newest_is_used(other: dict[str, int], chosen: str) -> None:
    async def work() -> None:
        world = World()
        usual = world.add("usual", state(NUMEL, value=1.0, agreed_step=40, history_hash=5, step=40))
        world.add("other", state(NUMEL, value=2.0, **other), delay_s=0.2)
        got, _ = await fetched(world, fetcher(world))
        expected = world.replicas[chosen].state
        assert_equal(got, expected)
        assert (got.step, got.agreed_step, got.history_hash) == (
            expected.step,
            expected.agreed_step,
            expected.history_hash,
        )
        assert [name for name, replica in world.replicas.items() if replica.given] == [chosen]
        assert usual.calls["GetState"] == (2 if chosen == "other" else 1), "an older one is asked again, once"

    run(work())


def test_where_the_history_is_unknown_only_snapshots_of_one_step_are_mixed() -> None:
    async def work() -> None:
        world = World()
        for name in "ab":
            world.add(name, state(NUMEL, agreed_step=40, step=42))
        behind = world.add("behind", state(NUMEL, agreed_step=40, step=41))
        got, _ = await fetched(world, fetcher(world))
        assert (got.step, got.agreed_step, got.history_hash) == (42, 40, 0)
        assert not behind.given
        assert all(world.replicas[PeerId(name)].given for name in "ab")

    run(work())


@pytest.mark.parametrize("step", [38, 50])
def test_a_state_of_inner_steps_comes_with_outer_parameters_and_velocity(step: int) -> None:
    """The fetch learns from the offers that there are such arrays; sources without them are not mixed in."""

    async def work() -> None:
        world = World()
        sync_schedule = SyncSchedule(0, 40, 20)
        for name in "ab":
            world.add(name, state(NUMEL, agreed_step=step, history_hash=7, step=step, sync_schedule=sync_schedule))
        stale = world.add("stale", state(NUMEL, value=9.0, agreed_step=30, history_hash=5, step=30))
        got, _ = await fetched(world, fetcher(world))
        expected = world.replicas[PeerId("a")].state
        assert expected is not None and got.arrays.keys() == expected.arrays.keys()
        assert (OUTER_PARAMETERS in got.arrays) == (step == 50)
        for name, values in expected.arrays.items():
            np.testing.assert_array_equal(got.arrays[name], values)
        assert got.sync_schedule == sync_schedule and got.layout == expected.layout and not stale.given

    run(work())


@pytest.mark.parametrize(
    "sync_schedule",
    [
        SyncSchedule(0, 40, 21),
        SyncSchedule(0, 40, 1),
        SyncSchedule(6, 40, 6),
        SyncSchedule(0, 54, 20),
        SyncSchedule(0, 0, 20),
    ],
)
def test_a_plan_that_no_stage_of_the_run_can_have_is_a_violation(sync_schedule: SyncSchedule) -> None:
    """With it a replica would take other steps than all others, whatever its weights: they may be the honest ones."""

    async def work() -> None:
        world = World()
        world.add("honest", state(NUMEL, agreed_step=40, history_hash=7, step=40))
        world.add("liar", state(NUMEL, agreed_step=50, history_hash=7, step=50, sync_schedule=sync_schedule))
        got, _ = await fetched(world, fetcher(world))
        assert got.sync_schedule == ONLY_ALL_REDUCE and [peer for peer, *_ in world.violations] == ["liar"]

    run(work())


def test_a_snapshot_that_slept_through_the_first_inner_step_is_not_used() -> None:
    """Its replica has no anchor that is anybody's; that is no violation, and it fetches a state itself."""

    async def work() -> None:
        world = World()
        world.add(
            "honest", state(NUMEL, agreed_step=45, history_hash=7, step=45, sync_schedule=SyncSchedule(0, 40, 20))
        )
        world.add(
            "asleep",
            state(NUMEL, value=9.0, agreed_step=38, history_hash=5, step=50, sync_schedule=SyncSchedule(0, 40, 20)),
        )
        got, _ = await fetched(world, fetcher(world))
        assert got.step == 45 and not world.violations

    run(work())


def test_when_sources_of_inner_steps_die_a_state_of_all_reduce_steps_is_fetched_instead() -> None:
    async def work() -> None:
        world = World()
        sync_schedule = SyncSchedule(0, 40, 20)
        newest = world.add(
            "newest",
            state(NUMEL, value=9.0, agreed_step=41, history_hash=7, step=41, sync_schedule=sync_schedule),
            die_after=6,
        )
        other = world.add("other", state(NUMEL, agreed_step=39, history_hash=5, step=39))
        got, _ = await fetched(world, fetcher(world))
        assert newest.given.total() == 6
        assert_equal(got, other.state)
        assert got.arrays.keys() == {"weights", "mean", "square"} and got.sync_schedule == ONLY_ALL_REDUCE

    run(work())


def test_a_source_that_was_a_moment_behind_is_used_once_it_has_taken_the_step() -> None:
    async def work() -> None:
        world = World(downlink=8e6)
        world.add("first", state(NUMEL, agreed_step=41, history_hash=7, step=41))
        second = world.add("second", state(NUMEL, value=9.0, agreed_step=40, history_hash=5, step=40))

        def step() -> None:
            second.state = state(NUMEL, agreed_step=41, history_hash=7, step=41)

        asyncio.get_running_loop().call_later(0.3, step)
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, state(NUMEL))
        assert second.calls["GetState"] == 2
        assert len(second.given) > 3

    run(work())


def test_when_the_newest_dies_in_the_middle_the_state_of_the_others_is_fetched_whole() -> None:
    async def work() -> None:
        world = World()
        newest = world.add("newest", state(NUMEL, value=9.0, agreed_step=41, history_hash=7, step=41), die_after=6)
        older = state(NUMEL, agreed_step=40, history_hash=5, step=40)
        others = [world.add(name, older, uplink=8e6, delay_s=0.6) for name in "bc"]  # too late to be chosen first
        got, took = await fetched(world, fetcher(world))
        assert newest.given.total() == 6
        assert_equal(got, others[0].state)
        assert (got.step, got.agreed_step, got.history_hash) == (40, 40, 5)
        assert sum(source.given.total() for source in others) == COUNT
        assert all(source.given for source in others)
        assert took < 10 + STATE_BYTES / 16e6, "a few tries to reach the dead one again"

    run(work())


def test_after_a_broken_call_the_same_snapshot_is_fetched_on() -> None:
    async def work() -> None:
        world = World()
        given = state(NUMEL, agreed_step=40, history_hash=5, step=40)
        broken = []

        def break_(answer: Reply, nth: int) -> Reply | PeerFailed:
            if isinstance(answer.message, StateIndex):
                return answer
            replica.state = state(NUMEL, value=float(nth), agreed_step=40 + nth, history_hash=40 + nth, step=40 + nth)
            if nth % 5:
                return answer
            broken.append(nth)
            return PeerFailed("the stream broke")

        replica = world.add("a", given, fault=break_, uplink=0.5e6)  # 100 s in all, and it steps on
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, given)
        assert broken
        assert replica.calls["GetState"] == 1
        assert replica.calls["GetChunk"] == COUNT + len(broken), "what had arrived was kept"

    run(work())


def test_the_newest_that_hangs_is_given_up_for_others_but_not_without_others() -> None:
    async def work() -> None:
        world = World()
        world.add("hung", state(NUMEL, value=9.0, agreed_step=41, history_hash=7, step=41), hang_after=2)
        other = world.add("other", state(NUMEL, agreed_step=40, history_hash=5, step=40))
        got, took = await fetched(world, fetcher(world))
        assert_equal(got, other.state)
        assert state_fetch.STALL_TIMEOUT_S < took < state_fetch.STALL_TIMEOUT_S + 5
        alone = World()
        alone.add("slow", state(NUMEL), uplink=0.06e6)  # 70 s for a chunk
        got, _ = await fetched(alone, fetcher(alone), within_s=1800.0)
        assert alone.asked() == COUNT

    run(work())


def test_a_source_where_no_replica_can_be_is_not_used_and_puts_no_other_behind() -> None:
    async def work() -> None:
        world = World()
        sound = [world.add(name, state(NUMEL, step=500)) for name in "ab"]
        liars = [
            world.add("ahead", state(NUMEL, step=10**9)),
            world.add("agreed", state(NUMEL, step=500, agreed_step=601)),
        ]
        got, _ = await fetched(
            world,
            StateFetch(
                world, 0, layout_of(NUMEL), world.report_violation, CHANGE_RULE, highest_plausible_step=lambda: 600.0
            ),
        )
        assert got.step == 500
        assert all(source.given for source in sound)
        assert not any(liar.calls["GetChunk"] for liar in liars)

    run(work())


def test_what_came_from_below_the_step_now_wanted_is_fetched_again() -> None:
    async def work() -> None:
        world = World()
        world.add("old", state(NUMEL, step=100), die_after=6)
        fetch = fetcher(world)
        with pytest.raises(Unavailable):
            await fetched(world, fetch, at_least=100)
        new = world.add("new", state(NUMEL, value=2.0, step=200))
        got, _ = await fetched(world, fetch, at_least=150)
        assert_equal(got, new.state)
        with pytest.raises(Unavailable, match="200"):
            await fetched(world, fetcher(world), at_least=201)

    run(work())


def test_a_snapshot_that_its_source_dropped_is_asked_for_again() -> None:
    async def work() -> None:
        world = World()
        replica = world.add("a", state(NUMEL))

        def drop(answer: Reply, nth: int) -> Reply:
            if not isinstance(answer.message, StateIndex) and nth == 4:
                replica.state = dataclasses.replace(replica.state, step=12, weights=replica.state.weights + 1)
                replica.snapshots = world.add("spare", replica.state).snapshots
                del world.replicas["spare"]
            return answer

        replica.fault = drop
        got, _ = await fetched(world, fetcher(world))
        assert got.step == 12
        assert replica.calls["GetState"] == 2
        assert_equal(got, replica.state)

    run(work())


def test_a_busy_source_is_asked_again_when_it_said() -> None:
    async def work() -> None:
        world = World()
        busy = world.add("busy", state(NUMEL), fault=lambda a, nth: Busy("later", 3000) if nth == 1 else a)
        got, took = await fetched(world, fetcher(world))
        assert_equal(got, busy.state)
        assert 3.0 < took < 10.0
        assert not world.violations

    run(work())


def test_sources_without_anything_to_give_are_named() -> None:
    async def work() -> None:
        world = World()
        world.add("joining", None)
        with pytest.raises(Unavailable, match="joining: has no snapshot of this stage to give"):
            await fetched(world, fetcher(world))
        assert not world.violations

    run(work())


def test_the_deadline_ends_it_and_what_came_stays() -> None:
    async def work() -> None:
        world = World()
        world.add("a", state(NUMEL), uplink=8e6)
        fetch = fetcher(world)
        with pytest.raises(Unavailable, match="chunks came before the deadline"):
            await fetched(world, fetch, within_s=3.0)
        came = len(fetch.schedule.arrived_chunks)
        assert 3 <= came <= 6
        await fetched(world, fetch)
        assert world.replicas["a"].given.total() == COUNT

    run(work())


def test_a_cancelled_transfer_leaves_no_call_open() -> None:
    async def work() -> None:
        world = World()
        world.add("a", state(NUMEL), uplink=8e6)
        task = asyncio.create_task(fetched_quietly(world))
        await asyncio.sleep(2.0)
        assert world.open == WINDOW
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert world.open == 0

    async def fetched_quietly(world: World) -> None:
        await fetcher(world).run(list(world.replicas), deadline=asyncio.get_running_loop().time() + 99)

    run(work())


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_faults_is_survived_as_long_as_one_source_is_sound(seed: int) -> None:
    async def work() -> None:
        rng = random.Random(seed)
        world, liars = World(downlink=25e6), []
        fired = Counter[str]()

        def lie(answer: Reply, nth: int) -> Reply:
            if isinstance(answer.message, StateIndex) or nth < 3:
                return answer
            fired["lie"] += 1
            return flipped(answer)

        for name in rng.sample("abcdef", 6):
            fault = rng.choice(["die", "hang", "lie", "slow", "dead"])
            replica = world.add(name, state(NUMEL), uplink=rng.uniform(4e6, 40e6), delay_s=rng.uniform(0, 0.1))
            if fault == "die":
                replica.die_after = rng.randrange(1, 5)
            elif fault == "hang":
                replica.hang_after = rng.randrange(0, 5)
            elif fault == "lie":
                replica.fault = lie
                liars.append(name)
            elif fault == "slow":
                replica.uplink.bytes_per_s = 0.2e6
            else:
                replica.die()
        world.add("sound", state(NUMEL), uplink=8e6)
        got, took = await fetched(world, fetcher(world))
        assert_equal(got, state(NUMEL))
        assert {peer for peer, _ in world.violations} <= set(liars)
        assert bool(fired) == bool(world.violations)
        assert took < 40, "a third of a minute at most of waiting for those who hang, and the bytes"

    run(work())


@pytest.mark.parametrize("seed", range(12))
def test_a_state_fetched_from_replicas_that_step_every_second_is_of_one_step(seed: int) -> None:
    """The transfer lasts for ten steps and more, and all but one of the sources fail."""

    async def work() -> None:
        rng = random.Random(seed)
        world, began = World(), asyncio.get_running_loop().time()
        small = chunks(3.5)

        def of_step(step: int) -> StageState:
            return state(small, value=float(step), step=step, agreed_step=step, history_hash=1000 + step)

        async def step_on() -> None:
            while True:
                await asyncio.sleep(1.0)
                step = 100 + int(asyncio.get_running_loop().time() - began)
                for replica in world.replicas.values():
                    asyncio.get_running_loop().call_later(rng.uniform(0, 0.3), setattr, replica, "state", of_step(step))

        for name in rng.sample("abcde", 5):
            replica = world.add(name, of_step(100), uplink=rng.uniform(0.5e6, 2e6), delay_s=rng.uniform(0, 0.1))
            fault = rng.choice(["die", "hang", "dead"])
            if fault == "die":
                replica.die_after = rng.randrange(1, 4)
            elif fault == "hang":
                replica.hang_after = rng.randrange(0, 4)
            else:
                replica.die()
        sound = world.add("sound", of_step(100), uplink=1e6)
        stepping = asyncio.create_task(step_on())
        fetch = StateFetch(world, 0, layout_of(small), world.report_violation, CHANGE_RULE)
        got = await fetch.run(list(world.replicas), deadline=began + 600)
        stepping.cancel()
        assert_equal(got, of_step(got.step))
        assert (got.agreed_step, got.history_hash) == (got.step, 1000 + got.step)
        assert sound.state.step - got.step < 5 * state_fetch.STALL_TIMEOUT_S

    run(work())
