"""When an origin opens its next microbatch: every branch of the decision, without a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agora.pipeline.opening import GRACE_S, Credit, OriginState, Share, StepQuota, StepState, Surroundings, next_opening

CREDIT = Credit(4, "4: measured")
ASYNCHRONOUS = OriginState(CREDIT)
SYNCHRONOUS = OriginState(CREDIT, Surroundings(step=StepState(step=7, microbatches=9, lacking=9, share=Share(0, 2))))
NONE = StepQuota()


@pytest.mark.parametrize(
    ("state", "action", "reason"),
    [
        (replace(ASYNCHRONOUS, leaving=True, paused=True), "stop", "this peer is leaving"),
        (OriginState(CREDIT, Surroundings(ready=False), paused=True), "wait", "too few replicas serve the run"),
        (replace(ASYNCHRONOUS, paused=True), "wait", "paused by its owner"),
        (replace(ASYNCHRONOUS, open_count=4), "wait", "4 microbatches are open; credit 4: measured"),
        (replace(ASYNCHRONOUS, open_count=3), "open", "4: measured"),
        (replace(SYNCHRONOUS, leaving=True), "stop", "this peer is leaving"),
        (replace(SYNCHRONOUS, paused=True), "wait", "paused by its owner"),
        (SYNCHRONOUS, "open", "4: measured"),
    ],
)
def test_the_first_row_that_holds_decides(state: OriginState, action: str, reason: str) -> None:
    opening = next_opening(100.0, state, NONE)
    assert (opening.action, opening.reason) == (action, reason)
    assert opening.quota == NONE or action == "open", "waiting uses nothing up"


def test_a_synchronous_step_is_opened_up_to_the_share_then_waited_for() -> None:
    quota, opened, state = NONE, 0, SYNCHRONOUS
    while (opening := next_opening(100.0, state, quota)).action == "open":
        quota, opened = opening.quota, opened + 1
        state = replace(state, open_count=min(opened, 3))
    assert opened == 5 and quota.step == 7, "the first of two origins opens five of nine"
    assert opening.reason == "this origin's share of step 7 is opened"


def test_a_share_is_not_renewed_before_everything_opened_is_back() -> None:
    used_up = StepQuota(6, 0)
    waiting = next_opening(100.0, replace(SYNCHRONOUS, open_count=1), used_up)
    assert (waiting.action, waiting.quota) == ("wait", used_up)
    assert next_opening(100.0, SYNCHRONOUS, used_up).quota == StepQuota(7, 4)


def test_an_origin_with_a_share_of_nothing_waits() -> None:
    state = OriginState(CREDIT, Surroundings(step=StepState(7, 9, 9, Share(19, 20))))
    assert next_opening(100.0, state, NONE).action == "wait"


def test_what_a_step_lacks_is_opened_in_parts_after_a_grace_period() -> None:
    state = OriginState(CREDIT, Surroundings(step=StepState(7, 9, 3, Share(0, 2))))
    first = next_opening(100.0, state, StepQuota(7, 0))
    assert (first.action, first.quota.idle_since) == ("wait", 100.0)
    before = next_opening(100.0 + GRACE_S - 0.01, state, first.quota)
    assert before.action == "wait" and before.quota == first.quota
    after = next_opening(100.0 + GRACE_S, state, first.quota)
    assert (after.action, after.quota) == ("open", StepQuota(7, 1)), "half of three, rounded up"


def test_a_step_that_lacks_nothing_is_not_topped_up_and_the_grace_period_begins_again() -> None:
    state = OriginState(CREDIT, Surroundings(step=StepState(7, 9, 0, Share(0, 2))))
    after = next_opening(100.0 + GRACE_S, state, StepQuota(7, 0, idle_since=100.0))
    assert (after.action, after.quota) == ("wait", StepQuota(7))


def test_a_new_step_ends_the_grace_period() -> None:
    opening = next_opening(101.0, SYNCHRONOUS, StepQuota(6, 0, idle_since=100.0))
    assert (opening.action, opening.quota) == ("open", StepQuota(7, 4))
