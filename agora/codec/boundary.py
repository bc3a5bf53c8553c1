"""A boundary's codec: how activations cross forward and their gradients backward, each by the leg that its name says.

Knows legs, shapes, the run's seed. Must not know models, peers or streams. Activations are rounded to the nearest
level. A gradient is rounded with a dither that sender and receiver both know, from the seed, the microbatch and the
stage: small gradients would otherwise vanish in every microbatch alike, and no sum would bring them back.
"""

from __future__ import annotations

import numpy as np
import torch
from agora_protocol.boundary import CodecName, Direction, Leg, Shape, parse_codec
from agora_protocol.errors import ProtocolError
from agora_protocol.tensors import WireTensor
from torch import Tensor

from agora.codec import columns
from agora.codec.dense import CPU, DenseCodec
from agora.codec.quantised import check_scales, dequantise, quantise
from agora.codec.rotation import rotate
from agora.codec.words import random_bytes


def gradient_key(microbatch: bytes, stage: int) -> str:
    """What is unique to one gradient of a run: that of the boundary which enters `stage`, of one microbatch."""
    return f"gradient {stage} {microbatch.hex()}"


class BoundaryCodec:
    """The codec of a manifest's boundary.codec, such as "int8", "int6/int4h" or "top64:bf16". For any thread."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """seed: the run's. Raises ManifestError for a name that is not known, with those that are."""
        self.name = name
        self._codec = parse_codec(name)
        self._seed = seed

    def bytes_per_token(self, k: int, direction: Direction) -> float:
        """Bytes on the wire for a token's `k` values."""
        return self._codec.bytes_per_token(k, direction)

    def encode(
        self, tensor: Tensor, direction: Direction, key: str | None = None, entry: Tensor | None = None
    ) -> WireTensor:
        """A boundary [b, s, k], of any float dtype, layout and device, as bytes.

        key: of the dither (see gradient_key), the same when decoded; None rounds to the nearest. float32 and bf16 do
        not need it, and do not copy a contiguous CPU tensor of theirs: change it only after its bytes are sent.
        entry: the boundary, as it was decoded, whose gradient `tensor` is: where not all columns cross, its gradient
        is sent for those that came; without it, as for a boundary, for the strongest.
        """
        leg = self._codec.leg(direction)
        if not self._codec.columns:
            return self._encode(leg, tensor, key)
        kept = columns.strongest(tensor if entry is None else entry, self._codec.columns)
        wire = columns.written(kept, self._encode(leg, tensor[..., kept], key).data)
        return WireTensor("uint8", wire.shape, wire.data)

    def decode(
        self,
        wire: WireTensor,
        shape: Shape,
        direction: Direction,
        key: str | None = None,
        device: torch.device | str = CPU,
    ) -> Tensor:
        """The boundary as float32 [b, s, k] = `shape` on `device`; columns that did not cross are zeros.

        Raises ProtocolError "bad-tensor" when the dtype or shape is not what the codec makes of `shape`, and for
        scales that are negative, NaN or absurd, and columns that it does not have. Quantised values are finite; of
        float32 and bf16 see all_finite.
        """
        _check(self._codec, wire, shape, direction)
        leg = self._codec.leg(direction)
        if not self._codec.columns:
            return self._decode(leg, wire, shape, key, device)
        kept, data = columns.read(wire.data, self._codec.columns, shape[2])
        some = self._codec.crossing(shape)
        values = self._decode(leg, WireTensor(*leg.wire(some), data), some, key, device)
        whole = torch.zeros(shape, dtype=torch.float32, device=device)
        whole[..., kept.to(device)] = values
        return whole

    def _encode(self, leg: Leg, tensor: Tensor, key: str | None) -> WireTensor:
        if not leg.bits:
            return DenseCodec(leg.name).encode(tensor)
        b, s, k = tensor.shape
        rows = tensor.detach().to(torch.float32).reshape(b * s, k).contiguous()
        if leg.rotated:
            rows = rotate(rows, self._seed)
        wire = quantise(rows, leg.bits, self._fractions(b * s, k, key, rows.device)).to(CPU)
        return WireTensor("uint8", tuple(wire.shape), wire.numpy().data)

    def _decode(self, leg: Leg, wire: WireTensor, shape: Shape, key: str | None, device: torch.device | str) -> Tensor:
        if not leg.bits:
            return DenseCodec(leg.name).decode(wire, device, shape=shape)
        b, s, k = shape
        data = _with_good_scales(wire, shape).to(device)
        values = dequantise(data, b * s, k, leg.bits, self._fractions(b * s, k, key, data.device))
        return (rotate(values, self._seed, back=True) if leg.rotated else values).view(shape)

    def _fractions(self, rows: int, k: int, key: str | None, device: torch.device) -> Tensor | None:
        if key is None:
            return None
        return torch.from_numpy(random_bytes(key, self._seed, rows * k)).view(rows, k).to(device)


def codec_by_name(name: str, seed: int = 0) -> BoundaryCodec:
    """The codec of a manifest's boundary.codec. Raises ManifestError for a name that this version does not have."""
    return BoundaryCodec(name, seed)


def _check(codec: CodecName, wire: WireTensor, shape: Shape, direction: Direction) -> None:
    """Nothing is allocated for a tensor of another dtype or shape."""
    dtype, expected = codec.wire(shape, direction)
    if (wire.dtype, wire.shape) != (dtype, expected):
        name = f"top{codec.columns}:{codec.leg(direction).name}" if codec.columns else codec.leg(direction).name
        raise ProtocolError(
            "bad-tensor", f"The tensor is {wire.dtype} {wire.shape}; {name} makes {dtype} {expected} of {shape}."
        )


def _with_good_scales(wire: WireTensor, shape: Shape) -> Tensor:
    """The wire's bytes."""
    data = np.frombuffer(wire.data, np.uint8)
    checked = torch.from_numpy(data if data.flags.writeable else data.copy())
    check_scales(checked, shape[0] * shape[1], shape[2])
    return checked
