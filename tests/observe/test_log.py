"""Claims about the log: sentences for people, JSON under systemd, quiet when all is well."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from agora.observe import events
from agora.observe.log import EventLog, is_journald_stream


def test_a_healthy_daemon_says_nothing_about_its_work() -> None:
    stream = io.StringIO()
    log = EventLog(stream)
    for number in range(100):
        log.take(events.MicrobatchStarted(f"{number}"), number)
        log.take(events.MicrobatchCompleted(f"{number}", 1.0, 8, 0.1), number)
        log.take(events.StepTaken(0, number, 8, 1.0, 0.1), number)
    assert stream.getvalue() == ""


def test_equal_warnings_are_told_once_with_their_number() -> None:
    stream = io.StringIO()
    log = EventLog(stream)
    for number in range(50):
        log.take(events.OffenceRecorded("p", "bad-frame", "a wrong magic"), 100.0 + number / 10)
    log.take(events.OffenceRecorded("p", "bad-frame", "a wrong magic"), 111.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].endswith("warning offence of p: bad-frame, a wrong magic")
    assert lines[1].endswith("(50 times)")


def test_a_clock_that_is_set_back_silences_no_warning() -> None:
    stream = io.StringIO()
    log = EventLog(stream)
    for at_unix in (5000.0, 1400.0, 1401.0):
        log.take(events.OffenceRecorded("p", "bad-frame", "a wrong magic"), at_unix)
    assert len(stream.getvalue().splitlines()) == 2


def test_journald_gets_a_priority_and_the_journals_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        log = EventLog(stream)
        log.take(events.MicrobatchStarted("quiet"), 12.0)
        log.take(events.OffenceRecorded("p", "bad-frame", "why", "1 of 3 points", 0.0), 12.5)
    priority, _, rest = (tmp_path / "stream").read_text().partition(">")
    assert priority == "<4"
    assert json.loads(rest) == {"at_unix": 12.5, "event": "OffenceRecorded"} | {
        "peer": "p",
        "offence": "bad-frame",
        "text": "why",
        "follows": "1 of 3 points",
        "suspended_s": 0.0,
    }


def test_journald_is_recognised_by_the_streams_own_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journald_stream(stream)
        monkeypatch.setenv("JOURNAL_STREAM", "1:2")
        assert not is_journald_stream(stream)
    assert not is_journald_stream(io.StringIO())
