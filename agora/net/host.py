"""This machine's libp2p host: hivemind's p2pd, started, watched and asked, inside the running event loop.

Knows p2pd's control socket, addresses and its process. Must not know frames' meaning, calls, runs or records. TCP only
unless other addresses are asked for: QUIC through p2pd is ten times slower where packets get lost.
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agora_protocol.addresses import address_problem, peer_of_address
from agora_protocol.errors import InputError, LocalError
from agora_protocol.frames import FrameLimits
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.net.errors import ConnectionBroken, DialsCrossed
from agora.net.hive import P2P, Multiaddr, MultiaddrError, P2PDaemonError, PeerID, p2pd_pb2
from agora.net.link import LinkSpec
from agora.net.shaping import AccessLink
from agora.net.streams import FrameStream

OnStream = Callable[[FrameStream, PeerId, str], None]
"""Called with every stream a peer opened to us: the stream, the peer at its other end, and its path."""

STARTUP_S: Final = 60.0  # p2pd starts in 0.3 s on an idle machine; many at once on two cores take their turns
ANSWER_S: Final = 5.0  # p2pd's own questions, which need no network
LAG_S: Final = 1.0
LEAVE_S: Final = 3.0  # SIGTERM, then SIGKILL
SOCKET_PREFIX: Final = "agora-net-"
CROSSED: Final = "noise: message is too short"  # a dialler's first handshake message where an answer belongs

_GUARD: Final = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9)\n"  # PR_SET_PDEATHSIG, SIGKILL; kept across execv
    "if os.getppid()!=int(sys.argv[1]): sys.exit('the parent is gone')\n"
    "os.execv(sys.argv[2],sys.argv[2:])\n"
)


class _GuardedP2P(P2P):  # type: ignore[misc]
    """A p2pd that the kernel kills together with us, however we die.

    By itself p2pd notices a killed parent after 1.0 to 1.5 s, and one that was killed while p2pd started after its idle
    timeout of 30 s; meanwhile it holds the listen port and answers for a daemon that is not there.
    """

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        command: list[str] = P2P._make_process_args(*args, **kwargs)
        if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "prctl"):
            return command
        return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]


class Host:
    """A running libp2p host. `peer` is who we are, `p2p` hivemind's handle; `died` is set when p2pd ends by itself."""

    def __init__(self, p2p: Any, sockets: _SocketDirectory) -> None:
        self.p2p = p2p
        self.peer = PeerId(str(p2p.peer_id))
        self.died = asyncio.Event()
        self._link: AccessLink | None = None
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
        bootstrap: Sequence[str] = (),
        announce: Sequence[str] = (),
        link: LinkSpec | None = None,
        startup_s: float = STARTUP_S,
    ) -> Host:
        """Start p2pd with the key in `identity_path`, listen, and connect to whoever of `bootstrap` answers.

        listen: multiaddrs without /p2p/PEER; port 0 means any free port. announce: what to tell others instead of the
        addresses listened on. link: what all streams to peers together shall behave like; p2pd's own traffic, dials and
        the DHT, does not. That no bootstrap peer answers is no error here; `connect` says so when asked again.
        Raises IdentityError for the key file, LocalError for a taken port or a p2pd that does not start.
        """
        identity = Identity.load(identity_path)
        for address in listen:
            _check_listen(address)
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)
        async with contextlib.AsyncExitStack() as undo:
            sockets = _SocketDirectory()
            undo.callback(sockets.remove)
            host = cls(await _start(identity_path, listen, announce, startup_s, sockets.path), sockets)
            undo.push_async_callback(host.close)
            if host.peer != identity.peer:
                raise LocalError(f"p2pd runs as {host.peer} with the key of {identity.peer}; install hivemind again.")
            if link is not None:
                host._link = AccessLink(link, random.Random(host.peer))
            with contextlib.suppress(ConnectionBroken):
                await host.connect(bootstrap)
            undo.pop_all()
        return host

    @property
    def daemon_pid(self) -> int:
        """The process id of p2pd."""
        return int(self.p2p._child.pid)

    async def addresses(self) -> tuple[str, ...]:
        """Where others can dial us, each with /p2p/PEER; empty when nowhere. Raises LocalError when p2pd is gone."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), ANSWER_S)
        found = [f"{address}/p2p/{self.peer}" for raw in response.identify.addrs if (address := _address_text(raw))]
        return tuple(address for address in found if address_problem(address) is None)

    async def connect(self, addresses: Sequence[str], timeout_s: float = 10.0) -> int:
        """Connect to the peers these multiaddrs (with /p2p/PEER) lead to; returns how many peers answered.

        Our own addresses are passed over. Once one has answered, the others get LAG_S more each. Raises InputError for
        an address that is none, and ConnectionBroken when there were peers to connect to and none answered.
        """
        by_peer: dict[PeerId, list[str]] = defaultdict(list)
        for address in addresses:
            if problem := address_problem(address):
                raise InputError(f"{address!r} {problem}; it should look like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...")
            by_peer[peer_of_address(address)].append(address)
        by_peer.pop(self.peer, None)
        running = {asyncio.create_task(self.reach(peer, known, timeout_s)) for peer, known in by_peer.items()}
        reached, failed = 0, ""
        try:
            while running:
                patience = LAG_S if reached else None
                done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                reached += sum(task.exception() is None for task in done)
                failed = next((str(task.exception()) for task in done if task.exception() is not None), failed)
                if not done:
                    break
        finally:
            for task in running:
                task.cancel()
        if by_peer and not reached:
            raise ConnectionBroken(f"none of {len(by_peer)} peers could be reached: {failed}")
        return reached

    async def reach(self, peer: PeerId, addresses: Iterable[str], timeout_s: float = 10.0) -> None:
        """Have a libp2p connection to `peer`, dialling these addresses where there is none. Raises ConnectionBroken.

        Without addresses p2pd looks in what it learnt from others, which knows nothing of a peer that nobody met.
        """
        raw = [encoded for address in addresses if (encoded := _address_bytes(address.removesuffix(f"/p2p/{peer}")))]
        request = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=raw, timeout=max(1, int(timeout_s)))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), timeout_s)

    async def open_stream(
        self, peer: PeerId, protocol: str, limits: FrameLimits, timeout_s: float
    ) -> tuple[FrameStream, str]:
        """A new stream to `peer`, and its path ("direct" or "relayed"). Raises ConnectionBroken."""
        request = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[protocol], timeout=max(1, int(timeout_s)))
        stream, response = await self._request(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), limits, timeout_s
        )
        if self._link is not None:
            stream.interpose(self._link.shape)
        return stream, _path(response.streamInfo.addr)

    async def serve(self, protocol: str, limits: FrameLimits, on_stream: OnStream) -> None:
        """Hand every stream that a peer opens for `protocol` to `on_stream`, which must attach a sink or close it."""
        if self._link is not None:
            on_stream = _over_link(self._link, on_stream)
        path = self._sockets.path / f"serve{len(self._servers)}.sock"
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _inbound(limits, on_stream), str(path))
        self._servers.append(server)
        address = Multiaddr(f"/unix{path}").to_bytes()
        request = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), ANSWER_S)

    async def close(self) -> None:
        """Stop p2pd and everything that talks to it. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        for server in self._servers:
            server.close()
        control = self.p2p._client.control if self.p2p._client is not None else None
        tasks = [self.p2p._listen_task, self.p2p._reader_task]
        tasks += [control._read_task, control._write_task, *control._handler_tasks.values()] if control else []
        self.p2p._terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), LEAVE_S)
        except TimeoutError:
            self.p2p._child.kill()
        alive = [task for task in tasks if task is not None]
        for task in alive:
            task.cancel()
        await asyncio.gather(self._watcher, *alive, return_exceptions=True)
        self._sockets.remove()

    async def _watch(self) -> None:
        # hivemind does not look: with its p2pd gone, P2P.is_alive stays True and its calls hang. The same where only
        # the task that reads p2pd's answers for the DHT has ended.
        child = asyncio.create_task(self.p2p._child.wait())
        await asyncio.wait([child, self.p2p._client.control._read_task], return_when=asyncio.FIRST_COMPLETED)
        if not self._closing:
            self.died.set()
        await child

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        stream, response = await self._request(request, FrameLimits(), timeout_s)
        stream.abort()
        return response

    async def _request(self, request: Any, limits: FrameLimits, timeout_s: float) -> tuple[FrameStream, Any]:
        """One question to p2pd on a socket of its own, which becomes the stream when the question was to open one."""
        body = request.SerializeToString()
        stream = FrameStream(limits)
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            undo.callback(stream.abort)
            try:
                async with asyncio.timeout(timeout_s):
                    await loop.create_unix_connection(lambda: stream, self.p2p._daemon_listen_maddr["unix"])
                    stream.write_preamble(_varint(len(body)) + body)
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


class _SocketDirectory:
    """A private directory for the Unix sockets to p2pd; those that killed daemons left behind are swept on the way.

    Its lock says whether its daemon lives. Process ids would not: containers share /tmp and not ids.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > 40:  # a Unix socket's path has at most 107 characters
            base = Path("/tmp")
        _sweep(base)
        made = Path(tempfile.mkdtemp(prefix="." + SOCKET_PREFIX, dir=base))
        self._lock = os.open(made / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(base / made.name[1:])  # only now may a sweep see it

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(base: Path) -> None:
    for left in base.glob(SOCKET_PREFIX + "*"):
        with contextlib.suppress(OSError):  # not ours, in use, or just removed by another sweep
            lock = os.open(left / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


async def _start(
    identity_path: Path, listen: Sequence[str], announce: Sequence[str], startup_s: float, sockets: Path
) -> Any:
    at_home = all("/127." in address or "/::1/" in address for address in listen)
    kind = type("_HostP2P", (_GuardedP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
    try:
        return await kind.create(  # type: ignore[attr-defined]
            host_maddrs=tuple(listen),
            announce_maddrs=tuple(announce) or None,
            identity_path=str(identity_path),
            startup_timeout=startup_s,
            check_if_identity_free=False,
            auto_nat=not at_home,
            nat_port_map=not at_home,
        )
    except P2PDaemonError as error:
        why = _one_line(str(error))
        raise LocalError(f"p2pd did not start ({why}); look whether {', '.join(listen)} can be listened on.") from error


def _inbound(limits: FrameLimits, on_stream: OnStream) -> FrameStream:
    stream = FrameStream(limits)
    stream.preamble.add_done_callback(partial(_introduce, stream, on_stream))
    return stream


def _introduce(stream: FrameStream, on_stream: OnStream, preamble: asyncio.Future[bytes]) -> None:
    if preamble.cancelled() or preamble.exception() is not None:
        return
    info = p2pd_pb2.StreamInfo.FromString(preamble.result())
    on_stream(stream, PeerId(str(PeerID(info.peer))), _path(info.addr))


def _over_link(link: AccessLink, on_stream: OnStream) -> OnStream:
    def shaped(stream: FrameStream, peer: PeerId, path: str) -> None:
        stream.interpose(link.shape)
        on_stream(stream, peer, path)

    return shaped


def _check_listen(address: str) -> None:
    """Raises LocalError unless the address can be listened on now."""
    try:
        parts = {protocol.name: value for protocol, value in Multiaddr(address).items()}
    except (MultiaddrError, ValueError) as error:
        example = "it should look like /ip4/0.0.0.0/tcp/4001"
        raise LocalError(f"{address!r} is no address to listen on; {example}.") from error
    host, port = parts.get("ip4") or parts.get("ip6"), parts.get("tcp")
    if host is None or port is None or int(port) == 0:
        return
    # p2pd listens with SO_REUSEPORT, so a second one on the same port would start and share the callers of the first.
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


def _peer_bytes(peer: PeerId) -> bytes:
    raw: bytes = PeerID.from_base58(peer).to_bytes()
    return raw


def _address_bytes(address: str) -> bytes | None:
    try:
        raw: bytes = Multiaddr(address).to_bytes()
    except (MultiaddrError, ValueError):
        return None  # well formed, but of a kind that this version of hivemind cannot write
    return raw


def _address_text(raw: bytes) -> str | None:
    try:
        return str(Multiaddr(raw))
    except (MultiaddrError, ValueError):
        return None


def _path(raw: bytes) -> str:
    return "relayed" if "p2p-circuit" in (_address_text(raw) or "") else "direct"


def _failure(text: str) -> ConnectionBroken:
    return DialsCrossed(text) if CROSSED in text else ConnectionBroken(text)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
