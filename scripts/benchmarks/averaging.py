"""`./scripts/bench averaging`: a round of averaging beside hivemind's, and what training loses to averaging.

For each number of members both sides' groups are started, and take turns round by round; a ratio is the median
over turns of the ratios within a turn. Groups that wait for their turn are idle (0.01 cores).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.averaging_groups import NUMEL, Group, HivemindGroup, Incomplete, OurGroup, Round
from benchmarks.averaging_slowdown import measure_slowdown
from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report, paired_ratio
from benchmarks.turns import alternating, calmness
from benchmarks.window import print_progress

TRIES = 3
SIZES = (2, 4, 8)
COMPARED = 4  # the number of members with which precisions and bytes are compared
SAME_PRECISION = "float32"

TIMES: Mapping[str, tuple[str, str, str, str]] = {
    "time_vs_hivemind_2": ("agora 2", "hivemind 2", "<= 0.5", "seconds of a round of 2, each side's defaults"),
    "time_vs_hivemind_4": ("agora 4", "hivemind 4", "<= 0.4", "seconds of a round of 4, each side's defaults"),
    "time_vs_hivemind_8": ("agora 8", "hivemind 8", "<= 0.5", "seconds of a round of 8, each side's defaults"),
    "time_vs_hivemind_4_same_precision": ("agora 4 float32", "hivemind 4", "< 1", "the same, both in float32"),
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How often, and for training how long, to measure."""

    turns: int
    windows: int
    window_s: float


QUICK = Effort(turns=3, windows=2, window_s=8.0)
FULL = Effort(turns=15, windows=7, window_s=32.0)


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it cannot be measured."""
    effort = QUICK if quick else FULL
    report = Report("averaging", "Averaging: a round beside hivemind's, and what it costs training", describe())
    found: dict[str, list[Round]] = {}
    for size in SIZES:
        with ChildProcesses(folder) as nursery:
            found |= rounds_of(groups_of(size, nursery), effort.turns)
    slowdown = measure_slowdown(folder, effort.windows, effort.window_s)
    report.rows = [round_row(name, rounds) for name, rounds in found.items()] + slowdown.rows
    report.ratios = round_ratios(found) | {"training_slowdown": slowdown.ratio}
    report.notes = (
        calmness([done.others for done in rounds] for rounds in found.values()) + notes(effort) + slowdown.notes
    )
    return report


def groups_of(size: int, nursery: ChildProcesses) -> list[Group]:
    """Returns the groups that take turns; with COMPARED members, ours in hivemind's precision is one of them."""
    groups: list[Group] = [OurGroup(size, nursery), HivemindGroup(size, nursery)]
    if size == COMPARED:
        groups.append(OurGroup(size, nursery, SAME_PRECISION))
    return groups


def rounds_of(groups: Sequence[Group], turns: int) -> dict[str, list[Round]]:
    """Starts all groups, lets them take turns, and returns the rounds by group."""
    for group in groups:
        print_progress(f"starting {group.name}")
        with contextlib.suppress(Incomplete):  # this round is not counted
            group.start()
    found: dict[str, list[Round]] = {group.name: [] for group in groups}
    for turn, group in alternating(groups, turns):
        done = whole_round(group)
        found[group.name].append(done)
        print_progress(f"turn {turn} of {turns}: {group.name} {done.seconds:.2f} s, {done.megabytes:.1f} MB each")
    return found


def whole_round(group: Group) -> Round:
    """Returns the next round after which every member holds the mean, and counts the failed rounds before it."""
    for incomplete in range(TRIES):
        try:
            return replace(group.round(), incomplete=incomplete)
        except Incomplete as error:
            print_progress(f"{error}; its members are started again")
            group.start_again()
    raise BenchFailed(f"{group.name}: {TRIES} rounds in a row were not whole; run again in calm")


def round_row(name: str, rounds: Sequence[Round]) -> dict[str, Cell]:
    """Returns one line of the table for a group's rounds."""
    seconds = [done.seconds for done in rounds]
    return {
        "name": name,
        "unit": "s",
        "median": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "rounds": len(rounds),
        "mb_each": statistics.median(done.megabytes for done in rounds),
        "cpu_s": statistics.median(done.cpu_s for done in rounds),
        "error": statistics.median(done.error for done in rounds),
        "incomplete": sum(done.incomplete for done in rounds),
        "others": round(statistics.mean(done.others for done in rounds), 3),
    }


def round_ratios(found: Mapping[str, Sequence[Round]]) -> dict[str, Ratio]:
    """Returns the ratios of seconds and of bytes, by their fixed names."""

    def seconds(name: str) -> list[float]:
        return [done.seconds for done in found[name]]

    ratios = {
        name: Ratio(paired_ratio(seconds(ours), seconds(theirs)), target, meaning)
        for name, (ours, theirs, target, meaning) in TIMES.items()
    }
    ours, theirs, _, _ = TIMES["time_vs_hivemind_4"]
    sent = paired_ratio([done.megabytes for done in found[ours]], [done.megabytes for done in found[theirs]])
    ratios["bytes_vs_hivemind_4"] = Ratio(sent, "< 1", "bytes on the wire of a round of 4, each side's defaults")
    return ratios


def notes(effort: Effort) -> list[str]:
    """Returns what makes the comparison fair, for the published page."""
    return [
        f"A round: every member has {NUMEL / 1e6:.0f} M float32 values of its own, and ends with their mean. Each is a "
        "process with its own libp2p host on loopback, numeric libraries at one thread; a round lasts from the first "
        "member's begin to the last one's end, on the machine's monotonic clock.",
        "`agora N`: agora.replica over agora.net with a manifest's defaults, the slice being the whole vector: int8 "
        "on the wire, reducers by rendezvous, members known beforehand, as replicas are.",
        "`hivemind N`: DecentralizedAverager with its defaults, float32 on the wire, matchmaking in every round as it "
        "has no other way; only the group's size is told. Its 16-bit and 8-bit compressions leave values unaveraged "
        "with this torch, so they cannot be compared.",
        f"All groups of one size take turns, {effort.turns} each, after a round that is not counted. mb_each: bytes on "
        "the loopback interface with all headers, divided by the members. cpu_s: processor time of all members in one "
        "round. error: root mean square distance to the true mean, where members lie 1 apart and values are 4 times "
        "as large; incomplete: rounds, not counted, after which a member held something else; others: what the rest of "
        "the machine used, in cores.",
    ]
