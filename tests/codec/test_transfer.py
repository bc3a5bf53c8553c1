"""What a job needs goes to the device in one copy, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from agora.codec import BoundaryCodec, Download, gradient_dither_key, transfer
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


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("name", ["bf16", "float32", "int6/int3", "top9:int6/int3", "top9:bf16"])
def test_what_a_job_computed_comes_back_with_the_values_that_decide_about_it(
    name: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "is_apart", lambda device: is_apart)
    codec, values = BoundaryCodec(name, 5), torch.randn(SHAPE)
    expected, read = codec.encode(values, "forward"), torch.tensor([0.1, float("inf"), -3.0])
    encoded = codec.encode_on_device(values, "forward")
    for given, wanted in ((read, read.tolist()), (None, [])):
        found, wire = Download(given, encoded).on_host()
        assert found == wanted and wire is not None
        assert (wire.dtype, wire.shape, bytes(wire.data)) == (expected.dtype, expected.shape, bytes(expected.data))
    assert Download(read, None).on_host() == (read.tolist(), None)
    assert Download(None, None).on_host() == ([], None)


class FakeStream:
    """A CUDA stream of a fake device: it writes down what was put on it, and which other streams it waits for."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def wait_stream(self, other: FakeStream) -> None:
        self.order.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """torch.cuda with three streams, and tensors of which copies and recorded streams are written down."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.computing, self.to_device, self.to_host = (
            FakeStream(name, self.order) for name in ("computing", "to device", "to host")
        )
        self.current = self.computing

    def current_stream(self, device: object) -> FakeStream:
        return self.computing

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeTensor:
    """A tensor that lies on a device, or in pinned memory."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.device, self.dtype, self.shape = torch.device("cuda", 0), torch.uint8, (3,)

    def to(self, device: torch.device, *, non_blocking: bool) -> FakeTensor:
        assert non_blocking
        self.cuda.order.append(f"copy {self.name} on {self.cuda.current.name}")
        return FakeTensor(self.cuda, "copied")

    def copy_(self, other: FakeTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.order.append(f"copy {other.name} on {self.cuda.current.name}")

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.order.append(f"{self.name} is used on {stream.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(transfer, "copy_streams", lambda device: transfer.CopyStreams(fake.to_device, fake.to_host))
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    return fake


def test_a_copy_to_a_gpu_runs_beside_its_kernels_and_those_that_read_it_wait_for_it(cuda: FakeCuda) -> None:
    copied = vars(transfer)["_copy_to_cuda"](FakeTensor(cuda, "staged"), torch.device("cuda", 0))
    assert copied.name == "copied"
    assert cuda.order == [
        "copy staged on to device",
        "computing waits for to device",
        "copied is used on computing",
    ]


def test_a_copy_from_a_gpu_waits_for_what_computes_it_and_keeps_its_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[bool] = []

    def empty(shape: object, *, dtype: torch.dtype, pin_memory: bool) -> FakeTensor:
        pinned.append(pin_memory)
        return FakeTensor(cuda, "staged")

    monkeypatch.setattr(torch, "empty", empty)
    vars(transfer)["_copy_from_cuda"](FakeTensor(cuda, "result"))
    assert pinned == [True]
    assert cuda.order == [
        "to host waits for computing",
        "copy result on to host",
        "result is used on to host",
    ]
