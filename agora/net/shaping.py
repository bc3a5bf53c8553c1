"""Makes this peer's streams behave as if they ran over a link of a given rate and latency, inside the process.

Knows: asyncio transports, and when bytes may pass, which `link` computes. Must not know: frames, calls, peers.

A shaped transport stands between a stream and its real transport, and copies nothing. The stream's own limit bounds
what waits to go out, rate times delay bounds what is on its way, and what is not read fills the sender's windows, as on
a real link.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from agora.net.link import MOST_CHUNK, DelayLine, LinkSpec, TokenBucket

HIGH_BYTES: Final = 262_144  # a stream is told to stop when this much waits for the rate, as by a plain transport
LOW_BYTES: Final = 65_536
HOLD_S: Final = 0.05  # parts of a message that has arrived are handed on together, after this at the latest
DOWN_DEPTH_S: Final = 0.08  # more than HOLD_S: what another peer's link has spread out is not spread out again
TICK_S: Final = 0.001  # of the event loop's timers

Clock = Callable[[], float]


class AccessLink:
    """The imitated link of one peer: a rate each way, which all streams that it shapes share."""

    def __init__(self, spec: LinkSpec, rng: random.Random, clock: Clock = time.monotonic) -> None:
        self.spec = spec
        self.rng = rng
        self.clock = clock
        self.up = TokenBucket(spec.rate)
        self.down = TokenBucket(spec.rate, DOWN_DEPTH_S)

    def shape(self, transport: asyncio.Transport, stream: asyncio.BufferedProtocol) -> asyncio.Transport:
        """Returns a delaying transport for `stream` to use in place of `transport`, whose protocol it becomes.

        `transport` must not be reading now.
        """
        shaped = ShapedTransport(transport, stream, self)
        transport.set_protocol(shaped)
        return shaped


class _Alarm:
    """A timer that is never early. The loop's own may be, by half a millisecond."""

    def __init__(self, clock: Clock, ring: Callable[[float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock, self._ring = clock, ring
        self._at = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        """Will call `ring(now)` once, at time `at` or later, and not at the time set before; infinity: never."""
        if at == self._at:
            return
        self.stop()
        if at < math.inf:
            self._at = at
            ticks = max(0, math.ceil((at - self._clock()) / TICK_S))
            self._handle = self._loop.call_later(ticks * TICK_S, self._ring_or_set_again)

    def stop(self) -> None:
        """Cancels the timer: `ring` is not called."""
        if self._handle is not None:
            self._handle.cancel()
        self._at, self._handle = math.inf, None

    def _ring_or_set_again(self) -> None:
        """Called by the event loop: calls `ring`, or sets the timer again when it fired too early."""
        at, now = self._at, self._clock()
        self._at, self._handle = math.inf, None
        if now < at:
            self.set(at)
        else:
            self._ring(now)


@dataclass(slots=True)
class _Chunk:
    """Bytes on the link until `arrives`. `ends`: whether a message ends in them."""

    arrives: float
    size: int
    ends: bool
    pieces: list[memoryview]


class _ShapedUpload:
    """Delays what a stream sends: each chunk waits for the link's rate, then for its delay, then is really written."""

    def __init__(self, real: asyncio.Transport, stream: asyncio.BufferedProtocol, link: AccessLink) -> None:
        self._real, self._stream, self._link = real, stream, link
        self._delay = DelayLine(link.spec, link.rng)
        self._step_alarm = _Alarm(link.clock, self._step)
        self._queue: deque[tuple[memoryview, bool]] = deque()  # and whether a message ends with it
        self._queued = 0
        self._ready = -math.inf  # since when the link could have carried the first of the queue
        self._line: deque[_Chunk] = deque()
        self._on_its_way = 0
        self._full = self._blocked = self._ended = False

    def write(self, data: Any) -> None:
        """Queues bytes as one message."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Queues the buffers as one message; pauses the stream's writing beyond HIGH_BYTES. Ignored after the end."""
        if self._ended:
            return
        if not self._queue:
            self._ready = max(self._ready, self._link.clock())
        views = [view for view in (memoryview(buffer).cast("B") for buffer in list_of_data) if view]
        for number, view in enumerate(views, 1):
            self._queue.append((view, number == len(views)))
            self._queued += len(view)
        self._schedule()
        if not self._full and self._queued > HIGH_BYTES:
            self._full = True
            self._stream.pause_writing()

    def get_write_buffer_size(self) -> int:
        """Returns how many bytes wait for the rate, are on the imitated link, or wait in the real transport."""
        return self._queued + self._on_its_way + self._real.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Called by the real transport when its buffer is full: stops all sending until `resume_writing`."""
        self._blocked = True
        self._step_alarm.stop()

    def resume_writing(self) -> None:
        """Called by the real transport when its buffer has drained: goes on sending."""
        self._blocked = False
        self._ready = max(self._ready, self._link.clock())
        self._schedule()

    def _end_upload(self) -> None:
        """Throws away what is queued or on its way, and ignores later writes."""
        self._ended = True
        self._step_alarm.stop()
        self._queue.clear()
        self._line.clear()
        self._queued = self._on_its_way = 0

    def _schedule(self) -> None:
        """Unless blocked, has `_step` called when the next chunk may go onto the link or an arrived one is due."""
        if not self._blocked:
            self._step_alarm.set(min(self._ready if self._queue else math.inf, self._hand_on_at()))

    def _hand_on_at(self) -> float:
        """Returns when to write to the real transport: once a message has arrived, or HOLD_S after its first part.

        Each write to the real transport costs time, so the parts of a message are handed on together.
        """
        at = self._line[0].arrives + HOLD_S if self._line else math.inf
        for chunk in self._line:
            if chunk.ends or chunk.arrives > at:
                return min(at, chunk.arrives)
        return at

    def _step(self, now: float) -> None:
        """Called by the timer: puts due chunks onto the link, writes what has arrived to the real transport.

        Lets the stream write again when no more than LOW_BYTES wait.
        """
        while self._queue and self._ready <= now:
            size, ends, pieces = self._next_chunk()
            self._ready = self._link.up.take(size, self._ready)
            self._line.append(_Chunk(self._delay.arrival(size, self._ready), size, ends, pieces))
            self._on_its_way += size
        if not self._blocked and self._hand_on_at() <= now:
            arrived: list[memoryview] = []
            while self._line and self._line[0].arrives <= now:
                chunk = self._line.popleft()
                self._on_its_way -= chunk.size
                arrived += chunk.pieces
            self._real.writelines(arrived)
        self._schedule()
        if self._full and self._queued <= LOW_BYTES:
            self._full = False
            self._stream.resume_writing()

    def _next_chunk(self) -> tuple[int, bool, list[memoryview]]:
        """Takes up to `chunk_bytes` off the queue. Returns the size, whether a message ends in it, and the bytes."""
        room, pieces, ends = self._link.spec.chunk_bytes, [], False
        while self._queue and room:
            view, last = self._queue.popleft()
            if len(view) > room:
                self._queue.appendleft((view[room:], last))
                view, last = view[:room], False
            pieces.append(view)
            room -= len(view)
            ends = ends or last
        size = self._link.spec.chunk_bytes - room
        self._queued -= size
        return size, ends, pieces


class _ShapedDownload:
    """Slows what a stream reads: holds a chunk that came faster than the link's rate, and reads nothing meanwhile."""

    def __init__(self, real: asyncio.Transport, stream: asyncio.BufferedProtocol, link: AccessLink) -> None:
        self._real, self._stream, self._link = real, stream, link
        self._deliver_alarm = _Alarm(link.clock, self._deliver)
        self._most = max(link.spec.chunk_bytes, min(MOST_CHUNK, int(HOLD_S * link.spec.rate)))
        self._wanted = self._reading = False
        self._held = 0
        self._held_until = 0.0
        self._late_s = 0.0  # by how much a held chunk was delivered too late, until later ones have caught up

    def pause_reading(self) -> None:
        """Called by the stream when it wants nothing more: pauses the real transport."""
        self._wanted = False
        self._read()

    def resume_reading(self) -> None:
        """Called by the stream when it wants to read: resumes the real transport unless a chunk is held."""
        self._wanted = True
        self._read()

    def get_buffer(self, sizehint: int) -> Any:
        """Called by the real transport before it reads: returns the first part of the stream's own buffer."""
        return self._stream.get_buffer(-1)[: self._most]  # type: ignore[index]

    def buffer_updated(self, nbytes: int) -> None:
        """Called when bytes came: tells the stream, or holds them and pauses reading until the rate allows."""
        now = self._link.clock()
        until = self._link.down.take(nbytes, now - self._late_s)
        if until <= now:
            self._late_s = min(self._late_s, now - until)
            self._stream.buffer_updated(nbytes)
            return
        self._held, self._held_until = nbytes, until
        self._read()
        self._deliver_alarm.set(until)

    def _end_download(self) -> None:
        """Drops the chunk that is held, and never delivers it."""
        self._deliver_alarm.stop()
        self._held = 0

    def _deliver(self, now: float) -> None:
        """Called by the timer: tells the stream of the bytes that were held, and reads on."""
        size, self._held = self._held, 0
        self._late_s = now - self._held_until
        self._stream.buffer_updated(size)
        self._read()

    def _read(self) -> None:
        """Resumes the real transport's reading when the stream wants bytes and no chunk is held; else pauses it."""
        reading = self._wanted and not self._held
        if reading is self._reading or self._real.is_closing():
            return
        self._reading = reading
        if reading:
            self._real.resume_reading()
        else:
            self._real.pause_reading()


class ShapedTransport(_ShapedUpload, _ShapedDownload, asyncio.Transport, asyncio.BufferedProtocol):
    """Stands between a stream and its real transport, and delays bytes both ways as the link would.

    It is the stream's transport and the real transport's protocol.
    """

    def __init__(self, real: asyncio.Transport, stream: asyncio.BufferedProtocol, link: AccessLink) -> None:
        asyncio.Transport.__init__(self)
        _ShapedUpload.__init__(self, real, stream, link)
        _ShapedDownload.__init__(self, real, stream, link)

    def is_closing(self) -> bool:
        """Whether the real transport is closing or closed."""
        return self._real.is_closing()

    def abort(self) -> None:
        """Closes the real transport now; what is queued is lost."""
        self._end_upload()
        self._end_download()
        self._real.abort()

    def eof_received(self) -> bool | None:
        """Called when the other side has stopped sending: asks the stream, whose answer it returns."""
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the real transport is closed: drops what is queued or held, and tells the stream."""
        self._end_upload()
        self._end_download()
        self._stream.connection_lost(exc)
