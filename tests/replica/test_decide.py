"""Every row of the table "What a stage does next" in docs/understand/averaging.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from agora_protocol.ids import PeerId

from agora.core.step_instructions import StepInstructions
from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule
from agora.replica import decide as rules
from agora.replica.decide import (
    CLOSE_AFTER_FRACTION,
    LONE_CLOSE_FRACTION,
    MAX_CLOSE_AFTER_S,
    STAGE_CATCH_UP_AFTER_S,
    Action,
    Situation,
    StepSettings,
)
from agora.replica.pacing import Shares
from agora.replica.stage_view import (
    SILENCE_TIMEOUT_S,
    DirectReport,
    KnownReplicas,
    Membership,
    ReplicaCounts,
    ReplicaProgress,
    StageView,
    merge_gossip,
    record_failure,
)
from tests.replica.world import identities

ME, A, B, C = identities(4)
NOW = 100.0


@dataclass(frozen=True)
class Run:
    """A run's settings for steps, and which of a stage's steps are inner steps."""

    config: StepSettings
    sync_schedule: SyncSchedule = ONLY_ALL_REDUCE


ALL_REDUCES = Run(StepSettings(target_tokens=1000, synchronous=False, max_steps_behind=20))
INNER_STEPS = replace(ALL_REDUCES, sync_schedule=SyncSchedule(0, 0, 20))
SYNCHRONOUS = Run(StepSettings(target_tokens=1000, synchronous=True, max_steps_behind=1))
RUNS = pytest.mark.parametrize(
    "run", [ALL_REDUCES, INNER_STEPS, SYNCHRONOUS], ids=["all-reduces", "inner steps", "synchronous"]
)


@dataclass(frozen=True)
class Others:
    """The other replicas: what is known of them, the ids that the view names, and the leading stage's step."""

    known: KnownReplicas
    listed: tuple[PeerId, ...]
    leading_step: int = 0


def next_action(now: float, own: StageView, others: Others, run: Run) -> tuple[Action, str]:
    membership = Membership.of(others.known, others.listed, now)
    view = replace(own, membership=membership, leading_step=others.leading_step, sync_schedule=run.sync_schedule)
    return rules.decide(Situation.of(view, now, run.config))


def step_instructions(
    step: int, replicas: Any, live: Any, quota: int, run: Run, **device_closes_share: bool
) -> StepInstructions:
    view = StageView(at(step, 0), quota=quota, sync_schedule=run.sync_schedule)
    return rules.step_instructions(
        Situation(view, NOW, run.config, replicas, live, len(replicas), step), **device_closes_share
    )


def at(step: int, tokens: int, share: int | None = None) -> ReplicaCounts:
    return ReplicaCounts(step, step if share is None else share, tokens, tokens)


def others(*progress: tuple[str, int, int], reported_at: float = NOW, listed: tuple[str, ...] | None = None) -> Others:
    """Replicas as each reported itself: its id, step and tokens."""
    known = {
        peer: ReplicaProgress(
            ReplicaCounts(step, step, tokens, tokens),
            reported_at,
            direct=DirectReport(step, step, tokens, reported_at, reported_at),
            listed=listed is None or peer in listed,
        )
        for peer, step, tokens in progress
    }
    return Others(known, tuple(known) if listed is None else listed)


@RUNS
def test_a_leaving_peer_does_nothing(run: Run) -> None:
    own = StageView(at(5, 1000), is_leaving=True, sync_due=1)
    assert next_action(NOW, own, others((A, 9, 0)), run) == (Action("wait"), "this peer is leaving")


@RUNS
def test_a_fragment_sync_that_is_due_begins_unless_the_stage_is_busy_or_not_what_the_others_are(
    run: Run,
) -> None:
    own = StageView(at(5, 0), sync_due=1)
    for heard in (others((A, 5, 0)), others()):
        assert next_action(NOW, own, heard, run) == (Action("fragment sync", 1), "fragment sync 1 is due")
    assert next_action(NOW, replace(own, is_busy=True), others((A, 5, 0)), run)[0] == Action("wait")
    diverged = replace(own, diverged_from=(A,))
    assert next_action(NOW, diverged, others((A, 5, 0)), run)[0] == Action("fetch", 5, 5, (A,))


@RUNS
def test_a_busy_stage_waits(run: Run) -> None:
    assert next_action(NOW, StageView(at(5, 1000), is_busy=True), others((A, 99, 0)), run)[0] == Action("wait")


def test_a_stage_too_far_behind_fetches_a_state() -> None:
    action, reason = next_action(NOW, StageView(at(5, 10)), others((A, 26, 0)), INNER_STEPS)
    assert action == Action("fetch", 26, at_least=6) and reason == "21 steps behind the others"
    assert next_action(NOW, StageView(at(5, 10)), others((A, 7, 0)), SYNCHRONOUS)[0] == Action("fetch", 7, at_least=7)


def test_a_stage_that_is_behind_follows() -> None:
    assert next_action(NOW, StageView(at(5, 10)), others((A, 14, 0)), INNER_STEPS)[0] == Action("catch up", 14)
    assert next_action(NOW, StageView(at(5, 10)), others((A, 25, 0)), INNER_STEPS)[0] == Action("catch up", 25)
    one = others((A, 6, 0))
    assert next_action(NOW, StageView(at(5, 10), quota=400, step_s=4.0), one, INNER_STEPS)[0] == Action("wait"), (
        "it counts on"
    )


@pytest.mark.parametrize("tokens", [0, 10, 1000])
def test_a_stage_that_is_behind_at_an_all_reduce_step_of_an_asynchronous_run_replays_it(tokens: int) -> None:
    for step in (6, 7, 25):
        assert next_action(NOW, StageView(at(5, tokens)), others((A, step, 0)), ALL_REDUCES)[0] == Action("replay", 5)
    closed = StageView(at(5, tokens, share=6))
    assert next_action(NOW, closed, others((A, 6, 0)), ALL_REDUCES)[0] == Action("step together", 5), (
        "its reducers have the mean"
    )


@pytest.mark.parametrize("tokens", [0, 10])
def test_a_stage_one_synchronous_step_behind_comes_to_that_step(tokens: int) -> None:
    """Others may have got their average before: their reducer still has it."""
    assert next_action(NOW, StageView(at(5, tokens)), others((A, 6, 0)), SYNCHRONOUS)[0] == Action("step together", 5)


def test_a_synchronous_stage_that_waits_behind_another_stage_takes_its_step_number_in_the_end() -> None:
    far = replace(others((A, 5, 0)), leading_step=40)
    own = StageView(at(5, 0), behind_since=NOW - STAGE_CATCH_UP_AFTER_S)
    assert next_action(NOW, own, far, SYNCHRONOUS)[0] == Action("catch up", 40)
    assert next_action(NOW, replace(own, behind_since=NOW - STAGE_CATCH_UP_AFTER_S + 0.1), far, SYNCHRONOUS)[
        0
    ] == Action("wait")
    assert next_action(NOW, replace(own, behind_since=None), far, SYNCHRONOUS)[0] == Action("wait")


def test_an_incomplete_synchronous_step_waits_for_tokens() -> None:
    action, reason = next_action(NOW, StageView(at(5, 300)), others((A, 5, 600)), SYNCHRONOUS)
    assert action == Action("wait") and reason == "100 tokens are missing"


def test_a_share_of_an_all_reduce_step_is_complete_at_its_quota_and_the_step_goes_on_without_what_is_missing() -> None:
    own = StageView(at(5, 300), quota=400)
    action, reason = next_action(NOW, own, others((A, 5, 300)), ALL_REDUCES)
    assert action == Action("wait") and reason == "300 of the 400 tokens of its share are counted"
    reason = next_action(NOW, replace(own, quota=0), others((A, 5, 300)), ALL_REDUCES)[1]
    assert reason == "300 tokens are counted; its share of a step rounds to no microbatch"
    full = StageView(at(5, 400), quota=400)
    action, reason = next_action(NOW, full, others((A, 5, 300)), ALL_REDUCES)
    assert action == Action("step together", 5) and reason == "this replica's share of step 5 is complete"
    assert next_action(NOW, full, others((A, 5, 300)), SYNCHRONOUS)[0] == Action("wait"), "all must have come"
    closed = StageView(at(5, 10, share=6), quota=400)
    assert next_action(NOW, closed, others((A, 5, 300)), ALL_REDUCES)[0] == Action("step together", 5)


def test_where_origins_wait_for_means_a_share_is_complete_when_nothing_of_it_is_in_work() -> None:
    own = StageView(at(5, 400), quota=400, in_progress=1)
    assert next_action(NOW, own, others((A, 5, 300)), ALL_REDUCES)[0] == Action("wait")
    assert next_action(NOW, replace(own, in_progress=0), others((A, 5, 300)), ALL_REDUCES)[0] == Action(
        "step together", 5
    )
    assert next_action(NOW, own, others((A, 5, 600)), ALL_REDUCES)[0] == Action("step together", 5), (
        "all tokens are counted"
    )
    assert not step_instructions(
        5, {A}, others((A, 5, 300)).known, 400, ALL_REDUCES, device_closes_share=False
    ).closes_share


def test_a_replica_closes_its_share_a_while_after_another_one_has() -> None:
    """It contributes what it has, so that the mean is not made without it."""
    closed = merge_gossip(others((A, 5, 300)).known, [(A, 5, 6, 10, 410, 5, 0, 0, 0, 0)], A, ME, NOW)
    heard = Others(closed, (A,))
    own = StageView(at(5, 300), quota=400, step_s=4.0)
    assert next_action(NOW + 4.0 * CLOSE_AFTER_FRACTION - 0.01, own, heard, ALL_REDUCES)[0] == Action("wait")
    assert next_action(NOW + 4.0 * CLOSE_AFTER_FRACTION, own, heard, ALL_REDUCES)[0] == Action("step together", 5)
    stepped = Others(merge_gossip(heard.known, [(A, 6, 6, 10, 410, 5, 0, 0, 0, 0)], A, ME, NOW), (A,))
    assert next_action(NOW + 4.0 * CLOSE_AFTER_FRACTION - 0.01, own, stepped, INNER_STEPS)[0] == Action("wait")
    assert next_action(NOW + 4.0 * CLOSE_AFTER_FRACTION, own, stepped, INNER_STEPS)[0] == Action("step"), (
        "along its own gradient"
    )
    slow = replace(own, step_s=1000.0)
    assert next_action(NOW + MAX_CLOSE_AFTER_S, slow, heard, ALL_REDUCES)[0] == Action("step together", 5)
    assert next_action(NOW + MAX_CLOSE_AFTER_S, slow, heard, SYNCHRONOUS)[0] == Action("wait")


def test_a_replica_from_which_nothing_is_expected_closes_its_share_with_the_first_other() -> None:
    own = StageView(at(5, 10), quota=0, step_s=4.0)
    open_yet = others((A, 5, 300), (B, 5, 300))
    closed = Others(merge_gossip(open_yet.known, [(A, 5, 6, 10, 410, 5, 0, 0, 0, 0)], A, ME, NOW), (A, B))
    assert next_action(NOW, own, open_yet, ALL_REDUCES)[0] == Action("wait")
    assert next_action(NOW, own, closed, ALL_REDUCES)[0] == Action("step together", 5)


def test_one_replica_alone_closes_no_share_that_has_just_been_opened() -> None:
    """Whatever it says of itself: it would shorten every step."""
    one = merge_gossip(others((A, 5, 0), (B, 5, 0), (C, 5, 0)).known, [(A, 5, 7, 0, 9, 5, 0, 0, 0, 0)], A, ME, NOW)
    two = merge_gossip(one, [(B, 5, 6, 10, 410, 5, 0, 0, 0, 0)], B, ME, NOW + 1.0)
    own = StageView(at(5, 100), quota=400, step_s=4.0, open_fraction=LONE_CLOSE_FRACTION - 0.01)
    assert next_action(NOW + 1.9, own, Others(one, (A, B, C)), ALL_REDUCES)[0] == Action("wait")
    assert next_action(NOW + 1.9, own, Others(two, (A, B, C)), ALL_REDUCES)[0] == Action("wait")
    for view, known, run in (
        (own, two, ALL_REDUCES),
        (replace(own, open_fraction=LONE_CLOSE_FRACTION), one, ALL_REDUCES),
        (own, one, INNER_STEPS),
    ):
        kind = next_action(NOW + 2.0, view, Others(known, (A, B, C)), run)[0].kind
        assert kind == ("step" if run is INNER_STEPS else "step together")


@RUNS
def test_a_share_that_is_closed_is_averaged_as_soon_as_another_replica_can_be_reached(run: Run) -> None:
    own = StageView(at(5, 0, share=6))
    one = others((A, 5, 10))
    assert next_action(NOW, own, one, run)[0] == Action("step together", 5)
    if run is not INNER_STEPS:
        failed = replace(one, known=record_failure(one.known, A, NOW))
        assert next_action(NOW, own, failed, run)[0] == Action("wait")
    assert next_action(NOW, own, others(), run)[0] == Action("step together", 5), "a mean of its own share"


def test_the_device_closes_a_share_only_where_its_quota_is_known() -> None:
    heard = others((A, 5, 300))
    assert step_instructions(5, {A}, heard.known, 400, ALL_REDUCES) == StepInstructions(
        1000, True, 5, 400, closes_share=True
    )
    assert not step_instructions(5, {A}, heard.known, 0, ALL_REDUCES).closes_share
    assert step_instructions(5, {A}, heard.known, 400, SYNCHRONOUS) == StepInstructions(1000, True, 5, 700)
    assert step_instructions(5, {A}, heard.known, 400, INNER_STEPS) == StepInstructions(1000, True, 5, 400), (
        "an inner step"
    )
    assert step_instructions(5, {A}, heard.known, 0, INNER_STEPS) == StepInstructions(1000, True, 5, 1000)
    assert step_instructions(5, set(), {}, 400, ALL_REDUCES) == StepInstructions(1000, True, 5, 1000, alone=True)


@RUNS
def test_after_the_end_no_step_is_taken_but_those_of_others(run: Run) -> None:
    ended = StageView(at(5, 1000), stops_at=5, quota=400)
    assert next_action(NOW, ended, others((A, 5, 1000)), run) == (Action("wait"), "the run has taken its 5 steps")
    assert next_action(NOW, ended, others(), run)[0] == Action("wait")
    assert next_action(NOW, replace(ended, stops_at=6), others((A, 5, 1000)), run)[0] != Action("wait")
    assert next_action(NOW, replace(ended, stops_at=6), others(), run)[0] != Action("wait")
    assert next_action(NOW, StageView(at(4, 0, share=5), stops_at=5), others((A, 4, 0)), run)[0] != Action("wait"), (
        "the last step"
    )
    behind = next_action(NOW, ended, others((A, 7, 0), (B, 7, 0)), run)[0]
    assert behind != Action("wait"), "others have gone on"


def test_a_complete_step_is_taken_by_a_replica_that_has_counted_something() -> None:
    assert next_action(NOW, StageView(at(5, 300)), others((A, 5, 700)), INNER_STEPS)[0] == Action("step")
    assert next_action(NOW, StageView(at(5, 0)), others((A, 5, 1000)), INNER_STEPS)[0] == Action("wait"), (
        "the others take it"
    )


@pytest.mark.parametrize("run", [ALL_REDUCES, SYNCHRONOUS], ids=["all-reduces", "synchronous"])
def test_a_complete_all_reduce_step_is_taken_together(run: Run) -> None:
    assert next_action(NOW, StageView(at(5, 300)), others((A, 5, 700)), run)[0] == Action("step together", 5)
    assert next_action(NOW, StageView(at(5, 0)), others((A, 5, 1000)), run)[0] == Action("step together", 5)
    last = replace(ALL_REDUCES, sync_schedule=SyncSchedule(0, 6, 20))
    assert next_action(NOW, StageView(at(5, 300)), others((A, 5, 700)), last)[0] == Action("step together", 5)
    assert next_action(NOW, StageView(at(6, 300)), others((A, 6, 700)), last)[0] == Action("step")
    past = replace(ALL_REDUCES, sync_schedule=SyncSchedule(20, 8, 0))
    assert next_action(NOW, StageView(at(8, 300)), others((A, 8, 700)), past)[0] == Action("step together", 8)


@RUNS
def test_a_replica_without_others_steps_alone(run: Run) -> None:
    for alone in (others(), others((A, 5, 700), reported_at=NOW - SILENCE_TIMEOUT_S - 0.1, listed=())):
        assert next_action(NOW, StageView(at(5, 1000)), alone, run)[0] == Action("step")


@pytest.mark.parametrize("run", [ALL_REDUCES, SYNCHRONOUS], ids=["all-reduces", "synchronous"])
def test_an_all_reduce_step_waits_for_replicas_that_did_not_answer_until_they_are_silent(run: Run) -> None:
    heard = others((A, 5, 700), (B, 5, 100))
    failed = replace(heard, known=record_failure(record_failure(heard.known, A, NOW), B, NOW))
    own = StageView(at(5, 1000))
    action, reason = next_action(NOW + SILENCE_TIMEOUT_S, own, failed, run)
    assert action == Action("wait") and reason.endswith("did not answer, and may still be alive") and A in reason
    assert next_action(NOW + SILENCE_TIMEOUT_S + 0.1, own, failed, run)[0] == Action("step"), "they are gone"
    one = replace(heard, known=record_failure(heard.known, A, NOW))
    assert next_action(NOW + SILENCE_TIMEOUT_S, own, one, run)[0] == Action("step together", 5), (
        "the other can be reached"
    )


@pytest.mark.parametrize("run", [ALL_REDUCES, SYNCHRONOUS], ids=["all-reduces", "synchronous"])
def test_an_all_reduce_step_counts_a_replica_that_the_view_does_not_list_yet(run: Run) -> None:
    late = others((A, 5, 700), listed=())
    assert next_action(NOW, StageView(at(5, 300)), late, run)[0] == Action("step together", 5)
    assert next_action(NOW, StageView(at(5, 200), quota=400), late, run)[0] == Action("wait")


def test_a_synchronous_step_is_complete_when_its_tokens_are_counted_by_whomever() -> None:
    """No other replica counts more of it, so that one whose tokens did not count would be waited for for ever."""
    heard = others((A, 5, 800), (B, 5, 100))
    assert next_action(NOW, StageView(at(5, 100)), heard, SYNCHRONOUS)[0] == Action("step together", 5)


def test_one_that_says_it_has_counted_the_whole_step_does_not_complete_it() -> None:
    shares = Shares(250.0, {A: 250.0, B: 250.0, C: 250.0}, 10)
    own = StageView(at(5, 100), quota=250, shares=shares)
    lie = others((A, 5, 2**50), (B, 5, 100), (C, 5, 100))
    assert next_action(NOW, own, lie, ALL_REDUCES)[0] == Action("wait")
    assert next_action(NOW, replace(own, counts=at(5, 250)), lie, ALL_REDUCES)[0] == Action("step together", 5)
