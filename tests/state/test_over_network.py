"""The same over real streams: what a handler gives is what a fetch takes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetState

from agora.core.calls import Reply
from agora.net.rpc.connection import IncomingCall
from agora.state.chunk_fetch import MAX_SOURCE_FAILURES
from agora.state.snapshot import SnapshotServer
from agora.state.state_fetch import StateFetch
from tests.net.helpers import after, echo, peers, run
from tests.state.world import CHANGE_RULE, WINDOW, World, chunks, layout_of, state

NUMEL = chunks(11.5)


def test_a_peer_that_closes_in_the_middle_costs_its_open_chunks() -> None:
    given = state(NUMEL)
    chunks_given = 0

    async def export(_: int):
        return given

    async def handle(call: IncomingCall) -> Reply:
        request = call.message
        if isinstance(request, GetState):
            answer = await snapshots.get_state(request, PeerId("joiner"))
        else:
            await asyncio.sleep(0.02)
            answer = await snapshots.get_chunk(request)
            nonlocal chunks_given
            chunks_given += 1
            if chunks_given == 4:
                closing.append(asyncio.create_task(first_source[0].network.close()))
        return answer

    async def main() -> None:
        async with peers(echo, handle, handle, handle) as (joiner, *sources):
            first_source.append(sources[0])
            fetch = StateFetch(joiner.network, 0, layout_of(NUMEL), World().report_violation, CHANGE_RULE)
            got = await fetch.run([source.id for source in sources], deadline=after(60))
            for name in ("weights", "mean", "square"):
                np.testing.assert_array_equal(got.arrays[name], given.arrays[name])
            assert len(closing) == 1
            # Its open chunks, and one for each later try to reach it again: on a slow machine it has time for these.
            assert 0 <= fetch.schedule.refetched <= WINDOW + MAX_SOURCE_FAILURES - 1
            assert chunks_given <= fetch.schedule.count + WINDOW, "a try that reaches nobody costs no bytes"
            await closing[0]
            assert not joiner.violations
            assert not joiner.failures

    closing: list[asyncio.Task[None]] = []
    first_source: list[Any] = []
    snapshots = SnapshotServer(export, lambda _: 12 * NUMEL, lambda _: 0)
    run(main, timeout_s=90.0)
