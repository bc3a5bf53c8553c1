"""Packs levels of 2 to 8 bits into bytes without gaps, and unpacks them.

A level of 6 bits is cut into its lowest 4 bits and the next 2 (part_widths). Parts of one width are stored together, as
many in a byte as fit. Parts that share a byte come from levels that are far apart, so that a few shifts of whole
vectors, as int64 words of eight bytes, make all bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from agora_protocol.codec_names import packed_bytes, part_widths
from torch import Tensor

WORD_BYTES: Final = 8
EACH_BYTE: Final = 0x0101010101010101  # multiplied by a byte value, gives a word of eight copies of it


def pack(levels: Tensor, bits: int) -> Tensor:
    """Packs levels of `bits` bits, 2 to 8, without gaps: uint8 [n] to a new tensor, uint8 [packed_bytes(n, bits)].

    At 8 bits, returns `levels` itself. levels: each below 2^bits (higher bits are dropped); contiguous, and alone in
    their storage, which is read in words of eight bytes.
    """
    if bits == 8:
        return levels
    packed = torch.empty(packed_bytes(len(levels), bits), dtype=torch.uint8, device=levels.device)
    for lowest_bit, width, byte_slice in _level_parts(len(levels), bits):
        target = packed[byte_slice]
        rows = _as_words(_pad_columns(levels, len(target) * 8 // width).view(-1, len(target)))
        parts = (rows >> lowest_bit).bitwise_and_(EACH_BYTE * ((1 << width) - 1))
        parts.bitwise_left_shift_(_part_shifts(width, levels.device))
        target.copy_(parts.sum(dim=0).view(torch.uint8)[: len(target)])
    return packed


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """Unpacks the bytes that `pack` has made of `count` levels of `bits` bits, and returns the levels, uint8 [count].

    At 8 bits, returns `packed` itself. The size of `packed` is not checked.
    """
    if bits == 8:
        return packed
    levels = torch.zeros((), dtype=torch.uint8, device=packed.device)
    for lowest_bit, width, byte_slice in _level_parts(count, bits):
        source = packed[byte_slice]
        parts = _as_words(source.clone()) >> _part_shifts(width, packed.device)
        rows = parts.bitwise_and_(EACH_BYTE * ((1 << width) - 1)).bitwise_left_shift_(lowest_bit).view(torch.uint8)
        levels = levels | rows[:, : len(source)].reshape(-1)[:count]
    return levels


def _level_parts(count: int, bits: int) -> Iterator[tuple[int, int, slice]]:
    # Of each part: its lowest bit in a level, its width in bits, and the packed bytes that have it of all levels.
    lowest_bit, begin = 0, 0
    for width in part_widths(bits):
        size = packed_bytes(count, width)
        yield lowest_bit, width, slice(begin, begin + size)
        lowest_bit += width
        begin += size


def _as_words(rows: Tensor) -> Tensor:
    # Bytes [..., n] as int64 [..., ceil(n / 8)], padded with zeros.
    return _pad_columns(rows, -(-rows.shape[-1] // WORD_BYTES) * WORD_BYTES).view(torch.int64)


def _pad_columns(rows: Tensor, size: int) -> Tensor:
    missing = size - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows


@functools.lru_cache(maxsize=64)
def _part_shifts(width: int, device: torch.device) -> Tensor:
    # Where the parts that share a byte lie in it. Cached and shared: callers must not change it.
    return torch.arange(0, 8, width, device=device).unsqueeze(1)
