"""Reads the directory for a peer, a bounded amount at a time, and remembers how many peers each stage has."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agora_protocol.directory_shards import DirectoryShard, shard_hash
from agora_protocol.errors import AgoraError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.records import Claim, Progress, Record

from agora.core.clock import loop_time
from agora.observe import events
from agora.observe.events import Report
from agora.swarm.directory_shards import (
    KnownReadings,
    ReaderIdentity,
    ShardsToRead,
    add_readings,
    choose_shards_to_read,
    estimate_peers,
    judge_reading,
    shards_to_publish,
)
from agora.swarm.view import StageEstimate

READ_INTERVAL_S, CALM_READ_INTERVAL_S, MAX_READ_INTERVAL_S = (
    1.0,
    4.0,
    8.0,
)  # seconds between two reads of the directory; see read_interval_s
SLOW_READ_TIMEOUT_S = 3.0  # seconds that any read of the directory may take, although the one before was quicker
JITTER = 0.2  # A wait is made longer or shorter at random by this fraction at most


class RecordStore(Protocol):
    """Stores this peer's signed records in the directory (the DHT), and reads those of all peers."""

    async def publish(
        self, record: Record, identity: Identity, lifetime_s: float, shards: Sequence[DirectoryShard]
    ) -> object:
        """Signs `record` and stores it in each of these shards. Raises an AgoraError on trouble with the directory."""

    async def read_many(
        self, kind: type[Record], shards: Sequence[DirectoryShard]
    ) -> Mapping[DirectoryShard, Sequence[Record]]:
        """Returns the verified, unexpired records of one kind, Claim or Progress, by shard.

        A shard that did not answer in time is left out, or has an empty list, see Directory.read_many. Raises an
        AgoraError on trouble with the directory.
        """


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """Records that one read has found. linger_s: seconds for which their signers then stay in the view."""

    records: list[Record]
    linger_s: float


class DirectoryReader:
    """Reads the claims and progress in the shards that are due, and estimates each stage's number of peers.

    The estimates decide which shards are read next, and in which this peer publishes. A run is small if they say so, or
    if there are none; of a small run everything is read. The caller merges the records into a view.
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
        was_dialled: Callable[[PeerId], bool] = lambda peer: False,
        on_own: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """unix: the wall clock, by which peers of one stage agree on what they read.

        was_dialled: whether a peer was dialled and did not answer; its claim is left out of the estimates.
        """
        self._was_dialled = was_dialled
        self._on_own = on_own
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
        self._to_read = self._choose_next(None)

    async def read(self, span: Span | None) -> list[FoundRecords]:
        """Reads the claims and progress in the shards due for a peer that claims `span`; updates the estimates.

        Returns the records of other peers, in two groups by how long their peers stay in the view; `on_own` gets those
        of this peer. An AgoraError is reported as DirectoryTrouble, and the records of that kind are missing then.
        """
        self._to_read = self._choose_next(span)
        shards = self._to_read.shards
        started = loop_time()
        claims, progress = await asyncio.gather(self._read(Claim, shards), self._read(Progress, shards))
        self._took_s = loop_time() - started
        now = self._unix()
        found = {shard: self._hashes(read) for shard, read in claims.items()}
        readings = {shard: judge_reading(shard, hashes, now) for shard, hashes in found.items()}
        self._readings = add_readings(self._readings, readings)
        self._to_read = self._choose_next(span)
        records = [record for by_shard in (claims, progress) for read in by_shard.values() for record in read]
        for record in records:
            if record.peer == self._me:
                self._on_own(record)
        return self._split_by_linger([record for record in records if record.peer != self._me], span)

    def forget_estimates(self) -> None:
        """The next read treats the run as small (one shard of each stage) and counts again."""
        self._readings = {}

    def _hashes(self, claims: Sequence[Record]) -> set[int]:
        return {shard_hash(self._run, claim.peer) for claim in claims if not self._was_dialled(claim.peer)}

    async def _read(
        self, kind: type[Record], shards: Sequence[DirectoryShard]
    ) -> Mapping[DirectoryShard, Sequence[Record]]:
        try:
            return await self._store.read_many(kind, shards)
        except AgoraError as error:
            self._report(events.DirectoryTrouble("read", f"{error.code}: {error}"))
            return {}

    def shards_to_publish(self, span: Span) -> list[DirectoryShard]:
        """Returns the shards in which this peer should publish its records of `span`, by the present estimates."""
        return shards_to_publish(self._readings, span, shard_hash(self._run, self._me))

    def interval_s(self, is_calm: bool) -> float:
        """Returns the seconds to wait before the next read.

        In a large run `is_calm` has no effect, because some peer always changes.
        """
        return (
            read_interval_s(is_calm, self._took_s)
            if self._to_read.is_small
            else max(MAX_READ_INTERVAL_S, 3.0 * self._took_s)
        )

    @property
    def linger_s(self) -> float:
        return self._linger_after_s(self._to_read.close_period)

    def stage_estimates(self, span: Span | None) -> dict[int, StageEstimate]:
        """Returns, by stage, the estimated number of its peers and the seconds within which each is read again.

        {} in a small run, which is read whole each time. span: that of this peer's claim.
        """
        if self._to_read.is_small:
            return {}
        estimates = {}
        for stage in range(self._stage_count):
            reads = self._to_read.close_period if _is_close(stage, stage, span) else self._to_read.other_period
            estimates[stage] = StageEstimate(estimate_peers(self._readings, stage), self._linger_after_s(reads))
        return estimates

    # Shards of close stages are read again sooner, so their peers stay in the view for a shorter time.
    def _split_by_linger(self, records: list[Record], span: Span | None) -> list[FoundRecords]:
        close = [record for record in records if _is_close(record.span.first, record.span.last, span)]
        far = [record for record in records if not _is_close(record.span.first, record.span.last, span)]
        return [
            FoundRecords(far, self._linger_after_s(self._to_read.other_period)),
            FoundRecords(close, self._linger_after_s(self._to_read.close_period)),
        ]

    def _linger_after_s(self, reads: float) -> float:
        if self._to_read.is_small:
            return linger_s(self._took_s)
        return linger_s(self._took_s) + (1.0 + JITTER) * reads * (self.interval_s(True) + self._took_s)

    def _choose_next(self, span: Span | None) -> ShardsToRead:
        reader = ReaderIdentity(shard_hash(self._run, self._me), self._stage_count, span, self._seed)
        return choose_shards_to_read(self._readings, reader, self._unix(), self._rng)


def _is_close(first: int, last: int, span: Span | None) -> bool:
    return span is not None and first <= span.last + 1 and last >= span.first


def read_interval_s(is_calm: bool, took_s: float) -> float:
    """Returns the seconds to wait after a read that took `took_s`: 3 * took_s, at least 1 (4 if calm), at most 8.

    is_calm: every stage has a replica, and the view has not changed for CALM_AFTER_S.
    """
    return min(MAX_READ_INTERVAL_S, max(CALM_READ_INTERVAL_S if is_calm else READ_INTERVAL_S, 3.0 * took_s))


def linger_s(took_s: float) -> float:
    """Returns how long a peer stays in the view after a read, which took `took_s`, found its claim.

    The longest wait before the next read, jitter included, and time for that read: a slow one must not look like a dead
    peer.
    """
    return (1.0 + JITTER) * read_interval_s(True, took_s) + max(SLOW_READ_TIMEOUT_S, 2.0 * took_s)
