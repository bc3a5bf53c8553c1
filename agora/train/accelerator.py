"""Accelerators: what the device thread launches work on, which ends later. A CPU, a CUDA device, an emulated one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from agora.codec.transfer import copy_streams

# Seconds between two questions whether a CUDA device has reached a mark: it computes another job meanwhile.
CUDA_POLL_S: Final = 0.0003
# Jobs on an accelerator at a time: one that it computes, and one that it will compute next. The gradients of both are
# in memory until they are added to the sum; a third would only make the second wait.
MAX_LAUNCHED: Final = 2


class Mark(Protocol):
    """A place in the work that was launched on an accelerator."""

    def remaining_s(self) -> float:
        """Returns 0 once all work before the mark has ended, else for how long to wait before asking again.

        Raises RuntimeError if work that was launched has failed.
        """


class Accelerator(Protocol):
    """What computes, in the order of the launches, while the thread that launched goes on.

    max_launched: how many jobs may have been launched whose results were not read; with 1 a job's work has ended when
    its function returns, or the thread waits for it.
    """

    max_launched: int

    def compute(self, seconds: float) -> None:
        """Launches work that takes so long and computes nothing; only an emulated accelerator does."""

    def mark(self) -> Mark:
        """Returns a mark behind all work, copies to the host included, that this thread has launched."""


class _Ended:
    def remaining_s(self) -> float:
        return 0.0


class HostAccelerator:
    """A device whose work is over when the call returns (the CPU), or that the host waits for at every copy (mps)."""

    max_launched = 1

    def compute(self, seconds: float) -> None:
        pass

    def mark(self) -> Mark:
        return _Ended()


class CudaAccelerator:
    """A CUDA device: its kernels on the thread's current stream, copies to the host on a stream of their own."""

    max_launched = MAX_LAUNCHED

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute(self, seconds: float) -> None:
        pass

    def mark(self) -> Mark:
        to_host = copy_streams(self._device).to_host
        to_host.wait_stream(torch.cuda.current_stream(self._device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(to_host)
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def remaining_s(self) -> float:
        has_ended = bool(self._event.query())  # type: ignore[no-untyped-call]
        return 0.0 if has_ended else CUDA_POLL_S


class EmulatedAccelerator:
    """An accelerator that takes set times, one work after the other, and leaves the computing to `real`.

    The work of a job begins when it is launched, or when the work before has ended; its result is there when the
    set time is over and `real` has ended, too.
    """

    max_launched = MAX_LAUNCHED

    def __init__(self, real: Accelerator | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._real = real or HostAccelerator()
        self._clock = clock
        self._ends_at = clock()

    def compute(self, seconds: float) -> None:
        self._ends_at = max(self._clock(), self._ends_at) + seconds

    def mark(self) -> Mark:
        return _EmulatedMark(self._ends_at, self._clock, self._real.mark())


class _EmulatedMark:
    def __init__(self, ends_at: float, clock: Callable[[], float], real: Mark) -> None:
        self._ends_at, self._clock, self._real = ends_at, clock, real

    def remaining_s(self) -> float:
        return max(0.0, self._ends_at - self._clock()) or self._real.remaining_s()


def accelerator_of(device: torch.device, *, is_emulated: bool = False) -> Accelerator:
    """Returns the accelerator that `device` is; is_emulated: the device imitates one that takes set times."""
    real = CudaAccelerator(device) if device.type == "cuda" else HostAccelerator()
    return EmulatedAccelerator(real) if is_emulated else real
