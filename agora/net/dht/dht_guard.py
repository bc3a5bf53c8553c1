"""Decides between which peers the DHT's calls pass, in and out, and whose records are kept.

A refused caller gets an error, and learns neither records nor neighbours.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from agora_protocol.errors import NotAdmitted
from agora_protocol.ids import PeerId
from agora_protocol.records import Record

GREET_S: Final = 2.0  # seconds that exchanging HELLOs may take before a call of the DHT
# The error text for a caller without HELLO, for example one that was connected before this node's restart.
SAY_HELLO: Final = "say HELLO first"


class DhtGuard(Protocol):
    """Protocol: decides between which peers the DHT's calls may pass, and whose records may be kept."""

    def may_call(self, peer: PeerId) -> bool:
        """Returns whether the DHT may dial and call `peer`."""

    def is_admitted_member(self, peer: PeerId) -> bool:
        """Returns whether `peer` has exchanged HELLO and is a member of the run, so that its calls are answered."""

    async def greet(self, peer: PeerId, *, reconnect: bool = False, named_by: PeerId | None = None) -> bool:
        """Exchanges HELLOs with `peer` if there is no connection; returns whether `peer` is a member of the run.

        False when `peer` cannot be reached, or must not be called. reconnect: first aborts a connection that `peer`
        does not know any more. named_by: the node that named `peer`; it is asked for other addresses if `peer`
        cannot be dialled at the known ones. None: no node is asked.
        """

    def is_from_member(self, record: Record) -> bool:
        """Returns whether the author of a verified record is a member of the run, whichever node sent it."""


class OpenGuard:
    """A DhtGuard that lets every peer do everything: the default of Directory.create, used by tests and benchmarks."""

    def may_call(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    def is_admitted_member(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    async def greet(self, peer: PeerId, *, reconnect: bool = False, named_by: PeerId | None = None) -> bool:
        """Returns True."""
        return True

    def is_from_member(self, record: Record) -> bool:
        """Returns True."""
        return True


async def greet_member(
    guard: DhtGuard, peer: PeerId, *, reconnect: bool = False, named_by: PeerId | None = None
) -> None:
    """Exchanges HELLOs with a peer before the DHT calls that peer, if there is no connection yet or `reconnect`.

    Raises NotAdmitted when the peer, connected or not, is not a member of the run, or not reached and greeted within
    GREET_S. reconnect: first aborts a connection that the peer does not know any more. named_by: see DhtGuard.greet.
    """
    try:
        async with asyncio.timeout(GREET_S):
            is_member = await guard.greet(peer, reconnect=reconnect, named_by=named_by)
    except TimeoutError:
        is_member = False
    if not is_member:
        raise NotAdmitted(f"{peer} is not known as a member of the run")
