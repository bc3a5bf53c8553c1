"""One stream between two peers, from HELLO to GOODBYE, and the calls that both sides have open on it.

The gate stands before all connections: it makes this peer's HELLO, judges those of others, and decides which peers may
be called.

| what | asks the gate |
|---|---|
| a stream that this peer opens | `find_refusal` before it dials, `hello_to`, then `admit` with the peer's HELLO |
| a stream that a peer opens | `admit` with the peer's HELLO, and only then `hello_to` |
| a request | nothing: the connection keeps the role that `admit` returned, until `find_new_refusal` returns an error |
| a call of the DHT, both ways | `is_admitted_member`: HELLO was exchanged with that peer, as members of the run |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from agora_protocol import limits, refusals
from agora_protocol.errors import AgoraError, Busy, NotAdmitted, PeerFailed, ProtocolError, Refused, Unsupported
from agora_protocol.frames import FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_CALLS_PER_CONNECTION, MAX_HEADER_BYTES
from agora_protocol.messages import (
    ANSWER_OF,
    CallProgress,
    GetAmendments,
    GetManifest,
    GetStatus,
    Hello,
    Message,
    Ping,
    Pong,
    Refusal,
    Request,
    ShareAmendments,
    ShareRevocations,
    UnknownRequest,
)
from agora_protocol.refusals import refusal_of_error
from agora_protocol.tensors import WireTensor
from agora_protocol.tickets import MEMBER

from agora.core.calls import ConnectionBroken, OnProgress, Reply
from agora.core.clock import boot_time, loop_time
from agora.core.fair_shares import Requester
from agora.core.moving_average import MovingAverage
from agora.net.p2pd.frame_stream import Buffers, Frame, FrameStream, PayloadAction
from agora.net.rpc.budgets import AnswerBudget, NetLimits, PayloadBudget, PayloadReservations
from agora.net.rpc.gate import Gate
from agora.net.rpc.liveness import LivenessCheck, StallDetector, Verdict

# The only requests of a reader.
READER_REQUESTS: Final = (Ping, GetStatus, GetManifest, GetAmendments, ShareRevocations, ShareAmendments)
LONG_ANSWERS: Final = (
    GetStatus,
    GetManifest,
    GetAmendments,
)  # requests whose answers may have headers above MAX_HEADER_BYTES
LAST_CALL: Final = 2**32 - 1  # the largest number of a call that a frame can carry
GOODBYE_TIMEOUT_S: Final = 0.3  # seconds from the peer's GOODBYE to the abort, after which nothing more can be sent
ROUND_TRIP_WEIGHT: Final = 0.3  # the weight of the newest ping in Connection.round_trip
NO_MEMORY: Final = "no memory free for the payload"  # the reason of a Busy


@dataclass(slots=True)
class IncomingCall:
    """One request of a peer that the gate has admitted, and which its sender may make.

    `progress` never waits. It does nothing once the requester is gone, or when too much waits to be sent.
    """

    peer: PeerId
    message: Message
    tensors: list[WireTensor]
    deadline: float  # in loop time
    progress: OnProgress = lambda _: None  # tells the requester how far the work is
    address_prefix: str = ""  # the network of the requester's address
    is_requester_gone: bool = False  # it has cancelled the call, or its connection broke: it gets no answer


# Answers a peer. An AgoraError that it raises becomes a typed refusal, any other error PeerFailed.
#
# It is cancelled when the requester gives up or the deadline passes, but not when the connection breaks.
Handler = Callable[[IncomingCall], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionServices:
    """What all connections of one network share: its judgement of peers, its handler, its budgets, and whom they tell.

    spawn: runs work in a task that is cancelled when the network closes. on_ready: called when both sides have sent
    HELLO, with the addresses that the peer announces. on_gone: called once, when the connection has broken or ended,
    even if `start` has not returned yet. For the others see Network.
    """

    gate: Gate
    handle: Handler
    limits: NetLimits
    budget: PayloadBudget
    answers: AnswerBudget
    suspended_s: Callable[[PeerId], float]
    report_protocol_error: Callable[[PeerId, ProtocolError], None]
    report_failure: Callable[[PeerId, Exception], None]
    count_sent: Callable[[Message, Sequence[WireTensor]], None]
    tell_time: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    on_ready: Callable[[Connection, Sequence[str]], None]
    on_gone: Callable[[Connection], None]


class IncomingCalls:
    """One connection's calls of the peer: admits or refuses each request, has it handled in a task, and answers."""

    def __init__(
        self, services: ConnectionServices, stream: FrameStream, peer: PeerId, on_answered: Callable[[], None]
    ) -> None:
        """on_answered: called whenever the task of a request has ended, answered or cancelled."""
        self.payloads = PayloadReservations(services.budget, services.limits.payload_wait_s, self._on_wait_over)
        self._services = services
        self._stream = stream
        self._peer = peer
        self._on_answered = on_answered
        self._open: dict[int, tuple[IncomingCall, asyncio.Task[None]]] = {}
        self._waiting_call = 0  # the number of the call whose payload waits for memory, 0 for none
        self._reserved: dict[int, int] = {}  # bytes of answers that are not written yet, by call

    def __len__(self) -> int:
        return len(self._open)

    def on_request_header(self, prefix: Prefix, request: Message | None, refusal: AgoraError | None) -> PayloadAction:
        """Decides on a REQUEST by its header: its payload is read (TAKE), waits for memory, or is refused and dropped.

        It also reserves the bytes of the answer. A Ping is always read. refusal: why any other request is refused. If
        None, it may still be refused as Busy: beyond `max_calls`, for lack of memory, or when AnswerBudget refuses.
        Raises ProtocolError for a number that is open, more than MAX_CALLS_PER_CONNECTION open calls, and refused
        requests of GetStatus or GetManifest that the peer repeats too often.
        """
        number = prefix.call
        protocol_max_calls = limits.MAX_CALLS_PER_CONNECTION
        if number in self._open:
            raise ProtocolError("out-of-order", f"Call {number} is open already.")
        if isinstance(request, Ping):
            return PayloadAction.TAKE
        if refusal is not None:
            return self.refuse(number, refusal)
        if len(self._open) >= protocol_max_calls:
            raise ProtocolError("too-many-calls", f"More than {protocol_max_calls} calls on one connection.")
        if len(self._open) >= self._services.limits.max_calls:
            return self._refuse_busy(number, f"{len(self._open)} calls of this peer are open")
        try:
            reserved = self._services.answers.reserve(self._requester, request, loop_time())
        except Busy as error:
            return self.refuse(number, error)
        if reserved:
            self._reserved[number] = reserved
        self._waiting_call = number
        action = self.payloads.reserve_for_request(prefix.payload_bytes)
        return self._refuse_busy(number, NO_MEMORY) if action is PayloadAction.DROP else action

    @property
    def _requester(self) -> Requester:
        return Requester(self._stream.address_prefix, self._peer)

    def _release_answer(self, number: int) -> None:
        self._services.answers.release(self._requester, self._reserved.pop(number, 0))

    def _on_wait_over(self, is_reserved: bool) -> None:
        self._stream.resume_payload(
            PayloadAction.TAKE if is_reserved else self._refuse_busy(self._waiting_call, NO_MEMORY)
        )

    def _refuse_busy(self, number: int, why: str) -> PayloadAction:
        return self.refuse(number, Busy(why, retry_after_ms=int(self._services.limits.payload_wait_s * 1000)))

    def refuse(self, number: int, error: AgoraError) -> PayloadAction:
        """Sends the peer a REFUSAL of its request with `error`, releases the bytes of its answer, and returns DROP."""
        self._release_answer(number)
        self._stream.enqueue(encode_frame(FrameType.REFUSAL, number, refusal_of_error(error)), number)
        return PayloadAction.DROP

    def on_request(self, frame: Frame, request: Request) -> None:
        """Answers a Ping immediately; serves any other request in a task, until whose end its payload stays reserved.

        Called when the whole request has arrived.
        """
        held_bytes = self.payloads.take_arrived()
        if isinstance(request, Ping):
            self._stream.enqueue(encode_frame(FrameType.ANSWER, frame.call, Pong(self._services.tell_time())))
            return
        tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
        deadline = loop_time() + request.deadline_ms / 1000
        progress = partial(self._send_progress, frame.call)
        call = IncomingCall(self._peer, request, tensors, deadline, progress, self._stream.address_prefix)
        task = self._services.spawn(self._serve(frame.call, call))
        self._open[frame.call] = call, task
        task.add_done_callback(partial(self._on_served, frame.call, held_bytes))

    def on_cancel(self, number: int) -> None:
        """Cancels the work for a call that the peer has given up, and removes its answer if that waits to be sent."""
        if number in self._open:
            call, task = self._open.pop(number)
            call.is_requester_gone = True
            task.cancel()
        self._stream.withdraw(number)

    def on_lost(self) -> None:
        """Called when the connection is lost: releases the bytes of all answers and of an unfinished payload.

        The work goes on, since the requester may ask for its result again. Each request's payload stays reserved until
        its work ends.
        """
        for call, _ in self._open.values():
            call.is_requester_gone = True
        for number in list(self._reserved):
            self._release_answer(number)
        self.payloads.close()

    def _send_progress(self, number: int, call_progress: CallProgress) -> None:
        if number in self._open and not self._open[number][0].is_requester_gone:
            self._stream.enqueue_droppable(encode_frame(FrameType.PROGRESS, number, call_progress), number)

    async def _serve(self, number: int, call: IncomingCall) -> None:
        is_sent = False
        try:
            buffers = await self._answer(number, call)
            with contextlib.suppress(TimeoutError, ConnectionBroken):  # nobody waits for this answer any more
                async with asyncio.timeout_at(call.deadline):  # ends a wait for room; a send that need not wait goes on
                    if not call.is_requester_gone:
                        await self._stream.send(buffers, number, partial(self._release_answer, number))
                        is_sent = True
        finally:
            if not is_sent:
                self._release_answer(number)

    def _on_served(self, number: int, held_bytes: int, task: asyncio.Task[None]) -> None:
        if number in self._open and self._open[number][1] is task:
            del self._open[number]
        if task.cancelled():  # perhaps before it began
            self._release_answer(number)
        self.payloads.release(held_bytes)
        self._on_answered()

    async def _answer(self, number: int, call: IncomingCall) -> Buffers:
        refusal: AgoraError
        try:
            async with asyncio.timeout_at(call.deadline) as timeout:
                reply = await self._services.handle(call)
        except AgoraError as error:
            refusal = error
        except asyncio.CancelledError:
            this_call = asyncio.current_task()
            if this_call is None or this_call.cancelling():
                raise
            # What the handler waited for was given up, such as the mean of a closed stage; the requester gets an error.
            refusal = PeerFailed("the peer has given this work up")
        except Exception as error:
            if timeout.expired():
                refusal = PeerFailed("the deadline of the call passed")
            else:
                self._services.report_failure(self._peer, error)
                refusal = PeerFailed("an error inside the peer's daemon; its log has it")
        else:
            try:
                buffers = encode_frame(FrameType.ANSWER, number, reply.message, reply.tensors)
                self._services.count_sent(call.message, reply.tensors)
                return buffers
            except ProtocolError as error:
                self._services.report_failure(self._peer, error)
                refusal = PeerFailed("the peer's answer would have broken the protocol")
        return encode_frame(FrameType.REFUSAL, number, refusal_of_error(refusal))


# A call made here and not yet answered. request_type decides which messages answer it.
@dataclass(slots=True)
class _OpenCall:
    reply: asyncio.Future[Reply]
    request_type: type[Message]
    on_progress: OnProgress | None


class Connection:
    """One connection: exchanges HELLO with a peer on one stream, then carries the calls of both sides on it.

    Lives until the stream breaks, either side ends the connection, or the peer is silent or stalls for too long. All
    open calls then fail, and `broken` holds the error. stream: opened, but not attached yet.
    """

    def __init__(
        self, services: ConnectionServices, stream: FrameStream, peer: PeerId, *, is_initiator: bool, path: str
    ) -> None:
        """is_initiator: this side opened the stream. path: "direct", "punched" or "relayed"."""
        self.peer = peer
        self.is_initiator = is_initiator
        self.path = path
        self.stream = stream
        self.broken: AgoraError | None = None
        self._services = services
        self._limits = services.limits
        self.role: str | None = None  # the role given by the gate; None until the peer's HELLO has come
        self.proof, self.software = b"", ""  # those of its HELLO
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer_leaves = False
        self.round_trip = MovingAverage(ROUND_TRIP_WEIGHT)  # in seconds
        self.boot_unix: float | None = None  # unix time when this machine's boot_time was 0, as the peer's clock has it
        self._liveness = LivenessCheck(self._limits.ping_after_s, self._limits.pong_within_s, loop_time())
        self._incoming_watch, self._outgoing_watch = StallDetector(), StallDetector()
        self._next_call = 1 if is_initiator else 2
        self._open: dict[int, _OpenCall] = {}
        self._slots = asyncio.Semaphore(min(self._limits.max_calls, MAX_CALLS_PER_CONNECTION))
        self._unanswered_calls = 0  # made here, not counting pings
        self.incoming = IncomingCalls(services, stream, peer, self._close_when_idle)

    # --- from HELLO to GOODBYE

    async def start(self) -> None:
        """Exchanges HELLOs: this side's comes first if it opened the stream, else once the peer is admitted.

        Raises NotAdmitted, WrongRun or ProtocolError "wrong-version" if the gate does not admit the peer, and the error
        in the peer's GOODBYE if it sends one instead. Raises ConnectionBroken when the stream ends, when no HELLO comes
        within `hello_s`, and when the HELLO breaks the protocol, for example with a malformed proof.
        """
        self.stream.attach(self)
        if self.is_initiator:
            self._say_hello()
        try:
            async with asyncio.timeout(self._limits.hello_s):
                await self._ready
        except TimeoutError:
            reason = f"no HELLO came within {self._limits.hello_s:g} s"
            self.abort(reason)
            raise ConnectionBroken(reason) from None

    @property
    def is_usable(self) -> bool:
        has_numbers = self._next_call <= LAST_CALL - 2
        return self.role == MEMBER and self.broken is None and not self._peer_leaves and has_numbers

    @property
    def requester(self) -> Requester:
        return Requester(self.stream.address_prefix, self.peer)

    @property
    def is_reader(self) -> bool:
        return self.role != MEMBER

    def close(self, error: AgoraError, reason: str) -> None:
        """Queues a GOODBYE with `error`, closes the stream once it is sent; calls made here raise ConnectionBroken."""
        self.stream.enqueue(encode_frame(FrameType.GOODBYE, 0, refusals.refusal_of_error(error)))
        self.stream.close()
        self.on_lost(reason)

    def abort(self, reason: str) -> None:
        """Aborts the stream without GOODBYE; calls made here raise ConnectionBroken. No-op if broken already."""
        if self.broken is None:
            self.on_lost(reason)
            self.stream.abort()

    def on_lost(self, reason: str) -> None:
        """Marks the connection as broken, unless it is: `start` and every open call raise ConnectionBroken(reason)."""
        self._mark_broken(ConnectionBroken(reason))

    def _mark_broken(self, error: AgoraError, handshake_error: AgoraError | None = None) -> None:
        if self.broken is not None:
            return
        self.broken = error
        if not self._ready.done():
            self._ready.set_exception(handshake_error or error)
            self._ready.exception()
        for number in list(self._open):
            self._settle(number, error)
        self.incoming.on_lost()
        self._services.on_gone(self)

    def _close_when_idle(self) -> None:
        if self._peer_leaves and not self._unanswered_calls and not len(self.incoming):
            self.abort("the peer is leaving")

    # --- calls of this side, and whether the peer is still there

    async def call(self, request: Request, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        """Counts the request by `count_sent`, sends it once fewer than `max_calls` are open, and awaits its answer."""
        self._services.count_sent(request, tensors)
        async with self._slots:
            self._unanswered_calls += 1
            try:
                return await self._ask(request, tensors, on_progress)
            finally:
                self._unanswered_calls -= 1
                self._close_when_idle()

    async def _ask(self, request: Request, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
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
            # A request that is still queued is dropped. The peer knows of any other, so it gets a CANCEL.
            if is_sent and not is_answered and not self.stream.withdraw(number):
                self.stream.enqueue(encode_frame(FrameType.CANCEL, number, None))
            raise
        finally:
            del self._open[number]

    async def ping(self) -> None:
        """Sends a Ping and awaits its Pong, which updates `round_trip` and, if it has a time, `boot_unix`.

        Changes nothing when the peer refuses, the connection breaks, or no Pong comes in ping_after_s + pong_within_s.
        """
        started = boot_time()  # uvloop's clock has only millisecond resolution
        try:
            async with asyncio.timeout(self._limits.ping_after_s + self._limits.pong_within_s):
                reply = await self._ask(Ping(), (), None)
        except (AgoraError, TimeoutError):
            return
        took_s = boot_time() - started
        self.round_trip = self.round_trip.with_sample(took_s)
        if isinstance(reply.message, Pong) and reply.message.unix:  # the Pong was sent half a round trip ago
            self.boot_unix = reply.message.unix - (started + took_s / 2)

    def tick(self, now: float) -> None:
        """Called twice a second: pings a peer that owes an answer and is silent; aborts if it stays silent.

        Also pings while a long payload is being received, so that its sender gets a sign of life; aborts when a
        payload, or the peer's reading of what this side sends, stalls. Does nothing before the peer's HELLO.
        """
        if self.role is None or self.broken is not None:
            return
        if why := self._find_stall(now):
            self.abort(why)
            return
        stream = self.stream
        spawn = self._services.spawn
        if stream.is_mid_payload and not stream.backlog and now - stream.last_sent > self._limits.ping_after_s / 2:
            spawn(self.ping())  # on a slow link the payload's sender may receive nothing else for long
        verdict = self._liveness.decide(
            now,
            owed=self._unanswered_calls > 0 and not stream.is_waiting,
            heard_at=stream.last_heard,
            flushed=stream.bytes_out - stream.unsent,
            backlog=stream.backlog,
        )
        if verdict is Verdict.PING:
            spawn(self.ping())
        elif verdict is Verdict.GONE:
            self.abort(f"the peer has been silent for {now - self._liveness.alive_at:.0f} s")

    def _find_stall(self, now: float) -> str:
        stream = self.stream
        budget = self._services.budget
        is_reading = stream.is_mid_payload and not stream.is_waiting
        if self._incoming_watch.is_stalled(now, stream.bytes_in, under_way=is_reading, pressed=budget.is_pressed):
            return "a payload that it began did not go on"
        flushed = stream.bytes_out - stream.unsent
        if self._outgoing_watch.is_stalled(now, flushed, under_way=stream.backlog > 0, pressed=False):
            return "the peer reads nothing of what it has asked for"
        return ""

    # --- what arrives

    def on_prefix(self, prefix: Prefix) -> None:
        """Raises ProtocolError for a prefix whose frame comes before HELLO (GOODBYE may), or has too long a header.

        A header may exceed MAX_HEADER_BYTES only in a frame of an open call whose request is in LONG_ANSWERS.
        """
        if self.role is None and prefix.type not in (FrameType.HELLO, FrameType.GOODBYE):
            raise ProtocolError("out-of-order", f"A {prefix.type.name} frame came before HELLO.")
        call = self._open.get(prefix.call)
        if prefix.header_bytes > MAX_HEADER_BYTES and not (call and call.request_type in LONG_ANSWERS):
            raise ProtocolError("too-large", f"A header of {prefix.header_bytes} bytes came that nobody asked for.")

    def on_header(self, prefix: Prefix, message: Message | None) -> PayloadAction:
        """Decides whether to read a frame's payload: of a request as `incoming` says, of an answer if its call is open.

        Reserves memory for an answer. Refuses requests that a reader must not make, and every request of a suspended
        peer. Raises ProtocolError for a call number of the wrong side or never used, or an answer of the wrong type.
        """
        if prefix.type in (FrameType.REQUEST, FrameType.CANCEL) and self._is_own(prefix.call):
            raise ProtocolError(
                "out-of-order", f"A {prefix.type.name} has the number {prefix.call}, not of the peer's."
            )
        if prefix.type is FrameType.REQUEST:
            refusal: Refused | None = None
            if self.is_reader and not isinstance(message, READER_REQUESTS):
                refusal = NotAdmitted(
                    "a reader may only ask for manifest, status and amendments, or pass on signed news of the run"
                )
            elif self._services.suspended_s(self.peer) > 0:
                refusal = NotAdmitted("this peer answers nothing to you for now; ask another")
            elif isinstance(message, UnknownRequest):
                refusal = Unsupported(f"this version knows no request of kind {message.number}; ask a newer peer")
            return self.incoming.on_request_header(prefix, message, refusal)
        if prefix.type is FrameType.ANSWER:
            call = self._find_open(prefix.call)
            if call is None:
                return PayloadAction.DROP
            if not isinstance(message, ANSWER_OF[call.request_type]):
                request = call.request_type.__name__
                raise ProtocolError("bad-message", f"{type(message).__name__} is not an answer to {request}.")
            self.incoming.payloads.reserve(prefix.payload_bytes)
        return PayloadAction.TAKE

    def on_frame(self, frame: Frame) -> None:
        """Gives a peer's request or CANCEL to `incoming`, ends or advances a call made here, handles HELLO and GOODBYE.

        Releases an answer's reserved memory. Calls on_progress later in the event loop. May raise ProtocolError.
        """
        payloads = self.incoming.payloads
        match frame.type, frame.message:  # the message belongs to the type: that was checked with the header
            case FrameType.REQUEST, request if isinstance(request, Request):
                self.incoming.on_request(frame, request)
            case FrameType.ANSWER, Message() as answer:
                payloads.release(payloads.take_arrived())  # others may go on immediately, and end this connection
                tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
                self._settle(frame.call, Reply(answer, tensors))
            case FrameType.PROGRESS, CallProgress() as call_progress:
                call = self._find_open(frame.call)
                if call is not None and call.on_progress is not None:
                    asyncio.get_running_loop().call_soon(call.on_progress, call_progress)  # outside the read callback
            case FrameType.REFUSAL, Refusal() as refusal:
                self._settle(frame.call, refusals.error_of_refusal(refusal))
            case FrameType.CANCEL, None:
                self.incoming.on_cancel(frame.call)
            case FrameType.HELLO, Hello() as hello:
                self._on_hello(hello)
            case FrameType.GOODBYE, (Refusal() | None) as refusal_or_none:
                self._on_goodbye(refusal_or_none)
            case _:
                raise AssertionError(f"{frame.type.name} came with {type(frame.message).__name__}")

    def on_protocol_error(self, error: ProtocolError, prefix: Prefix | None) -> None:
        """Refuses the request if one broke the protocol; ends the connection with GOODBYE and reports it."""
        if prefix is not None and prefix.type is FrameType.REQUEST and not self._is_own(prefix.call):
            self.incoming.refuse(prefix.call, error)
        self.close(error, f"the peer broke the protocol ({error.code}): {error}")
        self._services.report_protocol_error(self.peer, error)

    def _is_own(self, number: int) -> bool:
        return number % 2 == self._next_call % 2

    def _find_open(self, number: int) -> _OpenCall | None:
        if number not in self._open and (not self._is_own(number) or number >= self._next_call):
            raise ProtocolError("out-of-order", f"A frame answers call {number}, which was never made.")
        return self._open.get(number)

    def _settle(self, number: int, result: Reply | AgoraError) -> None:
        call = self._find_open(number)
        if call is None or call.reply.done():
            return
        if isinstance(result, AgoraError):
            call.reply.set_exception(result)
            call.reply.exception()  # its caller may have left without retrieving it
        else:
            call.reply.set_result(result)

    def _say_hello(self) -> None:
        self.stream.enqueue(encode_frame(FrameType.HELLO, 0, self._services.gate.hello_to(self.peer)))

    def _on_hello(self, hello: Hello) -> None:
        if self.role is not None:
            raise ProtocolError("out-of-order", "A second HELLO.")
        try:
            self.role = self._services.gate.admit(self.peer, hello)
            self.proof, self.software = hello.proof, hello.software
        except AgoraError as error:
            if isinstance(error, ProtocolError) and error.code != "wrong-version":
                raise
            self._mark_broken(error)
            self.close(error, str(error))
            return
        if not self.is_initiator:
            self._say_hello()
        self._services.on_ready(self, hello.addresses)
        if not self._ready.done():
            self._ready.set_result(None)

    def _on_goodbye(self, refusal: Refusal | None) -> None:
        # The connection ends immediately if the GOODBYE carries a refusal, otherwise once no call is open. After a
        # refusal `start` raises that refusal. All calls fail: with the refusal itself if the peer rejects this one or
        # its version, otherwise with ConnectionBroken.
        if refusal is None:
            self._peer_leaves = True
            self._close_when_idle()
            return
        error = refusals.error_of_refusal(refusal)
        is_unwanted = isinstance(error, Refused) or error.code == "wrong-version"
        ended = ConnectionBroken(f"the peer ended the connection ({error.code}): {error}")
        self._mark_broken(error if is_unwanted else ended, handshake_error=error)
        asyncio.get_running_loop().call_later(GOODBYE_TIMEOUT_S, self.stream.abort)
