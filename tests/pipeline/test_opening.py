"""When an origin opens its next microbatch: every branch of the decision, without a loop."""

from __future__ import annotations

from typing import Any

import pytest

from agora.pipeline.flow_control import (
    GRACE_S,
    SendDecision,
    SendInputs,
    SendWindow,
    StepQuota,
    StepState,
    next_send,
)

ASYNCHRONOUS = SendInputs()
SYNCHRONOUS = SendInputs(step=StepState(step=7, microbatches=9, lacking=9, rank=0, origins=2))
NONE = StepQuota()


def decide(
    now: float = 100.0, quota: StepQuota = NONE, seen: SendInputs = ASYNCHRONOUS, open_count: int = 0, **flags: bool
) -> SendDecision:
    return next_send(now, quota, SendWindow(4, "4: measured"), seen, open_count, **flags)


@pytest.mark.parametrize(
    ("state", "action", "reason"),
    [
        ({"leaving": True, "paused": True}, "stop", "this peer is leaving"),
        ({"seen": SendInputs(ready=False), "paused": True}, "wait", "too few replicas serve the run"),
        ({"paused": True}, "wait", "paused by its owner"),
        ({"open_count": 4}, "wait", "4 microbatches are open; credit 4: measured"),
        ({"open_count": 3}, "open", "4: measured"),
        ({"seen": SYNCHRONOUS, "leaving": True}, "stop", "this peer is leaving"),
        ({"seen": SYNCHRONOUS, "paused": True}, "wait", "paused by its owner"),
        ({"seen": SYNCHRONOUS}, "open", "4: measured"),
    ],
)
def test_the_first_row_that_holds_decides(state: dict[str, Any], action: str, reason: str) -> None:
    opening = decide(**state)
    assert (opening.action, opening.reason) == (action, reason)
    assert opening.quota == NONE or action == "open", "waiting uses nothing up"


def test_until_a_mean_is_in_no_more_is_open_than_the_part_lacks() -> None:
    for before, open_count, action in (None, 3, "open"), (2, 1, "open"), (2, 2, "wait"), (-1, 0, "wait"):
        opening = decide(seen=SendInputs(before_mean=before), open_count=open_count)
        assert opening.action == action
    assert opening.reason == "its share of a step is opened, and the mean gradient awaited"


def test_a_synchronous_step_is_opened_up_to_the_quota_then_waited_for() -> None:
    quota, opened = NONE, 0
    while (opening := decide(quota=quota, seen=SYNCHRONOUS, open_count=min(opened, 3))).action == "open":
        quota, opened = opening.quota, opened + 1
    assert opened == 5 and quota.step == 7, "the first of two origins opens five of nine"
    assert opening.reason == "this origin's quota of step 7 is opened"


def test_a_quota_is_not_renewed_before_everything_opened_is_back() -> None:
    used_up = StepQuota(6, 0)
    waiting = decide(quota=used_up, seen=SYNCHRONOUS, open_count=1)
    assert (waiting.action, waiting.quota) == ("wait", used_up)
    assert decide(quota=used_up, seen=SYNCHRONOUS).quota == StepQuota(7, 4)


def test_an_origin_with_a_quota_of_nothing_waits() -> None:
    assert decide(seen=SendInputs(step=StepState(7, 9, 9, 19, 20))).action == "wait"


def test_what_a_step_lacks_is_opened_in_parts_after_a_grace_period() -> None:
    seen = SendInputs(step=StepState(7, 9, 3, 0, 2))
    first = decide(quota=StepQuota(7, 0), seen=seen)
    assert (first.action, first.quota.idle_since) == ("wait", 100.0)
    before = decide(100.0 + GRACE_S - 0.01, first.quota, seen)
    assert before.action == "wait" and before.quota == first.quota
    after = decide(100.0 + GRACE_S, first.quota, seen)
    assert (after.action, after.quota) == ("open", StepQuota(7, 1)), "half of three, rounded up"


def test_a_step_that_lacks_nothing_is_not_topped_up_and_the_grace_period_begins_again() -> None:
    seen = SendInputs(step=StepState(7, 9, 0, 0, 2))
    after = decide(100.0 + GRACE_S, StepQuota(7, 0, idle_since=100.0), seen)
    assert (after.action, after.quota) == ("wait", StepQuota(7))


def test_a_new_step_ends_the_grace_period() -> None:
    opening = decide(101.0, StepQuota(6, 0, idle_since=100.0), SYNCHRONOUS)
    assert (opening.action, opening.quota) == ("open", StepQuota(7, 4))
