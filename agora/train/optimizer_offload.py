"""Where a stage's optimizer state is kept, on the device or in host memory, and how a step gets at it.

In host memory the state takes nothing of the device but a piece at a time: a step copies PIECE elements to the device,
updates them there and copies them back. The arithmetic is the device's in both cases, so that replicas that differ in
this stay equal to the last bit. Source: state sharded and offloaded apart from compute, as in Cephalo (arXiv
2411.01075) and ZeRO-Offload (arXiv 2101.06840), but with the update on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from agora.codec.transfer import aligned_bytes

# Maximum number of elements of a moment that are copied to the device at a time: 16 MiB in float32.
PIECE: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class StateAccess:
    """How one step gets at the optimizer's state: in place, or by way of a buffer; neither allocates memory."""

    buffer: Tensor | None  # bytes on the device; None: in place
    writes_back: bool = True  # False: what is done to the copies in the buffer is only tried

    @contextmanager
    def on_device(self, *state: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Context manager: yields the flat tensors `state` on the device, to be changed in place."""
        if self.buffer is None:
            yield state
            return
        copies, start = [], 0
        for tensor in state:
            copies.append(self.buffer[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor))
            start += aligned_bytes(tensor)
        yield tuple(copies)
        # Not if the block raised: the state stays as it was.
        if self.writes_back:
            for tensor, changed in zip(state, copies, strict=True):
                tensor.copy_(changed)


@dataclass(frozen=True, slots=True)
class OptimizerOffload:
    """Where a stage's optimizer state is kept."""

    device: torch.device  # has the weights
    in_host: bool = False  # the copies are made even where the device is the CPU itself: a test needs no GPU

    def zeros(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if not self.in_host:
            return torch.zeros(count, dtype=dtype, device=self.device)
        return torch.zeros(count, dtype=dtype, pin_memory=self.device.type == "cuda")

    def pieces(self, ranges: Iterable[slice]) -> Iterator[slice]:
        """Yields the ranges: cut into pieces of at most PIECE elements if the state is in host memory, else whole."""
        for whole in ranges:
            length = PIECE if self.in_host else max(whole.stop - whole.start, 1)
            for start in range(whole.start, whole.stop, length):
                yield slice(start, min(start + length, whole.stop))

    def access(self, nbytes: int) -> StateAccess:
        """nbytes: the most that one call of on_device takes, see bytes_on_device. Allocates that now, if in_host."""
        return StateAccess(self._buffer(nbytes) if self.in_host else None)

    def trial_access(self, nbytes: int) -> StateAccess:
        """As `access`, but changes of the state are only tried: they remain in the buffer."""
        return StateAccess(self._buffer(nbytes), writes_back=False)

    def _buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def bytes_on_device(*state: Tensor) -> int:
    """Returns how many bytes of a buffer copies of the tensors take."""
    return sum(map(aligned_bytes, state))
