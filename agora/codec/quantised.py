"""Rows of values <-> bytes: blocks of BOUNDARY_BLOCK values share a bf16 scale, each value is a level.

A level stands for the middle of its interval: no level is spent on zero, which at 4 bits lowers the mean squared error
by a fifth. With `fractions`, the same pseudo-random part of a level is added before rounding and subtracted again when
decoded (subtractive dither, L. Roberts 1962): right in the mean, as stochastic rounding is, at half its mean squared
error. Knows numbers and bytes. Must not know directions, microbatches or the wire.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from agora_protocol.boundary import SCALE_BYTES, blocks, packed_bytes
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import BOUNDARY_BLOCK
from torch import Tensor

from agora.codec.packing import pack, unpack

LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**100
SLACK = 1.0 + 2.0**-8
"""A scale is this much larger, so that its rounding to bf16 never makes the largest value of its block clip."""
VECTOR = 32
"""Rows of a multiple of so many values have their largest value found without a remainder, several times as fast."""
CHUNK_VALUES = 262_144
"""Values that a CPU works on at once: 1 MiB of float32, to stay in its cache from one operation to the next."""


def quantise(rows: Tensor, bits: int, fractions: Tensor | None = None) -> Tensor:
    """float32 [rows, k] as uint8 [bytes]: all scales, then all packed levels.

    fractions: int8 [rows, k], n for n / 256 of a level. Values saturate beyond 2^100 levels; a block whose scale
    would be below 2^-100 becomes zeros; one that is not finite gets the scale NaN, which a reader refuses.
    """
    count, k = rows.shape
    split = SCALE_BYTES * count * blocks(k)
    wire = torch.empty(split + packed_bytes(count * k, bits), dtype=torch.uint8, device=rows.device)
    scales = wire[:split].view(torch.bfloat16).view(count, blocks(k))
    levels = wire[split:] if bits == 8 else torch.empty(count * k, dtype=torch.uint8, device=rows.device)
    room = torch.empty_like(rows[_step(rows)])
    for cut in _chunks(rows):
        some = None if fractions is None else fractions[cut]
        _quantise(rows[cut], bits, some, room, scales[cut], levels.view(count, k)[cut])
    if bits < 8:
        wire[split:] = pack(levels, bits)
    return wire


def dequantise(wire: Tensor, count: int, k: int, bits: int, fractions: Tensor | None = None) -> Tensor:
    """What `quantise` made of `count` rows, as float32 [count, k]; finite where check_scales has passed."""
    split = SCALE_BYTES * count * blocks(k)
    scales, levels = _scales(wire, count, k), unpack(wire[split:], count * k, bits).view(count, k)
    values = torch.empty(count, k, dtype=torch.float32, device=wire.device)
    middle = 2.0 ** (bits - 1) - 0.5
    for cut in _chunks(values):
        some = values[cut].copy_(levels[cut])
        if fractions is not None:
            some.sub_(fractions[cut], alpha=1 / 256)
        _scale(some.sub_(middle), scales[cut], some)
    return values


def check_scales(wire: Tensor, count: int, k: int) -> None:
    """Raises ProtocolError "bad-tensor" for a scale that is NaN, negative or beyond 2^100."""
    low, high = (bound.item() for bound in torch.aminmax(_scales(wire, count, k)))
    if not (low >= 0.0 and high <= MOST_SCALE):
        raise ProtocolError("bad-tensor", f"A scale is {low:g} or {high:g}; it must be from 0 to 2^100.")


def _quantise(rows: Tensor, bits: int, fractions: Tensor | None, room: Tensor, scales: Tensor, levels: Tensor) -> None:
    """Fills in `scales`, bf16 [rows, blocks], and `levels`, uint8 [rows, k]; uses `room`, as large as rows at least."""
    room, half = room[: len(rows)], 2.0 ** (bits - 1)
    least = SLACK / (half if fractions is None else half - 0.5)
    scales.copy_(_bounded(_peaks(torch.abs(rows, out=room)).mul_(least)))
    _scale(rows, scales.to(torch.float32).clamp_(min=LEAST_SCALE).reciprocal_(), room)
    if fractions is not None:
        room.add_(fractions, alpha=1 / 256)
    levels.view(torch.int8).copy_(room.floor_().clamp_(-half, half - 1))  # torch is six times faster than to uint8
    levels.add_(int(half))


def _bounded(scales: Tensor) -> Tensor:
    """What a reader accepts; NaN, which it refuses, for what is not finite."""
    return F.threshold(scales.clamp(max=MOST_SCALE), LEAST_SCALE, 0.0).add_(scales - scales)


def _scales(wire: Tensor, count: int, k: int) -> Tensor:
    """Float32 [count, blocks]."""
    scales = wire[: SCALE_BYTES * count * blocks(k)].clone()
    return scales.view(torch.bfloat16).view(count, blocks(k)).to(torch.float32)


def _peaks(magnitudes: Tensor) -> Tensor:
    """The largest of each block, [rows, blocks]."""
    count, k = magnitudes.shape
    whole = k - k % BOUNDARY_BLOCK
    if whole == k:
        return magnitudes.view(count, -1, BOUNDARY_BLOCK).amax(dim=2)
    last = F.pad(magnitudes[:, whole:], (0, -k % VECTOR)).amax(dim=1, keepdim=True)
    return torch.cat((_peaks(magnitudes[:, :whole].contiguous()), last), dim=1) if whole else last


def _scale(values: Tensor, factors: Tensor, into: Tensor) -> None:
    """`into` becomes the values [rows, k] times their blocks' factors [rows, blocks]."""
    count, k = values.shape
    if k < BOUNDARY_BLOCK:
        torch.mul(values, factors, out=into)
    elif k % BOUNDARY_BLOCK:
        torch.mul(values, factors.repeat_interleave(BOUNDARY_BLOCK, dim=1)[:, :k], out=into)
    else:
        blocked = (count, -1, BOUNDARY_BLOCK)
        torch.mul(values.view(blocked), factors[..., None], out=into.view(blocked))


def _chunks(rows: Tensor) -> Iterator[slice]:
    """All rows, so many at once."""
    count, size = len(rows), _step(rows).stop
    return (slice(begin, begin + size) for begin in range(0, count, size))


def _step(rows: Tensor) -> slice:
    """The first chunk: all rows; on a CPU what fits into its cache."""
    count, k = rows.shape
    return slice(0, min(count, max(1, CHUNK_VALUES // k)) if rows.device.type == "cpu" else count)
