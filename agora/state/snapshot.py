"""Gives copies of this peer's stages to other peers: made when asked for, kept for a while, shared by several peers.

Knows: GetState and GetChunk, and how many bytes the copies may take. Must not know: how a copy is made, or who asks.
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
"""A snapshot is given for at most this many seconds: an older one would leave the joiner too many steps behind."""
FRESH_FACTOR: Final = 10.0
"""A snapshot is given for at most this many times the seconds that copying it took."""
REMAKE_FACTOR: Final = 2.0
"""Takes the place of FRESH_FACTOR for a joiner that needs a later step than the snapshot's."""
SHORTEST_COPY_S: Final = 0.02  # a copy counts as having taken at least this long
IN_USE_S: Final = 10.0  # seconds after its last use during which a snapshot is not dropped to make room for another
IDLE_S: Final = 60.0  # seconds after its last use at which a snapshot is dropped
MAX_BYTES: Final = 2**31  # of all snapshots together


@dataclass(slots=True)
class _Snapshot:
    """A copy of a stage's state. hashes: the chunks' SHA-256, concatenated. name: the SHA-256 of `hashes`.

    made_at, last_used: loop times. copying_s: seconds that copying took.
    """

    name: bytes
    state: StageState
    hashes: bytes
    made_at: float = 0.0
    copying_s: float = 0.0
    last_used: float = 0.0


class Snapshots:
    """Answers GetState and GetChunk: copies a stage when asked, gives one copy to several peers, drops idle ones."""

    def __init__(self, export: Callable[[int], Awaitable[StageState | None]], nbytes_of: Callable[[int], int]) -> None:
        """export: returns a copy of a stage's state, or None while there is none. nbytes_of: returns a copy's size."""
        self._export = export
        self._nbytes_of = nbytes_of
        self._kept: dict[bytes, _Snapshot] = {}
        self._copying: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def nbytes(self) -> int:
        """How many bytes all kept snapshots have together."""
        return sum(snapshot.state.layout.nbytes for snapshot in self._kept.values())

    async def get_state(self, request: GetState) -> Reply:
        """Returns a StateIndex and the chunk hashes of the stage's newest snapshot if that is fresh, or of a new one.

        The index has size 0 while there is nothing to give. Raises Busy when snapshots in use take all room.
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
        """Returns the answer with one chunk of a kept snapshot, which counts as used now.

        Raises Refused for a snapshot that is not kept here (any more), ProtocolError for a chunk that it does not have.
        """
        snapshot = self._kept.get(request.snapshot)
        if snapshot is None:
            raise Refused("this snapshot is not kept any more; ask for the state again")
        if request.chunk >= (count := snapshot.state.layout.chunk_count):
            raise ProtocolError("bad-message", f"The snapshot has {count} chunks; ask for one of them.")
        snapshot.last_used = loop_time()
        data = await asyncio.to_thread(pack_chunk, snapshot.state, request.chunk)
        return Reply(Chunk(), [WireTensor("uint8", (len(data),), memoryview(data))])

    def drop_idle(self) -> None:
        """Drops the snapshots that no peer has used for IDLE_S."""
        oldest = loop_time() - IDLE_S
        self._kept = {name: snapshot for name, snapshot in self._kept.items() if snapshot.last_used >= oldest}

    async def _find_or_make(self, stage: int, at_least: int) -> _Snapshot | None:
        """Returns the stage's newest snapshot if it is fresh, otherwise makes one; None if there is nothing to give.

        Drops snapshots that nobody has used for long, and further ones to make room.
        at_least: the step that the asking peer needs; a snapshot of an earlier step is fresh for a shorter time, see
        REMAKE_FACTOR. If there is no room for a new one, returns the newest although it is old; raises Busy without
        snapshot of the stage.
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
        # A kept snapshot of the same name has the same bytes, but may be of an earlier step: it is replaced.
        snapshot = self._kept[name] = _Snapshot(name, state, hashes)
        snapshot.made_at = loop_time()
        snapshot.copying_s = max(snapshot.made_at - started_at, SHORTEST_COPY_S)
        return snapshot

    def _make_room(self, nbytes: int) -> bool:
        """Drops the longest unused snapshots until `nbytes` more fit; returns whether they fit.

        Returns False as soon as the next one to drop was used within IN_USE_S.
        """
        while self._kept and self.nbytes + nbytes > MAX_BYTES:
            longest_unused = min(self._kept.values(), key=lambda s: s.last_used)
            if loop_time() - longest_unused.last_used < IN_USE_S:
                return False
            del self._kept[longest_unused.name]
        return True
