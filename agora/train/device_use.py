"""How a run uses its device: memory, and the operations of its model by those that the device could do (MFU)."""

from __future__ import annotations

import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil
import torch

from agora.core.machine_limits import least_memory
from agora.train.device import has_native_bf16

CPUINFO: Final = Path("/proc/cpuinfo")
# TFLOP/s of data sheets: dense, in the precision that a daemon computes in: bf16 or fp16 summed in float32, or float32.
PEAK_TFLOPS: Final[dict[str, float]] = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "MI300X": 1307,
    "A100": 312,
    "L40S": 362,
    "A6000": 154.8,
    "A40": 149.7,
    "A10G": 70,
    "L4": 121,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 4070": 58.3,
    "RTX 4060 Ti": 44.1,
    "RTX 3090": 71.2,
    "RTX 3080": 59.5,
    "RTX 3060": 25.5,
    "V100": 125,
    "T4": 65,
    "RTX 2080 Ti": 53.8,
    "P100": 9.5,
    "P40": 11.8,
}
# Other processors than those without: a 4070 Ti has a third more than a 4070, and no number here.
OTHER_CARDS: Final = r"(?! (Ti|SUPER|D\b|Laptop|Max-Q))"


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """memory_used: bytes; of a GPU by all programs, of a CPU by this process. memory_total: of the GPU; of a CPU what
    the machine's limits left to this process when the stages were loaded, with what it used then. peak_flops:
    operations per second by its data sheet; None if unknown.
    """

    name: str
    memory_used: int
    memory_total: int
    peak_flops: float | None = None


class DeviceGauge(Protocol):
    """What is asked of the device that a DeviceWorker computes on."""

    can_idle: bool  # whether it can stand still while a job runs, as a GPU does that waits for the host

    def read(self) -> DeviceReading: ...

    def is_idle(self) -> bool: ...


class CpuGauge:
    """The CPU is the thread that runs the jobs, so it is never idle in one; its peak is not known."""

    can_idle = False

    def __init__(self) -> None:
        self._name = processor_name(CPUINFO)
        self._process = psutil.Process()
        # Once: to look for every limit takes milliseconds, and the event loop reads the gauge each second.
        self._total = self._used() + int(least_memory().amount)

    def _used(self) -> int:
        return int(self._process.memory_info().rss)

    def read(self) -> DeviceReading:
        return DeviceReading(self._name, self._used(), self._total)

    def is_idle(self) -> bool:
        return False


class GpuGauge:
    """A CUDA device. is_idle: whether all kernels that were launched on its default stream have ended."""

    can_idle = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = torch.cuda.get_device_name(device)
        self._peak = peak_flops(self._name)
        # Cards of other names that have no bf16 are old, and those of this table are named by it.
        if self._peak is None and has_native_bf16(device):
            self._peak = measured_peak(device)

    def read(self) -> DeviceReading:
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceReading(self._name, total - free, total, self._peak)

    def is_idle(self) -> bool:
        return bool(torch.cuda.default_stream(self._device).query())


def gauge_of(device: torch.device) -> DeviceGauge:
    """Returns the gauge of a CPU or a CUDA device; for a CUDA device without a known peak this measures it."""
    return GpuGauge(device) if device.type == "cuda" else CpuGauge()


def peak_flops(name: str) -> float | None:
    """Returns operations per second by the data sheet of the card that torch calls `name`; None if it is not known."""
    for card, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{re.escape(card)}\b{OTHER_CARDS}", name):
            return tflops * 1e12
    return None


def measured_peak(device: torch.device, size: int = 4096, repeats: int = 10) -> float:
    """Returns operations per second of products of square bf16 matrices, [size, size]: what such a device reaches."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    float((left @ right)[0, 0])  # the first one chooses a kernel
    began = time.perf_counter()
    for _ in range(repeats):
        product = left @ right
    float(product[0, 0])  # waits for all of them
    return repeats * 2.0 * size**3 / (time.perf_counter() - began)


def processor_name(cpuinfo: Path) -> str:
    """Returns the processor's name as the kernel has it, such as "AMD EPYC 7B13"; else that of its architecture."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1].strip() if named else platform.machine()
