"""What one peer remembers of others between connections: addresses, and strikes. Pure: `now` is an argument.

Knows no sockets. Both memories are bounded: a stranger can make as many identities as it likes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agora_protocol.addresses import address_problem, peer_of_address
from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES

MAX_PEERS: Final = 16_384


@dataclass(frozen=True, slots=True)
class Struck:
    """A peer broke the protocol and was cut off. `code` is one of PROTOCOL_CODES; it stays out for `shut_out_s`."""

    peer: PeerId
    code: str
    text: str
    shut_out_s: float


class AddressBook:
    """Where peers can be dialled: what they or others said last."""

    def __init__(self) -> None:
        self._known: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember the usable ones of `addresses`; what is malformed or leads elsewhere is passed over."""
        usable = [it for it in addresses if address_problem(it) is None and peer_of_address(it) == peer]
        if usable:
            self._known[peer] = tuple(usable[:MAX_ADDRESSES])
            self._known.move_to_end(peer)
            if len(self._known) > MAX_PEERS:
                self._known.popitem(last=False)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Multiaddrs with /p2p/PEER; empty when none are known."""
        return self._known.get(peer, ())


class Strikes:
    """Who broke the protocol, and who is shut out for it: `most` strikes within `memory_s` cost `shut_out_s`."""

    def __init__(self, most: int, memory_s: float, shut_out_s: float) -> None:
        self._most, self._memory_s, self._shut_out_s = most, memory_s, shut_out_s
        self._strikes: OrderedDict[PeerId, deque[float]] = OrderedDict()
        self._out_until: OrderedDict[PeerId, float] = OrderedDict()

    def add(self, peer: PeerId, now: float) -> float:
        """Count a strike; returns the seconds that the peer is now shut out for, 0 when it is not."""
        recent = self._strikes.setdefault(peer, deque(maxlen=self._most))
        self._strikes.move_to_end(peer)
        recent.append(now)
        if len(self._strikes) > MAX_PEERS:
            self._strikes.popitem(last=False)
        if len(recent) == self._most and now - recent[0] <= self._memory_s:
            self._out_until[peer] = now + self._shut_out_s
            self._out_until.move_to_end(peer)
            if len(self._out_until) > MAX_PEERS:
                self._out_until.popitem(last=False)
        return self.shut_out_s(peer, now)

    def shut_out_s(self, peer: PeerId, now: float) -> float:
        """How many seconds more nothing is accepted from `peer`."""
        return max(0.0, self._out_until.get(peer, now) - now)
