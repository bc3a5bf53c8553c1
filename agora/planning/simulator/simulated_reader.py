"""A simulated peer's reading of the directory: it reads the shards that the daemon's own functions plan."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agora_protocol.ids import PeerId, Span
from agora_protocol.shards import Shard, shard_hash

from agora.planning.simulator.directory_model import RUN, DirectoryModel, ShardContent
from agora.planning.simulator.measurements import Measurements
from agora.swarm.directory_reader import CALM_READ_S, JITTER, MAX_READ_S, linger_s
from agora.swarm.directory_shards import (
    KnownReadings,
    ReaderIdentity,
    Reading,
    ReadPlan,
    add_readings,
    estimate_peers,
    plan_read,
    shards_to_publish,
)
from agora.swarm.membership import PUBLISH_CLAIM_S, PUBLISH_PROGRESS_S
from agora.swarm.view import PeerView, StageEstimate, View

RECORDS_OF_A_PEER = 2  # each peer publishes a claim and a progress record, and a read finds both


class SimulatedReader:
    """One peer's reader of the directory, with what it has found. Reads take no simulated time and no link."""

    def __init__(self, peer: PeerId, directory: DirectoryModel, measurements: Measurements, rng: random.Random) -> None:
        self._peer = peer
        self._directory = directory
        self._measurements = measurements
        self._rng = rng
        self._seed = rng.getrandbits(64)
        self._reader_hash = shard_hash(RUN, peer)
        self._readings: KnownReadings = {}
        self._known: dict[Shard, tuple[ShardContent, float]] = {}
        self._plan = ReadPlan((), True)

    def read(self, span: Span | None, now: float) -> bool:
        """Reads the shards that are due; returns whether the known claims of the stage after `span` have changed.

        Forgets shards that should have been read again by now, and updates the estimates of the stages' sizes. Adds the
        numbers of records and keys read to the measurements. span: what the peer holds; None: nothing. now: simulated
        seconds.
        """
        reader = ReaderIdentity(self._reader_hash, self._directory.stage_count, span, self._seed)
        self._plan = plan_read(self._readings, reader, now, self._rng)
        after = -1 if span is None else span.last + 1
        is_changed = False
        found = {}
        for shard in self._plan.shards:
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
        if self._plan.is_small:
            return linger_s(0.0)
        is_close = span is not None and span.first <= stage <= span.last + 1
        return (
            linger_s(0.0)
            + (1.0 + JITTER) * (self._plan.close_period if is_close else self._plan.other_period) * MAX_READ_S
        )

    def interval_s(self) -> float:
        """Returns the seconds until the next read: CALM_READ_S, or MAX_READ_S in a large run, varied by JITTER."""
        return (CALM_READ_S if self._plan.is_small else MAX_READ_S) * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    def records_published_per_s(self, span: Span | None) -> float:
        """Returns how many records per second the peer publishes: its claim and its progress, in each of its shards.

        0.0 without a span.
        """
        if span is None:
            return 0.0
        shards = len(shards_to_publish(self._readings, span, self._reader_hash))
        return shards * (1.0 / PUBLISH_CLAIM_S + 1.0 / PUBLISH_PROGRESS_S)

    def replicas(self, stage: int) -> tuple[PeerView, ...]:
        """Returns the known claims of a stage whose state is "serving", one for each peer, sorted by peer id."""
        claims = {
            view.peer: view
            for shard, (content, _) in self._known.items()
            if shard.stage == stage
            for view in content.claims
        }
        return tuple(claims[peer] for peer in sorted(claims) if claims[peer].state == "serving")

    def view(self, span: Span | None) -> View:
        """Returns a View of all known claims, the peer's own included.

        In a large run the View also has each stage's estimated size, as in the daemon's membership. span: what the peer
        holds.
        """
        peers = {view.peer: view for content, _ in self._known.values() for view in content.claims}
        own = self._directory.claim_of(self._peer)
        if own is not None:
            peers[self._peer] = own
        return View(peers, {} if self._plan.is_small else dict(self._estimates(span)))

    def _estimates(self, span: Span | None) -> Iterator[tuple[int, StageEstimate]]:
        for stage in range(self._directory.stage_count):
            yield stage, StageEstimate(estimate_peers(self._readings, stage), self._linger_s(stage, span))
