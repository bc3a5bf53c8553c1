"""Claims about what a demo says of tuning, on lines of journals made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.manifest_model import HfSection

from agora.cli.console import EXIT_USAGE, Failure
from agora.cli.demo_command import DemoOptions, tuning_totals
from agora.cli.demo_totals import DemoMeasurements, DemoTotals, TuningTotals, failure_of, result_of, summary_of
from agora.data.tokenizer import byte_tokenizer_json
from tests.model.tiny_models import make_model, save

MEASURED = DemoMeasurements("ab" * 32, 0.5, 9.0, (24, 4.0), 0.5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(make_model("llama"), tmp_path_factory.mktemp("base"))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    return folder


def completed(name: str, tokens: int = 8, purpose: str = "train", **more: Any) -> dict[str, Any]:
    line = {"event": "MicrobatchCompleted", "microbatch": name, "loss_sum": 4.0, "tokens": tokens, "seconds": 0.1}
    return line | {"purpose": purpose, "at_unix": 1.0} | more


def counted(step: int, **counts: int) -> dict[str, Any]:
    return {"event": "SamplesCounted", "step": step, "epoch": 0, "repeated": 0, "missed": 0, "at_unix": 1.0} | counts


def test_of_what_origins_count_that_of_the_one_who_knows_most_is_told() -> None:
    totals = TuningTotals("sft", 10, step_tokens=16)
    assert totals.fields()["samples"] == {"seen": 0, "repeated": 0, "missed": 0}
    for line in (counted(1, seen=10), counted(2, seen=30, repeated=2, missed=1), counted(2, seen=25)):
        totals.add(line)
    assert totals.fields()["samples"] == {"seen": 30, "repeated": 2, "missed": 1}


def test_metrics_are_of_the_last_whole_step_beside_the_first_one_and_the_held_out_ones() -> None:
    totals = TuningTotals("sft", 10, step_tokens=16)
    for right in (1, 1, 2, 4, 8):
        totals.add(completed("m", metrics=[float(right)]))
    totals.add(completed("e", purpose="evaluate", metrics=[5.0]))
    found = totals.fields()
    assert found["tuning"] == {
        "token_accuracy": 0.375,
        "first": {"token_accuracy": 0.125},
        "eval": {"token_accuracy": 0.625},
    }


def dpo_totals() -> DemoTotals:
    totals = DemoTotals(16, TuningTotals("dpo", 500, step_tokens=16))
    for number in range(4):
        totals.add(0, completed(f"m{number}", metrics=[0.1, -0.1, 1.0, 1.0]))
    totals.add(0, counted(1, seen=3, repeated=1))
    return totals


def test_a_demo_of_tuning_says_what_the_plain_one_says_and_more() -> None:
    totals = dpo_totals()
    assert totals.losses == [0.5, 0.5]
    value = result_of(totals, MEASURED, peers=4, stages=1, steps=1)
    assert (value["objective"], value["trainable_parameters"], value["tokens"]) == ("dpo", 500, 24)
    assert value["samples"] == {"seen": 3, "repeated": 1, "missed": 0}
    assert value["tuning"]["rewards/margins"] == 0.2 and value["tuning"]["eval"] == {}
    json.dumps(value, allow_nan=False)
    lines = summary_of(value)
    assert "samples       3 seen, 1 repeated, 0 missed" in lines
    assert any("rewards/accuracies 1.000" in line and "500 parameters are trained" in line for line in lines)
    plain = result_of(DemoTotals(1024), MEASURED, peers=4, stages=1, steps=40)
    assert not {"objective", "trainable_parameters", "samples", "tuning"} & set(plain)


def test_a_base_models_loss_may_stay_where_it_was_but_not_rise() -> None:
    value = result_of(dpo_totals(), MEASURED, peers=4, stages=1, steps=2) | {"optimizer_steps": [2]}
    assert failure_of(value | {"loss": {"first": 3.0, "last": 3.1, "eval": 3.2}}) == ""
    assert "did not fall" in failure_of(value | {"loss": {"first": 3.0, "last": 3.4, "eval": 3.5}})


def test_the_manifest_of_a_tuning_demo_is_that_of_swarm_new_with_the_plans_stages_and_steps(
    base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "completion": "2"}\n' * 50)
    plan = DemoOptions(peers=3, stages=3, steps=30, seed=5, data=(str(file),), base_model=base, codec="int8")
    manifest = plan.manifest()
    assert isinstance(manifest.model, HfSection) and manifest.model.trained == "lora"
    assert (manifest.objective.kind, manifest.data.samples, manifest.seed) == ("sft", "qa.jsonl", 5)
    assert (manifest.stage_count, manifest.optimizer.total_steps, manifest.boundary.codec) == (3, 30, "int8")
    assert plan.flags() == ["--allow-files", "--base-model", str(base), "--data", str(file)]
    assert manifest.data.tokenizer == "tokenizer.json" and str(tmp_path.parent) not in manifest.to_toml()
    totals = tuning_totals(manifest)
    assert totals is not None and (totals.objective, totals.step_tokens) == ("sft", manifest.optimizer.target_tokens)
    plain = DemoOptions(stages=1, base_model=base).manifest()
    assert (plain.objective.kind, plain.data.corpus) == ("lm", ("stdlib",))
    assert tuning_totals(DemoOptions().manifest()) is None and DemoOptions(link="1Mbit,5ms").flags()[1] == "--link"


def test_flags_of_a_tuning_demo_that_do_not_fit_are_bad_arguments(base: Path) -> None:
    for plan, says in (
        (DemoOptions(base_model=base, preset="tiny"), "exclude each other"),
        (DemoOptions(base_model=base, data=("stdlib", "a.jsonl")), "one file"),
        (DemoOptions(base_model=base, objective="sft"), "give them with --data FILE"),
        (DemoOptions(objective="sft"), "give one with --base-model DIR"),
    ):
        with pytest.raises(Failure, match=says) as raised:
            plan.manifest()
        assert raised.value.code == EXIT_USAGE
