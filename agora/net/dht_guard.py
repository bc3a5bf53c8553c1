"""Decides between which peers the DHT's calls pass, in and out, and whose records are kept.

Knows: that HELLO comes before a call. Must not know: hivemind's messages (net/bounded_dht.py applies this), records'
fields, tickets. A refused caller gets an error, and learns neither records nor neighbours.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from agora_protocol.errors import NotAdmitted
from agora_protocol.ids import PeerId
from agora_protocol.records import Record

GREET_S: Final = 2.0
"""Seconds that exchanging HELLOs may take before a call of the DHT."""
SAY_HELLO: Final = "say HELLO first"
"""The error text for a caller without HELLO, for example one that was connected before this node's restart."""


class DhtGuard(Protocol):
    """Protocol: decides between which peers the DHT's calls may pass, and whose records may be kept."""

    def may_call(self, peer: PeerId) -> bool:
        """Returns whether `peer` may be dialled."""

    def is_greeted(self, peer: PeerId) -> bool:
        """Returns whether HELLO was exchanged with `peer`, and it is a member of the run."""

    async def greet(self, peer: PeerId, *, anew: bool = False, named_by: PeerId | None = None) -> bool:
        """Exchanges HELLOs with `peer` if there is no connection; returns whether it is a member of the run.

        anew: first breaks off a connection that the peer does not know of any more. named_by: the node that has named
        `peer`, which is asked for its addresses when it cannot be dialled at known ones; None: nobody has.
        """

    def is_by_member(self, record: Record) -> bool:
        """Returns whether a record, already verified, is of a member of the run, whichever node it was read from."""


class OpenGuard:
    """A DhtGuard that lets everybody do everything, for tests of the directory alone."""

    def may_call(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    def is_greeted(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    async def greet(self, peer: PeerId, *, anew: bool = False, named_by: PeerId | None = None) -> bool:
        """Returns True."""
        return True

    def is_by_member(self, record: Record) -> bool:
        """Returns True."""
        return True


async def greet_member(guard: DhtGuard, peer: PeerId, *, anew: bool = False, named_by: PeerId | None = None) -> None:
    """Exchanges HELLOs with a peer before the DHT calls it; anew, named_by: see DhtGuard.greet.

    Raises NotAdmitted when the peer is not a member of the run, or does not answer within GREET_S.
    """
    try:
        async with asyncio.timeout(GREET_S):
            is_member = await guard.greet(peer, anew=anew, named_by=named_by)
    except TimeoutError:
        is_member = False
    if not is_member:
        raise NotAdmitted(f"{peer} is not known as a member of the run")
