"""The benchmark of slow links: rates that follow the pace, shares of wire and processors, choices."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.wan_rates import (
    FREE_SHARE,
    RATES,
    RTT_MS,
    PacedLink,
    Speed,
    Turn,
    choose,
    expected_step,
    link_text,
    speed_of,
)
from benchmarks.wan_settings import DENSE, DENSE_LEARNT, NARROW, PRESET, PUBLISHED, QUICK, Setting
from benchmarks.wan_speeds import Speeds, Swarms
from benchmarks.window import Window

from agora.net.shaping.link import LinkSpec

# --- rates


@pytest.mark.parametrize(("name", "reference"), [("today", DENSE), ("bound", PUBLISHED)])
def test_a_link_makes_its_reference_slower_by_the_share(name: str, reference: Setting) -> None:
    link = LinkSpec.parse(f"{link_text(RATES[name].bits_per_s(128, 5000.0))},{RTT_MS}ms")
    assert link.rate / reference.sent_per_token(128) == pytest.approx(5000 * FREE_SHARE, rel=1e-3)
    assert link.rtt_s == 0.05
    assert RATES[name].wire_time(reference, 128) == pytest.approx(1 / FREE_SHARE)


def test_the_fast_link_is_five_times_todays_and_the_bound_one_slower_by_the_published_bytes() -> None:
    today, bound, fast = (RATES[name].bits_per_s(64, 1000.0) for name in ("today", "bound", "fast"))
    assert fast == pytest.approx(5 * today)
    assert bound / today == pytest.approx(PUBLISHED.sent_per_token(64) / DENSE.sent_per_token(64)) == 41 / 257


def test_a_link_follows_the_pace() -> None:
    link = PacedLink(RATES["bound"], free_share=1.25)
    assert link.bits_per_s(64, pace=800.0) == pytest.approx(RATES["bound"].bits_per_s(64, 1000.0))
    assert link.bits_per_s(64, pace=400.0) == pytest.approx(link.bits_per_s(64, pace=800.0) / 2)


def test_the_rate_and_the_speed_of_a_wire_bound_swarm_drift_with_the_machine_and_its_share_does_not() -> None:
    link = PacedLink(RATES["bound"], 1.0)
    turns = []
    for pace in (1000.0, 700.0, 1300.0):
        bits = link.bits_per_s(64, pace)
        turns.append(Turn(pace, bits / 8 / PUBLISHED.sent_per_token(64), bits, 0.5, 0.0))
    speed = speed_of(turns, PUBLISHED.sent_per_token(64), cores=2)
    assert speed.pace_share == pytest.approx(FREE_SHARE) and speed.wire == pytest.approx(1.0)
    assert speed.bits_per_s == pytest.approx(turns[0].bits_per_s)


# --- shares


def test_shares_are_of_the_uplinks_time_and_of_all_cores() -> None:
    turns = [Turn(4000.0, 2000.0, 1e6, cpu_s, 0.2) for cpu_s in (0.7, 0.8, 0.9)]
    speed = speed_of(turns, sent_per_token=25.0, cores=2)
    assert speed.wire == pytest.approx(25 * 8 * 2000 / 1e6) and (speed.processor, speed.others) == pytest.approx(
        (0.8, 0.1)
    )
    assert speed.pace_share == 0.5
    unlinked = speed_of([Turn(4000.0, 2000.0, None, 0.8, 0.0)], 25.0, 2)
    assert unlinked.wire == 0.0 and unlinked.bits_per_s == math.inf


@pytest.mark.parametrize(
    ("wire", "processor", "others", "limit"),
    [
        (0.95, 0.4, 0.0, "wire"),
        (0.78, 0.97, 0.0, "processor"),
        (0.9, 0.97, 0.0, "processor"),
        (0.5, 0.6, 0.0, "neither"),
        (0.5, 0.6, 0.35, "processor"),
    ],
)
def test_what_is_busier_limits_unless_both_are_idle_for_long(
    wire: float, processor: float, others: float, limit: str
) -> None:
    assert Speed(1.0, wire, processor, others, 1e6).limit == limit


# --- choices


def test_a_step_takes_what_the_slower_of_wire_and_processors_needs_and_more_where_both_need_as_much() -> None:
    assert expected_step(0.1) == pytest.approx(1.0, abs=0.01)
    assert expected_step(6.67) == pytest.approx(6.67, abs=0.15)
    assert expected_step(0.88) == pytest.approx(1.50, rel=0.1)


def test_bytes_count_where_the_wire_is_about_as_slow_as_the_processors_or_slower() -> None:
    steps = {PRESET: 1000.0, NARROW[0]: 1150.0, NARROW[2]: 1300.0}
    chosen = {name: choose(rate, 64, steps) for name, rate in RATES.items()}
    assert chosen == {"today": NARROW[0], "bound": NARROW[2], "fast": PRESET}
    assert choose(RATES["today"], 64, {**steps, PRESET: 800.0}) == PRESET
    assert choose(RATES["bound"], 64, {**steps, NARROW[2]: 1400.0}) == NARROW[0]


def test_a_boundary_that_missed_the_target_is_chosen_only_where_all_did_and_then_the_first() -> None:
    missed = dict.fromkeys((PRESET, *NARROW), math.inf)
    assert choose(RATES["bound"], 64, missed) == PRESET
    assert choose(RATES["fast"], 64, {**missed, NARROW[1]: 5000.0}) == NARROW[1]


# --- speeds


class Paced:
    """A swarm on a machine that becomes slower with every window; behind a link, nothing is faster than the link."""

    machine = 1000.0
    rates: list[tuple[str, str]] = []

    def __init__(self, name: str, share: float, setting: Setting) -> None:
        self.name, self._share, self._setting, self._link = name, share, setting, math.inf

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def groups(self) -> list[int]:
        return []

    def change_rate(self, rate: str) -> None:
        Paced.rates.append((self.name, rate))
        self._link = LinkSpec.parse(f"{rate},50ms").rate / self._setting.sent_per_token(64)

    def measure(self, seconds: float) -> Window:
        Paced.machine *= 0.97
        rate = min(self._share * Paced.machine, self._link)
        return Window(int(1000 * rate), 1000.0, int(1000 * rate))


class PacedSwarms(Swarms):
    """Dense bf16 has four fifths of the pace's speed without a link, all others as much as the pace."""

    def new_swarm(self, setting: Setting, link: str | None) -> Paced:  # type: ignore[override]
        return Paced(f"{setting.name} {link}", 0.8 if setting == DENSE else 1.0, setting)


@pytest.fixture
def speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Speeds:
    monkeypatch.setattr(Paced, "machine", 10_000.0)
    monkeypatch.setattr(Paced, "rates", [])
    swarms = PacedSwarms(replace(QUICK, turns=2), 64, tmp_path, cast("ChildProcesses", None))
    return swarms.speeds({DENSE: ("today",), PUBLISHED: ("today", "bound"), PRESET: ("bound", "fast")})


def test_speeds_are_shares_of_a_pace_that_drifts(speeds: Speeds) -> None:
    dense, published = speeds.of(DENSE, "today"), speeds.of(PUBLISHED, "bound")
    assert dense is not None and published is not None
    assert speeds.free[DENSE].pace_share == pytest.approx(0.8 * 0.97, rel=1e-3), "it comes one window later"
    assert dense.pace_share == pytest.approx(FREE_SHARE * speeds.free[DENSE].pace_share, rel=1e-3)
    assert published.pace_share == pytest.approx(FREE_SHARE * speeds.free[PUBLISHED].pace_share, rel=1e-3)
    assert dense.wire == pytest.approx(1.0, rel=1e-3) == published.wire
    assert max(speeds.paces) > 1.5 * min(speeds.paces)


def test_the_link_has_another_rate_in_every_turn_and_the_order_of_links_is_reversed_in_every_other(
    speeds: Speeds,
) -> None:
    rates = [float(rate.removesuffix("Mbit")) for name, rate in Paced.rates if name.startswith(PUBLISHED.name)]
    assert len(rates) == 4 and rates[0] > rates[3] > rates[1] > rates[2], "today, bound, bound, today"


def test_a_swarm_that_fails_over_a_link_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_rate(swarm: Paced, rate: str) -> None:
        if swarm.name.startswith(PUBLISHED.name):
            raise BenchFailed("an origin did not drain")

    monkeypatch.setattr(Paced, "change_rate", change_rate)
    swarms = PacedSwarms(QUICK, 64, tmp_path, cast("ChildProcesses", None))
    speeds = swarms.speeds({PUBLISHED: ("bound",), PRESET: ("today",)})
    assert speeds.failures == [f"{PUBLISHED.name}: an origin did not drain"]
    assert speeds.of(PUBLISHED, "bound") is None and speeds.of(PRESET, "today") is not None


def test_a_speed_that_was_not_measured_is_none_and_both_forms_of_dense_share_one(speeds: Speeds) -> None:
    assert speeds.of(DENSE, "bound") is None and speeds.tokens_per_s(NARROW[0], "today") is None
    assert speeds.of(DENSE_LEARNT, "today") == speeds.of(DENSE, "today")
    share = speeds.of(PRESET, "fast")
    assert share is not None and speeds.tokens_per_s(PRESET, "fast") == share.pace_share * speeds.pace
