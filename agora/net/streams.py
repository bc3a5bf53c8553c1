"""Frames on one byte stream: reads into preallocated buffers, writes views without copying, small frames before bulk.

Knows the frame layout, asyncio transports and how much is queued. Must not know calls, runs or what peers may do: a
`FrameSink` decides that, frame by frame, before a payload costs any memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Protocol

import numpy as np
from agora_protocol.errors import ProtocolError
from agora_protocol.frames import FrameLimits, FrameType, Prefix, TensorSpec, decode_header
from agora_protocol.limits import MAX_HEADER_BYTES, PREFIX_BYTES
from agora_protocol.messages import Message

from agora.net.errors import ConnectionBroken

SCRATCH_BYTES: Final = 2 * MAX_HEADER_BYTES  # any header but a long answer's fits, whatever lies before it
HEAD_BYTES: Final = 8192  # what is read before a payload's own buffer exists is copied there, so it is not much
SMALL_BYTES: Final = 16_384  # frames up to here go before bulk; a bulk frame on its way is never interrupted
MAX_SMALL_BYTES: Final = 8_388_608  # small frames waiting beyond this: the peer has stopped reading
NEWS_BYTES: Final = 65_536  # small frames waiting beyond this: news, which nobody needs, is dropped
MAX_QUEUED_BYTES: Final = 67_108_864  # bulk frames waiting beyond this make their senders wait
MAX_PREAMBLE_BYTES: Final = 4096
FLUSH_S: Final = 5.0  # how long a closing stream may take to write its last words


class Intake(Enum):
    """What to do with the payload of the frame whose header was just read."""

    TAKE = "allocate a buffer and read it"
    DROP = "read it and throw it away; the sink has answered already"
    WAIT = "read nothing more until `FrameStream.proceed` says which of the other two"


@dataclass(slots=True)
class Frame:
    """A whole frame. `payload` is a buffer of exactly the payload's bytes that nobody else holds; None without one."""

    type: FrameType
    call: int
    message: Message | None
    specs: tuple[TensorSpec, ...]
    payload: memoryview | None = None


class FrameSink(Protocol):
    """Who a stream reads for. Every method is called inside the event loop's read callback: it must not block."""

    def prefix(self, prefix: Prefix) -> None:
        """16 bytes were read and judged by themselves. May raise ProtocolError: the header is then never read."""

    def begin(self, prefix: Prefix, message: Message | None, specs: tuple[TensorSpec, ...]) -> Intake:
        """A header was read. May raise ProtocolError."""

    def frame(self, frame: Frame) -> None:
        """A frame is complete. May raise ProtocolError."""

    def violated(self, error: ProtocolError, prefix: Prefix | None) -> None:
        """The peer broke the protocol; nothing more is read from it."""

    def lost(self, reason: str) -> None:
        """The stream is gone; called once, also after `close`."""


def new_buffer(size: int) -> memoryview:
    """A writable buffer that is not zeroed first, which would cost a tenth of a core at a gigabyte a second."""
    return memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]  # arrays are buffers from Python 3.12 on


@dataclass(slots=True)
class _Outgoing:
    buffers: Sequence[bytes | memoryview]
    size: int
    call: int


class FrameStream(asyncio.BufferedProtocol):
    """One stream. It first reads one length-delimited preamble (p2pd's word on who is at the other end), then frames.

    Nothing is read between the preamble and `attach`.
    """

    def __init__(self, limits: FrameLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._sink: FrameSink | None = None
        self.preamble: asyncio.Future[bytes] = self._loop.create_future()
        self.last_heard = self._loop.time()
        self.last_sent = self.last_heard
        self.bytes_in = 0
        self.bytes_out = 0
        self._view = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._end = 0  # what is read and not yet understood lies in _view[_start:_end]
        self._prefix: Prefix | None = None
        self._frame: Frame | None = None  # its payload is being read, or waits to be
        self._filled = 0
        self._skip = 0
        self._waiting = False
        self._deaf = False
        self._small: deque[_Outgoing] = deque()
        self._bulk: deque[_Outgoing] = deque()
        self._small_bytes = self._bulk_bytes = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self._paused = False
        self._closing = False
        self.lost = False
        self.ended = asyncio.Event()

    # --- asyncio's side: connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(high=262_144, low=65_536)  # type: ignore[attr-defined]

    def interpose(self, put_between: Callable[[asyncio.Transport, FrameStream], asyncio.Transport]) -> None:
        """Have another transport stand between this stream and its own from now on; only before `attach`."""
        if self._transport is not None and not self.lost:
            self._transport = put_between(self._transport, self)

    def attach(self, sink: FrameSink) -> None:
        """Begin to read frames for `sink`, those that arrived already included."""
        self._sink = sink
        if self.lost:
            self._loop.call_soon(sink.lost, "the stream ended before it began")
        elif self._transport is not None:
            self._transport.resume_reading()
            self._advance()

    def eof_received(self) -> None:
        self.abort()  # a peer that has stopped talking has gone; what is still queued for it has no reader

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self._deaf = True
        self.ended.set()
        self._small.clear()
        self._bulk.clear()
        self._frame = None
        if not self.preamble.done():
            self.preamble.set_exception(ConnectionBroken("the stream ended before it began"))
            self.preamble.exception()  # nobody may be waiting for it any more
        for waiter in self._room:
            if not waiter.done():
                waiter.set_result(None)
        self._room.clear()
        if self._sink is not None:
            self._sink.lost(str(error) if error else "the stream ended")

    def close(self) -> None:
        """Write what is small and queued, and leave it to the peer to end the stream; after FLUSH_S do it ourselves.

        p2pd resets a stream that its user closes, which would take our last words with it. What still arrives is
        thrown away.
        """
        if self._closing or self.lost or self._transport is None:
            return
        self._closing = self._deaf = True
        self._bulk.clear()
        self._loop.call_later(FLUSH_S, self.abort)
        if self._waiting or self._sink is None:
            self._transport.resume_reading()
        self._pump()

    def abort(self) -> None:
        """Close now; what is queued is lost."""
        self._deaf = True
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side: reading

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._deaf:
            return self._view
        if self._frame is not None and self._frame.payload is not None:
            return self._frame.payload[self._filled :]
        if self._skip:
            return self._view[self._end :]
        return self._view[self._end : self._end + HEAD_BYTES]

    def buffer_updated(self, count: int) -> None:
        self.bytes_in += count
        self.last_heard = self._loop.time()
        if self._deaf:
            return
        frame = self._frame
        if frame is None or frame.payload is None:
            self._end += count
            self._advance()
            return
        self._filled += count
        if self._filled == len(frame.payload):
            self._guarded(partial(self._deliver, frame))

    @property
    def reading_held(self) -> bool:
        """Whether we read nothing at the moment because the sink said WAIT."""
        return self._waiting

    @property
    def mid_payload(self) -> bool:
        """Whether a payload has begun to arrive and not ended."""
        return self._frame is not None or self._skip > 0

    def proceed(self, intake: Intake) -> None:
        """End a WAIT."""
        frame, prefix = self._frame, self._prefix
        if not self._waiting or frame is None or prefix is None or self._transport is None or self._deaf:
            return
        self._waiting = False
        self._guarded(partial(self._payload_begins, frame, prefix, intake))
        self._advance()
        if not self._waiting:
            self._transport.resume_reading()

    def _advance(self) -> None:
        """Understand as much as possible of what lies in the scratch buffer."""
        self._guarded(self._understand)
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) > SCRATCH_BYTES:
                self._view = memoryview(bytearray(SCRATCH_BYTES))
        elif self._end == len(self._view):
            self._make_room(len(self._view) - self._end + 1)

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except ProtocolError as error:
            self._deaf = True
            if self._sink is not None:
                self._sink.violated(error, self._prefix)

    def _understand(self) -> None:
        """Take frame after frame out of the scratch buffer, as far as it goes."""
        sink = self._sink
        if sink is None:
            self._read_preamble(self._end - self._start)
            return
        while not self._waiting and not self._deaf:
            available = self._end - self._start
            if self._skip:
                dropped = min(self._skip, available)
                self._start += dropped
                self._skip -= dropped
                available -= dropped
            prefix = self._prefix
            if prefix is None:
                if available < PREFIX_BYTES:
                    return
                self._prefix = prefix = Prefix.parse(self._take_scratch(PREFIX_BYTES), self._limits)
                sink.prefix(prefix)
                available -= PREFIX_BYTES
            if available < prefix.header_bytes:
                self._make_room(prefix.header_bytes - available)
                return
            message, specs = decode_header(prefix, self._take_scratch(prefix.header_bytes))
            self._frame = Frame(prefix.type, prefix.call, message, specs)
            self._payload_begins(self._frame, prefix, sink.begin(prefix, message, specs))
            if self._frame is not None:
                return

    def _read_preamble(self, available: int) -> None:
        size, shift = 0, 0
        for at in range(0 if self.preamble.done() else min(available, 3)):
            byte = self._view[self._start + at]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if size > MAX_PREAMBLE_BYTES:
                    self.abort()
                elif available > at + size:
                    self._start += at + 1
                    if self._transport is not None:
                        self._transport.pause_reading()
                    self.preamble.set_result(bytes(self._take_scratch(size)))
                return

    def _take_scratch(self, size: int) -> memoryview:
        taken = self._view[self._start : self._start + size]
        self._start += size
        return taken

    def _make_room(self, missing: int) -> None:
        """Let `missing` more bytes fit behind what is not understood: move that to the front, or to a larger buffer."""
        used = self._end - self._start
        if self._end + missing <= len(self._view):
            return
        source = self._view[self._start : self._end]
        if used + missing > len(self._view):
            self._view = memoryview(bytearray(used + missing))
        self._view[:used] = source
        self._start, self._end = 0, used

    def _payload_begins(self, frame: Frame, prefix: Prefix, intake: Intake) -> None:
        size = prefix.payload_bytes
        if intake is Intake.WAIT:
            self._waiting = True
            if self._transport is not None:
                self._transport.pause_reading()
        elif intake is Intake.DROP:
            self._frame = self._prefix = None
            self._skip = size
        else:
            if size:
                frame.payload = new_buffer(size)
                self._filled = min(size, self._end - self._start)
                frame.payload[: self._filled] = self._take_scratch(self._filled)
            if self._filled == size:
                self._deliver(frame)

    def _deliver(self, frame: Frame) -> None:
        self._frame, self._filled = None, 0
        if self._sink is not None:
            self._sink.frame(frame)
        self._prefix = None

    # --- writing

    @property
    def unsent(self) -> int:
        """Bytes of begun frames that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None and not self.lost else 0

    @property
    def backlog(self) -> int:
        """Bytes that were handed to us and not yet to the kernel."""
        return self.unsent + self._small_bytes + self._bulk_bytes

    def write_preamble(self, data: bytes) -> None:
        """Write raw bytes before any frame."""
        if self._transport is not None:
            self._transport.write(data)

    def send_small(self, buffers: Sequence[bytes | memoryview], call: int = 0) -> None:
        """Queue a frame ahead of all bulk; never waits. A peer that lets 8 MiB of these pile up is cut off."""
        if self.lost or self._closing:
            return
        size = sum(map(len, buffers))
        if self._small_bytes + size > MAX_SMALL_BYTES:
            self.abort()
            return
        self._small.append(_Outgoing(buffers, size, call))
        self._small_bytes += size
        self._pump()

    def send_news(self, buffers: Sequence[bytes | memoryview], call: int) -> None:
        """Queue a small frame that may be lost: it is dropped where many wait. Bulk is no reason, it goes after it."""
        if self._small_bytes < NEWS_BYTES:
            self.send_small(buffers, call)

    @property
    def has_room(self) -> bool:
        """Whether `send` would not wait now, whatever the size of the frame."""
        return not self._bulk_bytes

    async def send(self, buffers: Sequence[bytes | memoryview], call: int) -> None:
        """Queue a frame, waiting for room first when it is large. Nothing is queued when this raises.

        The buffers must stay as they are until the peer has answered. Raises ConnectionBroken.
        """
        size = sum(map(len, buffers))
        if size > SMALL_BYTES:
            await self._wait_for_room(size)
        if self.lost or self._closing:
            raise ConnectionBroken("the stream is closed")
        if size <= SMALL_BYTES:
            self.send_small(buffers, call)
            return
        self._bulk.append(_Outgoing(buffers, size, call))
        self._bulk_bytes += size
        self._pump()

    def withdraw(self, call: int) -> bool:
        """Take a frame of `call` back that is still queued; False when there is none."""
        for queue in (self._small, self._bulk):
            for outgoing in queue:
                if outgoing.call == call:
                    queue.remove(outgoing)
                    self._count_off(outgoing)
                    return True
        return False

    async def _wait_for_room(self, size: int) -> None:
        while self._bulk_bytes and self._bulk_bytes + size > MAX_QUEUED_BYTES and not self.lost:
            waiter = self._loop.create_future()
            self._room.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake()  # the room we were woken for, if we were, is somebody else's
                raise

    def _wake(self) -> None:
        while self._room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _count_off(self, outgoing: _Outgoing) -> None:
        if outgoing.size > SMALL_BYTES:
            self._bulk_bytes -= outgoing.size
            self._wake()
        else:
            self._small_bytes -= outgoing.size

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def _pump(self) -> None:
        """Hand frames to the transport until it has enough."""
        transport = self._transport
        if transport is None or self.lost:
            return
        while not self._paused and (self._small or self._bulk):
            outgoing = self._small.popleft() if self._small else self._bulk.popleft()
            self._count_off(outgoing)
            self.bytes_out += outgoing.size
            self.last_sent = self._loop.time()
            transport.writelines(outgoing.buffers)
