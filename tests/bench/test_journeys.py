"""`./scripts/bench journeys`: what the recorder counts, and how a journey is cut out of a recording."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.journeys import Passage, Recording, round_windows, usual

RECORDER = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "call_recorder.py"
PRODUCT = """
from dataclasses import dataclass
from agora.other import helper, setting

@dataclass
class Point:
    x: int

def work():
    return helper(list(map(lambda x: x, [n for n in range(3)])))

def unused():
    pass

def main():
    Point(1)
    work()
    work()

LIMIT = setting()
"""
OTHER = """
def helper(values):
    return sorted(values, key=key)

def key(value):
    return value

def setting():
    return 1
"""


def test_the_recorder_notes_named_functions_and_who_called_them(tmp_path: Path) -> None:
    for name, text in (("__init__", ""), ("cli/__init__", ""), ("cli/main_node", PRODUCT), ("other", OTHER)):
        file = tmp_path / "agora" / f"{name}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(text)
    out = tmp_path / "calls.json"
    done = subprocess.run(
        [sys.executable, str(RECORDER), str(out), str(tmp_path / "agora"), "--", "join"],
        env={"PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 0
    recorded = json.loads(out.read_text())
    functions = [(path, name) for path, _, name in recorded["functions"]]
    main, other = "agora/cli/main_node.py", "agora/other.py"
    calls = [(functions[number], functions[caller] if caller >= 0 else None) for _, number, caller in recorded["calls"]]
    assert calls[:4] == [
        ((main, "main"), None),
        ((main, "work"), (main, "main")),
        ((other, "helper"), (main, "work")),
        ((other, "key"), (other, "helper")),
    ], "neither lambdas, nor generated methods, nor what an import runs"
    assert {function for function, _ in calls} == {function for function, _ in calls[:4]}


def recording(calls: list[tuple[int, int, int]], *events: dict[str, object]) -> Recording:
    return Recording([("a.py", 1, "a"), ("b.py", 1, "b"), ("b.py", 9, "b2")], calls, list(events))


def test_only_a_call_into_another_file_lies_on_the_way() -> None:
    passage = Passage()
    passage.add(recording([(10, 0, -1), (20, 1, 0), (30, 2, 1), (99, 2, 0)]), (5, 40))
    assert passage.ran == {("a.py", "a"), ("b.py", "b"), ("b.py", "b2")}
    assert passage.on_the_way == {("a.py", "a")}


def test_what_runs_seldom_is_no_part_of_the_journey() -> None:
    always, once = ("a.py", "a"), ("b.py", "b")
    passages = [Passage({always}, {always}) for _ in range(9)] + [Passage({always, once}, {always, once})]
    assert usual(passages) == Passage({always}, {always})


def test_a_round_lies_between_the_last_count_of_a_step_and_each_own_step() -> None:
    def replica(counted_at: float, stepped_at: float) -> Recording:
        return recording(
            [],
            {"event": "MicrobatchCounted", "at_unix": counted_at},
            {"event": "RoundDone", "round": 0, "at_unix": stepped_at},
            {"event": "StepTaken", "step": 1, "at_unix": stepped_at},
            {"event": "MicrobatchCounted", "at_unix": stepped_at + 1},
        )

    peers = [replica(1.0, 3.0), replica(2.0, 4.0)]
    assert round_windows(peers, 1) == [(2 * 10**9, 3 * 10**9), (2 * 10**9, 4 * 10**9)]
    assert round_windows(peers, 2) == []
