"""Keeps all traffic of this daemon within its owner's limits: counts what p2pd's sockets carry, slows down streams.

It slows received bytes down by not reading them; p2pd then holds up to a flow-control window of each connection. The
sockets' bytes come from Linux' sock_diag(7), which is open to any user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agora.core.clock import loop_time
from agora.net.shaping.bandwidth import RateLimits, Throttle
from agora.net.shaping.link import LinkSpec
from agora.net.shaping.shaped_transport import AccessLink

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST and NLM_F_DUMP
NLMSG_ERROR, NLMSG_DONE = 2, 3  # kinds of netlink messages: a refusal, and the end of the list
INET_DIAG_INFO: Final = 2  # the attribute of a socket that holds struct tcp_info
HEADER_BYTES: Final = 52  # bytes of IPv4 and TCP headers with timestamps before each segment
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI48x")
_MESSAGE: Final = struct.Struct("=BBBB48xIIIII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_RECEIVED: Final = struct.Struct("=QII")  # at 128 of struct tcp_info: bytes_received, segs_out, segs_in
_SENT: Final = struct.Struct("=Q")  # at 200: bytes_sent, since Linux 4.19; retransmissions count
RECEIVED_AT, SENT_AT = 128, 200  # offsets in struct tcp_info of what _RECEIVED and _SENT read


@dataclass(frozen=True, slots=True)
class CarriedBytes:
    """Bytes that sockets have sent and received; both include an estimate of the TCP/IP headers."""

    sent: int = 0
    received: int = 0


class SocketCounter:
    """Adds up what all TCP sockets of one process have carried, including those that were closed between two reads.

    `read` must be called often: what a socket carries between the last read and its closing is not counted.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: dict[int, CarriedBytes] = {}
        self._sent = self._received = 0

    def read(self) -> CarriedBytes | None:
        """Adds what each socket has carried since the last read, and returns the totals. Takes some milliseconds.

        The first read adds all that the open sockets have carried. Returns None where the kernel gives no counts, or
        the process is gone or another user's.
        """
        try:
            inodes = set(_socket_inodes(self._pid))
            found = {inode: carried for inode, carried in _tcp_sockets() if inode in inodes}
        except OSError:
            return None
        for inode, carried in found.items():
            former = self._last.get(inode, CarriedBytes())
            self._sent += max(0, carried.sent - former.sent)
            self._received += max(0, carried.received - former.received)
        self._last = found
        return CarriedBytes(self._sent, self._received)


def _socket_inodes(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                yield int(target[8:-1])


def _tcp_sockets() -> Iterator[tuple[int, CarriedBytes]]:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG) as channel:
            channel.settimeout(1.0)
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0xFFFFFFFF)
            channel.send(_HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + request)
            is_done = False
            while not is_done:
                data = channel.recv(1 << 17)
                is_done = not data
                for message_type, body in _messages(data):
                    if message_type == NLMSG_ERROR:
                        raise OSError("sock_diag was refused")
                    is_done = is_done or message_type == NLMSG_DONE
                    if message_type == SOCK_DIAG_BY_FAMILY and (parsed := _parse_socket(body)) is not None:
                        yield parsed


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, *_ = _HEADER.unpack_from(data, at)
        if size < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + size]
        at += (size + 3) & ~3


def _parse_socket(body: bytes) -> tuple[int, CarriedBytes] | None:
    if len(body) < _MESSAGE.size:
        return None
    inode = _MESSAGE.unpack_from(body)[-1]
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, at)
        if size < _ATTRIBUTE.size:
            return None
        info = body[at + _ATTRIBUTE.size : at + size]
        if kind == INET_DIAG_INFO and len(info) >= SENT_AT + _SENT.size:
            received, segments_out, segments_in = _RECEIVED.unpack_from(info, RECEIVED_AT)
            (sent,) = _SENT.unpack_from(info, SENT_AT)
            return inode, CarriedBytes(sent + HEADER_BYTES * segments_out, received + HEADER_BYTES * segments_in)
        at += (size + 3) & ~3
    return None


COUNT_INTERVAL_S: Final = 0.25  # seconds between two counts of the bytes that were carried
FREE_LINK: Final = LinkSpec(1.25e9, 0.0)  # A link that delays nothing, and is as fast as this program can be


class BandwidthLimiter:
    """Throttles the streams of `link`, so that all of p2pd's traffic keeps to the owner's limits.

    Works in a task from its creation until `close`. Relayed circuits call `let_pass`. link: shapes the streams.
    carried: the newest totals of all of p2pd's sockets; None before the first count, or where they cannot be counted.
    """

    def __init__(self, pid: int, limits: RateLimits, link: AccessLink | None) -> None:
        """pid: of p2pd. link: the emulated link, to which the limits then apply too; None makes one without delay."""
        self.carried: CarriedBytes | None = None
        self.link = link if link is not None else AccessLink(FREE_LINK, random.Random(0))
        self._counter = SocketCounter(pid)
        self._limits = Throttle(limits.upload), Throttle(limits.download)
        self.link.limit_rates(limits.upload, limits.download)
        self._task = asyncio.create_task(self._run(), name="rate limiter")

    async def let_pass(self, size: int) -> None:
        """Waits until `size` bytes of a relayed circuit may pass, and books them both ways, as they come in and go out.

        It books them in pieces of `link.sent_at_once`, one after another, so that streams have their turns in between.
        """
        link = self.link
        left = size
        while left > 0:
            piece = min(left, link.sent_at_once)  # as much as a stream sends at its turn, so that all get as much
            left -= piece
            now = link.clock()
            passed_at = max(link.up.take(piece, now), link.down.take(piece, now))
            link.passed_up += piece
            link.passed_down += piece
            await asyncio.sleep(max(0.0, passed_at - now))

    async def wait(self) -> None:
        """Waits until the task that counts has ended, and raises its error; cancelling this ends it, too."""
        await self._task

    def close(self) -> None:
        """Ends the task that counts; the rates of `link` stay as they are."""
        self._task.cancel()

    async def _run(self) -> None:
        up, down = self._limits
        while True:
            self.carried = carried = await asyncio.to_thread(self._counter.read)
            now = loop_time()
            sent = received = None
            if carried is not None:
                sent, received = carried.sent, carried.received
            self.link.limit_rates(
                up.update(now, sent, self.link.passed_up), down.update(now, received, self.link.passed_down)
            )
            await asyncio.sleep(COUNT_INTERVAL_S)
