"""Limits quoted in SPEC.md, against what the code accepts: at each limit a thing is taken, one beyond it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from agora_protocol import frames, messages, packing
from agora_protocol.addresses import address_problem
from agora_protocol.errors import AgoraError, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import MicrobatchId, RunId, Span
from agora_protocol.invite import Invite
from agora_protocol.records import Claim, open_record, record_key, seal_record

from .conftest import PROTOCOL

SPEC = (PROTOCOL / "SPEC.md").read_text(encoding="utf-8")
QUOTED = {name: int(value) for name, value in re.findall(r"^\| `([A-Z_]+)` \| `(\d+)` \|", SPEC, re.M)}
KEY = Identity.generate()
RUN = RunId("ab" * 32)
NOW = 1_790_000_000.0


def opened(expires_unix: float, now_unix: float = NOW) -> object:
    """A claim that expires then, as a reader takes it."""
    claim = Claim(KEY.peer, Span(0, 0), 1, (), "serving", 0.0)
    sealed = seal_record(claim, RUN, KEY, expires_unix)
    key = record_key(RUN, Claim, 0)
    return open_record(sealed, run=RUN, key=key, subkey_peer=KEY.peer, now_unix=now_unix)


def address(size: int) -> None:
    """An address of so many characters."""
    begin, end = "/dns4/", f"/tcp/4001/p2p/{KEY.peer}"
    name = ("a" * 19 + ".") * 10 + "a" * 19
    if problem := address_problem(begin + name[len(begin) + len(end) - size :] + end):
        raise ProtocolError("bad-record", problem)


def prefix(kind: int, header: int, payload: int) -> frames.Prefix:
    """The prefix of a frame with such sizes."""
    raw = bytes([0xA6, kind, 0, 0]) + b"".join(n.to_bytes(4, "little") for n in (1, header, payload))
    return frames.Prefix.parse(memoryview(raw), frames.FrameLimits())


def nested(depth: int) -> object:
    """msgpack of lists inside lists."""
    return packing.unpack(b"\x91" * depth + b"\x01", 1000, "bad-record")


def span(stages: int) -> Claim:
    """A claim of so many stages."""
    return Claim.from_fields(Claim(KEY.peer, Span(0, stages - 1), 1, (), "serving", 0.0).to_fields())


def hint(entries: int) -> object:
    """A request with so many hints."""
    hints = tuple((number % 8, KEY.peer) for number in range(entries))
    request = messages.Process(MicrobatchId(bytes(16)), KEY.peer, 0, "train", 1000, hints)
    return messages.Process.from_fields(request.to_fields())


def dimensions(count: int) -> object:
    """An answer's header with a tensor of so many dimensions."""
    header = packing.pack([4, messages.Processed(1.0, 1, 1.0).to_fields(), [["int8", [1] * count]]])
    return frames.decode_header(frames.Prefix(frames.FrameType.ANSWER, 1, len(header), 1), memoryview(header))


ACCEPTED: dict[str, Callable[[int], object]] = {
    "MAX_RECORD_LIFETIME_S": lambda s: opened(NOW + s + QUOTED["CLOCK_TOLERANCE_S"]),
    "CLOCK_TOLERANCE_S": lambda s: opened(NOW + QUOTED["MAX_RECORD_LIFETIME_S"] + s),
    "MAX_HEADER_BYTES": lambda n: prefix(2, n, 0),
    "MAX_ANSWER_HEADER_BYTES": lambda n: prefix(4, n, 0),
    "MAX_PAYLOAD_BYTES": lambda n: prefix(2, 10, n),
    "MAX_DEADLINE_MS": lambda ms: messages.Ping.from_fields(messages.Ping(ms).to_fields()),
    "MAX_ADDRESS_BYTES": address,
    "MAX_DEPTH": nested,
    "MAX_SPAN_STAGES": span,
    "MAX_HINTS": hint,
    "MAX_ARRAY_ITEMS": lambda n: packing.unpack(packing.pack([1] * n), 10_000, "bad-record"),
    "MAX_MAP_ITEMS": lambda n: packing.unpack(packing.pack({str(k): 1 for k in range(n)}), 10_000, "bad-record"),
    "MAX_DIMENSIONS": dimensions,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_at_the_limit_is_taken_and_what_is_beyond_refused(name: str) -> None:
    assert ACCEPTED[name](QUOTED[name]) is not False
    with pytest.raises((AgoraError, ValueError)):
        ACCEPTED[name](QUOTED[name] + 1)


def test_an_invite_longer_than_the_limit_is_refused() -> None:
    text = "agora://" + "A" * (QUOTED["MAX_INVITE_BYTES"] - 8)
    for size in (0, 1):
        with pytest.raises(AgoraError) as caught:
            Invite.parse(text + "A" * size)
        assert ("too long" in str(caught.value) or str(QUOTED["MAX_INVITE_BYTES"]) in str(caught.value)) == bool(size)


def test_a_record_is_good_until_the_moment_that_it_names() -> None:
    opened(NOW + 0.001)
    with pytest.raises(ProtocolError, match="expired"):
        opened(NOW)
