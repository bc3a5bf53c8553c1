"""An uplink's rate is measured while more waits for it than it carries, and never otherwise."""

from __future__ import annotations

import pytest

from agora.net.shaping.bandwidth import MIN_WAITING_BYTES, UplinkMeter


def test_a_link_that_something_always_waits_for_shows_its_rate() -> None:
    meter, rate, given = UplinkMeter(), 1e6, 0
    sent = 0.0
    for tick in range(40):
        given += 300_000  # more than it carries in a quarter of a second
        sent += 250_000 if tick else 0
        meter.measure(0.25 * tick, given, round(given - sent))
    assert meter.rate.value == pytest.approx(rate)


@pytest.mark.parametrize("waiting", [0, MIN_WAITING_BYTES - 1])
def test_a_link_that_nothing_waits_for_stays_unknown(waiting: int) -> None:
    meter = UplinkMeter()
    for tick in range(40):
        meter.measure(0.25 * tick, 10_000 * tick + waiting, waiting)
    assert meter.rate.value is None


def test_a_sample_counts_only_when_bytes_waited_all_the_time_as_far_as_is_seen() -> None:
    meter = UplinkMeter()
    for now, given, waiting in ((0.0, 10**6, 10**6), (0.25, 10**6, 0), (0.5, 2 * 10**6, 10**6)):
        meter.measure(now, given, waiting)
    assert meter.rate.value is None
    meter.measure(0.75, 2 * 10**6, 600_000)
    assert meter.rate.value == pytest.approx(1.6e6)
    meter.measure(0.75, 3 * 10**6, 10**6)
    assert meter.rate.samples == 1, "no time has passed"
