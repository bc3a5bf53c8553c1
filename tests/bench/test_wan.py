"""The benchmark of slow links: targets, choices and times from curves, and the order of loss runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from agora_protocol.manifest import Manifest, preset
from agora_protocol.manifest_model import SubspaceSection, link_subspace
from agora_protocol.presets import LINK_CODEC, PRESETS
from benchmarks.report import Report, columns
from benchmarks.task import prepare_corpus
from benchmarks.wan_curves import Curve, Length, final, smooth, steps_to, until
from benchmarks.wan_loss import train
from benchmarks.wan_notes import notes
from benchmarks.wan_rates import Speed
from benchmarks.wan_results import Results, ratios, row
from benchmarks.wan_settings import (
    CANDIDATES,
    DENSE,
    DENSE_LEARNT,
    FULL,
    NARROW,
    OPTIMIZERS,
    PRESET,
    PUBLISHED,
    QUICK,
    Effort,
    Job,
    Recipe,
    Setting,
    effort_of,
)
from benchmarks.wan_speeds import Speeds
from benchmarks.wan_steps import LossRuns
from benchmarks.wan_training import order, train_all

TINY = replace(
    FULL,
    widths=(16,),
    seeds=(0, 1),
    stages=2,
    steps=4,
    max_steps={"adamw": {16: 8, 64: 200, 128: 200}, "muon": {16: 6, 64: 200, 128: 200}},
    every=2,
    heldout_batches=1,
    turns=1,
    context=16,
    sequences=2,
)
SLOPES: Mapping[Setting, float] = {DENSE: 2e-3, DENSE_LEARNT: 1.5e-3, PUBLISHED: 1e-3, PRESET: 2e-3}
"""How much the loss falls in a step of AdamW; with Muon twice as much, but by 1.8e-3 for the narrow boundaries."""
NARROWEST = NARROW[2]


def falling(steps: int, slope: float, every: int = 10) -> Curve:
    return [(step, 3.0 - slope * step) for step in range(every, steps + 1, every)]


def loss_runs(width: int = 64, **slopes: float) -> LossRuns:
    """Losses fall in straight lines. slopes: of the presets' boundary with an optimizer."""
    effort = replace(TINY, widths=(width,), steps=200)
    curves = {}
    for recipe in effort.recipes:
        slope = 2 * SLOPES.get(recipe.setting, 0.9e-3) if recipe.optimizer == "muon" else SLOPES[recipe.setting]
        if recipe.setting == PRESET:
            slope = slopes.get(recipe.optimizer, slope)
        for seed in effort.seeds:
            curves[Job(recipe, width, seed)] = falling(200, slope)
    return LossRuns(effort, width, curves)


def measured(**fields: object) -> Speeds:
    """The pace has 1,000 tokens/s. Processors limit what crosses today's link, the wire what crosses `bound`."""
    today = {DENSE: 0.15, PUBLISHED: 0.8, PRESET: 0.96, NARROWEST: 1.0}
    bound = {PUBLISHED: 0.16, PRESET: 0.18, NARROWEST: 0.4}
    over = {(setting, "today"): Speed(share, 0.5, 0.95, 0.02, 2e6) for setting, share in today.items()}
    over |= {(setting, "bound"): Speed(share, 0.97, 0.3, 0.02, 3e5) for setting, share in bound.items()}
    free = {DENSE: Speed(1.0, 0.0, 1.0, 0.0, math.inf), PUBLISHED: Speed(1.1, 0.0, 1.0, 0.0, math.inf)}
    return replace(Speeds([900.0, 1000.0, 1100.0], free, over, 0.1), **fields)


def results(width: int = 64, **slopes: float) -> Results:
    return Results(loss_runs(width, **slopes), measured())


# --- curves


def test_a_straight_line_stays_what_it_is_when_smoothed_but_its_end() -> None:
    curve = falling(100, 1e-3)
    smoothed = smooth(curve)
    assert [step for step, _ in smoothed] == [step for step, _ in curve[:-2]]
    assert [loss for _, loss in smoothed] == pytest.approx([loss for _, loss in curve[:-2]])


def test_smoothing_spreads_one_outlier_over_five() -> None:
    curve = [(step, 5.0 if step == 5 else 0.0) for step in range(1, 10)]
    assert [loss for _, loss in smooth(curve)] == pytest.approx([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_steps_to_a_loss_lie_between_two_points_on_a_straight_line() -> None:
    curve = falling(100, 1e-3)
    assert steps_to(curve, 2.955) == pytest.approx(45.0)
    assert steps_to(curve, 2.99) == 10.0 and steps_to(curve, 4.0) == 10.0
    assert steps_to(curve, 2.9) is None and steps_to([], 2.9) is None


def test_the_end_of_a_curve_is_its_last_smoothed_loss() -> None:
    assert final(falling(100, 1e-3)) == pytest.approx(2.92)
    assert final(until(falling(100, 1e-3), 60)) == pytest.approx(2.96)
    assert final([(10, 2.0)]) == 2.0


def test_a_run_without_a_finite_loss_ends_at_none_and_reaches_nothing() -> None:
    assert math.isnan(final([])) and steps_to(falling(100, 1e-3), final([])) is None


# --- settings


def test_what_is_trained_has_names_of_its_own_and_the_published_recipe_with_each_optimizer() -> None:
    for effort in (QUICK, FULL):
        names = [(recipe.setting.name, recipe.optimizer) for recipe in effort.recipes]
        assert len(set(names)) == len(names)
        assert {Recipe(setting, name) for setting in (PUBLISHED, DENSE, PRESET) for name in OPTIMIZERS} <= set(
            effort.recipes
        )
        assert all(CANDIDATES[name][0] == PRESET for name in OPTIMIZERS)
        assert all(effort.steps <= effort.max_steps_at(name, width) for name in OPTIMIZERS for width in effort.widths)
    assert len(FULL.seeds) >= 3 and len(FULL.widths) >= 2 and FULL.rates == ("today", "bound", "fast")
    assert PUBLISHED.name == "k = d/6.4, bf16" and DENSE_LEARNT.name == "k = d, bf16, learnt embedding"
    assert PRESET.name == "k = 7d/16, int6/int3"
    assert {setting.codec[:4] for setting in NARROW} == {"int4", "int5", "int6"}
    assert {setting.parts for setting in NARROW} == {PUBLISHED.parts}


@pytest.mark.parametrize("width", [64, 128, 512])
def test_the_presets_boundary_is_that_of_every_preset(width: int) -> None:
    assert (PRESET.codec, PRESET.subspace(width)) == (LINK_CODEC, link_subspace(width))
    for made in map(preset, PRESETS):
        assert isinstance(made.model, SubspaceSection)
        assert (made.boundary.codec, made.model.subspace) == (PRESET.codec, PRESET.subspace(made.model.width))


@pytest.mark.parametrize("setting", [DENSE, DENSE_LEARNT, PUBLISHED, PRESET, *NARROW])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("width", [64, 128])
def test_a_manifest_is_what_its_job_says(setting: Setting, optimizer: str, width: int) -> None:
    recipe = Recipe(setting, "muon" if optimizer == "muon" else "adamw")
    manifest = FULL.manifest(Job(recipe, width, 3))
    assert manifest.boundary.codec == setting.codec and manifest.seed == 3
    assert isinstance(manifest.model, SubspaceSection)
    assert manifest.model.subspace == round(width / setting.parts)
    assert manifest.model.is_embedding_fixed == (setting.embedding == "fixed")
    assert manifest.stage_count == manifest.model.layers == 8
    assert manifest.optimizer.name == optimizer
    assert manifest.optimizer.target_tokens == manifest.tokens_per_microbatch == FULL.tokens_per_step
    swarm = FULL.swarm_manifest(setting, width)
    assert swarm.model == manifest.model and swarm.boundary == manifest.boundary
    assert swarm.optimizer.name == "muon" and swarm.optimizer.target_tokens == 16 * swarm.tokens_per_microbatch


def test_a_pipeline_whose_speed_is_measured_may_be_as_full_as_its_link_needs() -> None:
    swarm = FULL.swarm_manifest(PUBLISHED, 128)
    step = swarm.optimizer.target_tokens / swarm.tokens_per_microbatch
    assert swarm.schedule.staleness * step >= 100 and swarm.schedule.max_in_flight == 0


def test_bytes_are_those_of_the_published_table() -> None:
    assert DENSE.bytes_per_token(1024) == (2048, 2048)
    assert PUBLISHED.bytes_per_token(1024) == (320, 320)
    assert Setting(8 / 3, "int8/int2").bytes_per_token(128) == (50, 14)


def test_options_choose_what_is_trained() -> None:
    assert effort_of((), quick=True) == QUICK and effort_of((), quick=False) == FULL
    effort = effort_of(["--losses", "--widths", "128", "--seeds", "2"], quick=False)
    assert effort == replace(FULL, losses_only=True, widths=(128,), seeds=(0, 1))
    with pytest.raises(SystemExit):
        effort_of(["--widths", "32"], quick=False)


# --- steps and choices


def with_curve(found: LossRuns, recipe: Recipe, *curves: Curve) -> LossRuns:
    changed = {Job(recipe, found.width, seed): curve for seed, curve in enumerate(curves)}
    return replace(found, curves={**found.curves, **changed})


def test_targets_are_of_each_optimizer_and_muon_runs_end_below_both() -> None:
    runs = loss_runs()
    assert runs.target("adamw", 0) == pytest.approx(2.82) and runs.target("muon", 1) == pytest.approx(2.64)
    assert runs.enough("adamw", 0) == pytest.approx(2.82) and runs.enough("muon", 0) == pytest.approx(2.64)
    slow = with_curve(runs, Recipe(PUBLISHED, "muon"), falling(200, 1e-4))
    assert slow.enough("muon", 0) == pytest.approx(2.82), "AdamW's target is wanted of Muon, too"


def test_steps_to_the_targets() -> None:
    runs = loss_runs()
    assert runs.steps(Recipe(PUBLISHED, "adamw")) == pytest.approx([180, 180])
    assert runs.steps(Recipe(PUBLISHED, "muon")) == pytest.approx([180, 180])
    assert runs.steps(Recipe(PUBLISHED, "muon"), "adamw") == pytest.approx([90, 90])
    assert runs.steps(Recipe(PRESET, "adamw")) == pytest.approx([90, 90])
    assert runs.steps(Recipe(NARROWEST, "muon")) == [math.inf, math.inf]
    assert runs.steps(Recipe(NARROWEST, "muon"), "adamw") == pytest.approx([100, 100])


def test_dense_bf16_has_its_better_embedding() -> None:
    assert loss_runs().dense("muon") == Recipe(DENSE, "muon")
    runs = with_curve(loss_runs(), Recipe(DENSE_LEARNT, "muon"), falling(200, 6e-3))
    assert (runs.dense("muon"), runs.dense("adamw")) == (Recipe(DENSE_LEARNT, "muon"), Recipe(DENSE, "adamw"))


def test_the_first_seed_chooses_by_steps_where_bytes_cost_nothing_and_by_bytes_where_the_wire_binds() -> None:
    runs = loss_runs()
    for narrow in NARROW:
        runs = with_curve(runs, Recipe(narrow, "muon"), falling(250, 1.9e-3), falling(250, 9e-3))
    assert runs.chosen("muon", "fast") == Recipe(PRESET, "muon"), "half the steps"
    runs = with_curve(runs, Recipe(PRESET, "muon"), falling(250, 2.1e-3))
    assert runs.chosen("muon", "fast") == Recipe(PRESET, "muon")
    assert runs.chosen("muon", "bound") == Recipe(NARROWEST, "muon")
    assert runs.chosen("adamw", "bound") == Recipe(PRESET, "adamw")
    assert runs.chosen_over(Recipe(NARROWEST, "muon")) == ["today", "bound"], "over today's the wire is nearly as slow"


def test_what_is_not_compared_is_trained_with_the_first_seed_alone_and_not_measured() -> None:
    runs = loss_runs()
    compared = runs.compared()
    assert Recipe(DENSE_LEARNT, "muon") not in compared and Recipe(DENSE, "muon") in compared
    assert {recipe.setting for recipe in compared} == {DENSE, PRESET}
    links = runs.links_to_measure()
    assert links == {PUBLISHED: ("today", "bound", "fast"), DENSE: ("today", "fast"), PRESET: links[PUBLISHED]}


def test_all_but_the_published_recipe_may_end_below_the_targets(tmp_path: Path) -> None:
    runs = replace(loss_runs(16), effort=TINY)
    published = order(Job(Recipe(PUBLISHED, "adamw"), 16, 1), runs, tmp_path)["length"]
    ours = order(Job(Recipe(PRESET, "muon"), 16, 1), runs, tmp_path)["length"]
    assert published == {"most": 8, "every": 2, "least": 0, "enough": None}
    assert ours == {"most": 8, "every": 2, "least": 4, "enough": pytest.approx(2.64)}


def test_a_run_ends_at_the_target_but_not_before_the_steps_that_all_have() -> None:
    length = Length(most=1000, every=10, least=300, enough=2.825)
    ends = [step for step in range(10, 1000, 10) if length.must_end(falling(step, 1e-3))]
    assert ends[0] == 300 and not length.must_end(falling(190, 1e-3))
    assert Length(1000, 10, 0, 2.825).must_end(falling(200, 1e-3))
    assert not Length(1000, 10, 0, 2.825).must_end(falling(190, 1e-3)) and not Length(10, 1).must_end(
        falling(900, 1e-3)
    )


# --- results


def test_times_are_steps_by_the_speed_over_the_link() -> None:
    found = results()
    tokens = TINY.tokens_per_step
    assert found.times(Recipe(PRESET, "adamw"), "today") == pytest.approx([90 * tokens / 960] * 2)
    assert found.times(Recipe(PUBLISHED, "muon"), "bound", "adamw") == pytest.approx([90 * tokens / 160] * 2)
    assert all(map(math.isnan, found.times(Recipe(DENSE, "muon"), "bound")))
    assert all(map(math.isnan, Results(loss_runs(), None).times(Recipe(PRESET, "muon"), "today")))


def test_ratios_are_of_times_with_one_optimizer_on_both_sides_or_with_two() -> None:
    found = results()
    assert found.against_published("adamw", "today") == pytest.approx(0.5 * 800 / 960)
    assert found.against_published("muon", "bound") == pytest.approx(0.5 * 160 / 180)
    assert found.against_dense("muon") == pytest.approx(150 / 960)
    assert found.against_adamw("today") == pytest.approx(0.25 * 800 / 960)
    assert math.isnan(found.against_published("muon", "fast")), "its speed was not measured"


def test_the_parts_of_the_boundary_and_of_the_optimizer_multiply_to_the_whole() -> None:
    found = results()
    assert found.optimizers_part("today") == pytest.approx(0.5)
    assert found.boundarys_part("today") == pytest.approx(0.5 * 800 / 960)
    for rate in ("today", "bound"):
        assert found.boundarys_part(rate) * found.optimizers_part(rate) == pytest.approx(found.against_adamw(rate))


def test_ratios_keep_the_names_of_the_contract_and_are_of_the_worse_width() -> None:
    better, worse = results(), results(128, adamw=1.5e-3, muon=3e-3)
    made = ratios([better, worse])
    names = ["time_to_loss_vs_subspace_reference", "time_to_loss_vs_dense_bf16", "throughput_kept_50ms"]
    assert set(names) < set(made)
    assert made[names[0]].value == pytest.approx(2 / 3 * 800 / 960)
    assert made[names[0] + "_adamw"].value == pytest.approx(2 / 3 * 800 / 960)
    assert made["of_it_boundary"].value == pytest.approx(2 / 3 * 800 / 960) and "width 128" in made[names[1]].meaning
    assert made["throughput_kept_50ms"].value == pytest.approx(0.96)
    assert made["time_to_loss_vs_dense_bf16"].value == pytest.approx(4 / 3 * 150 / 960)
    unreached = results(128, muon=1e-4)
    assert math.isnan(ratios([better, unreached])[names[0]].value)


def test_a_row_shows_both_targets_and_each_link_and_what_was_not_reached_as_nothing() -> None:
    found = results()
    ours, dense, narrow = (row(found, Recipe(setting, "muon")) for setting in (PRESET, DENSE, NARROW[0]))
    assert (ours["steps"], ours["low"], ours["high"], ours["steps_to_adamw"]) == (90, 90, 90, 45)
    assert (ours["tokens_per_s_bound"], ours["wire_%_bound"], ours["cpu_%_today"]) == (180, 97, 95)
    assert (dense["T_s_today"], dense["T_s_bound"]) == (round(90 * TINY.tokens_per_step / 150), None)
    assert (narrow["steps"], narrow["high"], narrow["T_s_today"]) == (None, None, None)
    assert "(chosen: today, bound, fast)" in str(ours["boundary"])
    assert columns([ours]) == columns([dense]) == columns([narrow])
    assert ours["equal_loss"] == pytest.approx(3.0 - 4e-3 * 180)


@pytest.mark.parametrize("setting", [DENSE, PUBLISHED, PRESET])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_overflowed_before_its_first_loss_is_shown_as_nothing(setting: Setting, optimizer: str) -> None:
    recipe = Recipe(setting, "muon" if optimizer == "muon" else "adamw")
    found = replace(results(), runs=with_curve(loss_runs(), recipe, [], falling(200, 1e-3)))
    table = [row(found, each) for each in found.runs.recipes]
    told = json.loads(json.dumps(Report("wan", "Wan", {}, table, ratios([found]), notes([found])).to_json()))
    mine = told["rows"][found.runs.recipes.index(recipe)]
    assert (mine["equal_loss"], mine["high"], mine["seeds"]) == (None, None, 2)
    value = told["ratios"]["time_to_loss_vs_subspace_reference" + ("_adamw" if optimizer == "adamw" else "")]
    assert (value is None) == (setting in (PUBLISHED, PRESET))


def test_notes_name_every_width_and_link_and_what_limits() -> None:
    told = notes([results(), results(128)])
    (today,) = (text for text in told if text.startswith("Width 64, link today"))
    (bound,) = (text for text in told if text.startswith("Width 128, link bound"))
    assert "PROCESSOR TIME, not the wire, limits (wire busy 50%, processors 95%, others' 2%)" in today
    assert "the wire limits (wire busy 97%, processors 30%, others' 2%)" in bound and "both Muon 0.44" in bound
    assert "nan" not in " ".join(told)
    missing = replace(results(), speeds=measured(failures=["k = d, bf16: an origin did not drain"]))
    assert "NOT MEASURED, k = d, bf16: an origin did not drain" in notes([missing])
    assert not any("daemons, one for each stage" in text for text in notes([Results(loss_runs(), None)]))


# --- loss runs


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, ...]:
    text = tmp_path / "corpus.txt"
    text.write_text("def square(number):\n    return number * number\n\n" * 200)
    return (str(text),)


def shrunk(manifest: Manifest, corpus: tuple[str, ...]) -> Manifest:
    return manifest.with_values(data={"corpus": corpus, "heldout": 0.1})


def tiny_manifest(setting: Setting, corpus: tuple[str, ...]) -> Manifest:
    return shrunk(TINY.manifest(Job(Recipe(setting, "muon"), 16, 0)), corpus)


def test_a_loss_run_learns_and_repeats_exactly(corpus: tuple[str, ...], tmp_path: Path) -> None:
    manifest = tiny_manifest(PRESET, corpus)
    first = train(manifest, tmp_path, Length(60, 20), 2)
    assert [step for step, _ in first] == [20, 40, 60] and first[-1][1] < first[0][1]
    assert first == train(manifest, tmp_path, Length(60, 20), 2)
    assert first != train(tiny_manifest(DENSE, corpus), tmp_path, Length(60, 20), 2)


def test_a_run_whose_numbers_overflow_ends_early(corpus: tuple[str, ...], tmp_path: Path) -> None:
    manifest = tiny_manifest(DENSE, corpus).with_values(
        optimizer={"name": "adamw", "learning_rate": 100.0, "warmup_steps": 0, "clip": 0.0, "weight_decay": 10.0}
    )
    assert len(train(manifest, tmp_path, Length(40, 1), 1)) < 40


@pytest.mark.process
def test_children_share_the_loss_runs(corpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Effort.manifest
    monkeypatch.setattr(Effort, "manifest", lambda *given: shrunk(original(*given), corpus))
    prepare_corpus(tmp_path, TINY.corpus_manifest())
    (runs,) = train_all(TINY, tmp_path)
    assert runs.recipes == TINY.recipes
    for recipe in TINY.recipes:
        both = recipe.setting == PUBLISHED or recipe in runs.compared()
        assert runs.seeds(recipe) == ([0, 1] if both else [0])
    adamw, muon = (Job(Recipe(PUBLISHED, name), 16, 0) for name in OPTIMIZERS)
    assert (runs.curves[adamw][-1][0], runs.curves[muon][-1][0]) == (8, 6)
    assert runs.curves[adamw] != runs.curves[replace(adamw, seed=1)]
