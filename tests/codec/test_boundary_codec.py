"""Quantised boundaries: how far off they may be, that gradients are right in the mean, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from agora_protocol.codec_names import DIRECTION_CODEC_NAMES, parse_codec
from agora_protocol.errors import ManifestError, ProtocolError
from agora_protocol.manifest import preset
from agora_protocol.tensors import WireTensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agora.codec import BoundaryCodec, gradient_dither_key
from agora.codec.bit_packing import pack, unpack
from agora.codec.seeded_random import rotation_matrix
from agora.codec.transfer import CPU

QUANTISED = [leg for leg in DIRECTION_CODEC_NAMES if leg.startswith("int")]
PLAIN = [leg for leg in QUANTISED if not leg.endswith("h")]
KEY = gradient_dither_key(b"a microbatch 16b", 3)
SEED = 11
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 200))


def normal(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(codec: BoundaryCodec, tensor: Tensor, key: str | None = None) -> Tensor:
    wire = codec.encode(tensor, "backward" if key else "forward", key)
    received = WireTensor(wire.dtype, wire.shape, memoryview(bytes(wire.data)))
    return codec.decode(received, tuple(tensor.shape), "backward" if key else "forward", key)


def peaks(tensor: Tensor) -> Tensor:
    """Of each value, the largest magnitude in its block."""
    return torch.cat([b.abs().amax(-1, keepdim=True).expand_as(b) for b in torch.split(tensor, 64, -1)], -1)


def relative(found: Tensor, true: Tensor) -> float:
    return float(torch.linalg.vector_norm((found - true).double()) / torch.linalg.vector_norm(true.double()))


@settings(max_examples=60)
@given(st.sampled_from(PLAIN), SHAPES, st.booleans(), st.integers(0, 99), st.floats(-20, 20))
def test_no_value_is_further_off_than_its_level_is_wide(
    name: str, shape: tuple[int, int, int], dithered: bool, seed: int, size: float
) -> None:
    tensor = normal(shape, seed) * 10**size
    codec = BoundaryCodec(name, SEED)
    decoded = there_and_back(codec, tensor, KEY if dithered else None)
    levels = 2 ** parse_codec(name).forward.bits - dithered
    allowed = peaks(tensor) * 1.01 / levels
    assert decoded.shape == tensor.shape and bool(((decoded - tensor).abs() <= allowed).all())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("k", [1, 7, 32, 63, 64, 65, 96, 128, 130])
def test_the_wire_has_the_bytes_that_the_name_implies(name: str, k: int) -> None:
    leg, tensor = parse_codec(name).forward, normal((2, 3, k))
    wire = BoundaryCodec(name).encode(tensor, "forward")
    assert (wire.dtype, wire.shape) == leg.wire_format((2, 3, k))
    assert parse_codec(name).bytes_per_token(k, "forward") == 2 * math.ceil(k / 64) + k * leg.bits / 8
    assert there_and_back(BoundaryCodec(name), tensor).shape == tensor.shape


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1001])
def test_packing_loses_nothing(bits: int, count: int) -> None:
    levels = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = pack(levels.clone(), bits)
    assert len(packed) <= math.ceil(count * bits / 8) + 2 and torch.equal(unpack(packed, count, bits), levels)


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.0065), ("int6", 0.026), ("int4", 0.105), ("int3", 0.22)])
@pytest.mark.parametrize("turned", ["", "h"])
def test_the_error_of_normal_values_is_what_so_many_bits_give(name: str, turned: str, bound: float) -> None:
    tensor = normal((4, 64, 128))
    codec = BoundaryCodec(name + turned, SEED)
    assert relative(there_and_back(codec, tensor), tensor) < bound
    assert relative(there_and_back(codec, tensor, KEY), tensor) < 1.15 * bound


def test_a_rotation_takes_the_harm_from_outliers() -> None:
    tensor = normal((4, 64, 128))
    tensor[..., 5] *= 50
    plain, turned = (
        relative(there_and_back(BoundaryCodec(n, SEED), tensor)[..., :5], tensor[..., :5]) for n in ("int4", "int4h")
    )
    assert turned < 0.5 * plain


@pytest.mark.parametrize("size", [1, 2, 3, 20, 64])
def test_the_rotation_is_orthogonal_and_the_runs_own(size: int) -> None:
    matrix, inverse = (rotation_matrix(size, SEED, inverse, CPU) for inverse in (False, True))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size), atol=1e-5) and torch.equal(inverse, matrix.T)
    assert size < 20 or not torch.equal(matrix, rotation_matrix(size, SEED + 1, False, CPU))


@pytest.mark.parametrize("name", ["int8", "int4", "int4h", "int3", "int2"])
def test_gradients_are_right_in_the_mean(name: str) -> None:
    tensor, codec = normal((2, 8, 96)), BoundaryCodec(name, SEED)
    draws = 400
    total = torch.zeros_like(tensor)
    for number in range(draws):
        total += there_and_back(codec, tensor, gradient_dither_key(number.to_bytes(16, "big"), 1))
    error = there_and_back(codec, tensor, KEY) - tensor
    noise = float(error.square().mean().sqrt())
    remaining = total / draws - tensor
    assert float(remaining.square().mean().sqrt()) < 1.15 * noise / draws**0.5, "the error of a mean of so many draws"
    assert abs(float((remaining * tensor).mean())) < 4 * noise / (draws * tensor.numel()) ** 0.5


def test_a_gradient_is_reproducible_and_its_dither_its_own() -> None:
    tensor, codec = normal((2, 4, 64)), BoundaryCodec("bf16/int4", SEED)
    once, again = (bytes(codec.encode(tensor, "backward", KEY).data) for _ in range(2))
    assert once == again
    for key in (gradient_dither_key(b"a microbatch 16b", 4), gradient_dither_key(b"b microbatch 16b", 3)):
        assert bytes(codec.encode(tensor, "backward", key).data) != once
    assert bytes(BoundaryCodec("int4", SEED + 1).encode(tensor, "backward", KEY).data) != once


def test_each_direction_has_its_own_leg() -> None:
    codec, tensor = BoundaryCodec("int6/int8", SEED), normal((2, 4, 64))
    spec = parse_codec(codec.name)
    assert (spec.bytes_per_token(64, "forward"), spec.bytes_per_token(64, "backward")) == (50, 66)
    assert codec.encode(tensor, "forward").nbytes == 8 * 50 and codec.encode(tensor, "backward", KEY).nbytes == 8 * 66
    mixed = BoundaryCodec("float32/bf16")
    assert torch.equal(there_and_back(mixed, tensor), tensor)
    assert torch.equal(there_and_back(mixed, tensor, KEY), tensor.bfloat16().float())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("fill", [0.0, 1e-45, 1e-38, -1e-25, 1e30, 3e37, -3e37])
def test_extreme_values_stay_finite_and_zeros_stay_zeros(name: str, key: str | None, fill: float) -> None:
    for tensor in (torch.full((1, 3, 70), fill), normal((1, 3, 70)).clamp(-1, 1) * fill):
        decoded = there_and_back(BoundaryCodec(name, SEED), tensor, key)
        assert bool(decoded.isfinite().all())
        if abs(fill) < 1e-37:
            assert not decoded.any()
        elif abs(fill) < 1e31:
            assert relative(decoded, tensor) < 0.75


def test_a_tiny_block_beside_a_large_one_keeps_its_values() -> None:
    tensor = normal((1, 2, 128))
    tensor[..., 64:] *= 1e-12
    decoded = there_and_back(BoundaryCodec("int8"), tensor)
    assert relative(decoded[..., 64:], tensor[..., 64:]) < 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_not_finite_is_refused_by_the_receiver(name: str, bad: float) -> None:
    tensor = normal((1, 2, 70))
    tensor[0, 1, 3] = bad
    with pytest.raises(ProtocolError, match="Scales range") as refusal:
        there_and_back(BoundaryCodec(name), tensor)
    assert refusal.value.code == "bad-tensor"


@settings(max_examples=200)
@given(st.sampled_from([*QUANTISED, "top1:int6", "top1:int3"]), SHAPES, st.data(), st.booleans())
def test_mutated_bytes_give_finite_values_or_the_protocols_word(
    name: str, shape: tuple[int, int, int], data: st.DataObject, dithered: bool
) -> None:
    codec, key = BoundaryCodec(name, SEED), KEY if dithered else None
    wire = codec.encode(normal(shape), "forward", key)
    mutated = bytearray(wire.data)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(WireTensor(wire.dtype, wire.shape, memoryview(mutated)), shape, "forward", key)
    except ProtocolError as refusal:
        assert refusal.code == "bad-tensor"
    else:
        assert decoded.shape == shape and bool(decoded.isfinite().all())


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, 2.0**101])
def test_absurd_scales_are_refused(scale: float) -> None:
    codec = BoundaryCodec("int4")
    wire = codec.encode(normal((1, 2, 64)), "forward")
    data = bytearray(wire.data)
    data[:2] = torch.tensor([scale]).bfloat16().view(torch.uint8).numpy().tobytes()
    with pytest.raises(ProtocolError, match="from 0 to 2\\^100") as refusal:
        codec.decode(WireTensor(wire.dtype, wire.shape, memoryview(data)), (1, 2, 64), "forward")
    assert refusal.value.code == "bad-tensor"


def test_another_dtype_shape_or_leg_is_refused_before_it_is_decoded() -> None:
    codec, shape = BoundaryCodec("int6/int8"), (2, 3, 64)
    good = codec.encode(normal(shape), "forward")
    for wire in (
        codec.encode(normal(shape), "backward", KEY),
        codec.encode(normal((2, 4, 64)), "forward"),
        WireTensor("uint8", (1, len(good.data)), good.data),
        WireTensor("int8", good.shape, good.data),
        BoundaryCodec("float32").encode(normal(shape), "forward"),
    ):
        with pytest.raises(ProtocolError, match=r"int6 makes uint8 \(300,\) of \(2, 3, 64\)") as refusal:
            codec.decode(wire, shape, "forward")
        assert refusal.value.code == "bad-tensor"


@pytest.mark.parametrize(
    "name",
    [
        "int9",
        "int1",
        "int8/",
        "/int8",
        "int8/int8/int8",
        "top25%",
        "INT8",
        "",
        "int8hh",
        "top:int8",
        "top0:int8",
        "top8:",
        "top8",
        "int8/top8:int8",
        "top8:top8:int8",
        "top8:int8h",
        "top8:int8/int8h",
    ],
)
def test_unknown_names_are_refused_alike_by_codec_and_manifest(name: str) -> None:
    for attempt in (lambda: BoundaryCodec(name), lambda: preset("tiny", boundary={"codec": name})):
        with pytest.raises(ManifestError, match="is unknown; .*use one of bf16, float32, int8"):
            attempt()


@pytest.mark.parametrize("name", [*DIRECTION_CODEC_NAMES, "int6/int8", "bf16/int4h", "top7:int8", "top20:int6/int3"])
def test_known_names_are_known_to_both(name: str) -> None:
    assert preset("tiny", boundary={"codec": name}).boundary.codec == BoundaryCodec(name).name == name


def test_any_layout_and_dtype_can_be_encoded() -> None:
    codec, tensor = BoundaryCodec("int8"), normal((64, 3, 2)).requires_grad_()
    strided = tensor.permute(2, 1, 0)
    assert bytes(codec.encode(strided, "forward").data) == bytes(codec.encode(strided.contiguous(), "forward").data)
    assert codec.encode(tensor.bfloat16(), "forward").dtype == "uint8"


@pytest.mark.parametrize("legs", ["float32", "bf16", "int6/int3", "int2"])
def test_the_strongest_columns_cross_and_the_gradient_comes_back_for_them(legs: str) -> None:
    codec, plain = BoundaryCodec(f"top3:{legs}", SEED), BoundaryCodec(legs, SEED)
    tensor, gradient, strong = normal((2, 8, 40)), normal((2, 8, 40), 1), [4, 17, 39]
    tensor[..., strong] *= 10
    entry = there_and_back(codec, tensor)
    assert sorted(set(entry.nonzero()[:, 2].tolist())) == strong
    assert torch.equal(entry[..., strong], there_and_back(plain, tensor[..., strong]))
    wire = codec.encode(gradient, "backward", KEY, entry)
    assert wire.nbytes == 6 + plain.encode(gradient[..., strong], "backward", KEY).nbytes
    returned = codec.decode(wire, (2, 8, 40), "backward", KEY)
    assert torch.equal(returned[..., strong], there_and_back(plain, gradient[..., strong], KEY))
    assert not returned[..., [n for n in range(40) if n not in strong]].any()


def test_columns_of_zeros_change_nothing_for_the_others() -> None:
    codec, tensor, gradient = BoundaryCodec("top3:float32/bf16"), torch.zeros(1, 4, 8), torch.ones(1, 4, 8)
    tensor[..., 5] = normal((1, 4))
    entry = there_and_back(codec, tensor)
    assert set(entry.nonzero()[:, 2].tolist()) == {5}
    returned = codec.decode(codec.encode(gradient, "backward", KEY, entry), (1, 4, 8), "backward", KEY)
    assert bool((returned[..., 5] == 1).all()) and int((returned[0, 0] == 1).sum()) == 3


@pytest.mark.parametrize("numbers", [(3, 2), (2, 2), (1, 8), (65535, 0)])
def test_columns_that_do_not_ascend_or_do_not_exist_are_refused(numbers: tuple[int, int]) -> None:
    codec = BoundaryCodec("top2:bf16")
    wire = codec.encode(normal((1, 2, 8)), "forward")
    data = np.array(numbers, "<u2").tobytes() + bytes(wire.data[4:])
    with pytest.raises(ProtocolError, match="do not ascend, or reach 8") as refusal:
        codec.decode(WireTensor("uint8", wire.shape, memoryview(data)), (1, 2, 8), "forward")
    assert refusal.value.code == "bad-tensor"


def test_a_sparse_boundary_of_another_size_is_refused_by_its_name() -> None:
    codec = BoundaryCodec("top2:int6/bf16")
    wire = codec.encode(normal((1, 2, 8)), "backward")
    assert (
        (wire.dtype, wire.shape) == parse_codec("top2:int6/bf16").wire_format((1, 2, 8), "backward") == ("uint8", (12,))
    )
    with pytest.raises(ProtocolError, match=r"top2:int6 makes uint8 \(11,\) of \(1, 2, 8\)"):
        codec.decode(wire, (1, 2, 8), "forward")


def test_all_columns_of_a_boundary_are_no_sparse_one() -> None:
    assert preset("tiny", model={"subspace": 64}, boundary={"codec": "top63:int8"}).boundary.codec == "top63:int8"
    for columns in (64, 65, 99999):
        with pytest.raises(ManifestError, match=f"keeps {columns} columns of boundaries that have 64; use fewer"):
            preset("tiny", model={"subspace": 64}, boundary={"codec": f"top{columns}:int8"})


def test_a_sparse_boundarys_bytes_count_for_the_largest_payload() -> None:
    large = {"schedule": {"microbatch": 4096}, "optimizer": {"target_tokens": 4096 * 128}}
    tokens = 4 * 4096 * 129
    sparse = preset("tiny", **large, boundary={"codec": "top8:int8/bf16"})
    assert sparse.max_payload_bytes - tokens == 2 * 8 + 2 * 8 * 4096 * 128


@pytest.mark.parametrize("name", ["bf16", "float32", "top3:bf16"])
def test_the_bytes_tell_whether_all_values_are_finite(name: str) -> None:
    codec, shape = BoundaryCodec(name), (1, 2, 5)
    for value in (1.0, -1.0, torch.finfo(torch.bfloat16).max, 1e-40, math.nan, math.inf, -math.inf):
        for place in range(10):
            values = normal(shape)
            values.view(-1)[place] = value
            boundary = torch.zeros(shape)
            boundary.view(-1)[place] = 1.0  # its column is among those sent
            wire = codec.encode(values, "forward", boundary=boundary)
            unaligned = WireTensor(wire.dtype, wire.shape, memoryview(b"x" + bytes(wire.data))[1:])
            for received in (wire, unaligned):
                assert codec.has_finite_values(received, "forward") is math.isfinite(value)
                decoded = codec.decode(received, shape, "forward")
                assert bool(decoded.isfinite().all()) is math.isfinite(value)


@pytest.mark.parametrize("name", ["int8", "int5h/int2h", "top3:int8"])
def test_quantised_values_are_finite_whatever_was_encoded(name: str) -> None:
    codec, shape = BoundaryCodec(name), (1, 2, 5)
    wire = codec.encode(torch.full(shape, 2.0**120), "forward")
    assert codec.has_finite_values(wire, "forward") and bool(codec.decode(wire, shape, "forward").isfinite().all())
