"""Tensors on the wire: a dtype, a shape, and raw little-endian row-major bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from agora_protocol.errors import ProtocolError
from agora_protocol.fields import describe
from agora_protocol.limits import MAX_DIMENSION, MAX_DIMENSIONS, MAX_PAYLOAD_BYTES

ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bf16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
TOKEN_DTYPES: Final = ("uint8", "int16", "int32")  # the dtypes in which token ids may be sent, from the narrowest
SUPERVISED: Final = 1  # the bit of a token's mark that is set if its prediction by earlier tokens counts in the loss
BEGINS: Final = 2  # the bit of a token's mark that is set if the token begins a sequence


class TensorSpec(NamedTuple):
    """One tensor as a frame's header describes it, already checked; `nbytes` is its size. Immutable."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def count_bytes(dtype: Any, shape: Any) -> int:
    """Returns a tensor's size in bytes.

    Raises ProtocolError("bad-tensor") for an unknown dtype, a malformed shape, and more than MAX_PAYLOAD_BYTES.
    """
    item_bytes = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item_bytes is None:
        raise ProtocolError("bad-tensor", f"{describe(dtype)} is not a dtype; use one of {', '.join(ITEM_BYTES)}.")
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
        raise ProtocolError("bad-tensor", f"A shape must be a list of at most {MAX_DIMENSIONS} dimensions.")
    nbytes = item_bytes
    for dimension in shape:
        if type(dimension) is not int or not 1 <= dimension <= MAX_DIMENSION:
            raise ProtocolError(
                "bad-tensor", f"A dimension is {describe(dimension)}; it must be from 1 to {MAX_DIMENSION}."
            )
        nbytes *= dimension
        if nbytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError("bad-tensor", f"The tensor has more than {MAX_PAYLOAD_BYTES} bytes.")
    return nbytes


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor as it is sent and received; immutable. `data` is a flat view of exactly its bytes; nothing is copied."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        view = self.data if isinstance(self.data, memoryview) else memoryview(self.data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if view is not self.data:
            object.__setattr__(self, "data", view)
        needed = count_bytes(self.dtype, self.shape)
        if view.nbytes != needed:
            raise ProtocolError(
                "bad-tensor", f"A {self.dtype} tensor of shape {self.shape} has {needed} bytes, not {view.nbytes}."
            )

    @classmethod
    def from_spec(cls, spec: TensorSpec, data: memoryview) -> Self:
        """Returns a tensor without checking it again; `data` must be flat and have `spec.nbytes` bytes."""
        made = object.__new__(cls)
        object.__setattr__(made, "dtype", spec.dtype)
        object.__setattr__(made, "shape", spec.shape)
        object.__setattr__(made, "data", data)
        return made

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
