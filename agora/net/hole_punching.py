"""Opens TCP connections through the NATs of both ends, and carries ordinary libp2p connections through them.

Knows: TCP's simultaneous open (RFC 9293, section 3.5; RFC 5128, section 3.4). Must not know: who introduced the two.

Both peers connect at once, from the port at which their p2pd listens and to the address from which a common neighbour
sees the other; each one's packet opens its own NAT for the other's. The socket must stay the same from the first packet
on: the NAT drops the answer of another one. p2pd cannot be told to do that without four observers of its address, so
the connection is made here, and p2pd's bytes are carried through it: the dialler's p2pd dials a port on loopback, the
other's p2pd is dialled on loopback. The two authenticate and encrypt as on any other connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any, Final

from agora_protocol.ids import PeerId

from agora.clock import loop_time
from agora.net.host import Host
from agora.net.network_errors import ConnectionBroken, DialsCrossed
from agora.net.own_addresses import host_and_port
from agora.net.raw_streams import READ_BYTES, RawStream, splice

PUNCH_S: Final = 4.0
"""Seconds after which an attempt to open a hole is given up: time for three packets of each end."""
AGAIN_S: Final = 0.1
"""Seconds from a refused connection to the next attempt."""
MAX_HOLES: Final = 64
"""At most this many holes are open, or being opened, at once."""
_FAMILIES: Final = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}


class HolePuncher:
    """Opens holes to peers, and keeps them open as long as p2pd's connections through them last."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()

    def has_room(self) -> bool:
        """Returns whether fewer than MAX_HOLES are open or being opened; `connect` and `expect` do not check it."""
        return len(self._tasks) < MAX_HOLES

    async def connect(self, peer: PeerId, address: str) -> None:
        """Opens a hole to `address`, from where `peer` must open one at the same time, and connects p2pd through it.

        Raises ConnectionBroken when that fails.
        """
        hole = await self._open(address)
        came: asyncio.Future[RawStream] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Takes the first connection, which is p2pd's, as the handshake shows, and aborts later ones."""
            stream = RawStream(reader, writer)
            if came.done():
                stream.abort()
            else:
                came.set_result(stream)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=READ_BYTES)
        port = int(server.sockets[0].getsockname()[1])
        self._start(self._carry(hole, came, port))
        try:
            await self._host.reach(peer, [f"/ip4/127.0.0.1/tcp/{port}"], PUNCH_S)
        except DialsCrossed as error:
            raise ConnectionBroken(str(error)) from None
        finally:
            server.close()
            if not came.done():
                came.cancel()

    def expect(self, address: str) -> None:
        """Starts a task that opens a hole to `address`, and connects what comes through it to this host's p2pd.

        For the peer that is dialled: the other one calls `connect` at the same time. A failure is not reported.
        """
        self._start(self._serve(address))

    async def close(self) -> None:
        """Closes all holes."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in a task that `close` cancels."""
        task = asyncio.create_task(work, name="hole")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, hole: RawStream, came: asyncio.Future[RawStream], port: int) -> None:
        """Waits for p2pd's connection to loopback `port`, and carries it through the hole until either end closes."""
        self._host.tunnel_ports.add(port)
        try:
            await splice(await came, hole)
        finally:
            hole.abort()
            self._host.tunnel_ports.discard(port)

    async def _serve(self, address: str) -> None:
        """Opens a hole, and carries what comes through it to and from this host's p2pd until either end closes."""
        with contextlib.suppress(ConnectionBroken, OSError):
            hole = await self._open(address)
            with contextlib.ExitStack() as undo:
                undo.callback(hole.abort)
                pair = await asyncio.open_connection(*self._host.listens[_kind(address)], limit=READ_BYTES)
                port = int(pair[1].get_extra_info("sockname")[1])
                self._host.tunnel_ports.add(port)
                undo.callback(self._host.tunnel_ports.discard, port)
                await splice(RawStream(*pair), hole)

    async def _open(self, address: str) -> RawStream:
        """Returns a TCP connection to `address`, made from the port at which p2pd listens.

        Tries again every AGAIN_S. Raises ConnectionBroken for an unusable address, or when none opens within PUNCH_S.
        """
        parts = host_and_port(address)
        if parts is None or parts[0] not in self._host.listens:
            raise ConnectionBroken(f"no hole can be punched to {address or 'an unknown address'}")
        kind, host, port = parts
        own_port, until = self._host.listens[kind][1], loop_time() + PUNCH_S
        while loop_time() < until:
            try:
                async with asyncio.timeout_at(until):
                    return await _connect_from(_FAMILIES[kind], own_port, host, port)
            except OSError:  # in time: a router that answers, rather than drops, what nobody has asked for
                await asyncio.sleep(AGAIN_S)
        raise ConnectionBroken(f"no hole was opened to {address} within {PUNCH_S:.0f} s")


async def _connect_from(family: socket.AddressFamily, own_port: int, host: str, port: int) -> RawStream:
    """Returns a TCP connection to `host`:`port` made from `own_port` of this machine. Raises OSError."""
    end = socket.socket(family)
    with contextlib.ExitStack() as undo:
        undo.callback(end.close)
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            end.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        end.bind(("", own_port))
        await asyncio.get_running_loop().sock_connect(end, (host, port))
        pair = await asyncio.open_connection(sock=end, limit=READ_BYTES)
        undo.pop_all()
    return RawStream(*pair)


def _kind(address: str) -> str:
    """Returns the kind of IP address that a multiaddr begins with: "ip4" or "ip6"."""
    return address.split("/")[1]
