"""The directory of a simulation: keeps claims in the shards of their stages, and knows who serves what.

Knows: claims, their lifetime, shards, and that a key keeps a bounded number of records. Must not know: who reads when
(simulated_reader.py does), nodes of a DHT, or microbatches. A peer that dies keeps its claim until the claim ends.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import MAX_KEY_RECORDS
from agora_protocol.shards import Shard, shard_bits, shard_hash

from agora.sim.simulated_peer import SimulatedPeer
from agora.swarm.directory_shards import judge_reading
from agora.swarm.membership import LIFETIME_S, PUBLISH_CLAIM_S
from agora.swarm.view import PeerView

RUN: Final = RunId("00" * 32)
"""The run whose hashes place the peers."""
DEEPEST = 12
"""The greatest depth of a shard that is kept: a stage of 100,000 peers is read at this depth."""
FETCH_SAMPLE = 8
"""Servers of a stage that a newcomer considers to fetch from."""


@dataclass(frozen=True, slots=True)
class ShardContent:
    """What a read of a shard finds.

    claims: the stored claims. count: peers found in the part `covered`, from 0 to 1, of all hashes; both together give
    an estimate of the stage's size.
    """

    claims: tuple[PeerView, ...]
    count: int
    covered: float


class DirectoryModel:
    """Keeps the claims of all peers. A claim is found in its shard of every depth, as far as keys keep it."""

    def __init__(self, work: tuple[float, ...], rng: random.Random) -> None:
        self._work = work
        self._rng = rng
        self._claims: dict[PeerId, PeerView] = {}
        self._hashes: dict[PeerId, int] = {}
        self._servers: list[dict[PeerId, PeerView]] = [{} for _ in work]
        self._members: defaultdict[Shard, dict[PeerId, PeerView]] = defaultdict(dict)
        self._contents: dict[Shard, ShardContent] = {}

    @property
    def stage_count(self) -> int:
        """The number of stages of the run."""
        return len(self._work)

    def claim(self, peer: SimulatedPeer, span: Span, state: str) -> None:
        """Stores a peer's claim of its present incarnation, in place of its earlier one."""
        self.withdraw(peer.id)
        rate = peer.equipment.speed / sum(self._work[span.first : span.last + 1])
        bandwidth = peer.equipment.link.spec.rate
        view = PeerView(peer.id, span, peer.incarnation, state=state, capacity=rate, bandwidth=bandwidth)
        self._claims[peer.id] = view
        self._hashes[peer.id] = shard_hash(RUN, peer.id)
        for shard in self._shards_of(view):
            self._members[shard][peer.id] = view
            self._contents.pop(shard, None)
        if state == "serving":
            for stage in span.stages:
                self._servers[stage][peer.id] = view

    def withdraw(self, peer: PeerId) -> None:
        """Removes a peer's claim, if there is one."""
        claimed = self._claims.pop(peer, None)
        if claimed is None:
            return
        for shard in self._shards_of(claimed):
            del self._members[shard][peer]
            self._contents.pop(shard, None)
        if claimed.state == "serving":
            for stage in claimed.span.stages:
                del self._servers[stage][peer]

    def _shards_of(self, claimed: PeerView) -> list[Shard]:
        """Returns the shards of all depths in which a claim is found."""
        bits = shard_bits(self._hashes[claimed.peer], DEEPEST)
        return [Shard(stage, bits[:depth]) for stage in claimed.span.stages for depth in range(DEEPEST + 1)]

    def content(self, shard: Shard) -> ShardContent:
        """Returns what a read of a shard finds now; of more than MAX_KEY_RECORDS peers those with the least hashes."""
        if (known := self._contents.get(shard)) is not None:
            return known
        found = list(self._members[shard].values())
        if len(found) > MAX_KEY_RECORDS:
            found = sorted(found, key=lambda view: self._hashes[view.peer])[:MAX_KEY_RECORDS]
        reading = judge_reading(shard, [self._hashes[view.peer] for view in found], 0.0)
        content = self._contents[shard] = ShardContent(tuple(found), reading.count, reading.covered)
        return content

    def claim_of(self, peer: PeerId) -> PeerView | None:
        """Returns a peer's claim; None without one."""
        return self._claims.get(peer)

    def is_current(self, peer: PeerId, incarnation: int) -> bool:
        """Returns whether a peer has a claim and it is of this incarnation."""
        claimed = self._claims.get(peer)
        return claimed is not None and claimed.incarnation == incarnation

    def seconds_to_end(self) -> float:
        """Returns the seconds, drawn at random, until the claim of a peer that stops publishing now expires."""
        return LIFETIME_S - self._rng.uniform(0.0, PUBLISH_CLAIM_S)

    def servers(self, stage: int) -> int:
        """Returns how many peers claim to serve a stage."""
        return len(self._servers[stage])

    def sample_servers(self, stage: int) -> list[PeerView]:
        """Returns at most FETCH_SAMPLE of the peers that claim to serve a stage, drawn at random."""
        servers = list(self._servers[stage].values())
        return servers if len(servers) <= FETCH_SAMPLE else self._rng.sample(servers, FETCH_SAMPLE)
