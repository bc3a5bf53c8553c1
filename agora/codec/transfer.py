"""Copies between host and device: all tensors of a job in one copy each way, from and to pinned memory on a GPU.

On a GPU each direction has a stream of its own, so that the copies of one job run while the device computes another.
Three rules keep memory from being used again too early: the stream that reads what another one wrote waits for it; a
tensor that a second stream uses is recorded there, so that torch gives its memory away only after that use; pinned
memory is never used again before its copy has ended, for which torch keeps an event of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")
ALIGNMENT_BYTES: Final = 64  # at which each tensor begins


class CopyStreams(NamedTuple):
    """The CUDA streams of the copies to a device, and of those back to the host."""

    to_device: torch.cuda.Stream
    to_host: torch.cuda.Stream


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    to_device, to_host = (torch.cuda.Stream(device) for _ in CopyStreams._fields)  # type: ignore[no-untyped-call]
    return CopyStreams(to_device, to_host)


class Upload:
    """Tensors in host memory, ready to be copied to a device together. Any thread may make one."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """On the CPU the tensors themselves are the result, and nothing is copied."""
        self._tensors = list(tensors)
        self._device = device
        self._staged: Tensor | None = None
        if is_apart(device):
            size = sum(map(aligned_bytes, tensors))
            self._staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
            staged = self._staged.numpy()
            for tensor, place in zip(tensors, self._places(), strict=True):
                staged[place] = tensor.contiguous().flatten().view(torch.uint8).numpy()

    def _places(self) -> list[slice]:
        places, start = [], 0
        for tensor in self._tensors:
            places.append(slice(start, start + tensor.nbytes))
            start += aligned_bytes(tensor)
        return places

    def to_device(self) -> list[Tensor]:
        """Returns the tensors on the device, in their order. The host does not wait for the copy."""
        if self._staged is None:
            return self._tensors
        if self._device.type == "cuda":
            copied = _copy_to_cuda(self._staged, self._device)
        else:
            copied = self._staged.to(self._device, non_blocking=True)
        return [
            copied[place].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(self._tensors, self._places(), strict=True)
        ]


def is_apart(device: torch.device) -> bool:
    """Returns whether `device` has memory of its own, so that tensors must be copied to it."""
    return device.type != "cpu"


def start_download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors, uint8 [n] each, on the CPU, where their values are once the work launched so far has ended.

    They are copied together, and the host does not wait. On the CPU they are returned as they are.
    """
    if not tensors or not is_apart(tensors[0].device):
        return list(tensors)
    packed = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
    staged = _copy_from_cuda(packed) if packed.device.type == "cuda" else packed.to(CPU)
    return list(torch.split(staged, [len(tensor) for tensor in tensors]))


def download(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, once the device has computed it; the tensor itself if it is there."""
    if tensor.device.type != "cuda":
        return tensor.to(CPU)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return staged.copy_(tensor)


def aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _copy_to_cuda(staged: Tensor, device: torch.device) -> Tensor:
    stream, computing = copy_streams(device).to_device, torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copied = staged.to(device, non_blocking=True)
    computing.wait_stream(stream)
    copied.record_stream(computing)
    return copied


def _copy_from_cuda(tensor: Tensor) -> Tensor:
    stream = copy_streams(tensor.device).to_host
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        staged.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return staged
