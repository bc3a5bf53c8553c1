"""(e) Boundaries on a stream: calls of agora.net beside a bare hivemind `P2P` stream, in the same two processes.

Both go through the same two libp2p daemons on the same uvloop loops. A `trip` carries the payload there and back, as a
boundary and its gradient travel; a `flow` sends payloads one way, several on their way at the same time, each answered
by a few bytes. The bare stream is written the natural way: eight bytes of length, then the payload, `readexactly` at
the other end.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from pathlib import Path
from typing import Any, Protocol

import uvloop
from agora_protocol.identity import Identity
from agora_protocol.ids import MicrobatchId, PeerId, RunId
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import WireTensor
from hivemind.p2p import PeerID

from agora.core.calls import Reply
from agora.net.p2pd.host import Host
from agora.net.rpc.connection import Handler, IncomingCall
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from benchmarks.worker import Channel

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO, SINK = "/agora-bench/echo", "/agora-bench/sink"
IN_FLIGHT = 4
DEADLINE_MS = 60_000
LENGTH = struct.Struct("<Q")


class Carrier(Protocol):
    """One way to carry payloads to the echo process."""

    async def trip(self, payload: memoryview) -> None:
        """Sends a payload to the echo process and waits until it is back."""

    async def flow(self, payload: memoryview, count: int) -> None:
        """Sends a payload `count` times, IN_FLIGHT at a time, and waits for a short answer to each."""


class AgoraCalls:
    """Requests and answers of the data plane."""

    def __init__(self, network: Network, ours: PeerId, echo: PeerId) -> None:
        self._network, self._ours, self._echo = network, ours, echo
        self._tokens = WireTensor("int32", (1,), memoryview(bytes(4)))

    async def trip(self, payload: memoryview) -> None:
        """Sends a payload to the echo process and waits until it is back."""
        reply = await self._call(payload, "train")
        assert reply.tensors[0].nbytes == len(payload)

    async def flow(self, payload: memoryview, count: int) -> None:
        """Sends a payload `count` times, IN_FLIGHT at a time, and waits for a short answer to each."""
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def one() -> None:
            async with slots:
                await self._call(payload, "evaluate")

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())

    async def _call(self, payload: memoryview, purpose: str) -> Reply:
        boundary = WireTensor("uint8", (len(payload),), payload)
        request = Process(
            microbatch=MicrobatchId(os.urandom(16)),
            origin=self._ours,
            stage=1,
            purpose=purpose,
            deadline_ms=DEADLINE_MS,
        )
        deadline = asyncio.get_running_loop().time() + DEADLINE_MS / 1000
        return await self._network.call(self._echo, request, [boundary, self._tokens], deadline=deadline)


class BareStreams:
    """Two hivemind binary streams, one that echoes and one that only acknowledges."""

    def __init__(self, host: Host, echo: PeerId) -> None:
        self._p2p, self._echo = host.p2p, PeerID.from_base58(echo)
        self._streams: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def trip(self, payload: memoryview) -> None:
        """Sends a payload to the echo process and waits until it is back."""
        reader, writer = await self._stream(ECHO)
        await send(writer, payload)
        assert len(await receive(reader)) == len(payload)

    async def flow(self, payload: memoryview, count: int) -> None:
        """Sends a payload `count` times, IN_FLIGHT at a time, and waits for a short answer to each."""
        reader, writer = await self._stream(SINK)
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def acknowledged() -> None:
            for _ in range(count):
                await receive(reader)
                slots.release()

        async with asyncio.TaskGroup() as group:
            group.create_task(acknowledged())
            for _ in range(count):
                await slots.acquire()
                await send(writer, payload)

    async def _stream(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if name not in self._streams:
            _, reader, writer = await self._p2p.call_binary_stream_handler(self._echo, name)
            self._streams[name] = reader, writer
        return self._streams[name]


async def send(writer: asyncio.StreamWriter, payload: bytes | memoryview) -> None:
    """Writes a payload behind its length."""
    writer.write(LENGTH.pack(len(payload)))
    writer.write(payload)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> bytes:
    """Reads the payload that `send` has written."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def serve_echo(spec: dict[str, Any], channel: Channel) -> None:
    """Runs the echo process: answers its peer id and addresses, then serves until the parent closes the pipe."""
    uvloop.run(_echo(Path(spec["folder"]), channel))


def serve_caller(spec: dict[str, Any], channel: Channel) -> None:
    """Answers {"carrier", "shape": "trip" or "flow", "bytes", "count"} with the seconds of each trip or of the flow."""
    uvloop.run(_caller(spec, channel))


async def _echo(folder: Path, channel: Channel) -> None:
    host, network = await join(folder / "echo.key", _answer)
    await host.p2p.add_binary_stream_handler(ECHO, _bare_echo)
    await host.p2p.add_binary_stream_handler(SINK, _bare_sink)
    channel.say({"peer": host.peer, "addresses": list(await host.addresses())})
    await asyncio.to_thread(lambda: list(channel.orders()))
    await network.close()
    await host.close()


async def _caller(spec: dict[str, Any], channel: Channel) -> None:
    host, network = await join(Path(spec["folder"]) / "caller.key", _answer)
    await host.connect(spec["addresses"])
    carriers: dict[str, Carrier] = {
        "agora": AgoraCalls(network, host.peer, PeerId(spec["peer"])),
        "bare": BareStreams(host, PeerId(spec["peer"])),
    }
    channel.say({"ready": True})
    orders = channel.orders()
    while (order := await asyncio.to_thread(next, orders, None)) is not None:
        payload = memoryview(os.urandom(int(order["bytes"])))
        seconds = await _measure(carriers[order["carrier"]], order["shape"], payload, int(order["count"]))
        channel.say({"seconds": seconds})
    await network.close()
    await host.close()


async def _measure(carrier: Carrier, shape: str, payload: memoryview, count: int) -> list[float]:
    if shape == "flow":
        begin = time.perf_counter()
        await carrier.flow(payload, count)
        return [time.perf_counter() - begin]
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        await carrier.trip(payload)
        seconds.append(time.perf_counter() - begin)
    return seconds


async def join(key: Path, handler: Handler) -> tuple[Host, Network]:
    """Starts a host on loopback with a fresh identity, kept at `key`, and a network that answers by `handler`."""
    Identity.create(key)
    host = await Host.create(identity_path=key, listen=LOOPBACK)
    addresses = await host.addresses()
    network = Network(host, Gate(host.peer, RunId("00" * 32), "agora-bench", lambda: addresses), handler)
    await network.start()
    return host, network


async def _answer(call: IncomingCall) -> Reply:
    assert isinstance(call.message, Process)
    answer = Processed(loss_sum=0.0, tokens=1, busy_ms=0.0)
    return Reply(answer, [call.tensors[0]] if call.message.purpose == "train" else [])


async def _bare_echo(_info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        await send(writer, await receive(reader))


async def _bare_sink(_info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        await receive(reader)
        await send(writer, b"got it")
