"""msgpack from strangers: bounded before it is built."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import MAX_ARRAY_ITEMS, MAX_DEPTH, MAX_HEADER_BYTES, MAX_MAP_ITEMS, MAX_VALUES
from agora_protocol.packing import pack, pack_canonical, unpack


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 2**63, -(2**63), 1.5, "", "\u00e9", b"", b"\xff", (), (1, (2,)), {}, {"a": {"b": (1.0,)}}],
)
def test_plain_values_come_back(value: object) -> None:
    assert unpack(pack(value), 100) == value


def test_canonical_sorts_every_map_and_keeps_every_list() -> None:
    assert pack_canonical({"b": [{"d": 1, "c": 2}], "a": 0}) == pack({"a": 0, "b": [{"c": 2, "d": 1}]})
    assert pack_canonical(1.0) == bytes.fromhex("cb3ff0000000000000")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad-message"),
        (b"\xc1", "bad-message"),
        (b"\xc0\xc0", "bad-message"),
        (b"\xa1\xff", "bad-message"),
        (b"\xa3\xed\xa0\x80", "bad-message"),
        (b"\x81\xc0\xc0", "bad-message"),
        (b"\x81\x01\xc0", "bad-message"),
        (b"\x81\xc4\x01a", "bad-message"),
        (b"\x81\x91\xc0\xc0", "bad-message"),
        (b"\x82\xa1a\xc0\xa1a\xc0", "bad-message"),
        (b"\xd4\x01\x00", "bad-message"),
        (b"\xc7\x00\x01", "bad-message"),
        (b"\xd6\xff\x00\x00\x00\x00", "bad-message"),
        (b"\xdc\xff\xff", "bad-message"),
        (b"\xdd\xff\xff\xff\xff", "bad-message"),
        (b"\xdf\xff\xff\xff\xff", "bad-message"),
        (b"\xdb\xff\xff\xff\xff", "bad-message"),
        (b"\xc6\xff\xff\xff\xff", "bad-message"),
        (nested(MAX_DEPTH + 1), "bad-message"),
        (nested(MAX_HEADER_BYTES - 1), "bad-message"),
        (b"\x81\xa1a" * 20_000 + b"\xc0", "bad-message"),
        (pack([0] * (MAX_ARRAY_ITEMS + 1)), "bad-message"),
        (pack({str(n): 0 for n in range(MAX_MAP_ITEMS + 1)}), "bad-message"),
        (pack([[[]] * 1000] * 60), "bad-message"),
        (bytes(MAX_HEADER_BYTES + 1), "too-large"),
    ],
)
def test_what_is_not_acceptable_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(data, MAX_HEADER_BYTES)
    assert caught.value.code == code and len(str(caught.value)) < 200


def test_the_refusal_has_the_layers_own_word() -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(b"\xc1", 100, "bad-record")
    assert caught.value.code == "bad-record"


def test_the_limits_themselves_are_allowed() -> None:
    assert unpack(nested(MAX_DEPTH), 100)
    assert len(unpack(pack([0] * MAX_ARRAY_ITEMS), 10_000)) == MAX_ARRAY_ITEMS
    assert len(unpack(pack({str(n): 0 for n in range(MAX_MAP_ITEMS)}), 10_000)) == MAX_MAP_ITEMS
    many = [[0] * 62] * 65  # 65 * 63 + 1 = MAX_VALUES values
    assert sum(map(len, many)) + 66 == MAX_VALUES and unpack(pack(many), 10_000)


def test_container_bytes_inside_texts_and_bytes_are_no_containers() -> None:
    value = (b"\x91" * 60_000, "x" * 1000, b"\xdd" * 300, 1.5, -1, 70_000)
    assert unpack(pack(value), MAX_HEADER_BYTES) == value


FLOODS: dict[str, bytes] = {
    "empty maps": pack([[{}] * 1000] * 60),
    "empty texts": b"\xdc\x04\x00" * 16 + b"\xa0" * 60_000,
    "arrays that promise": b"\xdd\x00\x00\x04\x00" * 16,
    "deep arrays that promise": b"\xdd\x00\x00\x04\x00" * 13_000,
    "maps that promise": b"\xde\x00\x40\xa1a" * 12_000,
    "pairs": pack([[1.5, 1.5]] * 1000),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_costs_little_memory_and_time(name: str) -> None:
    def read() -> Any:
        try:
            return unpack(FLOODS[name], MAX_HEADER_BYTES)
        except ProtocolError:
            return None

    read()
    tracemalloc.start()
    try:
        read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    before = time.process_time()
    read()
    assert time.process_time() - before < 0.5


def test_no_value_reaches_past_its_end() -> None:
    good = pack({"a": [1, 2.5, "text", b"bytes", None, {"b": [[], {}]}], "c": 70_000, "d": -5})
    assert unpack(good, 100) == unpack(memoryview(bytearray(good)), 100)
    for cut in range(len(good)):
        with pytest.raises(ProtocolError):
            unpack(good[:cut], 100)
    assert msgpack.unpackb(good) is not None
