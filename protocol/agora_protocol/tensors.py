"""Tensors as they cross the wire: a dtype, a shape, and raw little-endian row-major bytes. Knows no tensor library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from agora_protocol.errors import ProtocolError
from agora_protocol.fields import shown
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
TOKEN_DTYPES: Final = ("uint8", "int16", "int32")
"""How token ids may travel; from the narrowest."""


class TensorSpec(NamedTuple):
    """What a frame's header says of one tensor, checked; `nbytes` follows from the other two."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def check(dtype: Any, shape: Any) -> int:
    """The byte count of such a tensor. Raises ProtocolError("bad-tensor") for what is not allowed."""
    item_bytes = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item_bytes is None:
        raise ProtocolError("bad-tensor", f"{shown(dtype)} is not a dtype; use one of {', '.join(ITEM_BYTES)}.")
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
        raise ProtocolError("bad-tensor", f"A shape must be a list of at most {MAX_DIMENSIONS} dimensions.")
    nbytes = item_bytes
    for dimension in shape:
        if type(dimension) is not int or not 1 <= dimension <= MAX_DIMENSION:
            raise ProtocolError(
                "bad-tensor", f"A dimension is {shown(dimension)}; it must be from 1 to {MAX_DIMENSION}."
            )
        nbytes *= dimension
        if nbytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError("bad-tensor", f"The tensor has more than {MAX_PAYLOAD_BYTES} bytes.")
    return nbytes


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor on its way: `data` is a flat view of exactly the bytes, owned by whoever made it."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        view = self.data if isinstance(self.data, memoryview) else memoryview(self.data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if view is not self.data:
            object.__setattr__(self, "data", view)
        needed = check(self.dtype, self.shape)
        if view.nbytes != needed:
            raise ProtocolError(
                "bad-tensor", f"A {self.dtype} tensor of shape {self.shape} has {needed} bytes, not {view.nbytes}."
            )

    @classmethod
    def over(cls, spec: TensorSpec, data: memoryview) -> Self:
        """The tensor of a spec from `check`, which is not checked again; `data` must be flat and have `spec.nbytes`."""
        made = object.__new__(cls)
        object.__setattr__(made, "dtype", spec.dtype)
        object.__setattr__(made, "shape", spec.shape)
        object.__setattr__(made, "data", data)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.data.nbytes
