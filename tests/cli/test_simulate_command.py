"""`swarm simulate`: one object or lines on standard output, pictures in a folder, one sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agora.cli import console, simulate_command
from agora.planning.simulator.scenario import ScenarioError

SMALL = """
seconds = 60
warmup_s = 20
[model]
stages = 2
work = 0.5
[[machines]]
count = 4
"""


def test_json_is_one_object_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    assert (
        simulate_command.run(tmp_path / "small.toml", seed=3, plots=tmp_path / "p", as_json=True) == console.EXIT_DONE
    )
    found = json.loads(capsys.readouterr().out)
    assert found["scenario"] == "small" and found["seed"] == 3 and found["peers"] == 4
    assert found["microbatches"]["dropped"] == 0 and 0.5 < found["of_bound"] <= 1.05
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["messages.svg", "peers.svg", "throughput.svg"]


def test_people_read_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    assert simulate_command.run(tmp_path / "small.toml", seed=None, plots=None, as_json=False) == console.EXIT_DONE
    assert "microbatches/s" in capsys.readouterr().out


def test_a_scenario_without_peers_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text(SMALL.replace("count = 4", "count = 0"))
    with pytest.raises(ScenarioError, match="no peers") as caught:
        simulate_command.run(tmp_path / "none.toml", seed=None, plots=None, as_json=False)
    assert console.explain(caught.value)[1] == console.EXIT_USAGE
