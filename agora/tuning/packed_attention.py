"""Attention inside the sequences of packed rows, without a mask of a row's tokens by a row's tokens ("varlen").

PackedSequences goes through transformers' layers in the place of a mask. Shapes: b rows, s positions, h heads, g
key/value heads, e head width.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED: Final = "agora_packed"  # the name of `attend` among transformers' kinds of attention
VARLEN: Final = "torch.nn.attention.varlen"
MAX_HEAD_WIDTH: Final = 256  # of flash attention
# Below this mean length one mask of all tokens costs a CPU less than a call for each sequence. Measured, forward and
# backward of 2 rows of 1,024, sequences of 8: 557 ms against 326; of 32: 132 against 288; of 128: 83 against 291.
MIN_MEAN_LENGTH: Final = 16

# Called with query [t, h, e], key and value [t, g, e] of all tokens, `cu_seqlens` twice, the most tokens of a sequence
# twice, and scale, window_size and enable_gqa: torch.nn.attention.varlen.varlen_attn.
VarlenKernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of a microbatch's rows lie; a token attends to itself and what is before it in its own."""

    cu_seqlens: Tensor  # int32 [n]: of each sequence among the tokens of all rows, then their number, repeated
    row: int  # tokens of a row, which no sequence exceeds
    lengths: tuple[int, ...] = ()  # of the sequences; () if `kernel` attends
    kernel: VarlenKernel | None = None
    window: int | None = None  # how many of the last tokens, itself included, a token attends to; None: all

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Returns [b, s, h, e] from query [b, h, s, e], key and value [b, g, s, e]."""
        if self.kernel is None:
            return self._attend_one_by_one(query, key, value, scale)
        rows, heads, length, _ = query.shape
        dtype = torch.get_autocast_dtype(query.device.type) if _is_cast(query.device) else query.dtype
        tokens = (part.transpose(1, 2).flatten(0, 1).to(dtype) for part in (query, key, value))
        attended = self.kernel(
            *tokens,
            self.cu_seqlens,
            self.cu_seqlens,
            self.row,
            self.row,
            scale=scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=heads != key.shape[1],
        )
        return attended.view(rows, length, heads, -1)

    def _attend_one_by_one(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        rows, heads, length, _ = query.shape
        is_grouped, attended, begin = heads != key.shape[1], [], 0
        for tokens in self.lengths:
            row, first = divmod(begin, length)
            query_, key_, value_ = (part[row : row + 1, :, first : first + tokens] for part in (query, key, value))
            inside = F.scaled_dot_product_attention(
                query_, key_, value_, is_causal=True, scale=scale, enable_gqa=is_grouped
            )
            attended.append(inside.transpose(1, 2))
            begin += tokens
        return torch.cat(attended, dim=1).view(rows, length, heads, -1)


def pack(segments: Tensor, kernel: VarlenKernel | None = None) -> PackedSequences | None:
    """Returns where the sequences lie; None where a mask costs less. Waits once for the device.

    segments: int [b, s], the number of each token's sequence, ascending in each row. kernel: attends to all sequences
    at once; None: they are computed one by one.
    """
    changes = torch.ones_like(segments, dtype=torch.bool)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    places = torch.nonzero(changes.flatten()).flatten().int()
    count, row, total = len(places), segments.shape[1], segments.numel()
    if kernel is not None:
        # Up to the next power of two, so that compiled layers meet few shapes; the additional sequences are empty.
        padding = places.new_full(((1 << (count - 1).bit_length()) + 1 - count,), total)
        return PackedSequences(torch.cat((places, padding)), row, kernel=kernel)
    if total < MIN_MEAN_LENGTH * count:
        return None
    cu_seqlens = torch.cat((places, places.new_full((1,), total)))
    return PackedSequences(cu_seqlens, row, tuple(cu_seqlens.diff().tolist()))


def within(packed: PackedSequences | None, window: int | None) -> PackedSequences | None:
    """Returns `packed` for layers with this window; None if they need a mask."""
    if packed is None or window is None or (packed.lengths and max(packed.lengths) <= window):
        return packed
    return None if packed.kernel is None else replace(packed, window=window)


def varlen_kernel(device: torch.device, head_width: int) -> VarlenKernel | None:
    """Returns torch's kernel for sequences of different lengths; None where it has none, or not for this head width.

    It computes in 16 bits, on GPUs from Ampere on.
    """
    if device.type != "cuda" or not _is_cast(device) or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    if head_width % 8 or head_width > MAX_HEAD_WIDTH or importlib.util.find_spec(VARLEN) is None:
        return None
    kernel: VarlenKernel = importlib.import_module(VARLEN).varlen_attn
    # Its first versions knew neither windows nor fewer key/value heads.
    return kernel if {"window_size", "enable_gqa"} <= set(inspect.signature(kernel).parameters) else None


def _is_cast(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def register() -> None:
    """Makes `attend` known to transformers as PACKED. Raises ImportError without transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, attend)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: its "sdpa", which also takes PackedSequences as a mask."""
    if isinstance(attention_mask, PackedSequences):
        return attention_mask.attend(query, key, value, options.get("scaling")), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output, None
