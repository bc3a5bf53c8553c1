"""Every row of the table "What a stage does next" in docs/averaging.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agora.averaging.agreement import SILENT_S, ReplicaProgress, record_failure
from agora.averaging.next_action import RESUME_S, Action, ActionConfig, OtherReplicas, OwnStage, next_action
from tests.averaging.world import identities

A, B, C = identities(3)
NOW = 100.0
EXACT = ActionConfig(target_tokens=1000, synchronous=False, exact_steps=10**9, most_behind=20)
FREE = replace(EXACT, exact_steps=0)
SYNCHRONOUS = replace(EXACT, synchronous=True, most_behind=1)
CONFIGS = pytest.mark.parametrize("config", [EXACT, FREE, SYNCHRONOUS], ids=["exact", "free", "synchronous"])


def others(
    *progress: tuple[str, int, int], heard_at: float = NOW, listed: tuple[str, ...] | None = None
) -> OtherReplicas:
    """Replicas as each reported itself: its id, step and tokens."""
    known = {
        peer: ReplicaProgress(step, tokens, 0, heard_at, reported_step=step, listed=listed is None or peer in listed)
        for peer, step, tokens in progress
    }
    return OtherReplicas(known, tuple(known) if listed is None else listed)  # type: ignore[arg-type]


@CONFIGS
def test_a_leaving_peer_does_nothing(config: ActionConfig) -> None:
    own = OwnStage(5, 1000, leaving=True, slice_due=1)
    assert next_action(NOW, own, others((A, 9, 0)), config) == (Action("wait"), "this peer is leaving")


@CONFIGS
def test_a_slice_round_begins_beside_anything_else_where_another_replica_is_reachable(config: ActionConfig) -> None:
    own = OwnStage(5, 0, slice_due=1)
    for busy in (True, False):
        action, reason = next_action(NOW, replace(own, busy=busy), others((A, 5, 0)), config)
        assert action == Action("slice round", 1) and reason == "slice round 1 is due"
    unreachable = others((A, 5, 0))
    unreachable = replace(unreachable, known=record_failure(unreachable.known, A, NOW))
    for alone in (unreachable, others((A, 5, 0), listed=()), others()):
        assert next_action(NOW, own, alone, config)[0].what != "slice round"
    assert next_action(NOW, own, OtherReplicas({}, (A,)), config)[0] == Action("slice round", 1), (
        "it may just not be heard yet"
    )


@CONFIGS
def test_a_busy_stage_waits(config: ActionConfig) -> None:
    assert next_action(NOW, OwnStage(5, 1000, busy=True), others((A, 99, 0)), config)[0] == Action("wait")


def test_a_stage_too_far_behind_fetches_a_state() -> None:
    action, reason = next_action(NOW, OwnStage(5, 10), others((A, 26, 0)), FREE)
    assert action == Action("recover", 26, at_least=6) and reason == "21 steps behind the others"
    assert next_action(NOW, OwnStage(5, 10), others((A, 7, 0)), SYNCHRONOUS)[0] == Action("recover", 7, at_least=7)


def test_a_stage_that_is_behind_follows() -> None:
    assert next_action(NOW, OwnStage(5, 10), others((A, 6, 0)), FREE)[0] == Action("follow", 6)
    assert next_action(NOW, OwnStage(5, 10), others((A, 25, 0)), FREE)[0] == Action("follow", 25)
    assert next_action(NOW, OwnStage(5, 10), others((A, 7, 0)), EXACT)[0] == Action("follow", 7)


@pytest.mark.parametrize("config", [EXACT, SYNCHRONOUS], ids=["exact", "synchronous"])
@pytest.mark.parametrize("tokens", [0, 10])
def test_a_stage_one_exact_step_behind_comes_to_that_step(config: ActionConfig, tokens: int) -> None:
    """Others may have got their average before: their owner still has it."""
    assert next_action(NOW, OwnStage(5, tokens), others((A, 6, 0)), config)[0] == Action("step together", 5)


def test_a_synchronous_stage_that_waits_behind_another_stage_takes_its_step_number_in_the_end() -> None:
    far = replace(others((A, 5, 0)), leading_step=40)
    own = OwnStage(5, 0, behind_since=NOW - RESUME_S)
    assert next_action(NOW, own, far, SYNCHRONOUS)[0] == Action("follow", 40)
    assert next_action(NOW, replace(own, behind_since=NOW - RESUME_S + 0.1), far, SYNCHRONOUS)[0] == Action("wait")
    assert next_action(NOW, replace(own, behind_since=None), far, SYNCHRONOUS)[0] == Action("wait")


@CONFIGS
def test_an_incomplete_step_waits_for_tokens(config: ActionConfig) -> None:
    action, reason = next_action(NOW, OwnStage(5, 300), others((A, 5, 600)), config)
    assert action == Action("wait") and reason == "100 tokens are missing"


def test_a_complete_step_is_taken_by_a_replica_that_has_counted_something() -> None:
    assert next_action(NOW, OwnStage(5, 300), others((A, 5, 700)), FREE)[0] == Action("step")
    assert next_action(NOW, OwnStage(5, 0), others((A, 5, 1000)), FREE)[0] == Action("wait"), "the others take it"


@pytest.mark.parametrize("config", [EXACT, SYNCHRONOUS], ids=["exact", "synchronous"])
def test_a_complete_exact_step_is_taken_together(config: ActionConfig) -> None:
    assert next_action(NOW, OwnStage(5, 300), others((A, 5, 700)), config)[0] == Action("step together", 5)
    assert next_action(NOW, OwnStage(5, 0), others((A, 5, 1000)), config)[0] == Action("step together", 5)
    last = replace(EXACT, exact_steps=6)
    assert next_action(NOW, OwnStage(5, 300), others((A, 5, 700)), last)[0] == Action("step together", 5)
    assert next_action(NOW, OwnStage(6, 300), others((A, 6, 700)), last)[0] == Action("step")


@CONFIGS
def test_a_replica_without_others_steps_alone(config: ActionConfig) -> None:
    for alone in (others(), others((A, 5, 700), heard_at=NOW - SILENT_S - 0.1, listed=())):
        assert next_action(NOW, OwnStage(5, 1000), alone, config)[0] == Action("step")


@pytest.mark.parametrize("config", [EXACT, SYNCHRONOUS], ids=["exact", "synchronous"])
def test_an_exact_step_waits_for_replicas_that_did_not_answer_until_they_are_silent(config: ActionConfig) -> None:
    heard = others((A, 5, 700), (B, 5, 100))
    failed = replace(heard, known=record_failure(record_failure(heard.known, A, NOW), B, NOW))
    own = OwnStage(5, 1000)
    action, reason = next_action(NOW + SILENT_S, own, failed, config)
    assert action == Action("wait") and reason.endswith("did not answer, and may still be alive") and A in reason
    assert next_action(NOW + SILENT_S + 0.1, own, failed, config)[0] == Action("step"), "they are gone"
    one = replace(heard, known=record_failure(heard.known, A, NOW))
    assert next_action(NOW + SILENT_S, own, one, config)[0] == Action("step together", 5), "the other can be reached"


@pytest.mark.parametrize("config", [EXACT, SYNCHRONOUS], ids=["exact", "synchronous"])
def test_an_exact_step_counts_a_replica_that_the_view_does_not_list_yet(config: ActionConfig) -> None:
    late = others((A, 5, 700), listed=())
    assert next_action(NOW, OwnStage(5, 300), late, config)[0] == Action("step together", 5)
    assert next_action(NOW, OwnStage(5, 200), late, config) == (Action("wait"), "100 tokens are missing")


def test_another_step_does_not_count_a_replica_that_the_view_does_not_list() -> None:
    late = others((A, 5, 700), listed=())
    assert next_action(NOW, OwnStage(5, 300), late, FREE) == (Action("wait"), "700 tokens are missing")
