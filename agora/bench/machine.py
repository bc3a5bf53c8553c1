"""What a benchmark ran on: processor, cores, memory, versions.

Knows: /proc, the platform and package metadata. Must not know: torch as an import (its version is read from metadata),
what is being measured.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("agora-swarm", "torch", "hivemind", "libp2p", "uvloop", "numpy")


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """The processor's model name as the kernel gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def describe() -> dict[str, object]:
    """The machine of the JSON output: plain values only; `load` is the one-minute load average before the run."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
