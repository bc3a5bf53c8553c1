"""Quantises float32 vectors to 2, 3 or 4 bits: levels for normally distributed values, times a scale for each block.

A value x of a block of QUANTISER_BLOCK elements becomes the level nearest to x / scale, the scale being the block's
root mean square. The levels have the least mean squared error for a normal distribution (Lloyd 1982; Max 1960). The
error is not random: a sender of successive gradients therefore uses error feedback (see contributions).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from agora_protocol.codec_names import packed_bytes
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from agora.codec.bit_packing import pack, unpack

# The positive half of the levels, by the number of bits; the negative half is its mirror image.
POSITIVE_LEVELS: Final = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
MAX_EXPONENT: Final = 100  # bound of a vector's exponent e, -100 to 100; scales are at most 2^100
SCALES_PER_OCTAVE: Final = 8  # A block's scale is 2^(e - c / 8) with a whole code c: eight scales for each power of two
ZERO_SCALE: Final = 255  # the scale code of a block whose values are all decoded as 0
_SCALES: Final = torch.tensor(
    [2.0 ** (-code / SCALES_PER_OCTAVE) for code in range(ZERO_SCALE)] + [0.0], dtype=torch.float32
)


def quantise(values: Tensor, bits: int) -> list[WireTensor]:
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


def dequantise(tensors: list[WireTensor], numel: int, bits: int) -> Tensor:
    """Returns what `quantise` encoded, rounded to its levels: float32 [numel], finite, the same bits at every receiver.

    Raises ProtocolError ("bad-tensor") for another count, type or shape of tensors, or an exponent out of range.
    """
    blocks = -(-numel // QUANTISER_BLOCK)
    shapes = [(1 + blocks,), (packed_bytes(numel, bits),)]
    if [(tensor.dtype, tensor.shape) for tensor in tensors] != [("uint8", shape) for shape in shapes]:
        raise ProtocolError("bad-tensor", f"a part in {bits} bits is two uint8 tensors, {shapes[0]} and {shapes[1]}")
    header = np.frombuffer(tensors[0].data, np.uint8)
    exponent = int(header[:1].view(np.int8)[0])
    if abs(exponent) > MAX_EXPONENT:
        raise ProtocolError("bad-tensor", f"an exponent is not from {-MAX_EXPONENT} to {MAX_EXPONENT}")
    packed = torch.from_numpy(np.frombuffer(tensors[1].data, np.uint8).copy())
    levels = np.take(_levels(bits), unpack(packed, numel, bits).numpy())
    rows = pad(torch.from_numpy(levels), (0, blocks * QUANTISER_BLOCK - numel)).view(blocks, QUANTISER_BLOCK)
    scales = _SCALES[torch.from_numpy(header[1:].astype(np.int64))] * 2.0**exponent
    return rows.mul_(scales.unsqueeze(1)).view(-1)[:numel]


def _scale_codes(sizes: Tensor) -> tuple[int, Tensor]:
    sizes = sizes.clamp(max=2.0**MAX_EXPONENT)
    largest = float(sizes.max()) if len(sizes) else 0.0
    if largest == 0.0:
        return -MAX_EXPONENT, torch.full((len(sizes),), ZERO_SCALE, dtype=torch.uint8)
    exponent = max(math.ceil(math.log2(largest)), -MAX_EXPONENT)
    codes = (SCALES_PER_OCTAVE * (exponent - sizes.log2())).round_().clamp_(0, ZERO_SCALE)  # log2(0) gives ZERO_SCALE
    return exponent, codes.to(torch.uint8)


def _levels(bits: int) -> NDArray[np.float32]:
    upper = POSITIVE_LEVELS[bits]
    return np.array([-level for level in reversed(upper)] + list(upper), np.float32)


def _edges(bits: int) -> list[float]:
    levels = _levels(bits)
    return [float(edge) for edge in (levels[1:] + levels[:-1]) / 2]
