"""The formats in which shards are sent: float32, int8 with dither, and 2 to 4 bits for normal values. Pure."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from agora_protocol.codec_names import NumberFormatName, packed_bytes
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from agora.codec import decode_uncompressed, encode_uncompressed, is_all_finite
from agora.codec.bit_packing import pack, unpack

# Bits of an element, by the name of each format that is sent with error feedback.
NORMAL_BITS: Final[Mapping[str, int]] = {"normal2": 2, "normal3": 3, "normal4": 4}
MAX_LEVEL: Final = 126.0  # largest magnitude of int8 before dither, so that it never clips
MIN_EXPONENT, MAX_EXPONENT = -120, 100
# Shards whose dither is cached, half a MiB to 2 MiB each: about as many as are being sent at the same time.
CACHED_SHARDS: Final = 32
# The positive half of the levels, by the number of bits; the negative half is its mirror image.
POSITIVE_LEVELS: Final = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
MAX_SCALE_EXPONENT: Final = 100  # bound of a vector's exponent e, -100 to 100; scales are at most 2^100
SCALES_PER_OCTAVE: Final = 8  # A block's scale is 2^(e - c / 8) with a whole code c: eight scales for each power of two
ZERO_SCALE: Final = 255  # the scale code of a block whose values are all decoded as 0
_SCALES: Final = torch.tensor(
    [2.0 ** (-code / SCALES_PER_OCTAVE) for code in range(ZERO_SCALE)] + [0.0], dtype=torch.float32
)

# int8 is meant for values on which replicas nearly agree. A block's scale is a power of two, so that nearly equal
# blocks are rounded to the same grid. Before rounding, every member adds the same pseudo-random fraction to an element,
# and decoding subtracts it again (subtractive dither, L. Roberts 1962). So the difference of two members' decoded
# values is unbiased, and exactly 0 where they agree.
#
# normal2 to normal4: a value x of a block of QUANTISER_BLOCK elements becomes the level nearest to x / scale, the scale
# being the block's root mean square. The levels have the least mean squared error for a normal distribution (Lloyd
# 1982; Max 1960). The error is not random: a sender of successive gradients therefore uses error feedback.


class NumberFormat:
    """Encodes a shard's float32 values as wire tensors, and decodes them, in the number format `name`.

    name: float32, bf16, int8 (with an exponent for each block, and optional dither), or normal2 to normal4 (2 to 4 bits
    with a scale for each block, see `encode_normal`).
    """

    def __init__(self, name: NumberFormatName) -> None:
        self.name = name

    def encode(self, values: Tensor, dither: str | None = None) -> list[WireTensor]:
        """Returns `values`, float32 [n] on the CPU and finite, as wire tensors; float32 ones share their memory.

        int8 clips magnitudes above about 2^107; normal2 to normal4 treat a block's root mean square as at most 2^100.
        dither: the label for dither_fractions, which int8 adds before it rounds; `decode` needs the same label.
        """
        if self.name in NORMAL_BITS:
            return encode_normal(values, NORMAL_BITS[self.name])
        if self.name != "int8":
            return [encode_uncompressed(values, self.name)]
        rows = _block_rows(values)
        buffer = rows.abs()
        peaks = buffer.amax(dim=1).div_(MAX_LEVEL).clamp_(2.0 ** (MIN_EXPONENT - 1), 2.0 ** (MAX_EXPONENT - 1))
        exponents = (peaks.numpy().view(np.int32) >> 23) - 126  # exponent of the next power of two above
        scaled = torch.mul(rows, _powers_of_two(-exponents), out=buffer).view(-1)[: len(values)]
        if dither is not None:
            scaled.add_(dither_fractions(dither, len(values)))
        levels = scaled.round_().clamp_(-127.0, 127.0).to(torch.int8)
        arrays = (levels.numpy(), exponents.astype(np.int8))
        return [WireTensor("int8", array.shape, array.view(np.uint8).data) for array in arrays]

    def decode(self, tensors: Sequence[WireTensor], numel: int, dither: str | None = None) -> Tensor:
        """Returns what `encode` encoded, as the format rounds it: float32 [numel], finite, the same at every receiver.

        Raises ProtocolError ("bad-tensor") for tensors of another form, and for values that are not finite.
        """
        if self.name in NORMAL_BITS:
            return decode_normal(list(tensors), numel, NORMAL_BITS[self.name])
        if self.name != "int8":
            if len(tensors) != 1:
                raise ProtocolError("bad-tensor", f"A shard is one tensor, not {len(tensors)}.")
            values = decode_uncompressed(tensors[0], self.name, shape=(numel,))
            if not is_all_finite(values):
                raise ProtocolError("bad-tensor", "A shard holds values that are not finite.")
            return values
        if len(tensors) != 2:
            raise ProtocolError("bad-tensor", "An int8 shard comes with its exponents.")
        levels = torch.from_numpy(_from_int8(tensors[0], numel).astype(np.float32))
        if dither is not None:
            levels.sub_(dither_fractions(dither, numel))
        exponents = _from_int8(tensors[1], -(-numel // QUANTISER_BLOCK))
        if exponents.min(initial=0) < MIN_EXPONENT or exponents.max(initial=0) > MAX_EXPONENT:
            raise ProtocolError("bad-tensor", f"An exponent is not from {MIN_EXPONENT} to {MAX_EXPONENT}.")
        return _block_rows(levels).mul_(_powers_of_two(exponents.astype(np.int32))).view(-1)[:numel]


def _block_rows(values: Tensor) -> Tensor:
    missing = -len(values) % QUANTISER_BLOCK
    return (pad(values, (0, missing)) if missing else values).view(-1, QUANTISER_BLOCK)


def _powers_of_two(exponents: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(((exponents + 127) << 23).view(np.float32))[:, None]


def _from_int8(wire: WireTensor, numel: int) -> NDArray[np.int8]:
    if wire.dtype != "int8" or wire.shape != (numel,):
        raise ProtocolError("bad-tensor", f"A shard's tensor is {wire.dtype} {wire.shape}, not int8 ({numel},).")
    return np.frombuffer(wire.data, np.int8)


@functools.lru_cache(maxsize=CACHED_SHARDS)
def dither_fractions(label: str, numel: int) -> Tensor:
    """Returns pseudo-random fractions that depend on `label` alone: float32 [numel] in (-0.5, 0.5); do not change them.

    Each is (byte + 0.5) / 256, with signed bytes from a Philox4x64-10 generator whose key is a hash of the label.
    """
    key = hashlib.sha256(f"agora dither 1\0{label}".encode()).digest()[:16]
    words = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(-(-numel // 8))
    signed = torch.from_numpy(words.astype("<u8", copy=False).view(np.int8)[:numel])
    return signed.to(torch.float32).add_(0.5).mul_(1.0 / 256.0)


def encode_normal(values: Tensor, bits: int) -> list[WireTensor]:
    """Returns `values`, float32 [n] on the CPU and finite, in `bits` (2 to 4) bits as two wire tensors: scales, levels.

    scales: uint8 [1 + blocks]: first the exponent e of the largest scale (as int8), then for each block the code c of
    its scale 2^(e - c / 8). levels: uint8 [packed_bytes(n, bits)]. Blocks whose values are about 2^32 times smaller
    than the largest block's are decoded as 0.
    """
    blocks = -(-len(values) // QUANTISER_BLOCK)
    rows = pad(values, (0, blocks * QUANTISER_BLOCK - len(values))).view(blocks, QUANTISER_BLOCK)
    sizes = torch.linalg.vector_norm(rows, dim=1) / QUANTISER_BLOCK**0.5
    exponent, codes = _scale_codes(sizes)
    scales = (_SCALES[codes.long()] * 2.0**exponent).unsqueeze(1)
    scaled = rows / scales.clamp_min(torch.finfo(torch.float32).tiny)
    levels = torch.zeros(scaled.shape, dtype=torch.uint8)
    for edge in _edges(bits):  # comparing with each of few edges is many times as fast as torch.bucketize
        levels += (scaled > edge).view(torch.uint8)
    packed = pack(levels.view(-1)[: len(values)].clone(), bits)
    header = np.concatenate((np.array([exponent], np.int8).view(np.uint8), codes.numpy()))
    return [WireTensor("uint8", array.shape, array.data) for array in (header, packed.numpy())]


def decode_normal(tensors: list[WireTensor], numel: int, bits: int) -> Tensor:
    """Returns what `encode_normal` encoded, rounded to its levels, see NumberFormat.decode."""
    blocks = -(-numel // QUANTISER_BLOCK)
    shapes = [(1 + blocks,), (packed_bytes(numel, bits),)]
    if [(tensor.dtype, tensor.shape) for tensor in tensors] != [("uint8", shape) for shape in shapes]:
        raise ProtocolError("bad-tensor", f"A shard in {bits} bits is two uint8 tensors, {shapes[0]} and {shapes[1]}.")
    header = np.frombuffer(tensors[0].data, np.uint8)
    exponent = int(header[:1].view(np.int8)[0])
    if abs(exponent) > MAX_SCALE_EXPONENT:
        raise ProtocolError("bad-tensor", f"An exponent is not from {-MAX_SCALE_EXPONENT} to {MAX_SCALE_EXPONENT}.")
    packed = torch.from_numpy(np.frombuffer(tensors[1].data, np.uint8).copy())
    levels = np.take(_levels(bits), unpack(packed, numel, bits).numpy())
    rows = pad(torch.from_numpy(levels), (0, blocks * QUANTISER_BLOCK - numel)).view(blocks, QUANTISER_BLOCK)
    scales = _SCALES[torch.from_numpy(header[1:].astype(np.int64))] * 2.0**exponent
    return rows.mul_(scales.unsqueeze(1)).view(-1)[:numel]


def _scale_codes(sizes: Tensor) -> tuple[int, Tensor]:
    sizes = sizes.clamp(max=2.0**MAX_SCALE_EXPONENT)
    largest = float(sizes.max()) if len(sizes) else 0.0
    if largest == 0.0:
        return -MAX_SCALE_EXPONENT, torch.full((len(sizes),), ZERO_SCALE, dtype=torch.uint8)
    exponent = max(math.ceil(math.log2(largest)), -MAX_SCALE_EXPONENT)
    codes = (SCALES_PER_OCTAVE * (exponent - sizes.log2())).round_().clamp_(0, ZERO_SCALE)  # log2(0) gives ZERO_SCALE
    return exponent, codes.to(torch.uint8)


def _levels(bits: int) -> NDArray[np.float32]:
    upper = POSITIVE_LEVELS[bits]
    return np.array([-level for level in reversed(upper)] + list(upper), np.float32)


def _edges(bits: int) -> list[float]:
    levels = _levels(bits)
    return [float(edge) for edge in (levels[1:] + levels[:-1]) / 2]
