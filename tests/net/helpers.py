"""What the tests of the network share: a uvloop to run in, hosts with networks on them, and requests to send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import uvloop
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.messages import Process, Processed, StatusAnswer
from agora_protocol.tensors import WireTensor
from agora_protocol.tickets import READER

from agora.core.calls import Reply
from agora.net.dht.directory import Directory
from agora.net.p2pd.host import Host
from agora.net.rpc.budgets import NetLimits
from agora.net.rpc.connection import Handler, IncomingCall
from agora.net.rpc.dialling import DialStrategy
from agora.net.rpc.gate import Gate
from agora.net.rpc.network import Network
from agora.net.shaping.bandwidth import UNLIMITED, RateLimits
from agora.net.shaping.link import LinkSpec
from agora.swarm.peer_score import PeerScore

T = TypeVar("T")
RUN = "ab" * 32
MEGABYTE = 1 << 20


def run(main: Callable[[], Awaitable[T]], timeout_s: float = 90.0) -> T:
    """Run `main` on a uvloop of its own; whatever it leaves unhandled on the loop fails the test."""
    unhandled: list[dict[str, Any]] = []

    async def bounded() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with asyncio.timeout(timeout_s):
            return await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(bounded())
    assert not unhandled, unhandled
    return result


async def echo(call: IncomingCall) -> Reply:
    """Send the boundary back as its own gradient."""
    if not isinstance(call.message, Process):
        return Reply(StatusAnswer(b"{}"))
    return Reply(Processed(0.0, 1, 0.0), [call.tensors[0]])


@dataclass
class Peer:
    """One peer of a test: a host, its network, and what its network reported."""

    host: Host
    network: Network
    identity: Identity
    addresses: tuple[str, ...]
    violations: list[ProtocolError]
    failures: list[Exception]

    @property
    def id(self) -> PeerId:
        return self.host.peer

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self.network.close()
        await self.host.close()


async def make_host(folder: Path, name: str, **options: Any) -> tuple[Host, Identity]:
    identity = Identity.load_or_create(folder / f"{name}.key")
    return await Host.create(identity_path=folder / f"{name}.key", **options), identity


async def make_peer(
    folder: Path,
    name: str,
    handler: Handler = echo,
    limits: NetLimits | None = None,
    run_id: str = RUN,
    version: int = 1,
    oldest_version: int = 1,
    link: LinkSpec | None = None,
    score: PeerScore | None = None,
    gate: dict[str, Any] | None = None,
    rates: RateLimits = UNLIMITED,
    allow_private: bool = True,
    dial_strategy: DialStrategy | None = None,
) -> Peer:
    """score: judges who is suspended; without one nobody is. gate: further arguments of the Gate. rates: the
    owner's limits on the line.
    """
    host, identity = await make_host(folder, name, link=link, limits=rates, allow_private=allow_private)
    try:
        addresses = await host.addresses()
        violations: list[ProtocolError] = []
        failures: list[Exception] = []

        def report_protocol_error(peer: PeerId, error: ProtocolError) -> None:
            violations.append(error)
            if score is not None:
                score.report_protocol_error(peer, error)

        network = Network(
            host,
            Gate(
                host.peer,
                RunId(run_id),
                "test",
                lambda: addresses,
                version=version,
                oldest_version=oldest_version,
                **gate or {},
            ),
            handler,
            limits,
            report_protocol_error=report_protocol_error,
            suspended_s=score.suspended_s if score is not None else lambda _: 0.0,
            report_failure=lambda _, error: failures.append(error),
            dial_strategy=dial_strategy,
        )
        await network.start()
        network.spawn(network.check_connections())
    except BaseException:
        await host.close()
        raise
    return Peer(host, network, identity, addresses, violations, failures)


async def open_directory(host: Host, run: RunId, bootstrap: Sequence[str], **options: Any) -> Directory:
    """A started node of the DHT, joined through whoever answers at `bootstrap`."""
    directory = Directory(host, run, **options)
    await directory.start()
    await directory.bootstrap(bootstrap)
    return directory


@asynccontextmanager
async def peers(
    *handlers: Handler, limits: NetLimits | None = None, reader: int | None = None, **options: Any
) -> AsyncIterator[list[Peer]]:
    """One peer for each handler, each knowing the others' addresses; all closed at the end, however it comes.

    reader: the number of the peer that asks to be a reader; all others are members.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="agora-test-")))
        made = []
        for number, handler in enumerate(handlers):
            role = {"gate": {"role": READER}} if number == reader else {}
            peer = await make_peer(folder, f"p{number}", handler, limits, **options | role)
            stack.push_async_callback(peer.close)
            made.append(peer)
        introduce(*made)
        yield made


def kill_p2pd(host: Host) -> None:
    os.kill(host.p2p._child.pid, signal.SIGKILL)


def introduce(*made: Peer) -> None:
    for peer in made:
        for other in made:
            if other is not peer:
                peer.network.address_book.learn(other.id, other.addresses)


def after(seconds: float) -> float:
    """A deadline."""
    return asyncio.get_running_loop().time() + seconds


def process(origin: PeerId, deadline_ms: int = 20_000) -> Process:
    return Process(os.urandom(16), origin, 0, "train", deadline_ms, ())


def boundary(size: int, seed: int = 0) -> list[WireTensor]:
    """A tensor of `size` bytes that no mistake would reproduce, and a token tensor."""
    return [
        WireTensor("uint8", (size,), memoryview(seed.to_bytes(4, "big") + os.urandom(size - 4))),
        WireTensor("int32", (1, 2), memoryview(b"\0" * 8)),
    ]


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
