"""Gives other peers tensors of the base model: answers GetBase and GetPiece for as long as the daemon lives.

A piece is hashed before it is given, so that no requester gets corrupt bytes of a damaged file.
"""

from __future__ import annotations

import asyncio
from typing import Final

from agora_protocol.errors import AgoraError, Busy, ProtocolError, Refused
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.messages import BaseIndex, GetBase, GetPiece, TensorPiece
from agora_protocol.tensor_list import TensorList, count_pieces, held_to_bits
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.tasks import run_in_thread
from agora.observe import events
from agora.observe.events import Report
from agora.tuning.base.tensors import BaseTensors

MAX_AT_ONCE: Final = 8  # pieces that are read at the same time; each takes STATE_CHUNK_BYTES of memory
RETRY_MS: Final = 500
LIST_TIMEOUT_S: Final = 5.0  # seconds a requester waits while files are hashed for the tensor list, before it gets Busy
LIST_RETRY_MS: Final = 5000
LIST: Final = -1  # the tensor number in GetPiece that stands for the tensor list itself


class BaseServer:
    """Answers other peers' requests for the base model's tensors that this machine has. `close` it at the end."""

    def __init__(self, base: BaseTensors, report: Report) -> None:
        self._base = base
        self._report = report
        self._opening: asyncio.Task[TensorList | None] | None = None  # finds or makes the list
        self._reading = 0  # pieces that are being read now

    async def close(self) -> None:
        """Cancels the task that makes the tensor list, if it runs, and awaits it; its thread may go on hashing."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    async def answer(self, request: GetBase | GetPiece) -> Reply:
        """Returns the answer: to GetBase the tensor list's size and a bitmap of tensors held here, to GetPiece a piece.

        If the list is not known, has it made and waits for that, up to LIST_TIMEOUT_S. Raises Refused if this peer does
        not have what is asked for, Busy if the list is still being made or MAX_AT_ONCE pieces are being read,
        ProtocolError if there is no such tensor or piece.
        """
        tensors = self._base.tensor_list or await self._open_list()
        if isinstance(request, GetPiece):
            return await self._give_piece(tensors, request)
        if not self._base.held:
            raise Refused("this peer has no tensor of the base model; ask another")
        bits = held_to_bits(self._base.held, len(tensors.tensors))
        index = BaseIndex(len(tensors.to_bytes()))
        return Reply(index, [WireTensor("uint8", (len(bits),), memoryview(bits))])

    async def _open_list(self) -> TensorList:
        if self._opening is None:
            self._opening = asyncio.create_task(self._find_list(), name="tensor list")
        opening = self._opening  # several calls may wait for this task: the first to wake may drop it, see below
        await asyncio.wait([opening], timeout=LIST_TIMEOUT_S)
        if not opening.done():
            raise Busy("this peer is hashing its files of the base model; ask again", LIST_RETRY_MS)
        try:
            tensors = opening.result()
        except AgoraError as error:
            if isinstance(error.__cause__, OSError):  # the disk may answer the next time
                self._drop_opening(opening)
            raise Refused("this peer's files of the base model are not usable; ask another") from error
        if tensors is None:  # they may be fetched later
            self._drop_opening(opening)
            raise Refused("this peer has neither all files of the base model nor their list; ask another")
        return tensors

    def _drop_opening(self, ended: asyncio.Task[TensorList | None]) -> None:
        if self._opening is ended:  # or a call that woke earlier has begun to look for the list again
            self._opening = None

    async def _find_list(self) -> TensorList | None:
        try:
            return await run_in_thread(self._base.open_list)
        except AgoraError as error:
            self._report(events.TaskFailed("tensor list", str(error)))
            raise

    async def _give_piece(self, tensors: TensorList, request: GetPiece) -> Reply:
        if request.tensor == LIST:
            data = tensors.to_bytes()
            _require_piece(request, len(data))
            begin = request.piece * STATE_CHUNK_BYTES
            return _piece_reply(data[begin : begin + STATE_CHUNK_BYTES])
        listed = self._base.find_listed(request.tensor)
        if listed is None:
            raise ProtocolError("bad-message", f"The list has {len(tensors.tensors)} tensors; ask for one of them.")
        _require_piece(request, listed.nbytes)
        location = self._base.location_of(request.tensor)
        if location is None:
            raise Refused("this peer does not have this tensor; ask another")
        if self._reading >= MAX_AT_ONCE:
            raise Busy(f"this peer gives {MAX_AT_ONCE} pieces already; ask again, or another", RETRY_MS)
        self._reading += 1
        try:
            data_read = await asyncio.to_thread(location.read_piece, listed, request.piece)
        except OSError:
            data_read = None
        finally:
            self._reading -= 1
        if data_read is None:
            self._base.drop(request.tensor)  # damaged on this disk: not given again
            self._report(events.BaseTensorDamaged(str(location.path), listed.name))
            raise Refused("this peer does not have this tensor any more; ask another")
        return _piece_reply(data_read)


def _require_piece(request: GetPiece, nbytes: int) -> None:
    if request.piece >= (count := count_pieces(nbytes)):
        raise ProtocolError("bad-message", f"There are {count} pieces; ask for one of them.")


def _piece_reply(data: bytes) -> Reply:
    return Reply(TensorPiece(), [WireTensor("uint8", (len(data),), memoryview(data))])
