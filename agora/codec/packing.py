"""Levels of 2 to 8 bits <-> the bytes that hold them without gaps, eight levels in one 64-bit word.

Knows bits. Must not know what a level means. Level i of a row has the bits i * bits and up, the lowest first, of the
row's bytes read as one little-endian integer.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDER = (torch.int16, torch.int32, torch.int64)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of `count` levels."""
    return -(-count * bits // 8)


def pack(levels: Tensor, bits: int) -> Tensor:
    """Levels below 2^bits, uint8 [rows, count], as uint8 [rows, packed_bytes]. May change `levels`."""
    rows, count = levels.shape
    if bits == 8:
        return levels
    word = _filled(levels, -(-count // 8) * 8)
    held, span = bits, 8
    for wider in WIDER:
        word, mask = word.view(wider), (1 << held) - 1
        upper = (word >> (span - held)).bitwise_and_(mask << held)
        word = word.bitwise_and_(mask).bitwise_or_(upper)
        held, span = 2 * held, 2 * span
    whole = word.view(torch.uint8).view(rows, -1, 8)[..., :bits].reshape(rows, -1)
    return whole[:, : packed_bytes(count, bits)]


def unpack(data: Tensor, count: int, bits: int) -> Tensor:
    """What `pack` made, uint8 [rows, packed_bytes], as levels uint8 [rows, count]."""
    if bits == 8:
        return data
    groups = -(-count // 8)
    spread = torch.zeros(len(data), groups, 8, dtype=torch.uint8, device=data.device)
    spread[..., :bits] = _filled(data, groups * bits).view(len(data), groups, bits)
    word = spread.view(len(data), groups * 8).view(torch.int64)
    held, span = 4 * bits, 32
    for wide in reversed(WIDER):
        word, mask = word.view(wide), (1 << held) - 1
        upper = (word & (mask << held)).bitwise_left_shift_(span - held)
        word = word.bitwise_and_(mask).bitwise_or_(upper)
        held, span = held // 2, span // 2
    return word.view(torch.uint8)[:, :count]


def _filled(values: Tensor, columns: int) -> Tensor:
    """uint8 [rows, columns], contiguous, zeros after the given ones."""
    if values.shape[1] == columns:
        return values.contiguous()
    filled = torch.zeros(len(values), columns, dtype=torch.uint8, device=values.device)
    filled[:, : values.shape[1]] = values
    return filled
