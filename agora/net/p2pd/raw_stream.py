"""Streams of plain bytes between peers: a circuit's two halves, and a connection through a punched hole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from agora_protocol.ids import PeerId

from agora.core.calls import ConnectionBroken

READ_BYTES: Final = 262_144  # maximum number of bytes that one direction of a splice reads in one go, and holds


class RawStream:
    """Reads and writes plain bytes on one stream. peer: the other end, as p2pd names it, "" for a plain connection.

    is_relayed: whether the stream goes through another peer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: PeerId | None = None) -> None:
        self.peer = peer or PeerId("")
        self.is_relayed = False
        self._reader = reader
        self._writer = writer

    async def read_message(self, max_bytes: int) -> bytes:
        """Reads the next message, which has its length (a varint) before it, and returns it without the length.

        Raises ConnectionBroken when the stream ends first, ValueError for a malformed length or one above `max_bytes`.
        """
        try:
            length = shift = 0
            while True:
                byte = (await self._reader.readexactly(1))[0]
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
                if shift > 28:
                    raise ValueError("a message's length is not a number")
            if length > max_bytes:
                raise ValueError(f"a message of {length} bytes, of {max_bytes} at most")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ConnectionBroken("the stream ended") from error

    async def read(self) -> bytes:
        """Waits for bytes, and returns at most READ_BYTES of them; b"" at the end.

        Raises OSError when the stream broke.
        """
        return await self._reader.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Sends bytes, and waits while many are still to be sent. Raises ConnectionBroken when the stream is gone."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken("the stream ended") from error

    def abort(self) -> None:
        """Ends the stream immediately, both ways; what is not sent yet is lost."""
        self._writer.transport.abort()


LetPass = Callable[[int], Awaitable[None]]


async def splice(one: RawStream, other: RawStream, let_pass: LetPass | None = None) -> None:
    """Carries bytes both ways between two streams until either ends or breaks, then aborts both.

    let_pass: awaited with the number of bytes, of either direction, before they are sent on; None: they pass at once.
    """
    pumps = [asyncio.ensure_future(_pump(one, other, let_pass)), asyncio.ensure_future(_pump(other, one, let_pass))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        one.abort()
        other.abort()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: RawStream, sink: RawStream, let_pass: LetPass | None) -> None:
    try:
        while data := await source.read():
            if let_pass is not None:
                await let_pass(len(data))
            await sink.write(data)
    except (OSError, ConnectionBroken):
        return
