"""The membership loop over a directory in memory: joining, collisions, freshness, trouble, leaving."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.errors import PeerFailed
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim, Progress, Record

from agora.observe.events import DirectoryTrouble, PeerGone, PeerSeen, SpanChosen
from agora.swarm.directory_reader import JITTER, SLOW_READ_TIMEOUT_S, linger_s, read_interval_s
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.stage_capacity import MachineCapacity, equal_needs
from agora.swarm.view import PeerView
from tests.swarm.makers import RUN
from tests.virtual_time import run

EPOCH = 1_700_000_000.0


def unix() -> float:
    return EPOCH + asyncio.get_running_loop().time()


class Store:
    """The DHT: who published what under which stage, until when. Publishing becomes visible after `delay_s`."""

    def __init__(self, delay_s: float = 0.1) -> None:
        self.delay_s = delay_s
        self.records: dict[tuple[type, DirectoryShard], dict[str, tuple[Record, float]]] = {}
        self.broken = False
        self.reads: Counter[str] = Counter()

    def claims(self) -> list[Claim]:
        return [record for by in self.records.values() for record, _ in by.values() if isinstance(record, Claim)]


class Directory:
    """One peer's door to the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def publish(
        self, record: Record, identity: Identity, lifetime_s: float, shards: Sequence[DirectoryShard]
    ) -> None:
        assert record.peer == identity.peer
        await asyncio.sleep(self.store.delay_s)
        if self.store.broken:
            raise PeerFailed("the directory does not answer")
        for shard in shards:
            self.store.records.setdefault((type(record), shard), {})[record.peer] = (record, unix() + lifetime_s)

    async def read_many(
        self, kind: type[Record], shards: Sequence[DirectoryShard]
    ) -> dict[DirectoryShard, list[Record]]:
        await asyncio.sleep(self.store.delay_s)
        self.store.reads[kind.__name__] += 1
        if self.store.broken:
            raise PeerFailed("the directory does not answer")
        found = {shard: self.store.records.get((kind, shard), {}).values() for shard in shards}
        return {shard: [record for record, expires in records if expires > unix()] for shard, records in found.items()}


async def dial_nobody(unverified: Sequence[PeerView]) -> None:
    assert not unverified, "every peer is verified here"


class Peer:
    """A membership with its own identity and events."""

    def __init__(
        self,
        store: Store,
        stages: int,
        seed: int,
        identity: Identity | None = None,
        is_member: Callable[[PeerId], bool] = lambda _: True,
    ) -> None:
        self.stages = stages
        self.identity = identity or Identity.generate()
        self.events: list = []
        self.directory = Directory(store)
        self.progress: Progress | None = None
        self.changed_at: list[float] = []
        self.membership = Membership(
            MembershipConfig(RUN, stages, incarnation=7, is_member=is_member),
            self.directory,
            self.identity,
            self.events.append,
            is_verified=lambda _: True,
            dial_unverified=dial_nobody,
            progress=lambda: self.progress,
            on_change=lambda: self.changed_at.append(asyncio.get_running_loop().time()),
            rng=random.Random(seed),
            unix=unix,
        )
        self.task: asyncio.Task | None = None

    async def join(self, length: int = 1, pinned: Span | None = None) -> None:
        machine = MachineCapacity(0.0, 0.0, tuple(min(length, self.stages - first) for first in range(self.stages)))
        await self.membership.claim_span(equal_needs(self.stages), machine, pinned)

    async def serve(self) -> None:
        await self.membership.set_state("serving")
        self.task = asyncio.create_task(self.membership.run())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])


@pytest.mark.parametrize("seed", range(6))
def test_eight_peers_that_start_at_once_hold_every_stage_equally(seed: int) -> None:
    async def work() -> None:
        store = Store()
        peers = [Peer(store, 4, 100 * seed + i) for i in range(8)]
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(*(peer.join() for peer in peers))
        assert asyncio.get_running_loop().time() - begun < 20.0
        spans = Counter(peer.membership.claim.span.first for peer in peers)
        assert set(spans.values()) == {2}, spans
        for peer in peers:
            assert [type(e) for e in peer.events].count(SpanChosen) == 1

    run(work())


def test_fifty_peers_that_start_at_once_spread_over_the_stages() -> None:
    async def work() -> None:
        store = Store()
        # With other identities hashes break ties otherwise: in 1 of 150 swarms a stage gets one peer more.
        peers = [Peer(store, 8, i, Identity(i.to_bytes(32, "big"))) for i in range(50)]
        await asyncio.gather(*(peer.join() for peer in peers))
        spans = Counter(peer.membership.claim.span.first for peer in peers)
        assert len(spans) == 8 and max(spans.values()) - min(spans.values()) <= 1, spans

    run(work())


def test_who_stands_by_claims_nothing() -> None:
    async def work() -> None:
        peer = Peer(Store(), 2, 1)
        placement = await peer.membership.claim_span(equal_needs(2), MachineCapacity(0.0, 0.0, (0, 0)))
        assert placement.span is None
        assert peer.membership.claim is None
        assert not peer.events

    run(work())


def test_a_measured_ability_is_published_with_the_claim() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 1, 1), Peer(store, 1, 2)
        a.membership.update_capacity(1.0, 1.0)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        a.membership.update_capacity(2.5, 1e15)
        await asyncio.sleep(15.0)
        seen = b.membership.view.peers[a.identity.peer]
        assert (seen.capacity, seen.bandwidth) == (2.5, 1e12), "bounded as the record is"
        await a.stop()
        await b.stop()

    run(work())


def test_a_pinned_span_is_claimed_at_once_and_kept() -> None:
    async def work() -> None:
        store = Store()
        peers = [Peer(store, 4, i) for i in range(3)]
        await asyncio.gather(*(peer.join(pinned=Span(1, 2)) for peer in peers))
        assert all(peer.membership.claim.span == Span(1, 2) for peer in peers)

    run(work())


def test_a_collision_found_after_loading_moves_one_of_the_two_right_before_it_serves() -> None:
    async def work() -> None:
        blind = [Store(), Store()]
        peers = [Peer(store, 2, 1) for store in blind]
        await asyncio.gather(*(peer.join() for peer in peers))
        assert {peer.membership.claim.span for peer in peers} == {Span(0, 0)}, "neither sees the other yet"
        seen = Store()
        for peer in peers:
            peer.directory.store = seen
            await peer.membership.set_state("joining")
        found = await asyncio.gather(*(peer.membership.confirm() for peer in peers))
        assert [placement.span for placement in found if placement] == [Span(1, 1)]
        assert sorted(peer.membership.claim.span.first for peer in peers) == [0, 1]
        assert [await peer.membership.confirm() for peer in peers] == [None, None], "and then it stands"
        mover = peers[0] if found[0] else peers[1]
        assert [e.first_stage for e in mover.events if isinstance(e, SpanChosen)] == [0, 1]

    run(work())


def test_a_peer_that_loads_longer_gives_way_to_one_that_serves_already() -> None:
    async def work() -> None:
        store = Store()
        slow, quick = Peer(store, 2, 1), Peer(store, 2, 1)
        await slow.join()
        span = slow.membership.claim.span
        await quick.join(pinned=span)
        await quick.serve()
        placement = await slow.membership.confirm()
        assert placement is not None
        assert placement.span != span
        assert slow.membership.claim.span == placement.span
        assert slow.membership.claim.state == "joining"
        await quick.stop()

    run(work())


def test_a_lost_peer_leaves_the_view_at_once_and_comes_back_with_its_next_claim() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 2, 1), Peer(store, 2, 2)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        await asyncio.sleep(3.0)
        stage = b.membership.claim.span.first
        lost, view, c = a.membership.lost_peers, a.membership.view, Identity.generate().peer
        lost.update_connected(0.0, {a.identity.peer, b.identity.peer, c}, view)
        assert {due.peer for due in lost.update_connected(1.0, {c}, view)} == {a.identity.peer, b.identity.peer}
        for peer in (a, b):
            lost.record_failed_dial(1.0, peer.identity.peer, peer.membership.claim.incarnation)
        changes = len(a.changed_at)
        a.membership.forget_lost()
        assert list(a.membership.view.peers) == [a.identity.peer], "it never loses itself"
        assert len(a.changed_at) == changes + 1, "whoever waits for a peer looks again"
        (gone,) = [event for event in a.events if isinstance(event, PeerGone)]
        assert gone.peer == b.identity.peer
        assert "cannot be dialled" in gone.reason
        await asyncio.sleep(10.0)
        assert not a.membership.view.replicas(stage), "its claim is still in the directory"
        await b.membership.claim_span(equal_needs(2), MachineCapacity(0.0, 0.0, (1, 1)), Span(stage, stage))
        await b.membership.set_state("serving")
        await asyncio.sleep(5.0)
        assert [p.peer for p in a.membership.view.replicas(stage)] == [b.identity.peer]
        await a.stop()
        await b.stop()

    run(work())


def test_a_peer_that_is_banned_leaves_the_view_at_once_and_the_event_says_why() -> None:
    async def work() -> None:
        store, banned = Store(), set[PeerId]()
        a, b = Peer(store, 2, 1, is_member=lambda peer: peer not in banned), Peer(store, 2, 2)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        await asyncio.sleep(3.0)
        assert set(a.membership.view.peers) == {a.identity.peer, b.identity.peer}
        banned |= {b.identity.peer, a.identity.peer}
        a.membership.forget_refused()
        assert list(a.membership.view.peers) == [a.identity.peer], "it never refuses itself"
        (gone,) = [event for event in a.events if isinstance(event, PeerGone)]
        assert gone.peer == b.identity.peer
        assert "not admitted" in gone.reason
        await a.stop()
        await b.stop()

    run(work())


def test_a_killed_peer_leaves_the_view_and_a_new_one_comes_into_it() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 2, 1), Peer(store, 2, 2)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        await asyncio.sleep(3.0)
        stage = b.membership.claim.span.first
        assert [p.peer for p in a.membership.view.replicas(stage)] == [b.identity.peer]
        await b.stop()
        await asyncio.sleep(40.0)
        assert a.membership.view.replicas(stage) == ()
        assert [e.peer for e in a.events if isinstance(e, PeerGone)] == [b.identity.peer]
        changes = len(a.changed_at)
        c = Peer(store, 2, 3)
        await c.join()
        await c.serve()
        await asyncio.sleep(3.0)
        assert c.membership.claim.span.first == stage
        assert len(a.changed_at) > changes
        assert [p.peer for p in a.membership.view.replicas(stage)] == [c.identity.peer]
        await a.stop()
        await c.stop()

    run(work())


def test_leaving_is_seen_within_seconds() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 1, 1), Peer(store, 1, 2)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        await asyncio.sleep(5.0)
        assert len(a.membership.view.replicas(0)) == 2
        await b.membership.set_state("leaving")
        await asyncio.sleep(3.0)
        assert [p.peer for p in a.membership.view.replicas(0)] == [a.identity.peer]
        await a.stop()
        await b.stop()

    run(work())


def test_a_directory_in_trouble_is_told_and_the_last_view_stays_for_a_while() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 2, 1), Peer(store, 2, 2)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        await asyncio.sleep(5.0)
        store.broken = True
        await asyncio.sleep(2.0)
        assert b.identity.peer in a.membership.view.peers, "a slow read is not a death"
        await asyncio.sleep(20.0)
        assert set(a.membership.view.peers) == {a.identity.peer}, "we never lose ourselves"
        assert {e.what for e in a.events if isinstance(e, DirectoryTrouble)} == {"read", "publish"}
        store.broken = False
        await asyncio.sleep(10.0)
        assert b.identity.peer in a.membership.view.peers
        await a.stop()
        await b.stop()

    run(work())


def test_progress_is_published_and_reaches_the_others() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 1, 1), Peer(store, 1, 2)
        for peer in (a, b):
            await peer.join()
            await peer.serve()
        for step in range(1, 6):
            b.progress = Progress(b.identity.peer, Span(0, 0), 1, (step,), 12.5, 3.25, 4, 99)
            await asyncio.sleep(4.0)
        seen = a.membership.view.peers[b.identity.peer]
        assert seen.steps[0] >= 3
        assert (seen.loss, seen.tokens_per_second) == (3.25, 12.5)
        assert seen.stepped_unix is not None
        assert seen.mean_step_s.value == pytest.approx(4.0, rel=0.5)
        assert b.membership.view.peers[b.identity.peer].steps[0] >= 4, "our own is known at once"
        await a.stop()
        await b.stop()

    run(work())


def test_choosing_again_is_a_new_incarnation_so_that_the_old_claim_cannot_come_back() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 2, 1), Peer(store, 2, 1)
        await asyncio.gather(a.join(), b.join())
        assert {a.membership.claim.span.first, b.membership.claim.span.first} == {0, 1}
        both = store.records[Claim, DirectoryShard(0)].keys() & store.records[Claim, DirectoryShard(1)].keys()
        assert both, "one of them chose again, and its first claim is still in the directory"
        for _ in range(5):
            await a.membership.refresh()
            await b.membership.refresh()
            for one, other in ((a, b), (b, a)):
                assert one.membership.view.peers[other.identity.peer].span == other.membership.claim.span

    run(work())


def test_a_peer_that_serves_moves_to_another_span_and_the_others_follow_it() -> None:
    async def work() -> None:
        store = Store()
        a, b = Peer(store, 2, 1), Peer(store, 2, 2)
        await a.join(pinned=Span(0, 0))
        await b.join(pinned=Span(0, 0))
        await a.serve()
        await b.serve()
        await asyncio.sleep(5.0)
        old_progress = Progress(b.identity.peer, Span(0, 0), 1, (5,), 1.0, None, 0, 0)
        await b.membership.publish_progress(old_progress)
        await b.membership.set_state("leaving")
        placement = await b.membership.claim_span(equal_needs(2), MachineCapacity(0.0, 0.0, (1, 1)), Span(1, 1))
        await b.membership.publish_progress(old_progress)
        assert placement.reason == "as asked for; stage 1 is the thinnest, held by nobody"
        assert b.membership.claim is not None
        assert (b.membership.claim.incarnation, b.membership.claim.state) == (8, "joining")
        await asyncio.sleep(5.0)
        assert a.membership.view.replicas(1) == ()
        assert len(a.membership.view.claimants(1)) == 1
        await b.membership.set_state("serving")
        await asyncio.sleep(5.0)
        assert [p.peer for p in a.membership.view.replicas(0)] == [a.identity.peer]
        (moved,) = a.membership.view.replicas(1)
        assert moved.peer == b.identity.peer and moved.steps == (), "progress of the former span is not published"
        await a.stop()
        await b.stop()

    run(work())


def test_reading_is_quick_while_things_change_and_rests_when_calm_or_slow() -> None:
    assert read_interval_s(False, 0.01) == 1.0
    assert read_interval_s(True, 0.01) == 4.0
    assert read_interval_s(True, 2.0) == 6.0
    assert read_interval_s(False, 60.0) == 8.0


@pytest.mark.parametrize("took", [0.0, 0.5, 1.0, 2.0, 2.5, 5.0])
def test_a_peer_is_believed_until_the_next_read_can_have_found_it_again(took: float) -> None:
    rest = (1 + JITTER) * read_interval_s(True, took)
    assert linger_s(took) >= rest + max(took, SLOW_READ_TIMEOUT_S)


@pytest.mark.parametrize("delay_s", [0.1, 1.0, 2.5])
def test_nobody_goes_where_reads_are_slow(delay_s: float) -> None:
    async def work() -> None:
        store = Store()
        peers = [Peer(store, 3, seed) for seed in range(3)]
        for peer in peers:
            await peer.join()
            await peer.serve()
            claim = peer.membership.claim
            peer.progress = Progress(peer.identity.peer, claim.span, claim.incarnation, (1,), 1.0, None, 0, 0)
        await asyncio.sleep(5.0)
        store.delay_s = delay_s
        await asyncio.sleep(300.0)
        for peer in peers:
            assert not [e for e in peer.events if isinstance(e, PeerGone)]
            assert len(peer.membership.view.peers) == 3
            await peer.stop()

    run(work())


def test_a_calm_swarm_reads_about_every_four_seconds() -> None:
    async def work() -> None:
        store = Store(delay_s=0.01)
        peer = Peer(store, 2, 1)
        await peer.join(length=2)
        await peer.serve()
        await asyncio.sleep(30.0)
        before = store.reads["Claim"]
        await asyncio.sleep(100.0)
        assert 20 <= store.reads["Claim"] - before <= 33
        assert [e.state for e in peer.events if isinstance(e, PeerSeen)][-1] == "serving"
        await peer.stop()

    run(work())
