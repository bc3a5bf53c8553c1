"""The averaging benchmark: fixed names, both sides average the same, a round that is not whole is not a figure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import averaging, averaging_slowdown
from benchmarks.averaging_groups import Group, HivemindGroup, Incomplete, OurGroup, Round
from benchmarks.averaging_values import SPREAD, Holding
from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.turns import Readings

SMALL = 300_000


def a_round(seconds: float, megabytes: float = 1.0) -> Round:
    return Round(seconds, megabytes, 0.1, 0.0, 0.01)


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
    with ChildProcesses(tmp_path) as nursery:
        names = [group.name for size in averaging.SIZES for group in averaging.groups_of(size, nursery)]
    assert len(names) == len(set(names))
    assert {name for ours, theirs, _, _ in averaging.TIMES.values() for name in (ours, theirs)} <= set(names)


def test_turns_alternate() -> None:
    log: list[str] = []

    class Fake(Group):
        role = "none"

        def __init__(self, side: str) -> None:
            super().__init__(2, None)
            self.side = side

        def start(self) -> None:
            log.append(f"start {self.side}")

        def round(self) -> Round:
            log.append(self.side)
            return a_round(1.0)

    found = averaging.rounds_of([Fake("a"), Fake("b")], 3)
    assert log == ["start a", "start b", "a", "b", "b", "a", "a", "b"]
    assert [len(rounds) for rounds in found.values()] == [3, 3]


def test_holding_knows_what_is_averaged() -> None:
    mine, common = Holding(10_000, 2.0, 1.0), Holding(10_000, 0.0, 1.0)
    values, zero = torch.empty(10_000), torch.empty(10_000)
    mine.put(values)
    common.put(zero)
    assert mine.found(values.clone()) == pytest.approx({"averaged": 0.0, "error": 1.0})
    values[: 10_000 // 4] = zero[: 10_000 // 4] + SPREAD
    assert mine.found(values) == pytest.approx({"averaged": 0.25, "error": 0.75**0.5})


class Swarm:
    processes, threads, note = 4, 4, ""

    def __init__(self, name: str, done: list[float]) -> None:
        self.name, self.done = name, done

    def account_cells(self) -> dict[str, float]:
        return {"counted_%": 100.0}


@pytest.mark.parametrize(("done", "lost"), [([1.0, 0.5], 0.1), ([], None)])
def test_training_that_never_averaged_has_no_slowdown_to_show(done: list[float], lost: float | None) -> None:
    rates = {averaging_slowdown.DEFAULT: 90.0, averaging_slowdown.LOCAL: 80.0, averaging_slowdown.OFF: 100.0}
    found = {name: Readings([rate] * 2, [1.0], [0.0]) for name, rate in rates.items()}
    swarms = [Swarm(averaging_slowdown.DEFAULT, done), Swarm(averaging_slowdown.OFF, [])]
    slowdown = averaging_slowdown.summary(swarms, found, averaging_slowdown.training_manifest())
    if lost is None:
        assert slowdown.ratio.value != slowdown.ratio.value
        assert slowdown.notes[0].startswith("NO ROUND TOOK PLACE")
    else:
        assert slowdown.ratio.value == pytest.approx(lost)
        assert slowdown.rows[0]["averaged"] == 0.75 and slowdown.rows[1]["averaged"] is None
        assert "costs 20.0%" in slowdown.notes[-1]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[ChildProcesses]:
    with ChildProcesses(tmp_path) as nursery:
        yield nursery


@pytest.mark.process
@pytest.mark.parametrize(("wire", "error"), [(None, 0.05), ("float32", 1e-5)])
def test_our_members_average(nursery: ChildProcesses, wire: str | None, error: float) -> None:
    group = OurGroup(2, nursery, wire, SMALL)
    group.start()
    done = group.round()
    assert done.error < error
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


def test_members_that_are_out_of_step_are_started_again_and_their_rounds_told(nursery: ChildProcesses) -> None:
    group = OutOfStep(2, nursery)
    done = averaging.whole_round(group)
    assert done.incomplete == 2 and group.starts == 2


@pytest.mark.process
def test_hivemind_averages(nursery: ChildProcesses) -> None:
    group = HivemindGroup(2, nursery, None, SMALL)
    group.start()
    done = round_of(group)
    assert done.error < 1e-5


class Answering:
    """A member that answers every round in the same way, and the nursery that starts it."""

    pid = -1
    folder = Path()

    def __init__(self, returned: bool, averaged: float) -> None:
        self.answer = {"begin": 0.0, "end": 1.0, "returned": returned, "averaged": averaged, "error": 0.0}

    def tell(self, order: object) -> None: ...

    def hear(self, timeout_s: float) -> dict[str, float]:
        return self.answer

    def start(self, *_: object) -> Answering:
        return self


class OneMember(Group):
    side, role = "one", "none"

    def start(self) -> None:
        self._start_member(0)


@pytest.mark.parametrize(
    ("returned", "averaged", "whole"), [(True, 1.0, True), (True, 0.5, False), (False, 1.0, False)]
)
def test_a_round_that_leaves_a_member_without_the_mean_is_no_figure(
    returned: bool, averaged: float, whole: bool
) -> None:
    group = OneMember(1, Answering(returned, averaged))
    group.start()
    with contextlib.nullcontext() if whole else pytest.raises(BenchFailed, match="does not hold the mean"):
        assert group.round().seconds == 1.0
