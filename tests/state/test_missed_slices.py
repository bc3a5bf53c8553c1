"""The slices that were averaged while the state was on its way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from agora_protocol.errors import Busy, ProtocolError
from agora_protocol.messages import Slice

from agora.state.missed_slices import SLICE_CHUNK, SliceFetch, chunk_blocks, slice_reply
from tests.pipeline.virtual_time import run
from tests.state.world import Replica, World

SIZES = {6: 1024, 7: 2048, 8: 1024, 9: 1024}


def replica(world: World, name: str, value: float, **faults: object) -> Replica:
    made = world.add(name, None, **faults)
    made.slices = {round_: np.full(size, value + round_, np.float32) for round_, size in SIZES.items()}
    return made


async def caught_up(world: World, within_s: float = 60.0) -> tuple[dict[int, float], list[int]]:
    applied: dict[int, float] = {}

    async def put(round_: int, values: np.ndarray) -> None:
        assert values.shape == (SIZES[round_],) and round_ not in applied
        applied[round_] = float(values[0])

    deadline = asyncio.get_running_loop().time() + within_s
    left = await SliceFetch(world, 0, list(world.replicas), deadline, world.report_offence).run(SIZES, put)
    assert world.open == 0 and len(asyncio.all_tasks()) == 1
    return applied, left


def test_every_missed_slice_comes_from_one_of_the_sources() -> None:
    async def work() -> None:
        world = World()
        a, b = replica(world, "a", 0.0), replica(world, "b", 100.0)
        applied, left = await caught_up(world)
        assert not left and all(applied[r] in (r, 100 + r) for r in SIZES)
        assert a.calls["GetSlice"] == b.calls["GetSlice"] == 2

    run(work())


def test_sources_that_die_lie_or_are_busy_cost_no_slice() -> None:
    async def work() -> None:
        world = World()
        replica(world, "dead", 0.0).die()
        replica(world, "short", 0.0).slices = {round_: np.zeros(8, np.float32) for round_ in SIZES}
        nan = replica(world, "nan", 0.0)
        nan.slices = {round_: np.full(size, np.nan, np.float32) for round_, size in SIZES.items()}
        good = replica(world, "good", 0.0, fault=lambda a, nth: Busy("later", 500) if nth == 2 else a)
        applied, left = await caught_up(world)
        assert applied == {6: 6.0, 7: 7.0, 8: 8.0, 9: 9.0} and not left
        assert sorted(peer for peer, _ in world.offences) == ["nan", "short"] and good.calls["GetSlice"] >= 5

    run(work())


def test_rounds_that_nobody_gives_are_named() -> None:
    async def work() -> None:
        world = World()
        replica(world, "a", 0.0, fault=lambda a, nth: Busy("never", 1000))
        assert await caught_up(world, within_s=5.0) == ({}, list(SIZES))
        assert await caught_up(World()) == ({}, list(SIZES))

    run(work())


def test_an_error_while_a_slice_is_put_ends_it() -> None:
    async def work() -> None:
        world = World()
        replica(world, "a", 0.0)

        async def put(*_: object) -> None:
            raise ValueError("the device is gone")

        with pytest.raises(ValueError, match="gone"):
            await SliceFetch(world, 0, list(world.replicas), 2000.0, world.report_offence).run(SIZES, put)
        assert world.open == 0

    run(work())


def test_a_large_slice_comes_in_chunks_from_several_sources() -> None:
    async def work() -> None:
        world = World()
        values = np.arange(2 * SLICE_CHUNK + 1024, dtype=np.float32)
        for name in ("a", "b", "c"):
            world.add(name, None, die_after=10**9).slices = {5: values}
        world.replicas["b"].die()
        applied: list[np.ndarray] = []

        async def put(round_: int, whole: np.ndarray) -> None:
            applied.append(whole)

        deadline = asyncio.get_running_loop().time() + 60
        fetch = SliceFetch(world, 0, list(world.replicas), deadline, world.report_offence)
        left = await fetch.run({5: values.size}, put)
        assert not left and len(applied) == 1 and world.most_open == 3
        np.testing.assert_array_equal(applied[0], values)

    run(work())


def test_a_giver_finds_the_blocks_of_a_chunk() -> None:
    blocks = np.arange(0, 20 * 2500, 20)
    found = [chunk_blocks(blocks, chunk) for chunk in range(3)]
    assert [len(part) for part in found] == [1024, 1024, 452]
    np.testing.assert_array_equal(np.concatenate(found), blocks)
    with pytest.raises(ProtocolError, match="has 3 chunks"):
        chunk_blocks(blocks, 3)
    given = slice_reply(np.arange(2048, dtype=np.float32), 41)
    assert given.message == Slice(41) and given.tensors[0].shape == (2048,)
