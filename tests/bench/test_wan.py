"""The benchmark of slow links: targets and times from curves, links from speeds, loss runs, figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from agora_protocol.manifest import LINK_CODEC, PRESETS, Manifest, link_subspace, preset
from benchmarks import wan
from benchmarks.children import Nursery
from benchmarks.report import Report, columns
from benchmarks.task import prepare_corpus
from benchmarks.wan_curves import Curve, Length, final, smooth, steps_to, until
from benchmarks.wan_loss import train
from benchmarks.wan_results import (
    Results,
    Speeds,
    notes,
    ratios,
    row,
)
from benchmarks.wan_settings import (
    CHOSEN,
    DENSE,
    DENSE_LEARNT,
    DENSE_SHARE,
    FULL,
    NEEDED,
    PUBLISHED,
    QUICK,
    Effort,
    Job,
    Setting,
)
from benchmarks.window import Window

from agora.net.link import LinkSpec

TINY = Effort((16,), NEEDED, (0, 1), 2, 4, (8,), 2, 1, 1.0, 1, context=16, sequences=2)


def falling(steps: int, slope: float, every: int = 10) -> Curve:
    return [(step, 3.0 - slope * step) for step in range(every, steps + 1, every)]


def results(**speeds: object) -> Results:
    """Losses fall in straight lines: 1e-3 a step for the published recipe, twice that for dense and the chosen."""
    effort = replace(TINY, widths=(64,), steps=200, most_steps=(200,))
    fast, slow = falling(200, 2e-3), falling(200, 1e-3)
    curves = {DENSE: [fast, fast], DENSE_LEARNT: [falling(200, 1.5e-3)] * 2, PUBLISHED: [slow, slow]}
    found = Speeds(1000.0, "1Mbit,50ms", {DENSE: 150.0, PUBLISHED: 800.0, CHOSEN: 960.0}, 1000.0, 0.0)
    return Results(effort, 64, {**curves, CHOSEN: [fast, fast]}, replace(found, **speeds))  # type: ignore[arg-type]


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


def test_settings_have_names_of_their_own_and_the_ratios_what_they_need() -> None:
    for effort in (QUICK, FULL):
        names = [setting.name for setting in effort.settings]
        assert len(set(names)) == len(names) and set(NEEDED) <= set(effort.settings)
    assert len(FULL.seeds) >= 3 and len(FULL.widths) >= 2
    assert PUBLISHED.name == "k = d/6.4, bf16" and DENSE_LEARNT.name == "k = d, bf16, learnt embedding"
    assert CHOSEN.name == "k = 7d/16, int6/int3"


@pytest.mark.parametrize("width", [64, 128, 512])
def test_the_chosen_boundary_is_that_of_every_preset(width: int) -> None:
    assert (CHOSEN.codec, CHOSEN.subspace(width)) == (LINK_CODEC, link_subspace(width))
    for made in map(preset, PRESETS):
        assert (made.boundary.codec, made.model.subspace) == (CHOSEN.codec, CHOSEN.subspace(made.model.width))


@pytest.mark.parametrize("setting", [*NEEDED, Setting(4, "int6/int8")])
@pytest.mark.parametrize("width", [64, 128])
def test_a_manifest_is_what_its_setting_says(setting: Setting, width: int) -> None:
    manifest = FULL.manifest(setting, width, seed=3)
    assert manifest.boundary.codec == setting.codec and manifest.seed == 3
    assert manifest.model.subspace == round(width / setting.parts)
    assert manifest.model.embedding_is_fixed == (setting.embedding == "fixed")
    assert manifest.stage_count == manifest.model.layers == 8
    assert manifest.optimizer.target_tokens == manifest.tokens_per_microbatch == FULL.tokens_per_step
    swarm = FULL.swarm_manifest(setting, width)
    assert swarm.model == manifest.model and swarm.boundary == manifest.boundary
    assert swarm.optimizer.target_tokens == 8 * swarm.tokens_per_microbatch == 16 * FULL.tokens_per_step


def test_bytes_are_those_of_the_published_table() -> None:
    assert DENSE.bytes_per_token(1024) == (2048, 2048)
    assert PUBLISHED.bytes_per_token(1024) == (320, 320)
    assert Setting(8 / 3, "int8/int2").bytes_per_token(128) == (50, 14)


def test_every_setting_is_trained_with_every_seed() -> None:
    deciding = [job for job in FULL.jobs if job.setting == CHOSEN and job.width == FULL.widths[0]]
    assert [job.seed for job in deciding] == list(FULL.seeds) and len(set(FULL.jobs)) == len(FULL.jobs)
    assert min(FULL.most_steps) >= FULL.steps and len(FULL.most_steps) == len(FULL.widths)


def test_all_but_the_published_recipe_may_end_at_what_it_has_reached(tmp_path: Path) -> None:
    known = {Job(PUBLISHED, 16, 1): falling(600, 1e-3)}
    lengths = [wan.order(Job(DENSE, 16, seed), TINY, known, tmp_path)["length"] for seed in (0, 1)]
    assert lengths[0] == {"most": 8, "every": 2, "least": 4, "enough": None}
    assert lengths[1] == {"most": 8, "every": 2, "least": 4, "enough": pytest.approx(2.42)}


def test_a_run_ends_at_the_target_but_not_before_the_steps_that_all_have() -> None:
    length = Length(most=1000, every=10, least=300, enough=2.825)
    ends = [step for step in range(10, 1000, 10) if length.ends(falling(step, 1e-3))]
    assert ends[0] == 300 and not length.ends(falling(190, 1e-3))
    assert Length(1000, 10, 0, 2.825).ends(falling(200, 1e-3))
    assert not Length(1000, 10, 0, 2.825).ends(falling(190, 1e-3)) and not Length(10, 1).ends(falling(900, 1e-3))


# --- results


def unreached(setting: Setting) -> Results:
    """The same, where this setting's loss never comes down to the target."""
    found = results()
    return replace(found, curves={**found.curves, setting: [falling(200, 1e-4)] * 2})


def test_steps_and_times_to_the_target() -> None:
    found = results()
    assert found.target(0) == pytest.approx(2.82)
    assert found.steps(PUBLISHED) == pytest.approx([180, 180]) and found.steps(CHOSEN) == pytest.approx([90, 90])
    assert unreached(CHOSEN).steps(CHOSEN) == [math.inf, math.inf]
    assert found.times(CHOSEN) == pytest.approx([90 * TINY.tokens_per_step / 960] * 2)
    assert found.step_s(DENSE_LEARNT) == found.step_s(DENSE) == TINY.tokens_per_step / 150


def test_a_ratio_is_of_times_and_dense_has_its_better_embedding() -> None:
    found = results()
    assert found.against_published() == pytest.approx(0.5 * 800 / 960)
    assert found.against_dense() == pytest.approx(150 / 960)
    assert math.isnan(unreached(CHOSEN).against_published())
    assert found.speeds.kept == pytest.approx(0.96)


def test_ratios_have_the_names_of_the_contract_and_are_of_the_worse_width() -> None:
    better, worse = results(), results(chosen_unshaped=2000.0)
    made = ratios([better, worse])
    assert list(made) == ["time_to_loss_vs_subspace_reference", "time_to_loss_vs_dense_bf16", "throughput_kept_50ms"]
    assert made["throughput_kept_50ms"].value == pytest.approx(0.48)
    assert made["time_to_loss_vs_dense_bf16"].value == pytest.approx(150 / 960)
    assert math.isnan(ratios([better, unreached(CHOSEN)])["time_to_loss_vs_dense_bf16"].value)


def test_a_row_shows_a_target_that_was_not_reached_as_nothing() -> None:
    found = unreached(CHOSEN)
    chosen, published = row(found, CHOSEN), row(found, PUBLISHED)
    assert (chosen["steps"], chosen["high"], chosen["T_s"]) == (None, None, None)
    assert (published["steps"], published["low"], published["high"]) == (180, 180, 180)
    assert columns([chosen]) == columns([published])
    assert chosen["equal_loss"] == pytest.approx(3.0 - 1e-4 * 180)


@pytest.mark.parametrize("setting", NEEDED)
def test_a_run_that_overflowed_before_its_first_loss_is_shown_as_nothing(setting: Setting) -> None:
    found = results()
    found = replace(found, curves={**found.curves, setting: [[], falling(200, 1e-3)]})
    report = Report("wan", "Wan", {}, [row(found, each) for each in found.curves], ratios([found]), notes([found]))
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    mine = told["rows"][list(found.curves).index(setting)]
    assert (mine["equal_loss"], mine["high"], mine["seeds"]) == (None, None, 2)
    assert math.isnan(found.against_published()) == (setting in (PUBLISHED, CHOSEN))
    assert (told["ratios"]["time_to_loss_vs_subspace_reference"] is None) == (setting in (PUBLISHED, CHOSEN))


def test_an_overflow_of_the_published_recipe_leaves_its_seed_without_a_target() -> None:
    found = results()
    found = replace(found, curves={**found.curves, PUBLISHED: [[], falling(200, 1e-3)]})
    assert found.steps(CHOSEN) == [math.inf, pytest.approx(90)]
    assert found.steps(PUBLISHED) == [math.inf, pytest.approx(180)]


def test_the_link_makes_dense_bf16_slower_by_the_share() -> None:
    link = LinkSpec.parse(wan.link_for(128, 5000.0))
    assert link.rate / DENSE.sent_per_token(128) == pytest.approx(5000 * DENSE_SHARE, rel=1e-3)
    assert link.rtt_s == 0.05


class Paced:
    """A swarm on a machine that becomes slower with every window; behind a link, nothing is faster than the link."""

    machine = 1000.0

    def __init__(self, name: str, share: float, link: str | None) -> None:
        self.name, self._share, self.link, self.stopped = name, share, link, False

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def groups(self) -> list[int]:
        return []

    def measure(self, seconds: float) -> Window:
        Paced.machine *= 0.99
        rate = self._share * Paced.machine
        if self.link is not None:
            rate = min(rate, LinkSpec.parse(self.link).rate / DENSE.sent_per_token(16))
        return Window(int(1000 * rate), 1000.0, 1)


class PacedSwarms(wan.Swarms):
    """Dense bf16 is as fast as its link; the chosen boundary does not feel one."""

    def new_swarm(self, setting: Setting, link: str | None) -> Paced:  # type: ignore[override]
        return Paced(f"{setting.name} {link}", 0.8 if setting == DENSE else 1.0, link if setting == DENSE else None)


@pytest.fixture
def swarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wan.Swarms:
    monkeypatch.setattr(Paced, "machine", 1000.0)
    return PacedSwarms(replace(TINY, turns=4), 16, tmp_path, cast("Nursery", None))


def test_speeds_are_shares_of_a_pace_that_drifts(swarms: wan.Swarms) -> None:
    speeds = swarms.speeds()
    assert speeds.kept == pytest.approx(1.0, rel=0.01)
    assert speeds.unshaped / speeds.chosen_unshaped == pytest.approx(0.8, rel=0.01)
    assert (speeds.of(DENSE) or 0) / speeds.unshaped == pytest.approx(DENSE_SHARE, rel=0.1)
    assert set(speeds.shaped) == {DENSE, PUBLISHED, CHOSEN}


def test_notes_name_every_width() -> None:
    told = " ".join(notes([results(), replace(results(), width=128)]))
    assert "Width 64" in told and "Width 128" in told and "nan" not in told


# --- loss runs


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, ...]:
    text = tmp_path / "corpus.txt"
    text.write_text("def square(number):\n    return number * number\n\n" * 200)
    return (str(text),)


def shrunk(manifest: Manifest, corpus: tuple[str, ...]) -> Manifest:
    return manifest.replaced(data={"corpus": corpus, "heldout": 0.1})


def test_a_loss_run_learns_and_repeats_exactly(corpus: tuple[str, ...], tmp_path: Path) -> None:
    manifest = shrunk(TINY.manifest(CHOSEN, 16), corpus)
    first = train(manifest, tmp_path, Length(60, 20), 2)
    assert [step for step, _ in first] == [20, 40, 60] and first[-1][1] < first[0][1]
    assert first == train(manifest, tmp_path, Length(60, 20), 2)
    assert first != train(shrunk(TINY.manifest(DENSE, 16), corpus), tmp_path, Length(60, 20), 2)


def test_a_run_whose_numbers_overflow_ends_early(corpus: tuple[str, ...], tmp_path: Path) -> None:
    manifest = shrunk(TINY.manifest(DENSE, 16), corpus).replaced(optimizer={"learning_rate": 100.0, "warmup_steps": 0})
    manifest = manifest.replaced(optimizer={"clip": 0.0, "weight_decay": 10.0})
    assert len(train(manifest, tmp_path, Length(40, 1), 1)) < 40


@pytest.mark.process
def test_children_share_the_loss_runs(corpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Effort.manifest
    monkeypatch.setattr(Effort, "manifest", lambda *given, **more: shrunk(original(*given, **more), corpus))
    prepare_corpus(tmp_path, TINY.manifest(DENSE, 16))
    found = wan.train_all(TINY, tmp_path)
    assert list(found) == [16] and list(found[16]) == list(NEEDED)
    ends = {setting: [curve[-1][0] for curve in curves] for setting, curves in found[16].items()}
    assert ends.pop(PUBLISHED) == [8, 8] and all(end in (4, 6, 8) for each in ends.values() for end in each)
    assert found[16][DENSE][0] != found[16][DENSE][1]
