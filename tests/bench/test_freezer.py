"""Frozen processes use nothing, go on afterwards, and die with a benchmark that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.freezer import Freezer

pytestmark = pytest.mark.process

KILLED = """
import os, subprocess, sys, time
from benchmarks.freezer import Freezer
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
freezer = Freezer()
freezer.freeze([child.pid])
print(child.pid, flush=True)
time.sleep(600)
"""


def state_of(pid: int) -> str:
    """The kernel's letter: T stopped, Z dead; "gone" when nobody remembers it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def wait_for(pid: int, states: tuple[str, ...]) -> str:
    deadline = time.monotonic() + 20
    while state_of(pid) not in states and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(pid)


def test_freezing_and_thawing() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        with Freezer() as freezer:
            freezer.freeze([child.pid])
            assert wait_for(child.pid, ("T",)) == "T"
            freezer.thaw([child.pid])
            assert wait_for(child.pid, ("S", "R")) != "T"
            freezer.freeze([child.pid])
        assert wait_for(child.pid, ("S", "R")) != "T"
        assert state_of(freezer.guardian_pid) == "gone"
    finally:
        child.kill()
        child.wait()


def test_what_a_killed_benchmark_froze_dies_with_it() -> None:
    bench = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env=os.environ | python_path())
    assert bench.stdout is not None
    frozen = int(bench.stdout.readline())
    assert wait_for(frozen, ("T",)) == "T"
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    assert wait_for(frozen, ("gone", "Z")) in ("gone", "Z")


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
