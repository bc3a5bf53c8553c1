"""Encodes the parts of a round: as float32, bf16, in 2 to 4 bits, or as int8 with an exponent for each block.

normal2 to normal4 are in normal_levels.py.

int8 is meant for values on which replicas nearly agree. A block's scale is a power of two, so that nearly equal blocks
are rounded to the same grid. Before rounding, every member adds the same pseudo-random fraction to an element, and
decoding subtracts it again (subtractive dither, L. Roberts 1962). So the difference of two members' decoded values is
unbiased, and exactly 0 where they agree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from agora_protocol.codec_names import WireName
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import QUANTISER_BLOCK
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from agora.codec import decode_uncompressed, encode_uncompressed, is_all_finite
from agora.replica.normal_levels import dequantise, quantise

# Bits of an element, by the name of each format that is sent with error feedback.
NORMAL_BITS: Final[Mapping[str, int]] = {"normal2": 2, "normal3": 3, "normal4": 4}
MAX_LEVEL: Final = 126.0  # largest magnitude before dither, so that it never clips
MIN_EXPONENT, MAX_EXPONENT = -120, 100
# Parts whose dither is cached, half a MiB to 2 MiB each: about as many as are being sent at the same time.
CACHED_PARTS: Final = 32


@functools.lru_cache(maxsize=CACHED_PARTS)
def dither_fractions(label: str, numel: int) -> Tensor:
    """Returns pseudo-random fractions that depend on `label` alone: float32 [numel] in (-0.5, 0.5).

    A smaller `numel` gives the first fractions of a larger one. Each is (byte + 0.5) / 256; the signed bytes come from
    a Philox4x64-10 generator whose key is a hash of the label. The tensor is cached; do not change it.
    """
    key = hashlib.sha256(f"agora dither 1\0{label}".encode()).digest()[:16]
    words = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(-(-numel // 8))
    signed = torch.from_numpy(words.astype("<u8", copy=False).view(np.int8)[:numel])
    return signed.to(torch.float32).add_(0.5).mul_(1.0 / 256.0)


class EncodedPart(NamedTuple):
    """Encoded values of a part. wire: the name of their number format. tensors: one or two, as PartCodec makes them."""

    wire: WireName
    tensors: Sequence[WireTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PartCodec:
    """Encodes a part's float32 values as wire tensors, and decodes them, in the number format `name`.

    name: float32, bf16, int8 (with an exponent for each block, and optional dither), or normal2 to normal4 (2 to 4 bits
    with a scale for each block, see normal_levels).
    """

    def __init__(self, name: WireName) -> None:
        self.name = name

    def encode(self, values: Tensor, dither: str | None = None) -> list[WireTensor]:
        """Returns `values`, float32 [n] on the CPU and finite, as wire tensors.

        int8 clips magnitudes above about 2^107; normal2 to normal4 treat a block's root mean square as at most 2^100.
        dither: the label for dither_fractions, which int8 adds before it rounds; `decode` needs the same label. None
        adds nothing. The other formats ignore the label. float32 tensors share the memory of `values`, which must not
        change until they are sent.
        """
        if self.name in NORMAL_BITS:
            return quantise(values, NORMAL_BITS[self.name])
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

        dither: the label that was passed to `encode`. Raises ProtocolError ("bad-tensor") for another count, type or
        shape of tensors, values that are not finite, or exponents out of range.
        """
        if self.name in NORMAL_BITS:
            return dequantise(list(tensors), numel, NORMAL_BITS[self.name])
        if self.name != "int8":
            if len(tensors) != 1:
                raise ProtocolError("bad-tensor", f"a part is one tensor, not {len(tensors)}")
            values = decode_uncompressed(tensors[0], self.name, shape=(numel,))
            if not is_all_finite(values):
                raise ProtocolError("bad-tensor", "a part holds values that are not finite")
            return values
        if len(tensors) != 2:
            raise ProtocolError("bad-tensor", "an int8 part comes with its exponents")
        levels = torch.from_numpy(_from_int8(tensors[0], numel).astype(np.float32))
        if dither is not None:
            levels.sub_(dither_fractions(dither, numel))
        exponents = _from_int8(tensors[1], -(-numel // QUANTISER_BLOCK))
        if exponents.min(initial=0) < MIN_EXPONENT or exponents.max(initial=0) > MAX_EXPONENT:
            raise ProtocolError("bad-tensor", f"an exponent is not from {MIN_EXPONENT} to {MAX_EXPONENT}")
        return _block_rows(levels).mul_(_powers_of_two(exponents.astype(np.int32))).view(-1)[:numel]


def _block_rows(values: Tensor) -> Tensor:
    missing = -len(values) % QUANTISER_BLOCK
    return (pad(values, (0, missing)) if missing else values).view(-1, QUANTISER_BLOCK)


def _powers_of_two(exponents: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(((exponents + 127) << 23).view(np.float32))[:, None]


def _from_int8(wire: WireTensor, numel: int) -> NDArray[np.int8]:
    if wire.dtype != "int8" or wire.shape != (numel,):
        raise ProtocolError("bad-tensor", f"a part's tensor is {wire.dtype} {wire.shape}, not int8 ({numel},)")
    return np.frombuffer(wire.data, np.int8)
