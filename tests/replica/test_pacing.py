"""Quotas: a step's microbatches are divided among the replicas in proportion to what they compute, and none is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from agora_protocol.ids import PeerId

from agora.replica.pacing import (
    ASSUMED_STEP_S,
    MAX_CORRECTION,
    MAX_SKIPPED_WAITS,
    RATE_DECAY_S,
    BatchSizeCorrection,
    RateMeter,
    StepPacing,
    TokenRate,
    own_quota,
)
from agora.replica.stage_view import DirectReport, ReplicaCounts
from tests.replica.world import identities

ME, OTHER = identities(2)


@pytest.mark.parametrize("seed", range(20))
def test_quotas_add_up_to_the_target_and_lie_within_one_microbatch_of_each_share(seed: int) -> None:
    rng = random.Random(seed)
    peers = identities(rng.randint(1, 40))
    rates = {peer: rng.choice([0.0, rng.expovariate(0.01)]) for peer in peers} | {peers[0]: 10.0}
    unit, microbatches = rng.randint(1, 4096), rng.randint(1, 200)
    quotas = {peer: own_quota(rates, peer, microbatches * unit, unit) for peer in peers}
    assert sum(quotas.values()) == microbatches * unit
    for peer, quota in quotas.items():
        assert quota % unit == 0 and abs(quota - microbatches * unit * rates[peer] / sum(rates.values())) <= unit


def test_equal_replicas_get_equal_quotas_and_small_differences_of_measured_rates_change_nothing() -> None:
    peers = identities(4)
    for rates in ([100.0] * 4, [97.0, 102.0, 99.0, 103.0]):
        known = dict(zip(peers, rates, strict=True))
        assert [own_quota(known, peer, 16_384, 1024) for peer in peers] == [4096] * 4


def test_a_replica_whose_rate_is_not_known_yet_counts_as_the_median_of_the_others() -> None:
    peers = identities(3)
    rates = dict(zip(peers, [100.0, None, 300.0], strict=True))
    assert [own_quota(rates, peer, 600, 1) for peer in peers] == [100, 200, 300]
    assert [own_quota(dict.fromkeys(peers), peer, 600, 1) for peer in peers] == [200, 200, 200], "nobody is known yet"
    assert [own_quota(dict.fromkeys(peers, 0.0), peer, 600, 1) for peer in peers] == [200, 200, 200]


def test_only_a_slow_replica_is_left_out_of_the_division_and_quotas_of_many_equal_ones_add_up() -> None:
    """Else it would have a microbatch or none by chance, and the others would wait for it."""
    peers = [PeerId(name) for name in "abcde"]
    for slow in peers:
        rates = {peer: 100.0 if peer != slow else 10.0 for peer in peers}
        quotas = {peer: own_quota(rates, peer, 1600, 100) for peer in peers}
        assert quotas.pop(slow) == 0 and set(quotas.values()) == {400}
        assert own_quota({**rates, slow: 14.0}, slow, 1600, 100) <= 100
    many = {PeerId(f"{number:02}"): 100.0 for number in range(64)}
    assert sum(own_quota(many, peer, 1600, 100) for peer in many) == 1600, "none of them is slower than the others"


def test_a_replica_that_counts_nothing_has_no_quota() -> None:
    peers = identities(2)
    assert own_quota({peers[0]: 50.0, peers[1]: 0.0}, peers[1], 1000, 100) == 0
    assert own_quota({peers[0]: 50.0, peers[1]: 0.0}, peers[0], 1000, 100) == 1000


def test_a_rate_follows_what_is_counted_and_is_unknown_at_first() -> None:
    rate = TokenRate()
    assert rate.after(100, 0.5).per_second is None
    for _ in range(100):
        rate = rate.after(25, 0.25)
    assert rate.per_second == pytest.approx(100.0)
    for _ in range(int(RATE_DECAY_S / 0.25)):
        rate = rate.after(50, 0.25)
    assert rate.per_second == pytest.approx(200.0 - 100.0 / 2.718, rel=0.03), "1/e of what was is left after the memory"


def test_what_a_step_held_too_much_the_next_one_holds_less() -> None:
    sync_schedule = BatchSizeCorrection(1000)
    held = [1100, 950, 1000, 1300]
    for tokens in held:
        sync_schedule = sync_schedule.after_step(tokens)
    assert sync_schedule.next_target == 1000 - (sum(held) - 4000)
    assert BatchSizeCorrection(1000).after_step(9000).next_target == 1000 * (1 - MAX_CORRECTION), (
        "never a step of nothing"
    )
    assert BatchSizeCorrection(1000).after_step(0).next_target == 1000 * (1 + MAX_CORRECTION)


@pytest.mark.parametrize(
    ("quota", "mean_s", "ahead"),
    [(32, 0.0, 2), (32, 1.0, 6), (32, 60.0, 8), (4, 1.0, 2), (1, 1.0, 1)],
    ids=["at once", "later", "far too late", "a small quota", "one microbatch"],
)
def test_as_much_of_the_next_share_begins_as_is_counted_until_the_mean_comes(
    quota: int, mean_s: float, ahead: int
) -> None:
    """And two microbatches more, which are on their way then; at most a quarter of a share, or two microbatches."""
    meter = StepPacing(64, BatchSizeCorrection(64 * 16))
    meter.quota_now = 64 * quota
    assert meter.tokens_ahead(0.25) == 64 * {32: 8, 4: 2, 1: 1}[quota], "nothing is known yet"
    meter.meter = RateMeter(TokenRate(256.0, 1.0))
    for number in range(20):
        meter.on_share_closed(100.0 * number)
        meter.on_stepped(100.0 * number + mean_s)
    assert meter.tokens_ahead(0.25) == 64 * ahead


def paced(mean_s: float) -> StepPacing:
    """Of a stage whose steps last 4 s, and whose means so far came after `mean_s`."""
    meter = StepPacing(64, BatchSizeCorrection(4000))
    meter.meter = RateMeter(TokenRate(1000.0, 1.0))
    meter.update_quota(ME, {})
    for number in range(5):
        meter.on_share_closed(10.0 * number)
        meter.on_stepped(10.0 * number + mean_s)
    return meter


def waits(meter: StepPacing, mean_s: float, steps: int) -> list[bool]:
    """Whether origins waited for the mean of each of so many further steps, which came after `mean_s`."""
    waited = []
    for number in range(10, 10 + steps):
        meter.on_share_closed(10.0 * number)
        waited.append(meter.should_origins_wait(10.0 * number + 0.1))
        meter.on_stepped(10.0 * number + mean_s)
    return waited


def test_origins_wait_for_a_mean_that_comes_within_half_a_step_and_for_half_a_step_at_most() -> None:
    meter = paced(mean_s=1.9)
    assert meter.should_origins_wait(100.0)
    meter.on_share_closed(100.0)
    meter.on_share_closed(101.0)
    assert meter.should_origins_wait(101.9) and not meter.should_origins_wait(102.0)
    meter.on_stepped(101.9)
    assert meter.should_origins_wait(102.6), "the next one"


def test_a_share_is_on_its_way_since_it_was_opened_and_a_larger_step_takes_longer() -> None:
    meter = StepPacing(100, BatchSizeCorrection(1000))
    meter.measure(10.0, 0, step=3, open_step=3)
    assert meter.open_fraction(10.0 + ASSUMED_STEP_S) == 1.0, "no rate is known yet"
    for tick in range(1, 21):
        meter.measure(10.0 + 0.1 * tick, 10 * tick, step=3, open_step=3)
    meter.update_quota(ME, {OTHER: None})
    assert meter.open_fraction(12.0) == pytest.approx(2.0 / (1000 / 200)), "an unknown rate counts as the median"
    meter.record_step(500)
    assert meter.open_fraction(12.0) == pytest.approx(2.0 / (1500 / 200))
    meter.measure(12.0, 200, step=3, open_step=4)
    assert meter.open_fraction(12.0) == 0.0


@pytest.mark.parametrize("ahead", [0, 10], ids=["nothing ahead", "a microbatch ahead"])
def test_replicas_that_wait_for_means_are_measured_by_what_they_count_and_not_by_how_long_they_wait(ahead: int) -> None:
    """Else whoever once had a small quota, as after a slow start, would wait for the rest of each step and keep it."""
    target, unit, device_rate, tick_s = 1600, 10, 100.0, 0.05
    meters = {peer: StepPacing(unit, BatchSizeCorrection(target)) for peer in (ME, OTHER)}
    reports = {peer: DirectReport() for peer in meters}
    step, now, tokens, counted = 0, 0.0, dict.fromkeys(meters, 0.0), dict.fromkeys(meters, 0.0)
    first_rates = {ME: 10.0, OTHER: 110.0}
    quotas = {peer: own_quota(first_rates, peer, target, unit) for peer in meters}
    for peer, rate in first_rates.items():
        meters[peer].meter = RateMeter(TokenRate().after(int(10 * rate), 10.0), counted_at=0.0)
        reports[peer] = replace(reports[peer], meter=meters[peer].meter)
    assert quotas[ME] < 0.1 * quotas[OTHER]

    def count(peer: PeerId, step: int, open_step: int) -> None:
        meters[peer].measure(now, int(counted[peer]), step=step, open_step=open_step)
        counts = ReplicaCounts(step, open_step, int(tokens[peer]), int(counted[peer]))
        reports[peer] = reports[peer].after_report(counts, now)

    while step < 10:
        now += tick_s
        closed = {peer: tokens[peer] >= quotas[peer] for peer in meters}
        if all(closed.values()):
            step, tokens, closed = step + 1, dict.fromkeys(meters, float(ahead)), dict.fromkeys(meters, False)
            counted = {peer: tokens + ahead for peer, tokens in counted.items()}  # at the end of the wait
            for peer in meters:  # which the replica tells before it tells of the mean
                count(peer, step - 1, step)
        for peer in meters:
            if not closed[peer]:  # the devices are equal; who has closed its share is held until the mean is there
                tokens[peer] += device_rate * tick_s
                counted[peer] += device_rate * tick_s
            count(peer, step, step + closed[peer])
        for peer, other in ((ME, OTHER), (OTHER, ME)):
            quotas[peer] = meters[peer].update_quota(peer, {other: reports[other].meter.per_second})
    assert min(quotas.values()) > 0.45 * target


def test_a_replica_that_closes_share_after_share_before_a_mean_comes_is_measured_all_the_same() -> None:
    meter = RateMeter()
    for tick in range(200):
        meter = meter.after(0.1 * tick, 10 * tick, step=tick // 10, open_step=tick // 10 + 1)
    assert meter.per_second == pytest.approx(100.0)
    for tick in range(200, 600):  # its device has become half as fast
        meter = meter.after(0.1 * tick, 1000 + 5 * tick, step=tick // 10, open_step=tick // 10 + 1)
    assert meter.per_second == pytest.approx(50.0, rel=0.05)


def test_a_fast_replica_with_a_small_quota_that_nothing_holds_is_measured_by_what_it_counts_meanwhile() -> None:
    """Its next share is complete soon after each mean, so that it hardly ever counts with an open one."""
    meter = RateMeter()
    for tick in range(200):
        step = tick // 10
        meter = meter.after(0.1 * tick, 100 * tick, step=step, open_step=step + (tick % 10 > 0))
    assert meter.per_second == pytest.approx(1000.0, rel=0.02)


def test_with_two_closed_shares_nothing_is_measured() -> None:
    """Else a replica with a quota of one microbatch, and one ahead, would keep it."""
    meter = RateMeter()
    for step in range(30):
        for after_s, tokens, closed in ((0.0, 0, 1), (0.5, 50, 2), (4.0, 50, 2)):
            meter = meter.after(4.1 * step + after_s, 50 * step + tokens, step=step, open_step=step + closed)
    assert (meter.per_second or 0.0) > 50.0


def test_the_time_before_the_first_tokens_is_not_measured() -> None:
    meter = RateMeter().after(0.0, 0, step=0, open_step=0).after(30.0, 0, step=0, open_step=0)
    assert meter.per_second == 0.0, "nothing is expected of it until then"
    meter = meter.after(30.25, 25, step=0, open_step=0)
    assert meter.per_second is None
    assert meter.after(32.25, 225, step=0, open_step=0).per_second == pytest.approx(100.0)


def test_that_another_replica_counts_longer_makes_no_mean_late() -> None:
    """Else one with a small quota would not wait, have few microbatches in flight, count slowly, and keep it."""
    meter = paced(mean_s=1.0)
    for number in range(20, 30):
        meter.on_share_closed(10.0 * number)
        meter.on_all_shares_closed(10.0 * number + 8.0)
        assert meter.should_origins_wait(10.0 * number + 0.1)
        meter.on_stepped(10.0 * number + 9.0)


def test_one_mean_that_comes_late_costs_one_wait() -> None:
    meter = paced(mean_s=1.0)
    waits(meter, mean_s=9.0, steps=1)
    assert waits(meter, mean_s=1.0, steps=5) == [False, True, True, True, True]


def test_means_that_always_come_late_are_waited_for_ever_more_seldom() -> None:
    meter = paced(mean_s=1.0)
    waited = waits(meter, mean_s=2.5, steps=300)
    gaps = [later - earlier - 1 for earlier, later in pairwise(at for at, did in enumerate(waited) if did)]
    assert gaps[:7] == [1, 2, 4, 8, 16, MAX_SKIPPED_WAITS, MAX_SKIPPED_WAITS]
    waited = waits(meter, mean_s=1.0, steps=2 * MAX_SKIPPED_WAITS)
    assert all(waited[MAX_SKIPPED_WAITS:]), "they come in time again"


def test_while_a_rate_is_unknown_origins_wait_half_of_the_assumed_step() -> None:
    meter = StepPacing(64, BatchSizeCorrection(4000))
    meter.update_quota(ME, {OTHER: None})
    assert meter.expected_s == 0.0 and meter.should_origins_wait(0.0)
    meter.on_share_closed(0.0)
    assert meter.should_origins_wait(0.49 * ASSUMED_STEP_S) and not meter.should_origins_wait(0.5 * ASSUMED_STEP_S)
