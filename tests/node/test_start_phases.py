"""The phases of a start: what the status shows while one runs in another."""

from __future__ import annotations

import pytest

from agora.node.daemon_context import StartPhases, SystemdNotifier
from agora.observe import events


def make_phases() -> tuple[StartPhases, list[events.Event]]:
    reported: list[events.Event] = []
    return StartPhases(reported.append, SystemdNotifier({})), reported


def test_a_phase_within_a_phase_leaves_the_outer_one_running() -> None:
    phases, reported = make_phases()
    with phases.enter("directory"):
        with phases.enter("clock"):
            assert phases.current == "clock"
        assert phases.current == "directory"
    assert phases.current == ""
    assert [event.name for event in reported if isinstance(event, events.StartStep)] == ["clock", "directory"]


def test_the_phase_that_failed_stays_named() -> None:
    phases, reported = make_phases()
    with pytest.raises(ValueError, match="no time"), phases.enter("directory"), phases.enter("clock"):
        raise ValueError("no time")
    assert phases.current == "clock" and not reported
