"""The calls that a peer has open on one connection: whether their requests are read, and how they are answered.

Knows: call numbers, the memory for payloads, and the handler. Must not know: what a request means beyond its type, or
how streams are opened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from agora_protocol.errors import AgoraError, Busy, PeerFailed, ProtocolError
from agora_protocol.frames import FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_CALLS_PER_CONNECTION
from agora_protocol.messages import Advance, Message, Ping, Pong, Request, refusal_to_wire
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.clock import loop_time
from agora.net.net_limits import NetLimits
from agora.net.network_errors import ConnectionBroken
from agora.net.payload_budget import PayloadBudget, PayloadShare
from agora.net.send_queue import Buffers
from agora.net.streams import Frame, FrameStream, Intake


@dataclass(slots=True)
class IncomingCall:
    """One request of a peer. `deadline` is loop time; `run` the 32 bytes of the peer's run, None for an observer.

    `progress` sends the caller how far the work is; it never waits, and does nothing once the caller is gone.
    """

    peer: PeerId
    run: bytes | None
    message: Message
    tensors: list[WireTensor]
    deadline: float
    progress: OnProgress = lambda _: None
    caller_gone: bool = False


Handler = Callable[[IncomingCall], Awaitable[Reply]]
"""Answers a peer. An AgoraError that it raises becomes a typed refusal; it is cancelled when the caller gives up."""


class CallServices(Protocol):
    """What IncomingCalls needs of the Network; `Network.__init__` says what the functions do."""

    limits: NetLimits
    budget: PayloadBudget
    handle: Handler
    report_failure: Callable[[PeerId, Exception], None]
    count_sent: Callable[[Message, Sequence[WireTensor]], None]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task, which is cancelled when the network closes."""


class IncomingCalls:
    """Admits or refuses the requests that a peer makes on one connection, has each handled in a task, and answers.

    Work is cancelled when its caller cancels the call, but goes on when the connection is lost.
    """

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

    def __len__(self) -> int:
        """How many of the peer's requests are not answered yet."""
        return len(self._open)

    def on_request_header(self, prefix: Prefix, request: Message | None, refusal: AgoraError | None) -> Intake:
        """Judges a REQUEST's header: its payload is read (TAKE), waits for memory, or is dropped as it is refused.

        refusal: with which any request but a Ping is refused; None: it is only refused as Busy, beyond `max_calls` or
        for lack of memory. Raises ProtocolError for an open number, or more than MAX_CALLS_PER_CONNECTION.
        """
        number, limits = prefix.call, self._network.limits
        if number in self._open:
            raise ProtocolError("out-of-order", f"Call {number} is open already.")
        if isinstance(request, Ping):
            return Intake.TAKE
        if refusal is not None:
            return self.refuse(number, refusal)
        if len(self._open) >= MAX_CALLS_PER_CONNECTION:
            raise ProtocolError("too-many-calls", f"More than {MAX_CALLS_PER_CONNECTION} calls on one connection.")
        if len(self._open) >= limits.max_calls:
            return self._refuse_busy(number, f"{len(self._open)} calls of this peer are in hand")
        self._waiting_call = number
        intake = self.share.reserve_for_request(prefix.payload_bytes)
        return self._refuse_for_lack_of_memory() if intake is Intake.DROP else intake

    def _on_wait_over(self, is_reserved: bool) -> None:
        """Called when a request's wait for memory ends: reads its payload, or drops that and refuses it as Busy."""
        self._stream.proceed(Intake.TAKE if is_reserved else self._refuse_for_lack_of_memory())

    def _refuse_for_lack_of_memory(self) -> Intake:
        """Refuses the request whose payload waits for memory as Busy. Returns DROP."""
        return self._refuse_busy(self._waiting_call, "no memory free for the payload")

    def _refuse_busy(self, number: int, why: str) -> Intake:
        """Refuses a request as Busy, to be tried again after `patience_s`. Returns DROP."""
        return self.refuse(number, Busy(why, retry_after_ms=int(self._network.limits.patience_s * 1000)))

    def refuse(self, number: int, error: AgoraError) -> Intake:
        """Sends the peer a REFUSAL of its request with `error`. Returns DROP: its payload is thrown away."""
        self._stream.send_small(encode_frame(FrameType.REFUSAL, number, refusal_to_wire(error)), number)
        return Intake.DROP

    def on_request(self, frame: Frame, request: Request, run: bytes | None) -> None:
        """Answers a Ping at once, and any other complete request in a task. run: the peer's, None for an observer."""
        held_bytes = self.share.take_arrived()
        if isinstance(request, Ping):
            self._stream.send_small(encode_frame(FrameType.ANSWER, frame.call, Pong()))
            return
        tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
        call = IncomingCall(self._peer, run, request, tensors, loop_time() + request.deadline_ms / 1000)
        call.progress = partial(self._send_progress, frame.call)
        task = self._network.spawn(self._serve(frame.call, call))
        self._open[frame.call] = call, task
        task.add_done_callback(partial(self._on_served, frame.call, held_bytes))

    def on_cancel(self, number: int) -> None:
        """Cancels the work for a call that the peer has given up, and takes back an answer that waits to be sent."""
        if number in self._open:
            call, task = self._open.pop(number)
            call.caller_gone = True
            task.cancel()
        self._stream.withdraw(number)

    def on_lost(self) -> None:
        """Called when the connection is lost: marks all callers as gone, so that no answer is sent.

        The work goes on: its result may be asked for again on another connection.
        """
        for call, _ in self._open.values():
            call.caller_gone = True

    def _send_progress(self, number: int, advance: Advance) -> None:
        """Sends a PROGRESS frame, unless the call is answered, its caller gone, or too much waits to be sent."""
        if number in self._open and not self._open[number][0].caller_gone:
            self._stream.send_news(encode_frame(FrameType.PROGRESS, number, advance), number)

    async def _serve(self, number: int, call: IncomingCall) -> None:
        """Has one request handled, then sends the answer unless the caller is gone or room comes after the deadline."""
        buffers = await self._answer(number, call)
        with contextlib.suppress(TimeoutError, ConnectionBroken):  # nobody waits for this answer any more
            async with asyncio.timeout_at(None if self._stream.has_room else call.deadline):
                if not call.caller_gone:
                    await self._stream.send(buffers, number)

    def _on_served(self, number: int, held_bytes: int, task: asyncio.Task[None]) -> None:
        """Called when a request's task ended: forgets the call, releases its payload's bytes, calls `on_answered`."""
        if number in self._open and self._open[number][1] is task:
            del self._open[number]
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
            except ProtocolError as error:
                self._network.report_failure(self._peer, error)
                refusal = PeerFailed("the peer's answer would have broken the protocol")
            else:
                self._network.count_sent(call.message, reply.tensors)
                return buffers
        return encode_frame(FrameType.REFUSAL, number, refusal_to_wire(refusal))
