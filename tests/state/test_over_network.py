"""The same over real streams: what a handler gives is what a fetch takes."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from agora_protocol.messages import GetState

from agora.net.calls import IncomingCall, Reply
from agora.state.snapshot import Snapshots
from agora.state.transfer import StateFetch, TransferProgress
from tests.net.helpers import after, echo, peers, run
from tests.state.world import WINDOW, chunks, state

NUMEL = chunks(11.5)


def test_a_peer_that_closes_in_the_middle_costs_its_open_chunks() -> None:
    given = state(NUMEL)

    async def export(_: int):
        return given

    async def handle(call: IncomingCall) -> Reply:
        request = call.message
        if isinstance(request, GetState):
            answer = await snapshots.get_state(request)
        else:
            await asyncio.sleep(0.02)
            answer = await snapshots.get_chunk(request)
        return Reply(answer.message, answer.tensors)

    async def main() -> None:
        async with peers(echo, handle, handle, handle) as (joiner, *sources):
            closing: list[asyncio.Task[None]] = []

            def progress(now: TransferProgress) -> None:
                if len(fetch.board.here) == 3:
                    closing.append(asyncio.create_task(sources[0].network.close()))

            fetch = StateFetch(joiner.network, 0, NUMEL, progress=progress)
            got = await fetch.run([source.id for source in sources], deadline=after(60))
            for name in ("weights", "mean", "square"):
                np.testing.assert_array_equal(getattr(got, name), getattr(given, name))
            assert len(closing) == 1 and 0 <= fetch.board.fetched_again <= WINDOW
            await closing[0]
            assert not joiner.events

    snapshots = Snapshots(export, time.monotonic)
    run(main, timeout_s=90.0)
