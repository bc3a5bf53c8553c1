"""Decides how reachable this peer is, which relays it holds a place at, and which addresses it announces. Pure.

Knows: what other peers answered, and the view. Must not know: sockets, p2pd, a clock: `now` is an argument.

| a peer has dialled this one back | it has a place at a relay | others came through a punched hole | reachability |
|---|---|---|---|
| yes | any | any | public |
| no | yes | yes | punched |
| no | yes | no | relayed |
| no | no | any | unreachable |
| nobody has answered yet | any | any | unknown |
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES

from agora.swarm.view import PeerView, View

RELAYS_HELD: Final = 2
"""Relays at which a peer that cannot be dialled has a place: when one dies, the other is there already."""
REFUSED_S: Final = 60.0
"""Seconds for which a relay that gave no place is not asked again."""
ASKED: Final = 3
"""At most this many neighbours are asked to dial back: CONFIRMING of them can outvote one that answers falsely."""
CONFIRMING: Final = 2
"""Neighbours that must name an address which this peer does not know as its own, before it counts as reached."""
MAX_OBSERVED: Final = 4
"""Addresses at which others have dialled this peer back, remembered at most."""
SETTLED_S: Final = 300.0
"""Seconds for which it holds that a peer has dialled this one back."""
RETRY_S: Final = 15.0
"""The same seconds after nobody has: a router may have been set up meanwhile."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a peer has found out about itself.

    asked_at: when others last answered, None before. reached: direct addresses without /p2p/PEER at which they dialled
    it back. relays: those at which it has a place. was_punched: whether it has had a connection through a hole.
    is_confirmed: False if `reached` is one neighbour's word about an address that this peer does not know as its own.
    """

    asked_at: float | None = None
    reached: tuple[str, ...] = ()
    relays: tuple[PeerId, ...] = ()
    was_punched: bool = False
    is_confirmed: bool = True

    def is_due(self, now: float) -> bool:
        """Returns whether other peers are to be asked again."""
        return self.asked_at is None or now - self.asked_at > (
            SETTLED_S if self.reached and self.is_confirmed else RETRY_S
        )


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a claim says of how to connect to a peer. addresses: with /p2p/PEER. relays_for: see Claim."""

    reachability: str = "unknown"
    addresses: tuple[str, ...] = ()
    relays_for: int = 0


@dataclass(slots=True)
class RelayRefusals:
    """Remembers which relays gave no place, and since when."""

    since: dict[PeerId, float] = field(default_factory=dict)

    def refused(self, now: float) -> set[PeerId]:
        """Returns the relays that are not to be asked now; forgets the others."""
        self.since = {peer: at for peer, at in self.since.items() if now - at < REFUSED_S}
        return set(self.since)


def judge_reachability(findings: Findings) -> str:
    """Returns the reachability that the findings mean, see the table above."""
    if findings.reached:
        return "public"
    if findings.asked_at is None:
        return "unknown"
    if not findings.relays:
        return "unreachable"
    return "punched" if findings.was_punched else "relayed"


def confirmed_addresses(reached: Sequence[Collection[str]], own: Collection[str], asked: int) -> tuple[str, ...]:
    """Returns the addresses to believe of those at which neighbours say that they dialled this peer back.

    reached: for each neighbour that answered, the addresses that it named. own: those that this peer listens on or
    announces. asked: how many neighbours were asked. One neighbour is enough for an own address, CONFIRMING for any
    other, unless only one could be asked: a single false answer would have this peer announce a stranger's address.
    """
    named = Counter(address for addresses in reached for address in set(addresses))
    enough = min(CONFIRMING, asked)
    return tuple(sorted(address for address, count in named.items() if address in own or count >= enough))


def needs_relays(findings: Findings, own: Collection[str]) -> bool:
    """Returns whether this peer should have places at relays: unless others reached it at one of its own addresses.

    own: those of its interfaces, and announced ones. A NAT may have let in only the peer that dialled back.
    """
    return not any(address in own for address in findings.reached)


def choose_relays(
    me: PeerId, view: View, held: Collection[PeerId], refused: Collection[PeerId], count: int = RELAYS_HELD
) -> list[PeerId]:
    """Returns the relays at which this peer should have a place: those held that still offer it, then others.

    The others come in the order of a hash of both ids, so that the peers spread over all relays.
    """
    offering = [p for p in view.peers.values() if p.peer != me and p.peer not in refused and offers_relay(p)]
    ranked = sorted(offering, key=lambda seen: (seen.peer not in held, _hash(me, seen.peer)))
    return [seen.peer for seen in ranked[:count]]


def offers_relay(seen: PeerView) -> bool:
    """Returns whether a peer's claim says that it relays for others, and that it can be dialled."""
    return seen.relays_for > 0 and seen.reachability == "public" and seen.state != "leaving"


def announce(
    me: PeerId, own: Sequence[str], findings: Findings, relay_addresses: Mapping[PeerId, Sequence[str]], relays_for: int
) -> Announcement:
    """Returns what this peer's claim is to say.

    own: direct addresses, as configured and as its interfaces have them, that may be told, without /p2p/PEER.
    relay_addresses: of each relay, with its own /p2p/RELAY.
    """
    reachability = judge_reachability(findings)
    direct = tuple(f"{address}/p2p/{me}" for address in dict.fromkeys((*findings.reached, *own)))
    through = [
        f"{address}/p2p-circuit/p2p/{me}"
        for relay in findings.relays
        for address in relay_addresses.get(relay, ())
        if "/p2p-circuit" not in address
    ]
    addresses = (*direct[: MAX_ADDRESSES // 2], *through)[:MAX_ADDRESSES]
    return Announcement(reachability, addresses, relays_for if reachability == "public" else 0)


def _hash(me: PeerId, relay: PeerId) -> bytes:
    """Returns the rank of a relay for a peer: the least comes first."""
    return hashlib.sha256(f"agora relay 1\0{me}\0{relay}".encode()).digest()
