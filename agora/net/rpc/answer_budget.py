"""Reserves the bytes of answers before they are made, and rations the answers that strangers may ask for.

Answers to Process and Contribute are not reserved: a request as large is held for
each.

| request | bytes reserved | besides |
|---|---|---|
| GetChunk, GetPiece | a chunk | |
| GetState, GetBase | an index | |
| Recall | a part | |
| GetStatus, GetManifest | what they may have at most | STATUS_PER_S a peer, PREFIX_STATUS_PER_S a network |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agora_protocol.errors import Busy, ProtocolError
from agora_protocol.limits import MAX_MANIFEST_BYTES, MAX_PART_ELEMENTS, MAX_STATUS_BYTES, STATE_CHUNK_BYTES
from agora_protocol.messages import GetBase, GetChunk, GetManifest, GetPiece, GetState, GetStatus, Message, Recall

from agora.core.fair_share import Client, RateLimiter, SharedCapacity

INDEX_BYTES: Final = 1_048_576  # maximum number of bytes of an index of a state or of a base model
ANSWER_BYTES: Final[Mapping[type[Message], int]] = {
    GetChunk: STATE_CHUNK_BYTES,
    GetPiece: STATE_CHUNK_BYTES,
    GetState: INDEX_BYTES,
    GetBase: INDEX_BYTES,
    Recall: 4 * MAX_PART_ELEMENTS,
    GetStatus: MAX_STATUS_BYTES,
    GetManifest: MAX_MANIFEST_BYTES,
}
MAX_FRACTION_EACH: Final = 0.5  # the largest fraction of all bytes for answers that one peer's unread answers may hold
# Rationed requests of one peer: this many a second, and this many in one burst after a pause.
STATUS_PER_S, STATUS_BURST = 2.0, 20.0
# Rationed requests of all peers of one network together: per second, and in one burst after a pause.
PREFIX_STATUS_PER_S, PREFIX_STATUS_BURST = 20.0, 100.0
# Refusals in one burst after which a peer that goes on asking breaks the protocol: refusing costs something too.
REFUSAL_BURST: Final = 200.0
RATIONED: Final = (GetStatus, GetManifest)
RETRY_MS: Final = 1000  # milliseconds after which a peer that was refused as Busy may ask again


class AnswerBudget:
    """Bounds what answers cost this peer: the bytes of all unwritten ones, and requests for its status or manifest.

    One object serves all connections. `capacity` counts the reserved bytes of each consumer (a peer and its network).
    """

    def __init__(self, limit: int) -> None:
        """limit: bytes of all reserved answers that are not written yet."""
        self.capacity = SharedCapacity(limit, MAX_FRACTION_EACH)
        self._by_peer = RateLimiter(STATUS_PER_S, STATUS_BURST)
        self._refusals = RateLimiter(STATUS_PER_S, REFUSAL_BURST)
        self._by_prefix = RateLimiter(PREFIX_STATUS_PER_S, PREFIX_STATUS_BURST)

    def reserve(self, consumer: Client, request: Message | None, now: float) -> int:
        """Reserves the largest size that the answer to `request` can have; returns it in bytes, for `release`.

        Returns 0, and reserves nothing, for None and for a type that ANSWER_BYTES lacks. Raises Busy when too few bytes
        are left for this consumer, or when the consumer's peer or network exceeds its rate of GetStatus and GetManifest
        together. Raises ProtocolError when the peer exceeds its own rate and was refused for that REFUSAL_BURST times
        already (every second, STATUS_PER_S of these refusals are forgotten).
        """
        if isinstance(request, RATIONED):
            is_within = self._by_peer.take(consumer.peer, now)
            if not is_within and not self._refusals.take(consumer.peer, now):
                raise ProtocolError("too-many-calls", f"{type(request).__name__} again and again, although refused.")
            if not is_within or (consumer.prefix and not self._by_prefix.take(consumer.prefix, now)):
                raise Busy("you ask for this too often", RETRY_MS)
        size = ANSWER_BYTES.get(type(request), 0) if request is not None else 0
        if size and not self.capacity.acquire(consumer, size):
            raise Busy("answers that you or others have not read yet take all room", RETRY_MS)
        return size

    def release(self, consumer: Client, size: int) -> None:
        """Releases bytes that `reserve` returned for `consumer`: their answer is written or dropped. 0 does nothing."""
        if size:
            self.capacity.release(consumer, size)
