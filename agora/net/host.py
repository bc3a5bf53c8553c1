"""This machine's libp2p host: starts hivemind's p2pd process, watches it, and sends it requests.

Knows: p2pd's control socket, its addresses and its process. Must not know: frames' meaning, calls, runs or records. It
listens on TCP unless other addresses are given: QUIC through p2pd is ten times slower where packets get lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agora_protocol.addresses import address_prefix, address_problem
from agora_protocol.errors import AgoraError, LocalError
from agora_protocol.frames import FrameLimits
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.net.address_book import addresses_by_peer
from agora.net.hive import P2P, Multiaddr, MultiaddrError, P2PDaemonError, PeerID, p2pd_pb2
from agora.net.line_brake import LineBrake
from agora.net.link import LinkSpec
from agora.net.network_errors import ConnectionBroken, DialsCrossed
from agora.net.rate_limits import UNLIMITED, RateLimits
from agora.net.shaping import AccessLink, ShapedTransport
from agora.net.streams import FrameStream

OnStream = Callable[[FrameStream, PeerId, str], None]
"""Takes a stream that a peer has opened, to attach a sink or close it; that peer; and "direct" or "relayed"."""

STARTUP_S: Final = 60.0  # seconds for p2pd to start: 0.3 s on an idle machine; longer when many share two cores
ANSWER_S: Final = 5.0  # seconds for p2pd to answer what needs no network
MORE_PEERS_S: Final = 1.0  # seconds that `connect` waits for each other peer, once one was reached
TERMINATE_S: Final = 3.0  # seconds between SIGTERM and SIGKILL
CROSSED: Final = "noise: message is too short"  # a dialler's first handshake message where an answer belongs

SOCKET_PREFIX: Final = "agora-net-"  # begins the names of the folders that hold p2pd's Unix sockets
MAX_BASE_CHARACTERS: Final = 40  # of the path of such folders' parent: a Unix socket's path has at most 107

_GUARD: Final = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9)\n"  # PR_SET_PDEATHSIG, SIGKILL; kept across execv
    "if os.getppid()!=int(sys.argv[1]): sys.exit('the parent is gone')\n"
    "os.execv(sys.argv[2],sys.argv[2:])\n"
)


class _GuardedP2P(P2P):  # type: ignore[misc]
    """A p2pd that the kernel kills when this process ends, however that happens.

    By itself p2pd notices a killed parent after 1 to 30 s, and meanwhile it answers for a daemon that is not there.
    """

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        """Returns p2pd's command line; on Linux with a guard that lets the kernel kill it when this process ends."""
        command: list[str] = P2P._make_process_args(*args, **kwargs)
        if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "prctl"):
            return command
        return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]


class SocketDirectory:
    """A private, locked directory for p2pd's Unix sockets. Making one removes those that dead daemons left behind.

    A lock in it shows whether its daemon lives. A process id would not: containers share /tmp but not ids.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > MAX_BASE_CHARACTERS:
            base = Path("/tmp")
        for left in base.glob(SOCKET_PREFIX + "*"):
            # An OSError says: not ours, in use, or just removed by another daemon.
            with contextlib.suppress(OSError), (left / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix="." + SOCKET_PREFIX, dir=base))
        self._lock = (made / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(base / made.name[1:])  # only now may another daemon find it

    def remove(self) -> None:
        """Removes the directory and gives up its lock. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class Host:
    """Runs a p2pd process, reaches other peers through it, and opens and accepts streams, from `create` to `close`.

    peer: its id. p2p: hivemind's handle. died: an event, set when p2pd ends without `close`. link: the imitated access
    link, or None.
    """

    def __init__(self, p2p: Any, sockets: SocketDirectory, link: LinkSpec | None, limits: RateLimits) -> None:
        self.p2p = p2p
        self.peer = PeerId(str(p2p.peer_id))
        self.died = asyncio.Event()
        self.link = AccessLink(link, random.Random(self.peer)) if link is not None else None
        self.brake = LineBrake(p2p._child.pid, limits, self.link) if limits.is_limited else None
        self._sockets = sockets
        self._closing = False
        self._servers: list[asyncio.Server] = []
        self._watcher = asyncio.create_task(self._watch(), name="p2pd watcher")

    @classmethod
    async def create(
        cls,
        *,
        identity_path: Path,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        link: LinkSpec | None = None,
        limits: RateLimits = UNLIMITED,
    ) -> Host:
        """Starts p2pd with the key in `identity_path`, and returns the host, which listens.

        listen: multiaddrs without /p2p/PEER; port 0 means any free port. announce: addresses to announce instead of
        those. link: what all streams to peers together imitate; p2pd's own traffic, dials and the DHT, does not.
        limits: for all traffic, p2pd's own included. Raises IdentityError for the key file, LocalError for a taken port
        or a p2pd that does not start.
        """
        identity = Identity.load(identity_path)
        for address in listen:
            _check_listen(address)
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)
        async with contextlib.AsyncExitStack() as undo:
            sockets = SocketDirectory()
            undo.callback(sockets.remove)
            host = cls(await _start(identity_path, listen, announce, sockets.path), sockets, link, limits)
            undo.push_async_callback(host.close)
            if host.peer != identity.peer:
                raise LocalError(f"p2pd runs as {host.peer} with the key of {identity.peer}; install hivemind again.")
            undo.pop_all()
        return host

    async def addresses(self) -> tuple[str, ...]:
        """Returns the multiaddrs that p2pd announces, each with /p2p/PEER, loopback included; drops malformed ones.

        Raises ConnectionBroken when p2pd is gone or does not answer.
        """
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), ANSWER_S)
        found = [f"{address}/p2p/{self.peer}" for raw in response.identify.addrs if (address := _parse_multiaddr(raw))]
        return tuple(address for address in found if address_problem(address) is None)

    async def connected_peers(self) -> frozenset[PeerId]:
        """Returns the peers to which p2pd has any connection now. Raises ConnectionBroken when p2pd is gone."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), ANSWER_S)
        return frozenset(PeerId(str(PeerID(found.id))) for found in response.peers)

    async def connect(self, addresses: Sequence[str], timeout_s: float = 10.0) -> int:
        """Connects to the other peers at these addresses in parallel, and returns how many answered.

        Once one has, it waits MORE_PEERS_S for each next one. Raises InputError for a malformed address,
        ConnectionBroken when no peer answers.
        """
        by_peer = addresses_by_peer(addresses)
        by_peer.pop(self.peer, None)
        running = {asyncio.create_task(self.reach(peer, known, timeout_s)) for peer, known in by_peer.items()}
        reached, failed = 0, ""
        try:
            while running:
                patience = MORE_PEERS_S if reached else None
                done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for error in (task.exception() for task in done):
                    reached += error is None
                    failed = str(error) if error is not None else failed
        finally:
            for task in running:
                task.cancel()
        if by_peer and not reached:
            raise ConnectionBroken(f"none of {len(by_peer)} peers could be reached: {failed}")
        return reached

    async def reach(self, peer: PeerId, addresses: Iterable[str], timeout_s: float) -> None:
        """Has p2pd dial `peer` at `addresses`, unless it is connected.

        Raises ConnectionBroken when that fails or takes longer than `timeout_s`, DialsCrossed when both peers dialled
        each other at once.
        """
        parsed = [_parse_multiaddr(address.removesuffix(f"/p2p/{peer}")) for address in addresses]
        raw = [address.to_bytes() for address in parsed if address is not None]
        request = p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer).to_bytes(), addrs=raw, timeout=max(1, int(timeout_s))
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), timeout_s)

    async def open_stream(
        self, peer: PeerId, protocol: str, limits: FrameLimits, timeout_s: float
    ) -> tuple[FrameStream, str]:
        """Returns a new stream to `peer`, and its path ("direct" or "relayed"). Raises as `reach` does."""
        request = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol], timeout=max(1, int(timeout_s))
        )
        stream, response = await self._request(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), limits, timeout_s
        )
        return self._shape(stream), _path(response.streamInfo.addr)

    async def serve(self, protocol: str, limits: FrameLimits, on_stream: OnStream) -> None:
        """Begins to pass each stream that a peer opens for `protocol` to `on_stream`.

        limits: of the streams' frames. Raises ConnectionBroken when p2pd is gone or refuses.
        """

        def accept_stream() -> FrameStream:
            """Called for each connection from p2pd: returns a stream, which goes to `on_stream` after its preamble."""
            stream = FrameStream(limits)
            stream.preamble.add_done_callback(partial(self._introduce, stream, on_stream))
            return stream

        path = self._sockets.path / f"serve{len(self._servers)}.sock"
        self._servers.append(await asyncio.get_running_loop().create_unix_server(accept_stream, str(path)))
        address = Multiaddr(f"/unix{path}").to_bytes()
        request = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), ANSWER_S)

    def _introduce(self, stream: FrameStream, on_stream: OnStream, preamble: asyncio.Future[bytes]) -> None:
        """Called when a stream's preamble was read: passes the stream to `on_stream`, unless reading it failed."""
        if not preamble.cancelled() and preamble.exception() is None:
            info = p2pd_pb2.StreamInfo.FromString(preamble.result())
            stream.prefix = address_prefix(str(_parse_multiaddr(info.addr)))
            on_stream(self._shape(stream), PeerId(str(PeerID(info.peer))), _path(info.addr))

    def _shape(self, stream: FrameStream) -> FrameStream:
        """Returns the stream, delayed and slowed down if a link is imitated or the owner has set limits."""
        link = self.brake.link if self.brake is not None else self.link
        if link is not None:
            stream.interpose(partial(ShapedTransport, link=link))
        return stream

    async def close(self) -> None:
        """Stops serving, ends p2pd (kills it after TERMINATE_S), removes the sockets. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self.brake is not None:
            self.brake.close()
        for server in self._servers:
            server.close()
        control = self.p2p._client.control if self.p2p._client is not None else None
        tasks = [self.p2p._listen_task, self.p2p._reader_task]
        tasks += [control._read_task, control._write_task, *control._handler_tasks.values()] if control else []
        self.p2p._terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), TERMINATE_S)
        except TimeoutError:
            self.p2p._child.kill()
        alive = [task for task in tasks if task is not None]
        for task in alive:
            task.cancel()
        await asyncio.gather(self._watcher, *alive, return_exceptions=True)
        self._sockets.remove()

    async def _watch(self) -> None:
        """Waits until p2pd ends, or the task that reads its answers for the DHT; sets `died` unless `close` did it."""
        # hivemind does not check this: with its p2pd gone, P2P.is_alive stays True and its calls hang.
        child = asyncio.create_task(self.p2p._child.wait())
        await asyncio.wait([child, self.p2p._client.control._read_task], return_when=asyncio.FIRST_COMPLETED)
        if not self._closing:
            self.died.set()
        await child

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        """Returns p2pd's answer to a request that opens no stream. Raises ConnectionBroken for an error or none."""
        stream, response = await self._request(request, FrameLimits(), timeout_s)
        stream.abort()
        return response

    async def _request(self, request: Any, limits: FrameLimits, timeout_s: float) -> tuple[FrameStream, Any]:
        """Sends a request to p2pd on a new socket; returns that, which may carry the opened stream, and p2pd's answer.

        Raises ConnectionBroken when p2pd is gone, late, or answers with an error (DialsCrossed if both dialled).
        """
        body = request.SerializeToString()
        control, loop = self.p2p._daemon_listen_maddr["unix"], asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(timeout_s):
                    transport, stream = await loop.create_unix_connection(lambda: FrameStream(limits), control)
                    undo.callback(stream.abort)
                    transport.write(_varint(len(body)) + body)
                    answer = await stream.preamble
            except TimeoutError:
                raise ConnectionBroken(f"no answer from the network within {timeout_s:.0f} s") from None
            except (OSError, ConnectionBroken) as error:
                raise ConnectionBroken("this machine's p2pd is gone; restart the daemon") from error
            response = p2pd_pb2.Response.FromString(answer)
            if response.type == p2pd_pb2.Response.ERROR:
                raise _failure(_one_line(response.error.msg))
            undo.pop_all()
        return stream, response


async def _start(identity_path: Path, listen: Sequence[str], announce: Sequence[str], sockets: Path) -> Any:
    """Starts a p2pd that listens on `listen`, and returns hivemind's handle. Raises LocalError if it does not start.

    Unless all addresses are loopback, p2pd detects NAT and maps ports in the router (UPnP).
    """
    is_loopback = all("/127." in address or "/::1/" in address for address in listen)
    kind = type("_HostP2P", (_GuardedP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
    try:
        return await kind.create(  # type: ignore[attr-defined]
            host_maddrs=tuple(listen),
            announce_maddrs=tuple(announce) or None,
            identity_path=str(identity_path),
            startup_timeout=STARTUP_S,
            check_if_identity_free=False,
            auto_nat=not is_loopback,
            nat_port_map=not is_loopback,
        )
    except P2PDaemonError as error:
        why = _one_line(str(error))
        raise LocalError(f"p2pd did not start ({why}); look whether {', '.join(listen)} can be listened on.") from error


def _check_listen(address: str) -> None:
    """Raises LocalError for a malformed address, or a TCP port that this machine cannot listen on now, by trying it."""
    parsed = _parse_multiaddr(address)
    if parsed is None:
        raise LocalError(f"{address!r} is no address to listen on; it should look like /ip4/0.0.0.0/tcp/4001.")
    parts = {protocol.name: value for protocol, value in parsed.items()}
    host, port = parts.get("ip4") or parts.get("ip6"), parts.get("tcp")
    if host is None or port is None or int(port) == 0:
        return
    # p2pd listens with SO_REUSEPORT, so a second one on the same port would start and get some of the first's callers.
    with socket.socket(socket.AF_INET6 if "ip6" in parts else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"port {port} is taken; choose another with --listen, or stop the program that listens there"
            else:
                why = f"{error.strerror}; choose an address of this machine, such as /ip4/0.0.0.0/tcp/{port}"
            raise LocalError(f"Cannot listen on {address}: {why}.") from error


def _parse_multiaddr(address: str | bytes) -> Any:
    """Returns hivemind's Multiaddr; None for an address that is malformed or of a kind that hivemind does not know."""
    try:
        parsed = Multiaddr(address)
        return parsed if str(parsed) else None  # bytes are only read when they become text
    except (MultiaddrError, ValueError):
        return None


def _path(raw: bytes) -> str:
    """Returns "relayed" for the address of a relay circuit, "direct" for any other."""
    return "relayed" if "p2p-circuit" in str(_parse_multiaddr(raw)) else "direct"


def _failure(text: str) -> AgoraError:
    """Returns p2pd's error as an exception: DialsCrossed when both peers dialled each other at once."""
    return DialsCrossed(text) if CROSSED in text else ConnectionBroken(text)


def _one_line(text: str) -> str:
    """Returns `text` with every run of whitespace made one space, cut to 300 characters."""
    return " ".join(text.split())[:300]


def _varint(number: int) -> bytes:
    """Returns a number as protobuf's variable-length integer."""
    low = number & 0x7F
    return bytes([low]) if number == low else bytes([low | 0x80]) + _varint(number >> 7)
