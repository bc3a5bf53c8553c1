"""Encodes and decodes boundaries: activations forward and their gradients backward, each by its direction's codec.

Activations are rounded to the nearest level. Gradients are rounded with a dither that sender and receiver both derive:
rounded to nearest, small gradients would become zero in every microbatch, and so would their sum. All tokens of a
microbatch share the columns that are sent, so that the columns' numbers cost almost nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from agora_protocol.codec_names import COLUMN_BYTES, Direction, DirectionCodec, Shape, parse_codec
from agora_protocol.errors import ProtocolError
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec.quantisation import check_scales, dequantise, quantise
from agora.codec.seeded_random import draw_dither, rotate_blocks
from agora.codec.uncompressed import CPU, encode_uncompressed, read_values

COLUMN_DTYPE: np.dtype[np.uint16] = np.dtype("<u2")


def gradient_dither_key(microbatch: bytes, stage: int) -> str:
    """Returns the dither key for the gradient of the boundary that enters `stage`."""
    return f"gradient {stage} {microbatch.hex()}"


class BoundaryCodec:
    """Encodes and decodes boundaries and their gradients by the manifest's boundary.codec. Any thread may use it."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """name: such as "int8", "int6/int4h" (boundaries in 6 bits, gradients rotated and in 4 bits) or "top64:bf16"
        (only the 64 strongest columns, as bf16). seed: the run's. Raises ManifestError for an unknown name.
        """
        self.name = name
        self._spec = parse_codec(name)
        self._seed = seed

    def encode(
        self, tensor: Tensor, direction: Direction, key: str | None = None, boundary: Tensor | None = None
    ) -> WireTensor:
        """Encodes a boundary or gradient [b, s, k], of any float dtype, layout and device, as a wire tensor.

        key: of the dither (see gradient_dither_key), the same as for `decode`; None rounds to nearest. boundary: for a
        gradient, the decoded boundary that it belongs to, whose columns a codec of only some columns sends again. The
        result may share the memory of `tensor`, which must not change before the result is sent. Values that are not
        finite do not raise; see `decode`.
        """
        codec = self._spec.of_direction(direction)
        if not self._spec.columns:
            return self._quantise(tensor, codec, key) if codec.bits else encode_uncompressed(tensor, codec.name)
        columns = strongest_columns(tensor if boundary is None else boundary, self._spec.columns)
        sent = tensor[..., columns]
        values = self._quantise(sent, codec, key) if codec.bits else encode_uncompressed(sent, codec.name)
        numbers = columns.to(CPU).numpy().astype(COLUMN_DTYPE).view(np.uint8)
        packed = np.concatenate((numbers, np.frombuffer(values.data, np.uint8)))
        return WireTensor("uint8", packed.shape, packed.data)

    def decode(
        self,
        wire: WireTensor,
        shape: Shape,
        direction: Direction,
        key: str | None = None,
        device: torch.device | str = CPU,
    ) -> Tensor:
        """Decodes a wire tensor to float32 [b, s, k] = `shape` on `device`; columns that were not sent are zeros.

        The result may share the bytes of `wire`. Raises
        ProtocolError "bad-tensor" for another dtype or shape than the codec makes of `shape` (before anything is
        allocated), for a scale out of range, and for wrong column numbers. Quantised values are always finite; values
        of float32 and bf16 must be checked with is_all_finite.
        """
        codec = self._spec.of_direction(direction)
        expected = self._spec.wire_format(shape, direction)
        if (wire.dtype, wire.shape) != expected:
            name = f"top{self._spec.columns}:{codec.name}" if self._spec.columns else codec.name
            raise ProtocolError(
                "bad-tensor",
                f"The tensor is {wire.dtype} {wire.shape}; {name} makes {expected[0]} {expected[1]} of {shape}.",
            )
        data, columns, sent_shape = wire.data, None, self._spec.sent_shape(shape)
        if self._spec.columns:
            columns, data = unpack_columns(data, self._spec.columns, shape[2])
        if codec.bits:
            sent = self._dequantise(read_values(data, "uint8", [len(data)]), sent_shape, codec, key, device)
        else:
            sent = read_values(data, codec.name, sent_shape).to(device, torch.float32)
        if columns is None:
            return sent
        tensor = torch.zeros(shape, dtype=torch.float32, device=device)
        tensor[..., columns.to(device)] = sent
        return tensor

    def _quantise(self, tensor: Tensor, codec: DirectionCodec, key: str | None) -> WireTensor:
        b, s, k = tensor.shape
        rows = tensor.detach().to(torch.float32).reshape(b * s, k).contiguous()
        if codec.rotated:
            rows = rotate_blocks(rows, self._seed)
        wire = quantise(rows, codec.bits, self._dither(b * s, k, key, rows.device)).to(CPU)
        return WireTensor("uint8", tuple(wire.shape), wire.numpy().data)

    def _dequantise(
        self, wire: Tensor, shape: Shape, codec: DirectionCodec, key: str | None, device: torch.device | str
    ) -> Tensor:
        b, s, k = shape
        check_scales(wire, b * s, k)
        quantised = wire.to(device)
        rows = dequantise(quantised, b * s, k, codec.bits, self._dither(b * s, k, key, quantised.device))
        return (rotate_blocks(rows, self._seed, inverse=True) if codec.rotated else rows).view(shape)

    def _dither(self, rows: int, k: int, key: str | None, device: torch.device) -> Tensor | None:
        return None if key is None else draw_dither(key, self._seed, rows, k).to(device)


def strongest_columns(tensor: Tensor, count: int) -> Tensor:
    """Returns the ascending indices, int64 [count], of the columns of [b, s, k] with the largest sums of squares."""
    # A decoded boundary has zeros in every column that was not sent, so its strongest columns are those that were.
    energies = tensor.detach().to(torch.float32).flatten(0, 1).square().sum(dim=0)
    return energies.topk(count).indices.sort().values


def unpack_columns(data: memoryview, count: int, k: int) -> tuple[Tensor, memoryview]:
    """Returns the `count` column numbers at the beginning of wire data, int64 [count], and a view of the rest.

    Raises ProtocolError "bad-tensor" when the numbers do not ascend or one is not below the boundary's width `k`.
    """
    split = COLUMN_BYTES * count
    columns = np.frombuffer(data[:split], COLUMN_DTYPE).astype(np.int64)
    if columns[-1] >= k or (np.diff(columns) <= 0).any():
        raise ProtocolError("bad-tensor", f"The column numbers do not ascend, or reach {k}, the boundary's width.")
    return torch.from_numpy(columns), data[split:]
