"""The simulator beside eight real daemons: told what each device takes, it finds the throughput that they have."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.simulate_real import CASES, manifest, observe, simulate

from agora.cli.local_swarm import LocalSwarm
from tests.process.forked import Forked

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]
# In the slow tier: a rate of real daemons is another one on a machine that has other work.

AGREES = 0.15
"""The simulated throughput differs by at most so much of the real one."""


def error_of(folder: Path, case: str, seconds: float) -> float:
    """Returns by how much the simulated throughput of a case lies above the real one, as a share of that."""
    swarm = LocalSwarm(
        folder, manifest().to_toml(), corpus=folder.parent / "corpus", flags=["--allow-files"], launch=Forked
    )
    try:
        seen = observe(swarm, CASES[case], seconds)
    finally:
        swarm.kill_all()
    assert seen.rate > 0.0
    return simulate(seen).rate / seen.rate - 1.0


def test_the_simulator_finds_the_throughput_of_equal_peers(tmp_path: Path) -> None:
    assert abs(error_of(tmp_path, "equal peers", 12.0)) <= AGREES


@pytest.mark.parametrize("case", [name for name in CASES if name != "equal peers"])
def test_the_simulator_finds_the_throughput_of(case: str, tmp_path: Path) -> None:
    assert abs(error_of(tmp_path, case, 30.0)) <= AGREES
