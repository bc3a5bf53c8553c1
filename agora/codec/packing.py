"""Levels of 2 to 8 bits <-> the bytes that hold them without gaps.

Knows bits. Must not know what a level means. A level of 6 bits is a part of its lowest 4 and a part of the next 2; the
parts of one width lie together, as many to a byte as fit. Which levels share a byte is chosen for speed: they are far
apart, so that whole vectors of bytes are made by few shifts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from agora_protocol.boundary import packed_bytes, part_widths
from torch import Tensor


def pack(levels: Tensor, bits: int) -> Tensor:
    """Levels below 2^bits, uint8 [n], as uint8 [packed_bytes(n, bits)]."""
    if bits == 8:
        return levels
    packed = torch.zeros(packed_bytes(len(levels), bits), dtype=torch.uint8, device=levels.device)
    for low, width, cut in _parts(len(levels), bits):
        part, made = (levels >> low).bitwise_and_((1 << width) - 1), packed[cut]
        for index, piece in enumerate(torch.split(part, len(made))):
            made[: len(piece)].bitwise_or_(piece << width * index)
    return packed


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """What `pack` made of `count` levels, as uint8 [count]."""
    if bits == 8:
        return packed
    levels = torch.zeros(count, dtype=torch.uint8, device=packed.device)
    for low, width, cut in _parts(count, bits):
        held = packed[cut]
        for index, piece in enumerate(torch.split(levels, len(held))):
            part = (held[: len(piece)] >> width * index).bitwise_and_((1 << width) - 1)
            piece.bitwise_or_(part.bitwise_left_shift_(low))
    return levels


def _parts(count: int, bits: int) -> Iterator[tuple[int, int, slice]]:
    """Of each part of a level: its lowest bit, its width, and where its bytes lie."""
    low, begin = 0, 0
    for width in part_widths(bits):
        size = packed_bytes(count, width)
        yield low, width, slice(begin, begin + size)
        low, begin = low + width, begin + size
