"""The directory of a simulation: claims in the shards of their stages, and what one peer has read of them.

A peer that dies keeps its claim until the claim ends. A reader reads the shards that the daemon's own functions plan.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agora_protocol.directory_shards import DirectoryShard, shard_bits, shard_hash
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import MAX_KEY_RECORDS

from agora.planning.simulator.measurements import Measurements
from agora.planning.simulator.simulated_peer import SimulatedPeer
from agora.swarm.directory_reader import CALM_READ_INTERVAL_S, JITTER, MAX_READ_INTERVAL_S, linger_s
from agora.swarm.directory_shards import (
    KnownReadings,
    ReaderIdentity,
    Reading,
    ShardsToRead,
    add_readings,
    choose_shards_to_read,
    estimate_peers,
    judge_reading,
    shards_to_publish,
)
from agora.swarm.membership import LIFETIME_S, PUBLISH_CLAIM_INTERVAL_S, PUBLISH_PROGRESS_INTERVAL_S
from agora.swarm.view import PeerView, StageEstimate, View

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
    """The DHT's directory: all claims, each in its shards of all depths to DEEPEST."""

    def __init__(self, work: tuple[float, ...], rng: random.Random) -> None:
        """work: of each stage for one microbatch; a machine's speed is the work that it does per second."""
        self._work = work
        self._rng = rng
        self._claims: dict[PeerId, PeerView] = {}
        self._hashes: dict[PeerId, int] = {}
        self._servers: list[dict[PeerId, PeerView]] = [{} for _ in work]
        self._members: defaultdict[DirectoryShard, dict[PeerId, PeerView]] = defaultdict(dict)
        self._contents: dict[DirectoryShard, ShardContent] = {}

    @property
    def stage_count(self) -> int:
        return len(self._work)

    def claim(self, peer: SimulatedPeer, span: Span, state: str) -> None:
        """Only with state "serving" the peer counts as a server of its stages."""
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
        claimed = self._claims.pop(peer, None)
        if claimed is None:
            return
        for shard in self._shards_of(claimed):
            del self._members[shard][peer]
            self._contents.pop(shard, None)
        if claimed.state == "serving":
            for stage in claimed.span.stages:
                del self._servers[stage][peer]

    def _shards_of(self, claimed: PeerView) -> list[DirectoryShard]:
        bits = shard_bits(self._hashes[claimed.peer], DEEPEST)
        return [DirectoryShard(stage, bits[:depth]) for stage in claimed.span.stages for depth in range(DEEPEST + 1)]

    def content(self, shard: DirectoryShard) -> ShardContent:
        """Of more than MAX_KEY_RECORDS claims those with the lowest hashes. The same object until a claim in the shard
        changes.
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
        return self._claims.get(peer)

    def is_current(self, peer: PeerId, incarnation: int) -> bool:
        claimed = self._claims.get(peer)
        return claimed is not None and claimed.incarnation == incarnation

    def seconds_to_end(self) -> float:
        """LIFETIME_S less the claim's age, drawn from 0 to PUBLISH_CLAIM_INTERVAL_S."""
        return LIFETIME_S - self._rng.uniform(0.0, PUBLISH_CLAIM_INTERVAL_S)

    def server_count(self, stage: int) -> int:
        return len(self._servers[stage])

    def sample_servers(self, stage: int) -> list[PeerView]:
        """Returns at most FETCH_SAMPLE of the "serving" claims that include `stage`, drawn at random."""
        servers = list(self._servers[stage].values())
        return servers if len(servers) <= FETCH_SAMPLE else self._rng.sample(servers, FETCH_SAMPLE)


RECORDS_OF_A_PEER = 2  # each peer publishes a claim and a progress record, and a read finds both


class SimulatedReader:
    """One peer's reader of the directory. Reads take no simulated time and no link."""

    def __init__(self, peer: PeerId, directory: DirectoryModel, measurements: Measurements, rng: random.Random) -> None:
        self._peer = peer
        self._directory = directory
        self._measurements = measurements
        self._rng = rng
        self._seed = rng.getrandbits(64)
        self._reader_hash = shard_hash(RUN, peer)
        self._readings: KnownReadings = {}
        self._known: dict[DirectoryShard, tuple[ShardContent, float]] = {}
        self._to_read = ShardsToRead((), True)

    def read(self, span: Span | None, now: float) -> bool:
        """Reads the shards that are due; returns whether the claims of the stage after `span` have changed. now:
        simulated seconds.
        """
        reader = ReaderIdentity(self._reader_hash, self._directory.stage_count, span, self._seed)
        self._to_read = choose_shards_to_read(self._readings, reader, now, self._rng)
        after = -1 if span is None else span.last + 1
        is_changed = False
        found = {}
        for shard in self._to_read.shards:
            content = self._directory.content(shard)
            found[shard] = Reading(content.count, content.covered, now)
            known = self._known.pop(shard, None)
            self._known[shard] = content, now  # the newest one is the last
            is_changed |= shard.stage == after and (known is None or known[0] is not content)
            self._measurements.directory_read += RECORDS_OF_A_PEER * len(content.claims)
        self._measurements.directory_keys += RECORDS_OF_A_PEER * len(found)
        self._readings = add_readings(self._readings, found)
        return self._forget(span, now, after) or is_changed

    def _forget(self, span: Span | None, now: float, after: int) -> bool:
        lingers = [self._linger_s(stage, span) for stage in range(self._directory.stage_count)]
        ended = [shard for shard, (_, at) in self._known.items() if now - at > lingers[shard.stage]]
        for shard in ended:
            del self._known[shard]
        return any(shard.stage == after for shard in ended)

    def _linger_s(self, stage: int, span: Span | None) -> float:
        if self._to_read.is_small:
            return linger_s(0.0)
        is_close = span is not None and span.first <= stage <= span.last + 1
        return (
            linger_s(0.0)
            + (1.0 + JITTER)
            * (self._to_read.close_period if is_close else self._to_read.other_period)
            * MAX_READ_INTERVAL_S
        )

    def interval_s(self) -> float:
        """Returns the seconds until the next read, varied by JITTER."""
        return (CALM_READ_INTERVAL_S if self._to_read.is_small else MAX_READ_INTERVAL_S) * self._rng.uniform(
            1.0 - JITTER, 1.0 + JITTER
        )

    def records_published_per_s(self, span: Span | None) -> float:
        """Claim and progress, in each of its shards; 0.0 without a span."""
        if span is None:
            return 0.0
        shards = len(shards_to_publish(self._readings, span, self._reader_hash))
        return shards * (1.0 / PUBLISH_CLAIM_INTERVAL_S + 1.0 / PUBLISH_PROGRESS_INTERVAL_S)

    def replicas(self, stage: int) -> tuple[PeerView, ...]:
        claims = {
            view.peer: view
            for shard, (content, _) in self._known.items()
            if shard.stage == stage
            for view in content.claims
        }
        return tuple(claims[peer] for peer in sorted(claims) if claims[peer].state == "serving")

    def view(self, span: Span | None) -> View:
        """All known claims, its own included; in a large run also each stage's estimated size."""
        peers = {view.peer: view for content, _ in self._known.values() for view in content.claims}
        own = self._directory.claim_of(self._peer)
        if own is not None:
            peers[self._peer] = own
        return View(peers, {} if self._to_read.is_small else dict(self._estimates(span)))

    def _estimates(self, span: Span | None) -> Iterator[tuple[int, StageEstimate]]:
        for stage in range(self._directory.stage_count):
            yield stage, StageEstimate(estimate_peers(self._readings, stage), self._linger_s(stage, span))
