"""A state on its way: from several replicas, some of which die, lie, hang, or are behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from agora_protocol.errors import Busy, Unavailable
from agora_protocol.messages import StateIndex

from agora.calls import Reply
from agora.state import transfer
from agora.state.transfer import StateFetch
from tests.pipeline.virtual_time import run
from tests.state.world import WINDOW, World, chunks, flipped, layout_of, state

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


def fetcher(world: World) -> StateFetch:
    return StateFetch(world, 0, layout_of(NUMEL), world.report_offence)  # type: ignore[arg-type]


async def fetched(world: World, fetch: StateFetch, *, within_s: float = 300.0, at_least: int = 0):
    """The state, and how long it took. Nothing may still be open afterwards."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        got = await fetch.run(list(world.replicas), deadline=began + within_s, at_least=at_least)
        return got, loop.time() - began
    finally:
        assert world.open == 0 and len(asyncio.all_tasks()) == 1


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
        assert world.asked() == COUNT and world.most_open == WINDOW

    run(work())


def test_several_sources_are_used_at_once_and_no_element_is_mixed() -> None:
    async def work() -> None:
        world = World()
        values = {"a": 1.0, "b": 2.0, "c": 3.0}
        for name, value in values.items():
            world.add(name, state(NUMEL, value=value, step=10 + int(value), updates=int(value)), uplink=8e6)
        got, took = await fetched(world, fetcher(world))
        for chunk in range(COUNT):
            elements, *_ = layout_of(NUMEL).chunk_places(chunk)
            source = next(r.state for r in world.replicas.values() if r.given[chunk])
            for name in ("weights", "mean", "square"):
                np.testing.assert_array_equal(got.arrays[name][elements], source.arrays[name][elements])
        assert all(len(replica.given) == COUNT / 3 for replica in world.replicas.values())
        assert took < 1.1 * STATE_BYTES / 24e6 + 0.1
        assert (got.step, got.updates) == (11, 1), "the least of those behind the chunks"

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
        assert world.asked() == COUNT and took < 1.02 * STATE_BYTES / 1e6 + 0.2

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
        assert killed.dead and 1 <= len(killed.open_at_death) <= WINDOW
        assert fetch.schedule.refetched == len(killed.open_at_death) and fetch.schedule.duplicated == 0
        assert sum(sum(r.given.values()) for r in world.replicas.values()) == COUNT, "nothing arrived twice"
        assert not world.offences

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
        assert second.calls["GetChunk"] == COUNT - 5 and not set(second.given) & set(first.given)

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
        assert fired and [peer for peer, _ in world.offences] == ["liar"]
        assert world.offences[0][1].startswith("bad-tensor: ") and "SHA-256 should be" in world.offences[0][1]
        assert liar.calls["GetState"] == 1 and liar.calls["GetChunk"] <= 2 * WINDOW, "a liar is not asked again"

    run(work())


def test_what_no_optimizer_leaves_is_a_lie_even_where_the_hash_is_right() -> None:
    async def work() -> None:
        for field, value in (("weights", np.nan), ("mean", np.inf), ("square", -1.0)):
            world = World()
            poisoned = state(NUMEL)
            poisoned.arrays[field][5] = value
            world.add("liar", poisoned)
            world.add("b", state(NUMEL))
            got, _ = await fetched(world, fetcher(world))
            assert_equal(got, state(NUMEL))
            assert [peer for peer, _ in world.offences] == ["liar"]

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
        assert sorted(peer for peer, _ in world.offences) == ["larger", "misnamed", "smaller"]
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
        assert took < 1.5 * STATE_BYTES / 8e6 and 1 <= fetch.schedule.duplicated <= WINDOW

    run(work())


def test_a_hung_source_is_worked_around() -> None:
    async def work() -> None:
        world = World()
        hung = world.add("hung", state(NUMEL), hang_after=2)
        world.add("b", state(NUMEL), uplink=8e6)
        fetch = fetcher(world)
        got, took = await fetched(world, fetch)
        assert_equal(got, hung.state)
        assert hung.given.total() == 2 and took < 1.5 * STATE_BYTES / 8e6 and fetch.schedule.duplicated == WINDOW

    run(work())


def test_a_waiting_source_replaces_one_that_hangs_and_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(transfer, "SOURCES", 1)
        world = World()
        world.add("hung", state(NUMEL), hang_after=0)
        world.add("dead", state(NUMEL)).die()
        reserve = world.add("reserve", state(NUMEL), uplink=8e6)
        idle = world.add("idle", state(NUMEL))
        got, _ = await fetched(world, fetcher(world))
        assert_equal(got, reserve.state)
        assert reserve.given.total() == COUNT and not idle.calls

    run(work())


def test_a_source_far_behind_the_newest_is_not_used() -> None:
    async def work() -> None:
        world = World()
        behind = world.add("behind", state(NUMEL, step=399))
        near = world.add("near", state(NUMEL, step=400), delay_s=0.05)
        newest = world.add("newest", state(NUMEL, step=500), delay_s=0.2)
        got, _ = await fetched(world, fetcher(world))
        assert got.step == 400 and near.given and newest.given and not behind.calls["GetChunk"]

    run(work())


def test_a_source_where_no_replica_can_be_is_not_used_and_puts_no_other_behind() -> None:
    async def work() -> None:
        world = World()
        sound = [world.add(name, state(NUMEL, step=500)) for name in "ab"]
        liar = world.add("liar", state(NUMEL, step=10**9))
        got, _ = await fetched(
            world, StateFetch(world, 0, layout_of(NUMEL), world.report_offence, plausible_step=lambda: 600.0)
        )
        assert got.step == 500 and all(source.given for source in sound) and not liar.calls["GetChunk"]

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


def test_a_snapshot_that_its_source_dropped_is_asked_for_anew() -> None:
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
        assert got.step == 10 and replica.calls["GetState"] == 2
        np.testing.assert_array_equal(got.weights[-1024:], replica.state.weights[-1024:])

    run(work())


def test_a_busy_source_is_asked_again_when_it_said() -> None:
    async def work() -> None:
        world = World()
        busy = world.add("busy", state(NUMEL), fault=lambda a, nth: Busy("later", 3000) if nth == 1 else a)
        got, took = await fetched(world, fetcher(world))
        assert_equal(got, busy.state)
        assert 3.0 < took < 10.0 and not world.offences

    run(work())


def test_sources_without_anything_to_give_are_named() -> None:
    async def work() -> None:
        world = World()
        world.add("joining", None)
        with pytest.raises(Unavailable, match="joining: has no snapshot of this stage to give"):
            await fetched(world, fetcher(world))
        assert not world.offences

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
        assert task.cancelled() and world.open == 0

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
        assert {peer for peer, _ in world.offences} <= set(liars) and bool(fired) == bool(world.offences)
        assert took < 40, "a third of a minute at most of waiting for those who hang, and the bytes"

    run(work())
