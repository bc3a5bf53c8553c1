"""Fetches tensors of the base model in pieces, from several peers concurrently; sources may die.

Hang or send bad data.
"""

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

from agora.core.calls import Caller, Reply
from agora.core.clock import loop_time
from agora.state.chunk_schedule import ChunkSchedule
from agora.state.chunk_source import CHUNK_S, FAILURES, SLOW_S, SOURCES, TICK_S, ChunkSource, cancel_and_await
from agora.state.offers import milliseconds_until
from agora.swarm.peer_score import ReportViolation, Violation
from agora.tuning.base.server import LIST
from agora.tuning.base.store import BaseModelError, TensorStore
from agora.tuning.base.tensors import malformed_list_error

INDEX_S: Final = 30.0  # seconds a source may take to answer which tensors it has
AGAIN_S: Final = 5.0  # seconds until a source that had nothing of what is missing is asked again which tensors it has
RETRY_FAILED_S: Final = 30.0  # seconds until a source that has failed FAILURES times in a row is tried again
LIST_SOURCES_S: Final = 2.0  # seconds between two readings of the list of sources
TIMEOUT_S: Final = 60.0  # the fetch fails after so many seconds with neither an open piece call nor a Busy answer
BUSY_TIMEOUT_S: Final = 1800.0  # seconds without a new piece, after which Busy answers no longer keep the fetch alive
NO_PEER_TIMEOUT_S: Final = 15.0  # takes the place of TIMEOUT_S while there is no other peer at all

ListSources = Callable[[], Sequence[PeerId]]  # returns the peers that may be asked now, the likeliest first


class CorruptBaseError(ProtocolError):
    """Raised when a peer's answer to GetBase or GetPiece is malformed or contradicts the run's tensor list.

    Such an answer is an offence: `_handle_failure` reports it and excludes the peer.
    """


@dataclass(frozen=True, slots=True)
class PieceKey:
    """Names one piece to fetch. number: the tensor's number in the tensor list. piece: the piece's, in the tensor."""

    number: int
    piece: int


@dataclass(slots=True)
class _BaseSource(ChunkSource[int | None]):
    """A peer that tensors are fetched from. is_excluded: the peer is asked for nothing any more.

    calls: the key is the piece's index in BaseFetch.schedule, or None for the call that asks which tensors the peer
    has. held: the numbers of the tensors that the peer has; None while this is not known, or is to be asked again.
    """

    held: frozenset[int] | None = None
    is_excluded: bool = False


class BaseFetch:
    """Fetches the tensor list (fetch_list), then tensors (fetch), from several sources concurrently, into the store.

    Each piece is checked by its hash before it is written. A source that has none of the missing tensors is asked again
    later which ones it has. A source that sent corrupt data is asked for nothing more. The fetch fails when no source
    could give anything for TIMEOUT_S, or NO_PEER_TIMEOUT_S without any source; arrived pieces stay in the store.
    """

    def __init__(
        self,
        caller: Caller,
        list_hash: str,
        store: TensorStore,
        list_sources: ListSources,
        report_violation: ReportViolation,
        on_tensor: Callable[[int], None] = lambda number: None,
    ) -> None:
        """list_hash: the SHA-256 of the tensor list. on_tensor: called with the number of each tensor completed."""
        self.tensor_list: TensorList | None = None
        self.bytes_from: Counter[PeerId] = Counter()  # how many bytes of tensors each peer has given
        self.schedule = ChunkSchedule(0)
        self._caller = caller
        self._list_hash = list_hash
        self._store = store
        self._list_sources = list_sources
        self._report_violation = report_violation
        self._on_tensor = on_tensor
        self._on_piece: Callable[[], None] = lambda: None
        self._sources: dict[PeerId, _BaseSource] = {}
        self._pieces: Sequence[PieceKey] = ()
        self._listed: Mapping[int, ListedTensor] = {}
        self._missing: Counter[int] = Counter()  # tensor number -> how many of its pieces are not in the store
        self._refresh_at = 0.0
        self._finishing: dict[int, asyncio.Task[None]] = {}  # tensors of which every piece is written, by number
        self._last_arrival = 0.0  # loop time at which the newest piece arrived
        self._last_progress_at = 0.0  # loop time of the last arrival, open call for a piece, or Busy answer

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
        its missing pieces; [] if only the completion of the tensor is missing. on_piece: called after each
        piece that was written to the store. Raises BaseModelError when no peer gives
        some piece, DiskError when a piece cannot be written.
        """
        assert self.tensor_list is not None
        self._on_piece = on_piece
        self._listed = {number: self.tensor_list.tensors[number] for number in missing}
        self._pieces = [PieceKey(number, piece) for number in sorted(missing) for piece in missing[number]]
        self._missing = Counter({number: len(pieces) for number, pieces in missing.items()})
        for number in [number for number, pieces in missing.items() if not pieces]:
            self._finish(number)
        self.schedule = ChunkSchedule(len(self._pieces))
        await self._run(lambda: self.schedule.is_complete and not self._missing)

    async def _run(self, is_done: Callable[[], bool]) -> None:
        self._last_progress_at = self._last_arrival = loop_time()
        self._refresh_at = 0.0
        try:
            while not is_done():
                await self._advance()
        finally:
            await cancel_and_await([task for source in self._sources.values() for task, _ in source.calls.values()])
            await asyncio.gather(*self._finishing.values(), return_exceptions=True)
            self._collect_ended()

    async def _advance(self) -> None:
        now = loop_time()
        self._refresh_sources(now)
        self._ask_for_indexes(now)
        self._ask_for_pieces(now)
        calls = [task for source in self._sources.values() for task, _ in source.calls.values()]
        calls += self._finishing.values()
        if any(key is not None for source in self._sources.values() for key in source.calls):
            self._last_progress_at = now
        if now - self._last_progress_at > (TIMEOUT_S if self._sources else NO_PEER_TIMEOUT_S):
            raise BaseModelError(self._explain_failure())
        if calls:
            await asyncio.wait(calls, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(TICK_S)
        self._collect_ended()

    def _collect_ended(self) -> None:
        for source in self._sources.values():
            for chunk, task in source.take_ended_calls():
                if chunk is not None:
                    self.schedule.record_call_end(chunk, source.peer)
                if not task.cancelled():
                    task.result()
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
        reasons = [f"{source.peer[-6:]}: {source.last_error}" for source in self._sources.values() if source.last_error]
        why = "; ".join(reasons[:3]) or ("they say that they have none" if self._sources else "there is no other peer")
        return (
            f"No peer of the run gives {what} ({why}); start a peer that has the model's files, or name a folder here "
            "that has them: --base-model DIR"
        )

    # --- starting calls

    def _refresh_sources(self, now: float) -> None:
        # Excluded sources are kept, so that they stay excluded.
        if now < self._refresh_at:
            return
        self._refresh_at = now + LIST_SOURCES_S
        listed = list(self._list_sources())
        for peer in listed:
            self._sources.setdefault(peer, _BaseSource(peer))
        gone = [peer for peer, source in self._sources.items() if peer not in listed and not source.calls]
        for peer in gone:
            if not self._sources[peer].is_excluded:
                del self._sources[peer]

    def _ask_for_indexes(self, now: float) -> None:
        usable = [source for source in self._sources.values() if not source.is_excluded]
        for source in usable:
            if source.held is not None and not source.calls and not self._has_missing(source):
                source.held, source.not_before = None, now + AGAIN_S
        engaged = [s for s in usable if None in s.calls or (s.held is not None and not s.failures)]
        not_slow = sum(1 for s in engaged if not s.is_slow(now, self._timeout_s(s)))
        idle = [s for s in usable if s.held is None and not s.calls and now >= s.not_before]
        for source in idle[: max(SOURCES - not_slow, 0)]:
            source.calls[None] = (asyncio.create_task(self._fetch_index(source)), now)

    def _has_missing(self, source: _BaseSource) -> bool:
        return source.held is not None and any(number in source.held for number in self._missing)

    def _timeout_s(self, source: _BaseSource) -> float:
        return SLOW_S if source.held is None else max(SLOW_S, 4 * self.schedule.median_s())

    def _ask_for_pieces(self, now: float) -> None:
        free = [s for s in self._sources.values() if s.held is not None and not s.is_excluded and now >= s.not_before]
        while free:
            free = [source for source in free if self._start_piece(source, now)]

    def _start_piece(self, source: _BaseSource, now: float) -> bool:
        held = source.held
        if held is None or len(source.calls) >= source.window:
            return False
        chunk = self.schedule.take(source.peer, now, lambda chunk: self._pieces[chunk].number in held)
        if chunk is None:
            return False
        source.calls[chunk] = (asyncio.create_task(self._fetch_piece(source, chunk)), now)
        return True

    # --- calls; each runs as a task of its own

    async def _fetch_index(self, source: _BaseSource) -> None:
        try:
            reply = await self._call(source, GetBase, INDEX_S)
            tensors = self.tensor_list or await self._fetch_tensor_list(source, _read_list_size(reply))
            source.held = _read_held(reply, tensors)
        except AgoraError as error:
            self._handle_failure(source, error)
            return
        self.tensor_list = self.tensor_list or tensors
        source.failures = 0

    async def _fetch_tensor_list(self, source: _BaseSource, size: int) -> TensorList:
        data = bytearray()
        for piece in range(count_pieces(size)):
            reply = await self._call(source, partial(GetPiece, LIST, piece), CHUNK_S)
            data += _check_piece(reply, min(STATE_CHUNK_BYTES, size - len(data)))
            self._last_progress_at = self._last_arrival = loop_time()
        if hashlib.sha256(data).hexdigest() != self._list_hash:
            raise CorruptBaseError("bad-message", "The tensor list is not the one that the manifest names.")
        try:
            return await asyncio.to_thread(TensorList.from_bytes, bytes(data))
        except ProtocolError as error:
            raise malformed_list_error(error) from error

    async def _fetch_piece(self, source: _BaseSource, chunk: int) -> None:
        key, started_at = self._pieces[chunk], loop_time()
        listed = self._listed[key.number]
        try:
            reply = await self._call(source, partial(GetPiece, key.number, key.piece), CHUNK_S)
            data = _check_piece(reply, listed.piece_bytes(key.piece))
            if not await asyncio.to_thread(listed.is_piece, key.piece, data):
                raise CorruptBaseError("bad-tensor", f"Piece {key.piece} of {listed.name} has another SHA-256.")
        except AgoraError as error:
            self._handle_failure(source, error, key)
            return
        source.record_chunk(loop_time() - started_at)
        await asyncio.to_thread(self._store.write_piece, key.number, listed, key.piece, data)
        if chunk in self.schedule.arrived_chunks:
            return
        for peer in self.schedule.record_arrival(chunk, source.peer, loop_time()):
            self._sources[peer].calls[chunk][0].cancel()
        self._last_arrival = loop_time()
        self.bytes_from[source.peer] += len(data)
        self._missing[key.number] -= 1
        if not self._missing[key.number]:
            self._finish(key.number)
        self._on_piece()

    def _finish(self, number: int) -> None:
        self._finishing[number] = asyncio.create_task(asyncio.to_thread(self._store.finish, number))

    async def _call(self, source: _BaseSource, make: Callable[[int], GetBase | GetPiece], within_s: float) -> Reply:
        deadline = loop_time() + within_s
        return await self._caller.call(source.peer, make(milliseconds_until(deadline)), deadline=deadline)

    # --- failures

    def _handle_failure(self, source: _BaseSource, error: AgoraError, key: PieceKey | None = None) -> None:
        if isinstance(error, BaseModelError):
            raise error
        now, source.last_error = loop_time(), str(error)
        if isinstance(error, CorruptBaseError):
            self._report_violation(source.peer, Violation.FALSE_BASE, f"{error.code}: {error}")
        if isinstance(error, ProtocolError):
            source.is_excluded, source.held = True, None
            source.cancel_calls()
        elif isinstance(error, Refused) and not isinstance(error, Busy):
            if key is None:
                source.not_before = now + AGAIN_S
            elif source.held is not None:
                source.held -= {key.number}
        else:
            source.record_failure(error, now)
            if isinstance(error, Busy) and now < self._last_arrival + BUSY_TIMEOUT_S:
                self._last_progress_at = now
            if source.failures >= FAILURES:
                source.held, source.failures, source.not_before = None, 0, now + RETRY_FAILED_S


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
