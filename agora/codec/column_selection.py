"""Selects the columns of a boundary that are sent, and writes their numbers on the wire.

All tokens of a microbatch share their columns, so the numbers cost almost nothing. Knows: tensors and bytes. Must not
know: how values become levels, nor directions.
"""

from __future__ import annotations

import numpy as np
import torch
from agora_protocol.codec_names import COLUMN_BYTES
from agora_protocol.errors import ProtocolError
from numpy.typing import NDArray
from torch import Tensor

COLUMN: np.dtype[np.uint16] = np.dtype("<u2")


def strongest_columns(tensor: Tensor, count: int) -> Tensor:
    """Returns the `count` columns of [b, s, k] with the largest sums of squares, int64 [count], ascending.

    A decoded boundary has zeros in every column that was not sent, so its strongest columns are those that were sent.
    """
    energies = tensor.detach().to(torch.float32).flatten(0, 1).square().sum(dim=0)
    return energies.topk(count).indices.sort().values


def pack_columns(columns: Tensor, values: memoryview) -> NDArray[np.uint8]:
    """Returns the columns' numbers, COLUMN_BYTES each, followed by the bytes of their values."""
    numbers = columns.to("cpu").numpy().astype(COLUMN).view(np.uint8)
    return np.concatenate((numbers, np.frombuffer(values, np.uint8)))


def unpack_columns(data: memoryview, count: int, k: int) -> tuple[Tensor, memoryview]:
    """Returns what `pack_columns` was given: the columns, int64 [count], and the bytes of their values.

    Raises ProtocolError "bad-tensor" for numbers that do not ascend, or are not below `k`.
    """
    split = COLUMN_BYTES * count
    columns = np.frombuffer(data[:split], COLUMN).astype(np.int64)
    if columns[-1] >= k or (np.diff(columns) <= 0).any():
        raise ProtocolError("bad-tensor", f"The column numbers do not ascend, or reach {k}, the boundary's width.")
    return torch.from_numpy(columns), data[split:]
