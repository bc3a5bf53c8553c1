"""The keeper fills stages, writes checkpoints that are found again, and gives what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import NotMyStage, Unavailable
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetState, StateIndex

from agora.core.live_manifest import LiveManifest
from agora.state.checkpoint import checkpoint_folders, newest_checkpoint, stage_folder
from agora.state.keeper import LAST_HOLDER_TIMEOUT_S, SOURCES_TIMEOUT_S, AskSteps, StageHolders, StateKeeper
from tests.state.world import World
from tests.train.support import Events, pipeline_of, small_manifest
from tests.train.test_amended_steps import amendment

ME, *OTHERS = (Identity(bytes([n]) * 32).peer for n in range(1, 6))
MANIFEST = small_manifest(checkpoint={"every": 10})


async def ask_nobody(stage: int, peers: Collection[PeerId]) -> dict[PeerId, int]:
    """As if all peers had answered that they have taken no step."""
    return dict.fromkeys(peers, 0)


def keeper_of(
    stages: Any,
    folder: Path,
    claims: dict[PeerId, int],
    world: World | None = None,
    ask: AskSteps = ask_nobody,
    live: LiveManifest | None = None,
) -> StateKeeper:
    """A keeper of stage 0 where the peers in `claims` serve it and claim to be at these steps."""
    world = world or World()
    holders = StageHolders(ME, lambda _: claims, lambda _: claims, ask)
    return StateKeeper(MANIFEST, folder, stages, holders, world, Events(), world.report_violation, live=live)


async def given_state(keeper: StateKeeper) -> StateIndex:
    message = (await keeper.answer(GetState(0), PeerId("joiner"))).message
    assert isinstance(message, StateIndex)
    return message


def test_a_joining_stage_is_filled_by_replicas_and_not_by_one_that_claims_an_absurd_step(tmp_path: Path) -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            world, initial = World(), await worker.export_state(0)
            honest = dict(zip(OTHERS[:3], (100, 101, 103), strict=True))
            for peer, step in honest.items():
                world.add(peer, replace(initial, step=step, updates=step, weights=initial.weights + 1))
            liar = world.add(OTHERS[3], replace(initial, step=10**9, weights=initial.weights + 9))
            keeper = keeper_of(worker, tmp_path, {ME: 0, **honest, OTHERS[3]: 10**9}, world)
            assert await keeper.find_checkpoints() == (0,)
            assert "fetched step 103" in await keeper.fill_stages()
            assert not liar.calls
            assert worker.step_of(0) == 103
            assert ((await worker.export_state(0)).weights[:16] == initial.weights[:16] + 1).all()

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_checkpoints_are_written_when_due_and_found_by_the_next_start(tmp_path: Path) -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            keeper = keeper_of(worker, tmp_path, {})
            await keeper.find_checkpoints()
            assert "no peer offers any" in await keeper.fill_stages()
            await worker.load_state(replace(await worker.export_state(0), step=12, agreed_step=12))
            running = asyncio.create_task(keeper.run())
            keeper.on_stepped(0, 9)
            keeper.on_stepped(0, 12)
            while newest_checkpoint(tmp_path, MANIFEST.run_id, 0) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            again = keeper_of(worker, tmp_path, {})
            assert await again.find_checkpoints() == (12,)
            assert await again.fill_stages() == "stage 0: own checkpoint of step 12; no peer offers any"

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_joining_peer_gives_its_checkpoint(tmp_path: Path) -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            before = keeper_of(worker, tmp_path, {})
            await before.fill_stages()
            await worker.load_state(replace(await worker.export_state(0), step=7, agreed_step=7))
            await before.write_checkpoints()
            joining = keeper_of(worker, tmp_path, {})
            assert (await given_state(joining)).size == 0, "it has not looked for checkpoints yet"
            await joining.find_checkpoints()
            assert (await given_state(joining)).step == 7
            with pytest.raises(NotMyStage, match="not 1"):
                await joining.answer(GetState(1), PeerId("joiner"))

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize("answers", [{OTHERS[0]: 40}, {OTHERS[0]: 0, OTHERS[1]: 40}])
def test_a_joiner_asks_whether_a_step_was_taken_and_does_not_begin_from_the_seed(
    tmp_path: Path, answers: dict[PeerId, int]
) -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            world, initial, asked = World(), await worker.export_state(0), list[PeerId]()
            for peer, step in answers.items():
                world.add(peer, replace(initial, step=step, updates=step, weights=initial.weights + 1))

            async def ask(stage: int, peers: Collection[PeerId]) -> dict[PeerId, int]:
                asked.extend(peers)
                return {peer: answers[peer] for peer in peers}

            keeper = keeper_of(worker, tmp_path, dict.fromkeys(answers, 0), world, ask)
            assert "fetched step 40" in await keeper.fill_stages()
            assert asked == list(answers)
            assert worker.step_of(0) == 40

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_beside_replicas_that_do_not_answer_nobody_begins_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agora.state.keeper.RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr("agora.state.keeper.SOURCES_TIMEOUT_S", 0.2)

    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            serving = {OTHERS[0]: 0}

            async def ask(stage: int, peers: Collection[PeerId]) -> dict[PeerId, int]:
                return {}

            keeper = keeper_of(worker, tmp_path, serving, ask=ask)
            with pytest.raises(Unavailable, match="do not say whether a step was taken"):
                await keeper.fill_stages()
            serving.clear()
            assert "no peer" in await keeper.fill_stages(), "they serve no more"

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_joiner_whose_only_source_has_left_waits_for_its_return_and_then_keeps_its_initial_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr("agora.state.keeper.RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr("agora.state.keeper.LAST_HOLDER_TIMEOUT_S", 20.0 if comes_back else 0.3)

    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            world, initial, (source, other, *_) = World(), await worker.export_state(0), OTHERS
            claims = {source: 40}  # it says so, and cannot be reached
            keeper = keeper_of(worker, tmp_path, claims, world)
            filling = asyncio.create_task(keeper.fill_stages())
            await asyncio.sleep(0.5)
            assert not filling.done(), "a source that still offers the stage is tried again"
            claims.clear()
            if comes_back:
                await asyncio.sleep(0.05)
                world.add(other, replace(initial, step=40, updates=40, weights=initial.weights + 1))
                claims[other] = 40
            assert ("fetched step 40" if comes_back else "no peer offers any") in await filling
            assert worker.step_of(0) == (40 if comes_back else 0)

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_the_wait_for_a_source_that_leaves_during_a_long_transfer_begins_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer may have lasted longer than the wait, or than the patience with sources that fail."""
    passed_s = 0.0
    monkeypatch.setattr("agora.state.keeper.loop_time", lambda: asyncio.get_running_loop().time() + passed_s)
    monkeypatch.setattr("agora.state.keeper.RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr("agora.state.chunk_fetch.FIRST_PAUSE_S", 0.01)

    async def whole() -> None:
        nonlocal passed_s
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            world, initial, (source, other, *_) = World(), await worker.export_state(0), OTHERS
            fetched = replace(initial, step=40, updates=40, weights=initial.weights + 1)
            leaving = world.add(source, fetched, hang_after=0)
            claims = {source: 40}
            filling = asyncio.create_task(keeper_of(worker, tmp_path, claims, world).fill_stages())
            while not leaving.open_chunks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            passed_s = LAST_HOLDER_TIMEOUT_S + SOURCES_TIMEOUT_S
            claims.clear()
            leaving.die()
            ended, _ = await asyncio.wait([filling], timeout=0.5)
            assert not ended
            world.add(other, fetched)
            claims[other] = 40
            assert "fetched step 40" in await filling

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_checkpoints_are_due_and_kept_as_the_manifest_at_their_step_says(tmp_path: Path) -> None:
    changed = {"checkpoint.every": 3, "checkpoint.keep": 2, "optimizer.total_steps": 1000}
    live = LiveManifest(MANIFEST, [amendment(MANIFEST, changed, 20)])

    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (worker,):
            keeper = keeper_of(worker, tmp_path, {}, live=live)
            await keeper.find_checkpoints()
            await keeper.fill_stages()
            running = asyncio.create_task(keeper.run())
            folder = stage_folder(tmp_path, 0)
            for step in range(10, 30):
                await worker.load_state(replace(await worker.export_state(0), step=step, agreed_step=step))
                before = newest_checkpoint(tmp_path, MANIFEST.run_id, 0)
                keeper.on_stepped(0, step)
                if step in (10, 20, 21, 24, 27):
                    while newest_checkpoint(tmp_path, MANIFEST.run_id, 0) == before:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            newest = newest_checkpoint(tmp_path, MANIFEST.run_id, 0)
            assert newest is not None and newest.step == 27
            while len(checkpoint_folders(folder)) != 2:  # noqa: ASYNC110 - the others are removed after it was written
                await asyncio.sleep(0.01)
            running.cancel()

    asyncio.run(asyncio.wait_for(whole(), 60))
