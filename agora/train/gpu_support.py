"""Which GPUs this machine has, and why the installed torch cannot use one of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")
# PCI's number for display controllers, the first byte of a device's class.
DISPLAY_CLASS: Final = 0x03
VENDORS: Final = {0x10DE: "NVIDIA", 0x1002: "AMD"}
# AMD's processors have a small GPU of their own, with less memory than this set apart for it.
MIN_AMD_VRAM: Final = 4 * 2**30


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch was built for, and what it sees."""

    version: str
    cuda: str | None  # the version of CUDA that it was built with; None without
    hip: str | None  # the version of ROCm's HIP; None without
    gpus: int  # how many it sees

    @classmethod
    def installed(cls) -> TorchBuild:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(torch.__version__, torch.version.cuda, torch.version.hip, gpus)


def vendors_of_gpus(pci: Path = PCI_DEVICES) -> list[str]:
    """Returns "NVIDIA" or "AMD" for each GPU on the machine's PCI bus that could train; [] where there is no bus."""
    found = []
    with contextlib.suppress(OSError):
        for device in sorted(pci.iterdir()):
            with contextlib.suppress(OSError, ValueError):  # no number, or gone meanwhile
                is_display = int((device / "class").read_text(), 16) >> 16 == DISPLAY_CLASS
                vendor = VENDORS.get(int((device / "vendor").read_text(), 16))
                if not is_display or vendor is None:
                    continue
                if vendor == "AMD" and int((device / "mem_info_vram_total").read_text()) < MIN_AMD_VRAM:
                    continue
                found.append(vendor)
    return found


def why_unseen(vendors: Sequence[str], build: TorchBuild, *, has_driver: bool) -> str:
    """Returns why torch uses none of the GPUs in the machine and what to do, in a sentence; "" if it sees one.

    has_driver: whether NVIDIA's kernel module is loaded.
    """
    if build.gpus or not vendors:
        return ""
    kind = "NVIDIA" if "NVIDIA" in vendors else vendors[0]
    built_for = "CUDA" if build.cuda else "ROCm" if build.hip else "CPUs only"
    wanted = "CUDA" if kind == "NVIDIA" else "ROCm"
    fact = f"this machine has {len(vendors)} {kind} GPU{'s' * (len(vendors) > 1)}, and torch {build.version} sees none"
    if built_for != wanted:
        how = "" if wanted == "CUDA" else " (for scripts/ set TORCH_INDEX to the index of PyTorch's ROCm builds)"
        return f"{fact}: it is built for {built_for}; install PyTorch's {wanted} build in this environment{how}"
    if kind == "NVIDIA" and not has_driver:
        return f"{fact}: NVIDIA's driver is not loaded; install it, or give the container its GPUs (--gpus all)"
    if kind == "NVIDIA":
        return (
            f"{fact}: the driver is too old for CUDA {build.cuda}, or CUDA_VISIBLE_DEVICES or the container hides them;"
            " compare with nvidia-smi"
        )
    return f"{fact}: look whether this user may open /dev/kfd and /dev/dri (groups video and render)"


def why_unsupported(name: str, capability: tuple[int, int], architectures: Sequence[str], version: str) -> str:
    """Returns why torch has no kernels for a CUDA device and what to do, in a sentence; "" if it has some.

    name: of the device. capability: its compute capability, such as (7, 0). architectures: what
    torch.cuda.get_arch_list() returns: "sm_86" is binary code for capabilities 8.6 to 8.9, "compute_90" is code that
    the driver compiles for 9.0 and all later ones, "sm_90a" runs on 9.0 alone. An empty list excludes nothing.
    """
    if not architectures:
        return ""
    for architecture in architectures:
        parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if parsed is None:
            return ""  # gfx942: ROCm says by itself what it lacks
        kind, major, minor, suffix = parsed[1], int(parsed[2]), int(parsed[3]), parsed[4]
        is_same = (major, minor) == capability
        is_binary = kind == "sm" and major == capability[0] and minor <= capability[1]
        is_compiled = kind == "compute" and (major, minor) <= capability
        if is_same or (not suffix and (is_binary or is_compiled)):
            return ""
    built = ", ".join(architectures)
    return (
        f"torch {version} has no kernels for {name}, whose compute capability is {capability[0]}.{capability[1]}: it is"
        f" built for {built}; install a build of torch for an older CUDA (12.6 goes back to 5.0), or say --device cpu"
    )


def why_cuda_device_unsupported(number: int) -> str:
    """Returns `why_unsupported` of the CUDA device with that number."""
    return why_unsupported(
        torch.cuda.get_device_name(number),
        torch.cuda.get_device_capability(number),
        torch.cuda.get_arch_list(),
        torch.__version__,
    )


def unused_gpus_remark() -> str:
    """Returns why "auto" leaves a GPU of this machine unused and what to do, in a sentence; "" if it leaves none."""
    if unseen := why_unseen(vendors_of_gpus(), TorchBuild.installed(), has_driver=NVIDIA_DRIVER.exists()):
        return unseen
    if torch.cuda.is_available():
        reasons = [why_cuda_device_unsupported(number) for number in range(torch.cuda.device_count())]
        return reasons[0] if reasons and all(reasons) else ""
    return ""
