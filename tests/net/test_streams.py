"""Frames on a stream, without a network: any chunking reads the same, writes keep their order, nothing grows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from agora_protocol.errors import PROTOCOL_CODES, ProtocolError
from agora_protocol.frames import FrameLimits, FrameType, Prefix, encode_frame, slice_payload
from agora_protocol.ids import PeerId
from agora_protocol.messages import CallProgress, Message, Ping, Refusal, StatusAnswer

from agora.core.calls import ConnectionBroken
from agora.net.p2pd.frame_stream import (
    MAX_BULK_BYTES,
    MAX_SMALL_BYTES,
    SCRATCH_BYTES,
    Frame,
    FrameStream,
    PayloadAction,
)
from tests.net.helpers import boundary, process, run

PEER = PeerId("12D3KooWLTVCHqFgoXPTuCtNrhfyyqHzrPHGiJnmwkdonRVHXhyw")
LIMITS = FrameLimits(max_payload_bytes=1 << 20)
PREAMBLE = b"\x03who"


class FakeTransport(asyncio.Transport):
    """Takes what is written until it is told to be full; reads what `feed` is given."""

    def __init__(self, stream: FrameStream) -> None:
        super().__init__()
        self.stream, self.written, self.full, self.reading, self.aborted = stream, [], False, True, False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def writelines(self, list_of_data: Any) -> None:
        self.written.append(b"".join(bytes(part) for part in list_of_data))
        if self.full:
            self.stream.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self.stream.connection_lost(None)

    def feed(self, data: bytes, chunk: Callable[[], int] = lambda: 1 << 30) -> int:
        """Feeds `data` to the stream piece by piece while it reads; returns how many bytes it took."""
        at = 0
        while at < len(data) and self.reading and not self.aborted:
            buffer = self.stream.get_buffer(-1)
            count = min(len(buffer), len(data) - at, chunk())
            assert count > 0
            buffer[:count] = data[at : at + count]
            at += count
            self.stream.buffer_updated(count)
        return at


class Sink:
    """Keeps what arrives; `intakes` are its next decisions, TAKE where there are none."""

    def __init__(self, *intakes: PayloadAction) -> None:
        self.frames: list[Frame] = []
        self.intakes = list(intakes)
        self.errors: list[ProtocolError] = []
        self.ends: list[str] = []

    def on_prefix(self, prefix: Prefix) -> None:
        pass

    def on_header(self, prefix: Prefix, message: Message | None) -> PayloadAction:
        return self.intakes.pop(0) if self.intakes else PayloadAction.TAKE

    def on_frame(self, frame: Frame) -> None:
        self.frames.append(frame)

    def on_protocol_error(self, error: ProtocolError, prefix: Prefix | None) -> None:
        self.errors.append(error)

    def on_lost(self, reason: str) -> None:
        self.ends.append(reason)


def opened(*intakes: PayloadAction) -> tuple[FrameStream, FakeTransport, Sink]:
    stream = FrameStream(LIMITS)
    transport = FakeTransport(stream)
    sink = Sink(*intakes)
    stream.connection_made(transport)
    transport.feed(PREAMBLE)
    assert not transport.reading
    stream.attach(sink)
    return stream, transport, sink


def encoded(*frames: tuple[Any, ...]) -> list[bytes]:
    return [b"".join(encode_frame(*frame)) for frame in frames]


def request(call: int, size: int) -> bytes:
    return b"".join(encode_frame(FrameType.REQUEST, call, process(PEER), boundary(size, call)))


def test_any_chunking_reads_the_same_frames() -> None:
    async def main() -> None:
        rng = random.Random(3)
        frames = [request(2 * n + 1, size) for n, size in enumerate((4, 100, 9_000, 300_000))]
        frames += encoded((FrameType.CANCEL, 1, None), (FrameType.PROGRESS, 2, CallProgress(0, PEER, "accepted", 1)))
        frames += encoded((FrameType.ANSWER, 2, StatusAnswer(b"s" * 500_000)), (FrameType.GOODBYE, 0, None))
        for most in (1, 7, 100, 8_192, 70_000, 1 << 30):
            stream, transport, sink = opened()
            assert stream.preamble.result() == b"who"
            wire = b"".join(frames) if most > 1 else b"".join(frames[:2])
            assert transport.feed(wire, lambda most=most: rng.randint(1, most)) == len(wire)
            assert not sink.errors
            again = []
            for frame in sink.frames:
                tensors = slice_payload(frame.specs, frame.payload) if frame.payload is not None else []
                again.append(b"".join(encode_frame(frame.type, frame.call, frame.message, tensors)))
            assert again == frames[: len(again)] and len(again) == (len(frames) if most > 1 else 2)
            assert len(stream._scratch) == SCRATCH_BYTES

    run(main)


def test_a_dropped_payload_costs_no_memory_and_the_next_frame_is_read() -> None:
    async def main() -> None:
        _, transport, sink = opened(PayloadAction.DROP)
        transport.feed(request(1, 1_000_000) + request(3, 100))
        assert [frame.call for frame in sink.frames] == [3]

    run(main)


def test_waiting_stops_the_reading_until_it_may_go_on() -> None:
    async def main() -> None:
        for verdict, calls in ((PayloadAction.TAKE, [1, 3]), (PayloadAction.DROP, [3])):
            stream, transport, sink = opened(PayloadAction.WAIT)
            wire = request(1, 200_000) + request(3, 10)
            taken = transport.feed(wire)
            assert taken < 10_000 and stream.is_waiting and not sink.frames
            stream.resume_payload(verdict)
            assert transport.reading and not stream.is_waiting
            transport.feed(wire[taken:])
            assert [frame.call for frame in sink.frames] == calls

    run(main)


def test_small_frames_go_before_bulk_and_what_has_not_begun_can_be_withdrawn() -> None:
    async def main() -> None:
        stream, transport, _ = opened()
        transport.full = True
        first, second, third = (boundary(100_000, n) for n in range(3))
        for call, tensors in ((1, first), (3, second), (5, third)):
            await stream.send(encode_frame(FrameType.REQUEST, call, process(PEER), tensors), call)
        stream.enqueue(encode_frame(FrameType.REQUEST, 7, Ping()), 7)
        stream.enqueue(encode_frame(FrameType.REQUEST, 9, Ping()), 9)
        assert stream.withdraw(3) and not stream.withdraw(3) and not stream.withdraw(1)
        assert stream.backlog > 100_000
        for _ in range(5):
            stream.resume_writing()
        assert [Prefix.parse(frame[:16]).call for frame in transport.written] == [1, 7, 9, 5]
        assert transport.written[3].endswith(bytes(third[0].data) + bytes(third[1].data))
        assert stream.backlog == 0

    run(main)


def test_bulk_waits_for_room_and_a_peer_that_never_reads_is_cut_off() -> None:
    async def main() -> None:
        stream, transport, sink = opened()
        transport.full = True
        half = [memoryview(bytes(MAX_BULK_BYTES // 2))]
        for call in (1, 3, 5):  # the first is on its way, two fill the queue
            await stream.send(half, call)
        waiting = [asyncio.create_task(stream.send(half, call)) for call in (7, 9)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        stream.resume_writing()
        await waiting[1]
        assert waiting[0].cancelled()
        stuck = asyncio.create_task(stream.send(half, 11))
        await asyncio.sleep(0)

        advance = encode_frame(FrameType.PROGRESS, 2, CallProgress(0, PEER, "accepted", 1))
        for _ in range(MAX_SMALL_BYTES // sum(map(len, advance)) + 1):
            stream.enqueue(advance)
        assert transport.aborted and sink.ends == ["the stream ended"]
        with pytest.raises(ConnectionBroken):
            await stuck
        with pytest.raises(ConnectionBroken):
            await stream.send(advance, 2)

    run(main)


def test_closing_writes_the_last_words_and_no_more_bulk() -> None:
    async def main() -> None:
        stream, transport, _ = opened()
        transport.full = True
        await stream.send([bytes(100_000)], 1)
        await stream.send([bytes(100_000)], 3)
        stream.enqueue(encode_frame(FrameType.GOODBYE, 0, Refusal("bad-frame")))
        stream.close()
        for _ in range(4):
            stream.resume_writing()
        assert len(transport.written) == 2 and Prefix.parse(transport.written[1][:16]).type is FrameType.GOODBYE
        transport.feed(b"\xff" * 1_000_000)  # whatever still comes is nobody's business
        stream.eof_received()
        assert transport.aborted

    run(main)


def mutations(frames: list[bytes], rng: random.Random) -> bytes:
    data = bytearray(rng.choice(frames))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(max(1, len(data)))
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 20))
            case 2:
                del data[at : at + rng.randrange(1, 20)]
            case 3:
                data[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), rng.randbytes(4)])
    return bytes(data)


@pytest.mark.parametrize(
    "rounds", [10_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_mutated_frames_never_raise_and_never_cost_more_than_their_limits(rounds: int) -> None:
    async def main() -> None:
        rng = random.Random(rounds)
        good = [request(1, 200), *encoded((FrameType.REQUEST, 3, Ping()), (FrameType.CANCEL, 1, None))]
        good += encoded((FrameType.ANSWER, 2, StatusAnswer(b"{}")), (FrameType.REFUSAL, 2, Refusal("busy")))
        seen: Counter[str] = Counter()
        for _ in range(rounds):
            stream, transport, sink = opened()
            transport.feed(mutations(good, rng) + rng.choice(good), lambda: rng.choice((1, 5, 40, 4_000)))
            assert len(stream._scratch) <= LIMITS.max_answer_header_bytes + SCRATCH_BYTES
            assert all(frame.message is None or isinstance(frame.message, Message) for frame in sink.frames)
            assert len(sink.errors) <= 1 and not sink.ends
            seen.update(error.code for error in sink.errors)
            seen["frames"] += len(sink.frames)
        assert seen.keys() <= {*PROTOCOL_CODES, "frames"}
        assert all(seen[code] > rounds / 200 for code in ("bad-frame", "bad-message", "too-large", "frames")), seen

    run(main, timeout_s=1800)
