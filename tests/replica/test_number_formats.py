"""What a shard is after it has travelled: near what it was, right in the mean, and never what a stranger made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from agora_protocol.codec_names import NUMBER_FORMAT_NAMES, NumberFormatName
from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId, RunId
from agora_protocol.limits import PART_ELEMENTS, QUANTISER_BLOCK
from agora_protocol.messages import KINDS, Averaged, Contribute, Message, Recalled, message_from_fields
from agora_protocol.tensors import WireTensor

from agora.replica.number_formats import MAX_EXPONENT, MIN_EXPONENT, NumberFormat, dither_fractions
from agora.replica.shard_codec import RoundConfig, RoundKind, Shard, ShardCodec

NAMES = ("int8", "bf16", "float32")
EDGES = [*range(1, 71), 127, 128, 129, 1023, 1024, 1025, PART_ELEMENTS - 1, PART_ELEMENTS]
LARGEST = float(torch.finfo(torch.float32).max) / 2
SMALLEST = 2.0**-149
DITHER = "a part"


def there_and_back(values: torch.Tensor, name: str, dither: str | None = None) -> torch.Tensor:
    codec = NumberFormat(name)
    return codec.decode(codec.encode(values, dither), len(values), dither)


def bound(values: torch.Tensor, name: str) -> torch.Tensor:
    """How far each element may come back from where it was."""
    if name == "float32":
        return torch.zeros(len(values), dtype=torch.float64)
    if name == "bf16":
        return values.double().abs() * 2.0**-8 + 2.0**-134
    peaks = [float(block.abs().max()) for block in values.double().split(QUANTISER_BLOCK)]
    least = [max(MIN_EXPONENT, math.floor(math.log2(peak / 126)) + 1 if peak else MIN_EXPONENT) for peak in peaks]
    steps = torch.tensor(least, dtype=torch.float64).exp2().repeat_interleave(QUANTISER_BLOCK)[: len(values)]
    return steps * (0.5 + 2.0**-16)


def assert_near(values: torch.Tensor, name: str, dither: str | None = None) -> None:
    back = there_and_back(values, name, dither)
    assert back.dtype == torch.float32 and back.shape == values.shape
    wrong = (back.double() - values.double()).abs()
    assert bool((wrong <= bound(values, name)).all()), (name, float((wrong - bound(values, name)).max()))


@pytest.mark.parametrize("dither", [None, DITHER], ids=["plain", "dithered"])
@pytest.mark.parametrize("name", NAMES)
def test_every_length_comes_back_within_the_quantisers_bound(name: str, dither: str | None) -> None:
    rng = np.random.default_rng(1)
    for numel in EDGES:
        scales = np.repeat(10.0 ** rng.uniform(-30, 30, -(-numel // QUANTISER_BLOCK)), QUANTISER_BLOCK)[:numel]
        values = torch.from_numpy((rng.standard_normal(numel) * scales).astype(np.float32))
        sent = NumberFormat(name).encode(values, dither)
        assert sent[0].shape == (numel,)
        assert_near(values, name, dither)


@pytest.mark.parametrize("dither", [None, DITHER], ids=["plain", "dithered"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, SMALLEST, 63 * SMALLEST, 2.0**-127, 1e-30, 126.0, -126.5, 1 / 3, 2.0**100, -1e31]
)
def test_constant_blocks_of_every_size_of_value(value: float, name: str, dither: str | None) -> None:
    assert_near(torch.full((QUANTISER_BLOCK + 3,), value), name, dither)
    spike = torch.zeros(3 * QUANTISER_BLOCK)
    spike[QUANTISER_BLOCK + 5] = value
    assert_near(spike, name, dither)


def test_a_block_of_zeros_is_not_a_block_of_noise() -> None:
    back = there_and_back(torch.zeros(200), "int8", DITHER)
    assert float(back.abs().max()) < 1e-36, "its step is the least there is, not 1"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [LARGEST, -LARGEST])
def test_the_largest_values_stay_finite_and_keep_their_sign(value: float, name: str) -> None:
    values = torch.full((70,), value)
    for dither in (None, DITHER):
        back = there_and_back(values, name, dither)
        assert bool(back.isfinite().all()) and bool((back.sign() == values.sign()).all())
        if name == "int8":
            assert float(back.abs().min()) > 126 * 2.0**MAX_EXPONENT, "saturated, no more"
        else:
            assert_near(values, name)


def test_quantisation_under_a_common_dither_is_right_in_the_mean() -> None:
    values = torch.linspace(-0.9, 1.1, QUANTISER_BLOCK)
    other = values + torch.linspace(0.001, 0.02, QUANTISER_BLOCK)
    draws = 1500
    both = [[there_and_back(it, "int8", f"draw {n}") for it in (values, other)] for n in range(draws)]
    ours, theirs = (torch.stack(column).double() for column in zip(*both, strict=True))
    step = 2.0**-6
    least = 5.0 * step / math.sqrt(12 * draws)  # five standard errors of a uniform over one step
    assert float((ours.mean(0) - values).abs().max()) < least
    wrong = (theirs - ours).mean(0) - (other - values)
    assert float(wrong.abs().max()) < 2.0 * least, "and so is the difference of two members"
    assert float((there_and_back(values, "int8") - values).abs().max()) > least, "which plain rounding is not"


def test_dithers_differ_by_label_and_are_the_same_for_the_same() -> None:
    one, same, other = (dither_fractions(label, 4096) for label in ("a\0b", "a\0b", "a\0c"))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(dither_fractions("a\0b", 13), one[:13]), "a shorter shard has the same first ones"
    assert float(one.abs().max()) < 0.5 and abs(float(one.mean())) < 5 * math.sqrt(1 / 12 / 4096)
    assert abs(float((one * other).mean())) < 5 / 12 / math.sqrt(4096), "and know nothing of each other"


@pytest.mark.parametrize("name", NAMES)
def test_equal_values_come_back_equal_and_nearly_equal_ones_on_one_lattice(name: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        values = torch.from_numpy(rng.standard_normal(300).astype(np.float32))
        assert torch.equal(there_and_back(values, name, DITHER), there_and_back(values.clone(), name, DITHER))
        if name == "int8":
            near = values * (1 + 1e-6)
            moved = there_and_back(near, name, DITHER) - there_and_back(values, name, DITHER)
            assert float((moved != 0).double().mean()) < 0.02, "hardly any element changes its level"


def test_an_answer_without_dither_has_zeros_for_zeros() -> None:
    delta = torch.zeros(100)
    delta[7] = 1.0
    back = there_and_back(delta, "int8")
    assert torch.equal(back[delta == 0], torch.zeros(99))


# --- what is refused


def wire(name: str, array: np.ndarray) -> WireTensor:
    return WireTensor(name, array.shape, memoryview(array.tobytes()))


def levels(numel: int = 70) -> WireTensor:
    return wire("int8", np.ones(numel, np.int8))


def exponents(*values: int) -> WireTensor:
    return wire("int8", np.array(values, np.int8))


F32, BF16 = (NumberFormat(name).encode(torch.ones(70)) for name in ("float32", "bf16"))


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("int8", []),
        ("int8", [levels()]),
        ("int8", [levels(), exponents(0, 0), exponents(0, 0)]),
        ("int8", F32),
        ("int8", [*F32, exponents(0, 0)]),
        ("int8", [levels(), wire("uint8", np.zeros(2, np.uint8))]),
        ("int8", [levels(), wire("float32", np.full(2, np.nan, np.float32))]),
        ("int8", [levels(), wire("float32", np.full(2, np.inf, np.float32))]),
        ("int8", [levels(69), exponents(0, 0)]),
        ("int8", [levels(71), exponents(0, 0)]),
        ("int8", [levels(), exponents(0)]),
        ("int8", [levels(), exponents(0, 0, 0)]),
        ("int8", [levels(), wire("int8", np.zeros((2, 1), np.int8))]),
        ("int8", [levels(), exponents(0, MAX_EXPONENT + 1)]),
        ("int8", [levels(), exponents(MIN_EXPONENT - 1, 0)]),
        ("int8", [levels(), exponents(127, -128)]),
        ("float32", []),
        ("float32", F32 + F32),
        ("float32", BF16),
        ("float32", [wire("float32", np.ones((70, 1), np.float32))]),
        ("float32", [wire("float32", np.ones(69, np.float32))]),
        ("bf16", []),
        ("bf16", BF16 + BF16),
        ("bf16", F32),
        ("bf16", [wire("float16", np.ones(70, np.float16))]),
    ],
)
def test_other_tensors_than_the_shard_has_are_refused(name: str, tensors: list[WireTensor]) -> None:
    for dither in (None, DITHER):
        with pytest.raises(ProtocolError) as caught:
            NumberFormat(name).decode(tensors, 70, dither)
        assert caught.value.code == "bad-tensor"


@pytest.mark.parametrize("name", ["float32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 35, 69])
def test_values_that_are_not_finite_are_refused_wherever_they_stand(name: str, bad: float, place: int) -> None:
    values = torch.ones(70)
    values[place] = bad
    with pytest.raises(ProtocolError) as caught:
        there_and_back(values, name)
    assert caught.value.code == "bad-tensor"


@pytest.mark.parametrize("name", NAMES)
def test_mutated_bytes_are_refused_or_decode_to_finite_values(name: str) -> None:
    rng = np.random.default_rng(3)
    codec, refused = NumberFormat(name), 0
    sent = codec.encode(torch.from_numpy(rng.standard_normal(130).astype(np.float32) * 1e-2), DITHER)
    for _ in range(1000):
        mutated = []
        for tensor in sent:
            data = np.frombuffer(tensor.data, np.uint8).copy()
            for _ in range(int(rng.integers(0, 6))):
                data[rng.integers(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))])
            mutated.append(WireTensor(tensor.dtype, tensor.shape, memoryview(data)))
        try:
            back = codec.decode(mutated, 130, DITHER)
        except ProtocolError:
            refused += 1
            continue
        assert back.shape == (130,) and bool(back.isfinite().all())
    assert refused > 0


def test_noise_as_an_int8_shard_is_finite_even_when_levels_and_exponents_are_at_their_ends() -> None:
    for level in (-128, 127):
        for exponent in (MIN_EXPONENT, MAX_EXPONENT):
            sent = [wire("int8", np.full(64, level, np.int8)), exponents(exponent)]
            assert bool(NumberFormat("int8").decode(sent, 64, DITHER).isfinite().all())


# --- who gives a mean, and when


@pytest.mark.parametrize("kind", ["gradient", "fragment"])
@pytest.mark.parametrize("name", NUMBER_FORMAT_NAMES)
def test_everybody_gets_the_same_bits_of_a_mean_whoever_gives_it_and_whenever(
    name: NumberFormatName, kind: RoundKind
) -> None:
    """The receiver of a mean sends in another format itself: what the bytes are is said beside them."""
    reducer, member = (ShardCodec(config(wire)) for wire in (name, "bf16" if name == "float32" else "float32"))
    part = Shard(0, kind, 30, 0, int(kind == "fragment"))
    first, second = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    average = reducer.average(part, [first, second], [1.0, 3.0], None)
    assert average is not None and average.encoded is not None and average.message.wire == name
    told = member.decode_mean(part, average.encoded.tensors, 1000, average.message)
    assert torch.equal(told.values, average.values), "the reducer too uses what the bytes decode to"
    assert told.encoded is not None
    passed_on = reducer.decode_mean(part, told.encoded.tensors, 1000, told.message)
    assert torch.equal(passed_on.values, average.values)


@pytest.mark.parametrize("kind", [Contribute, Averaged, Recalled])
@pytest.mark.parametrize("name", ["", "normal5", "INT8", "zip"])
def test_an_unknown_format_is_refused_with_its_message_before_any_tensor_is_looked_at(
    kind: type[Message], name: str
) -> None:
    known: dict[type[Message], Message] = {
        Contribute: Contribute(0, "slice", 3, 0, 1, 1.0, False, "normal2", 1000),
        Averaged: Averaged(2, 2, 8.0, True, "normal2"),
        Recalled: Recalled(2, 2, 8.0, "normal2"),
    }
    number, fields = next(number for number, message in KINDS.items() if message is kind), known[kind].to_fields()
    assert message_from_fields(number, fields) == known[kind]
    with pytest.raises(ProtocolError, match="wire is") as caught:
        message_from_fields(number, fields | {"wire": name})
    assert caught.value.code == "bad-message"


def config(wire: NumberFormatName) -> RoundConfig:
    return RoundConfig(PeerId("me"), RunId("0" * 64), "mean", 20.0, 1e9, gradient_wire=wire, fragment_wire=wire)
