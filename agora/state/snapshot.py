"""What this peer can give to joiners: consistent copies of its stages, made when asked for, kept for a while, shared.

Knows: GetState and GetChunk, and how many bytes copies may hold. Must not know: how a copy is made, or who asks.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.errors import Busy, ProtocolError, Refused
from agora_protocol.messages import Chunk, GetChunk, GetState, Message, StateIndex
from agora_protocol.tensors import WireTensor

from agora.state.layout import ELEMENT_BYTES, StageState, chunk_count, chunk_hashes, pack_chunk, snapshot_hash

RETRY_MS: Final = 1000
LEAST_S: Final = 0.02
"""No copy counts as made in less."""


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """How long copies live, and what all of them together may hold."""

    fresh_s: float = 30.0  # this old, a copy is still given to a new joiner
    remake: float = 10.0  # times as old as it took to make, it is not given any more to one who needs a later step
    in_use_s: float = 10.0  # since its last use, a copy is not dropped to make room for another
    idle_s: float = 60.0  # since its last use, a copy is dropped
    max_bytes: int = 2**31


@dataclass(frozen=True, slots=True)
class Given:
    """An answer: the message and what comes with it."""

    message: Message
    tensors: list[WireTensor] = field(default_factory=list)


@dataclass(slots=True)
class _Snapshot:
    state: StageState
    hashes: list[bytes]
    name: bytes
    began: float = 0.0
    made: float = 0.0
    took: float = 0.0
    used: float = 0.0

    @property
    def nbytes(self) -> int:
        return ELEMENT_BYTES * self.state.numel


Export = Callable[[int], Awaitable[StageState | None]]


class Snapshots:
    """Answers GetState and GetChunk. All of it runs in one event loop; hashing and packing do not hold it up.

    `export` makes a consistent copy of a stage that this peer holds (training may go on meanwhile; nobody changes the
    copy). It answers None while there is nothing to give, and raises NotMyStage for others' stages. A peer that is
    still joining gives the checkpoint it has loaded or found: that is how a run resumes of which no process was left.
    """

    def __init__(self, export: Export, now: Callable[[], float], limits: SnapshotLimits | None = None) -> None:
        self._export = export
        self._now = now
        self._limits = limits or SnapshotLimits()
        self._kept: dict[bytes, _Snapshot] = {}
        self._sizes: dict[int, int] = {}  # bytes of a stage's copy, once one was made
        self._forgotten: dict[int, float] = {}
        self._making: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes that the copies hold now."""
        return sum(snapshot.nbytes for snapshot in self._kept.values())

    async def get_state(self, request: GetState) -> Given:
        """The newest copy of a stage, or a new one. Raises Busy when all room is taken by copies in use."""
        async with self._making[request.stage]:
            snapshot = await self._copy_of(request.stage, request.at_least)
        if snapshot is None:
            return Given(StateIndex(b"", 0, 0, 0))
        snapshot.used = self._now()
        hashes = WireTensor("uint8", (len(snapshot.hashes), 32), memoryview(b"".join(snapshot.hashes)))
        state = snapshot.state
        return Given(StateIndex(snapshot.name, state.step, state.updates, snapshot.nbytes), [hashes])

    async def get_chunk(self, request: GetChunk) -> Given:
        """A chunk of a copy that is still kept. Raises Refused when it is not: the asker should ask GetState again."""
        snapshot = self._kept.get(request.snapshot)
        if snapshot is None:
            raise Refused("this snapshot is not kept any more; ask for the state again")
        if request.chunk >= chunk_count(snapshot.state.numel):
            raise ProtocolError("bad-message", f"The snapshot has {len(snapshot.hashes)} chunks; ask for one of them.")
        snapshot.used = self._now()
        data = await asyncio.to_thread(pack_chunk, snapshot.state, request.chunk)
        return Given(Chunk(), [WireTensor("uint8", (len(data),), memoryview(data))])

    def sweep(self) -> None:
        """Lets go of copies that nobody has asked for lately; to be called now and then."""
        oldest = self._now() - self._limits.idle_s
        for snapshot in [s for s in self._kept.values() if s.used < oldest]:
            del self._kept[snapshot.name]

    def forget(self, stage: int) -> None:
        """Makes a new copy of the stage for whoever asks for one next; who fetches an older one can go on."""
        self._forgotten[stage] = self._now()

    async def _copy_of(self, stage: int, at_least: int) -> _Snapshot | None:
        self.sweep()
        newest = max((s for s in self._kept.values() if s.state.stage == stage), key=lambda s: s.made, default=None)
        if newest and self._is_fresh(newest, at_least):
            return newest
        if not self._make_room(self._sizes.get(stage, 0)):
            if newest is None:
                raise Busy("copies that others are fetching take all room; ask another peer", RETRY_MS)
            return newest  # older than it should be, but its joiner fetches the slices it misses anyway
        return await self._make(stage)

    def _is_fresh(self, snapshot: _Snapshot, at_least: int) -> bool:
        age = self._now() - snapshot.made
        if snapshot.began <= self._forgotten.get(snapshot.state.stage, -math.inf):
            return False
        if snapshot.state.step >= at_least:
            return age < self._limits.fresh_s
        return age < min(self._limits.remake * snapshot.took, self._limits.fresh_s)

    async def _make(self, stage: int) -> _Snapshot | None:
        began = self._now()
        if (state := await self._export(stage)) is None:
            return None
        hashes = await asyncio.to_thread(chunk_hashes, state)
        name = snapshot_hash(hashes)
        snapshot = self._kept.setdefault(name, _Snapshot(state, hashes, name))
        snapshot.began, snapshot.made = began, self._now()
        snapshot.took = max(snapshot.made - began, LEAST_S)
        self._sizes[stage] = snapshot.nbytes
        return snapshot

    def _make_room(self, nbytes: int) -> bool:
        """Drops copies until `nbytes` more fit or none is left, the longest unused first; False: they are in use."""
        while self._kept and self.nbytes + nbytes > self._limits.max_bytes:
            unused = min(self._kept.values(), key=lambda s: s.used)
            if self._now() - unused.used < self._limits.in_use_s:
                return False
            del self._kept[unused.name]
        return True
