"""One stream between two peers, from HELLO to GOODBYE, and the calls that both sides have open on it.

Knows: the order of frames, call numbers, and when a silent peer counts as gone. Must not know: how streams are opened,
which peers exist, or what a request means beyond its type. The side that opened the stream gives its calls odd numbers,
the other side even ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agora_protocol import messages
from agora_protocol.errors import AgoraError, NotAdmitted, ProtocolError, Refused, WrongRun
from agora_protocol.frames import FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_CALLS_PER_CONNECTION, MAX_HEADER_BYTES, PROTOCOL_VERSION
from agora_protocol.messages import ANSWER_OF, GetManifest, GetStatus, Hello, Message, Ping, Refusal
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.clock import loop_time
from agora.moving_average import MovingAverage
from agora.net.incoming import CallServices, IncomingCalls
from agora.net.liveness import LivenessCheck, Verdict
from agora.net.network_errors import ConnectionBroken
from agora.net.streams import Frame, FrameStream, Intake

OBSERVERS_MAY: Final = (Ping, GetStatus, GetManifest)
LONG_ANSWERS: Final = (GetStatus, GetManifest)
"""Requests whose answers may have a header longer than MAX_HEADER_BYTES."""
LAST_CALL: Final = 2**32 - 1
GOODBYE_S: Final = 0.3
"""Both may say GOODBYE at once: ending the stream at once would take this side's last frames along."""
CONNECTION_FRAMES: Final = (FrameType.HELLO, FrameType.GOODBYE)
ROUND_TRIP_WEIGHT: Final = 0.3


class ConnectionOwner(CallServices, Protocol):
    """What a connection needs of the network that it is part of; see `Network.__init__` for the functions."""

    hello: Callable[[], Hello]
    report_violation: Callable[[PeerId, ProtocolError], None]
    shut_out_s: Callable[[PeerId], float]

    def on_ready(self, connection: Connection, addresses: Sequence[str]) -> None:
        """Takes a connection on which both sides have said HELLO, and where the peer says that it can be dialled."""

    def on_gone(self, connection: Connection) -> None:
        """Takes a connection that broke or ended; called once."""


@dataclass(slots=True)
class _OpenCall:
    """A call of this side that has no answer yet."""

    reply: asyncio.Future[Reply]
    request: type[Message]
    on_progress: OnProgress | None


class Connection:
    """One stream to a peer, from before the HELLOs until it breaks or ends, and all calls on it."""

    def __init__(self, owner: ConnectionOwner, stream: FrameStream, peer: PeerId, *, opened: bool, path: str) -> None:
        """opened: this side opened the stream. path: "direct" or "relayed"."""
        self.peer = peer
        self.opened = opened
        self.path = path
        self.stream = stream
        self.broken: AgoraError | None = None
        self._owner = owner
        self._limits = owner.limits
        self._hello: Hello | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer_leaves = False
        self.round_trip = MovingAverage(ROUND_TRIP_WEIGHT)  # in seconds
        self._liveness = LivenessCheck(self._limits.silence_s, self._limits.answer_s, loop_time())
        self._next_call = 1 if opened else 2
        self._open: dict[int, _OpenCall] = {}
        self._slots = asyncio.Semaphore(min(self._limits.max_calls, MAX_CALLS_PER_CONNECTION))
        self._awaited = 0  # calls of this side, pings aside, that the peer has not answered
        self.incoming = IncomingCalls(owner, stream, peer, self._end_when_idle)
        self.share = self.incoming.share

    # --- from HELLO to GOODBYE

    async def start(self) -> None:
        """Says HELLO and waits for the peer's. Raises WrongRun, NotAdmitted, ProtocolError, or ConnectionBroken."""
        self.stream.attach(self)
        self.stream.send_small(encode_frame(FrameType.HELLO, 0, self._owner.hello()))
        try:
            async with asyncio.timeout(self._limits.hello_s):
                await self._ready
        except TimeoutError:
            self.break_off("no HELLO came")
            raise ConnectionBroken("the peer opened a stream and said nothing") from None

    @property
    def is_usable(self) -> bool:
        """Whether a new call may go here."""
        has_numbers = self._next_call <= LAST_CALL - 2
        return self._hello is not None and self.broken is None and not self._peer_leaves and has_numbers

    @property
    def is_observer(self) -> bool:
        """Whether the peer takes part in no run, as far as it has said."""
        return self._hello is None or not self._hello.run

    def end(self, error: AgoraError, reason: str) -> None:
        """Tells the peer why in a GOODBYE, fails every call, and closes the stream when that is written."""
        self.stream.send_small(encode_frame(FrameType.GOODBYE, 0, messages.refusal_to_wire(error)))
        self.stream.close()
        self.on_lost(reason)

    def break_off(self, reason: str) -> None:
        """Fails every call and cuts the stream. Does nothing once it has ended: its GOODBYE may still be on its way."""
        if self.broken is None:
            self.on_lost(reason)
            self.stream.abort()

    def on_lost(self, reason: str) -> None:
        """Fails every call, since the stream is gone or as good as gone."""
        self._fail(ConnectionBroken(reason))

    def _fail(self, error: AgoraError) -> None:
        """Ends the connection with `error`: the handshake and every call raise it; its memory is released."""
        if self.broken is not None:
            return
        self.broken = error
        self._fail_handshake(error)
        for number in list(self._open):
            self._settle(number, error)
        self.incoming.on_lost()
        self.share.close()
        self._owner.on_gone(self)

    def _fail_handshake(self, error: AgoraError) -> None:
        """Has `start` raise `error` unless it is over. Whoever accepted the stream does not wait for it."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()

    def _end_when_idle(self) -> None:
        """Ends a connection whose peer leaves, once no call is open: the peer waits for this, see FrameStream.close."""
        if self._peer_leaves and not self._awaited and not len(self.incoming):
            self.break_off("the peer is leaving")

    # --- calls of this side, and whether the peer is still there

    async def call(self, request: Message, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        """Sends a request when fewer than `max_calls` are open, and returns the reply. Cancelling tells the peer."""
        self._owner.count_sent(request, tensors)
        async with self._slots:
            self._awaited += 1
            try:
                return await self._ask(request, tensors, on_progress)
            finally:
                self._awaited -= 1
                self._end_when_idle()

    async def _ask(
        self, request: Message, tensors: Sequence[WireTensor] = (), on_progress: OnProgress | None = None
    ) -> Reply:
        """Sends a request at once; see `call`."""
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
                self.stream.send_small(encode_frame(FrameType.CANCEL, number, None))
            raise
        finally:
            del self._open[number]

    async def ping(self) -> None:
        """Measures the round trip. A peer that does not answer is found out by `tick`."""
        started = time.perf_counter()  # the loop's clock counts milliseconds
        try:
            async with asyncio.timeout(self._limits.silence_s + self._limits.answer_s):
                await self._ask(Ping())
        except (AgoraError, TimeoutError):
            return
        self.round_trip = self.round_trip.updated(time.perf_counter() - started)

    def tick(self, now: float) -> None:
        """Pings a peer that owes an answer or sends for long; breaks off when it is gone. Called twice a second."""
        if self._hello is None or self.broken is not None:
            return
        stream, spawn = self.stream, self._owner.spawn
        if stream.is_mid_payload and not stream.backlog and now - stream.last_sent > self._limits.silence_s / 2:
            spawn(self.ping())  # on a slow link this ping is for long all that the sender hears
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
            self.break_off(f"the peer has been silent for {self._liveness.silent_s(now):.0f} s")

    # --- what arrives

    def on_prefix(self, prefix: Prefix) -> None:
        """Raises ProtocolError for a frame that may not come now, or whose header is too long."""
        if self._hello is None and prefix.type not in CONNECTION_FRAMES:
            raise ProtocolError("out-of-order", f"A {prefix.type.name} frame came before HELLO.")
        call = self._open.get(prefix.call)
        if prefix.header_bytes > MAX_HEADER_BYTES and not (call and call.request in LONG_ANSWERS):
            raise ProtocolError("too-large", f"A header of {prefix.header_bytes} bytes that nobody asked for.")

    def on_header(self, prefix: Prefix, message: Message | None) -> Intake:
        """Decides whether a frame's payload is read. Raises ProtocolError."""
        if prefix.type in (FrameType.REQUEST, FrameType.CANCEL) and self._is_own(prefix.call):
            raise ProtocolError("out-of-order", f"A {prefix.type.name} of call {prefix.call}, which is not the peer's.")
        if prefix.type is FrameType.REQUEST:
            return self.incoming.on_request_header(prefix, message, self._refusal_of(message))
        if prefix.type is FrameType.ANSWER:
            call = self._find_open(prefix.call)
            if call is None:
                return Intake.DROP
            if not isinstance(message, ANSWER_OF[call.request]):
                raise ProtocolError("bad-message", f"{type(message).__name__} is no answer to {call.request.__name__}.")
            self.share.reserve(prefix.payload_bytes)
        return Intake.TAKE

    def on_frame(self, frame: Frame) -> None:
        """Hands a complete frame to the calls that it belongs to, or takes HELLO and GOODBYE. Raises ProtocolError."""
        message: Any = frame.message  # of the class that belongs into such a frame: that was judged with its header
        match frame.type:
            case FrameType.REQUEST:
                self.incoming.on_request(frame, message, self._hello.run or None if self._hello else None)
            case FrameType.ANSWER:
                self.share.release(self.share.take_arrived())  # others may go on at once, and end this connection
                tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
                self._settle(frame.call, Reply(message, tensors))
            case FrameType.PROGRESS:
                call = self._find_open(frame.call)
                if call is not None and call.on_progress is not None:
                    asyncio.get_running_loop().call_soon(call.on_progress, message)  # outside the read callback
            case FrameType.REFUSAL:
                self._settle(frame.call, messages.refusal_from_wire(message))
            case FrameType.CANCEL:
                self.incoming.on_cancel(frame.call)
            case FrameType.HELLO:
                self._on_hello(message)
            case FrameType.GOODBYE:
                self._on_goodbye(message)

    def on_violation(self, error: ProtocolError, prefix: Prefix | None) -> None:
        """Ends the connection because the peer broke the protocol; tells the peer so, and reports it."""
        if prefix is not None and prefix.type is FrameType.REQUEST and not self._is_own(prefix.call):
            self.incoming.refuse(prefix.call, error)
        self.end(error, f"the peer broke the protocol ({error.code}): {error}")
        self._owner.report_violation(self.peer, error)

    def _is_own(self, number: int) -> bool:
        """Whether a call of this number is this side's to make."""
        return number % 2 == self._next_call % 2

    def _find_open(self, number: int) -> _OpenCall | None:
        """Returns this side's open call; None for one that it gave up. Raises ProtocolError when it never made it."""
        if number not in self._open and (not self._is_own(number) or number >= self._next_call):
            raise ProtocolError("out-of-order", f"A frame answers call {number}, which was never made.")
        return self._open.get(number)

    def _settle(self, number: int, result: Reply | AgoraError) -> None:
        """Ends an open call with its reply, or with the error that it raises. Raises as `_find_open` does."""
        call = self._find_open(number)
        if call is None or call.reply.done():
            return
        if isinstance(result, AgoraError):
            call.reply.set_exception(result)
            call.reply.exception()  # its caller may have left without asking for it
        else:
            call.reply.set_result(result)

    def _refusal_of(self, request: Message | None) -> AgoraError | None:
        """Returns the error with which a request of that kind is refused now; None when it is not."""
        if self.is_observer and not isinstance(request, OBSERVERS_MAY):
            return NotAdmitted("An observer may only ask for the manifest and the status.")
        if self._owner.shut_out_s(self.peer) > 0:
            return NotAdmitted("This peer answers nothing to you for now; ask another.")
        return None

    def _on_hello(self, hello: Hello) -> None:
        """Judges the peer's HELLO: the connection is ready, or it ends."""
        if self._hello is not None:
            raise ProtocolError("out-of-order", "A second HELLO.")
        own = self._owner.hello()
        if hello.version != PROTOCOL_VERSION:
            versions = f"Protocol version {hello.version} meets version {PROTOCOL_VERSION}; update the older one."
            self._reject(ProtocolError("wrong-version", versions))
        elif hello.run and own.run and hello.run != own.run:
            self._reject(WrongRun(f"The peer trains run {own.run.hex()[:12]}, not {hello.run.hex()[:12]}."))
        else:
            self._hello = hello
            self._owner.on_ready(self, hello.addresses)
            if not self._ready.done():
                self._ready.set_result(None)

    def _reject(self, problem: AgoraError) -> None:
        """Ends the connection with `problem`, which whoever waits for the handshake gets."""
        self._fail(problem)
        self.end(problem, str(problem))

    def _on_goodbye(self, refusal: Refusal | None) -> None:
        """Takes the peer's GOODBYE: without a refusal it finishes its open calls, else the connection ends now."""
        if refusal is None:
            self._peer_leaves = True
            self._end_when_idle()
            return
        error = messages.refusal_from_wire(refusal)
        is_unwanted = isinstance(error, Refused) or error.code == "wrong-version"
        self._fail_handshake(error)
        ended = ConnectionBroken(f"the peer ended the connection ({error.code}): {error}")
        self._fail(error if is_unwanted else ended)
        asyncio.get_running_loop().call_later(GOODBYE_S, self.stream.abort)
