"""A linear layer whose frozen matrix is kept in 4 bits, as bitsandbytes' Linear4bit.

Imported only when a run needs it: bitsandbytes is slow to import, and optional. Source of NF4 and of the double
quantisation: QLoRA, arXiv 2305.14314, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor

from agora.cost.manifest_cost import NF4_BLOCK
from agora.tuning.adapters.frozen_linear import FrozenLinear


class Nf4Linear(FrozenLinear, Linear4bit):  # type: ignore[misc]
    """A linear layer with a frozen NF4 matrix (double quantisation) and, if `has_bias`, a float32 bias.

    The matrix is dequantised, for each product, to the dtype of autocast, or to float32 if autocast is off.
    """

    weight: Any
    in_features: int
    out_features: int

    def __init__(self, inputs: int, outputs: int, has_bias: bool) -> None:
        super().__init__(inputs, outputs, bias=has_bias, compress_statistics=True, quant_type="nf4")
        # bitsandbytes' kernel for inference repacks the matrix in eval mode and computes in bf16: other values than
        # in training.
        self.support_avx512bf16_for_cpu = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + bias [..., outputs] in the dtype of autocast, or in float32 if autocast is off."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        self.compute_dtype = dtype
        self.compute_type_is_set = True
        self.weight.quant_state.dtype = dtype  # of the matrix that the backward makes: the latest forward's
        product: Tensor = super().forward(x.to(dtype))
        return product

    def _keep_matrix(self, values: Tensor) -> None:
        packed = Params4bit(values, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4")
        self.weight = packed.to("cpu")  # Params4bit quantises in `to`
