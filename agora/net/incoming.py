"""The calls that a peer has open on one connection: whether their requests are read, and how they are answered.

Knows: call numbers, the handler, what peers may cost this one, and the memory for payloads, which is reserved before a
buffer exists. Must not know: what a request means beyond its type, or how streams are opened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from agora_protocol import limits
from agora_protocol.errors import AgoraError, Busy, PeerFailed, ProtocolError
from agora_protocol.frames import FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.message_base import Message
from agora_protocol.messages import Advance, Ping, Pong, Request
from agora_protocol.refusals import refusal_to_wire
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.clock import loop_time
from agora.net.answer_share import AnswerShare
from agora.net.fair_share import Holder
from agora.net.network_errors import ConnectionBroken
from agora.net.send_queue import Buffers
from agora.net.streams import Frame, FrameStream, Intake

NO_MEMORY: Final = "no memory free for the payload"  # the reason of a Busy
GUARANTEED_BYTES: Final = 65_536  # payload bytes that every connection may always hold, however full the budget is


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Limits of the memory, calls and connections that other peers may use here, and timeouts in seconds. Immutable."""

    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES  # of one frame, as the run's manifest implies
    max_held_bytes: int = 2 * limits.MAX_PAYLOAD_BYTES  # of all payloads that have come, or begun to, and are in use
    max_calls: int = limits.MAX_CALLS_PER_CONNECTION  # open at once on one connection, each way
    max_answer_bytes: int = 67_108_864  # of answers made or being made that the peer has not read yet; see answer_share
    max_connections: int = 512
    max_silent: int = 64  # of these connections, those whose peer has not said HELLO
    patience_s: float = 0.25  # how long a request may wait for payload bytes before it is refused Busy
    dial_s: float = 10.0
    hello_s: float = limits.HANDSHAKE_TIMEOUT_S
    silence_s: float = limits.PING_AFTER_SILENCE_S  # of a peer that owes an answer, before it is pinged
    answer_s: float = limits.PING_ANSWER_S  # for the peer to answer that ping


@dataclass(slots=True)
class IncomingCall:
    """One request of a peer that the gate has admitted, and which its sender may make. `deadline` is loop time.

    `progress` sends the caller how far the work is; it never waits, and does nothing once the caller is gone.
    """

    peer: PeerId
    message: Message
    tensors: list[WireTensor]
    deadline: float
    progress: OnProgress = lambda _: None
    prefix: str = ""  # the network of the caller's address
    is_caller_gone: bool = False


Handler = Callable[[IncomingCall], Awaitable[Reply]]
"""Answers a peer. An AgoraError that it raises becomes a typed refusal; it is cancelled when the caller gives up."""


class PayloadBudget:
    """Counts the payload bytes that all connections have reserved; serves waiting connections on a release."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.waiting: dict[PayloadShare, int] = {}  # with the bytes that they wait for; served first come first
        self._is_releasing = False

    def has_room_for(self, size: int) -> bool:
        """Whether `size` more bytes stay within the limit."""
        return self.used + size <= self.limit

    @property
    def is_pressed(self) -> bool:
        """Whether more than half of the bytes are reserved, or somebody waits for some."""
        return bool(self.waiting) or 2 * self.used > self.limit

    def reserve(self, size: int) -> None:
        """Reserves bytes, even beyond the limit."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def release(self, size: int) -> None:
        """Gives bytes back, then serves the waiting connections in order, until the next one's do not fit.

        A call from within such a serving only gives the bytes back.
        """
        self.used -= size
        if self._is_releasing:  # one that is served may release others at once: the outer call goes on with the queue
            return
        self._is_releasing = True
        try:
            while self.waiting:
                first, size = next(iter(self.waiting.items()))
                if not self.has_room_for(size):
                    break
                first.end_wait(is_served=True)
        finally:
            self._is_releasing = False


class PayloadShare:
    """Reserves and releases one connection's bytes of the budget (`held`), and waits for more.

    | payload of | reserved |
    |---|---|
    | an answer | always: this peer asked for it, and its caller may hold bytes that others wait for |
    | a request | if it fits into the budget or GUARANTEED_BYTES; otherwise it waits, at most `patience_s` |
    | a request, after one waited in vain | only if it fits at once, until one has |

    Waits are short because nothing is read meanwhile, not even answers that would free the bytes.
    """

    def __init__(self, budget: PayloadBudget, patience_s: float, on_wait_over: Callable[[bool], None]) -> None:
        """on_wait_over: called when a wait ends, with True when the bytes are reserved now, False when time ran out."""
        self._budget = budget
        self._patience_s = patience_s
        self._on_wait_over = on_wait_over
        self._patience: asyncio.TimerHandle | None = None
        self._arriving = 0  # reserved for the frame whose payload is arriving
        self._waited_in_vain = False
        self.held = 0

    def reserve_for_request(self, size: int) -> Intake:
        """Returns TAKE when bytes are reserved, WAIT when `on_wait_over` will say so, DROP to refuse the request."""
        if not size:
            return Intake.TAKE
        if self._budget.has_room_for(size):
            self._waited_in_vain = False
        elif self.held + size > GUARANTEED_BYTES:
            if self._waited_in_vain:
                return Intake.DROP
            self._budget.waiting[self] = size
            self._patience = asyncio.get_running_loop().call_later(self._patience_s, self.end_wait, False)
            return Intake.WAIT
        self.reserve(size)
        return Intake.TAKE

    def reserve(self, size: int) -> None:
        """Reserves the payload of the frame that arrives next, without asking whether it fits."""
        self._budget.reserve(size)
        self.held += size
        self._arriving = size

    def take_arrived(self) -> int:
        """Returns the bytes reserved for the payload that has arrived; the caller must `release` them later."""
        arrived, self._arriving = self._arriving, 0
        return arrived

    def release(self, size: int) -> None:
        """Gives bytes back to the budget, which may end other connections' waits."""
        if size:
            self.held -= size
            self._budget.release(size)

    def end_wait(self, is_served: bool) -> None:
        """Ends a wait: reserves the wanted bytes if `is_served`, and calls `on_wait_over(is_served)`."""
        wanted = self._stop_waiting()
        if is_served:
            self.reserve(wanted)
        self._waited_in_vain = not is_served
        self._on_wait_over(is_served)

    def close(self) -> None:
        """Called when the connection is gone: drops its wait, and releases what an unfinished payload had reserved."""
        self._stop_waiting()
        self.release(self.take_arrived())

    def _stop_waiting(self) -> int:
        """Takes this share out of the budget's queue. Returns the bytes that it waited for, 0 when it did not wait."""
        if self._patience is not None:
            self._patience.cancel()
        return self._budget.waiting.pop(self, 0)


class CallServices(Protocol):
    """Protocol: what IncomingCalls needs of the Network; `Network.__init__` says what the functions do."""

    limits: NetLimits
    budget: PayloadBudget
    answers: AnswerShare
    handle: Handler
    report_failure: Callable[[PeerId, Exception], None]
    count_sent: Callable[[Message, Sequence[WireTensor]], None]
    tell_time: Callable[[], float]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task, which is cancelled when the network closes."""


class IncomingCalls:
    """Admits or refuses the requests that a peer makes on one connection, has each handled in a task, and answers."""

    def __init__(
        self, network: CallServices, stream: FrameStream, peer: PeerId, on_answered: Callable[[], None]
    ) -> None:
        """on_answered: called whenever a request has been answered."""
        self.share = PayloadShare(network.budget, network.limits.patience_s, self._on_wait_over)
        self._network = network
        self._stream = stream
        self._peer = peer
        self._on_answered = on_answered
        self._open: dict[int, tuple[IncomingCall, asyncio.Task[None]]] = {}
        self._waiting_call = 0  # whose payload waits for memory
        self._reserved: dict[int, int] = {}  # bytes of answers that are not written yet, by call

    def __len__(self) -> int:
        """How many of the peer's requests are not answered yet."""
        return len(self._open)

    def on_request_header(self, prefix: Prefix, request: Message | None, refusal: AgoraError | None) -> Intake:
        """Decides on a REQUEST by its header: its payload is read (TAKE), waits for memory, or is refused and dropped.

        refusal: why any request but a Ping is refused. None: a request is refused only as Busy, beyond `max_calls` or
        for lack of memory.
        Raises ProtocolError for an open number, or more than MAX_CALLS_PER_CONNECTION.
        """
        number, open_limit = prefix.call, limits.MAX_CALLS_PER_CONNECTION
        if number in self._open:
            raise ProtocolError("out-of-order", f"Call {number} is open already.")
        if isinstance(request, Ping):
            return Intake.TAKE
        if refusal is not None:
            return self.refuse(number, refusal)
        if len(self._open) >= open_limit:
            raise ProtocolError("too-many-calls", f"More than {open_limit} calls on one connection.")
        if len(self._open) >= self._network.limits.max_calls:
            return self._refuse_busy(number, f"{len(self._open)} calls of this peer are in hand")
        try:
            reserved = self._network.answers.reserve(self._holder, request, loop_time())
        except Busy as error:
            return self.refuse(number, error)
        if reserved:
            self._reserved[number] = reserved
        self._waiting_call = number
        intake = self.share.reserve_for_request(prefix.payload_bytes)
        return self._refuse_busy(number, NO_MEMORY) if intake is Intake.DROP else intake

    @property
    def _holder(self) -> Holder:
        """Who asks on this connection."""
        return Holder(self._stream.prefix, self._peer)

    def _release_answer(self, number: int) -> None:
        """Gives back what was reserved for the answer to a call, if anything is."""
        self._network.answers.release(self._holder, self._reserved.pop(number, 0))

    def _on_wait_over(self, is_reserved: bool) -> None:
        """Called when a request's wait for memory ends: reads its payload, or drops that and refuses it as Busy."""
        self._stream.proceed(Intake.TAKE if is_reserved else self._refuse_busy(self._waiting_call, NO_MEMORY))

    def _refuse_busy(self, number: int, why: str) -> Intake:
        """Refuses a request as Busy, to be tried again after `patience_s`. Returns DROP."""
        return self.refuse(number, Busy(why, retry_after_ms=int(self._network.limits.patience_s * 1000)))

    def refuse(self, number: int, error: AgoraError) -> Intake:
        """Sends the peer a REFUSAL of its request with `error`, releases the bytes of its answer, and returns DROP."""
        self._release_answer(number)
        self._stream.enqueue(encode_frame(FrameType.REFUSAL, number, refusal_to_wire(error)), number)
        return Intake.DROP

    def on_request(self, frame: Frame, request: Request) -> None:
        """Answers a Ping at once, and any other complete request in a task; takes over the bytes of its payload."""
        held_bytes = self.share.take_arrived()
        if isinstance(request, Ping):
            self._stream.enqueue(encode_frame(FrameType.ANSWER, frame.call, Pong(self._network.tell_time())))
            return
        tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
        deadline, progress = loop_time() + request.deadline_ms / 1000, partial(self._send_progress, frame.call)
        call = IncomingCall(self._peer, request, tensors, deadline, progress, self._stream.prefix)
        task = self._network.spawn(self._serve(frame.call, call))
        self._open[frame.call] = call, task
        task.add_done_callback(partial(self._on_served, frame.call, held_bytes))

    def on_cancel(self, number: int) -> None:
        """Cancels the work for a call that the peer has given up, and takes back an answer that waits to be sent."""
        if number in self._open:
            call, task = self._open.pop(number)
            call.is_caller_gone = True
            task.cancel()
        self._stream.withdraw(number)

    def on_lost(self) -> None:
        """Called when the connection is lost: releases memory; work goes on, as its result may be asked for again."""
        for call, _ in self._open.values():
            call.is_caller_gone = True
        for number in list(self._reserved):
            self._release_answer(number)
        self.share.close()

    def _send_progress(self, number: int, advance: Advance) -> None:
        """Sends a PROGRESS frame, unless the call is answered, its caller gone, or too much waits to be sent."""
        if number in self._open and not self._open[number][0].is_caller_gone:
            self._stream.enqueue_droppable(encode_frame(FrameType.PROGRESS, number, advance), number)

    async def _serve(self, number: int, call: IncomingCall) -> None:
        """Has one request handled, then sends the answer unless the caller is gone or room comes after the deadline."""
        is_sent = False
        try:
            buffers = await self._answer(number, call)
            with contextlib.suppress(TimeoutError, ConnectionBroken):  # nobody waits for this answer any more
                async with asyncio.timeout_at(call.deadline):  # ends a wait for room, but no send that need not wait
                    if not call.is_caller_gone:
                        await self._stream.send(buffers, number, partial(self._release_answer, number))
                        is_sent = True
        finally:
            if not is_sent:
                self._release_answer(number)

    def _on_served(self, number: int, held_bytes: int, task: asyncio.Task[None]) -> None:
        """Called when a request's task ended: forgets the call, releases its payload's bytes, calls `on_answered`."""
        if number in self._open and self._open[number][1] is task:
            del self._open[number]
        if task.cancelled():  # perhaps before it began
            self._release_answer(number)
        self.share.release(held_bytes)
        self._on_answered()

    async def _answer(self, number: int, call: IncomingCall) -> Buffers:
        """Runs the handler until the call's deadline, and returns the ANSWER frame, or a REFUSAL with its AgoraError.

        PeerFailed stands for a passed deadline, and for other exceptions and invalid answers, which are also reported.
        """
        refusal: AgoraError
        try:
            async with asyncio.timeout_at(call.deadline):
                reply = await self._network.handle(call)
        except TimeoutError:
            refusal = PeerFailed("the deadline of the call passed")
        except AgoraError as error:
            refusal = error
        except Exception as error:
            self._network.report_failure(self._peer, error)
            refusal = PeerFailed("an error inside the peer's daemon; its log has it")
        else:
            try:
                buffers = encode_frame(FrameType.ANSWER, number, reply.message, reply.tensors)
                self._network.count_sent(call.message, reply.tensors)
                return buffers
            except ProtocolError as error:
                self._network.report_failure(self._peer, error)
                refusal = PeerFailed("the peer's answer would have broken the protocol")
        return encode_frame(FrameType.REFUSAL, number, refusal_to_wire(refusal))
