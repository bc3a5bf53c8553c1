"""A linear layer whose frozen matrix is kept in 4 bits, as bitsandbytes' Linear4bit.

Imported only when a run needs it: bitsandbytes is slow to import, and optional. Source of NF4 and of the double
quantisation: QLoRA, arXiv 2305.14314, section 3.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor

from agora.cost.manifest_cost import NF4_BLOCK, NF4_BLOCKS_OF_SCALE
from agora.tuning.adapters.frozen_linear import FrozenLinear

# Values that a thread quantises at a time: whole blocks, which lie in its cache, and so few that torch does not divide
# them among further threads.
PIECE: Final = 1 << 15


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
        packed, state = quantise(values, torch.get_num_threads())
        self.weight = Params4bit(
            packed,
            blocksize=NF4_BLOCK,
            compress_statistics=True,
            quant_type="nf4",
            quant_state=state,
            bnb_quantized=True,
        )


def quantise(values: Tensor, threads: int) -> tuple[Tensor, QuantState]:
    """Returns a float32 matrix on the CPU as packed NF4, uint8 [(n + 1) // 2, 1], and its scales: bitsandbytes' bits.

    bitsandbytes computes mostly on one thread, and in passes over the whole matrix, with temporary tensors of several
    times its size.
    """
    flat = values.contiguous().flatten()
    packed = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8)
    scales = torch.empty(-(-len(flat) // NF4_BLOCK))

    def quantise_piece(start: int) -> None:
        with torch.inference_mode():
            found, largest = torch.ops.bitsandbytes.quantize_4bit.default(
                flat[start : start + PIECE], NF4_BLOCK, "nf4", torch.uint8
            )
            packed[start // 2 :][: len(found)] = found
            scales[start // NF4_BLOCK :][: len(largest)] = largest

    with ThreadPoolExecutor(threads, thread_name_prefix="nf4") as pool:
        for _ in pool.map(quantise_piece, range(0, len(flat), PIECE)):
            pass
    offset = scales.mean()
    of_scales, state = quantize_blockwise(scales - offset, blocksize=NF4_BLOCKS_OF_SCALE)
    return packed, QuantState(
        absmax=of_scales,
        shape=values.shape,
        dtype=values.dtype,
        blocksize=NF4_BLOCK,
        code=get_4bit_type("nf4", device="cpu"),
        quant_type="nf4",
        offset=offset,
        state2=state,
    )
