"""Muon's matrices have one moment: fewer bytes in memory, in checkpoints and on the wire; training goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, preset

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.node.limits.memory import MemoryBudget, check_memory
from agora.state.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from agora.state.layout import StageState
from agora.state.state_fetch import StateFetch
from agora.train.device_worker import DeviceWorker
from agora.train.stage import stage_layout
from tests.state.world import CHANGE_RULE, World
from tests.train.support import batches_for, pipeline_of, small_manifest, train_step

RUN = "ab" * 32


def manifest_of(name: str) -> Manifest:
    return small_manifest(stages={"count": 1}, optimizer={"name": name})


def hidden_bytes(manifest: Manifest, stage: int = 0) -> int:
    layout = stage_layout(manifest, stage)
    return 4 * sum(part.stop - part.start for part in layout.ranges(lambda slot: slot.is_hidden_matrix))


async def trained(worker: DeviceWorker, manifest: Manifest, first: int, last: int) -> list[float]:
    batches = batches_for(manifest, last)
    return [await train_step([worker], batches[number], number) for number in range(first, last)]


def run_with(name: str, use) -> None:
    """Awaits use(trained worker, its state, manifest)."""

    async def whole() -> None:
        manifest = manifest_of(name)
        async with pipeline_of(manifest, ["0"]) as (worker,):
            await trained(worker, manifest, 0, 3)
            await use(worker, await worker.export_state(0), manifest)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def check_that_it_trains_on(state: StageState, worker: DeviceWorker, manifest: Manifest) -> None:
    """A fresh stage that loads `state` takes the same three steps as the one that it was exported from."""
    async with pipeline_of(manifest, ["0"]) as (fresh,):
        await fresh.load_state(state)
        assert await trained(fresh, manifest, 3, 6) == await trained(worker, manifest, 3, 6)
        mine, theirs = await fresh.export_state(0), await worker.export_state(0)
        assert all(np.array_equal(array, theirs.arrays[name]) for name, array in mine.arrays.items())


def test_squares_exist_only_where_adamw_needs_them() -> None:
    held = {}
    for name in ("adamw", "muon"):

        async def use(worker: DeviceWorker, state: StageState, manifest: Manifest) -> None:
            optimizer = worker.trainer.stages[0].optimizer
            held[name] = sum(tensor.untyped_storage().nbytes() for tensor in optimizer.moments.values())
            assert state.layout == stage_layout(manifest, 0) == worker.layout(0)
            assert sum(array.nbytes for array in state.arrays.values()) == state.layout.nbytes
            for moment in state.layout.moments:
                named = state.layout.of_moment(moment).views(state.moments[moment.name])
                hidden = {slot.name for slot in state.layout.slots if slot.is_hidden_matrix}
                everything = {slot.name for slot in state.layout.slots}
                assert named.keys() == (everything - hidden if (moment.is_square and name == "muon") else everything)
                assert all(values.any() for values in named.values())

        run_with(name, use)
    assert held["adamw"] - held["muon"] == hidden_bytes(manifest_of("muon")) > 0.2 * held["adamw"]


def test_a_checkpoint_has_fewer_bytes_and_training_goes_on_from_it(tmp_path: Path) -> None:
    sizes = {}
    for name in ("adamw", "muon"):

        async def use(worker: DeviceWorker, state: StageState, manifest: Manifest) -> None:
            written = write_checkpoint(tmp_path / name, RUN, state, keep=1)
            sizes[name] = (written.path / "moments.safetensors").stat().st_size
            found = newest_checkpoint(tmp_path / name, RUN, 0)
            assert found is not None
            await check_that_it_trains_on(read_checkpoint(found, state.layout), worker, manifest)

        run_with(name, use)
    saved = sizes["adamw"] - sizes["muon"] - hidden_bytes(manifest_of("muon"))
    assert 0 <= saved < 8192, "and the names of the tensors that are not there"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_fetched_state_has_come_in_as_many_bytes_as_the_optimizer_keeps(name: str) -> None:
    async def use(worker: DeviceWorker, state: StageState, manifest: Manifest) -> None:
        came = []

        def count(answer: Reply, _: int) -> Reply:
            came.append(sum(tensor.nbytes for tensor in answer.tensors))
            return answer

        world = World()
        world.add("a", state, fault=count)
        fetch = StateFetch(world, 0, worker.layout(0), world.report_violation, CHANGE_RULE)
        fetched = await fetch.run(list(world.replicas), deadline=loop_time() + 30)
        weights = 4 * state.layout.numel
        expected = 4 * weights - (hidden_bytes(manifest) if name == "muon" else 0)
        assert sum(came) == expected + 32 * state.layout.chunk_count
        await check_that_it_trains_on(fetched, worker, manifest)

    run_with(name, use)


def test_a_peer_of_a_run_with_adamw_gives_a_state_of_another_size() -> None:
    async def use(worker: DeviceWorker, state: StageState, manifest: Manifest) -> None:
        world = World()
        world.add("liar", state)
        layout = stage_layout(manifest_of("muon"), 0)
        fetch = StateFetch(world, 0, layout, world.report_violation, CHANGE_RULE)
        with pytest.raises(Exception, match=f"has {16 * layout.numel} bytes, not {layout.nbytes}"):
            await fetch.run(list(world.replicas), deadline=loop_time() + 30)

    run_with("adamw", use)


def test_the_memory_that_a_span_needs_follows_the_moments() -> None:
    needs = {}
    for name in ("adamw", "muon"):
        manifest = preset("small", optimizer={"name": name})
        note = check_memory(manifest, Span(1, 2), MemoryBudget(2**40))
        needs[name] = int(note.split(" MiB")[0].replace(",", ""))
    saved = sum(hidden_bytes(manifest, stage) for stage in (1, 2))
    assert needs["adamw"] - needs["muon"] == pytest.approx(saved / 2**20, abs=1)


def test_a_layout_without_a_built_stage_is_that_of_the_stage() -> None:
    manifest = small_manifest(model={"subspace": 12}, stages={"count": 4}, optimizer={"name": "muon"})

    async def whole() -> None:
        async with pipeline_of(manifest, ["0-3"]) as (worker,):
            for stage in range(4):
                assert worker.layout(stage) == stage_layout(manifest, stage)

    asyncio.run(whole())
