"""A linear layer whose matrix is frozen: the base class of its formats, and the one of bf16."""

from __future__ import annotations

import abc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenLinear(nn.Module, abc.ABC):
    """Base class of linear layers with a frozen matrix. Until load_matrix, the matrix has a shape but no memory.

    is_transposed: whether files have the matrix as [inputs, outputs], as the files of GPT-2 do.
    """

    weight: Tensor
    is_transposed = False

    def load_matrix(self, values: Tensor) -> None:
        """Allocates the matrix on the CPU and sets it from float32 values in the file's shape, in this layer's format.

        Transposes the values first if `is_transposed`. The tensor `values` itself is not kept.
        """
        self._keep_matrix(values.T.contiguous() if self.is_transposed else values)

    def file_shape(self) -> tuple[int, ...]:
        """Returns the shape that the matrix has in files. Valid only before load_matrix, which may pack the matrix."""
        shape = tuple(self.weight.shape)
        return shape[::-1] if self.is_transposed else shape

    @abc.abstractmethod
    def _keep_matrix(self, values: Tensor) -> None: ...  # values: float32 [outputs, inputs] on the CPU


class Bf16Linear(FrozenLinear, nn.Linear):
    """A linear layer with a frozen bf16 matrix and, if `has_bias`, a float32 bias, which only `freeze` freezes."""

    def __init__(self, inputs: int, outputs: int, has_bias: bool) -> None:
        super().__init__(inputs, outputs, bias=has_bias)
        self.weight = nn.Parameter(self.weight.to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + bias [..., outputs], in the dtype of autocast, or in that of x if autocast is off."""
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        product: Tensor = _UpcastProduct.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product

    def _keep_matrix(self, values: Tensor) -> None:
        self.weight = nn.Parameter(values.to(torch.bfloat16), requires_grad=False)


# Autograd function: x W^T + bias in the dtype of x, for a frozen W of another dtype. Autograd's own product would keep
# a copy of W in the dtype of x until the backward. This one makes the copy again in the backward. W is not saved with
# save_for_backward, because the layer keeps it anyway.
class _UpcastProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.weight.to(gradient.dtype), None, None
