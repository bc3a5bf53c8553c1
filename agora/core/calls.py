"""A call to another peer, as every package that makes one sees it, and what a peer announces on how to reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId
from agora_protocol.messages import CallProgress, Message, Request
from agora_protocol.tensors import WireTensor

# Takes one progress message (CallProgress) of a call that is still open. Must not block and must not raise.
OnProgress = Callable[[CallProgress], None]


class ConnectionBroken(AgoraError):
    """Raised by a call whose stream broke before the answer came, or could not be opened; another peer may succeed."""

    code = "broken"


class DeadlinePassed(AgoraError):
    """Raised by a call without an answer before the caller's deadline; a peer that had the request was sent CANCEL."""

    code = "deadline"


@dataclass(slots=True)
class Reply:
    """The message that answered a call, and the tensors that came with it. Refusals are raised, never returned here."""

    message: Message
    tensors: list[WireTensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a peer's claim contains on how to connect to the peer.

    reachability: "public", "punched", "relayed", "unreachable" or "unknown". addresses: with /p2p/PEER at the end.
    relays_for: the maximum number of peers for which the peer offers to relay; 0 for none.
    """

    reachability: str = "unknown"
    addresses: tuple[str, ...] = ()
    relays_for: int = 0


class PeerCaller(Protocol):
    """Sends a request to a peer and waits for the reply."""

    async def call(
        self,
        peer: PeerId,
        request: Request,
        tensors: Sequence[WireTensor] = (),
        *,
        deadline: float,
        on_progress: OnProgress | None = None,
    ) -> Reply:
        """Sends `request` with `tensors` to `peer` and returns its reply. deadline: in loop time, see clock.loop_time.

        Raises the peer's refusal as the error that the refusal names, and an AgoraError when the connection breaks or
        cannot be opened, or at the deadline. When the caller stops waiting, by deadline or cancellation, the peer's
        work is cancelled. on_progress: called with each progress message (CallProgress) that comes before the reply.
        """
