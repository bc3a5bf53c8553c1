"""Swarms that take turns: each a run of its own, and when its send window counts as settled."""

from __future__ import annotations

from pathlib import Path

from agora_protocol.manifest import Manifest
from benchmarks.children import ChildProcesses
from benchmarks.swarm import SwarmContender
from benchmarks.wan_swarm import is_settled, send_window_of

from agora.observe.events import StepTaken


def test_the_send_window_has_settled_when_six_looks_say_the_same() -> None:
    assert is_settled([20, 20, 21, 21, 20, 21]) and is_settled([2, 3, 3, 2, 3, 3])
    assert not is_settled([20, 20, 21, 21, 20]), "too few looks"
    assert not is_settled([10, 12, 14, 17, 20, 24]), "it still grows"


def test_the_send_window_is_read_from_what_a_daemon_says_of_it() -> None:
    assert send_window_of({"credit": "21: round trip 0.500 s / period 0.050 s = 10.0"}) == 21
    assert send_window_of({"credit": "not measured yet"}) == send_window_of({}) == 0


def test_a_swarm_tells_the_steps_that_it_took_and_the_share_of_its_tokens_in_them(tmp_path: Path) -> None:
    target = Manifest().optimizer.target_tokens
    made = SwarmContender(Manifest().with_values(stages={"count": 2}), ChildProcesses(tmp_path), tmp_path, "swarm")
    assert made.account_cells() == {"steps": "0/0", "counted_%": None, "step_fill": None}
    for stage, step in ((0, 1), (0, 2), (1, 1)):
        made.steps[stage].add(StepTaken(stage, step, target, None, 0.1, gradient_norm=1.0))
    made.tokens_computed = 2 * target
    assert made.account_cells() == {"steps": "2/1", "counted_%": 50.0, "step_fill": 1.0}


def test_swarms_of_one_manifest_are_runs_of_their_own(tmp_path: Path) -> None:
    """Daemons of one machine that start from equal drafts are one run: what took turns would train together."""
    runs = [
        SwarmContender(Manifest(), ChildProcesses(tmp_path), tmp_path, name)._manifest.run_id for name in ("one", "two")
    ]
    assert runs[0] != runs[1]
