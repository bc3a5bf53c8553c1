"""Children of a benchmark: they answer within their deadline or the benchmark fails, and none outlives it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.children import BenchFailed, Child, ChildProcesses, end_children

pytestmark = pytest.mark.process

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
MUTE = "import sys, time\nprint('to the log', file=sys.stderr, flush=True)\ntime.sleep(600)"
DYING = "import sys\nprint('the reason', file=sys.stderr)\nsys.exit(3)"
FORKING = (
    "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\npid = os.fork()\n"
    "if pid: print('{\"pid\": %d}' % pid, flush=True)\ntime.sleep(600)"
)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.close()


def start(children: list[Child], tmp_path: Path, program: str) -> Child:
    child = Child("the part", [sys.executable, "-c", program], tmp_path / "log", {})
    children.append(child)
    return child


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_questions_are_answered(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path, ECHO)
    assert child.ask({"a": 1}, 10) == {"a": 1}
    child.tell({"b": 2})
    child.tell({"c": 3})
    assert [child.hear(10), child.hear(10)] == [{"b": 2}, {"c": 3}]
    child.close()
    assert gone(child.pid)


def test_silence_has_a_deadline_and_shows_the_log(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path, MUTE)
    deadline = time.monotonic() + 30
    while not (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(BenchFailed, match=r"the part did not answer within 0 s(.|\n)*to the log"):
        child.hear(0.05)


def test_a_death_is_told_at_once_with_its_reason(children: list[Child], tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match=r"the part ended by itself(.|\n)*the reason"):
        start(children, tmp_path, DYING).hear(30)


def test_many_stubborn_children_end_together(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.children.STOP_S", 0.5)
    stubborn = [start(children, tmp_path, FORKING) for _ in range(4)]
    for child in stubborn:
        child.hear(30)
    end_children(stubborn)
    assert all(gone(child.pid) for child in stubborn)


def test_what_a_child_forked_ends_with_it(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.children.STOP_S", 0.1)
    child = start(children, tmp_path, FORKING)
    grandchild = child.hear(30)["pid"]
    child.close()
    deadline = time.monotonic() + 10
    while not gone(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(grandchild) and gone(child.pid)


def test_a_nursery_ends_everything_also_when_the_bench_fails(tmp_path: Path) -> None:
    ended: list[str] = []
    with pytest.raises(BenchFailed), ChildProcesses(tmp_path) as nursery:
        nursery.adopt(lambda: ended.append("told"), lambda: ended.append("ended"))
        nursery.start("nonsense", "no-such-role", {}).hear(60)
    assert ended == ["told", "ended"]
    assert "usage: python -m benchmarks.worker" in (tmp_path / "nonsense.log").read_text()
