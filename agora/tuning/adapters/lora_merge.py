"""Adds LoRA's products to the matrices of a base model: W + scale * B A, a block of rows at a time, read from files.

Only one block of a matrix is in memory as float32 at a time, with the small matrices A and B. Source: LoRA, arXiv
2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from agora.state.merged_model import TensorBlocks
from agora.tuning.base.model_files import StoredTensor

# Maximum number of values of a block, 4 MiB of float32; a block has at least one row, which may be longer.
BLOCK_VALUES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """What LoRA adds to a matrix W [outputs, inputs] of a file: scale * B A, with A [r, inputs] and B [outputs, r].

    The product is not computed yet. read_a, read_b: read and return A and B. is_transposed: whether the file has W as
    [inputs, outputs].
    """

    read_a: Callable[[], NDArray[np.float32]]
    read_b: Callable[[], NDArray[np.float32]]
    scale: float
    is_transposed: bool

    def factors(self) -> tuple[Tensor, Tensor]:
        """Reads A and B; returns two matrices, [rows, r] and [r, columns], whose product is added to the file's W.

        They are (scale * B, A), or for a transposed file (scale * A^T, B^T).
        """
        a = torch.from_numpy(self.read_a())
        b = torch.from_numpy(self.read_b())
        left, right = (a.T, b.T) if self.is_transposed else (b, a)
        return self.scale * left, right


def merged_tensor(name: str, stored: StoredTensor, product: LoraProduct | None) -> TensorBlocks:
    """Returns the tensor `name` of the merged model: the base model's tensor, plus `product` if there is one.

    Nothing is read yet: the file and the LoRA matrices are read when the result's blocks are read.
    """
    return TensorBlocks(name, stored.shape, partial(_merged_blocks, stored, product), f"{stored.path}: {stored.name}")


def _merged_blocks(stored: StoredTensor, product: LoraProduct | None) -> Iterator[NDArray[np.float32]]:
    row_values = math.prod(stored.shape[1:])
    rows = max(1, BLOCK_VALUES // max(1, row_values))
    factors = product.factors() if product is not None else None
    with safe_open(stored.path, framework="pt") as reader:
        values = reader.get_slice(stored.name)
        for start in range(0, stored.shape[0], rows):
            block = values[start : start + rows].to(torch.float32)
            if factors is not None:
                block = torch.addmm(block, factors[0][start : start + rows], factors[1])
            yield block.numpy()
