"""Whom a joiner believes about how far a stage is; and a replica in doubt gives nothing, whenever it came to doubt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.errors import Refused
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.messages import GetState, StateIndex

from agora.node.keeping import Keeper, KeeperConfig
from agora.state.layout import Layout, StageState
from tests.train.support import Compute, pipeline_of, small_manifest

ME, *OTHERS = (Identity(bytes([n]) * 32).peer for n in range(1, 6))


class Claim(SimpleNamespace):
    """What the view knows of a peer that serves stage 0."""

    def step_of(self, stage: int) -> int:
        """What it says."""
        return int(self.step)


def keeper_of(compute: Any, steps: dict[PeerId, int], folder: Path) -> Keeper:
    claims = [Claim(peer=peer, step=step) for peer, step in steps.items()]
    view = SimpleNamespace(replicas=lambda stage: claims, claimants=lambda stage: claims)
    membership: Any = SimpleNamespace(view=view)
    config = KeeperConfig(ME, 1, RunId("0" * 64), small_manifest(), folder)
    caller: Any = None

    async def publish(cut: object, lifetime_s: float) -> None:
        """Nobody hears of cuts here."""

    return Keeper(
        config, compute, membership, caller, lambda _: None, publish=publish, strike=lambda _peer, _error: None
    )


def test_one_replica_that_says_an_absurd_step_does_not_decide_where_a_joiner_begins(tmp_path: Path) -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (compute,):
            honest = dict(zip(OTHERS[:3], (100, 101, 103), strict=True))
            offers = keeper_of(compute, {ME: 0, **honest, OTHERS[3]: 10**9}, tmp_path)._offers(0)
            assert offers == honest
            near = {**honest, OTHERS[3]: 103 + 100}
            assert keeper_of(compute, {ME: 0, **near}, tmp_path)._offers(0) == near, "who is ahead may well be"
            few = {OTHERS[0]: 100, OTHERS[1]: 10**9}
            assert keeper_of(compute, {ME: 0, **few}, tmp_path)._offers(0) == few, "of two nobody can tell"

    asyncio.run(asyncio.wait_for(whole(), 30))


class SlowCopy:
    """A stage whose state takes as long to copy as the test wants."""

    span = Span(0, 0)

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.copying, self.go_on = asyncio.Event(), asyncio.Event()

    def layout(self, stage: int) -> Layout:
        """The real one's."""
        return self._compute.layout(stage)

    async def export_state(self, stage: int) -> StageState:
        """Waits for `go_on`."""
        self.copying.set()
        await self.go_on.wait()
        return await self._compute.export_state(stage)


def test_a_state_that_was_being_copied_when_it_came_into_doubt_is_not_given(tmp_path: Path) -> None:
    async def whole() -> None:
        async with pipeline_of(small_manifest(), ["0"]) as (compute,):
            slow = SlowCopy(compute)
            keeper = keeper_of(slow, {}, tmp_path)
            await keeper.start()
            asked = asyncio.create_task(keeper.give(GetState(0)))
            await slow.copying.wait()
            keeper.doubt(0)
            slow.go_on.set()
            with pytest.raises(Refused, match="not sure"):
                await asked
            with pytest.raises(Refused, match="not sure"):
                await keeper.give(GetState(0))
            keeper.trust(0)
            given = (await keeper.give(GetState(0))).message
            assert isinstance(given, StateIndex) and given.size > 0

    asyncio.run(asyncio.wait_for(whole(), 30))
