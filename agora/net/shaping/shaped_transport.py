"""Makes this peer's streams behave as if they ran over a link of a given rate and latency, inside the process."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from agora.core.fair_shares import TokenBucket
from agora.net.shaping.link import MAX_CHUNK, MIN_CHUNK, STREAM_TURN_S, DelayLine, LinkSpec

HIGH_BYTES: Final = 262_144  # a stream is paused when more bytes wait for the rate, as by a plain transport
LOW_BYTES: Final = 65_536  # a paused stream may write again when at most this many bytes wait
MAX_HOLD_S: Final = 0.05  # parts of a message that have arrived are passed on together, at most this many seconds later
DOWN_DEPTH_S: Final = 0.08  # more than MAX_HOLD_S: bytes that a peer's link has spread out are not spread out again
TIMER_RESOLUTION_S: Final = 0.001  # the resolution of the event loop's timers, in seconds


class AccessLink:
    """The emulated link of one peer, or its owner's limits, or both: rates that all its ShapedTransports share.

    up, down: the buckets in which sent and received bytes are booked. passed_up, passed_down: the bytes booked since
    the start.
    """

    def __init__(self, spec: LinkSpec, rng: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.rng = rng
        self.clock = clock
        self.up = TokenBucket(spec.rate)
        self.down = TokenBucket(spec.rate, DOWN_DEPTH_S)
        self.passed_up = self.passed_down = 0
        self._limits = math.inf, math.inf

    def change_rate(self, text: str) -> None:
        """Sets the emulated link's rate, such as "20Mbit", for later bytes; limits set by `limit_rates` still hold.

        Raises LinkError for malformed text, a rate below link.SLOWEST, or a link that was not made by LinkSpec.parse.
        """
        self.spec = self.spec.at_rate(text)
        self.limit_rates(*self._limits)

    def limit_rates(self, up: float, down: float) -> None:
        """Limits sending to `up` and receiving to `down`, in bytes per second, even if the emulated link is faster.

        Replaces the limits of an earlier call; infinity for none.
        """
        self._limits = up, down
        self.up.rate, self.down.rate = min(self.spec.rate, up), min(self.spec.rate, down)

    @property
    def sent_at_once(self) -> int:
        return min(self.spec.chunk_bytes, max(MIN_CHUNK, int(self.up.rate * STREAM_TURN_S)))

    @property
    def read_at_once(self) -> int:
        return max(self.sent_at_once, min(MAX_CHUNK, int(MAX_HOLD_S * self.down.rate)))


# Bytes that are on the emulated link until `arrives`, and are written at the latest at `hand_on_at`. They are written
# earlier if an earlier chunk is written after `arrives`. Times are the link's.
@dataclass(slots=True)
class _Chunk:
    arrives: float
    hand_on_at: float
    size: int
    pieces: list[memoryview]


class ShapedTransport(asyncio.Transport, asyncio.BufferedProtocol):
    """Emulates an access link between a stream and its transport: limits the rate both ways, delays what is sent.

    It is the stream's transport, and the protocol of the real transport. A chunk that the stream sends waits for the
    link's rate, then for its delay, and is then really written. A chunk that has come faster than the rate is held, and
    nothing is read meanwhile. No byte is copied.
    """

    def __init__(self, real: asyncio.Transport, stream: asyncio.BufferedProtocol, link: AccessLink) -> None:
        """real: must not be reading now."""
        super().__init__()
        self._real = real
        self._stream = stream
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._delay = DelayLine(link.spec, link.rng)
        self._queue: deque[tuple[memoryview, bool]] = deque()  # bytes, and whether a message ends with them
        self._queued = 0
        self._ready = -math.inf  # from this time on the link could have carried the first of the queue
        self._in_flight: deque[_Chunk] = deque()
        self._is_full = self._is_blocked = False
        self._is_reading_wanted = False  # whether the stream reads
        self._held = 0
        self._held_until = 0.0
        self._late_s = 0.0  # by how much a held chunk was delivered too late, until later ones have caught up
        real.set_protocol(self)

    # --- what the stream sends

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Queues the buffers as one message; pauses the stream's writing beyond HIGH_BYTES. Ignored after `abort`."""
        if self._real.is_closing():
            return
        if not self._queue:
            self._ready = max(self._ready, self._link.clock())
        views = [view for view in (memoryview(buffer).cast("B") for buffer in list_of_data) if view]
        for number, view in enumerate(views, 1):
            self._queue.append((view, number == len(views)))
            self._queued += len(view)
        self._set_timer()
        if not self._is_full and self._queued > HIGH_BYTES:
            self._is_full = True
            self._stream.pause_writing()

    def get_write_buffer_size(self) -> int:
        """Returns how many bytes wait for the rate, are on the emulated link, or wait in the real transport."""
        return self._queued + sum(chunk.size for chunk in self._in_flight) + self._real.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Called by the real transport when its buffer is full: stops all sending until `resume_writing`."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """Called by the real transport when its buffer has drained: goes on sending."""
        self._is_blocked = False
        self._ready = max(self._ready, self._link.clock())
        self._set_timer()

    def _send(self, now: float) -> None:
        # Each real write costs time: parts of a message are written together once all have arrived, or MAX_HOLD_S after
        # the first.
        while self._queue and self._ready <= now:
            size, ends, pieces = self._next_chunk()
            self._ready = self._link.up.take(size, self._ready)
            self._link.passed_up += size
            arrives = self._delay.arrival(size, self._ready)
            self._in_flight.append(_Chunk(arrives, arrives if ends else arrives + MAX_HOLD_S, size, pieces))
        if any(chunk.hand_on_at <= now for chunk in self._in_flight):
            arrived: list[memoryview] = []
            while self._in_flight and self._in_flight[0].arrives <= now:
                arrived += self._in_flight.popleft().pieces
            self._real.writelines(arrived)

    def _next_chunk(self) -> tuple[int, bool, list[memoryview]]:
        max_bytes = self._link.sent_at_once
        room = max_bytes
        pieces = []
        ends = False
        while self._queue and room:
            view, last = self._queue.popleft()
            if len(view) > room:
                self._queue.appendleft((view[room:], last))
                view, last = view[:room], False
            pieces.append(view)
            room -= len(view)
            ends = ends or last
        size = max_bytes - room
        self._queued -= size
        return size, ends, pieces

    # --- what it reads

    def pause_reading(self) -> None:
        """Called by the stream when it wants nothing more: pauses the real transport."""
        self._is_reading_wanted = False
        self._read()

    def resume_reading(self) -> None:
        """Called by the stream when it wants to read: resumes the real transport unless a chunk is held."""
        self._is_reading_wanted = True
        self._read()

    def get_buffer(self, sizehint: int) -> Any:
        """Called by the real transport before it reads: returns up to `read_at_once` bytes of the stream's buffer."""
        return self._stream.get_buffer(-1)[: self._link.read_at_once]  # type: ignore[index]

    def buffer_updated(self, nbytes: int) -> None:
        """Called by asyncio when bytes came: books them, and passes them to the stream now if the rate allows it.

        Otherwise holds the bytes and pauses reading until the rate allows it.
        """
        now = self._link.clock()
        until = self._link.down.take(nbytes, now - self._late_s)
        self._link.passed_down += nbytes
        if until <= now:
            self._late_s = min(self._late_s, now - until)
            self._stream.buffer_updated(nbytes)
        else:
            self._held, self._held_until = nbytes, until
            self._read()
            self._set_timer()

    def _read(self) -> None:
        if self._is_reading_wanted and not self._held:
            self._real.resume_reading()
        else:
            self._real.pause_reading()

    # --- both ways

    def _set_timer(self) -> None:
        due = [self._held_until] if self._held else []
        if not self._is_blocked:
            due += [self._ready] if self._queue else []
            due += [chunk.hand_on_at for chunk in self._in_flight]
        if self._timer is not None:
            self._timer.cancel()
        if due:
            ticks = max(0, math.ceil((min(due) - self._link.clock()) / TIMER_RESOLUTION_S))
            self._timer = self._loop.call_later(ticks * TIMER_RESOLUTION_S, self._step)

    def _step(self) -> None:
        now = self._link.clock()
        if not self._is_blocked:
            self._send(now)
        if self._held and self._held_until <= now:
            size, self._held = self._held, 0
            self._late_s = now - self._held_until
            self._stream.buffer_updated(size)
            self._read()
        self._set_timer()
        if self._is_full and self._queued <= LOW_BYTES:
            self._is_full = False
            self._stream.resume_writing()

    def abort(self) -> None:
        """Closes the real transport now; bytes that are queued, on the emulated link or held are lost."""
        self._drop_all()
        self._real.abort()

    def eof_received(self) -> bool | None:
        """Called when the other side has stopped sending: notifies the stream; returns its answer (True: stay open)."""
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the real transport is closed: drops what is queued or held, and notifies the stream."""
        self._drop_all()
        self._stream.connection_lost(exc)

    def _drop_all(self) -> None:
        self._queue.clear()
        self._in_flight.clear()
        self._queued = self._held = 0
        self._is_full = False
        self._set_timer()
