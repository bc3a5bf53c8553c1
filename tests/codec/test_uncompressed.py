"""Boundaries and token ids survive the wire; what does not fit is refused with the protocol's word."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from agora_protocol.errors import ManifestError, ProtocolError
from agora_protocol.tensors import WireTensor

from agora.codec import (
    BoundaryCodec,
    decode_tokens,
    decode_uncompressed,
    encode_tokens,
    encode_uncompressed,
    is_all_finite,
)


def received(wire: WireTensor, *, shift: int = 0, readonly: bool = False) -> WireTensor:
    """The same tensor as it lies in a receiver's buffer, `shift` bytes from its start."""
    buffer = bytearray(shift) + bytearray(wire.data)
    data = memoryview(bytes(buffer) if readonly else buffer)[shift:]
    return WireTensor(wire.dtype, wire.shape, data)


def test_float32_is_exact_and_shares_memory_both_ways() -> None:
    tensor = torch.randn(2, 3, 5)
    wire = encode_uncompressed(tensor, "float32")
    assert (wire.dtype, wire.shape, wire.nbytes) == ("float32", (2, 3, 5), 120)
    decoded = decode_uncompressed(wire, "float32", shape=(2, 3, 5))
    assert torch.equal(decoded, tensor)
    assert decoded.data_ptr() == tensor.data_ptr()


def test_bf16_is_the_nearest_even_and_costs_two_bytes() -> None:
    tensor = torch.randn(4, 7)
    wire = encode_uncompressed(tensor, "bf16")
    assert wire.nbytes == 56
    decoded = decode_uncompressed(wire, "bf16")
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, tensor.bfloat16().float())
    assert torch.equal(decode_uncompressed(encode_uncompressed(tensor.bfloat16(), "bf16"), "bf16"), decoded)


def test_a_bf16_tensor_is_not_copied_to_be_encoded() -> None:
    tensor = torch.randn(8).bfloat16()
    wire = encode_uncompressed(tensor, "bf16")
    assert np.frombuffer(wire.data, np.uint8).ctypes.data == tensor.data_ptr()


def test_any_layout_and_a_tensor_that_requires_gradients_can_be_encoded() -> None:
    tensor = torch.randn(3, 4, requires_grad=True).transpose(0, 1)
    assert torch.equal(decode_uncompressed(encode_uncompressed(tensor, "float32"), "float32"), tensor.detach())


@pytest.mark.parametrize("name", ["bf16", "float32"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize("readonly", [False, True])
def test_read_only_and_unaligned_buffers_decode_without_a_warning(name: str, shift: int, readonly: bool) -> None:
    tensor = torch.randn(2, 9)
    wire = received(encode_uncompressed(tensor, name), shift=shift, readonly=readonly)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = decode_uncompressed(wire, name)
        decoded += 1
    assert torch.equal(decoded, tensor.to(torch.bfloat16 if name == "bf16" else torch.float32).float() + 1)
    if readonly:
        again = decode_uncompressed(wire, name)
        assert torch.equal(again + 1, decoded), "writing to the result must not reach read-only bytes"


def test_the_bytes_are_little_endian_and_row_major() -> None:
    wire = encode_uncompressed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "float32")
    assert bytes(wire.data) == np.array([1, 2, 3, 4], "<f4").tobytes()
    assert bytes(encode_tokens(torch.tensor([[258]])).data) == b"\x02\x01"
    assert bytes(encode_tokens(torch.tensor([[65538]])).data) == b"\x02\x00\x01\x00"


def test_an_unknown_codec_is_named_with_those_there_are() -> None:
    with pytest.raises(ManifestError, match="'fp4' is unknown; use one of bf16, float32, int8, int8h"):
        BoundaryCodec("fp4")


def test_another_dtype_or_shape_than_the_manifest_implies_is_refused() -> None:
    wire = encode_uncompressed(torch.zeros(2, 3), "bf16")
    with pytest.raises(ProtocolError, match="is bf16; this run sends float32") as refusal:
        decode_uncompressed(wire, "float32")
    assert refusal.value.code == "bad-tensor"
    with pytest.raises(ProtocolError, match=r"\(2, 3\); the manifest implies \(3, 2\)") as refusal:
        decode_uncompressed(wire, "bf16", shape=(3, 2))
    assert refusal.value.code == "bad-tensor"


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 255, "uint8"), (-1, 255, "int16"), (0, 256, "int16"), (-1, 32767, "int16"), (0, 32768, "int32")],
)
def test_tokens_round_trip_from_numpy_and_torch_in_the_narrowest_integers(low: int, high: int, dtype: str) -> None:
    tokens = np.array([[0, high, 7], [1, low, low]], np.int32)
    for given in (tokens, torch.from_numpy(tokens), torch.from_numpy(tokens).long()):
        wire = encode_tokens(given)
        assert wire.dtype == dtype
        decoded = decode_tokens(received(wire, shift=2), 40_000, shape=(2, 3))
        assert decoded.dtype == torch.int32
        assert np.array_equal(decoded.numpy(), tokens)


def test_token_ids_in_another_dtype_are_refused() -> None:
    for dtype, size in (("int64", 8), ("int8", 1), ("float32", 4)):
        with pytest.raises(ProtocolError, match=f"are {dtype}; they travel as uint8, int16, int32") as refusal:
            decode_tokens(WireTensor(dtype, (1, 1), memoryview(bytes(size))), 256)
        assert refusal.value.code == "bad-tensor"


@pytest.mark.parametrize("bad", [256, -2, 2**31 - 1])
def test_token_ids_that_the_model_does_not_have_are_refused(bad: int) -> None:
    wire = encode_tokens(torch.tensor([[0, bad, 1]]))
    with pytest.raises(ProtocolError, match="outside -1 to 255") as refusal:
        decode_tokens(wire, 256)
    assert refusal.value.code == "bad-tensor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_bad_value_anywhere_is_found(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 64, 1000):
        for place in {0, size // 2, size - 1}:
            tensor = torch.randn(size).to(dtype)
            assert is_all_finite(tensor)
            tensor[place] = bad
            assert not is_all_finite(tensor), (size, place)
    assert is_all_finite(torch.empty(0))
    assert is_all_finite(torch.full((3,), torch.finfo(dtype).max, dtype=dtype, requires_grad=True))
