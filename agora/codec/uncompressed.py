"""Converts tensors to raw bytes and back: boundaries as bf16 or float32, token ids as the narrowest integers that fit.

Values are little-endian on the wire, as in the memory of every machine that torch supports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.tensors import TOKEN_DTYPES, WireTensor
from numpy.typing import NDArray
from torch import Tensor

from agora.codec.transfer import CPU, download

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
}
IGNORED = -1  # the token id of a target that is not supervised


def encode_uncompressed(tensor: Tensor, dtype: str) -> WireTensor:
    """Converts a tensor of any dtype, layout and device to a wire tensor of `dtype`, a key of DTYPES.

    May alias `tensor` (contiguous, of the same dtype, on the CPU): do not change it before the result is sent.
    """
    return WireTensor(dtype, tuple(tensor.shape), download(bytes_of(tensor, dtype)).numpy().data)


def bytes_of(tensor: Tensor, dtype: str) -> Tensor:
    """Returns the bytes of a tensor of any dtype and layout as `dtype`, uint8 on its device; may alias it."""
    return tensor.detach().to(DTYPES[dtype]).contiguous().reshape(-1).view(torch.uint8)


def decode_uncompressed(
    wire: WireTensor, dtype: str, device: torch.device | str = CPU, *, shape: Sequence[int] | None = None
) -> Tensor:
    """Converts a wire tensor to float32 on `device`; may alias it. Values may be NaN or infinite: see is_all_finite.

    Raises ProtocolError "bad-tensor" for another dtype or shape (None: any).
    """
    return _from_wire(wire, dtype, shape).to(device, torch.float32)


def encode_tokens(tokens: Tensor | NDArray[np.int32]) -> WireTensor:
    """Converts token ids of any shape to the narrowest dtype of TOKEN_DTYPES that holds all of them; may alias them.

    tokens: from -1 to 2^31 - 1, which is not checked; at least one.
    """
    ids = torch.as_tensor(tokens)
    low, high = (int(bound) for bound in torch.aminmax(ids))
    limits = {name: torch.iinfo(DTYPES[name]) for name in TOKEN_DTYPES}
    fitting = (name for name, limit in limits.items() if limit.min <= low and high <= limit.max)
    return encode_uncompressed(ids, next(fitting, "int32"))


def decode_tokens(wire: WireTensor, vocabulary: int, *, shape: Sequence[int] | None = None) -> Tensor:
    """Converts a wire tensor of token ids, IGNORED where not supervised, to int32 on the CPU; may alias it.

    Raises ProtocolError "bad-tensor" for another dtype than TOKEN_DTYPES, another shape (None: any), or an id that is
    not from -1 to vocabulary - 1.
    """
    if wire.dtype not in TOKEN_DTYPES:
        raise ProtocolError("bad-tensor", f"Token ids are {wire.dtype}; they travel as {', '.join(TOKEN_DTYPES)}.")
    tokens = _from_wire(wire, wire.dtype, shape)
    if tokens.numel():
        ids = tokens.numpy()
        low, high = int(ids.min()), int(ids.max())
        if low < IGNORED or high >= vocabulary:
            raise ProtocolError(
                "bad-tensor",
                f"Token ids {low} to {high} are outside {IGNORED} to {vocabulary - 1}, the ids of the run's model.",
            )
    return tokens.to(torch.int32)


def is_all_finite(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    # One pass without a temporary tensor: aminmax propagates NaN and infinity.
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _from_wire(wire: WireTensor, name: str, shape: Sequence[int] | None) -> Tensor:
    if wire.dtype != name:
        raise ProtocolError("bad-tensor", f"The tensor is {wire.dtype}; this run sends {name}.")
    if shape is not None and wire.shape != tuple(shape):
        raise ProtocolError("bad-tensor", f"The tensor has shape {wire.shape}; the manifest implies {tuple(shape)}.")
    return read_values(wire.data, name, wire.shape)


def read_values(data: memoryview, dtype: str, shape: Sequence[int]) -> Tensor:
    """Returns `data` as a tensor on the CPU, of a key of DTYPES and as many values as `shape`; may alias it."""
    if not data.readonly:
        shared = torch.frombuffer(data, dtype=DTYPES[dtype])
        if shared.data_ptr() % shared.itemsize == 0:
            return shared.view(shape)
    # torch does not support read-only and unaligned bytes
    copy = torch.empty(shape, dtype=DTYPES[dtype])
    copy.view(-1).view(torch.uint8).numpy().data[:] = data
    return copy
