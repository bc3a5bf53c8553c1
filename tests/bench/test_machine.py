"""What the machine is and how calm it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmarks.machine import Watch, describe

BURN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_the_description_is_plain_values() -> None:
    machine = describe()
    assert isinstance(machine["processor"], str) and machine["processor"]
    assert isinstance(machine["cores"], int) and 1 <= machine["cores"] <= (os.cpu_count() or 1)


@pytest.mark.process
def test_what_our_own_groups_use_is_not_somebody_elses() -> None:
    burner = subprocess.Popen(
        [sys.executable, "-c", "input()\n" + BURN + "\ninput()"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert burner.stdin is not None
    ours, not_ours = Watch([burner.pid]), Watch([])
    begun = (ours._our_seconds(), not_ours._our_seconds())
    burner.stdin.write(b"go\n")
    burner.stdin.flush()
    try:
        while ours._our_seconds() - begun[0] < 0.4:
            assert burner.poll() is None
        assert ours.elsewhere() >= 0 and not_ours.elsewhere() > 0
    finally:
        burner.kill()
        burner.wait()
        burner.stdin.close()
