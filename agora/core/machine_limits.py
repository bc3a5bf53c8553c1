"""What this process may take of the machine: memory and processors, by every limit that holds for it.

| limit | memory | processors |
|---|---|---|
| the machine | MemAvailable | cores in the process's affinity, which cpuset also narrows |
| cgroup version 2 | memory.max, memory.high | cpu.max |
| cgroup version 1 | memory.limit_in_bytes, hierarchical_memory_limit | cpu.cfs_quota_us / cpu.cfs_period_us |
| of the process (ulimit) | RLIMIT_AS, RLIMIT_DATA | |

A cgroup's limit holds for all groups below it, so those of every group from the process's own up to the mounted root
count. systemd's MemoryMax, MemoryHigh and CPUQuota, and the limits of containers and batch systems, are such limits.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

PROC_SELF: Final = Path("/proc/self")
# Version 1 says "no limit" by the greatest multiple of a page in 63 bits.
NO_LIMIT_BYTES: Final = 1 << 60
USUAL_PERIOD_US: Final = "100000"  # of a quota, where only the quota can be read: the kernel's default


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit. amount: bytes that are left under it, or processors. source: where it is set, for people."""

    amount: float
    source: str


@dataclass(frozen=True, slots=True)
class OwnersMemory:
    """The bytes that a machine's owner lets this process take of its GPU, and of the machine's memory. 0: no limit."""

    gpu: int = 0
    host: int = 0


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One cgroup of the process, or one above it, as the files in `folder`. name: its path, for people."""

    version: int
    folder: Path
    name: str

    def read(self, file: str) -> str:
        try:
            return (self.folder / file).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    def read_number(self, file: str) -> int | None:
        """Returns the number in a file; None for "max", and for a file that is missing or holds something else."""
        text = self.read(file)
        return int(text) if text.isdecimal() else None

    def label(self, file: str) -> str:
        return f"{file} of the cgroup {self.name}"


def least_memory(proc_self: Path = PROC_SELF) -> Limit:
    """Returns the limit that leaves this process the fewest bytes, and how many. Freed memory that malloc keeps counts
    as taken.
    """
    machine = Limit(float(psutil.virtual_memory().available), "the machine")
    limits = [machine, *_process_memory_limits(), *cgroup_memory_limits(proc_self)]
    return min(limits, key=lambda limit: limit.amount)


def least_processors(proc_self: Path = PROC_SELF) -> Limit:
    """Returns the limit that leaves this process the fewest processors, and how many: a fraction for a quota."""
    limits = [Limit(float(_usable_cores()), "the machine"), *cgroup_processor_limits(proc_self)]
    if _usable_cores() < (os.cpu_count() or 1):
        limits[0] = Limit(limits[0].amount, "its affinity or cpuset")
    return min(limits, key=lambda limit: limit.amount)


def usable_threads(proc_self: Path = PROC_SELF) -> int:
    """Returns how many threads can compute at the same time, 1 or more; a quota of 1.5 processors feeds 2."""
    # Rounded down, up to a whole processor is left unused; rounded up, threads are throttled a part of the time.
    return max(1, math.ceil(least_processors(proc_self).amount))


def cgroup_memory_limits(proc_self: Path = PROC_SELF) -> list[Limit]:
    """Returns the memory limits of all cgroups that hold the process, with what is left under each."""
    limits = []
    for group in control_groups("memory", proc_self):
        statistics = _statistics(group)
        if group.version == 2:
            files: tuple[str, ...] = ("memory.max", "memory.high")
            used, reclaimable = group.read_number("memory.current"), statistics.get("inactive_file", 0)
        else:
            used, reclaimable = group.read_number("memory.usage_in_bytes"), statistics.get("total_inactive_file", 0)
            files = ("memory.limit_in_bytes",)
        if used is None:  # a sandbox may show the limit alone, and it holds all the same: this process takes a part
            used, reclaimable = psutil.Process().memory_info().rss, 0
        allowed = {file: group.read_number(file) for file in files}
        # In a container the groups above cannot be seen, only what they leave.
        allowed["hierarchical_memory_limit"] = statistics.get("hierarchical_memory_limit")
        for file, limit in allowed.items():
            if limit is not None and limit < NO_LIMIT_BYTES:
                # Cached files, which the kernel drops when memory is asked for, are left, too.
                limits.append(Limit(float(max(0, limit - used + min(used, reclaimable))), group.label(file)))
    return limits


def cgroup_processor_limits(proc_self: Path = PROC_SELF) -> list[Limit]:
    """Returns the processor quotas of all cgroups that hold the process."""
    limits = []
    for group in control_groups("cpu", proc_self):
        if group.version == 2:
            file, words = "cpu.max", group.read("cpu.max").split()
        else:
            file = "cpu.cfs_quota_us"
            words = [*group.read(file).split(), *group.read("cpu.cfs_period_us").split()]
        words += [USUAL_PERIOD_US] * (len(words) == 1)
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            limits.append(Limit(int(words[0]) / int(words[1]), group.label(file)))
    return limits


def control_groups(controller: str, proc_self: Path = PROC_SELF) -> Iterator[ControlGroup]:
    """Yields the cgroups that hold the process, from its own up to the mounted root; none where there are no cgroups.

    controller: "memory" or "cpu". Of version 1 the hierarchy of that controller, and of version 2 the one hierarchy.
    """
    paths = dict(_group_paths(controller, _read_lines(proc_self / "cgroup")))
    mounts = list(_mounts(controller, _read_lines(proc_self / "mountinfo")))
    for version, path in paths.items():
        # A group may be mounted a second time, for example for containers: that shows another's limits, not these.
        of_version = [(not _is_below(path, root), len(root), root, place) for v, root, place in mounts if v == version]
        if not of_version:
            continue
        is_elsewhere, _, root, mount_point = min(of_version)
        # In a container without its own cgroup namespace both are seen from the host: the mount is the group's own.
        below = "." if is_elsewhere else os.path.relpath(path, root)
        folder = Path(os.path.normpath(mount_point / below))
        while folder.is_relative_to(mount_point):
            inner = "/" + str(folder.relative_to(mount_point)).lstrip(".")
            yield ControlGroup(version, folder, inner if root == "/" else root.rstrip("/") + inner.rstrip("/"))
            folder = folder.parent


def _group_paths(controller: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _mounts(controller: str, lines: list[str]) -> Iterator[tuple[int, str, Path]]:
    # Version, which group is mounted, and where. A later mount at a place hides the earlier one.
    found: dict[Path, tuple[int, str]] = {}
    for line in lines:
        words, _, rest = line.partition(" - ")
        fields, kind = words.split(), rest.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        place, root = Path(_unescape(fields[4])), _unescape(fields[3])
        found.pop(place, None)
        if kind[0] == "cgroup2":
            found[place] = 2, root
        elif kind[0] == "cgroup" and controller in kind[-1].split(","):
            found[place] = 1, root
    for place, (version, root) in found.items():
        yield version, root, place


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _statistics(group: ControlGroup) -> dict[str, int]:
    pairs = (line.split() for line in group.read("memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _process_memory_limits() -> Iterator[Limit]:
    memory = psutil.Process().memory_info()
    for kind, name, used in (
        (resource.RLIMIT_AS, "ulimit -v", memory.vms),
        (resource.RLIMIT_DATA, "ulimit -d", memory.data),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield Limit(float(max(0, soft - used)), f"{name} of the process")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
