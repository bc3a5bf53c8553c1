"""Reads and writes frames on one byte stream: reads into preallocated buffers, writes views without copying.

Small frames are written before bulk, and bulk in bounded amounts.
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

from agora.core.calls import ConnectionBroken

SCRATCH_BYTES: Final = 2 * MAX_HEADER_BYTES  # every header but a long answer's fits, wherever in the buffer it begins
# One read takes at most this many bytes while no payload has a buffer: payload bytes among them must be copied.
HEAD_BYTES: Final = 8192
MAX_PREAMBLE_BYTES: Final = 4096  # the longest preamble of p2pd, before the first frame of a stream
WRITE_HIGH_BYTES, WRITE_LOW_BYTES = 262_144, 65_536  # the transport pauses writing above, and resumes below
FLUSH_TIMEOUT_S: Final = 5.0  # seconds that a closing stream may take to write its last frames


class PayloadAction(Enum):
    """What a sink wants done with the payload of the frame whose header was just read."""

    TAKE = "allocate a buffer and read it"
    DROP = "read it and throw it away; the sink has answered already"
    WAIT = "read nothing more until `FrameStream.resume_payload` says which of the other two"


@dataclass(slots=True)
class Frame:
    """A frame that was read. call: its call's number, 0 for none. specs: one for each tensor in the payload.

    message: None if the frame has no header. payload: a buffer of exactly the payload's bytes, which only this frame
    holds; None until it is read, or if empty.
    """

    type: FrameType
    call: int
    message: Message | None
    specs: tuple[TensorSpec, ...]
    payload: memoryview | None = None


class FrameSink(Protocol):
    """Protocol: checks and takes the frames that a FrameStream reads; called in read callbacks, it must not block."""

    def on_prefix(self, prefix: Prefix) -> None:
        """Called with each frame's prefix before its header is read. May raise ProtocolError, which ends reading."""

    def on_header(self, prefix: Prefix, message: Message | None) -> PayloadAction:
        """Called with each header: returns what to do with its payload. May raise ProtocolError, which ends reading."""

    def on_frame(self, frame: Frame) -> None:
        """Called with each complete frame. May raise ProtocolError, which ends reading."""

    def on_protocol_error(self, error: ProtocolError, prefix: Prefix | None) -> None:
        """Called when the peer broke the protocol, with the frame's prefix if known; no more frames are read."""

    def on_lost(self, reason: str) -> None:
        """Called once when the stream has ended, also after `close` or `abort`."""


class FrameStream(asyncio.BufferedProtocol):
    """One stream, as an asyncio protocol: reads frames from it and writes frames to it, small ones before bulk.

    First reads p2pd's preamble, which names the peer, then pauses reading until `attach` brings a sink for frames.
    preamble: future of these bytes. last_heard, last_sent: loop time of the last bytes. ended: set when the stream is
    lost.
    """

    def __init__(self, limits: FrameLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._transport: asyncio.Transport  # set by connection_made, before anything else happens
        self._sink: FrameSink | None = None
        self.preamble: asyncio.Future[bytes] = self._loop.create_future()
        self.last_heard = self._loop.time()
        self.last_sent = self.last_heard
        self.bytes_in = 0
        self.bytes_out = 0
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._end = 0  # _scratch[_start:_end] holds what was read and is not parsed yet
        self._frame_prefix: Prefix | None = None
        self._frame: Frame | None = None  # its payload is being read, or waits to be
        self._filled = 0
        self._bytes_to_skip = 0
        self.is_waiting = False  # whether nothing is read because the sink returned WAIT
        self._ignores_input = False  # whether what arrives is thrown away
        self._queue = SendQueue()
        self._written: QueuedFrame | None = None  # the last one that was handed to the transport
        self.address_prefix = ""  # the network of the peer's address, see agora_protocol.addresses.address_prefix
        self._is_paused = False
        self._is_closing = False
        self.is_lost = False
        self.ended = asyncio.Event()

    # --- asyncio's side: connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio first: keeps the transport, and sets how much it may buffer."""
        self._transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)  # type: ignore[attr-defined]

    def interpose(self, put_between: Callable[[asyncio.Transport, FrameStream], asyncio.Transport]) -> None:
        """Uses the transport that `put_between(transport, self)` returns from now on; only before `attach`."""
        if not self.is_lost:
            self._transport = put_between(self._transport, self)

    def attach(self, sink: FrameSink) -> None:
        """Resumes reading, and hands all frames to `sink`; if the stream has ended, only calls its `on_lost`."""
        self._sink = sink
        if self.is_lost:
            self._loop.call_soon(sink.on_lost, "the stream ended before it began")
        else:
            self._transport.resume_reading()
            self._advance()

    def eof_received(self) -> None:
        """Called by asyncio when the peer has closed its side: aborts, since nothing that is queued would be read."""
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio when the stream ended: drops queued bulk, fails an unread preamble, calls `on_lost`."""
        self.is_lost = self._ignores_input = True
        self.ended.set()
        self._queue.drop_bulk()
        self._on_written_or_gone()
        self._frame = None
        if not self.preamble.done():
            self.preamble.set_exception(ConnectionBroken("the stream ended before it began"))
            self.preamble.exception()  # perhaps no task waits for it any more
        if self._sink is not None:
            self._sink.on_lost(str(error) if error else "the stream ended")

    def close(self) -> None:
        """Drops bulk frames, writes the small ones, and leaves it to the peer to end the stream; aborts after
        FLUSH_TIMEOUT_S.

        p2pd resets a stream that its user closes, and the last frames would be lost. What still arrives is thrown away.
        """
        if self._is_closing or self.is_lost:
            return
        self._is_closing = self._ignores_input = True
        self._queue.drop_bulk()
        self._loop.call_later(FLUSH_TIMEOUT_S, self.abort)
        if self.is_waiting or self._sink is None:
            self._transport.resume_reading()
        self._pump()

    def abort(self) -> None:
        """Closes the stream immediately; what is queued is lost, and what arrives is ignored."""
        self._ignores_input = True
        self._transport.abort()

    # --- asyncio's side: reading

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by asyncio before it reads: returns the payload buffer's rest, else a part of the scratch buffer."""
        if self._ignores_input:
            return self._scratch
        if self._frame is not None and self._frame.payload is not None:
            return self._frame.payload[self._filled :]
        if self._bytes_to_skip:
            return self._scratch[self._end :]
        return self._scratch[self._end : self._end + HEAD_BYTES]

    def buffer_updated(self, count: int) -> None:
        """Called by asyncio when `count` bytes came: parses them, or delivers the frame whose payload they complete."""
        self.bytes_in += count
        self.last_heard = self._loop.time()
        if self._ignores_input:
            return
        frame = self._frame
        if frame is None or frame.payload is None:
            self._end += count
            self._advance()
            return
        self._filled += count
        if self._filled == len(frame.payload):
            self._call_guarded(partial(self._deliver, frame))

    @property
    def is_mid_payload(self) -> bool:
        return self._frame is not None or self._bytes_to_skip > 0

    def resume_payload(self, action: PayloadAction) -> None:
        """Resumes reading if the sink has returned WAIT: TAKE reads the waiting payload, DROP throws it away."""
        frame, prefix = self._frame, self._frame_prefix
        if not self.is_waiting or frame is None or prefix is None or self._ignores_input:
            return
        self.is_waiting = False
        self._call_guarded(partial(self._begin_payload, frame, prefix, action))
        self._advance()
        if not self.is_waiting:
            self._transport.resume_reading()

    def _advance(self) -> None:
        self._call_guarded(self._parse)
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._scratch) > SCRATCH_BYTES:
                self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        elif self._end == len(self._scratch):
            self._make_room(1)  # the buffer must never stay full

    def _call_guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except ProtocolError as error:
            self._ignores_input = True
            if self._sink is not None:
                self._sink.on_protocol_error(error, self._frame_prefix)

    def _parse(self) -> None:
        sink = self._sink
        if sink is None:
            self._read_preamble(self._end - self._start)
            return
        while not self.is_waiting and not self._ignores_input:
            available = self._end - self._start
            if self._bytes_to_skip:
                dropped = min(self._bytes_to_skip, available)
                self._start += dropped
                self._bytes_to_skip -= dropped
                available -= dropped
            prefix = self._frame_prefix
            if prefix is None:
                if available < PREFIX_BYTES:
                    return
                self._frame_prefix = prefix = Prefix.parse(self._take_scratch(PREFIX_BYTES), self._limits)
                sink.on_prefix(prefix)
                available -= PREFIX_BYTES
            if available < prefix.header_bytes:
                self._make_room(prefix.header_bytes - available)
                return
            message, specs = decode_header(prefix, self._take_scratch(prefix.header_bytes))
            self._frame = Frame(prefix.type, prefix.call, message, specs)
            self._begin_payload(self._frame, prefix, sink.on_header(prefix, message))
            if self._frame is not None:
                return

    def _read_preamble(self, available: int) -> None:
        size, shift = 0, 0  # the preamble begins with its length, a varint of protobuf
        for at in range(0 if self.preamble.done() else min(available, 3)):
            byte = self._scratch[self._start + at]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if size > MAX_PREAMBLE_BYTES:
                    self.abort()
                elif available > at + size:
                    self._start += at + 1
                    self._transport.pause_reading()
                    self.preamble.set_result(bytes(self._take_scratch(size)))
                return

    def _take_scratch(self, size: int) -> memoryview:
        view = self._scratch[self._start : self._start + size]
        self._start += size
        return view

    def _make_room(self, missing: int) -> None:
        used = self._end - self._start
        if self._end + missing <= len(self._scratch):
            return
        source = self._scratch[self._start : self._end]
        if used + missing > len(self._scratch):
            self._scratch = memoryview(bytearray(used + missing))
        self._scratch[:used] = source
        self._start, self._end = 0, used

    def _begin_payload(self, frame: Frame, prefix: Prefix, action: PayloadAction) -> None:
        size = prefix.payload_bytes
        if action is PayloadAction.WAIT:
            self.is_waiting = True
            self._transport.pause_reading()
        elif action is PayloadAction.DROP:
            self._frame = self._frame_prefix = None
            self._bytes_to_skip = size
        else:
            if size:
                # The buffer is not zeroed: that would cost a tenth of a core at a gigabyte a second.
                frame.payload = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]  # a buffer for mypy from 3.12
                self._filled = min(size, self._end - self._start)
                frame.payload[: self._filled] = self._take_scratch(self._filled)
            if self._filled == size:
                self._deliver(frame)

    def _deliver(self, frame: Frame) -> None:
        self._frame, self._filled = None, 0
        if self._sink is not None:
            self._sink.on_frame(frame)
        self._frame_prefix = None

    # --- writing

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size() if not self.is_lost else 0

    @property
    def backlog(self) -> int:
        return self.unsent + self._queue.small_bytes + self._queue.bulk_bytes

    def enqueue(self, buffers: Buffers, call: int = 0, on_released: Callable[[], None] | None = None) -> None:
        """Queues a frame without waiting for room, and writes what can be written. Does nothing on a closed stream.

        Aborts the stream if more than MAX_SMALL_BYTES of small frames would wait. call: the number of the frame's call,
        for `withdraw`. on_released: see QueuedFrame; not called for an ignored frame, or a small one that waits when
        the stream ends.
        """
        if self.is_lost or self._is_closing:
            return
        frame = QueuedFrame(buffers, sum(map(len, buffers)), call, on_released)
        if self._queue.add(frame):
            self._pump()
        else:
            self.abort()

    def enqueue_droppable(self, buffers: Buffers, call: int) -> None:
        """Queues a small frame, see `enqueue`, but drops it if DROPPABLE_BYTES of small frames wait already."""
        if self._queue.small_bytes < DROPPABLE_BYTES:
            self.enqueue(buffers, call)

    async def send(self, buffers: Buffers, call: int, on_released: Callable[[], None] | None = None) -> None:
        """Waits for room if the frame is large, then queues it, see `enqueue`. Nothing is queued when this raises.

        Does not wait until the frame is written: the buffers must not change until the peer has answered. Raises
        ConnectionBroken if the stream is closed.
        """
        await self._queue.wait_for_room(sum(map(len, buffers)))
        if self.is_lost or self._is_closing:
            raise ConnectionBroken("the stream is closed")
        self.enqueue(buffers, call, on_released)

    def withdraw(self, call: int) -> bool:
        """Removes the first waiting frame of `call`, and calls its `on_released`. Returns False if none waits."""
        return self._queue.withdraw(call)

    def pause_writing(self) -> None:
        """Called by the transport when its buffer is full: no more frames are handed to it."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Called by the transport when its buffer has drained: hands it the queued frames again."""
        self._is_paused = False
        self._pump()

    def _pump(self) -> None:
        while not self.is_lost and not self._is_paused:
            self._on_written_or_gone()
            frame = self._queue.pop()
            if frame is None:
                return
            self._written = frame
            self.bytes_out += frame.size
            self.last_sent = self._loop.time()
            self._transport.writelines(frame.buffers)

    def _on_written_or_gone(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.release()


SMALL_BYTES: Final = 16_384  # frames up to this size go before bulk, but interrupt none that is being written
MAX_SMALL_BYTES: Final = 8_388_608  # when more bytes of small frames wait, the peer has stopped reading
DROPPABLE_BYTES: Final = 65_536  # when this many bytes of small frames wait, new progress messages are dropped
MAX_BULK_BYTES: Final = 67_108_864  # when more bytes of bulk frames wait, their senders wait

Buffers = Sequence[bytes | memoryview]


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """One frame that waits to be written.

    on_released: called at most once: when the transport has passed on most of the frame, or it is withdrawn or dropped.
    """

    buffers: Buffers
    size: int  # bytes of all buffers
    call: int  # the number of its call; 0 for none
    on_released: Callable[[], None] | None = None

    def release(self) -> None:
        """Calls `on_released`, if there is one."""
        if self.on_released is not None:
            self.on_released()


class SendQueue:
    """The frames of one stream that wait to be written: small ones go first, senders of bulk wait for room.

    A small frame has at most SMALL_BYTES, a bulk frame more. small_bytes, bulk_bytes: what waits of each kind.
    """

    def __init__(self) -> None:
        self._small: deque[QueuedFrame] = deque()
        self._bulk: deque[QueuedFrame] = deque()
        self._bulk_shrank = asyncio.Event()
        self.small_bytes = 0
        self.bulk_bytes = 0

    def add(self, frame: QueuedFrame) -> bool:
        """Queues a frame behind those of its kind; returns whether it did.

        It returns False and queues nothing if more than MAX_SMALL_BYTES of small frames would wait. Bulk always fits.
        """
        if frame.size > SMALL_BYTES:
            self._bulk.append(frame)
            self.bulk_bytes += frame.size
        elif self.small_bytes + frame.size <= MAX_SMALL_BYTES:
            self._small.append(frame)
            self.small_bytes += frame.size
        else:
            return False
        return True

    def pop(self) -> QueuedFrame | None:
        """Removes and returns the next frame to write: the oldest small one, else the oldest bulk one, else None."""
        queue = self._small or self._bulk
        return self._take(queue, queue[0]) if queue else None

    def withdraw(self, call: int) -> bool:
        """Removes the first waiting frame of `call`, and calls its `on_released`. Returns False if none waits."""
        for queue in (self._small, self._bulk):
            for frame in queue:
                if frame.call == call:
                    self._take(queue, frame).release()
                    return True
        return False

    async def wait_for_room(self, size: int) -> None:
        """Waits until a bulk frame of `size` bytes fits into MAX_BULK_BYTES, or no bulk waits.

        A small one never waits.
        """
        while size > SMALL_BYTES and self.bulk_bytes and self.bulk_bytes + size > MAX_BULK_BYTES:
            self._bulk_shrank.clear()
            await self._bulk_shrank.wait()

    def drop_bulk(self) -> None:
        """Forgets all bulk frames, ends every wait for room, and calls each frame's `on_released`."""
        dropped = list(self._bulk)
        self._bulk.clear()
        self.bulk_bytes = 0
        self._bulk_shrank.set()
        for frame in dropped:
            frame.release()

    def _take(self, queue: deque[QueuedFrame], frame: QueuedFrame) -> QueuedFrame:
        queue.remove(frame)
        if queue is self._small:
            self.small_bytes -= frame.size
        else:
            self.bulk_bytes -= frame.size
            self._bulk_shrank.set()
        return frame
