"""The account of what a device waits for: its causes, what it adds up to, and what of it goes to the wire."""

from __future__ import annotations

import random

import pytest

from agora.pipeline.device_time import RECENT_WINDOW_S, DeviceTime, DeviceTimeAccount


def test_an_idle_machine_without_microbatches_waits_for_microbatches() -> None:
    account = DeviceTimeAccount(10.0)
    assert account.total(14.0, 0.0, 0.0) == DeviceTime(4.0, microbatches=4.0)


def test_each_cause_gets_the_time_in_which_nothing_is_at_the_device() -> None:
    account = DeviceTimeAccount(0.0)
    account.change(1.0, jobs=1)  # 1 s without anything
    account.change(3.0, jobs=-1, away=1)
    account.change(6.0, away=-1, held=1)  # 3 s away
    account.record_return(3.0, 1.0)
    account.change(7.0, held=-1)  # 1 s held
    account.set_awaits_mean(7.0, True)
    account.set_awaits_mean(8.0, False)  # 1 s in which the origin opened nothing
    assert account.total(8.0, 2.0, 0.5) == DeviceTime(8.0, 2.0, 1.0, 2.0, 2.0, 1.0, 0.5)


def test_held_microbatches_are_the_cause_whatever_is_away() -> None:
    account = DeviceTimeAccount(0.0)
    account.change(0.0, away=3, held=1)
    assert account.total(2.0, 0.0, 0.0).mean == 2.0


def test_jobs_at_the_device_hide_every_other_cause() -> None:
    account = DeviceTimeAccount(0.0)
    account.change(0.0, away=2, held=1, jobs=1)
    assert account.total(5.0, 5.0, 0.0) == DeviceTime(5.0, 5.0)


def test_steps_that_nobody_waits_for_are_work_and_no_wait() -> None:
    account = DeviceTimeAccount(0.0)
    account.change(0.0, away=1)
    waits = account.total(10.0, 4.0, 0.0)  # the device was busy for 4 s of the 10 that it seemed to be idle
    assert (waits.busy, waits.peer) == (4.0, 6.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_causes_always_add_up_to_the_time(seed: int) -> None:
    draw = random.Random(seed)
    account, now, counts = DeviceTimeAccount(0.0), 0.0, {"jobs": 0, "held": 0, "away": 0}
    for _ in range(200):
        now += draw.expovariate(10.0)
        kind = draw.choice(list(counts))
        change = draw.choice((1, -1)) if counts[kind] else 1
        counts[kind] += change
        account.change(now, **{kind: change})
        account.set_awaits_mean(now, draw.random() < 0.3)
        away_s = draw.random()
        account.record_return(away_s, draw.uniform(0.0, 2.0))  # a link is never longer than the whole way
        waits = account.total(now, draw.uniform(0.0, now), 0.0)
        assert sum(waits[1:-1]) == pytest.approx(waits.seconds) and min(waits) >= 0.0


def test_the_recent_account_forgets_what_is_long_past() -> None:
    account = DeviceTimeAccount(0.0)
    account.change(0.0, away=1)
    for second in range(100):
        account.recent(float(second), account.total(float(second), 0.0, 0.0))
    account.change(100.0, away=-1)
    for second in range(100, 200):
        recent = account.recent(float(second), account.total(float(second), 0.0, 0.0))
    assert recent.peer == 0.0 and RECENT_WINDOW_S - 1.0 <= recent.microbatches <= RECENT_WINDOW_S + 1.0


def test_a_wait_is_told_as_shares_of_the_time_and_small_ones_are_left_out() -> None:
    assert DeviceTime(10.0, 6.0, 2.0, 1.5, 0.1, 0.4).describe() == "20% for microbatches, 15% for a mean gradient"
    assert DeviceTime().describe() == ""
