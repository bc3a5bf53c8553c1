"""Claims about what becomes of a stage's tokens at one peer."""

from __future__ import annotations

import pytest
from agora_protocol.limits import RECENT_STEPS
from agora_protocol.records import StageAccount

from agora.train.token_accounts import TokenAccounts


def test_tokens_are_computed_then_wait_then_are_counted_and_what_is_neither_is_lost() -> None:
    accounts = TokenAccounts()
    accounts.computed += 100
    assert accounts.account(waiting=100) == StageAccount(computed=100, waiting=100)
    accounts.record_step(60, None, 0.5)
    found = accounts.account(waiting=30)
    assert (found.computed, found.waiting, found.counted) == (100, 30, 60)
    assert (found.own_steps, found.along_own, found.mean_steps, found.staleness) == (1, 60, 0, 0.5)


def test_a_step_along_the_mean_of_all_holds_the_tokens_of_all_and_counts_the_own_ones() -> None:
    accounts = TokenAccounts()
    accounts.record_step(60, 100, 0.5)
    accounts.record_step(0, 100, 0.0)  # replayed
    found = accounts.account(0)
    assert (found.counted, found.own_steps, found.mean_steps, found.in_mean) == (60, 0, 2, 200)
    assert found.staleness == pytest.approx(0.5), "a step without own gradients has none that could be old"


def test_only_recent_steps_are_told_of_one_by_one() -> None:
    accounts = TokenAccounts()
    for number in range(RECENT_STEPS + 4):
        accounts.record_step(10, None, 0.0 if number < 4 else 1.0)
    found = accounts.account(0)
    assert (found.counted, found.own_steps, found.along_own, found.staleness) == (200, RECENT_STEPS, 160, 1.0)
    accounts.forget_recent()
    assert accounts.account(0)[2:] == (200, 0, 0, 0, 0, 0.0)
