"""Fetches tensors of the base model in pieces, from several peers at the same time, into the store."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.messages import BaseIndex, GetBase, GetPiece, TensorPiece
from agora_protocol.tensor_list import ListedTensor, TensorList, bits_to_held, count_pieces

from agora.core.calls import PeerCaller, Reply
from agora.core.clock import loop_time
from agora.state.chunk_fetch import (
    CHUNK_TIMEOUT_S,
    INDEX_TIMEOUT_S,
    MAX_SOURCE_FAILURES,
    TICK_INTERVAL_S,
    ChunkFetch,
    Source,
    call_until,
)
from agora.state.chunk_schedule import ChunkSchedule
from agora.swarm.peer_score import ReportViolation, Violation
from agora.tuning.base.server import LIST
from agora.tuning.base.store import BaseModelError, TensorStore
from agora.tuning.base.tensors import malformed_list_error

# Seconds until a source that had nothing of what is missing is asked again which tensors it has.
EMPTY_SOURCE_RETRY_INTERVAL_S: Final = 5.0
# Seconds until a source that has failed MAX_SOURCE_FAILURES times in a row is tried again.
FAILED_SOURCE_RETRY_INTERVAL_S: Final = 30.0
SOURCES_INTERVAL_S: Final = 2.0  # seconds between two readings of the list of sources
TIMEOUT_S: Final = 60.0  # the fetch fails after so many seconds with neither an open piece call nor a Busy answer
BUSY_TIMEOUT_S: Final = 1800.0  # seconds without a new piece, after which Busy answers no longer keep the fetch alive
NO_PEER_TIMEOUT_S: Final = 15.0  # takes the place of TIMEOUT_S while there is no other peer at all

ListSources = Callable[[], Sequence[PeerId]]  # returns the peers that may be asked now, the likeliest first
HeldTensors = frozenset[int]  # the numbers of the tensors that a source has


class CorruptBaseError(ProtocolError):
    """Raised when a peer's answer to GetBase or GetPiece is malformed or contradicts the run's tensor list.

    No network fault causes such an answer: it is a violation.
    """


@dataclass(frozen=True, slots=True)
class PieceKey:
    """Names one piece to fetch. number: the tensor's number in the tensor list. piece: the piece's, in the tensor."""

    number: int
    piece: int


class BaseFetch:
    """Fetches the tensor list (fetch_list), then tensors (fetch), from several sources concurrently, into the store.

    Each piece is checked by its hash before it is written. A source that has none of the missing tensors is asked again
    later which ones it has: it may be fetching them itself. A source that sent corrupt data is asked for nothing more.
    The fetch fails when no source could give anything for TIMEOUT_S, or NO_PEER_TIMEOUT_S without any source; arrived
    pieces stay in the store.
    """

    def __init__(
        self,
        peer_caller: PeerCaller,
        list_hash: str,
        store: TensorStore,
        list_sources: ListSources,
        report_violation: ReportViolation,
        on_tensor: Callable[[int], None] = lambda number: None,
    ) -> None:
        """list_hash: the SHA-256 of the tensor list. on_tensor: called with the number of each tensor completed."""
        self.tensor_list: TensorList | None = None
        self.bytes_from: Counter[PeerId] = Counter()  # how many bytes of tensors each peer has given
        self._peer_caller = peer_caller
        self._list_hash = list_hash
        self._store = store
        self._list_sources = list_sources
        self._report_violation = report_violation
        self._on_tensor = on_tensor
        self._on_piece: Callable[[], None] = lambda: None
        # A chunk of the schedule is a place in `_pieces`.
        self._chunks = ChunkFetch[HeldTensors](self._ask_for_index, self._fetch_piece, can_give=self._holds)
        self._pieces: Sequence[PieceKey] = ()
        self._listed: Mapping[int, ListedTensor] = {}
        self._missing: Counter[int] = Counter()  # tensor number -> how many of its pieces are not in the store
        self._refresh_at = 0.0
        self._finishing: dict[int, asyncio.Task[None]] = {}  # tensors of which every piece is written, by number
        self._last_arrival = 0.0  # loop time at which the newest piece arrived
        self._last_progress_at = 0.0  # loop time of the last arrival, open call for a piece, or Busy answer

    @property
    def schedule(self) -> ChunkSchedule:
        return self._chunks.schedule

    async def fetch_list(self, known: TensorList | None) -> TensorList:
        """Sets and returns `tensor_list`: `known` if that is not None, without a call, or one fetched from a peer.

        Raises BaseModelError when no peer gives the list, or when it is malformed although it has the right hash.
        """
        self.tensor_list = known
        await self._run(lambda: self.tensor_list is not None)
        assert self.tensor_list is not None
        return self.tensor_list

    async def fetch(self, missing: Mapping[int, Sequence[int]], on_piece: Callable[[], None] = lambda: None) -> None:
        """Fetches pieces into the store, and returns when every tensor in `missing` is complete there.

        To be called after fetch_list, and after the store has begun these tensors. missing: tensor number -> numbers of
        its missing pieces; [] if only the completion of the tensor is missing. on_piece: called after each piece that
        was written. Raises BaseModelError when no peer gives some piece, DiskError when one cannot be written.
        """
        assert self.tensor_list is not None
        self._on_piece = on_piece
        self._listed = {number: self.tensor_list.tensors[number] for number in missing}
        self._pieces = [PieceKey(number, piece) for number in sorted(missing) for piece in missing[number]]
        self._missing = Counter({number: len(pieces) for number, pieces in missing.items()})
        for number in [number for number, pieces in missing.items() if not pieces]:
            self._finish(number)
        self.schedule.restart(len(self._pieces))
        await self._run(lambda: self.schedule.is_complete and not self._missing)

    async def _run(self, is_done: Callable[[], bool]) -> None:
        self._last_progress_at = self._last_arrival = loop_time()
        self._refresh_at = 0.0
        try:
            while not is_done():
                await self._advance()
        finally:
            await self._chunks.close()
            await asyncio.gather(*self._finishing.values(), return_exceptions=True)
            self._take_finished()

    async def _advance(self) -> None:
        now = loop_time()
        if now >= self._refresh_at:
            self._refresh_at = now + SOURCES_INTERVAL_S
            self._chunks.update_sources(self._list_sources())
        self._ask_useless_sources_again(now)
        self._chunks.ask_for_indexes(now)
        self._chunks.ask_for_chunks(now)
        sources = self._chunks.sources
        # A slow source is no reason to fail: its call has a deadline of its own.
        if any(chunk is not None for source in sources.values() for chunk in source.calls):
            self._last_progress_at = now
        if now - self._last_progress_at > (TIMEOUT_S if sources else NO_PEER_TIMEOUT_S):
            raise BaseModelError(self._explain_failure())
        await self._chunks.wait(TICK_INTERVAL_S, self._finishing.values())
        self._take_finished()

    def _ask_useless_sources_again(self, now: float) -> None:
        for source in self._chunks.usable_sources:
            held = source.offer
            if held is not None and not source.calls and not any(number in held for number in self._missing):
                source.offer, source.not_before = None, now + EMPTY_SOURCE_RETRY_INTERVAL_S

    def _holds(self, held: HeldTensors, chunk: int) -> bool:
        return self._pieces[chunk].number in held

    def _finish(self, number: int) -> None:
        self._finishing[number] = asyncio.create_task(asyncio.to_thread(self._store.finish, number))

    def _take_finished(self) -> None:
        for number, task in [(number, task) for number, task in self._finishing.items() if task.done()]:
            del self._finishing[number]
            task.result()
            del self._missing[number]
            self._on_tensor(number)

    def _explain_failure(self) -> str:
        what = "the list of the base model's tensors"
        if self.tensor_list is not None and self._missing:
            first = self._listed[min(self._missing)].name
            what = f"the base model's tensor {first}" + (f" and {n - 1} more" if (n := len(self._missing)) > 1 else "")
        sources = self._chunks.sources.values()
        reasons = [f"{source.peer[-6:]}: {source.last_error}" for source in sources if source.last_error]
        why = "; ".join(reasons[:3]) or ("they say that they have none" if sources else "there is no other peer")
        return (
            f"No peer of the run gives {what} ({why}); start a peer that has the model's files, or name a folder here "
            "that has them: --base-model DIR"
        )

    # --- calls

    async def _ask_for_index(self, source: Source[HeldTensors]) -> None:
        try:
            reply = await call_until(self._peer_caller, source.peer, GetBase, loop_time() + INDEX_TIMEOUT_S)
            tensors = self.tensor_list or await self._fetch_tensor_list(source.peer, _read_list_size(reply))
            source.offer = _read_held(reply, tensors)
        except AgoraError as error:
            self._handle_failure(source, error)
            return
        self.tensor_list = self.tensor_list or tensors
        source.failures = 0

    async def _fetch_tensor_list(self, peer: PeerId, size: int) -> TensorList:
        data = bytearray()
        for piece in range(count_pieces(size)):
            reply = await self._get_piece(peer, LIST, piece)
            data += _check_piece(reply, min(STATE_CHUNK_BYTES, size - len(data)))
            self._last_progress_at = self._last_arrival = loop_time()
        if hashlib.sha256(data).hexdigest() != self._list_hash:
            raise CorruptBaseError("bad-message", "The tensor list is not the one that the manifest names.")
        try:
            return await asyncio.to_thread(TensorList.from_bytes, bytes(data))
        except ProtocolError as error:
            raise malformed_list_error(error) from error

    async def _fetch_piece(self, source: Source[HeldTensors], held: HeldTensors, chunk: int) -> None:
        key, started_at = self._pieces[chunk], loop_time()
        listed = self._listed[key.number]
        try:
            reply = await self._get_piece(source.peer, key.number, key.piece)
            data = _check_piece(reply, listed.piece_bytes(key.piece))
            if not await asyncio.to_thread(listed.is_piece, key.piece, data):
                raise CorruptBaseError("bad-tensor", f"Piece {key.piece} of {listed.name} has another SHA-256.")
        except AgoraError as error:
            self._handle_failure(source, error, key)
            return
        source.record_chunk(loop_time() - started_at)
        await asyncio.to_thread(self._store.write_piece, key.number, listed, key.piece, data)
        if chunk in self.schedule.arrived_chunks:
            return  # another source's call was faster while this one wrote
        self._chunks.record_arrival(source, chunk)
        self._last_arrival = loop_time()
        self.bytes_from[source.peer] += len(data)
        self._missing[key.number] -= 1
        if not self._missing[key.number]:
            self._finish(key.number)
        self._on_piece()

    async def _get_piece(self, peer: PeerId, number: int, piece: int) -> Reply:
        return await call_until(
            self._peer_caller, peer, partial(GetPiece, number, piece), loop_time() + CHUNK_TIMEOUT_S
        )

    # --- failures

    # | error | what follows |
    # |---|---|
    # | CorruptBaseError | a violation is reported; the source is asked for nothing more |
    # | another ProtocolError | the source is asked for nothing more |
    # | Busy | a pause as long as the source asks for, within bounds |
    # | refused to list what it has | the source is asked again after EMPTY_SOURCE_RETRY_INTERVAL_S |
    # | refused a tensor | the source counts as not having this tensor |
    # | any other | a pause, longer each time; after MAX_SOURCE_FAILURES in a row, FAILED_SOURCE_RETRY_INTERVAL_S |
    def _handle_failure(self, source: Source[HeldTensors], error: AgoraError, key: PieceKey | None = None) -> None:
        if isinstance(error, BaseModelError):
            raise error  # the manifest itself is wrong: no other source can help
        now, source.last_error = loop_time(), str(error)
        if isinstance(error, CorruptBaseError):
            self._report_violation(source.peer, Violation.FALSE_BASE, f"{error.code}: {error}")
        if isinstance(error, ProtocolError):
            source.give_up(str(error))
        elif isinstance(error, Refused) and not isinstance(error, Busy):
            if key is None:
                source.not_before = now + EMPTY_SOURCE_RETRY_INTERVAL_S
            elif source.offer is not None:
                source.offer -= {key.number}
        else:
            source.record_failure(error, now)
            if isinstance(error, Busy) and now < self._last_arrival + BUSY_TIMEOUT_S:
                self._last_progress_at = now
            if source.failures >= MAX_SOURCE_FAILURES:
                source.offer, source.failures, source.not_before = None, 0, now + FAILED_SOURCE_RETRY_INTERVAL_S


def _read_list_size(reply: Reply) -> int:
    if not isinstance(reply.message, BaseIndex):
        raise CorruptBaseError("bad-message", f"GetBase was answered by {type(reply.message).__name__}.")
    return reply.message.size


def _read_held(reply: Reply, tensors: TensorList) -> frozenset[int]:
    if _read_list_size(reply) != len(tensors.to_bytes()):
        raise CorruptBaseError("bad-message", "The list has another size than a peer says.")
    (bits,) = reply.tensors
    if bits.dtype != "uint8" or len(bits.shape) != 1:
        raise CorruptBaseError("bad-tensor", "What a peer has is not uint8 [n].")
    try:
        return bits_to_held(bits.data, len(tensors.tensors))
    except ProtocolError as error:
        raise CorruptBaseError(error.code, str(error)) from error


def _check_piece(reply: Reply, nbytes: int) -> memoryview:
    tensor = reply.tensors[0] if isinstance(reply.message, TensorPiece) and reply.tensors else None
    if tensor is None or (tensor.dtype, tensor.shape) != ("uint8", (nbytes,)):
        raise CorruptBaseError("bad-tensor", f"A piece is not uint8 [{nbytes}].")
    return tensor.data
