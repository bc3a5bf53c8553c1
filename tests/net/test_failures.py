"""What callers see when something dies: streams, daemons, whole processes, and peers that fall silent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agora_protocol.ids import PeerId
from agora_protocol.messages import GetStatus, Processed

from agora.core.calls import ConnectionBroken, Reply
from agora.net.rpc.budgets import NetLimits
from agora.net.rpc.connection import IncomingCall
from tests.net.helpers import MEGABYTE, Peer, after, boundary, echo, kill_p2pd, peers, process, run, until

ROOT = Path(__file__).parents[2]
LIMITS = NetLimits(ping_after_s=0.5, pong_within_s=3.0)


async def hang(call: IncomingCall) -> Reply:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits that long")


async def started(task: asyncio.Task[Reply], peer: Peer, callee: PeerId) -> None:
    """Wait until a call is open."""
    await until(lambda: callee in peer.network.paths)
    await asyncio.sleep(0.1)
    assert not task.done()


@asynccontextmanager
async def another_process(folder: Path) -> AsyncIterator[tuple[Process, PeerId, list[str], int]]:
    """A peer in a process of its own, whose handler hangs: (process, peer id, addresses, pid of its p2pd)."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}", "OMP_NUM_THREADS": "1"}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.net.lone_peer", str(folder), cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE
    )
    try:
        assert child.stdout is not None
        peer, addresses, daemon = json.loads(await child.stdout.readline())
        yield child, peer, addresses, daemon
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()


def test_when_a_p2pd_is_killed_both_sides_know_at_once_and_the_callees_work_goes_on() -> None:
    async def main() -> None:
        entered, finished = asyncio.Event(), asyncio.Event()
        calls = []

        async def slow(call: IncomingCall) -> Reply:
            calls.append(call)
            entered.set()
            await asyncio.wait_for(finished.wait(), 20)
            return Reply(Processed(0.0, 1, 0.0))

        async with peers(echo, slow) as (a, b):
            call = asyncio.create_task(a.network.call(b.id, process(a.id), boundary(64), deadline=after(20)))
            await entered.wait()
            kill_p2pd(b.host)
            with pytest.raises(ConnectionBroken) as broken:
                await call
            assert "silent" not in str(broken.value), "it fails at once"
            await b.host.died.wait()
            await until(lambda: calls[0].is_requester_gone)
            assert b.network.budget.used > 0  # the handler was not stopped: its result may be asked for again
            finished.set()
            await until(lambda: b.network.budget.used == 0)
            with pytest.raises(ConnectionBroken, match="p2pd is gone"):
                await b.network.call(a.id, GetStatus(), deadline=after(10))
            assert not a.host.died.is_set()

    run(main)


def test_when_our_own_p2pd_is_killed_our_calls_fail_at_once() -> None:
    async def main() -> None:
        async with peers(echo, hang) as (a, b):
            call = asyncio.create_task(a.network.call(b.id, process(a.id), boundary(64), deadline=after(20)))
            await started(call, a, b.id)
            kill_p2pd(a.host)
            with pytest.raises(ConnectionBroken) as broken:
                await call
            assert "silent" not in str(broken.value), "they fail at once"
            await a.host.died.wait()
            await until(lambda: not a.network.paths)

    run(main)


def test_a_broken_stream_is_opened_again_by_the_next_call() -> None:
    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            for _ in range(3):
                await a.network.call(b.id, GetStatus(), deadline=after(10))
                connection = a.network.connection_to(b.id)
                assert connection is not None
                connection.stream.abort()
                await until(lambda: not a.network.paths)
            await until(lambda: not b.network.paths)
            await b.network.call(a.id, GetStatus(), deadline=after(10))

    run(main)


def test_a_large_request_whose_peer_dies_half_way_fails_at_once_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            await a.network.call(b.id, GetStatus(), deadline=after(10))
            tensors = boundary(128 * MEGABYTE)
            call = asyncio.create_task(a.network.call(b.id, process(a.id), tensors, deadline=after(20)))
            await until(lambda: b.network.carried_bytes[0] > MEGABYTE)
            assert b.network.budget.used > 128 * MEGABYTE
            connection = b.network.connection_to(a.id)
            assert connection is not None
            connection.stream.abort()
            with pytest.raises(ConnectionBroken):
                await call
            await until(lambda: b.network.budget.used == 0)

    run(main)


def test_a_stopped_process_is_left_after_silence_and_a_killed_one_at_once_with_its_p2pd(tmp_path: Path) -> None:
    async def main() -> None:
        async with peers(echo, limits=LIMITS) as (a,), another_process(tmp_path) as (child, peer, addresses, daemon):
            a.network.address_book.learn(peer, addresses)

            def hanging() -> asyncio.Task[Reply]:
                return asyncio.create_task(a.network.call(peer, process(a.id), boundary(64), deadline=after(60)))

            call = hanging()
            await started(call, a, peer)
            received, _ = a.network.carried_bytes
            await until(lambda: call.done() or a.network.carried_bytes[0] > received)
            assert not call.done(), "its handler hangs, but somebody answers Ping"
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(ConnectionBroken, match="silent"):
                await call

            child.send_signal(signal.SIGCONT)
            call = hanging()
            await started(call, a, peer)
            child.kill()
            with pytest.raises(ConnectionBroken) as broken:
                await call
            assert "silent" not in str(broken.value), "it is left at once"
            await child.wait()
            await until(lambda: not Path(f"/proc/{daemon}").exists())

    run(main)
