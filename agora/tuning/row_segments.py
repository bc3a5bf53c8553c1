"""Rows of tokens that hold several sequences: which token attends to which, and each token's position.

Shapes: b rows, s tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_positions(hidden: Tensor, segments: Tensor | None) -> Tensor:
    """Returns the position, from 0, of each token in its sequence, int64 [b, s]; [1, s] if each row is one sequence.

    hidden: [b, s, d] or [b, s], used only for s and the device. segments: int [b, s], the number of each token's
    sequence, ascending in each row; None: each row is one sequence.
    """
    places = torch.arange(hidden.shape[1], device=hidden.device)[None]
    if segments is None:
        return places
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def attended_pairs(hidden: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """Returns the causal attention mask, bool [b or 1, 1, s, s]: True where a token (row) attends to a token (column).

    A token attends to the last `window` tokens of its own sequence, itself included; window None: to itself and all
    tokens before it. hidden: [b, s, d] or [b, s], used only for s and the device. segments: int [b, s], the number of
    each token's sequence; None: each row is one sequence.
    """
    length = hidden.shape[1]
    places = torch.arange(length, device=hidden.device)
    ages = places[:, None] - places[None, :]
    allowed = ((ages >= 0) & (ages < (window or length)))[None, None]
    return allowed if segments is None else allowed & (segments[:, None, :, None] == segments[:, None, None, :])


def as_additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask to one of `dtype` to add to attention scores: 0 where allowed, else the dtype's minimum."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
