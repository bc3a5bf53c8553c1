"""Most replicas of a stage are killed: others move there by themselves, nothing is lost, the swarm is fast again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from agora_protocol.manifest import Manifest

from agora.cli.local_swarm import LocalDaemon
from tests.process.harness import ENOUGH, Swarm, counted_twice, drained, nothing_lost, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

WELL_PLACED: Final = 0.8
"""Of the rate of the best placement: where a move would gain more than a quarter, a peer moves."""
RECOVERED: Final = 0.9
"""Of what the remaining machines can do."""
MAX_LOOKS: Final = 6
SLOWDOWN: Final = 12.0
"""So that two cores carry all daemons: their devices sleep."""


def uniform(stages: int) -> Manifest:
    """Stages of nearly the same work, and steps so long that microbatches never wait for one."""
    return tiny(stages, optimizer={"target_tokens": 2 * 32 * 1024}, schedule={"max_in_flight": 8})


def start(made: Swarm, peers: int) -> list[LocalDaemon]:
    """Starts daemons that choose their stages themselves, and waits until they serve."""
    started = [made.start(f"peer-{number}", slowdown=SLOWDOWN) for number in range(peers)]
    made.serving()
    return started


def stage_of(daemon: LocalDaemon) -> int:
    """The stage that it serves, -1 while it moves."""
    report = daemon.try_ask("report") or {}
    return report["span"][0] if report.get("state") == "serving" else -1


def holders(daemons: Sequence[LocalDaemon], stages: int) -> list[int]:
    """How many of the daemons serve each stage."""
    served = [stage_of(daemon) for daemon in daemons]
    return [served.count(stage) for stage in range(stages)]


def completed(made: Swarm, daemons: Sequence[LocalDaemon]) -> int:
    """The microbatches that the daemons have brought home."""
    return sum(made.completed(daemon) for daemon in daemons)


@dataclass(frozen=True, slots=True)
class Look:
    """What a daemon's device has done since it serves its stage, -1 for none: microbatches, and seconds of work."""

    stage: int = -1
    microbatches: int = 0
    busy_s: float = 0.0


def look(daemon: LocalDaemon) -> Look:
    report, now_unix = daemon.ask("report"), time.time()
    if "span" not in report:
        return Look()
    began_unix = daemon.events("StateChanged", state="serving")[-1]["at_unix"]
    stage = report["span"][0]
    return Look(stage, report["counted"].get(str(stage), 0), report["busy_fraction"] * (now_unix - began_unix))


def part_of_best_placement(daemons: Sequence[LocalDaemon], stages: int) -> float:
    """The rate that the devices allow where they are, as part of that with the best number of them at each stage.

    0 while one of them moves, or has worked too little. How busy this machine is changes both rates alike.
    """
    looks = [look(daemon) for daemon in daemons]
    if any(seen.stage < 0 or seen.microbatches <= 2 for seen in looks):
        return 0.0
    at_stage = [[seen for seen in looks if seen.stage == stage] for stage in range(stages)]
    service_s = [sum(s.busy_s for s in seen) / max(1, sum(s.microbatches for s in seen)) for seen in at_stage]
    if not all(at_stage):
        return 0.0
    rate = min(len(seen) / each_s for seen, each_s in zip(at_stage, service_s, strict=True))
    return rate / best_rate(service_s, len(daemons))


def part_of_possible(made: Swarm, daemons: Sequence[LocalDaemon], stages: int, microbatches: int) -> float:
    """The throughput of the next so many microbatches, as part of what these daemons can do.

    They can do what their devices would if they always computed, and if each stage had the best number of them. 0 if
    one of them has moved meanwhile.
    """
    before, begun, goal = [look(daemon) for daemon in daemons], time.monotonic(), completed(made, daemons)
    made.until(lambda: completed(made, daemons) >= goal + microbatches, f"{microbatches} more microbatches", 90.0)
    rate = (completed(made, daemons) - goal) / (time.monotonic() - begun)
    after = [look(daemon) for daemon in daemons]
    busy_s, done = [0.0] * stages, [0] * stages
    for old, new in zip(before, after, strict=True):
        if old.stage != new.stage or old.stage < 0:
            return 0.0
        busy_s[new.stage] += new.busy_s - old.busy_s
        done[new.stage] += new.microbatches - old.microbatches
    service_s = [busy / count for busy, count in zip(busy_s, done, strict=True)]
    return rate / best_rate(service_s, len(daemons))


def best_rate(service_s: Sequence[float], peers: int) -> float:
    """Microbatches per second of so many equal peers at stages that take them so many seconds, one stage each."""
    if len(service_s) == 1:
        return peers / service_s[0]
    first, *others = service_s
    return max(min(here / first, best_rate(others, peers - here)) for here in range(1, peers - len(others) + 1))


def recover(made: Swarm, daemons: Sequence[LocalDaemon], stages: int, microbatches: int) -> None:
    """Claims that in one of a few looks in a row, of so many microbatches each, the swarm is fast again."""
    parts: list[float] = []
    while not parts or parts[-1] < RECOVERED:
        made.until(lambda: -1 not in map(stage_of, daemons), "those that move to arrive")
        made.until(lambda: all(look(daemon).microbatches > 2 for daemon in daemons), "all that are left to work")
        parts.append(part_of_possible(made, daemons, stages, microbatches))
        assert len(parts) < MAX_LOOKS or parts[-1] >= RECOVERED, parts


def gone(daemons: Sequence[LocalDaemon]) -> set[str]:
    """The peers that any of the daemons has seen go."""
    return {event["peer"] for daemon in daemons for event in daemon.events("PeerGone")}


def kill_all_but_one_of_the_last_stage(made: Swarm, daemons: Sequence[LocalDaemon], stages: int) -> list[LocalDaemon]:
    """Kills all but one of its peers, waits until two serve it again, and returns the daemons that are left."""

    def held_at_rest() -> list[int]:
        """The stage of each while nobody moves and the last stage has peers enough to lose; none before."""
        held = [stage_of(daemon) for daemon in daemons]
        return held if -1 not in held and held.count(stages - 1) >= 3 else []

    made.until(lambda: completed(made, daemons) > ENOUGH, "the swarm to run")
    held = made.until(held_at_rest, "three peers of the last stage")
    victims = [daemon for daemon, stage in zip(daemons, held, strict=True) if stage == stages - 1][1:]
    left = [daemon for daemon in daemons if daemon not in victims]
    elsewhere = [daemon for daemon, stage in zip(daemons, held, strict=True) if stage != stages - 1]
    for victim in victims:
        victim.kill()
    moved = made.until(lambda: [d for d in elsewhere if stage_of(d) == stages - 1], "another peer to serve the stage")
    for daemon in moved:
        assert daemon.events("MoveChosen", first_stage=stages - 1), "it moved by its own judgement"
    made.until(lambda: holders(left, stages)[-1] >= 2, "the stage to have two peers again")
    made.until(lambda: gone(left) >= {victim.peer for victim in victims}, "all victims to be noticed")
    return left


def end(made: Swarm, daemons: Sequence[LocalDaemon]) -> None:
    """Ends the swarm, and claims that these daemons have lost no microbatch and counted none twice.

    What a killed peer had counted is lost with it, and counted again.
    """
    drained(made, *daemons)
    nothing_lost(made, *daemons)  # before the stop: a peer that moves only now opens microbatches again
    assert not counted_twice(daemons)
    made.stop()


def test_peers_move_to_a_stage_whose_replicas_were_killed_until_no_stage_holds_the_others_up(tmp_path: Path) -> None:
    with swarm(tmp_path, uniform(2)) as made:
        left = kill_all_but_one_of_the_last_stage(made, start(made, 8), 2)
        made.until(lambda: part_of_best_placement(left, 2) >= WELL_PLACED, "the peers to be where they are needed")
        goal = completed(made, left) + ENOUGH
        made.until(lambda: completed(made, left) >= goal, "the swarm to go on")
        end(made, left)


@pytest.mark.slow
def test_after_the_moves_the_swarm_has_the_throughput_of_the_machines_that_are_left(tmp_path: Path) -> None:
    with swarm(tmp_path, uniform(2)) as made:
        left = kill_all_but_one_of_the_last_stage(made, start(made, 8), 2)
        recover(made, left, 2, 250)
        end(made, left)


@pytest.mark.slow
def test_peers_of_any_stage_move_to_the_last_of_three(tmp_path: Path) -> None:
    """The first stage's peers never call those of the last: they learn of the deaths by the directory's connections."""
    with swarm(tmp_path, uniform(3)) as made:
        left = kill_all_but_one_of_the_last_stage(made, start(made, 10), 3)
        made.until(lambda: -1 not in map(stage_of, left), "those that move to arrive")
        goal = completed(made, left) + 5 * ENOUGH
        made.until(lambda: completed(made, left) >= goal, "the swarm to go on")
        end(made, left)
