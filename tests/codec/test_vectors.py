"""The vectors, against our codec and against a second decoder, written from the specification's words alone."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.tensors import WireTensor

from agora.codec import BoundaryCodec, gradient_dither_key

PINNED = json.loads((Path(__file__).parent / "vectors" / "boundaries.json").read_text(encoding="ascii"))
BLOCK = 64


def words(what: str, count: int) -> np.ndarray:
    key = np.frombuffer(hashlib.sha256(f"agora {what} 1\0{PINNED['seed']}".encode()).digest()[:16], "<u8")
    return np.random.Philox(key=key).random_raw(count)


def floats(text: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), "<f4").reshape(shape)


def level(packed: bytes, index: int, bits: int, count: int) -> int:
    found, low, begin = 0, 0, 0
    for width in (w for w in (8, 4, 2, 1) if bits & w):
        size = math.ceil(count * width / 8)
        byte = packed[begin + index % size]
        found |= (byte >> width * (index // size) & (1 << width) - 1) << low
        low, begin = low + width, begin + size
    return found


def rotation(size: int) -> np.ndarray:
    matrix = np.array([[1.0]])
    while len(matrix) < size:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix = matrix / math.sqrt(size)
    if len(matrix) != size:
        i, j = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
        matrix = np.where(j > 0, math.sqrt(2 / size) * np.cos(math.pi * (2 * i + 1) * j / (2 * size)), size**-0.5)
    return np.where(words("rotation", size) & np.uint64(1), -1.0, 1.0)[:, None] * matrix


def second_decoder(vector: dict[str, Any]) -> np.ndarray:
    if not vector["leg"].startswith("top"):
        return values_of(vector, vector["leg"], vector["shape"], bytes.fromhex(vector["wire"]))
    (columns, leg), data = vector["leg"][3:].split(":"), bytes.fromhex(vector["wire"])
    whole, split = np.zeros(vector["shape"]), 2 * int(columns)
    kept = np.frombuffer(data[:split], "<u2")
    whole[..., kept] = values_of(vector, leg, [*vector["shape"][:2], len(kept)], data[split:])
    return whole


def values_of(vector: dict[str, Any], leg: str, shape: list[int], data: bytes) -> np.ndarray:
    bits, (b, s, k) = int(leg[3]), shape
    count, blocks = b * s * k, math.ceil(k / BLOCK)
    scales = (np.frombuffer(data[: 2 * b * s * blocks], "<u2").astype("<u4") << 16).view("<f4")
    packed = data[2 * b * s * blocks :]
    dither = np.zeros(count)
    if vector["direction"] == "backward":
        drawn = words(f"gradient {PINNED['stage']} {PINNED['microbatch']}", math.ceil(count / 8))
        dither = drawn.astype("<u8").view(np.int8)[:count] / 256
    rows = np.empty((b * s, k))
    for index in range(count):
        row, column = divmod(index, k)
        middle = level(packed, index, bits, count) - 2 ** (bits - 1) + 0.5 - dither[index]
        rows[row, column] = middle * float(scales[row * blocks + column // BLOCK])
    if leg.endswith("h"):
        for begin in range(0, k, BLOCK):
            block = rows[:, begin : begin + BLOCK]
            rows[:, begin : begin + BLOCK] = block @ rotation(block.shape[1]).T
    return rows.reshape(b, s, k)


@pytest.mark.parametrize("vector", PINNED["boundaries"], ids=lambda v: f"{v['leg']}-{v['direction']}-{v['shape']}")
def test_the_bytes_mean_the_same_to_both_decoders(vector: dict[str, Any]) -> None:
    codec, direction, shape = BoundaryCodec(vector["leg"], PINNED["seed"]), vector["direction"], tuple(vector["shape"])
    key = gradient_dither_key(bytes.fromhex(PINNED["microbatch"]), PINNED["stage"]) if direction == "backward" else None
    data, pinned = bytes.fromhex(vector["wire"]), floats(vector["decoded"], vector["shape"])
    ours = codec.decode(WireTensor("uint8", (len(data),), memoryview(data)), shape, direction, key).numpy()
    bound = 1e-6 * float(np.abs(pinned).max())
    assert np.allclose(ours, pinned, rtol=0, atol=bound) and np.allclose(
        second_decoder(vector), pinned, rtol=0, atol=4 * bound
    )
    values = floats(vector["values"], vector["shape"])
    sent = np.where(pinned.any(axis=(0, 1)), values, 0) if vector["leg"].startswith("top") else values
    bits = int(vector["leg"].rpartition("int")[2].rstrip("h"))
    assert np.linalg.norm(pinned - sent) < 1.5 * 2**-bits * np.linalg.norm(sent) * 2
    if not vector["leg"].endswith("h"):
        assert bytes(codec.encode(torch.from_numpy(values.copy()), direction, key).data) == data
