"""Turns: who is started, frozen and measured when."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from benchmarks.children import BenchFailed
from benchmarks.freezer import Freezer
from benchmarks.turns import Readings, alternating, calmness, start, take_turns
from benchmarks.window import Window


class Fake:
    processes, threads, note = 1, 1, "fake"

    def __init__(self, name: str, log: list[str], tokens: int = 1000) -> None:
        self.name, self.log, self.tokens = name, log, tokens

    def groups(self) -> list[int]:
        return [ord(self.name[0])]

    def start(self) -> None:
        self.log.append(f"start {self.name}")

    def measure(self, seconds: float) -> Window:
        self.log.append(self.name)
        return Window(self.tokens, 2.0, self.tokens)


class NoFreezer(Freezer):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def freeze(self, groups: Iterable[int]) -> None:
        self.log += [f"freeze {chr(group)}" for group in groups]

    def thaw(self, groups: Iterable[int]) -> None:
        self.log += [f"thaw {chr(group)}" for group in groups]


def alternate(contenders: list[Fake], rounds: int, log: list[str]) -> dict[str, Readings]:
    freezer = NoFreezer(log)
    start(contenders, freezer)
    return take_turns(contenders, rounds, 1.0, freezer)


def test_turns_alternate_and_all_are_started_before_any_is_measured() -> None:
    log: list[str] = []
    found = alternate([Fake("a", log), Fake("b", log)], 3, log)
    turns = [entry for entry in log if not entry.startswith(("freeze", "thaw"))]
    assert turns == ["start a", "start b", "a", "b", "b", "a", "a", "b"]
    assert {name: readings.rates for name, readings in found.items()} == {"a": [500.0] * 3, "b": [500.0] * 3}
    assert all(len(readings.elsewhere) == 3 for readings in found.values())


def test_everybody_but_the_one_measured_is_frozen() -> None:
    log: list[str] = []
    alternate([Fake("a", log), Fake("b", log)], 1, log)
    assert log == "start a,freeze a,start b,freeze b,thaw a,a,freeze a,thaw b,b,freeze b".split(",")


def test_without_a_freezer_they_rest() -> None:
    log: list[str] = []
    contenders = [Fake("a", log), Fake("b", log)]
    start(contenders)
    found = take_turns(contenders, 2, 1.0)
    assert log == ["start a", "start b", "a", "b", "b", "a"] and found["b"].rates == [500.0] * 2


def test_a_contender_that_trains_nothing_fails_the_bench() -> None:
    with pytest.raises(BenchFailed, match="idle trained nothing"):
        alternate([Fake("idle", [], tokens=0)], 1, [])


def test_the_order_of_turns_is_reversed_in_every_other_round() -> None:
    assert list(alternating("ab", 3)) == [(1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]


def test_a_busy_machine_is_said() -> None:
    assert calmness([[0.01], [0.02]]) == [] and calmness([]) == []
    (note,) = calmness([[0.0], [1.0]])
    assert note.startswith("THE MACHINE WAS NOT CALM")
