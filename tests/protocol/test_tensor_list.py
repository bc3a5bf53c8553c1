"""The tensor list of a base model: one byte form, bounded before it is built, and the bits beside it."""

from __future__ import annotations

import hashlib
import math
import time
import tracemalloc
from typing import Any

import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import MAX_BASE_TENSORS, MAX_DIMENSION, MAX_TENSOR_LIST_BYTES, STATE_CHUNK_BYTES
from agora_protocol.packing import pack
from agora_protocol.tensor_list import (
    LISTED_DTYPES,
    ListedTensor,
    TensorList,
    bits_to_held,
    can_be_listed,
    count_pieces,
    held_to_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def tensor(name: str, dtype: str = "F32", shape: tuple[int, ...] = (4,)) -> ListedTensor:
    pieces = count_pieces(LISTED_DTYPES[dtype] * math.prod(shape))
    return ListedTensor(name, dtype, shape, hashlib.sha256(name.encode()).digest() * pieces)


TENSORS = st.builds(
    tensor,
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=256),
    st.sampled_from([*LISTED_DTYPES]),
    st.lists(st.integers(1, 40), max_size=6).map(tuple).filter(lambda shape: math.prod(shape) < 10**7),
)


@settings(max_examples=60)
@given(st.lists(TENSORS, min_size=1, max_size=8, unique_by=lambda it: it.name))
def test_lists(tensors: list[ListedTensor]) -> None:
    made = TensorList.of(tensors)
    assert TensorList.from_bytes(made.to_bytes()) == made == TensorList.of(reversed(tensors))
    assert made.digest == hashlib.sha256(made.to_bytes()).hexdigest()
    for it in made.tensors:
        assert sum(it.piece_bytes(piece) for piece in range(it.piece_count)) == it.nbytes


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_bits(case: tuple[int, set[int]]) -> None:
    count, held = case
    bits = held_to_bits(held, count)
    assert len(bits) == -(-count // 8) and bits_to_held(bits, count) == held


def test_the_lowest_bit_of_a_byte_comes_first() -> None:
    assert held_to_bits({0, 3, 9}, 11) == b"\x09\x02"
    for bits in (b"", b"\x09", b"\x09\x02\x00", b"\x00\x08"):
        with pytest.raises(ProtocolError, match="bits|bit is set"):
            bits_to_held(bits, 11)


def test_pieces_end_with_their_tensor() -> None:
    exact, more = tensor("a", "F32", (STATE_CHUNK_BYTES // 4,)), tensor("b", "BF16", (STATE_CHUNK_BYTES // 2 + 1,))
    assert [exact.piece_count, exact.piece_bytes(0)] == [1, STATE_CHUNK_BYTES]
    assert [more.piece_count, more.piece_bytes(0), more.piece_bytes(1)] == [2, STATE_CHUNK_BYTES, 2]
    data = bytes(8)
    known = ListedTensor("c", "F16", (4,), hashlib.sha256(data).digest())
    assert known.is_piece(0, data) and known.is_piece(0, memoryview(data)) and not known.is_piece(0, bytes(7))


def test_the_most_tensors_fit_and_one_more_does_not() -> None:
    most = TensorList.of(tensor(f"model.layers.{n}.weight") for n in range(MAX_BASE_TENSORS))
    data = most.to_bytes()
    began = time.process_time()
    assert TensorList.from_bytes(data) == most
    assert time.process_time() - began < 2.0
    with pytest.raises(ProtocolError):
        TensorList.of([*most.tensors, tensor("zzz")])


def test_the_largest_tensors_of_today_fit_and_more_than_the_limit_does_not() -> None:
    TensorList.of([tensor("embed", "BF16", (262_144, 16_384))])
    pieces = MAX_TENSOR_LIST_BYTES // 32
    with pytest.raises(ProtocolError) as caught:
        TensorList.of([tensor("huge", "F32", (pieces, STATE_CHUNK_BYTES // 4))])
    assert caught.value.code == "too-large"


def flood(rows: Any) -> bytes:
    return pack([1, rows])


@pytest.mark.parametrize(
    "data",
    [
        flood([[]] * MAX_BASE_TENSORS),
        flood([[[[[]]]]] * MAX_BASE_TENSORS),
        flood([["a", "F32", [MAX_DIMENSION] * 6, b""]] * MAX_BASE_TENSORS),
        flood([["a", "F32", [1] * MAX_BASE_TENSORS, bytes(32)]] * 200),
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\xdc\x40\x00" + b"\xdc\x40\x00" * 50_000,
        b"\x91" * 1_000_000,
        bytes(MAX_TENSOR_LIST_BYTES + 1),
    ],
)
def test_a_flood_costs_little_memory_and_time(data: bytes) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ProtocolError):
            TensorList.from_bytes(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * MAX_TENSOR_LIST_BYTES and time.process_time() - began < 10.0


def test_what_can_be_listed() -> None:
    assert can_be_listed("model.embed_tokens.weight", "BF16", (3, 4)) and can_be_listed("scalar", "F16", ())
    for name, dtype, shape in (
        ("", "F32", (1,)),
        ("a b", "F32", (1,)),
        ("\u00e9", "F32", (1,)),
        ("x" * 257, "F32", (1,)),
        ("a", "I8", (1,)),
        ("a", "F32", (0,)),
        ("a", "F32", (True,)),
        ("a", "F32", (MAX_DIMENSION + 1,)),
        ("a", "F32", (1,) * 7),
    ):
        assert not can_be_listed(name, dtype, shape)
