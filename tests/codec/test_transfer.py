"""What a job needs goes to the device in one copy, with the same bits."""

from __future__ import annotations

import pytest
import torch

from agora.codec import BoundaryCodec, gradient_dither_key, transfer
from agora.codec.transfer import CPU, Upload, download

SHAPE = (2, 3, 70)


def test_on_the_cpu_nothing_is_copied() -> None:
    tensors = [torch.arange(5), torch.ones(2, 3)]
    assert all(map(lambda one, other: one is other, Upload(tensors, CPU).to_device(), tensors))
    assert download(tensors[0]) is tensors[0]


def test_tensors_of_any_dtype_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "is_apart", lambda device: True)
    tensors = [
        torch.arange(7, dtype=torch.int8),
        torch.randn(3, 5),
        torch.randn(4, 2).bfloat16().T,
        torch.empty(0, dtype=torch.int32),
        torch.tensor([[1, -2]], dtype=torch.int64),
    ]
    for tensor, arrived in zip(tensors, Upload(tensors, CPU).to_device(), strict=True):
        assert arrived is not tensor and arrived.dtype == tensor.dtype and torch.equal(arrived, tensor)
        assert arrived.data_ptr() % transfer.ALIGNMENT_BYTES == 0 or not arrived.numel()


@pytest.mark.parametrize("name", ["bf16", "float32", "int6/int3", "int5h/int2h", "top9:int6/int3", "top9:bf16"])
def test_a_dither_that_was_drawn_before_gives_the_same_bytes_and_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, key = BoundaryCodec(name, 5), gradient_dither_key(bytes(16), 1)
    values = torch.randn(SHAPE)
    wire = codec.encode(values, "backward", key)
    drawn = codec.draw_dither(SHAPE, "backward", key)
    assert bytes(codec.encode(values, "backward", key, dither=drawn).data) == bytes(wire.data)
    decoded = codec.decode(wire, SHAPE, "backward", key)
    monkeypatch.setattr(transfer, "is_apart", lambda device: True)
    parts = Upload(codec.read(wire, SHAPE, "backward", key), CPU).to_device()
    assert torch.equal(codec.decode_parts(parts, SHAPE, "backward"), decoded)
