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
from agora.codec.uncompressed import CPU, decode_uncompressed, encode_uncompressed

COLUMN_DTYPE: np.dtype[np.uint16] = np.dtype("<u2")


def gradient_dither_key(microbatch: bytes, stage: int) -> str:
    """Returns the dither key for the gradient of the boundary that enters `stage`."""
    return f"gradient {stage} {microbatch.hex()}"


class BoundaryCodec:
    """Encodes and decodes boundaries and their gradients by the manifest's boundary.codec. Any thread may use it.

    name: such as "int8", "int6/int4h" (boundaries in 6 bits, gradients rotated and in 4 bits) or "top64:bf16" (only the
    64 strongest columns, as bf16). seed: the run's. Raises ManifestError for an unknown name.
    """

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self._spec = parse_codec(name)
        self._seed = seed

    def encode(
        self, tensor: Tensor, direction: Direction, key: str | None = None, boundary: Tensor | None = None
    ) -> WireTensor:
        """Encodes a boundary or gradient [b, s, k], of any float dtype, layout and device, as a wire tensor.

        direction: chooses the codec. key: of the dither (see gradient_dither_key), the same as for `decode`; None
        rounds to nearest. float32 and bf16 ignore the key; their result may share the memory of `tensor`, which must
        not change before the result is sent. Values that are not finite do not raise; see `decode`.

        boundary: for a gradient, the decoded boundary that the gradient belongs to: a codec that sends only some
        columns then sends the gradients of the columns that had been sent. None: such a codec sends the columns with
        the largest sums of squares in `tensor`.
        """
        codec = self._spec.of_direction(direction)
        if not self._spec.columns:
            return self._encode_values(codec, tensor, key)
        columns = strongest_columns(tensor if boundary is None else boundary, self._spec.columns)
        numbers = columns.to(CPU).numpy().astype(COLUMN_DTYPE).view(np.uint8)
        values = np.frombuffer(self._encode_values(codec, tensor[..., columns], key).data, np.uint8)
        packed = np.concatenate((numbers, values))
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

        direction, key: those given to `encode`. The result may share the bytes of `wire` for float32 on the CPU. Raises
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
        if not self._spec.columns:
            return self._decode_values(codec, wire, shape, key, device)
        columns, data = unpack_columns(wire.data, self._spec.columns, shape[2])
        sent_shape = self._spec.sent_shape(shape)
        dtype, flat_shape = codec.wire_format(sent_shape)
        sent = self._decode_values(codec, WireTensor(dtype, flat_shape, data), sent_shape, key, device)
        tensor = torch.zeros(shape, dtype=torch.float32, device=device)
        tensor[..., columns.to(device)] = sent
        return tensor

    def _encode_values(self, codec: DirectionCodec, tensor: Tensor, key: str | None) -> WireTensor:
        if not codec.bits:
            return encode_uncompressed(tensor, codec.name)
        b, s, k = tensor.shape
        rows = tensor.detach().to(torch.float32).reshape(b * s, k).contiguous()
        if codec.rotated:
            rows = rotate_blocks(rows, self._seed)
        wire = quantise(rows, codec.bits, self._dither(b * s, k, key, rows.device)).to(CPU)
        return WireTensor("uint8", tuple(wire.shape), wire.numpy().data)

    def _decode_values(
        self, codec: DirectionCodec, wire: WireTensor, shape: Shape, key: str | None, device: torch.device | str
    ) -> Tensor:
        if not codec.bits:
            return decode_uncompressed(wire, codec.name, device, shape=shape)
        b, s, k = shape
        data = np.frombuffer(wire.data, np.uint8)
        quantised = torch.from_numpy(data if data.flags.writeable else data.copy())
        check_scales(quantised, b * s, k)
        quantised = quantised.to(device)
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
