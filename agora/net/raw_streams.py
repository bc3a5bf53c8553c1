"""Streams of plain bytes between peers: a circuit's two halves, and a connection through a punched hole.

Knows: p2pd's preamble, lengths before messages. Must not know: what the bytes are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from agora_protocol.ids import PeerId

from agora.net.network_errors import ConnectionBroken

READ_BYTES: Final = 262_144
"""Bytes that one direction of a splice reads at once, and holds, at most."""


class RawStream:
    """Reads and writes plain bytes on one stream. peer: the other end, as p2pd names it, "" for a local connection.

    is_relayed: whether the stream goes through another peer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: PeerId | None = None) -> None:
        self.peer = peer or PeerId("")
        self.is_relayed = False
        self._reader = reader
        self._writer = writer

    async def read_message(self, most: int) -> bytes:
        """Returns the next message, without the length (a varint) before it.

        Raises ConnectionBroken when the stream ends first, ValueError for a length above `most` bytes.
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
            if length > most:
                raise ValueError(f"a message of {length} bytes, of {most} at most")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ConnectionBroken("the stream ended") from error

    async def read(self) -> bytes:
        """Returns what comes next, at most READ_BYTES; b"" at the end. Raises OSError when the stream broke."""
        return await self._reader.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Sends bytes, and waits while many are still to be sent. Raises ConnectionBroken when the stream is gone."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken("the stream ended") from error

    def abort(self) -> None:
        """Ends the stream at once, both ways."""
        self._writer.transport.abort()


async def no_limit(_size: int) -> None:
    """Lets bytes pass at once."""


async def splice(one: RawStream, other: RawStream, carry: Callable[[int], Awaitable[None]] = no_limit) -> None:
    """Carries bytes both ways between two streams until either ends, then ends both.

    carry: awaited with the number of bytes before they are sent on.
    """
    pumps = [asyncio.ensure_future(_pump(one, other, carry)), asyncio.ensure_future(_pump(other, one, carry))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        one.abort()
        other.abort()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: RawStream, sink: RawStream, carry: Callable[[int], Awaitable[None]]) -> None:
    """Carries bytes one way until either stream ends."""
    try:
        while data := await source.read():
            await carry(len(data))
            await sink.write(data)
    except (OSError, ConnectionBroken):
        return
