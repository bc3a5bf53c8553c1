"""Where peers can be dialled, remembered between connections. Pure.

Knows: addresses. Must not know: sockets. The memory is bounded: a stranger can make as many identities as it likes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from agora_protocol.addresses import address_problem, peer_of_address
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES

MAX_PEERS: Final = 16_384


class AddressBook:
    """Where peers can be dialled: what they or others said last."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._known: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember the usable ones of `addresses`; what is malformed or leads elsewhere is passed over."""
        usable = [it for it in addresses if address_problem(it) is None and peer_of_address(it) == peer]
        if usable:
            self._known[peer] = tuple(usable[:MAX_ADDRESSES])
            self._known.move_to_end(peer)
            if len(self._known) > self._max_peers:
                self._known.popitem(last=False)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Multiaddrs with /p2p/PEER; empty when none are known."""
        return self._known.get(peer, ())
