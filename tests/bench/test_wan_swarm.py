"""What is made of a swarm's completions and reports: windows, their parts, and when the credit counts as settled."""

from __future__ import annotations

import pytest

from agora.bench.wan_swarm import credit_of, is_settled, parts_of


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
