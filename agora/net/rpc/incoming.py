"""The calls that a peer has open on one connection: whether their requests are read, and how they are answered."""

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
from agora_protocol.messages import CallProgress, Message, Ping, Pong, Request
from agora_protocol.refusals import refusal_to_wire
from agora_protocol.tensors import WireTensor

from agora.core.calls import OnProgress, Reply
from agora.core.clock import loop_time
from agora.core.fair_share import Client
from agora.net.p2pd.streams import Frame, FrameStream, PayloadAction
from agora.net.rpc.answer_budget import AnswerBudget
from agora.net.rpc.network_errors import ConnectionBroken
from agora.net.rpc.send_queue import Buffers

NO_MEMORY: Final = "no memory free for the payload"  # the reason of a Busy
GUARANTEED_BYTES: Final = 65_536  # payload bytes that every connection may always hold, however full the budget is


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Limits of the memory, calls and connections that other peers may use here, and timeouts in seconds."""

    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES  # of one frame, as the run's manifest implies
    max_held_bytes: int = 2 * limits.MAX_PAYLOAD_BYTES  # of all payloads that have come, or begun to, and are in use
    max_calls: int = limits.MAX_CALLS_PER_CONNECTION  # open at the same time on one connection, each way
    max_answer_bytes: int = 67_108_864  # of answers that are not written yet; see answer_budget
    max_connections: int = 512
    max_silent: int = 64  # how many connections readers and peers without a HELLO may have opened
    payload_wait_s: float = 0.25  # how long a request may wait for payload bytes before it is refused Busy
    dial_s: float = 10.0
    hello_s: float = limits.HANDSHAKE_TIMEOUT_S
    ping_after_s: float = limits.PING_AFTER_SILENCE_S  # a peer that owes an answer is pinged then
    pong_within_s: float = limits.PING_ANSWER_S  # how long the peer may take to answer that ping


@dataclass(slots=True)
class IncomingCall:
    """One request of a peer that the gate has admitted, and which its sender may make.

    `progress` never waits, and does nothing once the caller is gone or when too much waits to be sent.
    """

    peer: PeerId
    message: Message
    tensors: list[WireTensor]
    deadline: float  # in loop time
    progress: OnProgress = lambda _: None  # sends the caller how far the work is
    prefix: str = ""  # the network of the caller's address
    is_caller_gone: bool = False  # the caller has cancelled the call, or its connection broke: it gets no answer


# Answers a peer. An AgoraError that it raises becomes a typed refusal, any other error PeerFailed.
#
# It is cancelled when the caller gives up or the deadline passes, but not when the connection breaks.
Handler = Callable[[IncomingCall], Awaitable[Reply]]


class PayloadBudget:
    """Counts the payload bytes that all connections have reserved (`used`), and queues connections for more.

    limit: in bytes. peak: the most that `used` has been. waiting: the bytes that each waiting connection wants.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.waiting: dict[PayloadReservations, int] = {}  # with the bytes that they wait for; served first come first
        self._is_releasing = False

    def has_room_for(self, size: int) -> bool:
        """Returns whether `size` more bytes stay within the limit."""
        return self.used + size <= self.limit

    @property
    def is_pressed(self) -> bool:
        return bool(self.waiting) or 2 * self.used > self.limit

    def reserve(self, size: int) -> None:
        """Reserves bytes, even beyond the limit."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def release(self, size: int) -> None:
        """Releases `size` bytes, then serves waiting connections in their order until the first whose bytes do not fit.

        Serving a connection ends its wait and reserves its bytes. A nested call, from within the end of a wait, only
        releases the bytes; the outer call goes on with the queue.
        """
        self.used -= size
        if self._is_releasing:  # one that is served may release bytes too: the outer call goes on with the queue
            return
        self._is_releasing = True
        try:
            while self.waiting:
                first, wanted = next(iter(self.waiting.items()))
                if not self.has_room_for(wanted):
                    break
                first.end_wait(is_served=True)
        finally:
            self._is_releasing = False


class PayloadReservations:
    """The payload bytes that one connection has reserved from the budget (`held` of them now), or waits for.

    | payload of | reserved |
    |---|---|
    | an answer | always: this peer asked for it, and its caller may hold bytes that others wait for |
    | a request | if it fits into the budget or GUARANTEED_BYTES; otherwise it waits, at most `payload_wait_s` |
    | a request, after one waited in vain | only if it fits immediately, until one has |

    Waits are short because nothing is read meanwhile, not even answers that would free the bytes.
    """

    def __init__(self, budget: PayloadBudget, payload_wait_s: float, on_wait_over: Callable[[bool], None]) -> None:
        """on_wait_over: called when a wait ends, with True when the bytes are reserved now, False when time ran out."""
        self._budget = budget
        self._payload_wait_s = payload_wait_s
        self._on_wait_over = on_wait_over
        self._wait_timer: asyncio.TimerHandle | None = None
        self._arriving = 0  # reserved for the frame whose payload is arriving
        self._waited_in_vain = False
        self.held = 0

    def reserve_for_request(self, size: int) -> PayloadAction:
        """Reserves `size` bytes for a request's payload, if they fit by the class's table; 0 bytes always do.

        Returns TAKE when they are reserved, WAIT when `on_wait_over` will be called, DROP to refuse the request.
        """
        if not size:
            return PayloadAction.TAKE
        if self._budget.has_room_for(size):
            self._waited_in_vain = False
        elif self.held + size > GUARANTEED_BYTES:
            if self._waited_in_vain:
                return PayloadAction.DROP
            self._budget.waiting[self] = size
            self._wait_timer = asyncio.get_running_loop().call_later(self._payload_wait_s, self.end_wait, False)
            return PayloadAction.WAIT
        self.reserve(size)
        return PayloadAction.TAKE

    def reserve(self, size: int) -> None:
        """Reserves `size` bytes for the payload that arrives next, even beyond the limit."""
        self._budget.reserve(size)
        self.held += size
        self._arriving = size

    def take_arrived(self) -> int:
        """Returns the bytes reserved for the payload that has arrived, which the caller must `release`; then 0."""
        arrived, self._arriving = self._arriving, 0
        return arrived

    def release(self, size: int) -> None:
        """Returns bytes to the budget, which may end the waits of connections; 0 does nothing."""
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
        """Called when the connection is gone: ends its wait silently, releases the bytes of an unfinished payload."""
        self._stop_waiting()
        self.release(self.take_arrived())

    def _stop_waiting(self) -> int:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        return self._budget.waiting.pop(self, 0)


class CallServices(Protocol):
    """Protocol: what IncomingCalls needs of the Network."""

    limits: NetLimits
    budget: PayloadBudget
    answers: AnswerBudget
    handle: Handler
    report_failure: Callable[[PeerId, Exception], None]  # called with what `handle` raised that is not an AgoraError
    count_sent: Callable[[Message, Sequence[WireTensor]], None]  # called with an answered request, its answer's tensors
    tell_time: Callable[[], float]  # returns the swarm's unix time, which goes into every Pong; 0 if it is not known

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task, which is cancelled when the network closes, and returns the task."""


class IncomingCalls:
    """One connection's calls of the peer: admits or refuses each request, has it handled in a task, and answers."""

    def __init__(
        self, network: CallServices, stream: FrameStream, peer: PeerId, on_answered: Callable[[], None]
    ) -> None:
        """on_answered: called whenever the task of a request has ended, answered or cancelled."""
        self.payloads = PayloadReservations(network.budget, network.limits.payload_wait_s, self._on_wait_over)
        self._network = network
        self._stream = stream
        self._peer = peer
        self._on_answered = on_answered
        self._open: dict[int, tuple[IncomingCall, asyncio.Task[None]]] = {}
        self._waiting_call = 0  # whose payload waits for memory
        self._reserved: dict[int, int] = {}  # bytes of answers that are not written yet, by call

    def __len__(self) -> int:
        return len(self._open)

    def on_request_header(self, prefix: Prefix, request: Message | None, refusal: AgoraError | None) -> PayloadAction:
        """Decides on a REQUEST by its header: its payload is read (TAKE), waits for memory, or is refused and dropped.

        Also reserves the bytes of its answer. A Ping is always read. refusal: why any other request is refused. If
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
        if len(self._open) >= self._network.limits.max_calls:
            return self._refuse_busy(number, f"{len(self._open)} calls of this peer are open")
        try:
            reserved = self._network.answers.reserve(self._consumer, request, loop_time())
        except Busy as error:
            return self.refuse(number, error)
        if reserved:
            self._reserved[number] = reserved
        self._waiting_call = number
        action = self.payloads.reserve_for_request(prefix.payload_bytes)
        return self._refuse_busy(number, NO_MEMORY) if action is PayloadAction.DROP else action

    @property
    def _consumer(self) -> Client:
        return Client(self._stream.address_prefix, self._peer)

    def _release_answer(self, number: int) -> None:
        self._network.answers.release(self._consumer, self._reserved.pop(number, 0))

    def _on_wait_over(self, is_reserved: bool) -> None:
        self._stream.resume_payload(
            PayloadAction.TAKE if is_reserved else self._refuse_busy(self._waiting_call, NO_MEMORY)
        )

    def _refuse_busy(self, number: int, why: str) -> PayloadAction:
        return self.refuse(number, Busy(why, retry_after_ms=int(self._network.limits.payload_wait_s * 1000)))

    def refuse(self, number: int, error: AgoraError) -> PayloadAction:
        """Sends the peer a REFUSAL of its request with `error`, releases the bytes of its answer, and returns DROP."""
        self._release_answer(number)
        self._stream.enqueue(encode_frame(FrameType.REFUSAL, number, refusal_to_wire(error)), number)
        return PayloadAction.DROP

    def on_request(self, frame: Frame, request: Request) -> None:
        """Answers a Ping immediately; serves any other request in a task, until whose end its payload stays reserved.

        Called when the whole request has arrived.
        """
        held_bytes = self.payloads.take_arrived()
        if isinstance(request, Ping):
            self._stream.enqueue(encode_frame(FrameType.ANSWER, frame.call, Pong(self._network.tell_time())))
            return
        tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
        deadline = loop_time() + request.deadline_ms / 1000
        progress = partial(self._send_progress, frame.call)
        call = IncomingCall(self._peer, request, tensors, deadline, progress, self._stream.address_prefix)
        task = self._network.spawn(self._serve(frame.call, call))
        self._open[frame.call] = call, task
        task.add_done_callback(partial(self._on_served, frame.call, held_bytes))

    def on_cancel(self, number: int) -> None:
        """Cancels the work for a call that the peer has given up, and removes its answer if that waits to be sent."""
        if number in self._open:
            call, task = self._open.pop(number)
            call.is_caller_gone = True
            task.cancel()
        self._stream.withdraw(number)

    def on_lost(self) -> None:
        """Called when the connection is lost: releases the bytes of all answers and of an unfinished payload.

        The work goes on, as its result may be asked for again. Each request's payload stays reserved until its work
        ends.
        """
        for call, _ in self._open.values():
            call.is_caller_gone = True
        for number in list(self._reserved):
            self._release_answer(number)
        self.payloads.close()

    def _send_progress(self, number: int, call_progress: CallProgress) -> None:
        if number in self._open and not self._open[number][0].is_caller_gone:
            self._stream.enqueue_droppable(encode_frame(FrameType.PROGRESS, number, call_progress), number)

    async def _serve(self, number: int, call: IncomingCall) -> None:
        is_sent = False
        try:
            buffers = await self._answer(number, call)
            with contextlib.suppress(TimeoutError, ConnectionBroken):  # no caller waits for this answer any more
                async with asyncio.timeout_at(call.deadline):  # ends a wait for room, but no send that need not wait
                    if not call.is_caller_gone:
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
                reply = await self._network.handle(call)
        except AgoraError as error:
            refusal = error
        except asyncio.CancelledError:
            this_call = asyncio.current_task()
            if this_call is None or this_call.cancelling():
                raise
            # What the handler waited for was given up, such as the mean of a closed stage; the caller needs an error.
            refusal = PeerFailed("the peer has given this work up")
        except Exception as error:
            if timeout.expired():
                refusal = PeerFailed("the deadline of the call passed")
            else:
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
