"""The scaling benchmark: its fleets hold every stage, its sums are right, and a whole run of two machines."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from benchmarks.learning_curves import Point
from benchmarks.report import Report, columns
from benchmarks.scaling import notes, ratios, relative_time, row, speedup
from benchmarks.scaling_settings import (
    EIGHT,
    EIGHT_LINKED,
    FULL,
    MICROBATCHES_PER_STEP,
    MODEL_MS,
    ONE,
    QUICK,
    SLOW_FACTOR,
    WITH_SLOW,
    Fleet,
    effort_of,
)
from benchmarks.scaling_swarm import FleetRun, Observation, Progress, queued_s, rate_between, share
from benchmarks.task import prepare_corpus

from agora.pipeline.device_time import DeviceTime

NAMES = ["speedup_2", "speedup_4", "speedup_8", "speedup_8_link", "time_to_loss_8", "with_slow_ninth"]


def seen(rate: float, *waits: DeviceTime, set_s: float = 10.0) -> Observation:
    return Observation(rate, list(waits) or [DeviceTime(10.0, 10.0)], set_s, 4, 0.0)


# --- fleets


@pytest.mark.parametrize("fleet", [ONE, *FULL.fleets])
def test_a_fleet_holds_every_stage_equally_often_but_for_its_slow_machine(fleet: Fleet) -> None:
    spans = fleet.spans[: fleet.machines]
    held = [stage for span in spans for stage in span.stages]
    assert {held.count(stage) for stage in range(fleet.stages)} == {max(1, fleet.machines // fleet.stages)}
    assert fleet.least_replicas == held.count(0)
    assert len(fleet.spans) == fleet.machines + (fleet.slow_stage is not None)


def test_a_model_is_as_much_work_however_it_is_cut_and_the_slow_machine_is_slower() -> None:
    assert ONE.forward_ms(0) * 2 == Fleet(8, 4).forward_ms(0) * 4 == MODEL_MS
    slow = WITH_SLOW[0]
    assert slow.forward_ms(8) == SLOW_FACTOR * slow.forward_ms(7) == SLOW_FACTOR * EIGHT.forward_ms(7)


def test_all_fleets_train_the_same_model_by_the_same_steps_and_rates_of_learning() -> None:
    manifests = [FULL.manifest(fleet, 3) for fleet in (ONE, *FULL.fleets)]
    assert len({manifest.name for manifest in manifests}) == len(manifests), "each has a folder of its own"
    assert len({manifest.optimizer for manifest in manifests}) == len({manifest.model for manifest in manifests}) == 1
    assert manifests[0].optimizer.target_tokens == MICROBATCHES_PER_STEP * manifests[0].tokens_per_microbatch


def test_quick_measures_every_ratio_and_options_choose_fleets_and_values() -> None:
    everything = {fleet: [seen(1.0)] for fleet in (ONE, *QUICK.fleets)}
    curve = [Point(0, 0.0, 5.0), Point(10, 10.0, 4.0)]
    found = ratios(everything, dict.fromkeys(everything, [curve]))
    assert list(found) == NAMES and not any(math.isnan(ratio.value) for ratio in found.values())
    chosen = effort_of(
        ["--machines", "1,2,8", "--stages", "4", "--steps", "8", "--set", "schedule.staleness=1.0"], True
    )
    assert chosen.fleets == (Fleet(2, 4), Fleet(8, 4)) and (chosen.steps, chosen.single_steps) == (8, 4)
    assert chosen.manifest(ONE, 0).schedule.staleness == 1.0
    assert effort_of([], True) == QUICK and effort_of([], False) == FULL


# --- sums


def test_a_rate_is_of_what_came_back_within_the_window_from_its_first_on() -> None:
    back = [(float(at), 100) for at in range(10)]
    assert rate_between(back, 2.5, 7.5) == 100.0
    assert rate_between([(4.0, 50), (3.0, 70), (5.0, 50)], 0.0, 9.0) == 50.0, "in order of time, whoever reported them"
    assert math.isnan(rate_between(back, 2.5, 3.5))


def test_journals_say_what_came_back_what_was_counted_and_how_old_gradients_were() -> None:
    progress = Progress()
    for daemon, event in [
        ("a", {"event": "MicrobatchStarted", "purpose": "train", "at_unix": 1.0}),
        ("a", {"event": "MicrobatchStarted", "purpose": "train", "at_unix": 2.0}),
        ("a", {"event": "MicrobatchCompleted", "purpose": "train", "tokens": 64, "at_unix": 4.0}),
        ("a", {"event": "MicrobatchCompleted", "purpose": "evaluate", "tokens": 999, "at_unix": 5.0}),
        ("b", {"event": "MicrobatchCounted", "stages": [1, 2], "tokens": 64}),
        ("a", {"event": "StepTaken", "stage": 0, "step": 7, "tokens": 30, "staleness": 1.0, "gradient_norm": 1.0}),
        ("b", {"event": "StepTaken", "stage": 1, "step": 9, "tokens": 10, "staleness": 0.0, "gradient_norm": 1.0}),
        ("b", {"event": "StepTaken", "stage": 1, "step": 10, "tokens": 99, "staleness": 9.0, "gradient_norm": None}),
    ]:
        progress.add(daemon, event)
    assert (progress.tokens, progress.seconds, progress.first_steps) == (64, 3.0, 7)
    assert (progress.counted, progress.steps) == ({"b": 2}, {"a": 1, "b": 1}), "a skipped step is none"
    assert progress.aged / progress.aged_tokens == 0.75


def test_shares_are_of_all_machines_together_and_an_overrun_shows() -> None:
    observed = seen(
        1.0, DeviceTime(10.0, 9.0, 1.0, queued=6.0), DeviceTime(10.0, 3.0, 3.0, 2.0, 1.0, 1.0, 2.0), set_s=8.0
    )
    assert share(observed.waits, "busy") == 0.6 and share(observed.waits, "mean") == 0.1
    assert observed.overrun == 1.5
    assert queued_s(observed) == 8.0 / (4 * MICROBATCHES_PER_STEP)


def test_ratios_are_taken_within_a_round_and_the_worse_place_of_a_slow_machine_counts() -> None:
    found = {
        ONE: [seen(100.0), seen(50.0), seen(200.0)],
        EIGHT: [seen(800.0), seen(350.0), seen(1800.0)],
        WITH_SLOW[0]: [seen(880.0), seen(385.0), seen(1980.0)],
        WITH_SLOW[1]: [seen(720.0), seen(315.0), seen(1620.0)],
    }
    value = {name: ratio.value for name, ratio in ratios(found, {}).items()}
    assert value["speedup_8"] == 8.0 and value["with_slow_ninth"] == pytest.approx(0.9)
    assert math.isnan(value["speedup_2"]) and math.isnan(value["time_to_loss_8"])
    assert speedup(found, EIGHT_LINKED) is math.nan or math.isnan(speedup(found, EIGHT_LINKED))


def test_the_time_to_a_loss_is_that_to_the_lowest_loss_of_both() -> None:
    single = [Point(100, 100.0, 5.0), Point(200, 200.0, 4.0)]
    eight = [Point(100, 10.0, 5.0), Point(200, 20.0, 4.5), Point(400, 40.0, 3.5)]
    assert relative_time({ONE: [single], EIGHT: [eight]}, EIGHT) == pytest.approx(30.0 / 200.0)


def test_a_report_says_where_the_time_went_and_that_the_processor_was_too_busy() -> None:
    found = {ONE: [seen(100.0)], EIGHT: [seen(700.0, DeviceTime(10.0, 8.0, 1.0, 1.0), set_s=4.0)]}
    rows = [row(fleet, found, {}) for fleet in found]
    assert columns(rows)[:3] == ["fleet", "tokens_s", "by_one"] and rows[1]["by_one"] == 7.0
    assert (rows[1]["busy"], rows[1]["for_a_mean"]) == (0.8, 0.1)
    assert any("TOO BUSY" in note for note in notes(QUICK, found, 0.0))
    assert not any("TOO BUSY" in note for note in notes(QUICK, {ONE: [seen(1.0)]}, 0.0))
    assert Report("scaling", "", {}, rows, ratios(found, {})).to_json()["ratios"].keys() == set(NAMES)


# --- a whole run


@pytest.mark.process
def test_two_emulated_machines_keep_to_their_set_times_and_their_account_adds_up(tmp_path: Path) -> None:
    fleet, effort = Fleet(2), effort_of(["--steps", "4"], True)
    manifest = effort.manifest(fleet, 0)
    prepare_corpus(tmp_path, manifest)
    run = FleetRun(fleet, manifest, 4, tmp_path, threading.Event())
    observed = run.run()
    ideal = manifest.tokens_per_microbatch * fleet.machines / (3 * MODEL_MS / 1000)
    assert 0.2 * ideal < observed.rate <= 1.1 * ideal
    assert 0.9 <= observed.overrun
    for waits in observed.waits:
        assert sum(waits[1:-1]) == pytest.approx(waits.seconds, abs=0.01) and waits.busy > 0
    assert observed.snapshots and all(len(each.files) == 2 for each in observed.snapshots)
