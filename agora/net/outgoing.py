"""The calls that this peer has open on one connection: their numbers, their answers, their progress.

Knows: call numbers, and which answers may come. Must not know: what a request means, or how streams are opened. The
side that opened the stream gives its calls odd numbers, the other side even ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import AgoraError, ProtocolError
from agora_protocol.frames import FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.limits import MAX_CALLS_PER_CONNECTION
from agora_protocol.messages import ANSWER_OF, Advance, GetManifest, GetStatus, Message
from agora_protocol.tensors import WireTensor

from agora.calls import OnProgress, Reply
from agora.net.payload_budget import PayloadShare
from agora.net.streams import Frame, FrameStream, Intake

LAST_CALL: Final = 2**32 - 1
LONG_ANSWERS: Final = (GetStatus, GetManifest)
"""Requests whose answers may have a header longer than MAX_HEADER_BYTES."""


@dataclass(slots=True)
class _OpenCall:
    """A call that has no answer yet."""

    reply: asyncio.Future[Reply]
    request: type[Message]
    on_progress: OnProgress | None

    def settle(self, result: Reply | AgoraError) -> None:
        """Ends the call with its reply, or with the error that it raises; does nothing when it has ended."""
        if self.reply.done():
            return
        if isinstance(result, AgoraError):
            self.reply.set_exception(result)
        else:
            self.reply.set_result(result)


class OutgoingCalls:
    """This side's calls on one connection. `awaited`: calls, pings aside, that the peer has not answered."""

    def __init__(
        self, stream: FrameStream, share: PayloadShare, max_calls: int, *, opened: bool, on_idle: Callable[[], None]
    ) -> None:
        """opened: this side opened the stream. on_idle: called whenever a call has ended."""
        self._stream = stream
        self._share = share
        self._on_idle = on_idle
        self._parity = 1 if opened else 0
        self._next = 1 if opened else 2
        self._open: dict[int, _OpenCall] = {}
        self._slots = asyncio.Semaphore(min(max_calls, MAX_CALLS_PER_CONNECTION))
        self._failure: AgoraError | None = None
        self.awaited = 0

    @property
    def has_numbers(self) -> bool:
        """Whether a number is left for another call."""
        return self._next <= LAST_CALL - 2

    def is_own(self, number: int) -> bool:
        """Whether a call of this number is this side's to make."""
        return number % 2 == self._parity

    async def call(self, request: Message, tensors: Sequence[WireTensor], on_progress: OnProgress | None) -> Reply:
        """Sends a request when fewer than `max_calls` are open, and returns the reply.

        The tensors must not change until this returns. Raises what the peer refused with, or ConnectionBroken.
        Cancelling it tells the peer to stop.
        """
        async with self._slots:
            self.awaited += 1
            try:
                return await self.ask(request, tensors, on_progress)
            finally:
                self.awaited -= 1
                self._on_idle()

    async def ask(
        self, request: Message, tensors: Sequence[WireTensor] = (), on_progress: OnProgress | None = None
    ) -> Reply:
        """Sends a request at once; see `call`."""
        if self._failure is not None:
            raise self._failure
        number, self._next = self._next, self._next + 2
        call = _OpenCall(asyncio.get_running_loop().create_future(), type(request), on_progress)
        buffers = encode_frame(FrameType.REQUEST, number, request, tensors)
        self._open[number] = call
        is_sent = False
        try:
            await self._stream.send(buffers, number)
            is_sent = True
            return await call.reply
        except asyncio.CancelledError:
            is_answered = call.reply.done() and not call.reply.cancelled()
            if is_sent and not is_answered and not self._stream.withdraw(number):
                self._stream.send_small(encode_frame(FrameType.CANCEL, number, None))
            raise
        finally:
            del self._open[number]
            if call.reply.done() and not call.reply.cancelled():
                call.reply.exception()  # its caller may have left without asking for it

    def may_have_long_answer(self, number: int) -> bool:
        """Whether the open call of this number asked for what may be longer than MAX_HEADER_BYTES."""
        call = self._open.get(number)
        return call is not None and call.request in LONG_ANSWERS

    def on_answer_header(self, prefix: Prefix, message: Message | None) -> Intake:
        """Judges the header of an ANSWER, and reserves its payload. Raises ProtocolError."""
        call = self._open.get(prefix.call)
        if call is None:
            self._check_past(prefix.call, "An ANSWER")
            return Intake.DROP
        if not isinstance(message, ANSWER_OF[call.request]):
            raise ProtocolError("bad-message", f"{type(message).__name__} is no answer to {call.request.__name__}.")
        self._share.reserve(prefix.payload_bytes)
        return Intake.TAKE

    def on_answer(self, frame: Frame, message: Message) -> None:
        """Ends a call with the answer that has arrived."""
        self._share.release(self._share.take_arrived())  # others may go on at once, and end this connection
        tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
        self._settle(frame.call, Reply(message, tensors), "An ANSWER")

    def on_refusal(self, number: int, error: AgoraError) -> None:
        """Ends a call with the peer's refusal."""
        self._settle(number, error, "A REFUSAL")

    def on_progress(self, number: int, advance: Advance) -> None:
        """Hands a progress frame to the caller, outside the read callback."""
        call = self._open.get(number)
        if call is None:
            self._check_past(number, "A PROGRESS")
        elif call.on_progress is not None:
            asyncio.get_running_loop().call_soon(call.on_progress, advance)

    def fail(self, error: AgoraError) -> None:
        """Ends all open calls with `error`, and every later one at once."""
        self._failure = error
        for call in list(self._open.values()):
            call.settle(error)

    def _settle(self, number: int, result: Reply | AgoraError, what: str) -> None:
        """Ends an open call. Raises ProtocolError when there never was one of this number."""
        call = self._open.get(number)
        if call is None:
            self._check_past(number, what)
        else:
            call.settle(result)

    def _check_past(self, number: int, what: str) -> None:
        """Raises ProtocolError when this side never made a call of this number. One that it gave up may be answered."""
        if not self.is_own(number) or number >= self._next:
            raise ProtocolError("out-of-order", f"{what} to call {number}, which was never made.")
