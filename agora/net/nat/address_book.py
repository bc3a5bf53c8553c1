"""Remembers where peers can be dialled. Deterministic: a book changes only by the calls to it.

The memory is bounded: a stranger can make as many identities as it likes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Final

from agora_protocol.addresses import address_problem, peer_of_address
from agora_protocol.errors import InputError
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES

MAX_PEERS: Final = 16_384  # maximum number of peers whose addresses are remembered


def addresses_by_peer(addresses: Iterable[str]) -> dict[PeerId, list[str]]:
    """Returns each peer's multiaddrs, in the order given: those that end in /p2p/ and the peer's id.

    Raises InputError for the first malformed one.
    """
    by_peer: dict[PeerId, list[str]] = defaultdict(list)
    for address in addresses:
        if problem := address_problem(address):
            raise InputError(f"{address!r} {problem}; it should look like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo...")
        by_peer[peer_of_address(address)].append(address)
    return dict(by_peer)


class AddressBook:
    """The last announced addresses of up to MAX_PEERS peers; beyond, the peer updated longest ago is forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Replaces the addresses of `peer` with the first MAX_ADDRESSES given that are well-formed and end in its id.

        Keeps the known addresses if no given address qualifies.
        """
        usable = [known for known in addresses if address_problem(known) is None and peer_of_address(known) == peer]
        if usable:
            self._known[peer] = tuple(usable[:MAX_ADDRESSES])
            self._known.move_to_end(peer)
            if len(self._known) > MAX_PEERS:
                self._known.popitem(last=False)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Returns the peer's remembered multiaddrs, each ending in /p2p/ and its id; empty if none are known."""
        return self._known.get(peer, ())
