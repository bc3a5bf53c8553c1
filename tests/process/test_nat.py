"""Daemons behind NATs of every kind train together: directly, through punched holes, through relays that may die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agora.cli.local_swarm import LocalDaemon, LocalSwarm, SwarmFailed
from tests.process.harness import last_step, tiny
from tests.process.nat_lab import FULL_CONE, RESTRICTED, SYMMETRIC, NatLab, can_make_nats

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_make_nats(), reason="needs root and the commands ip and nft, to make NATs"),
]

LONG = {"target_tokens": 2048, "total_steps": 10**6}


@pytest.fixture
def lab() -> Iterator[NatLab]:
    with NatLab() as made:
        yield made


def start(lab: NatLab, swarm: LocalSwarm, name: str, stage: str, kind: str = "") -> LocalDaemon:
    """Starts a daemon on a new machine: behind a NAT of that kind, or public without one."""
    if kind:
        lab.add_behind(name, kind)
    else:
        lab.add_public(name)
    return swarm.start(name, flags=["--stages", stage], environment={"AGORA_SLOWDOWN": "4"})


def rows(daemon: LocalDaemon) -> dict[str, dict[str, str]]:
    """The peers in the daemon's status, by id; {} when it does not answer."""
    answer = daemon.try_ask("status")
    return {row["peer"]: row for row in answer["peers"]} if answer is not None else {}


def path(daemon: LocalDaemon, other: LocalDaemon) -> str:
    """How one daemon reaches another, "" when it does not see it."""
    return rows(daemon).get(other.peer, {}).get("path", "")


def until_paths(swarm: LocalSwarm, expected: list[tuple[LocalDaemon, LocalDaemon, str]]) -> None:
    """Waits until the first of each pair reaches the second as it should; a failure shows how it does."""
    try:
        swarm.until(lambda: all(path(a, b) == wanted for a, b, wanted in expected), "the paths", 120)
    except SwarmFailed as error:
        found = [f"{a.name} to {b.name}: {path(a, b)}, not {wanted}" for a, b, wanted in expected]
        raise AssertionError(f"{error}; {'; '.join(found)}") from error


def reachability(daemon: LocalDaemon, other: LocalDaemon) -> str:
    """What another daemon's claim says of its reachability, as one sees it."""
    return rows(daemon).get(other.peer, {}).get("reachability", "")


def relays(daemon: LocalDaemon) -> set[str]:
    """The peers through which the daemon's own claim says that it is reached."""
    return set((daemon.try_ask("report") or {"relays": ()})["relays"])


def dropped(swarm: LocalSwarm) -> int:
    return sum(len(daemon.events("MicrobatchDropped")) for daemon in swarm.daemons.values())


def completed(daemon: LocalDaemon) -> int:
    return len(daemon.events("MicrobatchCompleted"))


def test_one_public_peer_and_four_behind_nats_train_together(tmp_path: Path, lab: NatLab) -> None:
    """Pairs of all kinds exchange boundaries; holes are punched where that can be, nothing is dropped."""
    manifest = tiny(2, optimizer=LONG)
    swarm = LocalSwarm(tmp_path, manifest.to_toml(), corpus=tmp_path.parent / "corpus", launch=lab.launch)
    try:
        public = start(lab, swarm, "public", "0")
        first = start(lab, swarm, "first", "0", RESTRICTED)
        second = start(lab, swarm, "second", "1", RESTRICTED)
        symmetric = start(lab, swarm, "symmetric", "1", SYMMETRIC)
        cone = start(lab, swarm, "cone", "0", FULL_CONE)
        expected = [
            (public, second, "direct"),
            (public, symmetric, "direct"),
            (first, second, "punched"),
            (first, symmetric, "relayed"),
            (cone, second, "direct"),
            (cone, symmetric, "direct"),
        ]
        swarm.until(lambda: all(daemon.is_serving for daemon in swarm.daemons.values()), "all to serve", 120)
        until_paths(swarm, expected)
        claimed = {public: "public", first: "punched", second: "punched", symmetric: "relayed", cone: "public"}
        swarm.until(lambda: all(reachability(public, peer) == told for peer, told in claimed.items()), "claims", 60)
        begun, counts = last_step(first), [completed(origin) for origin in (public, first, cone)]
        swarm.until(lambda: last_step(first) >= begun + 20, "20 more steps", 120)
        origins = list(zip((public, first, cone), counts, strict=True))
        swarm.until(lambda: all(completed(o) > n for o, n in origins), "a microbatch of each origin", 120)
        assert dropped(swarm) == 0
        swarm.stop()
    finally:
        swarm.kill_all()
        for name in swarm.daemons:
            lab.kill_all_in(name)


def kill_and_replace(swarm: LocalSwarm, name: str, survivor: LocalDaemon) -> None:
    """Kills a relay, waits until the other origin's microbatches come back, and starts the relay again."""
    swarm.take_invite(survivor)
    swarm.until(lambda: completed(survivor) >= 20, "microbatches of the survivor", 120)
    served = len(swarm.daemons[name].events("StateChanged", state="serving"))
    swarm.daemons[name].kill()
    before = completed(survivor)
    swarm.until(lambda: completed(survivor) >= before + 40, "40 more microbatches", 120)
    again = swarm.start(name, flags=["--stages", "0"], environment={"AGORA_SLOWDOWN": "4"})
    swarm.until(lambda: len(again.events("StateChanged", state="serving")) > served, "the relay to be back", 120)
    behind = [swarm.daemons[name] for name in ("middle", "last")]
    until_paths(swarm, [(again, peer, "direct") for peer in behind])
    both = {daemon.peer for daemon in (survivor, again)}
    swarm.until(lambda: all(relays(peer) == both for peer in behind), "places at both relays", 120)
    after = completed(survivor)
    swarm.until(lambda: completed(survivor) >= after + 40, "40 more microbatches with both", 120)


def test_a_relay_that_dies_costs_retries_and_no_microbatch(tmp_path: Path, lab: NatLab) -> None:
    """Two peers behind symmetric NATs are the only ones of their stages: all boundaries go through one of two relays.

    Each of the relays is killed in its turn.
    """
    manifest = tiny(3, optimizer=LONG)
    swarm = LocalSwarm(tmp_path, manifest.to_toml(), corpus=tmp_path.parent / "corpus", launch=lab.launch)
    try:
        start(lab, swarm, "relay", "0")
        start(lab, swarm, "other", "0")
        middle = start(lab, swarm, "middle", "1", SYMMETRIC)
        last = start(lab, swarm, "last", "2", SYMMETRIC)
        swarm.until(lambda: all(daemon.is_serving for daemon in swarm.daemons.values()), "all to serve", 120)
        swarm.until(lambda: path(middle, last) == "relayed", "a circuit", 60)
        for dies, survives in (("relay", "other"), ("other", "relay")):
            kill_and_replace(swarm, dies, swarm.daemons[survives])
            until_paths(swarm, [(middle, last, "relayed")])
            assert dropped(swarm) == 0
        swarm.stop()
    finally:
        swarm.kill_all()
        for name in swarm.daemons:
            lab.kill_all_in(name)
