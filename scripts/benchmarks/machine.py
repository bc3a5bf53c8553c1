"""What a benchmark ran on: processor, cores, memory, versions, and how calm it was."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
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


def gpus() -> list[str]:
    """The names of the GPUs, as their driver's own tool gives them; none without that tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def describe() -> dict[str, object]:
    """The machine of the JSON output: plain values only; `load` is the one-minute load average before the run."""
    return {
        "processor": processor(),
        "gpus": gpus(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2),
    }


def loopback_bytes() -> int:
    """Bytes that have gone over the loopback interface so far, every header counted, from all programs."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


class Watch:
    """Measures the processor time that the rest of the machine uses meanwhile: all that is not the benchmark's own."""

    def __init__(self, groups: Iterable[int]) -> None:
        """groups: the process groups that are being measured; this process counts as ours too."""
        self._groups = set(groups)
        self._begin = time.monotonic()
        self._busy, self._ours = _busy_seconds(), self._our_seconds()

    def add(self, groups: Iterable[int]) -> None:
        """Counts these process groups, which have started since, as watched, too."""
        self._groups.update(groups)

    def ours(self) -> float:
        """Processor seconds that the watched groups, and this process, have used since the start."""
        return self._our_seconds() - self._ours

    def elsewhere(self) -> float:
        """Cores used by others since the start, on average; our own processes that ended meanwhile count as others."""
        seconds = time.monotonic() - self._begin
        used = (_busy_seconds() - self._busy) - self.ours()
        return max(0.0, used / seconds) if seconds > 0 else 0.0

    def _our_seconds(self) -> float:
        ticks = 0
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[2]) in self._groups or int(entry.parent.name) == os.getpid():
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
