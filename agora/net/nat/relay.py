"""Relays connections between peers that cannot dial each other, and makes reservations at other relays.

Between its ends a circuit is encrypted like any other connection: a relay carries bytes that it cannot
read. p2pd's own relay ends each circuit after 128 KiB, so this one takes its place on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from agora_protocol.ids import PeerId

from agora.core.calls import ConnectionBroken
from agora.core.clock import loop_time
from agora.core.fair_shares import TokenBucket
from agora.net.nat import circuit_wire
from agora.net.nat.circuit_wire import CircuitMessage, HopType, Status, StopType
from agora.net.p2pd.host import Host
from agora.net.p2pd.raw_stream import RawStream, splice

RESERVATION_LIFETIME_S: Final = 120.0  # seconds for which a reservation lasts
ANSWER_TIMEOUT_S: Final = 10.0  # seconds within which each message that opens a circuit must come
# Maximum number of circuits that one peer may have open through this relay; all peers: `max_peers` times as many.
CIRCUITS_PER_PEER: Final = 8
MAX_OPENING: Final = 32  # maximum number of streams whose first message is not answered yet


class RelayService:
    """Grants reservations to up to `max_peers` admitted peers, and carries circuits to them; with 0 it refuses all.

    It runs from `start` until the host closes. carried_bytes: of all circuits so far, both directions together.
    """

    def __init__(
        self, host: Host, max_peers: int, is_admitted: Callable[[PeerId], bool], bytes_per_s: float = 0.0
    ) -> None:
        """is_admitted: returns whether a peer may use the relay. bytes_per_s: of all circuits together; 0: no limit."""
        self.max_peers = max_peers
        self.carried_bytes = 0
        self._host = host
        self._is_admitted = is_admitted
        self._bucket = TokenBucket(bytes_per_s, 0.25) if bytes_per_s else None
        self._reserved: dict[PeerId, float] = {}
        self._circuits: Counter[PeerId] = Counter()
        self._opening = 0

    async def start(self) -> None:
        """Begins to answer requests on the host. Raises ConnectionBroken when p2pd is gone."""
        await self._host.serve_raw(circuit_wire.HOP_PROTOCOL, self._serve_stream)

    def reserving_peers(self) -> list[PeerId]:
        """Returns the peers that hold a reservation at this relay now; forgets expired reservations."""
        now = loop_time()
        self._reserved = {peer: until for peer, until in self._reserved.items() if until > now}
        return list(self._reserved)

    async def _serve_stream(self, stream: RawStream) -> None:
        if self._opening >= MAX_OPENING:
            return
        self._opening += 1
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                message = circuit_wire.decode_hop(await stream.read_message(circuit_wire.MAX_MESSAGE_BYTES))
                other = await self._answer_request(stream, message)
        except (TimeoutError, ValueError, ConnectionBroken):
            return
        finally:
            self._opening -= 1
        if other is None:
            return
        try:
            await splice(stream, other, self._count_and_wait)
        finally:
            self._forget_circuit(stream.peer)

    async def _answer_request(self, stream: RawStream, message: CircuitMessage) -> RawStream | None:
        expires_unix = 0
        other = None
        status = self._decide_status(stream, message)
        with contextlib.ExitStack() as undo:
            if status is Status.OK and message.kind == HopType.RESERVE:
                self._reserved[stream.peer] = loop_time() + RESERVATION_LIFETIME_S
                expires_unix = int(time.time() + RESERVATION_LIFETIME_S)
            elif status is Status.OK:
                self._circuits[stream.peer] += 1  # before anything is awaited: other requests are judged meanwhile
                undo.callback(self._forget_circuit, stream.peer)
                other = await self._offer_circuit(stream.peer, PeerId(message.peer))
                status = Status.OK if other is not None else Status.CONNECTION_FAILED
            if other is not None:
                undo.callback(other.abort)
            answer = CircuitMessage(HopType.STATUS, status=status)
            await stream.write(circuit_wire.encode_hop(answer, expires_unix))
            if other is not None:
                undo.pop_all()
        return other

    def _forget_circuit(self, requester: PeerId) -> None:
        self._circuits[requester] -= 1
        self._circuits += Counter()

    def _decide_status(self, stream: RawStream, message: CircuitMessage) -> Status:
        # A peer that comes through a relay gets no circuit: circuits through circuits would multiply the traffic.
        peers = self.reserving_peers()
        if not self._is_admitted(stream.peer) or stream.is_relayed:
            return Status.PERMISSION_DENIED
        if message.kind == HopType.RESERVE:
            has_room = stream.peer in peers or len(peers) < self.max_peers
            return Status.OK if has_room else Status.RESERVATION_REFUSED
        if message.kind != HopType.CONNECT:
            return Status.MALFORMED_MESSAGE
        if message.peer not in peers:
            return Status.NO_RESERVATION
        is_crowded = self._circuits.total() >= CIRCUITS_PER_PEER * self.max_peers
        has_room = self._circuits[stream.peer] < CIRCUITS_PER_PEER and not is_crowded
        return Status.OK if has_room else Status.RESOURCE_LIMIT_EXCEEDED

    async def _offer_circuit(self, requester: PeerId, peer: PeerId) -> RawStream | None:
        try:
            stream = await self._host.open_raw(peer, circuit_wire.STOP_PROTOCOL, ANSWER_TIMEOUT_S)
        except ConnectionBroken:
            return None
        with contextlib.ExitStack() as undo:
            undo.callback(stream.abort)
            await stream.write(circuit_wire.encode_stop(CircuitMessage(StopType.CONNECT, peer=requester)))
            answer = circuit_wire.decode_stop(await stream.read_message(circuit_wire.MAX_MESSAGE_BYTES))
            if answer.status != Status.OK:
                return None
            undo.pop_all()
        return stream

    async def _count_and_wait(self, size: int) -> None:
        self.carried_bytes += size
        if self._host.rate_limiter is not None:
            await self._host.rate_limiter.let_pass(size)
        if self._bucket is not None:
            await asyncio.sleep(max(0.0, self._bucket.take(size, loop_time()) - loop_time()))


async def reserve(host: Host, relay: PeerId) -> None:
    """Makes or renews this peer's reservation at a relay, which p2pd is connected to.

    Raises ConnectionBroken if the relay refuses or does not answer in ANSWER_TIMEOUT_S. The reservation lasts as long
    as the relay decides, RESERVATION_LIFETIME_S at a relay of this program; its expiry is not read.
    """
    stream = await host.open_raw(relay, circuit_wire.HOP_PROTOCOL, ANSWER_TIMEOUT_S)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await stream.write(circuit_wire.encode_hop(CircuitMessage(HopType.RESERVE)))
            answer = circuit_wire.decode_hop(await stream.read_message(circuit_wire.MAX_MESSAGE_BYTES))
    except (TimeoutError, ValueError) as error:
        raise ConnectionBroken(f"the relay gave no answer that can be read ({error})") from None
    finally:
        stream.abort()
    if answer.status != Status.OK:
        raise ConnectionBroken(f"the relay refused a reservation (status {answer.status})")
