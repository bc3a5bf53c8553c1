"""Encodes and decodes boundaries: activations forward and their gradients backward, each by its direction's codec.

Activations are rounded to the nearest level. Gradients are rounded with a dither that sender and receiver both derive:
rounded to nearest, small gradients would become zero in every microbatch, and so would their sum. All tokens of a
microbatch share the columns that are sent, so that the columns' numbers cost almost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from agora_protocol.codec_names import COLUMN_BYTES, Direction, DirectionCodec, Shape, parse_codec
from agora_protocol.errors import ProtocolError
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec.quantisation import check_scales, dequantise, quantise
from agora.codec.seeded_random import draw_dither, rotate_blocks
from agora.codec.transfer import CPU, Upload, download, start_download
from agora.codec.uncompressed import bytes_of, read_values

# Of the formats that are not quantised: the word of a value, and in it the bits that NaN and infinity have set.
EXPONENT_BITS: Final = {"bf16": ("<u2", 0x7F80), "float32": ("<u4", 0x7F800000)}
COLUMN_DTYPE: np.dtype[np.uint16] = np.dtype("<u2")
COLUMN_TORCH_DTYPE: Final = torch.uint16


def gradient_dither_key(microbatch: bytes, stage: int) -> str:
    """Returns the dither key for the gradient of the boundary that enters `stage`."""
    return f"gradient {stage} {microbatch.hex()}"


class EncodedTensor(NamedTuple):
    """A wire tensor whose bytes, `data`, uint8 [n], are still on the device that computes them."""

    dtype: str
    shape: tuple[int, ...]
    data: Tensor

    def to_wire(self, on_host: Tensor) -> WireTensor:
        """on_host: `data` on the CPU."""
        return WireTensor(self.dtype, self.shape, on_host.numpy().data)


class Download:
    """What a job has computed, on its way to the host in one copy, for which the host does not wait."""

    def __init__(self, values: Tensor | None, encoded: EncodedTensor | None) -> None:
        """values: float32 [n]. On the CPU nothing is copied."""
        self._encoded = encoded
        parts = [] if values is None else [values.detach().view(torch.uint8)]  # first, where they are aligned
        parts += [] if encoded is None else [encoded.data]
        self._has_values = values is not None
        self._parts = start_download(parts)

    def on_host(self) -> tuple[list[float], WireTensor | None]:
        """Returns the values, and what was encoded. Call it once all work has ended that was launched before."""
        parts = list(self._parts)
        # Not tolist: that waits for a device, and these are on the host.
        values = [float(value) for value in parts.pop(0).numpy().view(np.float32)] if self._has_values else []
        return values, None if self._encoded is None else self._encoded.to_wire(parts.pop())


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
        self,
        tensor: Tensor,
        direction: Direction,
        key: str | None = None,
        boundary: Tensor | None = None,
        dither: Tensor | None = None,
    ) -> WireTensor:
        """Encodes a boundary or gradient [b, s, k], of any float dtype, layout and device, as a wire tensor.

        key: of the dither (see gradient_dither_key), the same as for `decode`; None rounds to nearest. dither: what
        draw_dither gave for that key, on the device already. boundary: for a gradient, the decoded boundary that it
        belongs to, whose columns a codec of only some columns sends again. The result may share the memory of `tensor`,
        which must not change before the result is sent. Values that are not finite do not raise; see `decode`.
        """
        encoded = self.encode_on_device(tensor, direction, key, boundary, dither)
        return encoded.to_wire(download(encoded.data))

    def encode_on_device(
        self,
        tensor: Tensor,
        direction: Direction,
        key: str | None = None,
        boundary: Tensor | None = None,
        dither: Tensor | None = None,
    ) -> EncodedTensor:
        """As `encode`, but leaves the bytes on the tensor's device; the host waits for nothing."""
        codec = self._spec.of_direction(direction)
        if key is not None and dither is None:
            b, s, k = tensor.shape
            drawn = self.draw_dither((b, s, k), direction, key)
            dither = None if drawn is None else drawn.to(tensor.device)
        if self._spec.columns:
            columns = strongest_columns(tensor if boundary is None else boundary, self._spec.columns)
            sent = tensor[..., columns]
            values = self._quantised_bytes(sent, codec, dither) if codec.bits else bytes_of(sent, codec.name)
            data = torch.cat((columns.to(COLUMN_TORCH_DTYPE).view(torch.uint8), values))
        elif codec.bits:
            data = self._quantised_bytes(tensor, codec, dither)
        else:
            return EncodedTensor(codec.name, tuple(tensor.shape), bytes_of(tensor, codec.name))
        return EncodedTensor("uint8", tuple(data.shape), data)

    def draw_dither(self, shape: Shape, direction: Direction, key: str) -> Tensor | None:
        """Draws the dither of a boundary of this shape, int8 on the CPU; None if its format has none.

        Takes a millisecond for 2 M values, and may be done before they are known.
        """
        if not self._spec.of_direction(direction).bits:
            return None
        b, s, k = self._spec.sent_shape(shape)
        return draw_dither(key, self._seed, b * s, k)

    def decode(
        self,
        wire: WireTensor,
        shape: Shape,
        direction: Direction,
        key: str | None = None,
        device: torch.device = CPU,
    ) -> Tensor:
        """Decodes a wire tensor to float32 [b, s, k] = `shape` on `device`; columns that were not sent are zeros.

        The result may share the bytes of `wire`. Quantised values are always finite; for those of float32 and bf16 see
        has_finite_values. Raises what `read` raises.
        """
        parts = self.read(wire, shape, direction, key)
        return self.decode_parts(Upload(parts, device).to_device(), shape, direction)

    def read(self, wire: WireTensor, shape: Shape, direction: Direction, key: str | None = None) -> list[Tensor]:
        """Returns what decode_parts needs on its device, tensors on the CPU; they may share the bytes of `wire`.

        Raises ProtocolError "bad-tensor" for another dtype or shape than the codec makes of `shape` (before anything is
        allocated), for a scale out of range, and for wrong column numbers.
        """
        codec = self._spec.of_direction(direction)
        expected = self._spec.wire_format(shape, direction)
        if (wire.dtype, wire.shape) != expected:
            name = f"top{self._spec.columns}:{codec.name}" if self._spec.columns else codec.name
            raise ProtocolError(
                "bad-tensor",
                f"The tensor is {wire.dtype} {wire.shape}; {name} makes {expected[0]} {expected[1]} of {shape}.",
            )
        data, parts, sent_shape = wire.data, [], self._spec.sent_shape(shape)
        if self._spec.columns:
            columns, data = unpack_columns(data, self._spec.columns, shape[2])
            parts.append(columns)
        if not codec.bits:
            return [*parts, read_values(data, codec.name, sent_shape)]
        b, s, k = sent_shape
        quantised = read_values(data, "uint8", [len(data)])
        check_scales(quantised, b * s, k)
        dither = [] if key is None else [draw_dither(key, self._seed, b * s, k)]
        return [*parts, quantised, *dither]

    def decode_parts(self, parts: Sequence[Tensor], shape: Shape, direction: Direction) -> Tensor:
        """Returns what `decode` returns, on the device of `parts`, which `read` gave and nothing may change."""
        codec = self._spec.of_direction(direction)
        rest = list(parts)
        columns = rest.pop(0) if self._spec.columns else None
        values, dither = rest.pop(0), rest.pop(0) if rest else None
        if codec.bits:
            sent = self._dequantise(values, self._spec.sent_shape(shape), codec, dither)
        else:
            sent = values.to(torch.float32)
        if columns is None:
            return sent
        tensor = torch.zeros(shape, dtype=torch.float32, device=sent.device)
        tensor[..., columns] = sent
        return tensor

    def has_finite_values(self, wire: WireTensor, direction: Direction) -> bool:
        """Returns whether all values of a wire tensor that `decode` has taken are finite.

        It reads the wire's bytes, so that the host need not wait for a device to say it.
        """
        codec = self._spec.of_direction(direction)
        if codec.bits:
            return True
        word, exponent = EXPONENT_BITS[codec.name]
        values = np.frombuffer(wire.data[COLUMN_BYTES * self._spec.columns :], word)
        return bool((values & exponent).max(initial=0) < exponent)

    def _quantised_bytes(self, tensor: Tensor, codec: DirectionCodec, dither: Tensor | None) -> Tensor:
        b, s, k = tensor.shape
        rows = tensor.detach().to(torch.float32).reshape(b * s, k).contiguous()
        if codec.rotated:
            rows = rotate_blocks(rows, self._seed)
        return quantise(rows, codec.bits, dither)

    def _dequantise(self, wire: Tensor, shape: Shape, codec: DirectionCodec, dither: Tensor | None) -> Tensor:
        b, s, k = shape
        rows = dequantise(wire, b * s, k, codec.bits, dither)
        return (rotate_blocks(rows, self._seed, inverse=True) if codec.rotated else rows).view(shape)


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
