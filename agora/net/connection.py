"""One stream between two peers, and the calls that both sides have open on it.

Knows call ids, frames' order, what a peer may ask for, and when a silent peer counts as gone. Must not know how streams
are opened, which peers exist, or what a request means beyond its type: a handler answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from agora_protocol.errors import AgoraError, Busy, NotAdmitted, PeerFailed, ProtocolError, Refused, WrongRun
from agora_protocol.frames import FrameType, Prefix, TensorSpec, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_CALLS_PER_CONNECTION, MAX_HEADER_BYTES, PROTOCOL_VERSION
from agora_protocol.messages import (
    ANSWER_OF,
    Advance,
    GetManifest,
    GetStatus,
    Hello,
    Message,
    Ping,
    Pong,
    Refusal,
    Request,
    refusal_from_wire,
    refusal_to_wire,
)
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.net.errors import ConnectionBroken
from agora.net.pulse import Pulse, Verdict
from agora.net.streams import Frame, FrameStream, Intake
from agora.net.terms import HeldBytes, IncomingCall, NetLimits

GUARANTEED_BYTES: Final = 65_536  # payloads every connection may always have in hand, however full everything is
LAST_CALL: Final = 2**32 - 1
OBSERVERS_MAY: Final = (Ping, GetStatus, GetManifest)
LONG_ANSWERS: Final = (GetStatus, GetManifest)
FAREWELL_S: Final = 0.3  # both may say goodbye at once: ending the stream at once would take our last words along
CONNECTION_FRAMES: Final = (FrameType.HELLO, FrameType.GOODBYE)


class Home(Protocol):
    """What a connection needs of the network it is part of."""

    limits: NetLimits
    held: HeldBytes
    report_violation: Callable[[PeerId, ProtocolError], None]
    shut_out_s: Callable[[PeerId], float]
    report_failure: Callable[[PeerId, Exception], None]

    def hello(self) -> Hello: ...

    def handle(self, call: IncomingCall) -> Awaitable[Reply]: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def ready(self, connection: Connection) -> None: ...

    def gone(self, connection: Connection) -> None: ...


@dataclass(slots=True)
class _OpenCall:
    answer: asyncio.Future[Reply]
    request: type[Message]
    on_progress: OnProgress | None


@dataclass(slots=True)
class _Serving:
    incoming: IncomingCall
    task: asyncio.Task[None] | None = None


class Connection:
    """A stream after both HELLOs, and until then. Calls made by the side that opened it are odd, the other's even."""

    def __init__(self, home: Home, stream: FrameStream, peer: PeerId, *, opened: bool, path: str) -> None:
        self.peer = peer
        self.opened = opened
        self.path = path
        self.addresses: tuple[str, ...] = ()  # where the peer says it can be dialled
        self.stream = stream
        self.rtt_s: float | None = None
        self.leaving = self._peer_leaves = False
        self.broken: AgoraError | None = None
        self._home = home
        self._loop = asyncio.get_running_loop()
        self._hello: Hello | None = None
        self._ready: asyncio.Future[Hello] = self._loop.create_future()
        self._next = 1 if opened else 2
        self._open: dict[int, _OpenCall] = {}
        self._serving: dict[int, _Serving] = {}
        self._slots = asyncio.Semaphore(min(home.limits.max_calls, MAX_CALLS_PER_CONNECTION))
        self.owed = 0  # our calls, pings aside, that the peer has not answered
        self._reading_bytes = 0  # taken from held bytes for the frame whose payload is arriving
        self._held_here = 0
        self._wanted = 0
        self._out_of_patience = False
        self._pulse = Pulse(home.limits.silence_s, home.limits.answer_s, self._loop.time())

    # --- from HELLO to GOODBYE

    async def start(self) -> None:
        """Say HELLO and hear it. Raises WrongRun, NotAdmitted, ProtocolError (the version), ConnectionBroken."""
        self.stream.attach(self)
        self.stream.send_small(encode_frame(FrameType.HELLO, 0, self._home.hello()))
        try:
            async with asyncio.timeout(self._home.limits.hello_s):
                await self._ready
        except TimeoutError:
            self.break_("no HELLO came")
            raise ConnectionBroken("the peer opened a stream and said nothing") from None

    @property
    def usable(self) -> bool:
        """Whether a new call may go here."""
        return self._hello is not None and self.broken is None and not self.leaving and self._next <= LAST_CALL - 2

    @property
    def observer(self) -> bool:
        """Whether the peer is here only to ask, as far as it has said."""
        return self._hello is None or not self._hello.run

    def say_goodbye(self, error: AgoraError | None = None) -> None:
        """No more calls here; with an error, the connection ends now."""
        self.leaving = True
        self.stream.send_small(encode_frame(FrameType.GOODBYE, 0, refusal_to_wire(error) if error else None))
        if error is not None:
            self.stream.close()

    def break_(self, reason: str, error: AgoraError | None = None) -> None:
        """Fail every call, with `error` where it says more than that the connection broke, and cut the stream.

        One that is lost already is left alone: its last words may still be on their way.
        """
        if self.broken is None:
            self.lost(reason, error)
            self.stream.abort()

    def lost(self, reason: str, error: AgoraError | None = None) -> None:
        """The stream is gone, or as good as: fail every call."""
        if self.broken is not None:
            return
        self.broken = error = error or ConnectionBroken(reason)
        self._resolve(error)
        for call in list(self._open.values()):
            _settle(call.answer, error)
        for serving in self._serving.values():
            serving.incoming.caller_gone = True
        if self._wanted:
            self._wanted = 0
            self._home.held.forget(self)
        reading, self._reading_bytes = self._reading_bytes, 0
        self._let_go(reading)
        self._home.gone(self)

    def _resolve(self, error: AgoraError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whoever accepted the stream does not wait for it

    # --- our calls

    async def call(self, request: Message, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        """Ask, and wait for the answer. Raises what the peer refused with, or ConnectionBroken.

        The tensors must not change until this returns. Cancelling it tells the peer to stop.
        """
        async with self._slots:
            self.owed += 1
            try:
                return await self._ask(request, tensors, on_progress)
            finally:
                self.owed -= 1
                self._close_when_left()

    async def _ask(self, request: Message, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        if self.broken is not None:
            raise self.broken
        number, self._next = self._next, self._next + 2
        call = _OpenCall(self._loop.create_future(), type(request), on_progress)
        buffers = encode_frame(FrameType.REQUEST, number, request, tensors)
        self._open[number] = call
        sent = False
        try:
            await self.stream.send(buffers, number)
            sent = True
            return await call.answer
        except asyncio.CancelledError:
            answered = call.answer.done() and not call.answer.cancelled()
            if sent and not answered and not self.stream.withdraw(number):
                self.stream.send_small(encode_frame(FrameType.CANCEL, number, None))
            raise
        finally:
            del self._open[number]
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()

    async def ping(self) -> None:
        """Measure the round trip; a peer that does not answer is found out by `tick`."""
        started = time.perf_counter()  # the loop's clock counts milliseconds
        try:
            async with asyncio.timeout(self._home.limits.silence_s + self._home.limits.answer_s):
                await self._ask(Ping(), (), None)
        except (AgoraError, TimeoutError):
            return
        took = time.perf_counter() - started
        self.rtt_s = took if self.rtt_s is None else 0.7 * self.rtt_s + 0.3 * took

    def tick(self, now: float) -> None:
        """Find out whether a peer that owes us something is still there, and show one that sends to us that we are."""
        if self._hello is None or self.broken is not None:
            return
        stream = self.stream
        if stream.mid_payload and not stream.backlog and now - stream.last_sent > self._home.limits.silence_s / 2:
            self._home.spawn(self.ping())  # on a slow link our word that its bytes arrive is all it hears for long
        verdict = self._pulse.judge(
            now,
            owed=self.owed > 0 and not stream.reading_held,
            heard_at=stream.last_heard,
            flushed=stream.bytes_out - stream.unsent,
            backlog=stream.backlog,
        )
        if verdict is Verdict.PING:
            self._home.spawn(self.ping())
        elif verdict is Verdict.GONE:
            self.break_(f"the peer has been silent for {self._pulse.silent_s(now):.0f} s")

    # --- what arrives

    def prefix(self, prefix: Prefix) -> None:
        if self._hello is None and prefix.type not in CONNECTION_FRAMES:
            raise ProtocolError("out-of-order", f"A {prefix.type.name} frame came before HELLO.")
        if prefix.header_bytes > MAX_HEADER_BYTES:
            asked = self._open.get(prefix.call)
            if asked is None or asked.request not in LONG_ANSWERS:
                raise ProtocolError("too-large", f"A header of {prefix.header_bytes} bytes that nobody asked for.")

    def begin(self, prefix: Prefix, message: Message | None, specs: tuple[TensorSpec, ...]) -> Intake:
        if prefix.type is FrameType.REQUEST:
            return self._request_begins(prefix, message)
        if prefix.type is FrameType.ANSWER:
            return self._answer_begins(prefix, message)
        return Intake.TAKE

    def frame(self, frame: Frame) -> None:
        message: Any = frame.message  # of the class that belongs into such a frame: that was judged with its header
        match frame.type:
            case FrameType.REQUEST:
                self._on_request(frame, message)
            case FrameType.ANSWER:
                self._on_answer(frame, message)
            case FrameType.PROGRESS:
                self._on_progress(frame.call, message)
            case FrameType.REFUSAL:
                self._settle_ours(frame.call, refusal_from_wire(message))
            case FrameType.CANCEL:
                self._on_cancel(frame.call)
            case FrameType.HELLO:
                self._on_hello(message)
            case FrameType.GOODBYE:
                self._on_goodbye(message)

    def violated(self, error: ProtocolError, prefix: Prefix | None) -> None:
        if prefix is not None and prefix.type is FrameType.REQUEST and not self._ours(prefix.call):
            self._refuse(prefix.call, error)
        self.say_goodbye(error)
        self.lost(f"the peer broke the protocol ({error.code}): {error}")
        self._home.report_violation(self.peer, error)

    def _on_hello(self, hello: Hello) -> None:
        if self._hello is not None:
            raise ProtocolError("out-of-order", "A second HELLO.")
        ours = self._home.hello()
        problem: AgoraError | None = None
        if hello.version != PROTOCOL_VERSION:
            versions = f"Protocol version {hello.version} meets version {PROTOCOL_VERSION}; update the older one."
            problem = ProtocolError("wrong-version", versions)
        elif hello.run and ours.run and hello.run != ours.run:
            problem = WrongRun(f"The peer trains run {ours.run.hex()[:12]}, not {hello.run.hex()[:12]}.")
        if problem is not None:
            self.say_goodbye(problem)
            self.lost(str(problem), problem)
            return
        self._hello, self.addresses = hello, hello.addresses
        self._home.ready(self)
        if not self._ready.done():
            self._ready.set_result(hello)

    def _on_goodbye(self, refusal: Refusal | None) -> None:
        if refusal is None:
            self.leaving = self._peer_leaves = True
            self._close_when_left()
            return
        error = refusal_from_wire(refusal)
        self._resolve(error)
        unwanted = isinstance(error, Refused) or error.code == "wrong-version"
        self.lost(f"the peer ended the connection ({error.code}): {error}", error if unwanted else None)
        asyncio.get_running_loop().call_later(FAREWELL_S, self.stream.abort)

    def _ours(self, call: int) -> bool:
        return call % 2 == (1 if self.opened else 0)

    # --- answers to our calls

    def _answer_begins(self, prefix: Prefix, message: Message | None) -> Intake:
        call = self._open.get(prefix.call)
        if call is None:
            self._must_be_past(prefix.call, "An ANSWER")
            return Intake.DROP
        if not isinstance(message, ANSWER_OF[call.request]):
            raise ProtocolError("bad-message", f"{type(message).__name__} is no answer to {call.request.__name__}.")
        # Never held back: we asked for it, and whoever waits for it may hold what others wait for.
        self._home.held.add(prefix.payload_bytes)
        self._held_here += prefix.payload_bytes
        self._reading_bytes = prefix.payload_bytes
        return Intake.TAKE

    def _on_answer(self, frame: Frame, message: Message) -> None:
        reading, self._reading_bytes = self._reading_bytes, 0
        self._let_go(reading)  # others may go on at once, and end this connection
        tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
        self._settle_ours(frame.call, Reply(message, tensors))

    def _settle_ours(self, number: int, result: Reply | AgoraError) -> None:
        call = self._open.get(number)
        if call is None:
            self._must_be_past(number, "A REFUSAL")
        else:
            _settle(call.answer, result)

    def _on_progress(self, number: int, advance: Advance) -> None:
        call = self._open.get(number)
        if call is None:
            self._must_be_past(number, "A PROGRESS")
        elif call.on_progress is not None:
            self._loop.call_soon(call.on_progress, advance)

    def _must_be_past(self, number: int, what: str) -> None:
        """A call that we gave up may still be answered; one that we never made may not."""
        if not self._ours(number) or number >= self._next:
            raise ProtocolError("out-of-order", f"{what} to call {number}, which was never made.")

    # --- requests of the peer

    def _request_begins(self, prefix: Prefix, request: Message | None) -> Intake:
        if self._ours(prefix.call) or prefix.call in self._serving:
            raise ProtocolError("out-of-order", f"Call {prefix.call} is not the peer's to open.")
        if isinstance(request, Ping):
            return Intake.TAKE
        if self.observer and not isinstance(request, OBSERVERS_MAY):
            return self._refuse(prefix.call, NotAdmitted("An observer may only ask for the manifest and the status."))
        if self.leaving and not self._peer_leaves:
            return self._refuse(prefix.call, Refused("This peer is leaving; ask another."))
        if self._home.shut_out_s(self.peer) > 0:
            return self._refuse(prefix.call, NotAdmitted("This peer answers nothing to you for now; ask another."))
        if len(self._serving) >= MAX_CALLS_PER_CONNECTION:
            raise ProtocolError("too-many-calls", f"More than {MAX_CALLS_PER_CONNECTION} calls on one connection.")
        if len(self._serving) >= self._home.limits.max_calls:
            return self._refuse(prefix.call, self._busy(f"{len(self._serving)} calls of this peer are in hand"))
        return self._hold(prefix.payload_bytes, prefix.call)

    def _hold(self, size: int, number: int) -> Intake:
        """Take `size` held bytes for a request, wait for them, or, when that was tried in vain, refuse it.

        Waiting stops everything behind it on this stream, answers included, whose readers may hold the very bytes that
        are waited for; so it ends after `patience_s`, and no other request waits until one has got through.
        """
        if not size:
            return Intake.TAKE
        if self._home.held.take(size):
            self._out_of_patience = False
        elif self._held_here + size <= GUARANTEED_BYTES:
            self._home.held.add(size)
        elif self._out_of_patience:
            return self._refuse(number, self._busy("no memory free for the payload"))
        else:
            self._wanted = size
            patience = self._loop.call_later(self._home.limits.patience_s, self._lose_patience, number)
            self._home.held.wait(self, patience)
            return Intake.WAIT
        self._reading_bytes = size
        self._held_here += size
        return Intake.TAKE

    def try_again(self) -> bool:
        """Held bytes were let go; whether this connection needs to wait no longer."""
        if not self._wanted or self.broken is not None:
            return True
        if not self._home.held.take(self._wanted):
            return False
        self._reading_bytes, self._wanted = self._wanted, 0
        self._held_here += self._reading_bytes
        self.stream.proceed(Intake.TAKE)
        return True

    def _lose_patience(self, number: int) -> None:
        if self._wanted and self.broken is None:
            self._wanted = 0
            self._home.held.forget(self)
            self._out_of_patience = True
            self.stream.proceed(self._refuse(number, self._busy("no memory free for the payload")))

    def _let_go(self, size: int) -> None:
        if size:
            self._held_here -= size
            self._home.held.let_go(size)

    def _busy(self, why: str) -> Busy:
        return Busy(why, retry_after_ms=int(self._home.limits.patience_s * 1000))

    def _refuse(self, number: int, error: AgoraError) -> Intake:
        self.stream.send_small(encode_frame(FrameType.REFUSAL, number, refusal_to_wire(error)), number)
        return Intake.DROP

    def _on_request(self, frame: Frame, request: Request) -> None:
        held, self._reading_bytes = self._reading_bytes, 0
        if isinstance(request, Ping):
            self.stream.send_small(encode_frame(FrameType.ANSWER, frame.call, Pong()))
            return
        incoming = IncomingCall(
            peer=self.peer,
            run=self._hello.run or None if self._hello else None,
            message=request,
            tensors=slice_payload(frame.specs, frame.payload) if frame.payload is not None else [],
            deadline=self._loop.time() + request.deadline_ms / 1000,
        )
        incoming.progress = partial(self._send_progress, frame.call)
        self._serving[frame.call] = serving = _Serving(incoming)
        serving.task = self._home.spawn(self._serve(frame.call, incoming))
        serving.task.add_done_callback(lambda _: self._served(frame.call, serving, held))

    def _send_progress(self, number: int, advance: Advance) -> None:
        if number in self._serving and self.broken is None:
            self.stream.send_news(encode_frame(FrameType.PROGRESS, number, advance), number)

    def _on_cancel(self, number: int) -> None:
        if self._ours(number):
            raise ProtocolError("out-of-order", f"CANCEL of call {number}, which is not the peer's.")
        serving = self._serving.pop(number, None)
        if serving is not None:
            serving.incoming.caller_gone = True
            if serving.task is not None:
                serving.task.cancel()
        self.stream.withdraw(number)

    async def _serve(self, number: int, incoming: IncomingCall) -> None:
        """Have a request answered. It goes on when the caller is gone: its result may be asked for again."""
        buffers = await self._answer(number, incoming)
        with contextlib.suppress(TimeoutError, ConnectionBroken):  # nobody waits for this answer any more
            async with asyncio.timeout_at(None if self.stream.has_room else incoming.deadline):
                if not incoming.caller_gone:
                    await self.stream.send(buffers, number)

    def _served(self, number: int, serving: _Serving, held: int) -> None:
        """Its task has ended; perhaps it was cancelled before it began."""
        if self._serving.get(number) is serving:
            del self._serving[number]
        self._let_go(held)
        self._close_when_left()

    async def _answer(self, number: int, incoming: IncomingCall) -> list[bytes | memoryview]:
        try:
            async with asyncio.timeout_at(incoming.deadline):
                reply = await self._home.handle(incoming)
        except TimeoutError:
            refusal: AgoraError = PeerFailed("the deadline of the call passed")
        except AgoraError as error:
            refusal = error
        except Exception as error:
            self._home.report_failure(self.peer, error)
            refusal = PeerFailed("an error inside the peer's daemon; its log has it")
        else:
            try:
                return encode_frame(FrameType.ANSWER, number, reply.message, reply.tensors)
            except ProtocolError as error:
                self._home.report_failure(self.peer, error)
                refusal = PeerFailed("the peer's answer would have broken the protocol")
        return encode_frame(FrameType.REFUSAL, number, refusal_to_wire(refusal))

    def _close_when_left(self) -> None:
        if self._peer_leaves and not self.owed and not self._serving and self.broken is None:
            self.break_("the peer is leaving")  # it waits for us to end the stream, see FrameStream.close


def _settle(future: asyncio.Future[Reply], result: Reply | AgoraError) -> None:
    if future.done():
        return
    if isinstance(result, AgoraError):
        future.set_exception(result)
    else:
        future.set_result(result)
