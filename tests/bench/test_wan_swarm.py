"""What is made of a swarm's completions and reports: windows, their parts, settled credit, what a reference is for."""

from __future__ import annotations

import pytest

from agora.bench.freezer import Freezer
from agora.bench.wan_swarm import Reference, credit_of, is_settled, parts_of
from agora.bench.window import Window


def test_a_window_is_cut_into_equal_parts_and_begins_at_its_first_completion() -> None:
    done = [(10.0, 99), (10.5, 100), (11.0, 100), (13.0, 100), (14.0, 200)]
    assert parts_of(done, 2) == pytest.approx([100.0, 150.0])
    assert sum(parts_of(done, 5)) * 4.0 / 5 == pytest.approx(500.0), "every token after the first completion"


def test_the_credit_has_settled_when_six_looks_say_the_same() -> None:
    assert is_settled([20, 20, 21, 21, 20, 21]) and is_settled([2, 3, 3, 2, 3, 3])
    assert not is_settled([20, 20, 21, 21, 20]), "too few looks"
    assert not is_settled([10, 12, 14, 17, 20, 24]), "it still grows"


def test_the_credit_is_read_from_what_a_daemon_says_of_it() -> None:
    assert credit_of({"credit": "21: round trip 0.500 s / period 0.050 s = 10.0"}) == 21
    assert credit_of({"credit": "not measured yet"}) == credit_of({}) == 0


class Drifting:
    """A contender whose speed halves from one window to the next."""

    name, note, processes, threads = "drifting", "", 1, 1

    def __init__(self) -> None:
        self.rate, self.started = 3200.0, False

    def groups(self) -> list[int]:
        return []

    def start(self) -> None:
        self.started = True

    def measure(self, seconds: float) -> Window:
        self.rate /= 2
        return Window(round(self.rate * seconds), seconds, round(self.rate * seconds))


def test_a_speed_is_taken_against_the_reference_just_before_and_just_after() -> None:
    with Freezer() as freezer:
        reference = Reference(Drifting(), freezer, 2.0)
        assert reference.against(lambda: 600.0) == pytest.approx(600 / 1200)
        assert reference.against(lambda: 600.0) == pytest.approx(600 / 600)
        assert reference.rates == [1600, 800, 400]
