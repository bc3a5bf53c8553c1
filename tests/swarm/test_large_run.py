"""A peer of a large run: what it reads and publishes is bounded, and it knows whom it needs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property

import pytest
from agora_protocol.directory_shards import DirectoryShard, shard_bits, shard_hash
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.limits import MAX_KEY_RECORDS
from agora_protocol.records import Claim, Progress, Record

from agora.observe.events import PeerGone
from agora.swarm.directory_shards import (
    MIN_CYCLES_FOR_OTHERS,
    SHARDS_PER_READ,
    add_readings,
    depth_to_read,
    judge_reading,
    shards_to_publish,
)
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.stage_capacity import MachineCapacity, equal_needs
from tests.swarm.makers import RUN, peer_id
from tests.swarm.test_membership import dial_nobody
from tests.virtual_time import run

EPOCH = 1_700_000_000.0
STAGES = 8


class Crowd:
    """A directory of a run in which `count` peers have published where they should, and one more reads and publishes.

    Each peer holds one stage; a key keeps what the nodes of a DHT keep of it. Steps grow with the time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[list[DirectoryShard]] = []
        self.published: list[list[DirectoryShard]] = []
        self.gone: set[PeerId] = set()

    @cached_property
    def keys(self) -> dict[DirectoryShard, list[PeerId]]:
        """Who is under each key."""
        keys: dict[DirectoryShard, list[PeerId]] = defaultdict(list)
        per_stage = self.count / STAGES
        depth = depth_to_read(per_stage)
        for number in range(self.count):
            peer, stage = peer_id(f"crowd {number}"), number % STAGES
            shard = DirectoryShard(stage, "0" * depth)
            reading = type(judge_reading(shard, (), 0.0))(round(per_stage * 0.5**depth), 0.5**depth, 0.0)
            known = add_readings({}, {shard: reading})
            for place in shards_to_publish(known, Span(stage, stage), shard_hash(RUN, peer)):
                keys[place].append(peer)
        least = {shard: sorted(peers, key=lambda peer: shard_hash(RUN, peer)) for shard, peers in keys.items()}
        return {shard: peers[:MAX_KEY_RECORDS] for shard, peers in least.items()}

    async def publish(
        self, record: Record, identity: Identity, lifetime_s: float, shards: Sequence[DirectoryShard]
    ) -> None:
        self.published.append(list(shards))

    async def read_many(
        self, kind: type[Record], shards: Sequence[DirectoryShard]
    ) -> dict[DirectoryShard, list[Record]]:
        await asyncio.sleep(0.05)
        if kind is Claim:
            self.read.append(list(shards))
        return {shard: [self._record(kind, shard.stage, peer) for peer in self._live(shard)] for shard in shards}

    def _live(self, shard: DirectoryShard) -> list[PeerId]:
        return [peer for peer in self.keys.get(shard, ()) if peer not in self.gone]

    def _record(self, kind: type[Record], stage: int, peer: PeerId) -> Record:
        if kind is Claim:
            return Claim(peer, Span(stage, stage), 1, (), "serving", 1.0)
        return Progress(peer, Span(stage, stage), 1, (int(unix() - EPOCH) // 10 + 1,), 10.0, None, 0, 0)


def unix() -> float:
    return EPOCH + asyncio.get_running_loop().time()


def a_peer_of(crowd: Crowd, events: list[object]) -> Membership:
    config = MembershipConfig(RUN, STAGES, incarnation=7)
    return Membership(
        config,
        crowd,
        Identity(bytes(32)),
        events.append,
        is_verified=lambda _: True,
        dial_unverified=dial_nobody,
        rng=random.Random(1),
        unix=unix,
    )


async def serve(membership: Membership, seconds: float) -> None:
    """Joins with stage 3, and serves it for a while."""
    await membership.claim_span(equal_needs(STAGES), MachineCapacity(0.0, 0.0, (1,) * STAGES), Span(3, 3))
    await membership.set_state("serving")
    task = asyncio.create_task(membership.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("count", [1_000, 8_000])
def test_what_it_reads_and_publishes_is_bounded_and_flat(count: int) -> None:
    async def work() -> None:
        crowd, events = Crowd(count), list[object]()
        membership = a_peer_of(crowd, events)
        await serve(membership, 200.0)
        first, *later = crowd.read
        assert first == [DirectoryShard(stage) for stage in range(STAGES)], "a newcomer asks at depth 0"
        assert all(len(shards) <= SHARDS_PER_READ for shards in later)
        assert 15 <= len(later) <= 40, "a read in eight seconds"
        found = sum(len(crowd.keys.get(shard, ())) for shards in later for shard in shards)
        assert found / len(later) <= SHARDS_PER_READ * 46
        assert all(1 <= len(shards) <= 3 for shards in crowd.published)
        depth, own = depth_to_read(count / STAGES), shard_hash(RUN, Identity(bytes(32)).peer)
        assert DirectoryShard(3, shard_bits(own, depth)) in crowd.published[-1]
        assert len(membership.view.peers) <= 16 * 46 + 4 * 46 + (STAGES - 2) * 46

    run(work())


@pytest.mark.parametrize("count", [1_000, 8_000])
def test_it_knows_its_replicas_many_of_the_next_stage_some_of_each_other_and_how_many_there_are(count: int) -> None:
    async def work() -> None:
        crowd, events = Crowd(count), list[object]()
        membership = a_peer_of(crowd, events)
        await serve(membership, 200.0)
        view, per_stage = membership.view, count / STAGES
        assert len(view.replicas(3)) >= min(per_stage + 1, 350)
        assert len(view.replicas(4)) >= min(per_stage, 80)
        assert all(view.replicas(stage) for stage in range(STAGES))
        for stage in range(STAGES):
            tolerance = 0.25 if stage in (3, 4) else 0.6
            assert view.replica_count(stage) == pytest.approx(per_stage, rel=tolerance), stage
        gone = Counter(event.peer for event in events if isinstance(event, PeerGone))
        assert max(gone.values(), default=0) <= 1, "nobody is lost because it was read late"
        assert all("no shard" in event.reason for event in events if isinstance(event, PeerGone))
        assert gone.keys().isdisjoint(seen.peer for seen in view.replicas(3))

    run(work())


def test_peers_that_die_leave_its_view_those_of_its_own_stage_sooner() -> None:
    async def work() -> None:
        crowd, events = Crowd(1_000), list[object]()
        membership = a_peer_of(crowd, events)
        await serve(membership, 120.0)
        known = {stage: {seen.peer for seen in membership.view.replicas(stage)} for stage in (3, 6)}
        crowd.gone = {peer_id(f"crowd {number}") for number in range(1_000)}
        close_s, other_s = membership.view.period_s(3), membership.view.period_s(6)
        assert close_s < 60.0
        assert close_s < other_s < MIN_CYCLES_FOR_OTHERS * close_s + 10.0
        task = asyncio.create_task(membership.run())
        await asyncio.sleep(close_s + 10.0)
        assert known[3] & membership.view.peers.keys() == {Identity(bytes(32)).peer}, "only itself"
        assert len(known[6] & membership.view.peers.keys()) > 0, (close_s, other_s, len(known[6]))
        await asyncio.sleep(other_s)
        assert set(membership.view.peers) == {Identity(bytes(32)).peer}
        task.cancel()
        await asyncio.wait([task])

    run(work())
