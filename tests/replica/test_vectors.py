"""The vectors of section 12 of the specification: what we compute is what they hold, and what the text says.

The functions here follow the text with whole numbers and fractions alone, as a peer in another language would.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agora_protocol.limits import QUANTISER_BLOCK, SLICE_BLOCK

from tests.protocol.conftest import script

HERE = Path(__file__).parent / "vectors"
VECTORS: dict[str, Any] = json.loads((HERE / "averaging.json").read_text(encoding="ascii"))


def digest(*words: object) -> bytes:
    return hashlib.sha256("\0".join(map(str, words)).encode()).digest()


def floats(data: dict[str, str]) -> list[float]:
    return [it[0] for it in struct.iter_unpack("<f", bytes.fromhex(data["hex"]))]


def signed(data: dict[str, str]) -> list[int]:
    return [it[0] for it in struct.iter_unpack("<b", bytes.fromhex(data["hex"]))]


def philox(key: bytes) -> Iterator[int]:
    """The 64-bit words of Philox4x64-10 (Salmon et al., SC 2011) from counter 1 on."""
    mask, counter = 2**64 - 1, 0
    while True:
        counter += 1
        k0, k1 = struct.unpack("<2Q", key)
        a, b, c, d = counter & mask, counter >> 64, 0, 0
        for _ in range(10):
            high, low = divmod(0xD2E7470EE14C6C93 * a, 2**64)
            other_high, other_low = divmod(0xCA5A826395121157 * c, 2**64)
            a, b, c, d = other_high ^ b ^ k0, other_low, high ^ d ^ k1, low
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        yield from (a, b, c, d)


def fractions(named: dict[str, Any] | None, numel: int) -> list[Fraction]:
    if named is None:
        return [Fraction(0)] * numel
    key = digest("agora dither 1", *(named[it] for it in ("run", "stage", "what", "round", "part")))[:16]
    words = philox(key)
    data = b"".join(struct.pack("<Q", next(words)) for _ in range(-(-numel // 8)))
    return [Fraction(2 * byte + 1, 512) for (byte,) in struct.iter_unpack("<b", data[:numel])]


def unpacked(packed: bytes, count: int, bits: int) -> list[int]:
    """Levels, whose parts of 2 and 1 or of 4 bits lie together, as section 8 has it."""
    levels, shift = [0] * count, 0
    for width in {2: (2,), 3: (2, 1), 4: (4,)}[bits]:
        size = -(-count * width // 8)
        for at in range(count):
            levels[at] |= (packed[at % size] >> (at // size * width)) % (1 << width) << shift
        packed, shift = packed[size:], shift + width
    assert not packed
    return levels


@pytest.fixture(scope="module")
def make_script() -> ModuleType:
    return script(HERE / "make.py")


def test_the_script_makes_the_file_byte_for_byte(make_script: ModuleType) -> None:
    assert (HERE / "averaging.json").read_text(encoding="ascii") == make_script.build(), (
        "run tests/replica/vectors/make.py"
    )


def test_fragments_are_those_of_the_text() -> None:
    for vector in VECTORS["slices"]:
        blocks = vector["elements"] // SLICE_BLOCK
        count = math.ceil(1 / Fraction(str(vector["fraction"])))
        assert count == vector["count"]
        label = digest("agora slices 1", vector["seed"], vector["elements"])
        factor, offset = (int.from_bytes(label[at : at + 8], "big") % blocks for at in (0, 8))
        while math.gcd(factor, blocks) != 1:
            factor = (factor + 1) % blocks
        for number, expected in vector["blocks"].items():
            fragment_of = [(factor * block + offset) % blocks % count for block in range(blocks)]
            assert [block for block in range(blocks) if fragment_of[block] == int(number) % count] == expected


def test_shards_are_those_of_the_text() -> None:
    for vector in VECTORS["parts"]:
        size = next(size for size in (131_072, 262_144, 524_288) if vector["elements"] <= 64 * size or size == 524_288)
        ends = [*range(0, vector["elements"], size), vector["elements"]]
        assert vector["parts"] == [list(pair) for pair in zip(ends, ends[1:], strict=False)]


def test_reducers_are_those_of_the_text() -> None:
    for vector in VECTORS["owners"]:
        members = vector["members"]
        usual = statistics.median([it for it in members.values() if it] or [1.0])
        heights = []
        for peer, bandwidth in members.items():
            turns, slice_ = divmod(vector["round"], vector["slices"] or 1)
            turn = vector["round"] // 16 if vector["what"] == "gradient" else f"{slice_}.{turns // 16}"
            words = [vector["run"], vector["stage"], vector["what"], turn, vector["part"]]
            whole = int.from_bytes(digest("agora owner 1", *words, peer)[:8], "big")
            heights.append((-math.log((whole + 0.5) / 2**64) / (bandwidth or usual), peer))
        order = [peer for _, peer in sorted(heights)] + [None]
        assert [vector["first"], vector["second"]] == order[:2]


def test_int8_shards_are_those_of_the_text() -> None:
    dithered = 0
    for vector in VECTORS["int8"]:
        values, levels, exponents = floats(vector["values"]), signed(vector["levels"]), signed(vector["exponents"])
        assert len(levels) == len(values) and len(exponents) == -(-len(values) // QUANTISER_BLOCK)
        shifts = fractions(vector["dither"], len(values))
        dithered += vector["dither"] is not None
        for block, exponent in enumerate(exponents):
            peak = max(abs(Fraction(it)) for it in values[block * QUANTISER_BLOCK : (block + 1) * QUANTISER_BLOCK])
            least = next(e for e in range(-120, 101) if peak / 126 <= Fraction(2) ** e)
            assert exponent in (least, least + 1), "and a block of zeros has the least there is"
        for at, (value, level, shift) in enumerate(zip(values, levels, shifts, strict=True)):
            step = Fraction(2) ** exponents[at // QUANTISER_BLOCK]
            exact = Fraction(value) / step + shift
            assert level == round(exact) or abs(exact - level) < Fraction(1, 2) + Fraction(1, 2**17), at
            meant = float((level - shift) * step)
            assert floats(vector["decoded"])[at] == struct.unpack("<f", struct.pack("<f", meant))[0], at
    assert dithered == 2


def test_shards_in_few_bits_are_those_of_the_text() -> None:
    upper = {
        2: (0.4528, 1.5104),
        3: (0.2451, 0.7560, 1.3439, 2.1520),
        4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    }
    for vector in VECTORS["normal"]:
        bits = int(vector["wire"][-1])
        levels = [-level for level in reversed(upper[bits])] + list(upper[bits])
        scales, values = bytes.fromhex(vector["scales"]["hex"]), floats(vector["values"])
        exponent = struct.unpack("b", scales[:1])[0]
        assert len(scales) == 1 + -(-len(values) // QUANTISER_BLOCK)
        for at, number in enumerate(unpacked(bytes.fromhex(vector["levels"]["hex"]), len(values), bits)):
            code = scales[1 + at // QUANTISER_BLOCK]
            scale = 0.0 if code == 255 else 2.0 ** (exponent - code / 8)
            assert floats(vector["decoded"])[at] == pytest.approx(levels[number] * scale, rel=2e-7, abs=1e-44), at
            nearest = min(abs(values[at] - level * scale) for level in levels)
            assert abs(values[at] - levels[number] * scale) <= nearest + 1e-6 * scale, at


def test_ties_are_rounded_to_even() -> None:
    plain = VECTORS["int8"][-1]
    values, levels = (
        it[QUANTISER_BLOCK : 2 * QUANTISER_BLOCK] for it in (floats(plain["values"]), signed(plain["levels"]))
    )
    assert plain["dither"] is None and signed(plain["exponents"])[1] == 0
    assert values[1:] == [it + 0.5 for it in range(-31, 32)] and levels[1:] == [round(it) for it in values[1:]]
