"""Who is dialled next of the unverified peers; and that a claim alone makes nobody a member."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Claim

from agora.swarm.health import assess_health
from agora.swarm.membership import Membership, MembershipConfig
from agora.swarm.stage_capacity import MachineCapacity, equal_needs
from agora.swarm.unverified_dials import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_DIALS, UnverifiedDials
from agora.swarm.view import PeerView, StageEstimate, View
from tests.swarm.test_membership import RUN, Peer, Store, unix
from tests.virtual_time import run


def address_of(peer: PeerId) -> str:
    return f"/ip4/192.0.2.7/tcp/1/p2p/{peer}"


def seen(name: str, network: int = 1, stage: int = 0) -> PeerView:
    address = f"/ip4/198.51.{network}.7/tcp/4001/p2p/{name}"
    return PeerView(PeerId(name), Span(stage, stage), 1, (address,), "serving", 1.0, 0.0, (9,))


def test_each_network_has_one_dial_before_any_has_two() -> None:
    invented = {PeerId(f"x{number}"): seen(f"x{number}", network=1) for number in range(1000)}
    honest = {PeerId(f"h{number}"): seen(f"h{number}", network=2 + number) for number in range(8)}
    chosen = UnverifiedDials(random.Random(1)).choose(0.0, invented | honest)
    assert len(chosen) == MAX_DIALS and honest.keys() <= {one.peer for one in chosen}


def test_a_peer_that_does_not_answer_is_dialled_less_and_less() -> None:
    handshakes, one, dialled_at = UnverifiedDials(random.Random(1)), {PeerId("a"): seen("a")}, []
    for now in range(1000):
        if handshakes.choose(float(now), one):
            dialled_at.append(now)
    waits = [later - earlier for earlier, later in zip(dialled_at, dialled_at[1:], strict=False)]
    assert waits[0] == FIRST_WAIT_S and waits == sorted(waits) and waits[-1] == LONGEST_WAIT_S
    assert handshakes.was_dialled(PeerId("a"))
    assert not handshakes.choose(1001.0, {}) and not handshakes.was_dialled(PeerId("a")), "who is gone is forgotten"


def test_peers_without_an_address_are_not_dialled() -> None:
    assert not UnverifiedDials(random.Random(1)).choose(0.0, {PeerId("a"): PeerView(PeerId("a"), Span(0, 0), 1)})


def test_of_claims_that_were_not_read_as_large_a_part_counts_as_of_those_that_were() -> None:
    everybody = {PeerId(f"p{number}"): seen(f"p{number}") for number in range(100)}
    view = View(everybody, {0: StageEstimate(1000.0, 8.0)})
    assert view.replica_count(0) == 1000
    met = view.with_verified(lambda peer: int(peer[1:]) < 5)
    assert len(met.replicas(0)) == 5 and met.replica_count(0) == 50
    assert met.without(PeerId("p1")).replica_count(0) == 40 and len(met.with_verified(lambda _: True).peers) == 100


class Circle:
    """Peers that exchange HELLO with those who are there; nobody is behind an invented claim."""

    def __init__(self) -> None:
        self.there: dict[PeerId, Member] = {}


class Member(Peer):
    """A peer of tests/swarm/test_membership.py that believes only in those with whom it has exchanged HELLO."""

    def __init__(self, store: Store, circle: Circle, seed: int) -> None:
        super().__init__(store, 4, seed)
        self.verified: set[PeerId] = set()
        self._circle = circle
        circle.there[self.identity.peer] = self
        self.membership = Membership(
            MembershipConfig(RUN, 4, incarnation=7, addresses=(address_of(self.identity.peer),)),
            self.directory,
            self.identity,
            self.events.append,
            is_verified=lambda peer: peer in self.verified,
            dial_unverified=self.dial_unverified,
            rng=random.Random(seed),
            unix=unix,
        )

    async def dial_unverified(self, unverified: Sequence[PeerView]) -> None:
        await asyncio.sleep(0.2)
        for other in (self._circle.there.get(seen.peer) for seen in unverified):
            if other is not None:
                self.verified.add(other.identity.peer)
                other.verified.add(self.identity.peer)
                other.membership.promote_verified()

    async def join(self, length: int = 1, pinned: Span | None = None) -> None:
        await self.membership.claim_span(equal_needs(4), MachineCapacity(0.0, 0.0, (1, 1, 1, 1)), pinned)


def invent(store: Store, count: int) -> None:
    """Puts claims that say they serve stage 0 into the directory, of nobody."""
    for _ in range(count):
        name = Identity.generate().peer
        claim = Claim(name, Span(0, 0), 1, (address_of(name),), "serving", 1e6)
        store.records.setdefault((Claim, DirectoryShard(0)), {})[name] = (claim, unix() + 1e6)


def test_a_thousand_invented_claims_change_neither_spans_nor_views_nor_health() -> None:
    async def spans_of(phantoms: int) -> list[int]:
        store, circle = Store(), Circle()
        invent(store, phantoms)
        members = [Member(store, circle, seed) for seed in range(4)]
        for member in members:
            await member.join()
            await member.serve()
        await asyncio.sleep(20.0)
        everyone = {member.identity.peer for member in members}
        for member in members:
            view = member.membership.view
            assert view.peers.keys() == everyone
            assert [len(view.replicas(stage)) for stage in range(4)] == [1, 1, 1, 1]
            assert [view.replica_count(stage) for stage in range(4)] == [1, 1, 1, 1]
            assert assess_health(view, 4, unix(), since_unix=unix()).why == "stage 0 has not taken its first step yet"
        for member in members:
            await member.stop()
        return sorted(member.membership.claim.span.first for member in members if member.membership.claim)

    assert run(spans_of(0)) == run(spans_of(1000)) == [0, 1, 2, 3]
