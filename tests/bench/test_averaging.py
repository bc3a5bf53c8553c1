"""The averaging benchmark: fixed names, both sides average the same, who is killed costs only what it must."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from benchmarks import averaging, averaging_slowdown
from benchmarks.averaging_groups import Group, Held, HivemindGroup, Incomplete, OurGroup, Round, offsets
from benchmarks.averaging_values import SPREAD, Holding
from benchmarks.children import BenchFailed, Nursery
from benchmarks.report import columns
from benchmarks.turns import Readings

SMALL = 300_000


def a_round(seconds: float, megabytes: float = 1.0) -> Round:
    return Round(seconds, megabytes, 0.1, 0.0, [Held(True, seconds, 1.0, 1.0, 0.01)])


def test_ratios_have_the_names_of_the_contract() -> None:
    seconds = {"agora 2": 1.0, "hivemind 2": 4.0, "agora 4": 1.0, "hivemind 4": 2.0, "agora 4 float32": 1.5}
    found = {
        name: [a_round(value, 10 * value)] * 3 for name, value in {**seconds, "agora 8": 3, "hivemind 8": 4}.items()
    }
    values = {name: ratio.value for name, ratio in averaging.round_ratios(found).items()}
    assert values == pytest.approx(
        {
            "time_vs_hivemind_2": 0.25,
            "time_vs_hivemind_4": 0.5,
            "time_vs_hivemind_8": 0.75,
            "time_vs_hivemind_4_same_precision": 0.75,
            "bytes_vs_hivemind_4": 0.5,
        }
    )


def test_every_group_that_a_ratio_needs_is_measured(tmp_path: Path) -> None:
    with Nursery(tmp_path) as nursery:
        names = [group.name for size in averaging.SIZES for group in averaging.groups_of(size, nursery)]
    assert len(names) == len(set(names))
    assert {name for ours, theirs, _, _ in averaging.TIMES.values() for name in (ours, theirs)} <= set(names)


def test_turns_alternate() -> None:
    log: list[str] = []

    class Fake(Group):
        role = "none"

        def __init__(self, side: str) -> None:
            super().__init__(2, None)  # type: ignore[arg-type]
            self.side = side  # type: ignore[misc]

        def start(self) -> None:
            log.append(f"start {self.side}")

        def round(self) -> Round:
            log.append(self.side)
            return a_round(1.0)

    found = averaging.rounds_of([Fake("a"), Fake("b")], 3)
    assert log == ["start a", "start b", "a", "b", "b", "a", "a", "b"]
    assert [len(rounds) for rounds in found.values()] == [3, 3]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_true_mean_is_the_same_without_the_one_that_is_killed(size: int) -> None:
    everyone = offsets(size)
    assert sum(everyone) / size == pytest.approx(sum(everyone[:-1]) / (size - 1))
    assert len(set(everyone[:-1])) == size - 1


def test_holding_knows_what_is_averaged() -> None:
    mine, common = Holding(10_000, 2.0, 1.0), Holding(10_000, 0.0, 1.0)
    values, zero = torch.empty(10_000), torch.empty(10_000)
    mine.put(values)
    common.put(zero)
    assert mine.found(values.clone()) == pytest.approx({"true": 1.0, "mean": 2.0, "averaged": 0.0, "error": 1.0})
    values[: 10_000 // 4] = zero[: 10_000 // 4] + SPREAD
    assert mine.found(values) == pytest.approx({"true": 1.0, "mean": 1.75, "averaged": 0.25, "error": 0.75**0.5})


def test_rows_of_survivors_say_what_each_holds() -> None:
    row = averaging.death_row("agora 4", [Held(True, 1.0, 0.9, 0.9, 0.1), Held(False, 30.0, 1.1, 0.8, 0.3)])
    assert row["name"] == "agora 4, one killed" and row["means"] == "0.90 1.10" and row["stuck"] == "1 of 2"
    assert columns([averaging.round_row("a", [a_round(1.0)]), row])[0] == "name"


class Swarm:
    processes, threads, note = 4, 4, ""

    def __init__(self, name: str, done: list[float]) -> None:
        self.name, self.done = name, done


@pytest.mark.parametrize(("done", "lost"), [([1.0, 0.5], 0.1), ([], None)])
def test_training_that_never_averaged_has_no_slowdown_to_show(done: list[float], lost: float | None) -> None:
    rates = {averaging_slowdown.ON: 90.0, averaging_slowdown.EXACT: 80.0, averaging_slowdown.OFF: 100.0}
    found = {name: Readings([rate] * 2, [1.0], [0.0]) for name, rate in rates.items()}
    swarms = [Swarm(averaging_slowdown.ON, done), Swarm(averaging_slowdown.OFF, [])]
    slowdown = averaging_slowdown.summary(swarms, found, averaging_slowdown.training_manifest())  # type: ignore[arg-type]
    if lost is None:
        assert slowdown.ratio.value != slowdown.ratio.value
        assert slowdown.notes[0].startswith("NO ROUND TOOK PLACE")
    else:
        assert slowdown.ratio.value == pytest.approx(lost)
        assert slowdown.rows[0]["averaged"] == 0.75 and slowdown.rows[1]["averaged"] is None
        assert "cost 20.0%" in slowdown.notes[-1]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with Nursery(tmp_path) as nursery:
        yield nursery


@pytest.mark.process
@pytest.mark.parametrize(("wire", "error"), [(None, 0.05), ("float32", 1e-5)])
def test_our_members_average(nursery: Nursery, wire: str | None, error: float) -> None:
    group = OurGroup(2, nursery, wire, SMALL)
    group.start()
    done = group.round()
    assert [held.averaged for held in done.held] == [1.0, 1.0] and done.error < error
    assert 0 < done.seconds < 20 and done.cpu_s > 0
    bytes_each = SMALL * (4 if wire else 65 / 64) / 1e6
    assert 0.99 * bytes_each < done.megabytes < 1.5 * bytes_each + 0.2


def round_of(group: HivemindGroup, tries: int = 3) -> Round:
    """A round that came to an end: hivemind's matchmaking now and then leaves a member without a group."""
    for _ in range(tries - 1):
        with contextlib.suppress(Incomplete):
            return group.round()
    return group.round()


class OutOfStep(HivemindGroup):
    """A group that does no whole round before it is started again."""

    starts = 0

    def start(self) -> None:
        self.starts += 1
        raise Incomplete("the round that nobody counts")

    def round(self) -> Round:
        if self.starts < 2:
            raise Incomplete("a member is out of step")
        return a_round(1.0)


def test_members_that_are_out_of_step_are_started_again_and_their_rounds_told(nursery: Nursery) -> None:
    group = OutOfStep(2, nursery)
    done = averaging.whole_round(group)
    assert done.incomplete == 2 and group.starts == 2


class NeverThere(OurGroup):
    """A group whose rounds do not come to their middle before it is the third."""

    tries: ClassVar[list[Path]] = []

    def start(self) -> None:
        self.tries.append(self._nursery.folder)
        if len(self.tries) == 1:
            raise Incomplete("the round that nobody counts")

    def round_with_a_death(self, megabytes: float) -> list[Held]:
        if len(self.tries) < 3:
            raise Incomplete("the round never came to its middle")
        return [Held(True, megabytes, 1.0, 1.0, 0.0)]


def test_a_group_that_never_comes_to_the_middle_of_its_round_makes_way_for_another(tmp_path: Path) -> None:
    group, survivors = averaging.survivors_of(NeverThere, tmp_path, {"agora 4": [a_round(1.0)]})
    assert group.name == "agora 4" and survivors[0].seconds == a_round(1.0).megabytes
    assert len(set(NeverThere.tries)) == 3


@pytest.mark.process
def test_hivemind_averages(nursery: Nursery) -> None:
    group = HivemindGroup(2, nursery, None, SMALL)
    group.start()
    done = round_of(group)
    assert [held.averaged for held in done.held] == [1.0, 1.0] and done.error < 1e-5


@pytest.mark.process
def test_survivors_of_a_death_are_heard(nursery: Nursery) -> None:
    group = OurGroup(3, nursery, None, SMALL)
    group.start()
    survivors = group.round_with_a_death(group.round().megabytes)
    assert len(survivors) == 2 and all(held.returned and held.seconds < 25 for held in survivors)


@pytest.mark.parametrize(("returned", "averaged"), [(True, 0.5), (False, 1.0)])
def test_a_round_that_leaves_a_member_without_the_mean_is_no_figure(
    nursery: Nursery, returned: bool, averaged: float
) -> None:
    class Said:
        pid = -1

        def __init__(self, returned: bool, averaged: float) -> None:
            self.answer = {
                "begin": 0.0,
                "end": 1.0,
                "returned": returned,
                "mean": 1.0,
                "averaged": averaged,
                "error": 0.0,
            }

        def tell(self, order: object) -> None: ...

        def hear(self, timeout_s: float) -> dict[str, float]:
            return self.answer

    group = OurGroup(2, nursery)
    group._members = [Said(True, 1.0), Said(True, 1.0)]  # type: ignore[list-item]
    assert group.round().seconds == 1.0
    group._members = [Said(True, 1.0), Said(returned, averaged)]  # type: ignore[list-item]
    with pytest.raises(BenchFailed, match="does not hold the mean"):
        group.round()
