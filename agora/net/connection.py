"""One stream between two peers, from HELLO to GOODBYE, and the calls that both sides have open on it.

Knows: the order of frames, and the numbers of calls: odd ones from the side that opened the stream, even ones from the
other. Must not know: how streams are opened, which peers exist, or what a request means beyond its type.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agora_protocol import refusals
from agora_protocol.errors import AgoraError, NotAdmitted, ProtocolError, Refused, WrongRun
from agora_protocol.frames import FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_CALLS_PER_CONNECTION, MAX_HEADER_BYTES, PROTOCOL_VERSION
from agora_protocol.message_base import Message
from agora_protocol.messages import (
    ANSWER_OF,
    GetManifest,
    GetStatus,
    Hello,
    Ping,
    Refusal,
)
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.net.incoming import CallServices, IncomingCalls
from agora.net.liveness import LivenessCheck, Verdict
from agora.net.network_errors import ConnectionBroken
from agora.net.streams import Frame, FrameStream, Intake

OBSERVERS_MAY: Final = (Ping, GetStatus, GetManifest)  # the only requests that an observer may make
LONG_ANSWERS: Final = (GetStatus, GetManifest)  # requests whose answers may have headers above MAX_HEADER_BYTES
LAST_CALL: Final = 2**32 - 1  # the largest number of a call that a frame can carry
GOODBYE_S: Final = 0.3  # seconds from the peer's GOODBYE to the abort, which would take this side's last frames along
ROUND_TRIP_WEIGHT: Final = 0.3  # the weight of the newest ping in Connection.round_trip


class ConnectionOwner(CallServices, Protocol):
    """What a connection needs of the Network that it is part of; `Network.__init__` says what the functions do."""

    hello: Callable[[], Hello]
    report_violation: Callable[[PeerId, ProtocolError], None]
    shut_out_s: Callable[[PeerId], float]

    def on_ready(self, connection: Connection, addresses: Sequence[str]) -> None:
        """Called when both sides have said HELLO. addresses: where the peer says that it can be dialled."""

    def on_gone(self, connection: Connection) -> None:
        """Called once, when a connection has broken or ended."""


@dataclass(slots=True)
class _OpenCall:
    """A call of this side that has no answer yet."""

    reply: asyncio.Future[Reply]
    request: type[Message]
    on_progress: OnProgress | None


class Connection:
    """Shakes hands with a peer on one stream, makes this side's calls there and has the peer's calls answered.

    It lives until the stream breaks, either side ends it, or the peer is silent for too long; all open calls then fail.
    """

    def __init__(self, owner: ConnectionOwner, stream: FrameStream, peer: PeerId, *, opened: bool, path: str) -> None:
        """opened: this side opened the stream. path: "direct", "punched" or "relayed"."""
        self.peer = peer
        self.opened = opened
        self.path = path
        self.stream = stream
        self.broken: AgoraError | None = None
        self._owner = owner
        self._limits = owner.limits
        self._run: bytes | None = None  # of the peer, b"" for an observer; None until it has said HELLO
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer_leaves = False
        self.round_trip = MovingAverage(ROUND_TRIP_WEIGHT)  # in seconds
        self._liveness = LivenessCheck(self._limits.silence_s, self._limits.answer_s, loop_time())
        self._next_call = 1 if opened else 2
        self._open: dict[int, _OpenCall] = {}
        self._slots = asyncio.Semaphore(min(self._limits.max_calls, MAX_CALLS_PER_CONNECTION))
        self._awaited = 0  # calls of this side, pings aside, that the peer has not answered
        self.incoming = IncomingCalls(owner, stream, peer, self._end_when_idle)

    # --- from HELLO to GOODBYE

    async def start(self) -> None:
        """Exchanges HELLOs. Raises WrongRun for a peer of another run, ProtocolError for one of another version.

        Raises the peer's refusal if it says GOODBYE with one, such as NotAdmitted, and ConnectionBroken when the stream
        ends or no HELLO comes within `hello_s`.
        """
        self.stream.attach(self)
        self.stream.enqueue(encode_frame(FrameType.HELLO, 0, self._owner.hello()))
        try:
            async with asyncio.timeout(self._limits.hello_s):
                await self._ready
        except TimeoutError:
            self.break_off("no HELLO came")
            raise ConnectionBroken("the peer opened a stream and said nothing") from None

    @property
    def is_usable(self) -> bool:
        """Whether new calls may go here: the peer said HELLO and is not leaving, nothing broke, numbers are left."""
        has_numbers = self._next_call <= LAST_CALL - 2
        return self._run is not None and self.broken is None and not self._peer_leaves and has_numbers

    @property
    def is_observer(self) -> bool:
        """Whether the peer has named no run in its HELLO, or has not said HELLO yet."""
        return not self._run

    def end(self, error: AgoraError, reason: str) -> None:
        """Sends a GOODBYE with `error`, closes the stream, and fails every call with ConnectionBroken(reason)."""
        self.stream.enqueue(encode_frame(FrameType.GOODBYE, 0, refusals.refusal_to_wire(error)))
        self.stream.close()
        self.on_lost(reason)

    def break_off(self, reason: str) -> None:
        """Fails every call and aborts the stream without GOODBYE, unless the connection has ended already."""
        if self.broken is None:
            self.on_lost(reason)
            self.stream.abort()

    def on_lost(self, reason: str) -> None:
        """Marks the connection as broken: the handshake and every open call raise ConnectionBroken(reason)."""
        self._fail(ConnectionBroken(reason))

    def _fail(self, error: AgoraError, handshake_error: AgoraError | None = None) -> None:
        """Ends it once: open calls raise `error`, an unfinished `start` raises `handshake_error` or the same."""
        if self.broken is not None:
            return
        self.broken = error
        if not self._ready.done():
            self._ready.set_exception(handshake_error or error)
            self._ready.exception()
        for number in list(self._open):
            self._settle(number, error)
        self.incoming.on_lost()
        self._owner.on_gone(self)

    def _end_when_idle(self) -> None:
        """Breaks off when the peer has said GOODBYE without a refusal and no call of either side is open."""
        if self._peer_leaves and not self._awaited and not len(self.incoming):
            self.break_off("the peer is leaving")

    # --- calls of this side, and whether the peer is still there

    async def call(self, request: Message, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        """Waits until fewer than `max_calls` are open, then sends the request and returns the reply as `_ask` does."""
        self._owner.count_sent(request, tensors)
        async with self._slots:
            self._awaited += 1
            try:
                return await self._ask(request, tensors, on_progress)
            finally:
                self._awaited -= 1
                self._end_when_idle()

    async def _ask(self, request: Message, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        """Sends a request now, and returns the reply. When cancelled, takes the request back, or sends CANCEL."""
        if self.broken is not None:
            raise self.broken
        number, self._next_call = self._next_call, self._next_call + 2
        call = _OpenCall(asyncio.get_running_loop().create_future(), type(request), on_progress)
        buffers = encode_frame(FrameType.REQUEST, number, request, tensors)
        self._open[number] = call
        is_sent = False
        try:
            await self.stream.send(buffers, number)
            is_sent = True
            return await call.reply
        except asyncio.CancelledError:
            is_answered = call.reply.done() and not call.reply.cancelled()
            if is_sent and not is_answered and not self.stream.withdraw(number):
                self.stream.enqueue(encode_frame(FrameType.CANCEL, number, None))
            raise
        finally:
            del self._open[number]

    async def ping(self) -> None:
        """Sends a Ping, and updates `round_trip` by the time to its answer; does nothing when no answer comes."""
        started = time.perf_counter()  # the loop's clock counts milliseconds
        try:
            async with asyncio.timeout(self._limits.silence_s + self._limits.answer_s):
                await self._ask(Ping(), (), None)
        except (AgoraError, TimeoutError):
            return
        self.round_trip = self.round_trip.updated(time.perf_counter() - started)

    def tick(self, now: float) -> None:
        """Called twice a second: pings a peer that owes an answer and is silent; breaks off if it stays silent.

        Also pings while a long payload is being received, so that its sender hears a sign of life.
        """
        if self._run is None or self.broken is not None:
            return
        stream, spawn = self.stream, self._owner.spawn
        if stream.is_mid_payload and not stream.backlog and now - stream.last_sent > self._limits.silence_s / 2:
            spawn(self.ping())  # on a slow link this ping is for long all that the payload's sender hears
        verdict = self._liveness.judge(
            now,
            owed=self._awaited > 0 and not stream.is_waiting,
            heard_at=stream.last_heard,
            flushed=stream.bytes_out - stream.unsent,
            backlog=stream.backlog,
        )
        if verdict is Verdict.PING:
            spawn(self.ping())
        elif verdict is Verdict.GONE:
            self.break_off(f"the peer has been silent for {now - self._liveness.alive_at:.0f} s")

    # --- what arrives

    def on_prefix(self, prefix: Prefix) -> None:
        """Raises ProtocolError for a frame before HELLO, other than GOODBYE, or for a header that is too long.

        A header may exceed MAX_HEADER_BYTES only in a frame of an open call whose request is in LONG_ANSWERS.
        """
        if self._run is None and prefix.type not in (FrameType.HELLO, FrameType.GOODBYE):
            raise ProtocolError("out-of-order", f"A {prefix.type.name} frame came before HELLO.")
        call = self._open.get(prefix.call)
        if prefix.header_bytes > MAX_HEADER_BYTES and not (call and call.request in LONG_ANSWERS):
            raise ProtocolError("too-large", f"A header of {prefix.header_bytes} bytes that nobody asked for.")

    def on_header(self, prefix: Prefix, message: Message | None) -> Intake:
        """Decides whether a payload is read: `incoming` does for requests, and answers to calls that are over are not.

        Raises ProtocolError for a call number of the wrong side, or an answer of the wrong kind.
        """
        if prefix.type in (FrameType.REQUEST, FrameType.CANCEL) and self._is_own(prefix.call):
            raise ProtocolError("out-of-order", f"A {prefix.type.name} of call {prefix.call}, which is not the peer's.")
        if prefix.type is FrameType.REQUEST:
            refusal = None
            if self.is_observer and not isinstance(message, OBSERVERS_MAY):
                refusal = NotAdmitted("An observer may only ask for the manifest and the status.")
            elif self._owner.shut_out_s(self.peer) > 0:
                refusal = NotAdmitted("This peer answers nothing to you for now; ask another.")
            return self.incoming.on_request_header(prefix, message, refusal)
        if prefix.type is FrameType.ANSWER:
            call = self._find_open(prefix.call)
            if call is None:
                return Intake.DROP
            if not isinstance(message, ANSWER_OF[call.request]):
                raise ProtocolError("bad-message", f"{type(message).__name__} is no answer to {call.request.__name__}.")
            self.incoming.share.reserve(prefix.payload_bytes)
        return Intake.TAKE

    def on_frame(self, frame: Frame) -> None:
        """Handles a frame: a peer's request or CANCEL, the outcome of an own call, HELLO or GOODBYE."""
        message: Any = frame.message  # of the class that belongs into such a frame: that was judged with its header
        share = self.incoming.share
        match frame.type:
            case FrameType.REQUEST:
                self.incoming.on_request(frame, message, self._run or None)
            case FrameType.ANSWER:
                share.release(share.take_arrived())  # others may go on at once, and end this connection
                tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
                self._settle(frame.call, Reply(message, tensors))
            case FrameType.PROGRESS:
                call = self._find_open(frame.call)
                if call is not None and call.on_progress is not None:
                    asyncio.get_running_loop().call_soon(call.on_progress, message)  # outside the read callback
            case FrameType.REFUSAL:
                self._settle(frame.call, refusals.refusal_from_wire(message))
            case FrameType.CANCEL:
                self.incoming.on_cancel(frame.call)
            case FrameType.HELLO:
                self._on_hello(message)
            case FrameType.GOODBYE:
                self._on_goodbye(message)

    def on_violation(self, error: ProtocolError, prefix: Prefix | None) -> None:
        """Refuses a request that broke the protocol, ends the connection with GOODBYE, and reports it to the owner."""
        if prefix is not None and prefix.type is FrameType.REQUEST and not self._is_own(prefix.call):
            self.incoming.refuse(prefix.call, error)
        self.end(error, f"the peer broke the protocol ({error.code}): {error}")
        self._owner.report_violation(self.peer, error)

    def _is_own(self, number: int) -> bool:
        """Whether `number` is odd or even as this side's call numbers are: odd on the side that opened the stream."""
        return number % 2 == self._next_call % 2

    def _find_open(self, number: int) -> _OpenCall | None:
        """Returns this side's open call, None for one that is over. Raises ProtocolError if it was never made."""
        if number not in self._open and (not self._is_own(number) or number >= self._next_call):
            raise ProtocolError("out-of-order", f"A frame answers call {number}, which was never made.")
        return self._open.get(number)

    def _settle(self, number: int, result: Reply | AgoraError) -> None:
        """Has an open call return its Reply or raise its error, if it is not over. Raises as `_find_open` does."""
        call = self._find_open(number)
        if call is None or call.reply.done():
            return
        if isinstance(result, AgoraError):
            call.reply.set_exception(result)
            call.reply.exception()  # its caller may have left without asking for it
        else:
            call.reply.set_result(result)

    def _on_hello(self, hello: Hello) -> None:
        """Makes the connection ready, or ends it for another version or run. A second HELLO raises ProtocolError."""
        if self._run is not None:
            raise ProtocolError("out-of-order", "A second HELLO.")
        problem: AgoraError
        own = self._owner.hello()
        if hello.version != PROTOCOL_VERSION:
            versions = f"Protocol version {hello.version} meets version {PROTOCOL_VERSION}; update the older one."
            problem = ProtocolError("wrong-version", versions)
        elif hello.run and own.run and hello.run != own.run:
            problem = WrongRun(f"The peer trains run {own.run.hex()[:12]}, not {hello.run.hex()[:12]}.")
        else:
            self._run = hello.run
            self._owner.on_ready(self, hello.addresses)
            if not self._ready.done():
                self._ready.set_result(None)
            return
        self._fail(problem)
        self.end(problem, str(problem))

    def _on_goodbye(self, refusal: Refusal | None) -> None:
        """Ends the connection as the peer's GOODBYE asks.

        Without a refusal it ends once no call is open. With one, all calls fail: with the refusal itself if the peer
        does not want this one or its version, else with ConnectionBroken. The stream is aborted GOODBYE_S later.
        """
        if refusal is None:
            self._peer_leaves = True
            self._end_when_idle()
            return
        error = refusals.refusal_from_wire(refusal)
        is_unwanted = isinstance(error, Refused) or error.code == "wrong-version"
        ended = ConnectionBroken(f"the peer ended the connection ({error.code}): {error}")
        self._fail(error if is_unwanted else ended, handshake_error=error)
        asyncio.get_running_loop().call_later(GOODBYE_S, self.stream.abort)
