"""What an offence costs, when it heals, and who is suspended: decided without a clock or a network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.swarm.peer_score import PENALTIES, Consequence, PeerScore, Penalty, Violation
from agora.swarm.violations import ViolationLog

ONE, OTHER = (Identity(bytes([seed]) * 32).peer for seed in (1, 2))


def test_every_offence_has_a_penalty() -> None:
    assert set(PENALTIES) == set(Violation)


@pytest.mark.parametrize("offence", Violation)
def test_the_third_offence_within_ten_minutes_suspends_a_peer_for_five_minutes_and_nobody_else(
    offence: Violation,
) -> None:
    conduct = PeerScore()
    first, second, third = (conduct.record(ONE, offence, now) for now in (0.0, 300.0, 600.0))
    assert (first.suspended_s, second.suspended_s, third.suspended_s) == (0.0, 0.0, 300.0)
    assert third == Consequence(300.0, "3 of 3 points; suspended for 300 s")
    assert [conduct.suspended_s(ONE, now) for now in (750.0, 899.0, 900.0)] == [150.0, 1.0, 0.0]
    assert conduct.suspended_s(OTHER, 600.0) == 0.0


def test_offences_of_all_kinds_share_one_sum() -> None:
    conduct = PeerScore()
    kinds = (Violation.BAD_FRAME, Violation.USELESS_GRADIENT, Violation.FALSE_STATE)
    assert [conduct.record(ONE, kind, 1.0).suspended_s for kind in kinds] == [0.0, 0.0, 300.0]


def test_an_offence_heals_after_ten_minutes() -> None:
    conduct = PeerScore()
    consequences = [conduct.record(ONE, Violation.BAD_FRAME, now) for now in (0.0, 350.0, 700.0, 960.0)]
    assert [consequence.suspended_s for consequence in consequences] == [0.0, 0.0, 0.0, 0.0]
    assert [consequence.reason[:11] for consequence in consequences] == [f"{n} of 3 poin" for n in (1, 2, 2, 2)]


def test_an_offence_while_suspended_begins_the_time_again() -> None:
    conduct = PeerScore()
    for now in (0.0, 1.0, 2.0, 200.0):
        conduct.record(ONE, Violation.BAD_FRAME, now)
    assert conduct.suspended_s(ONE, 200.0) == 300.0


def test_a_grave_offence_may_suspend_at_once() -> None:
    conduct = PeerScore({Violation.FALSE_STATE: Penalty(points=3, suspension_s=3600.0)})
    assert conduct.record(ONE, Violation.FALSE_STATE, 0.0).suspended_s == 3600.0


def test_offences_of_one_occasion_count_once() -> None:
    conduct = PeerScore()
    rounds = ["round 1", "round 1", "round 1", "round 2", "round 2", "round 3"]
    counted = [conduct.record(ONE, Violation.BAD_AVERAGE, 0.0, occasion) is not None for occasion in rounds]
    assert counted == [True, False, False, True, False, True]
    assert conduct.suspended_s(ONE, 0.0) == 300.0
    assert conduct.record(OTHER, Violation.BAD_AVERAGE, 0.0, "round 3"), "an occasion is one peer's"


def test_offences_of_two_occasions_at_once_count_once_each_whatever_their_order() -> None:
    conduct = PeerScore()
    rounds = ["stage 1", "stage 2"] * 4
    counted = [conduct.record(ONE, Violation.BAD_AVERAGE, 0.0, occasion) is not None for occasion in rounds]
    assert counted == [True, True] + 6 * [False] and conduct.suspended_s(ONE, 0.0) == 0.0
    assert conduct.record(ONE, Violation.IMPLAUSIBLE_STEP, 0.0, "stage 1"), "an occasion is of one kind of offence"


def test_an_occasion_is_forgotten_when_its_points_expire() -> None:
    conduct = PeerScore()
    times = (0.0, 600.0, 601.0)
    counted = [conduct.record(ONE, Violation.BAD_AVERAGE, now, "round 1") is not None for now in times]
    assert counted == [True, False, True]


def test_the_memory_of_offenders_is_bounded_and_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agora.swarm.peer_score.MAX_PEERS", 10)
    conduct = PeerScore()
    strangers = [PeerId(f"stranger {number}") for number in range(30)]
    for stranger in strangers:
        for _ in range(3):
            conduct.record(stranger, Violation.BAD_FRAME, 0.0)
    assert [conduct.suspended_s(stranger, 0.0) for stranger in strangers] == [0.0] * 20 + [300.0] * 10


def test_each_counted_offence_is_reported_as_one_event() -> None:
    events: list[Any] = []

    async def main() -> None:
        log = ViolationLog(events.append)
        log.report_protocol_error(ONE, ProtocolError("bad-frame", "a wrong magic"))
        for _ in range(2):
            log.report_violation(ONE, Violation.BAD_AVERAGE, "a part twice", "round 1")
        assert log.suspended_s(ONE) == 0.0
        log.report_violation(ONE, Violation.USELESS_GRADIENT, "infinite")
        assert 299.0 < log.suspended_s(ONE) <= 300.0
        assert log.suspended_s(OTHER) == 0.0

    asyncio.run(main())
    assert [(e.peer, e.offence, e.text, round(e.suspended_s)) for e in events] == [
        (ONE, "bad-frame", "bad-frame: a wrong magic", 0),
        (ONE, "bad-average", "a part twice", 0),
        (ONE, "useless-gradient", "infinite", 300),
    ]
