"""What a peer holds here and does not use is freed: payloads, answers, connections. In virtual time, in memory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from agora_protocol.frames import FrameType
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.messages import Chunk, GetChunk, GetStatus, Refusal, StatusAnswer
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.net.rpc.budgets import MAX_FRACTION_EACH, STATUS_BURST, NetLimits
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.liveness import PRESSURE_WINDOW_S, STALL_TIMEOUT_S, StallDetector
from agora.net.rpc.network import Network
from tests.net.helpers import RUN
from tests.net.test_connection import LARGE, Line, Owner, frame, request
from tests.virtual_time import run


def test_a_transfer_is_stalled_when_it_brings_nothing_or_under_pressure_too_little() -> None:
    watch = StallDetector()
    for now, moved in ((0.0, 0), (STALL_TIMEOUT_S, 1), (2 * STALL_TIMEOUT_S, 2)):
        assert not watch.is_stalled(now, moved, under_way=True, pressed=False), "a byte in time is enough"
    assert watch.is_stalled(3 * STALL_TIMEOUT_S, 2, under_way=True, pressed=False)
    assert not watch.is_stalled(0.0, 0, under_way=False, pressed=True)
    assert not watch.is_stalled(0.0, 0, under_way=True, pressed=True)
    assert not watch.is_stalled(PRESSURE_WINDOW_S, 10_000, under_way=True, pressed=True)
    assert watch.is_stalled(2 * PRESSURE_WINDOW_S, 10_100, under_way=True, pressed=True), (
        "a drip does not hold what others need"
    )


@pytest.mark.parametrize(("is_full", "timeout_s"), [(False, STALL_TIMEOUT_S), (True, PRESSURE_WINDOW_S)])
def test_a_payload_that_does_not_go_on_frees_what_it_holds(is_full: bool, timeout_s: float) -> None:
    async def work() -> None:
        owner, now = Owner(), asyncio.get_running_loop().time
        line = await Line(owner).greeted()
        line.say(request(1, LARGE)[:-1000])
        assert owner.budget.used == LARGE
        others = owner.budget.limit - LARGE if is_full else 0
        owner.budget.reserve(others)
        line.connection.tick(now())
        await asyncio.sleep(timeout_s - 0.5)
        line.connection.tick(now())
        assert line.connection.broken is None
        await asyncio.sleep(1.0)
        line.connection.tick(now())
        assert "did not go on" in str(line.connection.broken) and line.connection.incoming.payloads.held == 0
        assert owner.budget.used == others

    run(work())


async def give_chunk(call: IncomingCall) -> Reply:
    return Reply(Chunk(), [WireTensor("uint8", (STATE_CHUNK_BYTES,), memoryview(bytes(STATE_CHUNK_BYTES)))])


def test_of_256_answers_that_nobody_reads_only_a_few_are_made_and_they_are_dropped_in_time() -> None:
    async def work() -> None:
        owner, made = Owner(), 0

        async def count_and_give(call: IncomingCall) -> Reply:
            nonlocal made
            made += 1
            return await give_chunk(call)

        owner.handle = count_and_give
        line = await Line(owner).greeted()
        line.transport.full = True
        for number in range(256):
            line.say(frame(FrameType.REQUEST, 2 * number + 1, GetChunk(bytes(32), number)))
        await asyncio.sleep(0.1)
        most = MAX_FRACTION_EACH * owner.limits.max_answer_bytes
        assert made * STATE_CHUNK_BYTES <= most and sum(owner.answers.capacity.held.values()) <= most
        line.connection.tick(asyncio.get_running_loop().time())
        await asyncio.sleep(STALL_TIMEOUT_S + 1.0)
        line.connection.tick(asyncio.get_running_loop().time())
        assert "reads nothing" in str(line.connection.broken)
        await asyncio.sleep(0.1)
        assert not owner.answers.capacity.held and not line.connection.incoming._reserved

    run(work())


def test_answers_that_are_read_or_withdrawn_make_room_for_the_next() -> None:
    async def work() -> None:
        owner = Owner()
        owner.handle = give_chunk
        line = await Line(owner).greeted()
        for number in range(12):
            line.say(frame(FrameType.REQUEST, 4 * number + 1, GetChunk(bytes(32), number)))
            await asyncio.sleep(0)
            line.say(frame(FrameType.REQUEST, 4 * number + 3, GetChunk(bytes(32), number)))
            line.say(frame(FrameType.CANCEL, 4 * number + 3, None))
            await asyncio.sleep(0.01)
        assert [kind for kind, _ in line.heard()[1:]] == [FrameType.ANSWER] * 12
        assert not owner.answers.capacity.held

    run(work())


def test_the_status_is_given_a_few_times_a_second_and_no_more_often() -> None:
    async def work() -> None:
        owner = Owner()

        async def tell(call: IncomingCall) -> Reply:
            return Reply(StatusAnswer(b"{}"))

        owner.handle = tell
        line = await Line(owner).greeted()
        for number in range(100):
            line.say(frame(FrameType.REQUEST, 2 * number + 1, GetStatus()))
            await asyncio.sleep(0.001)
        kinds = [kind for kind, _ in line.heard()[1:]]
        assert STATUS_BURST <= kinds.count(FrameType.ANSWER) <= STATUS_BURST + 2
        refusals = {message.code for _, message in line.frames() if isinstance(message, Refusal)}
        assert refusals == {"busy"} and line.connection.broken is None
        for number in range(100, 400):
            line.say(frame(FrameType.REQUEST, 2 * number + 1, GetStatus()))
        assert "too-many-calls" in str(line.connection.broken) and len(owner.errors) == 1, "who goes on pays"

    run(work())


class FakeHost:
    """A host that nobody can reach: a test hands streams to what it serves."""

    def __init__(self) -> None:
        self.peer = Identity.generate().peer
        self.accept: Any = None

    async def serve(self, protocol: str, limits: object, on_stream: Any) -> None:
        self.accept = on_stream


class Caller(Line):
    """A peer that opens a stream to a network."""

    def __init__(self, host: FakeHost, network: Network, peer: PeerId, prefix: str) -> None:
        self.peer = peer
        self.hello = frame(FrameType.HELLO, 0, Gate(peer, RunId(RUN), "test").hello_to(host.peer))
        super().__init__(cast(Owner, _Taker(host, network, peer, prefix, self)))

    async def greeted(self) -> Caller:
        await asyncio.sleep(0)
        self.say(self.hello)
        await asyncio.sleep(0)
        return self


class _Taker(Owner):
    """Stands for the owner of a Line's own connection, which is the network's instead."""

    def __init__(self, host: FakeHost, network: Network, peer: PeerId, prefix: str, caller: Caller) -> None:
        super().__init__()
        self.limits, self.budget, self.answers = network.limits, network.budget, network.answers
        self._host, self._peer, self._prefix, self._caller = host, peer, prefix, caller

    def spawn(self, work: Any) -> Any:
        """Closes the start of the Line's own connection, and opens the stream to the network."""
        work.close()
        stream = self._caller.connection.stream
        stream.address_prefix = self._prefix
        self._host.accept(stream, self._peer, "direct")


def test_512_silent_connections_leave_room_for_those_who_speak() -> None:
    async def work() -> None:
        host = FakeHost()
        network = Network(host, Gate(host.peer, RunId(RUN), "test"), give_chunk, NetLimits())
        await network.start()
        network.spawn(network.check_connections())
        first = await Caller(host, network, Identity.generate().peer, "198.51.100.0/24").greeted()
        for number in range(512):
            Caller(host, network, PeerId(f"silent {number}"), "203.0.113.0/24")
        late = await Caller(host, network, Identity.generate().peer, "192.0.2.0/24").greeted()
        assert network.connection_to(first.peer) is not None, "whoever has said HELLO stays"
        assert network.connection_to(late.peer) is not None, "and whoever says it comes in"
        assert len(network.paths) <= network.limits.max_silent + 2
        await asyncio.sleep(network.limits.hello_s + 1.0)
        assert network.paths.keys() == {first.peer, late.peer}
        await network.close()

    run(work())
