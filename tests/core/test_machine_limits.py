"""Which limits of memory and processors hold for a process: cgroups of both versions, below and above its own."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from agora.core.machine_limits import (
    Limit,
    cgroup_memory_limits,
    cgroup_processor_limits,
    least_memory,
    least_processors,
    usable_threads,
)

MIB = 2**20
CPU = "cpu,cpuacct"
NONE_IN_V1 = "9223372036854771712"


def host(folder: Path, cgroup: str, mounts: str, files: Mapping[str, str]) -> Path:
    """Writes /proc/self and the mounted cgroups; SYS in `mounts` stands for where these lie."""
    proc, sys = folder / "proc", folder / "sys"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mounts.replace("SYS", str(sys)))
    for name, text in files.items():
        (sys / name).parent.mkdir(parents=True, exist_ok=True)
        (sys / name).write_text(text + "\n")
    return proc


V2 = "35 24 0:30 / SYS rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / SYS/top rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / SYS/memory rw - cgroup cgroup rw,memory\n"
    "32 31 0:29 / SYS/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "left", "source"),
    [
        pytest.param(
            "0::/\n",
            V2,
            {
                "memory.max": str(900 * MIB),
                "memory.current": str(100 * MIB),
                "memory.stat": f"inactive_file {40 * MIB}",
            },
            840,
            "memory.max of the cgroup /",
            id="a container of version 2",
        ),
        pytest.param(
            "0::/system.slice/agora-node.service\n",
            V2,
            {
                "system.slice/agora-node.service/memory.max": str(500 * MIB),
                "system.slice/agora-node.service/memory.current": str(50 * MIB),
                "system.slice/memory.max": "max",
                "system.slice/memory.current": str(7000 * MIB),
            },
            450,
            "memory.max of the cgroup /system.slice/agora-node.service",
            id="MemoryMax of a systemd unit, below the root",
        ),
        pytest.param(
            "0::/a.slice/b.service\n",
            V2,
            {
                "a.slice/b.service/memory.max": "max",
                "a.slice/b.service/memory.current": str(50 * MIB),
                "a.slice/memory.max": str(1000 * MIB),
                "a.slice/memory.current": str(800 * MIB),
            },
            200,
            "memory.max of the cgroup /a.slice",
            id="a slice above the unit, full of others",
        ),
        pytest.param(
            "0::/u.service\n",
            V2,
            {
                "u.service/memory.max": str(1000 * MIB),
                "u.service/memory.high": str(600 * MIB),
                "u.service/memory.current": str(100 * MIB),
            },
            500,
            "memory.high of the cgroup /u.service",
            id="MemoryHigh, from which the kernel slows it down",
        ),
        pytest.param(
            "4:memory:/agora-try\n1:cpu:/\n0::/\n",
            V1 + "99 35 0:32 /agora-try SYS/memory rw - cgroup cgroup rw,memory\n",
            {
                "memory/memory.limit_in_bytes": str(900 * MIB),
                "memory/memory.usage_in_bytes": str(20 * MIB),
                "memory/memory.stat": f"cache 5\ntotal_inactive_file {8 * MIB}",
            },
            888,
            "memory.limit_in_bytes of the cgroup /agora-try",
            id="version 1, the group mounted over the root",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            V1,
            {
                "memory/docker/abc/memory.limit_in_bytes": NONE_IN_V1,
                "memory/docker/abc/memory.usage_in_bytes": "0",
                "memory/docker/memory.limit_in_bytes": str(64 * MIB),
                "memory/docker/memory.usage_in_bytes": str(4 * MIB),
                "memory/memory.limit_in_bytes": NONE_IN_V1,
                "memory/memory.usage_in_bytes": str(9000 * MIB),
            },
            60,
            "memory.limit_in_bytes of the cgroup /docker",
            id="version 1, above the own group",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            "35 31 0:32 /docker/abc SYS/memory rw - cgroup cgroup rw,memory\n",
            {
                "memory/memory.limit_in_bytes": NONE_IN_V1,
                "memory/memory.usage_in_bytes": str(10 * MIB),
                "memory/memory.stat": f"hierarchical_memory_limit {300 * MIB}",
            },
            290,
            "hierarchical_memory_limit of the cgroup /docker/abc",
            id="version 1, a limit above that the container cannot see",
        ),
        pytest.param(
            "0::/../outside\n",
            V2,
            {"memory.max": str(70 * MIB), "memory.current": "0"},
            70,
            "memory.max of the cgroup /",
            id="moved out of its namespace: the mounted root counts",
        ),
        pytest.param(
            "0::/u\n",
            V2,
            {"u/memory.max": str(10 * MIB), "u/memory.current": str(30 * MIB)},
            0,
            "memory.max of the cgroup /u",
            id="more used than allowed",
        ),
        pytest.param(
            "0::/u.service\n",
            V2 + "36 24 0:30 /machine.slice SYS/shared rw - cgroup2 cgroup2 rw\n",
            {
                "u.service/memory.max": str(500 * MIB),
                "u.service/memory.current": str(20 * MIB),
                "shared/memory.max": str(64 * MIB),
            },
            480,
            "memory.max of the cgroup /u.service",
            id="another group mounted a second time, after the root",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            "35 31 0:32 /docker/xyz SYS/other rw - cgroup cgroup rw,memory\n"
            "36 31 0:32 /docker/abc SYS/own rw - cgroup cgroup rw,memory\n",
            {
                "own/memory.limit_in_bytes": str(80 * MIB),
                "own/memory.usage_in_bytes": "0",
                "other/memory.limit_in_bytes": str(10 * MIB),
            },
            80,
            "memory.limit_in_bytes of the cgroup /docker/abc",
            id="version 1, another container's group is mounted, too",
        ),
    ],
)
def test_the_least_of_all_limits_counts_for_memory_and_is_named(
    tmp_path: Path, cgroup: str, mounts: str, files: Mapping[str, str], left: float, source: str
) -> None:
    proc = host(tmp_path, cgroup, mounts, files)
    least = min(cgroup_memory_limits(proc), key=lambda limit: limit.amount)
    assert (least.amount / MIB, least.source) == (left, source)
    if left < 100:
        assert least_memory(proc) == least


@pytest.mark.parametrize("usage", [{}, {"memory.current": ""}, {"memory.current": "?"}])
@pytest.mark.parametrize(
    ("cgroup", "mounts", "place", "file", "source"),
    [
        ("0::/\n", V2, "", "memory.max", "memory.max of the cgroup /"),
        ("0::/s/u.service\n", V2, "s/u.service/", "memory.max", "memory.max of the cgroup /s/u.service"),
        ("0::/s/u.service\n", V2, "s/", "memory.high", "memory.high of the cgroup /s"),
        ("4:memory:/d\n", V1, "memory/d/", "memory.limit_in_bytes", "memory.limit_in_bytes of the cgroup /d"),
        ("4:memory:/d\n", V1, "memory/d/", "memory.stat", "hierarchical_memory_limit of the cgroup /d"),
    ],
)  # fmt: skip
def test_a_limit_holds_where_what_is_taken_under_it_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    mounts: str,
    place: str,
    file: str,
    source: str,
    usage: Mapping[str, str],
) -> None:
    text = f"hierarchical_memory_limit {900 * MIB}" if file == "memory.stat" else str(900 * MIB)
    proc = host(tmp_path, cgroup, mounts, {place + file: text} | {place + name: value for name, value in usage.items()})
    taken = SimpleNamespace(rss=200 * MIB, vms=0, data=0)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _self: taken)
    assert cgroup_memory_limits(proc) == [Limit(700.0 * MIB, source)], "at least this process takes a part of it"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "quota"),
    [
        ("0::/\n", V2, {"cpu.max": "50000 100000"}, 0.5),
        ("0::/s/u\n", V2, {"s/u/cpu.max": "max 100000", "s/cpu.max": "150000 100000", "cpu.max": ""}, 1.5),
        ("0::/s/u\n", V2, {"s/u/cpu.max": "20000 10000", "s/cpu.max": "800000 100000"}, 2.0),
        ("1:cpu,cpuacct:/a/b\n0::/\n", V1, {f"{CPU}/a/cpu.cfs_quota_us": "6", f"{CPU}/a/cpu.cfs_period_us": "2"}, 3.0),
        ("1:cpu,cpuacct:/\n", V1, {f"{CPU}/cpu.cfs_quota_us": "-1", f"{CPU}/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", V2, {"cpu.max": "max 100000"}, None),
        ("0::/\n", V2, {"cpu.max": "rubbish"}, None),
        ("0::/\n", V2, {"cpu.max": "250000"}, 2.5),
        ("0::/\n", V2, {"cpu.max": "max"}, None),
        ("1:cpu,cpuacct:/\n", V1, {f"{CPU}/cpu.cfs_quota_us": "150000"}, 1.5),
        ("", "", {}, None),
    ],
)  # fmt: skip
def test_the_least_quota_counts_for_processors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    mounts: str,
    files: Mapping[str, str],
    quota: float | None,
) -> None:
    proc = host(tmp_path, cgroup, mounts, files)
    assert min((limit.amount for limit in cgroup_processor_limits(proc)), default=None) == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert usable_threads(proc) == (64 if quota is None else math.ceil(quota))


def test_an_affinity_or_cpuset_counts_beside_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = host(tmp_path, "0::/\n", V2, {"cpu.max": "400000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(3)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert (least_processors(proc).amount, least_processors(proc).source) == (3, "its affinity or cpuset")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(5)))
    assert (least_processors(proc).amount, least_processors(proc).source) == (4, "cpu.max of the cgroup /")


def test_a_limit_of_the_process_itself_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 2**40, resource.RLIMIT_DATA: 2**16}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert least_memory(tmp_path) == Limit(0.0, "ulimit -d of the process")
