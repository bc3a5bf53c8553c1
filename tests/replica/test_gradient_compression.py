"""A replica sends gradients in as many bits as its share of its uplink carries in a step, and says why."""

from __future__ import annotations

import pytest

from agora.replica.sync_rules import BYTES, DOUBLING_STEPS, MeasuredUplink, choose_gradient_compression

MBIT = 1e6 / 8
NUMEL = 10_000_000


@pytest.mark.parametrize(
    ("mbits", "name", "is_limited"),
    [(100.0, "normal4", False), (17.0, "normal4", False), (15.0, "normal3", True), (10.0, "normal2", True)],
)
def test_fewer_bits_are_sent_where_the_uplink_carries_no_more(mbits: float, name: str, is_limited: bool) -> None:
    """Two replicas, ten seconds, half of the uplink: 4 bits of 10 M values, once up and once as answers, are 5.2 MB."""
    found = choose_gradient_compression("normal4", NUMEL, 2, MeasuredUplink(mbits * MBIT), 5.0, 0.5)
    assert (found.name, found.is_limited) == (name, is_limited)
    assert f"{mbits:g} Mbit/s" in found.reason and "MB in a step of 5 s" in found.reason


def test_an_uplink_that_carries_no_gradients_is_told_so_and_carries_the_fewest_bits() -> None:
    found = choose_gradient_compression("normal4", NUMEL, 2, MeasuredUplink(1.0 * MBIT), 5.0, 0.5)
    assert found.name == "normal2" and found.is_limited
    assert found.reason.endswith("which is too little") and not found.fits


def test_more_replicas_answer_more_and_larger_steps_leave_more_time() -> None:
    def name(replicas: int, step_s: float) -> str:
        return choose_gradient_compression("normal4", NUMEL, replicas, MeasuredUplink(17.0 * MBIT), step_s, 0.5).name

    assert name(2, 5.0) == "normal4" and name(16, 5.0) == "normal2" and name(16, 10.0) == "normal4"


@pytest.mark.parametrize("most", ["normal2", "int8", "float32"])
def test_nothing_is_chosen_before_something_is_known_nor_beyond_what_the_manifest_says(most: str) -> None:
    for uplink, step_s, replicas in ((None, 5.0, 4), (1.0, None, 4), (1.0, 5.0, 1), (1e12, 5.0, 4)):
        found = choose_gradient_compression(most, NUMEL, replicas, MeasuredUplink(uplink), step_s, 0.5)
        assert found.name == most and not found.is_limited
    assert [*BYTES.values()] == sorted(BYTES.values())


def test_an_uplink_that_is_not_full_for_many_steps_counts_as_faster_until_it_is_full_again() -> None:
    """It was measured while int8 filled it; 2 bits fill it no more, although it may carry int8 by now."""
    uplink, names = MeasuredUplink().after_step(10.0 * MBIT), []
    for _ in range(3 * DOUBLING_STEPS):
        uplink = uplink.after_step(10.0 * MBIT)
        names.append(choose_gradient_compression("int8", NUMEL, 2, uplink, 5.0, 0.5).name)
    assert [*dict.fromkeys(names)] == ["normal2", "normal3", "normal4", "int8"]
    assert uplink.growth == 8 and uplink.after_step(11.0 * MBIT) == MeasuredUplink(11.0 * MBIT, 0)
    grown = MeasuredUplink(10.0 * MBIT, DOUBLING_STEPS)
    assert "taken as 2 times that: it was never full for 200 steps" in (
        choose_gradient_compression("int8", NUMEL, 2, grown, 5.0, 0.5).reason
    )
