"""What a violation costs, when it heals, and who is suspended: decided without a clock or a network."""

from __future__ import annotations

import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.observe.events import Event, OffenceRecorded
from agora.swarm.peer_score import SUSPENSION_S, PeerScore, Violation

ONE, OTHER = (Identity(bytes([seed]) * 32).peer for seed in (1, 2))


class Scene:
    """A PeerScore with a clock that is set by hand."""

    def __init__(self, suspension_s: float = SUSPENSION_S) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.score = PeerScore(self.events.append, lambda: self.now, suspension_s)

    def record(self, peer: PeerId, violation: Violation, now: float, dedup_key: str = "") -> OffenceRecorded | None:
        """Reports a violation at `now`; returns the event, None if it was not counted."""
        self.now = now
        before = len(self.events)
        self.score.report_violation(peer, violation, "wrong", dedup_key)
        if len(self.events) == before:
            return None
        event = self.events[-1]
        assert isinstance(event, OffenceRecorded) and len(self.events) == before + 1
        assert (event.peer, event.offence, event.text) == (peer, violation.value, "wrong")
        return event

    def suspended_s(self, peer: PeerId, now: float) -> float:
        self.now = now
        return self.score.suspended_s(peer)


@pytest.mark.parametrize("violation", [one for one in Violation if one is not Violation.EQUIVOCATION])
def test_the_third_violation_within_ten_minutes_suspends_a_peer_for_five_minutes_and_nobody_else(
    violation: Violation,
) -> None:
    scene = Scene()
    found = [scene.record(ONE, violation, now) for now in (0.0, 300.0, 600.0)]
    assert [event and event.suspended_s for event in found] == [0.0, 0.0, 300.0]
    assert found[-1] is not None and found[-1].follows == "3 of 3 points; suspended for 300 s"
    assert [scene.suspended_s(ONE, now) for now in (750.0, 899.0, 900.0)] == [150.0, 1.0, 0.0]
    assert scene.suspended_s(OTHER, 600.0) == 0.0


def test_two_signed_means_of_one_shard_suspend_at_once() -> None:
    scene = Scene()
    event = scene.record(ONE, Violation.EQUIVOCATION, 0.0)
    assert event is not None and event.suspended_s == 300.0
    assert scene.suspended_s(OTHER, 0.0) == 0.0


def test_violations_of_all_kinds_share_one_sum() -> None:
    scene = Scene()
    kinds = (Violation.BAD_FRAME, Violation.USELESS_GRADIENT, Violation.FALSE_STATE)
    found = [scene.record(ONE, kind, 1.0) for kind in kinds]
    assert [event and event.suspended_s for event in found] == [0.0, 0.0, 300.0]


def test_a_violation_heals_after_ten_minutes() -> None:
    scene = Scene()
    found = [scene.record(ONE, Violation.BAD_FRAME, now) for now in (0.0, 350.0, 700.0, 960.0)]
    assert [event and event.suspended_s for event in found] == [0.0, 0.0, 0.0, 0.0]
    follows = [event.follows for event in found if event]
    assert follows == [f"{n} of 3 points; they expire after 600 s" for n in (1, 2, 2, 2)]


def test_a_violation_while_suspended_begins_the_time_again() -> None:
    scene = Scene()
    for now in (0.0, 1.0, 2.0, 200.0):
        scene.record(ONE, Violation.BAD_FRAME, now)
    assert scene.suspended_s(ONE, 200.0) == 300.0


def test_violations_in_one_round_count_once() -> None:
    scene = Scene()
    rounds = ["round 1", "round 1", "round 1", "round 2", "round 2", "round 3"]
    counted = [scene.record(ONE, Violation.BAD_AVERAGE, 0.0, key) is not None for key in rounds]
    assert counted == [True, False, False, True, False, True]
    assert scene.suspended_s(ONE, 0.0) == 300.0
    assert scene.record(OTHER, Violation.BAD_AVERAGE, 0.0, "round 3"), "a key is one peer's"


def test_violations_in_two_rounds_at_once_count_once_each_whatever_their_order() -> None:
    scene = Scene()
    rounds = ["stage 1", "stage 2"] * 4
    counted = [scene.record(ONE, Violation.BAD_AVERAGE, 0.0, key) is not None for key in rounds]
    assert counted == [True, True] + 6 * [False] and scene.suspended_s(ONE, 0.0) == 0.0
    assert scene.record(ONE, Violation.IMPLAUSIBLE_STEP, 0.0, "stage 1"), "a key is of one kind of violation"


def test_a_dedup_key_is_forgotten_when_its_point_expires() -> None:
    scene = Scene()
    times = (0.0, 600.0, 601.0)
    counted = [scene.record(ONE, Violation.BAD_AVERAGE, now, "round 1") is not None for now in times]
    assert counted == [True, False, True]


def test_the_memory_of_violators_is_bounded_and_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agora.swarm.peer_score.MAX_PEERS", 10)
    scene = Scene()
    strangers = [PeerId(f"stranger {number}") for number in range(30)]
    for stranger in strangers:
        for _ in range(3):
            scene.record(stranger, Violation.BAD_FRAME, 0.0)
    assert [scene.suspended_s(stranger, 0.0) for stranger in strangers] == [0.0] * 20 + [300.0] * 10


def test_a_forbidden_frame_is_reported_with_the_code_of_its_error() -> None:
    scene = Scene()
    scene.score.report_protocol_error(ONE, ProtocolError("bad-frame", "a wrong magic"))
    assert scene.events == [
        OffenceRecorded(ONE, "bad-frame", "bad-frame: a wrong magic", "1 of 3 points; they expire after 600 s", 0.0)
    ]


def test_how_long_a_peer_is_suspended_is_an_argument() -> None:
    scene = Scene(suspension_s=3600.0)
    for _ in range(3):
        scene.record(ONE, Violation.FALSE_STATE, 0.0)
    assert scene.suspended_s(ONE, 0.0) == 3600.0
