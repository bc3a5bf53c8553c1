"""How much of the code a reader passes on three journeys: a microbatch, an averaging round, and a join.

Real daemons make the journeys, each a process of its own over libp2p on loopback, while `call_recorder` notes every
named function of `agora` and `agora_protocol` that runs. Counted is, for each journey, how many different functions run
and in how many files they lie; each function once, however often it runs, helpers and reported events included.

| journey    | from                                    | to                            | where                      |
|------------|-----------------------------------------|-------------------------------|----------------------------|
| microbatch | the answer to the one before            | its own answer, its gradient  | both peers of two stages   |
|            |                                         | added in both stages          |                            |
| round      | the last microbatch of a step was       | the step with the mean        | both replicas of one stage |
|            | counted                                 | gradient was taken            |                            |
| join       | the start of `agora-node join INVITE`   | the first microbatch drawn    | the joiner, which fetches  |
|            |                                         |                               | the stage's state          |

A daemon does other things meanwhile (pings, records, gossip). A microbatch and a round are therefore cut out of the
recording many times, and a function counts if it ran in at least 9 of 10 of them. A join happens once per process, so
it counts all that runs, on any thread.

Most of these are helpers that a reader need not open to follow the journey. The columns "on the way" count only the
functions that, on the journey, call one of another file: this chain is what has to be held in the head.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import agora_protocol
from agora_protocol.manifest import Manifest

import agora
from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from benchmarks import machine
from benchmarks.report import Report

SHARE_OF_TIMES: Final = 0.9  # of the times that a journey was made: a function that ran in fewer is not part of it
NS: Final = 1_000_000_000
ROOTS: Final = tuple(str(Path(str(package.__file__)).parent) for package in (agora, agora_protocol))
MODEL: Final = {"width": 64, "layers": 2, "heads": 4, "key_value_heads": 2, "feed_forward": 96, "context": 32}
ROWS: Final = 2

Window = tuple[int, int]  # nanoseconds of Unix time: begin and end, both included


@dataclass(frozen=True)
class Recording:
    """What one daemon's recorder wrote, and its journal."""

    functions: Sequence[tuple[str, int, str]]
    calls: Sequence[tuple[int, int, int]]
    events: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, out: Path, daemon: LocalDaemon) -> Recording:
        """Reads the recording of a daemon that has ended. Raises OSError if it wrote none."""
        value = json.loads(out.read_text(encoding="utf-8"))
        functions = [(str(path), int(line), str(name)) for path, line, name in value["functions"]]
        return cls(functions, [tuple(call) for call in value["calls"]], daemon.events())

    def times(self, kind: str, **fields: Any) -> list[int]:
        """When events of this kind, and with these fields, were reported, in nanoseconds of Unix time."""
        return [
            round(float(event["at_unix"]) * NS)
            for event in self.events
            if event["event"] == kind and all(event.get(name) == value for name, value in fields.items())
        ]


@dataclass
class Passage:
    """The functions that ran on one journey, by file and name, and those among them that call into another file."""

    ran: set[tuple[str, str]] = field(default_factory=set)
    on_the_way: set[tuple[str, str]] = field(default_factory=set)

    def add(self, recording: Recording, window: Window, without: str = "no file") -> None:
        """Adds what ran in one process within a window, but for files whose path begins with `without`."""
        for at, number, caller in recording.calls:
            if not window[0] <= at <= window[1]:
                continue
            path, _, name = recording.functions[number]
            if path.startswith(without):
                continue
            self.ran.add((path, name))
            if caller >= 0 and recording.functions[caller][0] != path:
                calling = recording.functions[caller]
                self.on_the_way.add((calling[0], calling[2]))


def usual(passages: Iterable[Passage]) -> Passage:
    """The functions that ran in at least SHARE_OF_TIMES of the passages."""
    every = list(passages)
    enough = SHARE_OF_TIMES * len(every)
    ran = Counter(function for passage in every for function in passage.ran)
    called = {function for passage in every for function in passage.on_the_way}
    kept = {function for function, times in ran.items() if times >= enough}
    return Passage(kept, kept & called)


def record(
    folder: Path, manifest: Manifest, names: Sequence[str], is_over: Callable[[LocalSwarm], bool]
) -> list[Recording]:
    """Runs one recorded daemon of each name until `is_over`, then stops them; returns their recordings in order."""
    folder.mkdir()
    swarm = LocalSwarm(
        folder, manifest.to_toml(), corpus=folder.parent / "corpus", launch=launch, flags=["--allow-files"]
    )
    try:
        for name in names:
            swarm.start(name)
        swarm.until(partial(is_over, swarm), "its journeys", 180.0)
        swarm.stop(within_s=60.0)  # the recordings are written at the end
    finally:
        swarm.kill_all()
    return [Recording.read(folder / name / "calls.json", swarm.daemons[name]) for name in names]


def launch(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `agora-node` under the recorder, which writes beside the daemon's log."""
    recorder = Path(__file__).with_name("call_recorder.py")
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(recorder), str(log.with_name("calls.json")), *ROOTS, "--", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def small_run(stages: int, microbatches: int, schedule: str) -> Manifest:
    """A run of a tiny model whose step takes so many microbatches."""
    return Manifest.from_values(
        {
            "name": f"journeys-{stages}",
            "model": MODEL,
            "stages": {"count": stages},
            "schedule": {"kind": schedule, "microbatch": ROWS, **({"max_in_flight": 1} if stages > 1 else {})},
            "optimizer": {"target_tokens": microbatches * ROWS * int(MODEL["context"]), "total_steps": 10_000},
        },
        "journeys",
    )


def microbatch_journey(folder: Path, times: int) -> Passage:
    """Two stages, one microbatch in flight, so that each lies between two completions; few of them see a step."""

    def is_over(swarm: LocalSwarm) -> bool:
        done = sum(len(daemon.events("MicrobatchCompleted", purpose="train")) for daemon in swarm.daemons.values())
        return done >= 3 * times

    peers = record(folder, small_run(2, 32, "asynchronous"), ["first", "second"], is_over)
    windows = [window for peer in peers for window in pairwise(peer.times("MicrobatchCompleted", purpose="train"))]
    return usual(passage_of(peers, window) for window in windows[-times:])


def round_journey(folder: Path, times: int) -> Passage:
    """One stage, two replicas, `synchronous`: no microbatch is under way while the round is.

    But for the answer to the last one, which goes home through the pipeline meanwhile; a round has no business there.
    """

    def is_over(swarm: LocalSwarm) -> bool:
        daemons = swarm.daemons.values()
        return len(daemons) == 2 and all(len(daemon.events("RoundDone")) >= times + 5 for daemon in daemons)

    peers = record(folder, small_run(1, 8, "synchronous"), ["founder", "replica"], is_over)
    steps = set.intersection(*({int(e["step"]) for e in peer.events if e["event"] == "StepTaken"} for peer in peers))
    passages = []
    for windows in filter(None, (round_windows(peers, step) for step in sorted(steps))):
        passage = Passage()
        for peer, window in zip(peers, windows, strict=True):
            passage.add(peer, window, without="agora/pipeline/")
        passages.append(passage)
    return usual(passages[-times:])


def round_windows(peers: Sequence[Recording], step: int) -> list[Window]:
    """Of each replica: from the last microbatch that any of them counted for the step, to its own step.

    Empty unless both stepped with a mean gradient.
    """
    taken = [peer.times("StepTaken", step=step) for peer in peers]
    if not all(taken) or not all(peer.times("RoundDone", round=step - 1) for peer in peers):
        return []
    counted = [
        at for peer, times in zip(peers, taken, strict=True) for at in peer.times("MicrobatchCounted") if at < times[0]
    ]
    return [(max(counted), times[0]) for times in taken] if counted else []


def join_journey(folder: Path) -> Passage:
    """A replica joins a run of one stage that has taken steps, fetches the state and draws its first microbatch."""

    def is_over(swarm: LocalSwarm) -> bool:
        daemons = swarm.daemons.values()
        return len(daemons) == 2 and all(daemon.events("MicrobatchStarted") for daemon in daemons)

    _, joiner = record(folder, small_run(1, 8, "asynchronous"), ["founder", "joiner"], is_over)
    return passage_of([joiner], (0, joiner.times("MicrobatchStarted")[0]))


def passage_of(peers: Sequence[Recording], window: Window) -> Passage:
    """What ran in all these processes within a window."""
    passage = Passage()
    for peer in peers:
        passage.add(peer, window)
    return passage


def run(quick: bool, folder: Path) -> Report:
    """Makes the three journeys and counts. quick: each is cut out fewer times."""
    times = 20 if quick else 60
    passages = {
        "microbatch": microbatch_journey(folder / "microbatch", times),
        "round": round_journey(folder / "round", times // 2),
        "join": join_journey(folder / "join"),
    }
    report = Report("journeys", "Journeys: what a reader passes", machine.describe())
    for name, passage in passages.items():
        report.rows.append(
            {
                "journey": name,
                "files": len({path for path, _ in passage.ran}),
                "functions": len(passage.ran),
                "files on the way": len({path for path, _ in passage.on_the_way}),
                "functions on the way": len(passage.on_the_way),
            }
        )
    report.notes += [f"{name}: {listing(passage)}" for name, passage in passages.items()]
    return report


def listing(passage: Passage) -> str:
    """The files on the way, each with how many of its functions lie on it."""
    counts = Counter(path for path, _ in passage.on_the_way)
    return "files on the way: " + ", ".join(f"`{path}` {counts[path]}" for path in sorted(counts))
