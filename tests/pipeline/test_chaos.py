"""Random swarms with random kills, hangs, broken connections, lost answers, slow and full peers: what must always hold.

Every microbatch that an origin starts is completed exactly once; every stage counts it at least once, and no peer
counts twice what entered at one of its stages; a stage counts it twice only where a call had ended without an answer,
by another peer or by another entry.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from agora.pipeline.origin import Origin
from tests.pipeline.world import NetworkFaults, Node, World, completed, dropped, started, train
from tests.virtual_time import run

SEEDS = 198
GROUP = 33
MICROBATCHES = 12


@dataclass
class Kind:
    """What may happen in one family of seeds."""

    faults: NetworkFaults
    kills: int = 0
    hangs: int = 0
    slow: int = 1
    full: bool = False


def kind_of(seed: int) -> Kind:
    kinds = [
        Kind(NetworkFaults()),
        Kind(NetworkFaults(), kills=4),
        Kind(NetworkFaults(), hangs=2),
        Kind(NetworkFaults(lost_answer=0.15)),
        Kind(NetworkFaults(break_call=0.4)),
        Kind(NetworkFaults(), slow=10, full=True),
        Kind(NetworkFaults(lost_answer=0.05, break_call=0.25), kills=3, hangs=1, slow=10, full=True),
        Kind(NetworkFaults(latency_s=(0.05, 0.3)), kills=3, full=True),
        Kind(NetworkFaults(), slow=200),
    ]
    return kinds[seed % len(kinds)]


def cut(rng: random.Random, stages: int) -> list[str]:
    """A random cut of the pipeline into spans."""
    spans, first = [], 0
    while first < stages:
        last = min(stages - 1, first + rng.choice([0, 0, 1]))
        spans.append(f"{first}-{last}")
        first = last + 1
    return spans


async def perturb(world: World, kind: Kind, rng: random.Random, origins: list[Node]) -> None:
    """Kills and hangs peers; who leaves the last hole in a stage is replaced a while later, under a new name."""
    acts = ["kill"] * kind.kills + ["hang"] * kind.hangs
    rng.shuffle(acts)
    for number, act in enumerate(acts):
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        victims = [n for n in world.nodes.values() if not n.frozen and n not in origins]
        if not victims:
            continue
        victim = rng.choice(victims)
        (world.network.kill if act == "kill" else world.network.hang)(victim.peer)
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        world.add(f"substitute{number}", str(victim.span), victim.device.service_s, seen=False)
        await asyncio.sleep(rng.uniform(0.0, 5.0))
        world.hide(victim)
        world.show(list(world.nodes.values())[-1])


def build(seed: int) -> tuple[World, Kind, list[Node]]:
    rng, kind = random.Random(seed), kind_of(seed)
    world = World(rng.choice([1, 2, 3, 4]), seed=seed, faults=kind.faults)
    for replica in range(rng.choice([1, 2, 3])):
        for span in cut(rng, world.stage_count):
            slow = rng.choice([1, 1, kind.slow])
            slots = rng.choice([2, 4, 64]) if kind.full else 64
            world.add(f"peer{replica}/{span}", span, 0.02 * slow, slots)
    origins = [node for node in world.nodes.values() if node.span.first == 0][: rng.choice([1, 2])]
    return world, kind, origins


async def one(seed: int) -> Counter[str]:
    world, kind, nodes = build(seed)
    origins: list[Origin] = [world.origin(node) for node in nodes]
    trouble = asyncio.create_task(perturb(world, kind, world.rng, nodes))
    await asyncio.gather(*(train(origin, MICROBATCHES) for origin in origins))
    await trouble
    await asyncio.sleep(2000.0)
    for node in nodes:
        check_origin(node)
    check_counts(world, nodes)
    check_leftovers(world)
    world.faults.fired["unhappy"] += sum(world.unhappy.values())
    return world.faults.fired


def check_origin(node: Node) -> None:
    names = started(node.events)
    assert len(names) >= MICROBATCHES and len(set(names)) == len(names)
    assert sorted(completed(node.events)) == sorted(names), "completed exactly once"
    assert dropped(node.events) == []


def check_counts(world: World, origins: list[Node]) -> None:
    unhappy = world.unhappy
    for node in origins:
        for microbatch in (bytes.fromhex(name) for name in started(node.events)):
            for stage in range(world.stage_count):
                counts = world.counts(stage, microbatch)
                assert counts, f"stage {stage} never counted {microbatch.hex()}"
                assert sum(counts.values()) == 1 or unhappy[microbatch], "counted twice without an excuse"
    for node in world.nodes.values():
        assert max(node.device.entries.values(), default=1) == 1, "a peer counted what entered at one stage twice"


def check_leftovers(world: World) -> None:
    """Nobody holds a slot, a forward or running work for a microbatch that is over."""
    for node in world.nodes.values():
        if not node.frozen:
            assert node.ledger.taken == 0 and not node.device.held and node.hop.queue == 0
            assert all(
                cost.open_calls == 0
                for stage in range(world.stage_count)
                for cost in node.router.balancer.callees(stage).values()
            )


@pytest.mark.parametrize("group", range(SEEDS // GROUP))
def test_every_started_microbatch_completes_once_and_every_stage_counts_it(group: int) -> None:
    fired: Counter[str] = Counter()
    for seed in range(group * GROUP, (group + 1) * GROUP):
        try:
            fired += run(one(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert all(fired[what] > 0 for what in ("kill", "hang", "lost", "break", "unhappy")), fired
