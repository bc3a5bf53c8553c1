"""When an origin opens its next microbatch, and how many it has in flight: every branch, without a loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agora.pipeline.flow_control import (
    LACKS_AFTER_S,
    TOP_UP_AFTER_S,
    CompletionPace,
    SendDecision,
    SendInputs,
    SendWindow,
    StalenessCeiling,
    StepAllotment,
    StepState,
    equal_part,
    measured_window,
    next_send,
    staleness_ceiling,
)

ASYNCHRONOUS = SendInputs()
SYNCHRONOUS = SendInputs(step=StepState(step=7, microbatches=9, lacking=9, position=0, origins=2))
NONE = StepAllotment()


def decide(
    now: float = 100.0,
    allotment: StepAllotment = NONE,
    seen: SendInputs = ASYNCHRONOUS,
    open_count: int = 0,
    **flags: bool,
) -> SendDecision:
    return next_send(now, allotment, SendWindow(4, "4: measured"), seen, open_count, **flags)


@pytest.mark.parametrize(
    ("state", "action", "reason"),
    [
        ({"leaving": True, "draining": True}, "stop", "this peer is leaving"),
        ({"seen": SendInputs(has_enough_replicas=False), "draining": True}, "wait", "too few replicas serve the run"),
        ({"draining": True}, "wait", "draining: it opens nothing until `refill`"),
        ({"open_count": 4}, "wait", "4 microbatches are open; send window 4: measured"),
        ({"open_count": 3}, "open", "4: measured"),
        ({"seen": SYNCHRONOUS, "leaving": True}, "stop", "this peer is leaving"),
        ({"seen": SYNCHRONOUS, "draining": True}, "wait", "draining: it opens nothing until `refill`"),
        ({"seen": SYNCHRONOUS}, "open", "4: measured"),
    ],
)
def test_the_first_row_that_holds_decides(state: dict[str, Any], action: str, reason: str) -> None:
    opening = decide(**state)
    assert (opening.action, opening.reason) == (action, reason)
    assert opening.allotment == NONE or action == "open", "waiting uses nothing up"


def test_after_the_last_step_nothing_is_opened() -> None:
    for open_count in (0, 3):
        over = decide(seen=SendInputs(end="over"), open_count=open_count)
        assert (over.action, over.reason) == ("wait", "the run has taken its total_steps")
    assert decide(seen=SendInputs(end="over"), leaving=True).action == "stop"


def test_while_other_stages_have_not_been_seen_to_take_the_last_step_few_are_opened() -> None:
    """A stage that lacks tokens gets twice as many at each time; those that were lacking nothing get next to none."""
    last, opened, now = SendInputs(end="last"), [], 0.0
    decision = decide(now, replace(NONE, step=8, left=3), last, open_count=2)
    assert decision.action == "wait", "what is open may be all that lacks"
    while now < 6 * LACKS_AFTER_S:
        decision = decide(now, decision.allotment, last)
        if decision.action == "open":
            opened.append(now)
        else:
            now += 0.5
    assert opened[0] == pytest.approx(LACKS_AFTER_S, abs=0.5)
    per_time = [sum(at <= time < at + 0.1 for time in opened) for at in sorted(set(opened))]
    assert per_time[:4] == [1, 2, 4, 8]


def test_an_amended_run_goes_on_at_once_and_its_next_end_begins_as_the_first() -> None:
    ended = replace(NONE, opens_next=8, idle_since=90.0)
    goes_on = decide(allotment=ended)
    assert goes_on.action == "open" and not goes_on.allotment.opens_next
    assert decide(allotment=goes_on.allotment, seen=SendInputs(end="last")).allotment.opens_next == 1


def test_until_a_mean_is_in_no_more_is_open_than_the_part_lacks() -> None:
    for before, open_count, action in (None, 3, "open"), (2, 1, "open"), (2, 2, "wait"), (-1, 0, "wait"):
        opening = decide(seen=SendInputs(max_open_before_mean=before), open_count=open_count)
        assert opening.action == action
    assert opening.reason == "all that may begin before the awaited mean is open"


def test_a_synchronous_step_is_opened_up_to_the_allotment_then_waited_for() -> None:
    allotment, opened = NONE, 0
    while (opening := decide(allotment=allotment, seen=SYNCHRONOUS, open_count=min(opened, 3))).action == "open":
        allotment, opened = opening.allotment, opened + 1
    assert opened == 5 and allotment.step == 7, "the first of two origins opens five of nine"
    assert opening.reason == "this origin has opened its allotment of step 7"


def test_an_allotment_is_not_renewed_before_everything_opened_is_back() -> None:
    used_up = StepAllotment(6, 0)
    waiting = decide(allotment=used_up, seen=SYNCHRONOUS, open_count=1)
    assert (waiting.action, waiting.allotment) == ("wait", used_up)
    assert decide(allotment=used_up, seen=SYNCHRONOUS).allotment == StepAllotment(7, 4)


def test_an_origin_with_an_allotment_of_nothing_waits() -> None:
    assert decide(seen=SendInputs(step=StepState(7, 9, 9, 19, 20))).action == "wait"


def test_what_a_step_lacks_is_opened_in_parts_after_a_grace_period() -> None:
    seen = SendInputs(step=StepState(7, 9, 3, 0, 2))
    first = decide(allotment=StepAllotment(7, 0), seen=seen)
    assert (first.action, first.allotment.idle_since) == ("wait", 100.0)
    before = decide(100.0 + TOP_UP_AFTER_S - 0.01, first.allotment, seen)
    assert before.action == "wait" and before.allotment == first.allotment
    after = decide(100.0 + TOP_UP_AFTER_S, first.allotment, seen)
    assert (after.action, after.allotment) == ("open", StepAllotment(7, 1)), "half of three, rounded up"


def test_a_step_that_lacks_nothing_is_not_topped_up_and_the_grace_period_begins_again() -> None:
    seen = SendInputs(step=StepState(7, 9, 0, 0, 2))
    after = decide(100.0 + TOP_UP_AFTER_S, StepAllotment(7, 0, idle_since=100.0), seen)
    assert (after.action, after.allotment) == ("wait", StepAllotment(7))


def test_a_new_step_ends_the_grace_period() -> None:
    opening = decide(101.0, StepAllotment(6, 0, idle_since=100.0), SYNCHRONOUS)
    assert (opening.action, opening.allotment) == ("open", StepAllotment(7, 4))


def test_send_window_covers_the_round_trip_with_a_safety_that_shrinks_relatively() -> None:
    assert measured_window(None, None, 4, 64).limit == 8
    short, long = measured_window(0.4, 0.1, 4, 1000), measured_window(10.0, 0.1, 4, 1000)
    assert short.limit == 12
    assert long.limit == 140
    assert measured_window(10.0, 0.1, 4, 32).limit == 32
    assert "limited to 32" in measured_window(10.0, 0.1, 4, 32).reason
    assert measured_window(None, None, 8, 3).limit == 3
    assert measured_window(1.0, 0.0, 1, 8).limit == 2


def test_an_origin_that_may_not_have_what_its_round_trip_would_use_says_which_settings_change_that() -> None:
    free, bounded = measured_window(0.4, 0.1, 2, 64), measured_window(0.4, 0.1, 2, 64, StalenessCeiling(2, 2))
    assert (free.limit, free.shortage) == (12, "")
    assert bounded.limit == 2
    assert bounded.reason.endswith("limited to 2 by schedule.staleness")
    assert "would use 12 in flight, schedule.staleness allows it 2" in bounded.shortage
    assert "optimizer.target_tokens" in bounded.shortage
    assert measured_window(0.4, 0.1, 2, 64, StalenessCeiling(12, 24)).shortage == "", "it has all that it would use"
    assert measured_window(0.4, 0.1, 2, 8, StalenessCeiling(9, 9)).shortage == "", "memory bounds it before that"
    unmeasured = measured_window(None, None, 2, 64, StalenessCeiling(1, 2))
    assert unmeasured.reason == "1: 2 per stage until the round trip is measured, limited to 1 by schedule.staleness"


@pytest.mark.parametrize(
    ("round_trip", "slots", "limit", "corrected"),
    [
        (0.1, 64, 4, False),  # it needs 1
        (0.4, 64, 4, False),
        (0.55, 64, 6, True),
        (5.0, 64, 8, True),
        (5.0, 6, 6, True),
    ],
)
def test_where_weights_are_predicted_more_are_in_flight_if_the_round_trip_needs_them(
    round_trip: float, slots: int, limit: int, corrected: bool
) -> None:
    window = measured_window(round_trip, 0.1, 1, slots, StalenessCeiling(4, 8))
    assert window.limit == limit and bool(window.correction) == corrected
    if corrected:
        needed = min(round(round_trip / 0.1 + 0.499), slots)
        assert f"needs {needed} in flight; it has {limit}, more than schedule.staleness (4)" in window.correction
    assert measured_window(round_trip, 0.1, 1, slots, StalenessCeiling(4, 4)).limit == 4


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 64), st.integers(1, 512))
def test_send_window_is_bounded_and_grows_with_the_round_trip(round_trip, period, stages, ceiling) -> None:
    window = measured_window(round_trip, period, stages, ceiling)
    assert 1 <= window.limit <= ceiling
    assert measured_window(round_trip * 2, period, stages, ceiling).limit >= window.limit


def test_send_window_finds_the_bottleneck_by_itself() -> None:
    round_trip, bottleneck, limit = 2.0, 0.05, 4
    for _ in range(20):
        period = max(bottleneck, round_trip / limit)
        limit = measured_window(round_trip, period, 2, 10_000).limit
    assert 40 <= limit <= 70, "40 cover the round trip"


@pytest.mark.parametrize("origins", [1, 2, 3, 8, 40])
def test_all_origins_together_keep_at_most_the_allowed_share_of_a_step_in_flight(origins: int) -> None:
    for staleness, microbatches in ((0.5, 16), (1.0, 16), (2.0, 100), (0.01, 16)):
        ceilings = [
            staleness_ceiling(staleness, microbatches, position, origins, predicts=position % 2 == 0)
            for position in range(origins)
        ]
        limits = [ceiling.usual for ceiling in ceilings]
        assert sum(limits) <= max(staleness * microbatches, origins), "but each has at least one"
        assert min(limits) >= 1
        assert max(limits) - min(limits) <= 1
        assert all(
            ceiling.at_most == ceiling.usual
            if position % 2
            else ceiling.usual <= ceiling.at_most <= 2 * ceiling.usual + 1
            for position, ceiling in enumerate(ceilings)
        )


def test_pace_is_the_mean_gap_and_a_stall_is_no_pace() -> None:
    pace = CompletionPace()
    for i in range(200):
        pace = pace.after_completion(100.0 + 0.5 * i)
    assert math.isclose(pace.period_s.value, 0.5)
    after = pace.after_completion(1000.0)
    assert after.period_s.value < 0.7, "one long gap weighs little"
    assert pace.after_interruption().after_completion(1000.0).period_s == pace.period_s


@given(st.integers(1, 10_000), st.integers(1, 20))
def test_origins_share_a_step_without_gaps(microbatches: int, origins: int) -> None:
    allotments = [equal_part(microbatches, position, origins) for position in range(origins)]
    assert max(allotments) - min(allotments) <= 1
    assert sum(allotments) == microbatches
