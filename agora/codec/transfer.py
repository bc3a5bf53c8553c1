"""Copies between host and device: all tensors that a job needs in one copy, from pinned memory where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

CPU: Final = torch.device("cpu")
ALIGNMENT_BYTES: Final = 64  # at which each tensor begins


class Upload:
    """Tensors in host memory, ready to be copied to a device together. Any thread may make one."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """On the CPU the tensors themselves are the result, and nothing is copied."""
        self._tensors = list(tensors)
        self._device = device
        self._staged: Tensor | None = None
        if is_apart(device):
            size = sum(map(aligned_bytes, tensors))
            # torch keeps pinned memory, and does not use it again before the copy has ended.
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
        copied = self._staged.to(self._device, non_blocking=True)
        return [
            copied[place].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(self._tensors, self._places(), strict=True)
        ]


def is_apart(device: torch.device) -> bool:
    """Returns whether `device` has memory of its own, so that tensors must be copied to it."""
    return device.type != "cpu"


def download(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, once the device has computed it; the tensor itself if it is there."""
    if tensor.device.type != "cuda":
        return tensor.to(CPU)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return staged.copy_(tensor)


def aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
