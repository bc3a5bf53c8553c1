"""Claims about the journal: whole after a SIGKILL, bounded, readable while it is written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agora.observe import events, journal

WRITER = """
import os, signal, sys
from pathlib import Path
from agora.observe import events
from agora.observe.journal import Journal
from agora.observe.reporter import Reporter
reporter = Reporter([Journal(Path(sys.argv[1]))])
for number in range(1000):
    reporter.report(events.MicrobatchStarted(f"{number:032x}"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_reported_before_a_sigkill_is_in_the_journal(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    names = [fields["microbatch"] for fields in journal.JournalTail(tmp_path).read_new()]
    assert names == [f"{number:032x}" for number in range(1000)]


def test_the_journal_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    sink = journal.Journal(tmp_path, max_file_bytes=2000)
    for number in range(500):
        sink.take(events.PeerGone(str(number), "left"), 1.0)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 3 and max(sizes) <= 2000
    kept = [int(fields["peer"]) for fields in journal.JournalTail(tmp_path).read_new()]
    assert kept == list(range(kept[0], 500)) and len(kept) > 40


def test_a_follower_misses_nothing_through_rotations(tmp_path: Path) -> None:
    sink = journal.Journal(tmp_path, max_file_bytes=700)
    tail = journal.JournalTail(tmp_path)
    seen: list[int] = []
    for number in range(200):
        sink.take(events.PeerGone(str(number), "left"), 1.0)
        if number % 7 == 0:
            seen += [int(fields["peer"]) for fields in tail.read_new()]
    seen += [int(fields["peer"]) for fields in tail.read_new()]
    assert seen == list(range(200))
    assert tail.read_new() == []


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    whole = journal.encode(events.PeerGone("p", "left"), 1.0)
    (tmp_path / journal.FILE_NAME).write_bytes(b"no json\n[1]\n" + whole + whole[:20])
    assert [fields["peer"] for fields in journal.JournalTail(tmp_path).read_new()] == ["p"]
    tail = journal.JournalTail(tmp_path)
    assert len(tail.read_new()) == 1
    with (tmp_path / journal.FILE_NAME).open("ab") as file:
        file.write(whole[20:])
    assert [fields["peer"] for fields in tail.read_new()] == ["p"]


def test_numbers_that_json_lacks_become_null() -> None:
    line = journal.encode(events.StepTaken(0, 1, 8, float("nan"), float("inf")), 1.0)
    assert b'"loss":null' in line and b'"seconds":null' in line and b"NaN" not in line
    done = journal.encode(events.EvaluationDone(2.0, 8, 0.5, metrics=(float("nan"), 0.5, float("-inf"))), 1.0)
    assert json.loads(done)["metrics"] == [None, 0.5, None] and b"NaN" not in done and b"Infinity" not in done


LIMITED = """
import sys
from pathlib import Path
from agora.observe import events
from agora.observe.journal import Journal
from agora.observe.log import EventLog
from agora.observe.reporter import Reporter
reporter = Reporter([Journal(Path(sys.argv[1])), EventLog(sys.stdout)])
for number in range(200):
    reporter.report(events.PeerGone(str(number), "left"))
print("alive", reporter.counters.occurred['PeerGone'])
"""


def test_a_full_disk_costs_the_journal_and_one_sentence_not_the_daemon(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "cannot write" in line]
    assert len(told) == 1 and "free some space" in told[0]
    assert "alive" in done.stdout


def test_the_journal_is_private(tmp_path: Path) -> None:
    journal.Journal(tmp_path)
    assert (tmp_path / journal.FILE_NAME).stat().st_mode & 0o077 == 0


def test_an_unwritable_directory_is_an_oserror_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        journal.Journal(tmp_path / "missing")
    assert not os.listdir(tmp_path)
