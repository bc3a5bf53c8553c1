"""Reads the directory for a peer, a bounded amount at a time, and remembers how many peers each stage has.

Knows: the shards' rules, how long a record that was read counts. Must not know: the view, this peer's claims, the DHT.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agora_protocol.errors import AgoraError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.records import Claim, Progress, Record
from agora_protocol.shards import Shard, shard_hash

from agora.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.directory_shards import (
    KnownReadings,
    ReaderIdentity,
    ReadPlan,
    add_readings,
    estimate_peers,
    judge_reading,
    plan_read,
    shards_to_publish,
)
from agora.swarm.view import StageSample

READ_S, CALM_READ_S, MAX_READ_S = 1.0, 4.0, 8.0
SLOW_READ_S = 3.0
"""Seconds that any read of the directory may take, although the one before was quicker."""
JITTER = 0.2


class RecordStore(Protocol):
    """Protocol: publishes this peer's records, and reads those of all; implemented by net.directory.Directory."""

    async def publish(self, record: Record, identity: Identity, lifetime_s: float, shards: Sequence[Shard]) -> object:
        """Signs this peer's record and stores it in these shards, for `lifetime_s` seconds."""

    async def read_many(self, kind: type[Record], shards: Sequence[Shard]) -> Mapping[Shard, Sequence[Record]]:
        """Returns the verified live records of one kind, by shard; shards without an answer in time are left out."""


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """Records that a read has found. linger_s: seconds for which the peers that signed them are to stay in the view."""

    records: list[Record]
    linger_s: float


class DirectoryReader:
    """Reads the directory shards that are due, returns their records, and estimates the number of each stage's peers.

    From the estimates follows in which shards this peer publishes. Whoever calls it merges the records into a view.
    """

    def __init__(
        self,
        store: RecordStore,
        run: RunId,
        me: PeerId,
        stage_count: int,
        report: Report,
        *,
        rng: random.Random,
        unix: Callable[[], float] = time.time,
        was_unreachable: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        """unix: the wall clock, by which peers of one stage agree on what they read.

        was_unreachable: whether the claiming peer was dialled and not met; such claims are left out of the estimates.
        """
        self._was_unreachable = was_unreachable
        self._store = store
        self._run = run
        self._me = me
        self._stage_count = stage_count
        self._report = report
        self._rng = rng
        self._unix = unix
        self._seed = rng.getrandbits(64)
        self._readings: KnownReadings = {}
        self._took_s = 0.0
        self._plan = self._next_plan(None)

    async def read(self, span: Span | None) -> list[FoundRecords]:
        """Reads the shards that are due for a peer that claims `span`, and returns the others' records.

        A small run is read whole. An AgoraError is reported as DirectoryTrouble, and that kind of record is missing
        then. Also updates the estimates.
        """
        self._plan = self._next_plan(span)
        started, shards = loop_time(), self._plan.shards
        claims, progress = await asyncio.gather(self._read(Claim, shards), self._read(Progress, shards))
        self._took_s = loop_time() - started
        now = self._unix()
        found = {shard: self._hashes(read) for shard, read in claims.items()}
        readings = {shard: judge_reading(shard, hashes, now) for shard, hashes in found.items()}
        self._readings = add_readings(self._readings, readings)
        self._plan = self._next_plan(span)
        records = [record for by_shard in (claims, progress) for read in by_shard.values() for record in read]
        return self._split_by_linger([record for record in records if record.peer != self._me], span)

    def forget(self) -> None:
        """Forgets the estimates, so that the next read takes the run for a small one and counts again."""
        self._readings = {}

    def _hashes(self, claims: Sequence[Record]) -> set[int]:
        """Returns the shard hashes of the peers that signed these claims, except those that were unreachable."""
        return {shard_hash(self._run, claim.peer) for claim in claims if not self._was_unreachable(claim.peer)}

    async def _read(self, kind: type[Record], shards: Sequence[Shard]) -> Mapping[Shard, Sequence[Record]]:
        """Returns the shards' records of one kind; after an AgoraError, reported as DirectoryTrouble, none."""
        try:
            return await self._store.read_many(kind, shards)
        except AgoraError as error:
            self._report(events.DirectoryTrouble("read", f"{error.code}: {error}"))
            return {}

    def shards_to_publish(self, span: Span) -> list[Shard]:
        """Returns the shards in which this peer publishes its records of `span`."""
        return shards_to_publish(self._readings, span, shard_hash(self._run, self._me))

    def interval_s(self, is_calm: bool) -> float:
        """Returns the seconds to wait until the next read. is_calm: see read_interval_s; no effect in a large run.

        In a large run something always changes, so it is always read at the longest interval.
        """
        return read_interval_s(is_calm, self._took_s) if self._plan.is_small else max(MAX_READ_S, 3.0 * self._took_s)

    @property
    def linger_s(self) -> float:
        """Seconds for which a peer of this peer's stages or the next one stays in the view after a read found it."""
        return self._linger_s(self._plan.near_period)

    def samples(self, span: Span | None) -> dict[int, StageSample]:
        """Returns the estimated size of each stage, by stage; {} in a small run, which is read whole each time.

        span: the one that this peer claims, None for none.
        """
        if self._plan.is_small:
            return {}
        samples = {}
        for stage in range(self._stage_count):
            reads = self._plan.near_period if _is_close(stage, stage, span) else self._plan.other_period
            samples[stage] = StageSample(estimate_peers(self._readings, stage), self._linger_s(reads))
        return samples

    def _split_by_linger(self, records: list[Record], span: Span | None) -> list[FoundRecords]:
        """Returns the records in two groups: first of other stages, then of the reader's stages and the next one.

        The latter are read again sooner, so their peers stay in the view for a shorter time.
        """
        close = [record for record in records if _is_close(record.span.first, record.span.last, span)]
        others = [record for record in records if not _is_close(record.span.first, record.span.last, span)]
        lingers = self._linger_s(self._plan.near_period), self._linger_s(self._plan.other_period)
        return [FoundRecords(others, lingers[1]), FoundRecords(close, lingers[0])]

    def _linger_s(self, reads: float) -> float:
        """Returns the seconds for which a peer stays in the view if its shard is read again after `reads` reads."""
        if self._plan.is_small:
            return linger_s(self._took_s)
        return linger_s(self._took_s) + (1.0 + JITTER) * reads * (self.interval_s(True) + self._took_s)

    def _next_plan(self, span: Span | None) -> ReadPlan:
        """Returns what to read next for a peer that claims `span`."""
        reader = ReaderIdentity(shard_hash(self._run, self._me), self._stage_count, span, self._seed)
        return plan_read(self._readings, reader, self._unix(), self._rng)


def _is_close(first: int, last: int, span: Span | None) -> bool:
    """Returns whether any of the stages from `first` to `last` is in `span` or is the one after it."""
    return span is not None and first <= span.last + 1 and last >= span.first


def read_interval_s(is_calm: bool, took_s: float) -> float:
    """Returns how long to rest after a read that took `took_s`: 3 times that, at least 1 s (calm: 4 s), at most 8 s.

    is_calm: every stage has a replica, and the view has not changed for CALM_AFTER_S.
    """
    return min(MAX_READ_S, max(CALM_READ_S if is_calm else READ_S, 3.0 * took_s))


def linger_s(took_s: float) -> float:
    """Returns how many seconds a peer stays in the view after a read of `took_s` seconds found it.

    The next read begins after the longest rest and may take twice as long: a slow one must not look like a death.
    """
    return (1.0 + JITTER) * read_interval_s(True, took_s) + max(SLOW_READ_S, 2.0 * took_s)
