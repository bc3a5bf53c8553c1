"""One connection without a network, in virtual time: payloads that wait for memory, news that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from agora_protocol.frames import FrameLimits, FrameType, Prefix, decode_header, encode_frame
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import PREFIX_BYTES
from agora_protocol.messages import CallProgress, Message, Processed, Refusal

from agora.core.calls import ConnectionBroken, Reply
from agora.net.p2pd.frame_stream import DROPPABLE_BYTES, HEAD_BYTES, FrameStream
from agora.net.rpc.budgets import GUARANTEED_BYTES, AnswerBudget, NetLimits, PayloadBudget
from agora.net.rpc.connection import Connection, ConnectionServices, IncomingCall
from agora.net.rpc.gate import Gate
from tests.net.helpers import RUN, boundary, process
from tests.net.test_streams import PEER, PREAMBLE, FakeTransport
from tests.virtual_time import VirtualLoop, run

LARGE = 2 * GUARANTEED_BYTES
ME = Identity(bytes(32)).peer
HELLO = Gate(PEER, RunId(RUN), "raw").hello_to(ME)
LIMITS = NetLimits(max_payload_bytes=1 << 20, max_held_bytes=3 * LARGE, payload_wait_s=1.0)


class Owner:
    """A network of one peer, whose handler answers after `takes_s`."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.budget = PayloadBudget(LIMITS.max_held_bytes)
        self.answers = AnswerBudget(LIMITS.max_answer_bytes)
        self.limits = LIMITS
        self.takes_s = takes_s
        self.handled: list[IncomingCall] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.errors: list[Exception] = []
        self.gate = Gate(ME, RunId(RUN), "test")

    @property
    def services(self) -> ConnectionServices:
        return ConnectionServices(
            gate=self.gate,
            handle=lambda call: self.handle(call),
            limits=self.limits,
            budget=self.budget,
            answers=self.answers,
            suspended_s=lambda _: 0.0,
            report_protocol_error=self.report_protocol_error,
            report_failure=self.report_protocol_error,
            count_sent=lambda _request, _tensors: None,
            tell_time=lambda: 0.0,
            spawn=self.spawn,
            on_ready=lambda _connection, _addresses: None,
            on_gone=lambda _: None,
        )

    async def handle(self, call: IncomingCall) -> Reply:
        self.handled.append(call)
        await asyncio.sleep(self.takes_s)
        return Reply(Processed(0.0, 1, 0.0))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def report_protocol_error(self, peer: PeerId, error: Exception) -> None:
        self.errors.append(error)


class Line:
    """A connection that a peer opened, and what this peer wrote on it."""

    def __init__(self, owner: Owner) -> None:
        stream = FrameStream(FrameLimits(max_payload_bytes=LIMITS.max_payload_bytes))
        self.transport = FakeTransport(stream)
        stream.connection_made(self.transport)
        self.transport.feed(PREAMBLE)
        self.connection = Connection(owner.services, stream, PEER, is_initiator=False, path="direct")
        owner.spawn(self.connection.start())
        self.unread = b""

    async def greeted(self) -> Line:
        await asyncio.sleep(0)
        self.say(frame(FrameType.HELLO, 0, HELLO))
        await asyncio.sleep(0)
        return self

    def say(self, *frames: bytes) -> None:
        """Writes on, as far as the other side reads."""
        self.unread += b"".join(frames)
        self.unread = self.unread[self.transport.feed(self.unread) :]

    @property
    def waits(self) -> bool:
        return self.connection.stream.is_waiting

    def heard(self) -> list[tuple[FrameType, int]]:
        return [(prefix.type, prefix.call) for prefix, _ in self.frames()]

    def frames(self) -> list[tuple[Prefix, Message | None]]:
        data, seen = b"".join(self.transport.written), []
        while data:
            prefix = Prefix.parse(data[:PREFIX_BYTES])
            end = PREFIX_BYTES + prefix.header_bytes
            seen.append((prefix, decode_header(prefix, memoryview(data)[PREFIX_BYTES:end])[0]))
            data = data[end + prefix.payload_bytes :]
        return seen


def frame(kind: FrameType, call: int, message: Message | None, tensors: Sequence[Any] = ()) -> bytes:
    return b"".join(encode_frame(kind, call, message, tensors))


def request(call: int, size: int) -> bytes:
    """With a payload of exactly `size` bytes."""
    return frame(FrameType.REQUEST, call, process(PEER), boundary(size - 8))


def test_an_admitted_request_does_not_cancel_the_next_ones_timeout() -> None:
    async def work() -> None:
        owner = Owner(takes_s=0.8)
        line = await Line(owner).greeted()
        owner.budget.reserve(owner.budget.limit)
        line.say(request(1, LARGE))
        assert line.waits
        await asyncio.sleep(0.5)
        owner.budget.release(LARGE)
        line.say(request(3, LARGE))
        await asyncio.sleep(0)
        assert line.waits and len(owner.handled) == 1, "the second waits for what the first holds"
        await asyncio.sleep(0.7)
        assert line.waits and not line.heard()[1:], "the time of the first is over, that of the second is not"
        await asyncio.sleep(0.2)
        line.say()
        await asyncio.sleep(5.0)
        assert line.heard()[1:] == [(FrameType.ANSWER, 1), (FrameType.ANSWER, 3)]

    run(work())


def test_a_wait_that_ended_leaves_no_timer_behind_however_it_ended() -> None:
    async def work() -> None:
        owner, loop = Owner(), asyncio.get_running_loop()
        lines = [await Line(owner).greeted() for _ in range(3)]
        await asyncio.sleep(20.0)
        owner.budget.reserve(owner.budget.limit)
        for line in lines:
            line.say(request(1, LARGE))
        assert all(line.waits for line in lines)
        lines[0].connection.abort("the test says so")
        owner.budget.release(LARGE)
        assert [line.waits for line in lines[1:]] == [False, True], "first come, first served"
        assert isinstance(loop, VirtualLoop) and loop.open_timers() == 1, "that of the third"
        await asyncio.sleep(2.0)
        assert lines[2].heard()[1:] == [(FrameType.REFUSAL, 1)]

    run(work())


def test_a_dial_that_gets_no_hello_ends_with_that_reason() -> None:
    async def work() -> None:
        stream = FrameStream(FrameLimits(max_payload_bytes=LIMITS.max_payload_bytes))
        transport = FakeTransport(stream)
        stream.connection_made(transport)
        transport.feed(PREAMBLE)
        connection = Connection(Owner().services, stream, PEER, is_initiator=True, path="direct")
        reason = f"no HELLO came within {LIMITS.hello_s:g} s"
        with pytest.raises(ConnectionBroken, match=reason):
            await connection.start()
        assert str(connection.broken) == reason

    run(work())


SMALL = 3_000


async def held_up(owner: Owner, count: int) -> list[Line]:
    """Lines that wait, each with a request of which all has been read, and so has an answer to us after it."""
    lines = [await Line(owner).greeted() for _ in range(count)]
    asked = [owner.spawn(_asked(line.connection)) for line in lines]
    for line in lines:
        line.say(request(1, GUARANTEED_BYTES - SMALL))  # which it may always hold
    await asyncio.sleep(0)
    owner.budget.reserve(max(0, owner.budget.limit - owner.budget.used))
    last, answer = request(3, SMALL + 1), frame(FrameType.ANSWER, 2, Processed(0.0, 1, 0.0), boundary(1_000)[:1])
    assert len(last + answer) < HEAD_BYTES
    for line in lines:
        line.say(last, answer)
    assert all(line.waits and not line.unread for line in lines)
    assert not any(task.done() for task in asked)
    return lines


def test_a_connection_that_frees_memory_on_resume_keeps_the_queue_order() -> None:
    async def work() -> None:
        owner = Owner(takes_s=100.0)
        lines = [*await held_up(owner, 1), await Line(owner).greeted(), await Line(owner).greeted()]
        for line in lines[1:]:
            line.say(request(1, LARGE))
        for freed, waits in ((SMALL + 1, [False, True, True]), (LARGE, [False, False, True]), (LARGE, [False] * 3)):
            owner.budget.release(freed)
            assert [line.waits for line in lines] == waits
        for line in lines:
            line.say()
        await asyncio.sleep(10.0)
        assert len(owner.handled) == 4
        assert not owner.errors
        assert not any(kind is FrameType.REFUSAL for line in lines for kind, _ in line.heard())

    run(work())


def test_any_number_of_held_up_connections_gets_through_at_once() -> None:
    async def work() -> None:
        for count in (1, 300):
            owner = Owner(takes_s=100.0)
            lines = await held_up(owner, count)
            owner.budget.release(owner.budget.used - owner.budget.limit + count * (SMALL + 1))
            assert not any(line.waits for line in lines)
            await asyncio.sleep(10.0)
            assert len(owner.handled) == 2 * count
            assert not owner.errors
            assert owner.budget.used == owner.budget.limit

    run(work())


async def _asked(connection: Connection) -> None:
    await connection.call(process(PEER), boundary(64), None)


def test_news_that_nobody_reads_is_dropped_and_cuts_nobody_off() -> None:
    flood = 100_000

    async def work() -> None:
        owner = Owner(takes_s=1.0)
        line = await Line(owner).greeted()
        line.say(request(1, 100))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (call,) = owner.handled
        line.transport.full = True
        for number in range(flood):
            call.progress(CallProgress(0, PEER, "accepted", number))
        assert not line.transport.aborted
        assert DROPPABLE_BYTES <= line.connection.stream.backlog < DROPPABLE_BYTES + 200
        await asyncio.sleep(2.0)
        line.transport.full = False
        line.connection.stream.resume_writing()
        news = [message.queue for _, message in line.frames() if isinstance(message, CallProgress)]
        assert news == list(range(len(news)))
        assert 300 < len(news) < 1_000
        assert line.heard()[-1] == (FrameType.ANSWER, 1)

    run(work())


def test_a_handler_whose_work_is_given_up_still_answers_and_one_that_the_caller_cancels_does_not() -> None:
    async def work() -> None:
        given_up = asyncio.get_running_loop().create_future()
        owner = Owner()

        async def handle(call: IncomingCall) -> Reply:
            await asyncio.shield(given_up)
            raise AssertionError("the future has no result")

        owner.handle = handle
        line = await Line(owner).greeted()
        line.say(request(1, 100), request(3, 100))
        await asyncio.sleep(0.5)
        line.say(frame(FrameType.CANCEL, 3, None))
        await asyncio.sleep(0.5)
        given_up.cancel()
        await asyncio.sleep(0.5)
        ((prefix, message),) = [heard for heard in line.frames() if heard[0].call]
        assert (prefix.type, prefix.call) == (FrameType.REFUSAL, 1) and isinstance(message, Refusal)
        assert message.code == "failed" and not owner.errors and not owner.tasks

    run(work())


def test_a_peer_that_says_goodbye_is_asked_nothing_more_and_the_connection_ends_when_it_has_its_answers() -> None:
    async def work() -> None:
        owner = Owner(takes_s=1.0)
        line = await Line(owner).greeted()
        line.say(request(1, 100), frame(FrameType.GOODBYE, 0, None))
        await asyncio.sleep(0.5)
        assert not line.connection.is_usable
        assert line.connection.broken is None
        await asyncio.sleep(1.0)
        assert line.heard()[-1] == (FrameType.ANSWER, 1) and line.connection.broken is not None
        assert line.transport.aborted and not owner.errors

    run(work())
