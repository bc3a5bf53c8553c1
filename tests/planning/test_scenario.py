"""Scenarios: what is read, and the one sentence for each thing that is wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import InputError
from agora_protocol.ids import Span

from agora.planning.simulator.churn import SHAPES, fleet_events
from agora.planning.simulator.scenario import ScenarioError, load_scenario, parse_scenario

ROOT = Path(__file__).resolve().parents[2]


def raw(**changed: Any) -> dict[str, Any]:
    return {"model": {"stages": 4}, "machines": [{"count": 8, "link": "100Mbit,20ms"}], **changed}


def test_a_scenario_is_read_with_its_defaults() -> None:
    scenario = parse_scenario(raw(churn={"shape": "p3", "at_once": 2}, machines=[{"count": 3, "stages": "0-1"}]))
    assert scenario.peers == 3 and scenario.machines[0].span == Span(0, 1)
    assert scenario.model.work == (1.0,) * 4
    assert (scenario.churn.kills, scenario.churn.at_once) == (0.61, 2)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"machines": []}, "has no peers"),
        ({"machines": [{"count": 0}]}, "has no peers"),
        ({"machines": [{"coutn": 8}]}, "did you mean 'count'"),
        ({"model": {"stages": 4, "boundery_bytes": 1}}, "did you mean 'boundary_bytes'"),
        ({"churn": {"shape": "g4dm"}}, "did you mean 'g4dn'"),
        ({"machines": [{"count": 1, "link": "0Mbit,10ms"}]}, "too slow to train over"),
        ({"machines": [{"count": 1, "speed": 0}]}, "write a number above 0"),
        ({"machines": [{"count": 1, "stages": "3-4"}]}, "the last one is 3"),
        ({"model": {"stages": 4, "work": [1.0, 2.0]}}, "has 2 numbers; write 4"),
        ({"model": {}}, "lacks stages"),
        ({"seconds": 10, "warmup_s": 10}, "nothing is measured"),
        ({"seed": True}, "write a whole number"),
        ({"rebalancing": "yes"}, "neither true nor false"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        parse_scenario(raw(**changed))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_no_toml_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(ScenarioError, match="not a TOML file"):
        load_scenario(tmp_path / "bad.toml")


def test_the_example_of_the_documentation_can_be_simulated() -> None:
    assert load_scenario(ROOT / "deploy" / "preemptible.toml").peers == 400


@pytest.mark.parametrize("shape", ["p3", "g4dn"])
def test_churn_keeps_its_rate_and_replaces_who_has_left(shape: str) -> None:
    churn, hours = SHAPES[shape], 500
    events = fleet_events(churn, 100, hours * 3600.0, random.Random(1))
    killed = sum(event.count for event in events if event.kind == "kill")
    joined = sum(event.count for event in events if event.kind == "join")
    assert killed / hours / 100 == pytest.approx(churn.kills, rel=0.05)
    assert joined == pytest.approx(killed, rel=0.02)
    assert max(event.count for event in events) == churn.at_once
