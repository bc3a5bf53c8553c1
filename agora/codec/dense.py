"""The plain codecs: a boundary as raw bf16 or float32, token ids as the narrowest integers that hold them.

Knows dtypes, shapes and who owns the bytes. Copies only where dtype, device or layout demand it. Must not know what a
tensor means. Values are little-endian on the wire, as in the memory of every machine that torch supports.
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

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
}
IGNORED = -1
CPU = torch.device("cpu")


class DenseCodec:
    """Every value of the boundary, in the wire dtype `name` ("bf16" rounds to nearest even, "float32" is exact)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, tensor: Tensor) -> WireTensor:
        """tensor, of any float dtype, layout and device, as bytes.

        Does not copy a contiguous CPU tensor of the wire dtype: change such a tensor only after its bytes are sent.
        """
        return _to_wire(tensor, self.name)

    def decode(
        self, wire: WireTensor, device: torch.device | str = CPU, *, shape: Sequence[int] | None = None
    ) -> Tensor:
        """float32 tensor on `device`. float32 bytes that may be written and stay on the CPU are shared, not copied.

        Raises ProtocolError "bad-tensor" when the dtype is not this codec's or the shape is not `shape`. Says
        nothing about the values: see all_finite.
        """
        return _from_wire(wire, self.name, shape).to(device, torch.float32)


def encode_tokens(tokens: Tensor | NDArray[np.int32]) -> WireTensor:
    """Token ids [b, s + 1], any integer dtype, none below -1 or above 2^31 - 1, in the narrowest of TOKEN_DTYPES."""
    ids = torch.as_tensor(tokens)
    low, high = (int(bound) for bound in torch.aminmax(ids))
    holds = (
        name for name in TOKEN_DTYPES if torch.iinfo(DTYPES[name]).min <= low and high <= torch.iinfo(DTYPES[name]).max
    )
    return _to_wire(ids, next(holds, "int32"))


def decode_tokens(
    wire: WireTensor,
    vocabulary: int,
    device: torch.device | str = CPU,
    *,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Token ids as an int32 tensor on `device`; an id of -1 marks a target that is not supervised.

    Raises ProtocolError "bad-tensor" as DenseCodec.decode does, and for an id outside -1 .. vocabulary - 1.
    """
    if wire.dtype not in TOKEN_DTYPES:
        raise ProtocolError("bad-tensor", f"Token ids are {wire.dtype}; they travel as {', '.join(TOKEN_DTYPES)}.")
    tokens = _from_wire(wire, wire.dtype, shape)
    if tokens.numel():
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < IGNORED or high >= vocabulary:
            raise ProtocolError(
                "bad-tensor",
                f"Token ids {low} to {high} are outside {IGNORED} to {vocabulary - 1}, what the run's model has.",
            )
    return tokens.to(device, torch.int32)


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass without a temporary: NaN and infinity both reach the extremes."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _to_wire(tensor: Tensor, name: str) -> WireTensor:
    plain = tensor.detach().to(CPU, DTYPES[name]).contiguous()
    return WireTensor(name, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().data)


def _from_wire(wire: WireTensor, name: str, shape: Sequence[int] | None) -> Tensor:
    """The wire's bytes as a CPU tensor of the wire dtype, sharing them where torch can."""
    if wire.dtype != name:
        raise ProtocolError("bad-tensor", f"The tensor is {wire.dtype}; this run sends {name}.")
    if shape is not None and wire.shape != tuple(shape):
        raise ProtocolError("bad-tensor", f"The tensor has shape {wire.shape}; the manifest implies {tuple(shape)}.")
    return _shared_or_copied(wire.data, DTYPES[name]).view(wire.shape)


def _shared_or_copied(data: memoryview, dtype: torch.dtype) -> Tensor:
    """torch cannot express read-only memory (it warns), and wants its elements aligned: such bytes are copied."""
    if not data.readonly:
        shared = torch.frombuffer(data, dtype=dtype)
        if shared.data_ptr() % dtype.itemsize == 0:
            return shared
    copy = torch.empty(len(data) // dtype.itemsize, dtype=dtype)
    copy.view(torch.uint8).numpy().data[:] = data
    return copy
