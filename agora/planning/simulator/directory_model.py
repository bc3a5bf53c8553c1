"""The directory of a simulation: keeps claims in the shards of their stages, and finds the servers of a stage.

A peer that dies keeps its claim until the claim ends.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import MAX_KEY_RECORDS
from agora_protocol.shards import Shard, shard_bits, shard_hash

from agora.planning.simulator.simulated_peer import SimulatedPeer
from agora.swarm.directory_shards import judge_reading
from agora.swarm.membership import LIFETIME_S, PUBLISH_CLAIM_S
from agora.swarm.view import PeerView

RUN: Final = RunId("00" * 32)  # the run whose hashes place the peers
DEEPEST = 12  # the greatest depth of a shard that is kept: a stage of 100,000 peers is read at this depth
FETCH_SAMPLE = 8  # maximum number of a stage's servers among which a newcomer chooses those to fetch from


@dataclass(frozen=True, slots=True)
class ShardContent:
    """What a read of a shard (the peers of one stage whose hashes begin with given bits) finds.

    claims: the stored claims that the read returns. covered: the fraction, 0 to 1, of all hashes for which the read
    returned every peer. count: the number of peers with these hashes; count / covered is an estimate of the stage's
    size.
    """

    claims: tuple[PeerView, ...]
    count: int
    covered: float


class DirectoryModel:
    """The DHT's directory in a simulation: the claims of all peers, each stored in its shards of all depths to DEEPEST.

    A read returns a bounded number of a shard's claims, see `content`.
    """

    def __init__(self, work: tuple[float, ...], rng: random.Random) -> None:
        """work: of each stage for one microbatch; a machine's speed is the work that it does per second."""
        self._work = work
        self._rng = rng
        self._claims: dict[PeerId, PeerView] = {}
        self._hashes: dict[PeerId, int] = {}
        self._servers: list[dict[PeerId, PeerView]] = [{} for _ in work]
        self._members: defaultdict[Shard, dict[PeerId, PeerView]] = defaultdict(dict)
        self._contents: dict[Shard, ShardContent] = {}

    @property
    def stage_count(self) -> int:
        return len(self._work)

    def claim(self, peer: SimulatedPeer, span: Span, state: str) -> None:
        """Stores a peer's claim of its present incarnation, in place of its earlier one, until `withdraw`.

        state: "joining", "serving" or "leaving"; only with "serving" the peer counts as a server of its stages. The
        claim's capacity and bandwidth are those of the machine's equipment.
        """
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
        bits = shard_bits(self._hashes[claimed.peer], DEEPEST)
        return [Shard(stage, bits[:depth]) for stage in claimed.span.stages for depth in range(DEEPEST + 1)]

    def content(self, shard: Shard) -> ShardContent:
        """Returns what a read of a shard finds now; of more than MAX_KEY_RECORDS claims those with the lowest hashes.

        Returns the same object until a claim in this shard changes, so that readers can compare by identity.
        """
        if (known := self._contents.get(shard)) is not None:
            return known
        found = list(self._members[shard].values())
        if len(found) > MAX_KEY_RECORDS:
            found = sorted(found, key=lambda view: self._hashes[view.peer])[:MAX_KEY_RECORDS]
        reading = judge_reading(shard, [self._hashes[view.peer] for view in found], 0.0)
        content = self._contents[shard] = ShardContent(tuple(found), reading.count, reading.covered)
        return content

    def claim_of(self, peer: PeerId) -> PeerView | None:
        """Returns a peer's stored claim; None if it has none."""
        return self._claims.get(peer)

    def is_current(self, peer: PeerId, incarnation: int) -> bool:
        """Returns whether a peer has a claim, and this claim is of the given incarnation."""
        claimed = self._claims.get(peer)
        return claimed is not None and claimed.incarnation == incarnation

    def seconds_to_end(self) -> float:
        """Returns the seconds until the claim of a peer that stops publishing now would expire.

        That is LIFETIME_S less the claim's age, drawn from 0 to PUBLISH_CLAIM_S.
        """
        return LIFETIME_S - self._rng.uniform(0.0, PUBLISH_CLAIM_S)

    def server_count(self, stage: int) -> int:
        """Returns how many peers have a "serving" claim that includes `stage`."""
        return len(self._servers[stage])

    def sample_servers(self, stage: int) -> list[PeerView]:
        """Returns at most FETCH_SAMPLE of the "serving" claims that include `stage`, drawn at random."""
        servers = list(self._servers[stage].values())
        return servers if len(servers) <= FETCH_SAMPLE else self._rng.sample(servers, FETCH_SAMPLE)
