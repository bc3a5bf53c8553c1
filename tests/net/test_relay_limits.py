"""A relay's circuits are counted from the moment that they are allowed, and end with the caller that is not told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from agora_protocol.ids import PeerId

from agora.core.calls import ConnectionBroken
from agora.net.nat import circuit_wire
from agora.net.nat.circuit_wire import CircuitMessage, HopType, Status, StopType
from agora.net.nat.relay import CIRCUITS_PER_PEER, RelayService
from tests.virtual_time import run

CALLER, SERVED = PeerId("guest"), PeerId("served")


class Stream:
    """One end of a hop or stop stream: it says `says`, and keeps what is written. Reads end once it is aborted."""

    is_relayed = False

    def __init__(self, peer: PeerId, says: bytes, breaks_at_write: bool = False) -> None:
        self.peer = peer
        self.written: list[bytes] = []
        self.aborted = asyncio.Event()
        self._says = says
        self._breaks_at_write = breaks_at_write

    async def read_message(self, max_bytes: int) -> bytes:
        return self._says[1:]  # without the length

    async def read(self) -> bytes:
        await self.aborted.wait()
        return b""

    async def write(self, data: bytes) -> None:
        if self._breaks_at_write:
            raise ConnectionBroken("the stream ended")
        self.written.append(data)

    def abort(self) -> None:
        self.aborted.set()

    @property
    def status(self) -> Status:
        return Status(circuit_wire.decode_hop(self.written[0][1:]).status)


class Host:
    """Opens streams to the served peer, which accepts every circuit after `answer_s` seconds."""

    rate_limiter = None

    def __init__(self, answer_s: float) -> None:
        self.opened: list[Stream] = []
        self.serve: Callable[[Stream], Awaitable[None]] = lambda _: asyncio.sleep(0)
        self._answer_s = answer_s

    async def serve_raw(self, protocol: str, serve: Callable[[Stream], Awaitable[None]]) -> None:
        self.serve = serve

    async def open_raw(self, peer: PeerId, protocol: str, deadline_s: float) -> Stream:
        await asyncio.sleep(self._answer_s)
        accepts = CircuitMessage(StopType.STATUS, status=Status.OK)
        self.opened.append(Stream(peer, circuit_wire.encode_stop(accepts)))
        return self.opened[-1]


async def relay_of(host: Host) -> None:
    """Starts a relay on the host, with a reservation of SERVED."""
    await RelayService(host, 4, lambda _: True).start()
    await host.serve(Stream(SERVED, circuit_wire.encode_hop(CircuitMessage(HopType.RESERVE))))


def connecting(breaks_at_write: bool = False) -> Stream:
    return Stream(CALLER, circuit_wire.encode_hop(CircuitMessage(HopType.CONNECT, SERVED)), breaks_at_write)


def test_circuits_asked_for_at_once_count_while_they_are_opened() -> None:
    async def main() -> None:
        host = Host(answer_s=1.0)
        await relay_of(host)
        streams = [connecting() for _ in range(CIRCUITS_PER_PEER + 3)]
        serving = [asyncio.create_task(host.serve(stream)) for stream in streams]
        await asyncio.sleep(2.0)
        answers = [stream.status for stream in streams]
        assert answers.count(Status.OK) == CIRCUITS_PER_PEER
        assert answers.count(Status.RESOURCE_LIMIT_EXCEEDED) == 3
        streams[0].abort()
        await asyncio.sleep(0.1)
        again = connecting()
        serving.append(asyncio.create_task(host.serve(again)))
        await asyncio.sleep(2.0)
        assert again.status == Status.OK, "one has ended"
        for stream in (*streams, again):
            stream.abort()
        await asyncio.gather(*serving)

    run(main())


@pytest.mark.parametrize("circuits", [1, 3 * CIRCUITS_PER_PEER])
def test_a_caller_that_is_gone_before_its_answer_leaves_no_circuit(circuits: int) -> None:
    async def main() -> None:
        host = Host(answer_s=0.0)
        await relay_of(host)
        for _ in range(circuits):
            await host.serve(connecting(breaks_at_write=True))
        assert len(host.opened) == circuits, "none counts after its end"
        assert all(stream.aborted.is_set() for stream in host.opened)

    run(main())
