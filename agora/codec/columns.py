"""Which columns of a boundary cross, and their numbers on the wire: the column-sparse codecs.

All tokens of a microbatch share their columns, so that the numbers cost nothing and the columns' space is whole. Knows
tensors and bytes. Must not know how a value becomes a level, nor directions.
"""

from __future__ import annotations

import numpy as np
import torch
from agora_protocol.boundary import COLUMN_BYTES
from agora_protocol.errors import ProtocolError
from numpy.typing import NDArray
from torch import Tensor

COLUMN: np.dtype[np.uint16] = np.dtype("<u2")


def strongest(tensor: Tensor, count: int) -> Tensor:
    """The `count` columns of [b, s, k] with the largest sums of squares, int64 [count], ascending.

    Of a boundary that came as `count` columns, which has zeros elsewhere, they are those that came: no level stands for
    zero, and where a dense leg sent a column of zeros, another such column is as good.
    """
    energies = tensor.detach().to(torch.float32).flatten(0, 1).square().sum(dim=0)
    return energies.topk(count).indices.sort().values


def written(columns: Tensor, values: memoryview) -> NDArray[np.uint8]:
    """The columns' numbers, then the bytes of their values, uint8 [COLUMN_BYTES * count + bytes]."""
    numbers = columns.to("cpu").numpy().astype(COLUMN).view(np.uint8)
    return np.concatenate((numbers, np.frombuffer(values, np.uint8)))


def read(data: memoryview, count: int, k: int) -> tuple[Tensor, memoryview]:
    """What `written` made: the columns, int64 [count], and the bytes of their values.

    Raises ProtocolError "bad-tensor" for numbers that do not ascend, or are not below `k`.
    """
    split = COLUMN_BYTES * count
    columns = np.frombuffer(data[:split], COLUMN).astype(np.int64)
    if columns[-1] >= k or (np.diff(columns) <= 0).any():
        raise ProtocolError("bad-tensor", f"The columns' numbers do not ascend, or reach {k}, which a boundary has.")
    return torch.from_numpy(columns), data[split:]
