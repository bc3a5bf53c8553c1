"""Quantises rows of values to bytes and back: a block of BOUNDARY_BLOCK values shares a bf16 scale, a value is a level.

A level represents the middle of its interval; no level represents zero: at 4 bits that lowers the mean squared error by
a fifth. Subtractive dither (L. Roberts, 1962): the same pseudo-random fraction of a level is added before rounding and
subtracted after decoding. The mean is exact, as with stochastic rounding, and the mean squared error is half of
stochastic rounding's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from agora_protocol.codec_names import SCALE_BYTES, blocks_per_token, packed_bytes
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import BOUNDARY_BLOCK
from torch import Tensor

from agora.codec.bit_packing import pack, unpack

MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**100  # A smaller scale is sent as 0, a larger one as MAX_SCALE
# Scales are larger by this factor, so that the largest value of a block does not clip if its scale is rounded down.
SCALE_MARGIN = 1.0 + 2.0**-8
VECTOR = 32  # torch finds maxima several times as fast in rows whose length is a multiple of this
# Values quantised at a time on a CPU: 1 MiB of float32, which stays in its cache from one operation to the next.
CHUNK_VALUES = 262_144


def quantise(rows: Tensor, bits: int, dither: Tensor | None = None) -> Tensor:
    """Quantises float32 [rows, k] to levels of `bits` bits. Returns uint8 [bytes]: all scales, then all packed levels.

    Each block of BOUNDARY_BLOCK columns of a row has its own scale. rows: contiguous, not changed. dither: int8
    [rows, k] in 1/256 of a level; None rounds to the nearest level. Values saturate if a scale would be above 2^100; a
    block whose scale would be below 2^-100 becomes zeros; a block with a value that is not finite gets the scale NaN,
    which check_scales refuses.
    """
    count, k = rows.shape
    split = SCALE_BYTES * count * blocks_per_token(k)
    wire = torch.empty(split + packed_bytes(count * k, bits), dtype=torch.uint8, device=rows.device)
    scales = wire[:split].view(torch.bfloat16).view(count, blocks_per_token(k))
    levels = wire[split:] if bits == 8 else torch.empty(count * k, dtype=torch.uint8, device=rows.device)
    chunks = _row_chunks(rows)
    workspace = torch.empty_like(rows[chunks[0]])
    for chunk in chunks:
        chunk_dither = None if dither is None else dither[chunk]
        _quantise_chunk(rows[chunk], bits, chunk_dither, workspace, scales[chunk], levels.view(count, k)[chunk])
    if bits < 8:
        wire[split:] = pack(levels, bits)
    return wire


def dequantise(wire: Tensor, row_count: int, k: int, bits: int, dither: Tensor | None = None) -> Tensor:
    """Decodes the bytes that `quantise` made of `row_count` rows of k values, with its bits and dither.

    Returns float32 [row_count, k]; the values are finite if check_scales passes.
    """
    split = SCALE_BYTES * row_count * blocks_per_token(k)
    scales = _read_scales(wire, row_count, k)
    levels = unpack(wire[split:], row_count * k, bits).view(row_count, k)
    values = torch.empty(row_count, k, dtype=torch.float32, device=wire.device)
    middle = 2.0 ** (bits - 1) - 0.5
    for chunk in _row_chunks(values):
        part = values[chunk].copy_(levels[chunk])
        if dither is not None:
            part.sub_(dither[chunk], alpha=1 / 256)
        _multiply_blocks(part.sub_(middle), scales[chunk], part)
    return values


def check_scales(wire: Tensor, row_count: int, k: int) -> None:
    """Raises ProtocolError "bad-tensor" if a scale is NaN, negative or above 2^100. wire: on the CPU."""
    scales = _read_scales(wire, row_count, k).numpy()
    low, high = float(scales.min()), float(scales.max())
    if not (low >= 0.0 and high <= MAX_SCALE):
        raise ProtocolError("bad-tensor", f"Scales range from {low:g} to {high:g}; they must be from 0 to 2^100.")


def _quantise_chunk(
    rows: Tensor, bits: int, dither: Tensor | None, workspace: Tensor, scales: Tensor, levels: Tensor
) -> None:
    workspace = workspace[: len(rows)]
    half = 2.0 ** (bits - 1)
    scale_per_peak = SCALE_MARGIN / (half if dither is None else half - 0.5)
    wanted = _block_peaks(torch.abs(rows, out=workspace)).mul_(scale_per_peak)
    # wanted - wanted is 0, or NaN if `wanted` is not finite: NaN is the only scale made here that a receiver refuses.
    scales.copy_(F.threshold(wanted.clamp(max=MAX_SCALE), MIN_SCALE, 0.0).add_(wanted - wanted))
    _multiply_blocks(rows, scales.to(torch.float32).clamp_(min=MIN_SCALE).reciprocal_(), workspace)
    if dither is not None:
        workspace.add_(dither, alpha=1 / 256)
    # torch converts to int8 six times as fast as to uint8.
    levels.view(torch.int8).copy_(workspace.floor_().clamp_(-half, half - 1))
    levels.add_(int(half))


def _read_scales(wire: Tensor, row_count: int, k: int) -> Tensor:
    scales = wire[: SCALE_BYTES * row_count * blocks_per_token(k)].clone()
    return scales.view(torch.bfloat16).view(row_count, blocks_per_token(k)).to(torch.float32)


def _block_peaks(magnitudes: Tensor) -> Tensor:
    count, k = magnitudes.shape
    whole = k - k % BOUNDARY_BLOCK
    if whole == k:
        return magnitudes.view(count, -1, BOUNDARY_BLOCK).amax(dim=2)
    # The last block of a row may be shorter.
    last = F.pad(magnitudes[:, whole:], (0, -k % VECTOR)).amax(dim=1, keepdim=True)
    return torch.cat((_block_peaks(magnitudes[:, :whole].contiguous()), last), dim=1) if whole else last


def _multiply_blocks(values: Tensor, factors: Tensor, out: Tensor) -> None:
    count, k = values.shape
    if k < BOUNDARY_BLOCK:
        torch.mul(values, factors, out=out)
    elif k % BOUNDARY_BLOCK:
        torch.mul(values, factors.repeat_interleave(BOUNDARY_BLOCK, dim=1)[:, :k], out=out)
    else:
        blocked = (count, -1, BOUNDARY_BLOCK)
        torch.mul(values.view(blocked), factors[..., None], out=out.view(blocked))


def _row_chunks(rows: Tensor) -> list[slice]:
    # A GPU takes all rows at once.
    count, k = rows.shape
    size = min(count, max(1, CHUNK_VALUES // k)) if rows.device.type == "cpu" else count
    return [slice(begin, begin + size) for begin in range(0, count, size)]
