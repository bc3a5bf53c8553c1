"""Calls to peers, and their calls to us: what the rest of agora sees of the network.

Knows which peers are connected, dials those that are not, and remembers who broke the protocol. Must not know what a
request means. One long-lived stream per pair of peers carries all calls both ways, whoever opened it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agora_protocol.errors import AgoraError, NotAdmitted, PeerFailed, ProtocolError, Refused
from agora_protocol.frames import FrameType, encode_frame
from agora_protocol.ids import PeerId
from agora_protocol.limits import PROTOCOL_NAME
from agora_protocol.messages import Hello, Message, refusal_to_wire
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.net.connection import Connection
from agora.net.errors import ConnectionBroken, DeadlinePassed, DialsCrossed
from agora.net.host import Host
from agora.net.peers import AddressBook
from agora.net.streams import FrameStream
from agora.net.terms import HeldBytes, IncomingCall, NetLimits

__all__ = [
    "ConnectionBroken",
    "DeadlinePassed",
    "Handler",
    "IncomingCall",
    "NetLimits",
    "NetStatistics",
    "Network",
    "PeerStatistics",
    "Reply",
]

LAST_WORDS_S: Final = 0.5  # how long `Network.close` waits for peers to have heard it
SAME_MOMENT_S: Final = 0.1  # less than this before our deadline, a failed callee has met its own
DIAL_AGAIN_S: Final = 5.1  # after dials that crossed; p2pd refuses to dial an address for 5 s after it failed
TURN_S: Final = 0.5  # how much later the peer with the higher id dials again
DEADLINE_SLACK_MS: Final = 10  # a deadline that is this little too late is not worth a new message

Handler = Callable[[IncomingCall], Awaitable[Reply]]
"""Answers a peer. An AgoraError that it raises becomes a typed refusal; it is cancelled when the caller gives up."""


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """One connected peer: round trip in seconds (None before the first measurement), bytes since the stream opened."""

    rtt_s: float | None
    bytes_in: int
    bytes_out: int
    open_calls: int
    path: str


@dataclass(frozen=True, slots=True)
class NetStatistics:
    """Bytes since the start, and of held payloads now and at most; one entry for each connected peer."""

    bytes_in: int
    bytes_out: int
    held_bytes: int
    held_peak: int
    peers: dict[PeerId, PeerStatistics]


class Network:
    """All calls of this peer, both ways; what the pipeline calls through."""

    def __init__(
        self,
        host: Host,
        hello: Callable[[], Hello],
        handler: Handler,
        limits: NetLimits | None = None,
        *,
        report_violation: Callable[[PeerId, ProtocolError], None] = lambda _peer, _error: None,
        shut_out_s: Callable[[PeerId], float] = lambda _peer: 0.0,
        report_failure: Callable[[PeerId, Exception], None] = lambda _peer, _error: None,
    ) -> None:
        """report_violation: takes each frame that a peer should not have sent. shut_out_s: for how many more seconds a
        peer must be neither called nor answered. report_failure: takes what `handler` raised that is no AgoraError.
        """
        self.limits = limits or NetLimits()
        self.hello = hello
        self.handle = handler
        self.held = HeldBytes(self.limits.max_held_bytes)
        self._host = host
        self.report_violation = report_violation
        self.shut_out_s = shut_out_s
        self.report_failure = report_failure
        self._book = AddressBook()
        self._connections: dict[PeerId, list[Connection]] = {}
        self._dials: dict[PeerId, asyncio.Task[Connection]] = {}
        self._awaited: dict[PeerId, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._past_bytes = [0, 0]
        self._closing = self._leaving = False

    async def start(self) -> None:
        """Accept streams from peers. Raises ConnectionBroken when the host is gone."""
        await self._host.serve(PROTOCOL_NAME, self.limits.frames(), self._accept)
        self.spawn(self._tick())

    def leave(self) -> None:
        """Say GOODBYE to everyone: open calls are finished, new ones go elsewhere, and nobody is let in."""
        self._leaving = True
        for connection in self._all():
            connection.say_goodbye()

    async def close(self) -> None:
        """Stop all calls both ways and end every stream, telling the peers so."""
        if self._closing:
            return
        self._closing = self._leaving = True
        tasks = [*self._tasks, *self._dials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connections = self._all()
        for connection in connections:
            connection.say_goodbye(PeerFailed("this peer has left"))
            connection.lost("this peer is leaving")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                for connection in connections:
                    await connection.stream.ended.wait()
        for connection in connections:
            connection.stream.abort()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember where `peer` can be dialled: multiaddrs with /p2p/PEER; others are passed over."""
        self._book.learn(peer, addresses)

    def statistics(self) -> NetStatistics:
        """What the network has carried so far."""
        streams = [connection.stream for connection in self._all()]
        return NetStatistics(
            bytes_in=self._past_bytes[0] + sum(stream.bytes_in for stream in streams),
            bytes_out=self._past_bytes[1] + sum(stream.bytes_out for stream in streams),
            held_bytes=self.held.used,
            held_peak=self.held.peak,
            peers={peer: _statistics_of(connections) for peer, connections in self._connections.items()},
        )

    async def call(
        self,
        peer: PeerId,
        request: Message,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        """Ask `peer`, and wait for the answer until `deadline` (loop time).

        `on_progress` is called from the event loop with every Advance the peer sends meanwhile. The tensors must not
        change until this returns. Raises what the peer refused with (Refused, ProtocolError, Unavailable, PeerFailed),
        ConnectionBroken as soon as the stream breaks or cannot be opened, DeadlinePassed. When it ends early, by the
        deadline or by cancellation, the peer is told to stop.
        """
        try:
            async with asyncio.timeout_at(deadline):
                self._refuse_shut_out(peer)
                connection = self._usable(peer) or await self._dial(peer)
                request = _shortened(request, deadline - asyncio.get_running_loop().time())
                return await connection.call(request, tensors, on_progress)
        except TimeoutError:
            raise DeadlinePassed(f"no answer to {type(request).__name__} before its deadline") from None
        except PeerFailed as error:
            # The callee's clock runs out with ours: whose word comes first is chance, and must not matter.
            if asyncio.get_running_loop().time() < deadline - SAME_MOMENT_S:
                raise
            raise DeadlinePassed(f"no answer to {type(request).__name__} before its deadline ({error})") from None

    # --- opening streams

    def _usable(self, peer: PeerId) -> Connection | None:
        """The connection that both sides choose when they opened one each at the same time: the lower peer id's."""
        usable = [connection for connection in self._connections.get(peer, ()) if connection.usable]
        if len(usable) > 1:
            lower = self._host.peer < peer
            usable.sort(key=lambda connection: connection.opened is not lower)
        return usable[0] if usable else None

    async def _dial(self, peer: PeerId) -> Connection:
        """A new connection; everyone who wants one to the same peer meanwhile awaits the same dial."""
        if self._leaving:
            raise ConnectionBroken("this peer is leaving")
        if peer == self._host.peer:
            raise ConnectionBroken("a peer does not call itself")
        dial = self._dials.get(peer)
        if dial is None:
            dial = self._dials[peer] = asyncio.create_task(self._open(peer), name=f"dial {peer}")
            dial.add_done_callback(lambda done: self._dialled(peer, done))
        try:
            return await asyncio.shield(dial)
        except asyncio.CancelledError:
            if dial.cancelled() and not _being_cancelled():
                raise ConnectionBroken("this peer is leaving") from None
            raise

    def _dialled(self, peer: PeerId, dial: asyncio.Task[Connection]) -> None:
        self._dials.pop(peer, None)
        if not dial.cancelled():
            dial.exception()  # whoever still waits gets it; perhaps nobody does

    async def _open(self, peer: PeerId) -> Connection:
        try:
            async with asyncio.timeout(self.limits.dial_s):
                opened = await self._open_stream_or_meet(peer)
        except TimeoutError:
            raise ConnectionBroken(f"{peer} could not be reached within {self.limits.dial_s:.0f} s") from None
        if isinstance(opened, Connection):
            return opened
        stream, path = opened
        connection = Connection(self, stream, peer, opened=True, path=path)
        self._register(connection)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.break_, "the handshake failed")
            await connection.start()
            undo.pop_all()
        return connection

    async def _open_stream_or_meet(self, peer: PeerId) -> tuple[FrameStream, str] | Connection:
        """A stream; or, when our dial crossed the peer's, the connection by which it reaches us meanwhile.

        Tries until cancelled, as long as that is all that fails; the lower peer id dials again first.
        """
        while True:
            try:
                return await self._open_stream(peer)
            except DialsCrossed:
                turn = TURN_S * (random.random() * 0.5 + (self._host.peer > peer))
            met = await self._met(peer, DIAL_AGAIN_S + turn)
            if met is not None:
                return met

    async def _met(self, peer: PeerId, timeout_s: float) -> Connection | None:
        """The connection that `peer` opens within this time."""
        came = self._awaited[peer] = asyncio.Event()
        try:
            if self._usable(peer) is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(came.wait(), timeout_s)
        finally:
            del self._awaited[peer]
        return self._usable(peer)

    async def _open_stream(self, peer: PeerId) -> tuple[FrameStream, str]:
        # p2pd cannot find by itself a peer that it never met ("routing: not found"): known addresses first.
        addresses = self._book.addresses(peer)
        tried = ""
        if addresses:
            try:
                await self._host.reach(peer, addresses, self.limits.dial_s)
            except DialsCrossed:
                raise
            except ConnectionBroken as error:
                tried = f" ({error})"
        try:
            return await self._host.open_stream(peer, PROTOCOL_NAME, self.limits.frames(), self.limits.dial_s)
        except DialsCrossed:
            raise
        except ConnectionBroken as error:
            raise ConnectionBroken(f"{peer} could not be reached: {error}{tried}") from error

    def _accept(self, stream: FrameStream, peer: PeerId, path: str) -> None:
        try:
            self._refuse_shut_out(peer)
            if self._leaving or not self._make_room():
                raise Refused("This peer takes no more connections now; try another.")
        except Refused as error:
            stream.send_small(encode_frame(FrameType.GOODBYE, 0, refusal_to_wire(error)))
            stream.close()
            return
        for older in list(self._connections.get(peer, ())):
            if not older.opened:  # an honest peer opens a second stream only when it has given the first one up
                older.break_("the peer opened a new stream")
        connection = Connection(self, stream, peer, opened=False, path=path)
        self._register(connection)
        self.spawn(self._greet(connection))

    def _make_room(self) -> bool:
        """Whether one more connection may come; observers, and who has not said HELLO yet, give way to newcomers."""
        connections = self._all()
        if len(connections) < self.limits.max_connections:
            return True
        for connection in connections:
            if connection.observer and not connection.opened:
                connection.break_("others need the room")
                return True
        return False

    async def _greet(self, connection: Connection) -> None:
        with contextlib.suppress(AgoraError):
            await connection.start()

    def _refuse_shut_out(self, peer: PeerId) -> None:
        """Raises NotAdmitted when nothing may go to or come from `peer` now."""
        seconds = self.shut_out_s(peer)
        if seconds > 0:
            raise NotAdmitted(f"{peer} broke the rules too often; it is shut out for {seconds:.0f} s more.")

    def _register(self, connection: Connection) -> None:
        self._connections.setdefault(connection.peer, []).append(connection)

    # --- what connections need of us

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until it ends or the network closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def ready(self, connection: Connection) -> None:
        """Both HELLOs were said."""
        self._book.learn(connection.peer, connection.addresses)
        if connection.peer in self._awaited:
            self._awaited[connection.peer].set()
        self.spawn(connection.ping())

    def gone(self, connection: Connection) -> None:
        """A connection broke; what it carried stays counted."""
        self._past_bytes[0] += connection.stream.bytes_in
        self._past_bytes[1] += connection.stream.bytes_out
        left = self._connections.get(connection.peer, [])
        if connection in left:
            left.remove(connection)
        if not left:
            self._connections.pop(connection.peer, None)

    def _all(self) -> list[Connection]:
        return [connection for connections in self._connections.values() for connection in connections]

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(0.5, self.limits.silence_s / 4))
            for connection in self._all():
                if self.shut_out_s(connection.peer) > 0:
                    connection.break_("the peer is shut out")
                connection.tick(loop.time())


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _statistics_of(connections: Sequence[Connection]) -> PeerStatistics:
    measured = [connection.rtt_s for connection in connections if connection.rtt_s is not None]
    return PeerStatistics(
        rtt_s=min(measured, default=None),
        bytes_in=sum(connection.stream.bytes_in for connection in connections),
        bytes_out=sum(connection.stream.bytes_out for connection in connections),
        open_calls=sum(connection.owed for connection in connections),
        path=connections[-1].path if connections else "direct",
    )


def _shortened(request: Message, left_s: float) -> Message:
    """`request` with a deadline of at most `left_s` seconds from now."""
    left_ms = max(1, int(left_s * 1000))
    fields: Any = request
    return (
        request
        if left_ms + DEADLINE_SLACK_MS >= fields.deadline_ms
        else dataclasses.replace(fields, deadline_ms=left_ms)
    )
