"""Opens TCP connections through the NATs of both ends, and carries ordinary libp2p connections through them.

Both peers connect at the same time, from the port at which their p2pd listens and to the address from which a common
neighbour sees the other; each one's packet opens its own NAT for the other's. The socket must stay the same from the
first packet on: the NAT drops an answer to any other. p2pd dials in this way only with four observers of its address.
So this module makes the connection and carries p2pd's bytes through it: the dialler's p2pd dials a port on loopback,
and the other's p2pd is dialled on loopback. The two p2pds authenticate and encrypt as on any other connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any, Final

from agora_protocol.ids import PeerId

from agora.core.calls import ConnectionBroken
from agora.core.clock import loop_time
from agora.net.p2pd.addresses import host_and_port
from agora.net.p2pd.host import Host, SimultaneousOpen
from agora.net.p2pd.raw_stream import READ_BYTES, RawStream, splice

# Seconds after which an attempt to open a hole is given up: time for three packets of each end.
PUNCH_TIMEOUT_S: Final = 4.0
RETRY_DELAY_S: Final = 0.1  # seconds from a refused connection to the next attempt
# Maximum number of holes that are open, or being opened, at the same time; see HolePuncher.has_room.
MAX_HOLES: Final = 64
_FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}


class HolePuncher:
    """Punches holes: TCP connections through NATs, each kept open as long as the p2pd connection through it lasts."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting = 0  # holes that `connect` is opening

    def has_room(self) -> bool:
        """Returns whether fewer than MAX_HOLES are open or being opened; `connect` and `expect` do not check this."""
        return len(self._tasks) + self._connecting < MAX_HOLES

    async def connect(self, peer: PeerId, address: str) -> None:
        """Opens a hole to `address` and has p2pd dial `peer` through it. `peer` must call `expect` at the same time.

        The hole then stays open until the connection ends; it is closed immediately if p2pd had a connection to `peer`
        already. Raises ConnectionBroken when the hole or the dial fails.
        """
        self._connecting += 1
        try:
            hole = await self._open(address)
        finally:
            self._connecting -= 1
        accepted: asyncio.Future[RawStream] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = RawStream(reader, writer)
            if accepted.done():
                stream.abort()
            else:
                accepted.set_result(stream)

        with contextlib.ExitStack() as undo:
            undo.callback(hole.abort)
            try:
                server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=READ_BYTES)
            except OSError as error:
                raise ConnectionBroken(f"no port for the connection through the hole ({error.strerror})") from error
            undo.pop_all()
        port = int(server.sockets[0].getsockname()[1])
        self._start(self._carry(hole, accepted, port))
        try:
            await self._host.reach(peer, [f"/ip4/127.0.0.1/tcp/{port}"], PUNCH_TIMEOUT_S)
        except SimultaneousOpen as error:
            raise ConnectionBroken(str(error)) from None
        finally:
            server.close()
            if not accepted.done():
                accepted.cancel()

    def expect(self, address: str) -> None:
        """Starts a task that opens a hole to `address`, and splices it to a connection to this host's p2pd.

        It is called on the peer that is dialled, while the other one calls `connect`. A failure is not reported.
        """
        self._start(self._serve(address))

    async def close(self) -> None:
        """Closes all holes, and waits until their tasks have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="hole")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, hole: RawStream, accepted: asyncio.Future[RawStream], port: int) -> None:
        self._host.tunnel_ports.add(port)
        try:
            await splice(await accepted, hole)
        finally:
            hole.abort()
            self._host.tunnel_ports.discard(port)

    async def _serve(self, address: str) -> None:
        with contextlib.suppress(ConnectionBroken, OSError):
            hole = await self._open(address)
            with contextlib.ExitStack() as undo:
                undo.callback(hole.abort)
                reader, writer = await asyncio.open_connection(
                    *self._host.listen_endpoints[_kind(address)], limit=READ_BYTES
                )
                port = int(writer.get_extra_info("sockname")[1])
                self._host.tunnel_ports.add(port)
                undo.callback(self._host.tunnel_ports.discard, port)
                await splice(RawStream(reader, writer), hole)

    async def _open(self, address: str) -> RawStream:
        parts = host_and_port(address)
        if parts is None or parts[0] not in self._host.listen_endpoints:
            raise ConnectionBroken(f"no hole can be punched to {address or 'an unknown address'}")
        kind, host, port = parts
        own_port = self._host.listen_endpoints[kind][1]
        until = loop_time() + PUNCH_TIMEOUT_S
        while loop_time() < until:
            try:
                async with asyncio.timeout_at(until):
                    return await _connect_from(_FAMILIES[kind], own_port, host, port)
            except OSError:  # refused, e.g. by a NAT that rejects unsolicited packets; a TimeoutError is one too
                await asyncio.sleep(RETRY_DELAY_S)
        raise ConnectionBroken(f"no hole was opened to {address} within {PUNCH_TIMEOUT_S:.0f} s")


async def _connect_from(family: socket.AddressFamily, own_port: int, host: str, port: int) -> RawStream:
    sock = socket.socket(family)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("", own_port))
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
        undo.pop_all()
    return RawStream(reader, writer)


def _kind(address: str) -> str:
    return address.split("/")[1]
