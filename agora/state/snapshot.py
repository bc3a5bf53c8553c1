"""Gives copies of this peer's stages to joining peers: made when asked for, kept for a while, shared.

Knows: GetState and GetChunk, and how many bytes the copies may hold. Must not know: how a copy is made, or who asks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import Busy, ProtocolError, Refused
from agora_protocol.messages import Chunk, GetChunk, GetState, StateIndex
from agora_protocol.tensors import WireTensor

from agora.calls import Reply
from agora.clock import loop_time
from agora.state.layout import HASH_BYTES, StageState, chunk_hashes, pack_chunk

RETRY_MS: Final = 1000
FRESH_S: Final = 30.0
"""A joiner gets no snapshot older than this: it would have to replay the steps since."""
FRESH_FACTOR: Final = 10.0
"""A joiner gets no snapshot older than its copying time times this."""
REMAKE_FACTOR: Final = 2.0
"""The same of a joiner that needs a later step than the snapshot's."""
SHORTEST_COPY_S: Final = 0.02  # a copy counts as having taken at least this long
IN_USE_S: Final = 10.0  # for so long after its last use a snapshot is not dropped to make room for another
IDLE_S: Final = 60.0  # so long after its last use it is dropped
MAX_BYTES: Final = 2**31  # of all snapshots together


@dataclass(slots=True)
class _Snapshot:
    """A copy of a stage's state. hashes: the SHA-256 of each chunk, in order; `name` is the SHA-256 of all of them."""

    name: bytes
    state: StageState
    hashes: bytes
    made_at: float = 0.0
    copying_s: float = 0.0
    last_used: float = 0.0


class Snapshots:
    """Answers GetState and GetChunk: copies a stage when asked, gives one copy to several peers, drops idle ones."""

    def __init__(self, export: Callable[[int], Awaitable[StageState | None]], nbytes_of: Callable[[int], int]) -> None:
        """export: copies a stage; None while there is nothing to give. nbytes_of: the bytes that a copy will have."""
        self._export = export
        self._nbytes_of = nbytes_of
        self._kept: dict[bytes, _Snapshot] = {}
        self._copying: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def nbytes(self) -> int:
        """How many bytes all kept snapshots have together."""
        return sum(snapshot.state.layout.nbytes for snapshot in self._kept.values())

    async def get_state(self, request: GetState) -> Reply:
        """Returns name, counts and chunk hashes of a snapshot: the stage's newest if that is fresh, else a new one.

        An index of size 0 while there is nothing to give. Raises Busy when snapshots in use take all room.
        """
        async with self._copying[request.stage]:
            snapshot = await self._find_or_make(request.stage, request.at_least)
        if snapshot is None:
            return Reply(StateIndex(b"", 0, 0, 0, 0, 0))
        snapshot.last_used = loop_time()
        state = snapshot.state
        hashes = WireTensor("uint8", (state.layout.chunk_count, HASH_BYTES), memoryview(snapshot.hashes))
        counts = state.step, state.updates, state.agreed, state.lineage
        return Reply(StateIndex(snapshot.name, *counts, state.layout.nbytes), [hashes])

    async def get_chunk(self, request: GetChunk) -> Reply:
        """Returns a chunk of a snapshot. Raises Refused for a dropped snapshot, ProtocolError for no such chunk."""
        snapshot = self._kept.get(request.snapshot)
        if snapshot is None:
            raise Refused("this snapshot is not kept any more; ask for the state again")
        if request.chunk >= (count := snapshot.state.layout.chunk_count):
            raise ProtocolError("bad-message", f"The snapshot has {count} chunks; ask for one of them.")
        snapshot.last_used = loop_time()
        data = await asyncio.to_thread(pack_chunk, snapshot.state, request.chunk)
        return Reply(Chunk(), [WireTensor("uint8", (len(data),), memoryview(data))])

    def drop_idle(self) -> None:
        """Drops the snapshots that nobody has used for IDLE_S."""
        oldest = loop_time() - IDLE_S
        self._kept = {name: snapshot for name, snapshot in self._kept.items() if snapshot.last_used >= oldest}

    async def _find_or_make(self, stage: int, at_least: int) -> _Snapshot | None:
        """Returns the stage's newest snapshot if fresh or if no other fits, else a new one; None: nothing to give.

        at_least: the step that the asking peer needs; a snapshot of an earlier one is fresh for a shorter time, see
        REMAKE_FACTOR. Raises Busy when snapshots in use take all room and the stage has none.
        """
        self.drop_idle()
        started_at = loop_time()
        newest = max((s for s in self._kept.values() if s.state.stage == stage), key=lambda s: s.made_at, default=None)
        if newest:
            factor = FRESH_FACTOR if newest.state.step >= at_least else REMAKE_FACTOR
            if started_at - newest.made_at < min(factor * newest.copying_s, FRESH_S):
                return newest
        if not self._make_room(self._nbytes_of(stage)):
            if newest is None:
                raise Busy("copies that others are fetching take all room; ask another peer", RETRY_MS)
            return newest  # older than it should be, but its joiner may still find a newer one elsewhere
        if (state := await self._export(stage)) is None:
            return None
        hashes = await asyncio.to_thread(chunk_hashes, state)
        name = hashlib.sha256(hashes).digest()
        snapshot = self._kept[name] = _Snapshot(name, state, hashes)  # one of the same bytes may be of an earlier step
        snapshot.made_at = loop_time()
        snapshot.copying_s = max(snapshot.made_at - started_at, SHORTEST_COPY_S)
        return snapshot

    def _make_room(self, nbytes: int) -> bool:
        """Drops the longest unused snapshots until `nbytes` more fit; returns False when the next to drop is in use."""
        while self._kept and self.nbytes + nbytes > MAX_BYTES:
            longest_unused = min(self._kept.values(), key=lambda s: s.last_used)
            if loop_time() - longest_unused.last_used < IN_USE_S:
                return False
            del self._kept[longest_unused.name]
        return True
