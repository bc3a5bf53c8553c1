"""What a peer that breaks the protocol can do: cost itself its connection, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agora_protocol.errors import PROTOCOL_CODES, NotAdmitted
from agora_protocol.frames import FrameType, Prefix, decode_header, encode_frame
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import MAX_HEADER_BYTES, PREFIX_BYTES, PROTOCOL_NAME
from agora_protocol.messages import (
    CallProgress,
    GetStatus,
    Message,
    Ping,
    Pong,
    Processed,
    Refusal,
)
from agora_protocol.packing import pack
from hivemind.p2p import PeerID

from agora.core.calls import ConnectionBroken
from agora.core.clock import loop_time
from agora.net.rpc.budgets import NetLimits
from agora.net.rpc.gate import Gate
from agora.swarm.peer_score import PeerScore, Violation
from tests.net.helpers import RUN, Peer, after, boundary, echo, peers, process, run, until

LENIENT = NetLimits(max_payload_bytes=65_536)


def hello_frame(sender: Peer, to: Peer, run_id: str = RUN, version: int = 1) -> bytes:
    """The first frame of a stream from one peer to another."""
    hello = Gate(sender.id, RunId(run_id), "raw", version=version).hello_to(to.id)
    return b"".join(encode_frame(FrameType.HELLO, 0, hello))


class Raw:
    """A stream to a peer over which a test says whatever it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes | Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self.writer.write(part if isinstance(part, bytes) else b"".join(part))

    async def next(self) -> tuple[Prefix, Message | None]:
        prefix = Prefix.parse(await self.reader.readexactly(PREFIX_BYTES))
        message, _ = decode_header(prefix, await self.reader.readexactly(prefix.header_bytes))
        await self.reader.readexactly(prefix.payload_bytes)
        return prefix, message

    async def until_goodbye(self) -> list[tuple[Prefix, Message | None]]:
        """Everything up to the GOODBYE, or to the end of the stream."""
        seen: list[tuple[Prefix, Message | None]] = []
        with contextlib.suppress(EOFError, ConnectionError):
            while not seen or seen[-1][0].type is not FrameType.GOODBYE:
                seen.append(await self.next())
        return seen


@asynccontextmanager
async def raw_stream(a: Peer, to: Peer, greet: bytes | None = None) -> AsyncIterator[Raw]:
    _, reader, writer = await a.host.p2p.call_binary_stream_handler(PeerID.from_base58(to.id), PROTOCOL_NAME)
    raw = Raw(reader, writer)
    try:
        raw.send(hello_frame(a, to) if greet is None else greet)
        yield raw
    finally:
        writer.close()


def frames_to_mutate(peer: PeerId, hello: bytes) -> list[bytes]:
    """One good frame of every type that a peer may send unasked."""
    return [
        b"".join(encode_frame(FrameType.REQUEST, 1, process(peer), boundary(300))),
        b"".join(encode_frame(FrameType.REQUEST, 3, Ping())),
        b"".join(encode_frame(FrameType.REQUEST, 5, GetStatus())),
        b"".join(encode_frame(FrameType.CANCEL, 7, None)),
        b"".join(encode_frame(FrameType.PROGRESS, 2, CallProgress(0, peer, "accepted", 0))),
        b"".join(encode_frame(FrameType.ANSWER, 2, Processed(0.0, 1, 0.0))),
        b"".join(encode_frame(FrameType.REFUSAL, 2, Refusal("busy"))),
        hello,
    ]


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """`frame` with a byte changed, cut out or put in, cut short, doubled, or with another length in its prefix."""
    data, at = bytearray(frame), rng.randrange(len(frame))
    match rng.randrange(6):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at : at + rng.randrange(1, 9)]
        case 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 3:
            del data[at:]
        case 4:
            data += frame
        case 5:
            data[8:16] = rng.choice([b"\xff" * 8, b"\0" * 8, rng.randbytes(8), b"\0\0\1\0" + rng.randbytes(4)])
    return bytes(data)


def test_400_mutated_streams_end_typed_while_an_honest_peer_is_served_and_memory_stays_bounded() -> None:
    rng = random.Random(20)
    ends: Counter[str] = Counter()
    # Whatever length a mutation made up, this is longer; and it begins no frame.
    filler = b"\0" * (MAX_HEADER_BYTES + LENIENT.max_payload_bytes + 1024)

    async def attack(a: Peer, victim: Peer) -> None:
        hello = hello_frame(a, victim)
        good = frames_to_mutate(a.id, hello)
        async with raw_stream(a, victim, greet=mutated(hello, rng) if rng.random() < 0.1 else hello) as raw:
            raw.send(*(mutated(rng.choice(good), rng) for _ in range(3)), filler)
            async with asyncio.timeout(20):
                *_, (last, message) = await raw.until_goodbye()
            assert last.type is FrameType.GOODBYE and isinstance(message, Refusal), "no typed end"
            assert message.code in PROTOCOL_CODES
            ends[message.code] += 1

    async def main() -> None:
        async with peers(echo, echo, echo, limits=LENIENT) as (victim, attacker, honest):
            await attacker.host.connect(victim.addresses)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            served, stop = 0, False

            async def keep_calling() -> None:
                nonlocal served
                while not stop:
                    tensors = boundary(20_000, served)
                    reply = await honest.network.call(victim.id, process(honest.id), tensors, deadline=after(20))
                    assert reply.tensors[0].data == tensors[0].data
                    served += 1

            calling = asyncio.create_task(keep_calling())
            for _ in range(400):
                await attack(attacker, victim)
            stop = True
            await calling
            assert served > 50
            assert sum(ends.values()) == 400
            assert len(victim.violations) == 400 - ends["wrong-run"] - ends["wrong-version"]  # these two are none
            assert {"bad-frame", "bad-message", "too-large", "out-of-order"} <= ends.keys()
            await until(lambda: victim.network.budget.used == 0)
            assert victim.network.budget.peak <= LENIENT.max_payload_bytes * 4
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
            await attacker.network.call(victim.id, GetStatus(), deadline=after(5))  # it may still behave

    run(main, timeout_s=60)


def test_each_thing_the_protocol_forbids_is_answered_with_its_own_word() -> None:
    too_large = Prefix(FrameType.REQUEST, 1, 40, LENIENT.max_payload_bytes + 1).to_bytes()
    long_answer = Prefix(FrameType.ANSWER, 2, MAX_HEADER_BYTES + 1, 0).to_bytes()

    def request(call: int, message: Message) -> bytes:
        return b"".join(encode_frame(FrameType.REQUEST, call, message))

    def work(call: int) -> bytes:
        return b"".join(encode_frame(FrameType.REQUEST, call, process(Identity.generate().peer), boundary(300)))

    good, again = (1, RUN), b"HELLO"
    cases: list[tuple[tuple[int, str] | None, bytes, str, bool]] = [
        (None, request(1, Ping()), "out-of-order", True),
        (None, b"\xa6\x09\0\0" + bytes(12), "bad-frame", True),
        ((1, "cd" * 32), b"", "wrong-run", False),
        (good, again, "out-of-order", True),
        (good, request(2, Ping()), "out-of-order", True),
        (good, request(1, GetStatus()) + request(1, GetStatus()), "out-of-order", True),
        (good, too_large, "too-large", True),
        (good, long_answer, "too-large", True),
        (good, b"".join(encode_frame(FrameType.ANSWER, 4, Pong())), "bad-message", True),  # 4 was GetStatus
        (good, b"".join(encode_frame(FrameType.ANSWER, 900, Pong())), "out-of-order", True),
        (good, b"".join(encode_frame(FrameType.ANSWER, 1, Pong())), "out-of-order", True),
        (good, b"".join(encode_frame(FrameType.CANCEL, 2, None)), "out-of-order", True),
        (good, b"".join(work(2 * n + 1) for n in range(300)), "too-many-calls", True),
    ]

    async def slow(call: object) -> object:
        await asyncio.sleep(30)
        raise AssertionError

    async def main() -> None:
        async with peers(slow, echo, limits=LENIENT) as (victim, a):
            await a.host.connect(victim.addresses)
            for greet, said, code, violates in cases:
                victim.violations.clear()
                asked = None
                greeting = hello_frame(a, victim, greet[1], greet[0]) if greet else b""
                async with raw_stream(a, victim, greeting) as raw, asyncio.timeout(5):
                    if greet == good:
                        await until(lambda: victim.network.connection_to(a.id) is not None)
                        asked = asyncio.create_task(victim.network.call(a.id, GetStatus(), deadline=after(5)))
                        await asyncio.sleep(0)  # a connection begins with a Ping, so this is call 4
                    raw.send(hello_frame(a, victim) if said == again else said)
                    seen = await raw.until_goodbye()
                assert isinstance(seen[-1][1], Refusal) and seen[-1][1].code == code, (code, seen)
                assert [error.code for error in victim.violations] == [code] * violates
                if asked is not None:
                    with pytest.raises(ConnectionBroken):
                        await asked

    run(main)


def test_a_request_of_a_newer_version_is_refused_and_costs_its_sender_nothing() -> None:
    def newer(call: int, payload: int) -> bytes:
        header = pack((999, {"of": "a newer version"}, [["int8", [payload]]]))
        return Prefix(FrameType.REQUEST, call, len(header), payload).to_bytes() + header + bytes(payload)

    async def main() -> None:
        async with peers(echo, echo, limits=LENIENT) as (victim, a):
            await a.host.connect(victim.addresses)
            async with raw_stream(a, victim, hello_frame(a, victim)) as raw, asyncio.timeout(5):
                for number in range(20):
                    raw.send(newer(4 * number + 1, 40_000), *encode_frame(FrameType.REQUEST, 4 * number + 3, Ping()))
                answers: dict[int, Message | None] = {}
                while len(answers) < 40:
                    prefix, message = await raw.next()
                    if prefix.type in (FrameType.REFUSAL, FrameType.ANSWER):
                        answers[prefix.call] = message
            refusals = [message for call, message in answers.items() if call % 4 == 1]
            assert {message.code for message in refusals if isinstance(message, Refusal)} == {"unsupported"}
            assert all(isinstance(message, Pong) for call, message in answers.items() if call % 4 == 3)
            assert not victim.violations and victim.network.budget.used == 0

    run(main)


def test_three_violations_suspend_a_peer_for_a_while_and_nobody_else() -> None:
    suspension_s = 4.0
    events = list[Any]()
    violations = PeerScore(events.append, loop_time, suspension_s)

    async def main() -> None:
        async with peers(echo, echo, echo, score=violations) as (victim, attacker, honest):
            await attacker.host.connect(victim.addresses)
            for _ in range(3):
                async with raw_stream(attacker, victim) as raw, asyncio.timeout(5):
                    raw.send(bytes(64))
                    await raw.until_goodbye()
            assert [event.suspended_s > 0 for event in events] == [False, False, True]
            with pytest.raises(NotAdmitted, match="suspended"):
                await attacker.network.call(victim.id, GetStatus(), deadline=after(5))
            with pytest.raises(NotAdmitted, match="suspended"):
                await victim.network.call(attacker.id, GetStatus(), deadline=after(5))
            await honest.network.call(victim.id, GetStatus(), deadline=after(5))
            await asyncio.sleep(suspension_s)
            await attacker.network.call(victim.id, GetStatus(), deadline=after(5))
            violations.report_violation(attacker.id, Violation.USELESS_GRADIENT, "a violation that others found")
            with pytest.raises(NotAdmitted, match="suspended"):
                await victim.network.call(attacker.id, GetStatus(), deadline=after(5))
            with pytest.raises((NotAdmitted, ConnectionBroken)):
                await attacker.network.call(victim.id, GetStatus(), deadline=after(5))
            await until(lambda: victim.network.paths.keys() == {honest.id})

    run(main)


def test_a_banned_peer_is_neither_called_nor_met_nor_connected_to() -> None:
    banned = set[PeerId]()

    async def main() -> None:
        async with peers(echo, echo, gate={"refusal_reason": lambda peer: "banned" * (peer in banned)}) as (a, b):
            banned.add(b.id)
            dials = (
                a.network.connect(b.id),
                a.network.connect_announced(b.id, b.addresses),
                a.network.call(b.id, GetStatus(), deadline=after(5)),
            )
            for dial in dials:
                with pytest.raises(NotAdmitted, match="banned"):
                    await dial
            assert not await a.host.is_connected(b.id)

    run(main)


def test_a_peer_that_says_nothing_is_cut_off() -> None:
    async def main() -> None:
        async with peers(echo, echo, limits=NetLimits(hello_s=0.3)) as (victim, a):
            await a.host.connect(victim.addresses)
            async with raw_stream(a, victim, greet=b"") as raw, asyncio.timeout(5):
                await raw.until_goodbye()
            assert not victim.network.paths

    run(main)


def test_a_request_withdrawn_in_the_same_breath_leaves_nothing_held() -> None:
    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            await a.host.connect(b.addresses)
            async with raw_stream(a, b) as raw:
                await raw.next()
                for call in range(1, 41, 2):
                    request = encode_frame(FrameType.REQUEST, call, process(a.id), boundary(3_000))
                    raw.send([*request, *encode_frame(FrameType.CANCEL, call, None)])
                raw.send(encode_frame(FrameType.REQUEST, 99, GetStatus()))
                while (await raw.next())[0].call != 99:
                    pass
                await until(lambda: b.network.budget.used == 0)
                assert not b.violations
                connection = b.network.connection_to(a.id)
                assert (
                    connection is not None and not len(connection.incoming) and connection.incoming.payloads.held == 0
                )

    run(main)
