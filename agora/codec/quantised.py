"""Rows of values <-> rows of bytes: blocks of BOUNDARY_BLOCK values share a bf16 scale, each value is a level.

A level stands for the middle of its interval: no level is spent on zero, which at 4 bits lowers the mean squared error
by a fifth. With `fractions`, the same pseudo-random part of a level is added before rounding and subtracted again when
decoded (subtractive dither, L. Roberts 1962): right in the mean, as stochastic rounding is, at half its mean squared
error. Knows numbers and bytes. Must not know directions, microbatches or the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from agora_protocol.boundary import SCALE_BYTES, blocks
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import BOUNDARY_BLOCK
from torch import Tensor
from torch.nn.functional import pad

from agora.codec.packing import pack, packed_bytes, unpack

LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**100
SLACK = 1.0 + 2.0**-8
"""A dithered block's scale is this much larger, so that bf16's rounding of it never makes its largest value clip."""
CHUNK_VALUES = 65_536
"""Values that a CPU works on at once: 256 KiB of float32, which stay in its cache from one operation to the next."""


def row_bytes(k: int, bits: int) -> int:
    """Bytes of a row of `k` values: the scales, then the packed levels."""
    return SCALE_BYTES * blocks(k) + packed_bytes(k, bits)


def quantise(rows: Tensor, bits: int, fractions: Tensor | None = None) -> Tensor:
    """float32 [rows, k] as uint8 [rows, row_bytes]. fractions: int8 [rows, k], n for (n + 0.5) / 256 of a level.

    Values saturate beyond 2^100 levels; a block below 2^-100 becomes zeros; one that is not finite has the scale NaN.
    """
    count, k = rows.shape
    wire = torch.empty(count, row_bytes(k, bits), dtype=torch.uint8, device=rows.device)
    split = SCALE_BYTES * blocks(k)
    for cut in _chunks(rows):
        some = None if fractions is None else fractions[cut]
        scales, levels = _levels(rows[cut], bits, some)
        wire[cut, :split] = scales.view(torch.uint8)
        wire[cut, split:] = pack(levels, bits)
    return wire


def dequantise(wire: Tensor, k: int, bits: int, fractions: Tensor | None = None) -> Tensor:
    """What `quantise` made, as float32 [rows, k]; finite where check_scales has passed."""
    values = torch.empty(len(wire), k, dtype=torch.float32, device=wire.device)
    split = SCALE_BYTES * blocks(k)
    middle = 2.0 ** (bits - 1) - 0.5
    for cut in _chunks(values):
        some = unpack(wire[cut, split:], k, bits).to(torch.float32)
        if fractions is None:
            some.sub_(middle)
        else:
            some.sub_(fractions[cut], alpha=1 / 256).sub_(middle + 1 / 512)
        values[cut] = _scaled(some, _scales(wire[cut, :split]))
    return values


def check_scales(wire: Tensor, k: int) -> None:
    """Raises ProtocolError "bad-tensor" for a scale that is NaN, negative or beyond 2^100."""
    low, high = (bound.item() for bound in torch.aminmax(_scales(wire[:, : SCALE_BYTES * blocks(k)])))
    if not (low >= 0.0 and high <= MOST_SCALE):
        raise ProtocolError("bad-tensor", f"A scale is {low:g} or {high:g}; it must be from 0 to 2^100.")


def _levels(rows: Tensor, bits: int, fractions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales, bf16 [rows, blocks], and levels, uint8 [rows, k]."""
    count, k = rows.shape
    blocked = _blocked(rows)
    half = 2.0 ** (bits - 1)
    least = 1 / half if fractions is None else SLACK / (half - 0.5)
    scales = _bounded(blocked.abs().amax(dim=2).mul_(least))
    exact = scales.to(torch.float32)
    inverse = torch.where(exact > 0, exact.reciprocal(), 0.0)
    scaled = (blocked * inverse[..., None]).view(count, -1)
    if scaled.shape[1] != k:
        scaled = scaled[:, :k].contiguous()
    if fractions is not None:
        scaled.add_(fractions, alpha=1 / 256)
        half += 1 / 512
    return scales, scaled.add_(half).clamp_(0.0, 2.0**bits - 0.5).to(torch.uint8)


def _bounded(scales: Tensor) -> Tensor:
    """As bf16 that a reader accepts; NaN, which it refuses, for what is not finite."""
    rounded = torch.where(scales.isfinite(), scales.clamp(max=MOST_SCALE), math.nan).to(torch.bfloat16)
    return torch.where(rounded < LEAST_SCALE, 0.0, rounded)


def _scales(wire: Tensor) -> Tensor:
    """Float32 [rows, blocks] of the scales' bytes [rows, 2 * blocks]."""
    return wire.contiguous().view(torch.bfloat16).to(torch.float32)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    count, k = values.shape
    return (_blocked(values) * scales[..., None]).view(count, -1)[:, :k]


def _blocked(rows: Tensor) -> Tensor:
    """[rows, blocks, BOUNDARY_BLOCK], the last block filled up with zeros; one shorter block stays as short."""
    count, k = rows.shape
    if k <= BOUNDARY_BLOCK:
        return rows.reshape(count, 1, k)
    missing = -k % BOUNDARY_BLOCK
    return (pad(rows, (0, missing)) if missing else rows).reshape(count, -1, BOUNDARY_BLOCK)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """All rows; on a CPU in pieces that fit into its cache."""
    count, k = rows.shape
    step = max(1, CHUNK_VALUES // k) if rows.device.type == "cpu" else count
    return (slice(begin, begin + step) for begin in range(0, count, step))
