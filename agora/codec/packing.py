"""Levels of 2 to 8 bits <-> the bytes that hold them without gaps.

Knows bits. Must not know what a level means. A level of 6 bits is a part of its lowest 4 and a part of the next 2; the
parts of one width lie together, as many to a byte as fit. Which levels share a byte is chosen for speed: they are far
apart, so that whole vectors of bytes are made by few shifts. Eight bytes are shifted as one int64: no part is wider
than its byte, so none reaches into the next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from agora_protocol.boundary import packed_bytes, part_widths
from torch import Tensor

LANES: Final = 8
EACH_BYTE: Final = 0x0101010101010101


def pack(levels: Tensor, bits: int) -> Tensor:
    """Levels below 2^bits, uint8 [n], alone in their storage, as uint8 [packed_bytes(n, bits)]."""
    if bits == 8:
        return levels
    packed = torch.empty(packed_bytes(len(levels), bits), dtype=torch.uint8, device=levels.device)
    for low, width, cut in _parts(len(levels), bits):
        made = packed[cut]
        rows = _words(_padded(levels, len(made) * 8 // width).view(-1, len(made)))
        part = (rows >> low).bitwise_and_(_mask(width)).bitwise_left_shift_(_shifts(width, levels.device))
        made.copy_(part.sum(dim=0).view(torch.uint8)[: len(made)])
    return packed


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """What `pack` made of `count` levels, as uint8 [count]."""
    if bits == 8:
        return packed
    levels = torch.zeros((), dtype=torch.uint8, device=packed.device)
    for low, width, cut in _parts(count, bits):
        held = packed[cut]
        part = (_words(held.clone()) >> _shifts(width, packed.device)).bitwise_and_(_mask(width))
        rows = part.bitwise_left_shift_(low).view(torch.uint8)
        levels = levels | rows[:, : len(held)].reshape(-1)[:count]
    return levels


def _parts(count: int, bits: int) -> Iterator[tuple[int, int, slice]]:
    """Of each part of a level: its lowest bit, its width, and where its bytes lie."""
    low, begin = 0, 0
    for width in part_widths(bits):
        size = packed_bytes(count, width)
        yield low, width, slice(begin, begin + size)
        low, begin = low + width, begin + size


def _words(rows: Tensor) -> Tensor:
    """Bytes [..., n] as int64 [..., ceil(n / 8)], zeros at the end of each row."""
    return _padded(rows, -(-rows.shape[-1] // LANES) * LANES).view(torch.int64)


def _padded(rows: Tensor, size: int) -> Tensor:
    short = size - rows.shape[-1]
    return F.pad(rows, (0, short)) if short else rows


def _mask(width: int) -> int:
    """The lowest `width` bits of each byte of a word."""
    return EACH_BYTE * ((1 << width) - 1)


@functools.lru_cache(maxsize=64)
def _shifts(width: int, device: torch.device) -> Tensor:
    """Where the parts of a byte begin, [8 / width, 1]."""
    return torch.arange(0, 8, width, device=device).unsqueeze(1)
