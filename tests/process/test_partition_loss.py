"""What a split costs: the held-out loss of a swarm that was split and has healed, beside one that was never split."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from tests.process.harness import last_step, sampler_of, tiny
from tests.process.heldout import checkpoints, heldout_loss, weights_in
from tests.process.sites import Sites, can_make_sites
from tests.process.test_partition import HEALED_WITHIN_S, equal_after, peers_seen

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_make_sites(), reason="needs root and the command ip, to make network namespaces"),
]

APART_S = 60.0
COVER = 20
"""Steps in which slices cover all weights once."""
EVERY = 5
"""Steps from one checkpoint to the next: each gives an evaluation."""
EVALUATED = 5
"""The newest states whose losses are averaged: those of the second cover after the replicas were equal again."""
MAX_LOSS = 1.02
STAGE_OF = {"a0": 0, "a1": 1, "a2": 0, "b0": 0, "b1": 1, "b2": 0}
"""By machine, the stage that it holds; the letter is its site."""


@pytest.fixture
def sites() -> Iterator[Sites]:
    with Sites() as made:
        for name in STAGE_OF:
            made.add_machine(name[0], name)
        yield made


def start_all(swarm: LocalSwarm) -> list[LocalDaemon]:
    """Starts a daemon on each machine, and waits until all see all and have begun to step."""
    for name, stage in STAGE_OF.items():
        swarm.start(name, flags=["--stages", str(stage)], environment={"AGORA_SLOWDOWN": "4"})
    daemons = list(swarm.daemons.values())
    swarm.until(lambda: all(peers_seen(daemon) == len(daemons) for daemon in daemons), "one view", 180)
    swarm.until(lambda: min(map(last_step, daemons)) >= EVERY, "the first steps", 180)
    return daemons


def replicas_of(swarm: LocalSwarm, stage: int) -> list[LocalDaemon]:
    """The daemons of a stage."""
    return [swarm.daemons[name] for name, held in STAGE_OF.items() if held == stage]


def split_and_heal(swarm: LocalSwarm, sites: Sites, daemons: Sequence[LocalDaemon]) -> int:
    """Cuts the link for APART_S; returns the furthest step after which all replicas of a stage are equal again."""
    sites.cut()
    time.sleep(APART_S)
    assert all(peers_seen(daemon) < len(daemons) for daemon in daemons), "the link was cut"
    sites.mend()
    swarm.until(lambda: all(peers_seen(d) == len(daemons) for d in daemons), "one view again", HEALED_WITHIN_S)
    healed = max(map(last_step, daemons))
    for stage in (0, 1):
        swarm.until(lambda stage=stage: equal_after(replicas_of(swarm, stage), healed), "equal replicas", 120)
    for daemon in daemons:
        for event in daemon.events("StageDiverged"):
            print(f"{daemon.name}: {event}")
    return healed


def common_steps(swarm: LocalSwarm) -> dict[int, list[Path]]:
    """By step, the checkpoint of each stage: those steps of which every daemon has written one."""
    written = [checkpoints(daemon) for daemon in swarm.daemons.values()]
    common = set.intersection(*(set(steps) for steps in written))
    return {step: [checkpoints(replicas_of(swarm, stage)[0])[step] for stage in (0, 1)] for step in common}


def until_written(swarm: LocalSwarm, step: int) -> None:
    """Waits until all have written the checkpoint of a step."""
    swarm.until(lambda: step in common_steps(swarm), f"step {step}", 600)


def test_a_split_that_has_healed_costs_no_loss_that_stays(tmp_path: Path, sites: Sites) -> None:
    """At equal tokens, once a cover has passed: those tokens that the steps of the kept half hold."""
    section = {"target_tokens": 2048, "total_steps": 10**6}
    manifest = tiny(2, checkpoint={"every": EVERY, "keep": 1000}, optimizer=section)
    cache, losses, counted = tmp_path / "corpus", {}, 0
    for name in ("split", "whole"):
        (tmp_path / name).mkdir()
        swarm = LocalSwarm(tmp_path / name, manifest.to_toml(), corpus=cache, launch=sites.launch)
        try:
            daemons = start_all(swarm)
            if name == "split":
                healed = split_and_heal(swarm, sites, daemons)
                counted = -(-(healed + 2 * COVER) // EVERY) * EVERY
            until_written(swarm, counted)
            assert not [event for daemon in daemons for event in daemon.events("MicrobatchDropped")]
            swarm.stop()
        finally:
            swarm.kill_all()
        steps = sorted(step for step in common_steps(swarm) if step <= counted)[-EVALUATED:]
        sampler, written = sampler_of(manifest, cache), common_steps(swarm)
        losses[name] = [heldout_loss(manifest, sampler, [*map(weights_in, written[step])]) for step in steps]
        shown = ", ".join(f"{step}: {loss:.4f}" for step, loss in zip(steps, losses[name], strict=True))
        print(f"{name}, steps of {section['target_tokens']} tokens: {shown}")
    ratio = statistics.fmean(losses["split"]) / statistics.fmean(losses["whole"])
    print(f"split by whole {ratio:.4f}, after {counted} steps; link cut {sites.cuts} time")
    assert sites.cuts == 1 and ratio < MAX_LOSS
