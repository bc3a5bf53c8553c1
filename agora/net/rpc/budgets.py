"""What other peers' calls may cost this one: connections, calls, payloads that have come, answers not read yet.

The bytes of an answer are reserved before it is made, by the table. Answers to Process and Contribute need none: this
peer holds a request of the same size for each of them.

| request | bytes reserved | besides |
|---|---|---|
| GetChunk, GetPiece | a chunk | |
| GetState, GetBase, GetSketches | an index | |
| Recall | a part | |
| GetStatus, GetManifest, GetAmendments | the most they may have | STATUS_PER_S a peer, PREFIX_STATUS_PER_S a network |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from agora_protocol import limits
from agora_protocol.errors import Busy, ProtocolError
from agora_protocol.limits import (
    MAX_AMENDMENT_BYTES,
    MAX_KEPT_AMENDMENTS,
    MAX_MANIFEST_BYTES,
    MAX_PART_ELEMENTS,
    MAX_STATUS_BYTES,
    STATE_CHUNK_BYTES,
)
from agora_protocol.messages import (
    GetAmendments,
    GetBase,
    GetChunk,
    GetManifest,
    GetPiece,
    GetSketches,
    GetState,
    GetStatus,
    Message,
    Recall,
)

from agora.core.fair_shares import RateLimiter, Requester, SharedCapacity
from agora.net.p2pd.frame_stream import PayloadAction

GUARANTEED_BYTES: Final = 65_536  # payload bytes that every connection may always hold, however full the budget is
INDEX_BYTES: Final = 1_048_576  # maximum number of bytes of an index of a state or of a base model
ANSWER_BYTES: Final[Mapping[type[Message], int]] = {
    GetChunk: STATE_CHUNK_BYTES,
    GetPiece: STATE_CHUNK_BYTES,
    GetState: INDEX_BYTES,
    GetSketches: INDEX_BYTES,
    GetBase: INDEX_BYTES,
    Recall: 4 * MAX_PART_ELEMENTS,
    GetStatus: MAX_STATUS_BYTES,
    GetManifest: MAX_MANIFEST_BYTES,
    GetAmendments: MAX_KEPT_AMENDMENTS * MAX_AMENDMENT_BYTES,
}
MAX_FRACTION_EACH: Final = 0.5  # the largest fraction of all bytes for answers that one peer's unread answers may hold
# Rationed requests of one peer: this many a second, and this many in one burst after a pause.
STATUS_PER_S, STATUS_BURST = 2.0, 20.0
# Rationed requests of all peers of one network together: per second, and in one burst after a pause.
PREFIX_STATUS_PER_S, PREFIX_STATUS_BURST = 20.0, 100.0
# A peer that goes on asking after this many refusals in one burst breaks the protocol: refusing costs something too.
REFUSAL_BURST: Final = 200.0
RATIONED: Final = (GetStatus, GetManifest, GetAmendments)
RETRY_MS: Final = 1000  # milliseconds after which a peer that was refused as Busy may ask again


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Limits of the memory, calls and connections that other peers may use here, and timeouts in seconds."""

    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES  # of one frame, as the run's manifest implies
    max_held_bytes: int = 2 * limits.MAX_PAYLOAD_BYTES  # of all payloads that have come, or begun to, and are in use
    max_calls: int = limits.MAX_CALLS_PER_CONNECTION  # open at the same time on one connection, each way
    max_answer_bytes: int = 67_108_864  # of answers that are not written yet
    max_connections: int = 512
    max_silent: int = 64  # how many connections readers and peers without a HELLO may have opened
    payload_wait_s: float = 0.25  # how long a request may wait for payload bytes before it is refused as Busy
    dial_s: float = 10.0
    hello_s: float = limits.HANDSHAKE_TIMEOUT_S
    ping_after_s: float = limits.PING_AFTER_SILENCE_S  # a peer that owes an answer is pinged then
    pong_within_s: float = limits.PING_ANSWER_S  # how long the peer may take to answer that ping


class PayloadBudget:
    """Counts the payload bytes that all connections have reserved (`used`), and queues connections for more.

    limit: in bytes. peak: the most that `used` has been. waiting: the bytes that each waiting connection wants.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.waiting: dict[
            PayloadReservations, int
        ] = {}  # with the bytes that each waits for; the first is served first
        self._is_releasing = False

    def has_room_for(self, size: int) -> bool:
        """Returns whether `size` more bytes stay within the limit."""
        return self.used + size <= self.limit

    @property
    def is_pressed(self) -> bool:
        return bool(self.waiting) or 2 * self.used > self.limit

    def reserve(self, size: int) -> None:
        """Reserves bytes, even beyond the limit."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def release(self, size: int) -> None:
        """Releases `size` bytes, then serves waiting connections in their order until the first whose bytes do not fit.

        Serving a connection ends its wait and reserves its bytes. A nested call, from within the end of a wait, only
        releases the bytes; the outer call goes on with the queue.
        """
        self.used -= size
        if self._is_releasing:  # a connection that was just served releases bytes too: the outer call goes on
            return
        self._is_releasing = True
        try:
            while self.waiting:
                first, wanted = next(iter(self.waiting.items()))
                if not self.has_room_for(wanted):
                    break
                first.end_wait(is_served=True)
        finally:
            self._is_releasing = False


class PayloadReservations:
    """The payload bytes that one connection has reserved from the budget (`held` of them now), or waits for.

    | payload of | reserved |
    |---|---|
    | an answer | always: this peer asked for it, and its caller may hold bytes that others wait for |
    | a request | if it fits into the budget or GUARANTEED_BYTES; otherwise it waits, at most `payload_wait_s` |
    | a request, after one waited in vain | only if it fits immediately, until one has |

    Waits are short because the connection reads nothing meanwhile, not even answers that would free the bytes.
    """

    def __init__(self, budget: PayloadBudget, payload_wait_s: float, on_wait_over: Callable[[bool], None]) -> None:
        """on_wait_over: called when a wait ends, with True when the bytes are reserved now, False when time ran out."""
        self._budget = budget
        self._payload_wait_s = payload_wait_s
        self._on_wait_over = on_wait_over
        self._wait_timer: asyncio.TimerHandle | None = None
        self._arriving = 0  # reserved for the frame whose payload is arriving
        self._waited_in_vain = False
        self.held = 0

    def reserve_for_request(self, size: int) -> PayloadAction:
        """Reserves `size` bytes for a request's payload, if they fit by the class's table; 0 bytes always do.

        Returns TAKE when they are reserved, WAIT when `on_wait_over` will be called, DROP to refuse the request.
        """
        if not size:
            return PayloadAction.TAKE
        if self._budget.has_room_for(size):
            self._waited_in_vain = False
        elif self.held + size > GUARANTEED_BYTES:
            if self._waited_in_vain:
                return PayloadAction.DROP
            self._budget.waiting[self] = size
            self._wait_timer = asyncio.get_running_loop().call_later(self._payload_wait_s, self.end_wait, False)
            return PayloadAction.WAIT
        self.reserve(size)
        return PayloadAction.TAKE

    def reserve(self, size: int) -> None:
        """Reserves `size` bytes for the payload that arrives next, even beyond the limit."""
        self._budget.reserve(size)
        self.held += size
        self._arriving = size

    def take_arrived(self) -> int:
        """Returns the bytes reserved for the payload that has arrived, which the caller must `release`; then 0."""
        arrived, self._arriving = self._arriving, 0
        return arrived

    def release(self, size: int) -> None:
        """Returns bytes to the budget, which may end the waits of connections; 0 does nothing."""
        if size:
            self.held -= size
            self._budget.release(size)

    def end_wait(self, is_served: bool) -> None:
        """Ends a wait: reserves the wanted bytes if `is_served`, and calls `on_wait_over(is_served)`."""
        wanted = self._stop_waiting()
        if is_served:
            self.reserve(wanted)
        self._waited_in_vain = not is_served
        self._on_wait_over(is_served)

    def close(self) -> None:
        """Called when the connection is gone: ends its wait silently, releases the bytes of an unfinished payload."""
        self._stop_waiting()
        self.release(self.take_arrived())

    def _stop_waiting(self) -> int:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
        return self._budget.waiting.pop(self, 0)


class AnswerBudget:
    """Bounds what answers cost this peer: the bytes of all unwritten ones, and requests for its status or manifest.

    One object serves all connections. `capacity` counts the reserved bytes of each requester (a peer and its network).
    """

    def __init__(self, limit: int) -> None:
        """limit: bytes of all reserved answers that are not written yet."""
        self.capacity = SharedCapacity(limit, MAX_FRACTION_EACH)
        self._by_peer = RateLimiter(STATUS_PER_S, STATUS_BURST)
        self._refusals = RateLimiter(STATUS_PER_S, REFUSAL_BURST)
        self._by_prefix = RateLimiter(PREFIX_STATUS_PER_S, PREFIX_STATUS_BURST)

    def reserve(self, requester: Requester, request: Message | None, now: float) -> int:
        """Reserves the largest size that the answer to `request` can have; returns it in bytes, for `release`.

        Returns 0, and reserves nothing, for None and for a type that ANSWER_BYTES lacks. Raises Busy when too few bytes
        are left for this requester, or when its peer or its network exceeds the rate of RATIONED requests
        together. Raises ProtocolError when the peer exceeds its own rate and was refused for that REFUSAL_BURST times
        already (every second, STATUS_PER_S of these refusals are forgotten).
        """
        if isinstance(request, RATIONED):
            is_within = self._by_peer.take(requester.peer, now)
            if not is_within and not self._refusals.take(requester.peer, now):
                raise ProtocolError("too-many-calls", f"{type(request).__name__} came again and again after refusals.")
            if not is_within or (requester.address_prefix and not self._by_prefix.take(requester.address_prefix, now)):
                raise Busy("you ask for this too often", RETRY_MS)
        size = ANSWER_BYTES.get(type(request), 0) if request is not None else 0
        if size and not self.capacity.acquire(requester, size):
            raise Busy("answers that you or others have not read yet take all room", RETRY_MS)
        return size

    def release(self, requester: Requester, size: int) -> None:
        """Releases bytes that `reserve` returned: their answer is written or dropped. 0 does nothing."""
        if size:
            self.capacity.release(requester, size)
