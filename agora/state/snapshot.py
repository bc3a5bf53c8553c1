"""Gives copies of this peer's stages to other peers: made when asked for, kept for a while, shared by several peers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.errors import Busy, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.messages import Chunk, GetChunk, GetSketches, GetState, Sketches, StateIndex
from agora_protocol.tensors import WireTensor
from numpy.typing import NDArray

from agora.core.calls import Reply
from agora.core.clock import loop_time
from agora.core.fair_shares import RateLimiter
from agora.core.step_schedule import ONLY_ALL_REDUCE
from agora.state.comparison import sketch_chunk
from agora.state.layout import HASH_BYTES, StageState, chunk_arrays, chunk_hashes, pack_chunk
from agora.state.rules import LAG_LIMIT

# The answer while there is no state to give.
NOTHING_TO_GIVE: Final = StateIndex(
    snapshot=b"",
    step=0,
    updates=0,
    agreed=0,
    lineage=0,
    slices=ONLY_ALL_REDUCE.fragments,
    change_at=ONLY_ALL_REDUCE.change_at,
    later_slices=ONLY_ALL_REDUCE.later_fragments,
    size=0,
)
RETRY_MS: Final = 1000
# A snapshot is given for at most this many seconds: an older one would leave the joiner too many steps behind.
FRESH_S: Final = 30.0
FRESH_FACTOR: Final = 10.0  # A snapshot is given for at most this many times the seconds that copying it took
REMAKE_FACTOR: Final = 2.0  # takes the place of FRESH_FACTOR for a joiner that needs a later step than the snapshot's
SHORTEST_COPY_S: Final = 0.02  # a copy counts as having taken at least this long
IN_USE_S: Final = 10.0  # seconds after its last use during which a snapshot is not dropped to make room for another
IDLE_TIMEOUT_S: Final = 60.0  # seconds after its last use at which a snapshot is dropped
MAX_BYTES: Final = 2**31  # of all snapshots together
# One requester's wish for a later step holds up training at most this often; in between, it waits as others do.
REMAKE_INTERVAL_S: Final = 60.0
# A requester may have this many chunks sketched per second, and in one burst: each takes a core about 10 ms.
SKETCHED_PER_S, SKETCHED_BURST = 16.0, 4096.0


@dataclass(slots=True)
class _Snapshot:
    digest: bytes  # the SHA-256 of `hashes`, by which peers ask for chunks
    state: StageState
    hashes: bytes  # the chunks' SHA-256, concatenated
    made_at: float  # loop time
    copying_s: float  # seconds that copying and hashing took
    last_used: float = 0.0  # loop time


class SnapshotServer:
    """Answers GetState, GetChunk and GetSketches: copies a stage when asked, and gives one copy to several peers."""

    def __init__(
        self,
        export: Callable[[int], Awaitable[StageState | None]],
        nbytes_of: Callable[[int], int],
        step_of: Callable[[int], int],
    ) -> None:
        """export: returns a copy of a stage's state, or None while there is none.

        nbytes_of: returns a copy's bytes. step_of: returns the step that a copy made now would be of.
        """
        self._export = export
        self._nbytes_of = nbytes_of
        self._step_of = step_of
        self._remakes = RateLimiter(1 / REMAKE_INTERVAL_S, 1.0)
        self._sketched = RateLimiter(SKETCHED_PER_S, SKETCHED_BURST)
        self._sketching = asyncio.Lock()  # sketches take at most one core, however many requesters ask
        self._kept: dict[bytes, _Snapshot] = {}
        self.last_given_at: float | None = None  # loop time
        self._copying: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def nbytes(self) -> int:
        return sum(snapshot.state.layout.nbytes for snapshot in self._kept.values())

    async def get_state(self, request: GetState, requester: PeerId) -> Reply:
        """Returns a StateIndex and the chunk hashes of the stage's newest snapshot if that is fresh, or of a new one.

        Without room for a new one, it gives the newest one, although that is not fresh. Requests for one stage are
        served one after the other, so that they share a copy. Raises Busy when there is no room and no snapshot of the
        stage, and Refused for a step that is more than LAG_LIMIT ahead.
        """
        step = self._step_of(request.stage)
        if step and request.at_least > step + LAG_LIMIT:
            raise Refused(f"this peer is at step {step}, far from {request.at_least}; ask one that has come there")
        async with self._copying[request.stage]:
            snapshot = await self._find_or_make(request.stage, request.at_least, requester)
        if snapshot is None:
            return Reply(NOTHING_TO_GIVE)
        snapshot.last_used = self.last_given_at = loop_time()
        state = snapshot.state
        hashes = WireTensor("uint8", (state.layout.chunk_count, HASH_BYTES), memoryview(snapshot.hashes))
        index = StateIndex(
            snapshot=snapshot.digest,
            step=state.step,
            updates=state.updates,
            agreed=state.agreed_step,
            lineage=state.history_hash,
            slices=state.sync_schedule.fragments,
            change_at=state.sync_schedule.change_at,
            later_slices=state.sync_schedule.later_fragments,
            size=state.layout.nbytes,
        )
        return Reply(index, [hashes])

    async def get_chunk(self, request: GetChunk) -> Reply:
        """Raises Refused for a snapshot that is not kept any more, ProtocolError for a chunk that it lacks."""
        snapshot = self._use(request.snapshot, request.chunk)
        data = await asyncio.to_thread(pack_chunk, snapshot.state, request.chunk)
        return Reply(Chunk(), [WireTensor("uint8", (len(data),), memoryview(data))])

    async def get_sketches(self, request: GetSketches, requester: PeerId) -> Reply:
        """Returns sketches by which a peer compares the snapshot with others. Raises as get_chunk, and Busy.

        Busy is for a requester that has had more sketched than a fetch needs.
        """
        state = self._use(request.snapshot, request.first + request.count - 1).state
        if not self._sketched.take(requester, loop_time(), request.count):
            raise Busy("you have asked for many sketches; ask again for these", RETRY_MS)

        def sketch() -> NDArray[np.float32]:
            chunks = range(request.first, request.first + request.count)
            made = [sketch_chunk(chunk_arrays(state, chunk), state.layout, chunk, request.seed) for chunk in chunks]
            return np.stack(made).astype("<f4")

        async with self._sketching:
            sums = await asyncio.to_thread(sketch)
        return Reply(Sketches(), [WireTensor("float32", sums.shape, sums.data.cast("B"))])

    def _use(self, digest: bytes, last_chunk: int) -> _Snapshot:
        snapshot = self._kept.get(digest)
        if snapshot is None:
            raise Refused("this snapshot is not kept any more; ask for the state again")
        if last_chunk >= (count := snapshot.state.layout.chunk_count):
            raise ProtocolError("bad-message", f"The snapshot has {count} chunks; ask for one of them.")
        snapshot.last_used = self.last_given_at = loop_time()
        return snapshot

    def drop_idle(self) -> None:
        oldest = loop_time() - IDLE_TIMEOUT_S
        self._kept = {digest: snapshot for digest, snapshot in self._kept.items() if snapshot.last_used >= oldest}

    async def _find_or_make(self, stage: int, at_least: int, requester: PeerId) -> _Snapshot | None:
        self.drop_idle()
        started_at = loop_time()
        newest = max((s for s in self._kept.values() if s.state.stage == stage), key=lambda s: s.made_at, default=None)
        if newest:
            # Copying holds up training: the longer a copy takes, the longer it is given.
            age_s = started_at - newest.made_at
            if age_s < min(REMAKE_FACTOR * newest.copying_s, FRESH_S):
                return newest
            is_fresh = age_s < min(FRESH_FACTOR * newest.copying_s, FRESH_S)
            if is_fresh and (newest.state.step >= at_least or not self._remakes.take(requester, started_at)):
                return newest
        expected_bytes = max(self._nbytes_of(stage), newest.state.layout.nbytes if newest else 0)
        if not self._make_room(expected_bytes):
            if newest is None:
                raise Busy("copies that others are fetching take all room; ask another peer", RETRY_MS)
            return newest  # it is older than it should be, but the joiner may still find a newer one elsewhere
        if (state := await self._export(stage)) is None:
            return None
        hashes = await asyncio.to_thread(chunk_hashes, state)
        digest = hashlib.sha256(hashes).digest()
        made_at = loop_time()
        copying_s = max(made_at - started_at, SHORTEST_COPY_S)
        # A kept snapshot of the same digest has the same bytes, but may be of an earlier step: it is replaced.
        snapshot = self._kept[digest] = _Snapshot(digest, state, hashes, made_at, copying_s)
        return snapshot

    def _make_room(self, nbytes: int) -> bool:
        excess = self.nbytes + nbytes - MAX_BYTES
        dropped: list[bytes] = []
        for snapshot in sorted(self._kept.values(), key=lambda s: s.last_used):
            if excess <= 0:
                break
            if loop_time() - snapshot.last_used < IN_USE_S:
                return False  # a peer that fetches it would have to begin again
            excess -= snapshot.state.layout.nbytes
            dropped.append(snapshot.digest)
        for digest in dropped:
            del self._kept[digest]
        return True
