"""This machine's libp2p host: starts hivemind's p2pd process, watches it, and sends it requests.

p2pd listens on TCP unless other addresses are given: QUIC through p2pd is ten times slower where packets get lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from agora_protocol.addresses import address_prefix, address_problem
from agora_protocol.errors import AgoraError, LocalError
from agora_protocol.frames import FrameLimits
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.core.calls import ConnectionBroken
from agora.core.terminal_text import one_line
from agora.net.p2pd.addresses import (
    HeldPorts,
    addresses_by_peer,
    check_port,
    host_and_port,
    interface_addresses,
    is_circuit,
    listening_places,
    public_only,
)
from agora.net.p2pd.frame_stream import MAX_PREAMBLE_BYTES, FrameStream
from agora.net.p2pd.hivemind_shim import Multiaddr, MultiaddrError, PeerID, p2pd_pb2
from agora.net.p2pd.multiaddr import decode_multiaddr, encode_multiaddr, with_length
from agora.net.p2pd.p2pd_process import MAX_ERROR_CHARACTERS, SocketDirectory, start_p2pd
from agora.net.p2pd.raw_stream import READ_BYTES, RawStream
from agora.net.shaping.bandwidth import UNLIMITED, RateLimits
from agora.net.shaping.bandwidth_limiter import BandwidthLimiter
from agora.net.shaping.link import LinkSpec
from agora.net.shaping.shaped_transport import AccessLink, ShapedTransport

# Takes a stream that a peer opened, its peer and its path ("direct", "punched", "relayed"); attaches or closes it.
OnStream = Callable[[FrameStream, PeerId, str], None]

ANSWER_TIMEOUT_S: Final = 5.0  # seconds for p2pd to answer what needs no network
MORE_PEERS_TIMEOUT_S: Final = 1.0  # seconds that `connect` waits for each other peer, once one was reached
TERMINATE_TIMEOUT_S: Final = 3.0  # seconds between SIGTERM and SIGKILL
NOWHERE: Final = "/p2p-circuit"  # what p2pd announces in place of private addresses: leads nowhere
MAX_REMOTE_ADDRESSES: Final = 4096  # maximum number of peers whose address, as seen here, is remembered
SIMULTANEOUS_OPEN_ERROR: Final = "noise: message is too short"  # the peer's first handshake message, not an answer


class SimultaneousOpen(AgoraError):
    """Raised by a dial when both peers dialled each other at the same time, and both dials failed.

    p2pd then backs off for some seconds; the peer with the lower id dials again first, see dialling.py.
    """

    code = "simultaneous-open"


class Host:
    """A running p2pd process: reaches other peers through it, opens and accepts streams, from `create` to `close`.

    died: set when p2pd ends, or answers no more, before `close`. link, rate_limiter: they slow down all streams of
    frames, if a link is emulated or the owner has set limits; else None. own_addresses: those listened on or announced,
    without /p2p/PEER. listen_endpoints: (host, port) of p2pd by "ip4" and "ip6". tunnel_ports: ports of punched holes.
    """

    def __init__(self, p2p: Any, sockets: SocketDirectory, link: LinkSpec | None, limits: RateLimits) -> None:
        self.p2p = p2p
        self.peer = PeerId(str(p2p.peer_id))
        self.died = asyncio.Event()
        self.link = AccessLink(link, random.Random(self.peer)) if link is not None else None
        self.rate_limiter = BandwidthLimiter(p2p._child.pid, limits, self.link) if limits.is_limited else None
        self.own_addresses: tuple[str, ...] = ()
        self.listen_endpoints: dict[str, tuple[str, int]] = {}
        self.tunnel_ports: set[int] = set()
        self._sockets = sockets
        self._ports = HeldPorts()
        self._remote_addresses: OrderedDict[PeerId, str] = OrderedDict()
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
        allow_private: bool = True,
        upnp: bool = False,
    ) -> Host:
        """Starts p2pd with the key in `identity_path`, and returns the host, which listens. Silences hivemind's log.

        listen: multiaddrs without /p2p/PEER; port 0 means any free port. announce: addresses to announce instead of
        those. If `allow_private` and `upnp` are false, the public ones of `listen` are announced too, and its private
        ones never. upnp: asks the router to forward the ports. link: what all streams of frames together emulate; dials
        and the DHT are not slowed down. limits: of all traffic, p2pd's own included. Raises IdentityError for the key
        file, LocalError for a malformed listen address, a taken port, or a p2pd that does not start.
        """
        identity = Identity.load(identity_path)
        for address in listen:
            _check_listen(address)
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)
        async with contextlib.AsyncExitStack() as undo:
            sockets = SocketDirectory()
            undo.callback(sockets.remove)
            ports = HeldPorts()
            undo.callback(ports.close)
            if not allow_private:
                listen = ports.hold_free_ports(listen)
            announced = announce if allow_private or upnp else _public_addresses(listen, announce)
            host = cls(await start_p2pd(identity_path, listen, announced, sockets.path, upnp), sockets, link, limits)
            host._ports = ports
            undo.push_async_callback(host.close)
            if allow_private:
                listen = [address.removesuffix(f"/p2p/{host.peer}") for address in await host.addresses()]
            host.own_addresses = (*announce, *interface_addresses(listen))
            host.listen_endpoints = listening_places(listen)
            if host.peer != identity.peer:
                raise LocalError(f"p2pd runs as {host.peer} with the key of {identity.peer}; install hivemind again.")
            undo.pop_all()
        return host

    async def addresses(self) -> tuple[str, ...]:
        """Returns the multiaddrs that p2pd announces, loopback too, each with /p2p/PEER.

        Leaves out malformed ones and the placeholder NOWHERE. Raises ConnectionBroken without an answer of p2pd.
        """
        answer = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), ANSWER_TIMEOUT_S)
        texts = [f"{text}/p2p/{self.peer}" for raw in answer.identify.addrs if (text := _address_text(raw))]
        return tuple(text for text in texts if address_problem(text) is None and not text.startswith(NOWHERE))

    def remote_address(self, peer: PeerId) -> str:
        """Returns the other end's address, without /p2p/PEER, of the last direct stream with `peer`; "" if unknown."""
        return self._remote_addresses.get(peer, "")

    async def connected_peers(self) -> frozenset[PeerId]:
        """Returns the peers to which p2pd has a connection, relayed ones too. Raises ConnectionBroken without p2pd."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), ANSWER_TIMEOUT_S)
        return frozenset(PeerId(str(PeerID(found.id))) for found in response.peers)

    async def connect(self, addresses: Sequence[str], timeout_s: float = 10.0) -> int:
        """Connects to the peers at these addresses, except this peer, in parallel; returns the number reached.

        Once one is reached, waits at most MORE_PEERS_TIMEOUT_S for each next one, and then gives up the others.
        timeout_s: for each. Raises InputError for a malformed address, ConnectionBroken when there are peers and none
        is reached.
        """
        by_peer = addresses_by_peer(addresses)
        by_peer.pop(self.peer, None)
        running = {asyncio.create_task(self.reach(peer, known, timeout_s)) for peer, known in by_peer.items()}
        reached, failed = 0, ""
        try:
            while running:
                wait_s = MORE_PEERS_TIMEOUT_S if reached else None
                done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
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
        """Has p2pd dial `peer` at `addresses` unless it is connected, and waits for it. Ignores malformed addresses.

        Raises ConnectionBroken when that fails or takes longer than `timeout_s`, SimultaneousOpen when both peers
        dialled each other at the same time.
        """
        encoded = [_address_bytes(address.removesuffix(f"/p2p/{peer}")) for address in addresses]
        raw = [address for address in encoded if address]
        request = p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer).to_bytes(), addrs=raw, timeout=max(1, int(timeout_s))
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request), timeout_s)

    async def is_connected(self, peer: PeerId) -> bool:
        """Returns whether p2pd has a connection to `peer`. Raises ConnectionBroken when p2pd is gone."""
        return peer in await self.connected_peers()

    async def disconnect(self, peer: PeerId) -> None:
        """Has p2pd end all its connections with `peer`. Raises ConnectionBroken when p2pd is gone or refuses."""
        wanted = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=wanted), ANSWER_TIMEOUT_S)

    async def open_stream(
        self, peer: PeerId, protocol: str, limits: FrameLimits, timeout_s: float
    ) -> tuple[FrameStream, str]:
        """Opens a stream to `peer`; returns the stream, and its path: "direct", "punched" or "relayed".

        It reads frames within `limits` after `FrameStream.attach`. Errors: as `reach`.
        """
        request = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol], timeout=max(1, int(timeout_s))
        )
        stream, response = await self._request(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request), limits, timeout_s
        )
        stream.address_prefix = address_prefix(_address_text(response.streamInfo.addr))
        return self._shape(stream), self._record_path(peer, response.streamInfo.addr)

    async def open_raw(self, peer: PeerId, protocol: str, timeout_s: float) -> RawStream:
        """Opens a stream of plain bytes to `peer`, not slowed down. Raises ConnectionBroken when that fails."""
        request = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol], timeout=max(1, int(timeout_s))
        )
        body = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request).SerializeToString()
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(timeout_s):
                    socket_path = self.p2p._daemon_listen_maddr["unix"]
                    reader, writer = await asyncio.open_unix_connection(socket_path, limit=READ_BYTES)
                    stream = RawStream(reader, writer, peer)
                    undo.callback(stream.abort)
                    await stream.write(with_length(body))
                    response = p2pd_pb2.Response.FromString(await stream.read_message(MAX_PREAMBLE_BYTES))
            except (TimeoutError, OSError, ValueError) as error:
                raise ConnectionBroken(f"{peer} gives no stream ({error or 'late'})") from None
            if response.type == p2pd_pb2.Response.ERROR:
                raise ConnectionBroken(one_line(response.error.msg, MAX_ERROR_CHARACTERS))
            undo.pop_all()
        return stream

    async def serve_raw(self, protocol: str, on_stream: Callable[[RawStream], Awaitable[None]]) -> None:
        """Serves each stream of plain bytes that a peer opens for `protocol` from now on by `on_stream`, in a task.

        The stream ends with `on_stream`, whose ConnectionBroken or ValueError is ignored. Errors: see `serve`.
        """

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = RawStream(reader, writer)
            with contextlib.suppress(ConnectionBroken, ValueError, asyncio.CancelledError):
                info = p2pd_pb2.StreamInfo.FromString(await stream.read_message(MAX_PREAMBLE_BYTES))
                stream.peer = PeerId(str(PeerID(info.peer)))
                stream.is_relayed = is_circuit(_address_text(info.addr))
                await on_stream(stream)
            stream.abort()

        path = self._sockets.path / f"serve{len(self._servers)}.sock"
        self._servers.append(await asyncio.start_unix_server(accept, str(path), limit=READ_BYTES))
        await self._set_handler(protocol, path)

    async def serve(self, protocol: str, limits: FrameLimits, on_stream: OnStream) -> None:
        """Passes each stream that a peer opens for `protocol` from now on to `on_stream`, slowed as those of
        `open_stream`.

        limits: of the frames that the stream reads. Raises ConnectionBroken when p2pd is gone or refuses.
        """

        def accept_stream() -> FrameStream:
            stream = FrameStream(limits)
            stream.preamble.add_done_callback(partial(self._pass_on, stream, on_stream))
            return stream

        path = self._sockets.path / f"serve{len(self._servers)}.sock"
        self._servers.append(await asyncio.get_running_loop().create_unix_server(accept_stream, str(path)))
        await self._set_handler(protocol, path)

    async def _set_handler(self, protocol: str, path: Path) -> None:
        address = Multiaddr(f"/unix{path}").to_bytes()
        request = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request), ANSWER_TIMEOUT_S)

    def _pass_on(self, stream: FrameStream, on_stream: OnStream, preamble: asyncio.Future[bytes]) -> None:
        if not preamble.cancelled() and preamble.exception() is None:
            info = p2pd_pb2.StreamInfo.FromString(preamble.result())
            peer = PeerId(str(PeerID(info.peer)))
            stream.address_prefix = address_prefix(_address_text(info.addr))
            on_stream(self._shape(stream), peer, self._record_path(peer, info.addr))

    def _record_path(self, peer: PeerId, raw: bytes) -> str:
        address = _address_text(raw)
        if is_circuit(address):
            return "relayed"
        direct = host_and_port(address)
        if direct is not None and direct[2] in self.tunnel_ports and "/127." in address:
            return "punched"
        self._remote_addresses[peer] = address
        self._remote_addresses.move_to_end(peer)
        if len(self._remote_addresses) > MAX_REMOTE_ADDRESSES:
            self._remote_addresses.popitem(last=False)
        return "direct"

    def _shape(self, stream: FrameStream) -> FrameStream:
        link = self.rate_limiter.link if self.rate_limiter is not None else self.link
        if link is not None:
            stream.interpose(partial(ShapedTransport, link=link))
        return stream

    async def close(self) -> None:
        """Stops serving, ends p2pd (kills it after TERMINATE_TIMEOUT_S), removes the sockets; does so once."""
        if self._closing:
            return
        self._closing = True
        if self.rate_limiter is not None:
            self.rate_limiter.close()
        for server in self._servers:
            server.close()
        control = self.p2p._client.control if self.p2p._client is not None else None
        tasks = [self.p2p._listen_task, self.p2p._reader_task]
        tasks += [control._read_task, control._write_task, *control._handler_tasks.values()] if control else []
        self.p2p._terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._watcher), TERMINATE_TIMEOUT_S)
        except TimeoutError:
            self.p2p._child.kill()
        alive = [task for task in tasks if task is not None]
        for task in alive:
            task.cancel()
        await asyncio.gather(self._watcher, *alive, return_exceptions=True)
        self._ports.close()
        self._sockets.remove()

    async def _watch(self) -> None:
        # hivemind does not check p2pd: when p2pd is gone, P2P.is_alive stays True and its calls hang.
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
        loop = asyncio.get_running_loop()
        control = self.p2p._daemon_listen_maddr["unix"]
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(timeout_s):
                    transport, stream = await loop.create_unix_connection(lambda: FrameStream(limits), control)
                    undo.callback(stream.abort)
                    transport.write(with_length(request.SerializeToString()))
                    answer = await stream.preamble
            except TimeoutError:
                raise ConnectionBroken(f"no answer from the network within {timeout_s:.0f} s") from None
            except (OSError, ConnectionBroken) as error:
                raise ConnectionBroken("this machine's p2pd is gone; restart the daemon") from error
            response = p2pd_pb2.Response.FromString(answer)
            if response.type == p2pd_pb2.Response.ERROR:
                raise _failure(one_line(response.error.msg, MAX_ERROR_CHARACTERS))
            undo.pop_all()
        return stream, response


def _check_listen(address: str) -> None:
    if _parse_multiaddr(address) is None:
        raise LocalError(f"{address!r} is not an address to listen on; it should look like /ip4/0.0.0.0/tcp/4001.")
    direct = host_and_port(address)
    if direct is not None and direct[2] != 0:
        check_port(address, *direct)


def _parse_multiaddr(address: str | bytes) -> Any:
    try:
        parsed = Multiaddr(address)
        return parsed if str(parsed) else None  # bytes are only read when they become text
    except (MultiaddrError, ValueError):
        return None


def _address_text(raw: bytes) -> str:
    try:
        return decode_multiaddr(raw)
    except (ValueError, UnicodeDecodeError):
        return str(_parse_multiaddr(raw) or "")


def _address_bytes(text: str) -> bytes:
    try:
        return encode_multiaddr(text)
    except (ValueError, OverflowError):
        parsed = _parse_multiaddr(text)
        return parsed.to_bytes() if parsed is not None else b""


def _public_addresses(listen: Sequence[str], announce: Sequence[str]) -> tuple[str, ...]:
    public = public_only(interface_addresses(listen))
    return (*announce, *public) or (NOWHERE,)


def _failure(text: str) -> AgoraError:
    return SimultaneousOpen(text) if SIMULTANEOUS_OPEN_ERROR in text else ConnectionBroken(text)
