"""Claims about the demo's totals and its JSON object, on journals made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.manifest_model import SubspaceSection

from agora.cli.console import Failure
from agora.cli.demo_command import DemoOptions
from agora.cli.demo_totals import DemoMeasurements, DemoTotals, StageSteps, failure_of, result_of, summary_of
from agora.observe import events, journal
from agora.observe.events import RoundDone, StepTaken

MEASURED = DemoMeasurements("ab" * 32, 0.5, 9.0, (24, 4.0), 3.05)


def result(totals: DemoTotals) -> dict[str, Any]:
    return result_of(totals, MEASURED, peers=2, stages=2, steps=3)


def journal_line(event: events.Event, at_unix: float = 1.0) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(journal.to_json(event) | {"at_unix": at_unix}))
    return fields


def add(totals: DemoTotals, peer: int, *happened: events.Event) -> None:
    for number, event in enumerate(happened):
        totals.add(peer, journal_line(event, 1.0 + number))


def test_the_loss_of_a_step_is_the_mean_over_the_microbatches_that_fill_it_whoever_originated_them() -> None:
    totals = DemoTotals(16)
    for peer, microbatch, loss in ((0, "a", 40.0), (1, "b", 24.0), (0, "c", 16.0)):
        add(totals, peer, events.MicrobatchStarted(microbatch), events.MicrobatchCompleted(microbatch, loss, 8, 0.1))
    assert totals.losses == [4.0] and totals.recent_loss == 2.0
    add(totals, 1, events.MicrobatchCompleted("d", 8.0, 8, 0.1))
    assert totals.losses == [4.0, 1.5] and (totals.tokens, totals.completed) == (32, 4)


def step_taken(stage: int, step: int, tokens: int) -> events.StepTaken:
    return events.StepTaken(stage, step, tokens, None, 0.1, gradient_norm=1.0)


def test_steps_are_those_that_an_optimizer_took_and_one_of_several_replicas_counts_once() -> None:
    totals = DemoTotals(16)
    for peer in (0, 1, 0):
        add(totals, peer, events.MicrobatchCounted("a", (0,), 8), step_taken(0, 1, 8))
    assert totals.step == 1, "tokens of a step and a half, but one step"
    add(totals, 1, events.StepTaken(0, 2, 8, None, 0.1), events.StepTaken(0, 3, 0, None, 0.1))
    assert totals.step == 1, "this replica passed two numbers along no gradient"
    add(totals, 0, step_taken(0, 2, 0), step_taken(0, 3, 8), *(step_taken(1, number, 7) for number in (1, 2)))
    assert totals.step == 3
    value = result(totals)
    assert (value["optimizer_steps"], value["steps_taken"], value["tokens_counted"]) == ([3, 2], 2, 14)


def test_what_a_killed_origin_had_started_is_told_apart_from_what_was_dropped() -> None:
    totals = DemoTotals(8)
    add(totals, 0, *(events.MicrobatchStarted(name) for name in "abc"), events.MicrobatchDropped("a", "no peer"))
    add(totals, 1, *(events.MicrobatchStarted(name) for name in "de"))
    totals.peer(1).is_killed = True
    assert totals.dropped == 1 and lost_and_abandoned(totals) == (3, 2)
    add(totals, 0, events.MicrobatchCompleted("b", 1.0, 8, 0.1), events.MicrobatchCompleted("c", 1.0, 8, 0.1))
    assert lost_and_abandoned(totals) == (1, 2)


def lost_and_abandoned(totals: DemoTotals) -> tuple[int, int]:
    found = totals.microbatch_counts()
    return found["dropped"], found["abandoned_by_killed_origin"]


def test_counted_twice_is_seen_across_peers_and_only_per_stage() -> None:
    totals = DemoTotals(8)
    add(totals, 0, events.MicrobatchCounted("a", (0, 1), 8), events.MicrobatchCounted("b", (0,), 8))
    add(totals, 1, events.MicrobatchCounted("b", (1,), 8), events.MicrobatchCounted("c", (1,), 8))
    add(totals, 2, events.MicrobatchCounted("c", (1,), 8), events.MicrobatchCounted("c", (1,), 8))
    assert totals.microbatch_counts()["counted_twice"] == 1


def test_evaluations_are_not_training() -> None:
    totals = DemoTotals(8)
    add(totals, 0, events.MicrobatchStarted("a", "evaluate"), events.MicrobatchCompleted("a", 1.0, 8, 0.1, "evaluate"))
    assert (totals.completed, totals.tokens, lost_and_abandoned(totals)) == (0, 0, (0, 0))


def good_totals() -> DemoTotals:
    totals = DemoTotals(8)
    for number, loss in enumerate((5.6, 4.0, 3.0)):
        name = f"m{number}"
        add(totals, 0, events.MicrobatchStarted(name), events.MicrobatchCompleted(name, loss * 8, 8, 0.1))
        add(totals, 0, events.MicrobatchCounted(name, (0,), 8), step_taken(0, number + 1, 8))
        add(totals, 1, events.MicrobatchCounted(name, (1,), 8), step_taken(1, number + 1, 8))
    for peer in (0, 1):
        add(totals, peer, events.StateChanged("serving", ""), events.Traffic(100, 200, 200))
    return totals


def test_the_object_has_the_contracts_fields() -> None:
    value = result(good_totals())
    assert {"schema", "run_id", "peers", "stages", "steps", "seconds", "tokens", "tokens_per_second"} <= set(value)
    assert value["loss"] == {"first": 5.6, "last": 3.0, "eval": 3.05}
    assert set(value["microbatches"]) >= {"completed", "rerouted", "dropped", "counted_twice"}
    assert set(value["averaging"]) == {"rounds", "participation", "failed_parts"}
    assert value["bytes"] == {"boundary": 200, "averaging": 0, "state": 0}
    assert (value["peers_joined"], value["peers_killed"], value["tokens"]) == (2, 0, 24)
    assert (value["optimizer_steps"], value["steps_taken"], value["tokens_counted"]) == ([3, 3], 3, 24)
    assert (value["target_tokens"], value["tokens_per_step"], value["share_counted"]) == (8, [8.0, 8.0], 1.0)
    assert value["staleness"] == [0.0, 0.0]
    assert (value["first_microbatch_seconds"], value["total_seconds"]) == (1.5, 9.0)
    assert failure_of(value) == ""
    json.dumps(value, allow_nan=False)


def test_a_person_reads_what_was_computed_and_what_of_it_went_into_steps() -> None:
    totals = good_totals()
    add(totals, 0, replace(step_taken(0, 4, 4), staleness=3.0))
    lines = summary_of(result(totals))
    assert "steps         4 / 3 in 4.0 s, each of 7 / 8 tokens (target 8)" in lines
    assert "tokens        24 computed, 6 per second; 100.0 % counted in a step of every stage" in lines
    assert "staleness     gradients are 0.43 / 0.00 steps old on average" in lines


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"optimizer_steps": [2, 3]}, "took 2 of 3 steps"),
        ({"microbatches": {"dropped": 1}}, "1 microbatches were dropped"),
        ({"loss": {"first": 3.0, "last": 3.1, "eval": 3.2}}, "the loss did not fall"),
        ({"loss": {"first": 3.0, "last": 2.0, "eval": None}}, "could not be evaluated"),
        ({"loss": {"first": None, "last": None, "eval": 3.0}}, "the loss did not fall"),
    ],
)
def test_each_way_to_fail_has_its_sentence(change: dict[str, Any], reason: str) -> None:
    value = result(good_totals())
    assert reason in failure_of(value | change)


def test_flags_that_cannot_work_are_bad_arguments() -> None:
    for plan, text in (
        (DemoOptions(peers=1, stages=2), "give --peers 2 or more"),
        (DemoOptions(link="200,50"), "write RATE,RTT"),
    ):
        with pytest.raises(Failure, match=text) as caught:
            plan.manifest()
        assert caught.value.code == 2


def test_the_manifest_follows_from_the_flags(tmp_path: Path) -> None:
    poems = tmp_path / "poems.txt"
    poems.touch()
    plan = DemoOptions(peers=6, stages=6, steps=10, seed=3, codec="float32", data=("stdlib", str(poems)))
    manifest = plan.manifest()
    assert (manifest.stages.count, manifest.model.layers, manifest.seed, manifest.boundary.codec) == (
        6,
        6,
        3,
        "float32",
    )
    assert manifest.optimizer.total_steps == 16 and manifest.optimizer.warmup_steps == 8
    assert manifest.data.corpus == ("stdlib", "poems.txt") and str(tmp_path) not in manifest.to_toml()
    assert plan.flags() == ["--allow-files", "--data", str(poems)]
    with pytest.raises(Failure, match="gzip") as caught:
        DemoOptions(codec="gzip").manifest()
    assert caught.value.code == 2
    with pytest.raises(Failure, match="huge"):
        DemoOptions(preset="huge").manifest()


def test_texts_of_a_demo_are_found_before_it_starts_and_have_names_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "poems and prose.txt").touch()
    plan = DemoOptions(data=(str(tmp_path / "a" / "*.txt"),))
    assert plan.manifest().data.corpus == ("poems and prose.txt",), "a pattern that no shell has expanded"
    assert plan.flags()[1:] == ["--data", str(tmp_path / "a" / "poems and prose.txt")]
    for data, says in ((tmp_path / "c.txt", "no such file"), (tmp_path / "*" / "*.txt", "one name")):
        with pytest.raises(Failure, match=says) as raised:
            DemoOptions(data=(str(data),)).manifest()
        assert raised.value.code == 2


@pytest.mark.parametrize("link", [None, "20Mbit,50ms"])
def test_boundaries_are_the_presets_unless_a_codec_is_asked_for(link: str | None) -> None:
    plain, told = (DemoOptions(link=link, codec=codec).manifest() for codec in (None, "int8"))
    assert isinstance(plain.model, SubspaceSection) and isinstance(told.model, SubspaceSection)
    assert (plain.model.subspace, plain.boundary.codec) == (56, "int6/int3")
    assert (told.model.subspace, told.boundary.codec) == (128, "int8")


def taken(step: int, tokens: int, *, whole: int | None = None, norm: float | None = 1.0, age: float = 0.0) -> StepTaken:
    """A step that one replica took; `whole`: the tokens of all replicas in the mean gradient that it stepped along."""
    return StepTaken(0, step, tokens, None, 0.1, gradient_norm=norm, staleness=age, step_tokens=whole)


def steps_of(*events: StepTaken) -> StageSteps:
    found = StageSteps()
    for event in events:
        found.add(event)
    return found


def test_replicas_that_step_along_their_own_gradients_count_all_their_tokens_in_one_step() -> None:
    found = steps_of(taken(1, 60), taken(1, 40), taken(2, 40), taken(2, 60))
    assert (found.steps, found.counted_tokens, found.missed, dict(found.tokens)) == (2, 200, 0, {1: 100, 2: 100})
    assert found.tokens_per_step == 100.0


def test_a_step_along_the_mean_of_all_holds_the_tokens_of_that_mean_once() -> None:
    found = steps_of(taken(1, 60, whole=100), taken(1, 40, whole=100))
    assert (found.steps, found.counted_tokens, found.missed) == (1, 100, 0)


def test_a_part_that_came_too_late_is_counted_with_the_step_that_it_went_into_or_missed() -> None:
    found = steps_of(taken(1, 60, whole=60), taken(1, 40, whole=60), taken(2, 60, whole=140), taken(2, 40, whole=140))
    assert (found.counted_tokens, dict(found.tokens), found.missed) == (200, {1: 60, 2: 140}, 0)
    found.add_round(RoundDone(0, "gradient", 2, 1, 0, 2.0, 2, 40.0, 40.0, 0.1, 8))
    assert found.missed == 40.0


def test_what_a_replica_brought_before_it_was_killed_is_counted() -> None:
    found = steps_of(taken(1, 60, whole=100))
    assert (found.counted_tokens, found.missed) == (100, 0)


def test_a_step_that_was_replayed_counts_nothing_twice() -> None:
    found = steps_of(taken(1, 100, whole=100), taken(1, 0, whole=100))
    assert (found.steps, found.counted_tokens, found.missed) == (1, 100, 0)


def test_a_number_taken_over_without_a_gradient_is_no_step() -> None:
    found = steps_of(taken(1, 50), taken(2, 50, norm=None))
    assert (found.steps, found.counted_tokens) == (1, 50)


def test_staleness_is_a_mean_over_tokens() -> None:
    assert steps_of(taken(1, 75, age=2.0), taken(2, 25)).staleness == pytest.approx(1.5)


def test_a_stage_without_a_step_has_neither_tokens_per_step_nor_staleness() -> None:
    found = StageSteps()
    assert (found.steps, found.counted_tokens, found.tokens_per_step, found.staleness) == (0, 0, None, None)
