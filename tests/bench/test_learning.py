"""The learning benchmark: accounts from journals, ratios from curves, options, the plain loop, a whole run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.manifest import Manifest
from benchmarks import learning
from benchmarks.learning_accounts import Accounts, accounts_of
from benchmarks.learning_curves import Point, loss_at, seconds_to, times_to_common_loss
from benchmarks.learning_plain import PlainLoop, evaluate, train
from benchmarks.learning_results import RATIOS, Trained, groups_of, notes, ratios, row
from benchmarks.learning_settings import FULL, OVER_LINK, QUICK, WITH_KILLS, Job, SwarmSetting, effort_of
from benchmarks.report import Report, columns
from benchmarks.task import corpus_cache, prepare_corpus
from safetensors.torch import save_file

from agora.cli.demo_command import DemoOptions
from agora.cli.demo_totals import StageSteps
from agora.model import family_of
from agora.observe import events, journal

FOUR, EIGHT = SwarmSetting(4), SwarmSetting(8)


# --- accounts


def written(*happened: events.Event) -> list[dict[str, Any]]:
    """Returns the journal in which these events happened, one each second."""
    lines = [journal.to_json(event) | {"at_unix": 100.0 + number} for number, event in enumerate(happened)]
    read: list[dict[str, Any]] = json.loads(json.dumps(lines))
    return read


def computed(microbatch: str, tokens: int, purpose: str = "train") -> tuple[events.Event, events.Event]:
    done = events.MicrobatchCompleted(microbatch, 1.0, tokens, 0.1, purpose)
    return events.MicrobatchStarted(microbatch, purpose), done


def step(
    stage: int, number: int, tokens: int, *, norm: float | None = 1.0, staleness: float = 0.0, whole: int | None = None
) -> events.StepTaken:
    """A step of one replica; `whole`: the tokens of the mean gradient that it stepped along, None along its own."""
    return events.StepTaken(
        stage, number, tokens, None, 0.1, gradient_norm=norm, staleness=staleness, step_tokens=whole
    )


def test_a_step_that_replicas_take_together_is_one_and_holds_the_tokens_of_all() -> None:
    first = written(*computed("a", 60), step(0, 1, 60), step(0, 2, 40), *computed("b", 40))
    second = written(*computed("c", 100), step(0, 1, 40), step(0, 2, 60))
    found = accounts_of([first, second], 1, 100)
    assert (found.steps, found.computed, found.counted) == ([2], 200, 1.0)
    assert found.fills == [1.0, 1.0] and found.spread == 0.0 and found.steps_per_token == 1.0


def test_tokens_that_came_to_a_mean_in_vain_are_in_no_step() -> None:
    def late(what: str) -> events.RoundDone:
        return events.RoundDone(0, what, 0, 1, 0, 2.0, 2, 50.0, 50.0, 0.1, 8)

    first = written(*computed("a", 100), step(0, 1, 100, whole=100))
    second = written(*computed("b", 50), late("gradient"), late("weights"), step(0, 1, 50, whole=100))
    found = accounts_of([first, second], 1, 100)
    assert found.steps == [1] and found.counted == pytest.approx(2 / 3)
    assert found.missed == pytest.approx(1 / 3) and found.fills == [1.0]


def test_a_run_is_as_good_as_its_worst_stage_and_evaluations_do_not_count() -> None:
    lines = written(
        *computed("a", 200), *computed("b", 500, "evaluate"), step(0, 1, 100), step(0, 2, 100), step(1, 1, 150)
    )
    found = accounts_of([lines], 2, 100)
    assert found.computed == 200 and found.steps == [2, 1]
    assert found.counted == 0.75 and found.steps_per_token == 0.5
    assert sorted(found.fills) == [1.0, 1.0, 1.5] and found.spread == pytest.approx(math.sqrt(1 / 12))


def test_a_swarm_that_completed_nothing_has_no_accounts() -> None:
    with pytest.raises(ValueError, match="no microbatch was completed"):
        accounts_of([written(events.MicrobatchStarted("a"))], 1, 100)


# --- curves


def test_a_loss_lies_between_two_points_on_a_straight_line() -> None:
    curve = [Point(0, 0.0, 6.0), Point(100, 1.0, 4.0), Point(200, 3.0, 3.0)]
    assert [loss_at(curve, tokens) for tokens in (0, 50, 100, 150, 200, 900)] == [6.0, 5.0, 4.0, 3.5, 3.0, 3.0]
    assert (seconds_to(curve, 7.0), seconds_to(curve, 5.0), seconds_to(curve, 3.5)) == (0.0, 0.5, 2.0)
    assert seconds_to(curve, 2.9) is None and seconds_to([], 1.0) is None


def test_times_are_to_the_lowest_loss_that_both_have_reached() -> None:
    worse = [Point(0, 0.0, 6.0), Point(100, 10.0, 4.0)]
    better = [Point(0, 0.0, 6.0), Point(100, 2.0, 3.0)]
    assert times_to_common_loss(worse, better) == pytest.approx((10.0, 4 / 3))
    assert times_to_common_loss(better, worse) == pytest.approx((4 / 3, 10.0))


# --- results


def trained(losses: list[float], *, steps: int | None = None, counted: float = 1.0) -> Trained:
    """A run of 100 steps of 10 tokens in as many seconds; of a swarm when `steps` says how many it has taken."""
    curve = [Point(1000 * number // (len(losses) - 1), 100.0 * number, loss) for number, loss in enumerate(losses)]
    accounts = None
    if steps is not None:
        stage = StageSteps()
        for number in range(steps):
            stage.add(step(0, number, int(1000 * counted / steps), staleness=1.0))
        accounts = Accounts(10, 1000, (stage,))
    return Trained(curve, curve[-1], accounts, 1, 0.0)


def found_in_a_run() -> dict[Job, Trained]:
    """Of two seeds and two lengths: plain loops that reach 2.0, swarms of 4 that reach 2.2, of 8 that reach 2.4."""
    found: dict[Job, Trained] = {}
    for steps in (100, 400):
        for seed in (0, 1):
            found[Job(None, steps, seed)] = trained([6.0, 3.0, 2.0])
            found[Job(FOUR, steps, seed)] = trained([6.0, 3.0, 2.2], steps=100)
            found[Job(EIGHT, steps, seed)] = trained([6.0, 3.0, 2.4], steps=80 if steps == 100 else 50, counted=0.8)
    return found


def test_ratios_have_the_names_of_the_contract() -> None:
    assert list(RATIOS) == [
        "loss_at_equal_tokens_2",
        "loss_at_equal_tokens_4",
        "loss_at_equal_tokens_8",
        "steps_per_token_8",
        "tokens_counted_8",
        "time_to_loss_4_vs_single",
        "loss_over_link",
    ]
    assert list(ratios([])) == list(RATIOS)


def test_ratios_are_of_the_worse_length_and_what_was_not_trained_has_none() -> None:
    values = {name: ratio.value for name, ratio in ratios(groups_of(found_in_a_run())).items()}
    assert values["loss_at_equal_tokens_4"] == pytest.approx(1.1)
    assert values["loss_at_equal_tokens_8"] == pytest.approx(1.2)
    assert values["steps_per_token_8"] == pytest.approx(0.5)
    assert values["tokens_counted_8"] == pytest.approx(0.8)
    assert values["time_to_loss_4_vs_single"] == pytest.approx(200 / 180)
    assert math.isnan(values["loss_at_equal_tokens_2"]) and math.isnan(values["loss_over_link"])


def test_a_loss_is_compared_at_the_tokens_that_the_swarm_has_computed() -> None:
    plain = Trained(
        [Point(0, 0.0, 6.0), Point(1000, 1.0, 2.0), Point(1100, 1.1, 1.0)], Point(1000, 1.0, 2.0), None, 1, 0
    )
    swarm = replace(trained([6.0, 3.0], steps=100), end=Point(1050, 1.0, 3.0))
    (group, _) = groups_of({Job(FOUR, 100, 0): swarm, Job(None, 100, 0): plain})
    assert group.relative_losses() == [2.0]


def test_rows_share_their_columns_and_are_json() -> None:
    groups = groups_of(found_in_a_run())
    report = Report("learning", "Learning", {}, [row(group) for group in groups], ratios(groups), notes(FULL, 8, 0.0))
    assert len({tuple(columns([each])) for each in report.rows}) == 1
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [each["name"] for each in told["rows"][:3]] == ["plain loop", "4 peers", "8 peers"]
    assert [each["steps"] for each in told["rows"][:3]] == ["100", "100", "80"]
    assert [each["lost_%"] for each in told["rows"][:3]] == [0.0, 10.0, 20.0]
    assert told["rows"][0]["counted_%"] is None and told["rows"][2]["counted_%"] == 80.0


def test_a_busy_machine_is_said() -> None:
    assert "1.3 cores" in notes(QUICK, 8, 1.3)[0] and len(notes(QUICK, 8, 1.3)) == len(notes(QUICK, 8, 0.1)) + 1


# --- settings


def test_the_efforts_have_what_the_ratios_need() -> None:
    for effort in (QUICK, FULL):
        settings = {job.setting for job in effort.jobs}
        assert {setting for setting, *_ in RATIOS.values()} <= settings and {None, WITH_KILLS, OVER_LINK} <= settings
        names = [effort.manifest(job).name for job in effort.jobs]
        assert len(set(names)) == len(names), "daemons of one machine that start from equal drafts are one run"
    assert len(FULL.seeds) >= 3 and FULL.lengths == (100, 400)


def test_a_swarm_trains_what_the_demo_trains_and_the_plain_loop_the_same_in_one_stage() -> None:
    swarm, plain = (FULL.manifest(Job(setting, 100, 2)) for setting in (EIGHT, None))
    assert swarm == DemoOptions(peers=8, steps=100, seed=2).manifest().with_values(name=swarm.name)
    assert plain == swarm.with_values(name=plain.name, stages={"count": 1})


def test_options_change_sizes_lengths_seeds_and_the_manifest() -> None:
    given = "--peers 2,8 --steps 30,60 --seeds 2 --schedule synchronous --set optimizer.name=nadam"
    effort = effort_of([*given.split(), "--set", "averaging.exact_steps=0"], quick=True)
    assert effort.sizes == (SwarmSetting(2), EIGHT) and not effort.others
    assert (effort.lengths, effort.seeds) == ((30, 60), (0, 1))
    manifest = effort.manifest(effort.jobs[1])
    assert (manifest.schedule.kind, manifest.optimizer.name) == ("synchronous", "nadam")
    assert manifest.averaging.exact_steps == 0 and manifest.optimizer.total_steps == 30
    shaped = effort_of(["--link", "20Mbit,50ms", "--kill-every", "5"], quick=True)
    assert shaped.sizes == (SwarmSetting(4, "20Mbit,50ms", 5.0),)


@pytest.mark.parametrize("options", [["--peers", "two"], ["--set", "optimizer"], ["--link", "fast"], ["--fast"]])
def test_options_that_mean_nothing_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        effort_of(options, quick=True)
    assert refused.value.code == 2


# --- the plain loop, and the whole


SMALL = {
    "model": {"width": 32, "subspace": 16, "layers": 2, "feed_forward": 48, "context": 32},
    "schedule": {"microbatch": 2},
    "optimizer": {"target_tokens": 512},
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "corpus.txt"
    file.write_text("def square(number):\n    return number * number\n\n" * 400)
    return str(file)


@pytest.fixture
def small(text: str, tmp_path: Path) -> Manifest:
    manifest = FULL.manifest(Job(None, 40, 0)).with_values(**SMALL, data={"corpus": (text,), "heldout": 0.1})
    prepare_corpus(tmp_path, manifest)
    return manifest


def test_the_plain_loop_learns_and_a_chunk_changes_nothing(small: Manifest, tmp_path: Path) -> None:
    curves = [train(PlainLoop(small, corpus_cache(tmp_path), chunk), 512, (5, 20), batches=2) for chunk in (2, 16)]
    assert [tokens for tokens, _, _ in curves[0]] == [0, 5 * 512, 20 * 512]
    first, later, last = (loss for _, _, loss in curves[0])
    assert last < later < first
    assert [loss for _, _, loss in curves[1]] == pytest.approx([first, later, last], rel=1e-3)


def test_the_weights_of_a_swarms_stages_are_evaluated_as_the_loops_own(small: Manifest, tmp_path: Path) -> None:
    """Stages in files of their own, as daemons write them, are the model that the plain loop begins with."""
    cut = small.with_values(stages={"count": 2})
    files = []
    for stage in range(2):
        module = family_of(cut.model).build_stage(cut.layers_of(stage), cut.seed)
        files.append(str(tmp_path / f"{stage}.safetensors"))
        save_file({name: values.detach() for name, values in module.named_parameters()}, files[-1])
    loop = PlainLoop(small, corpus_cache(tmp_path))
    own = loop.loss(2)
    loop.take_step()
    assert loop.loss(2) != own
    assert evaluate(loop, [files, files], 2) == [own, own]
    with pytest.raises(ValueError, match="differ in"):
        loop.load({"embedding.weight": torch.zeros(1)})


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_swarm_of_daemons_is_compared_with_the_plain_loop(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "CALIBRATE_S", 0.1)
    values: dict[str, dict[str, object]] = {**SMALL, "data": {"corpus": [text], "heldout": 0.1}}
    options = ["--peers", "2", "--steps", "6"]
    for section, fields in values.items():
        for name, value in fields.items():
            options += ["--set", f"{section}.{name}={json.dumps(value)}"]
    report = learning.run_with_options(True, tmp_path, options)
    plain, swarm = report.rows
    assert (plain["name"], swarm["name"], plain["lost_%"]) == ("plain loop", "2 peers", 0.0)
    assert int(str(swarm["steps"]).split("/")[0]) >= 1 and float(swarm["computed_M"] or 0) >= round(6 * 512 / 1e6, 3)
    assert 0 < float(swarm["counted_%"] or 0) <= 100
    ratio = report.ratios["loss_at_equal_tokens_2"].value
    assert 0.5 < ratio < 2 and swarm["lost_%"] == round(100 * (ratio - 1), 2)
