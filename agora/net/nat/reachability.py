"""Decides how reachable this peer is, which relays it reserves at, and which addresses it announces. Deterministic.

| others have dialled it back | it has a relay reservation | others came through a punched hole | reachability |
|---|---|---|---|
| yes | any | any | public |
| no | yes | yes | punched |
| no | yes | no | relayed |
| no | no | any | unreachable |
| none has answered yet | any | any | unknown |
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.ids import PeerId
from agora_protocol.limits import MAX_ADDRESSES

from agora.core.calls import Announcement

# Number of relays at which a peer that cannot be dialled has reservations, so that one is left if a relay dies.
RELAYS_HELD: Final = 2
REFUSED_RELAY_PAUSE_S: Final = 60.0  # seconds for which a relay that gave no reservation is not asked again
# At most this many neighbours are asked to dial back: CONFIRMING of them can outvote one that answers falsely.
ASKED: Final = 3
# Neighbours that must name an address which this peer does not know as its own, before it counts as reached.
CONFIRMING: Final = 2
RECHECK_INTERVAL_S: Final = 300.0  # seconds until reachability is checked again after a successful dial-back
# Seconds until reachability is checked again after no dial-back succeeded: a router may have been set up meanwhile.
RETRY_INTERVAL_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What this peer has found out about how others can connect to it.

    answered_at: when neighbours that were asked to dial back last answered, None before the first answer.
    reached: the direct addresses, without /p2p/PEER, at which neighbours dialled this peer back.
    relays: the relays at which this peer has a reservation.
    was_punched: whether this peer has had a connection through a punched hole (NAT traversal).
    is_confirmed: False if only one neighbour reported `reached`, and this peer does not know the address as its own.
    """

    answered_at: float | None = None
    reached: tuple[str, ...] = ()
    relays: tuple[PeerId, ...] = ()
    was_punched: bool = False
    is_confirmed: bool = True

    def is_due(self, now: float) -> bool:
        """Returns whether to ask neighbours to dial back now: none has answered yet, or the last answers are too old.

        Answers are too old after RECHECK_INTERVAL_S if this peer was reached, as confirmed; after RETRY_INTERVAL_S
        otherwise.
        """
        return self.answered_at is None or now - self.answered_at > (
            RECHECK_INTERVAL_S if self.reached and self.is_confirmed else RETRY_INTERVAL_S
        )


@dataclass(slots=True)
class RelayRefusals:
    """Remembers which relays refused a reservation or could not be reached.

    since: for each such relay, the time of the latest failure, in seconds; the owner of this object adds the entries.
    """

    since: dict[PeerId, float] = field(default_factory=dict)

    def refusing_relays(self, now: float) -> set[PeerId]:
        """Returns the relays not to be asked now: they failed within REFUSED_RELAY_PAUSE_S. Forgets older failures."""
        self.since = {peer: at for peer, at in self.since.items() if now - at < REFUSED_RELAY_PAUSE_S}
        return set(self.since)


def classify_reachability(findings: Findings) -> str:
    """Returns how others can connect to this peer: "public", "punched", "relayed", "unreachable" or "unknown".

    "public" if it was dialled back; else "unknown" if no neighbour has answered yet; else "unreachable" without a relay
    reservation; else "punched" if there was a connection through a punched hole; else "relayed".
    """
    if findings.reached:
        return "public"
    if findings.answered_at is None:
        return "unknown"
    if not findings.relays:
        return "unreachable"
    return "punched" if findings.was_punched else "relayed"


def confirmed_addresses(reached: Sequence[Collection[str]], own: Collection[str], asked: int) -> tuple[str, ...]:
    """Returns the plausible ones, sorted, of the addresses at which neighbours say that they dialled this peer back.

    One neighbour is enough for an address in `own`; any other address needs CONFIRMING neighbours, or one if only one
    was asked: a single false answer would have this peer announce a stranger's address. reached: for each neighbour
    that answered, the addresses that it named. own: the addresses that this peer listens on or announces. asked: how
    many neighbours were asked.
    """
    named = Counter(address for addresses in reached for address in set(addresses))
    enough = min(CONFIRMING, asked)
    return tuple(sorted(address for address, count in named.items() if address in own or count >= enough))


def needs_relays(findings: Findings, own: Collection[str]) -> bool:
    """Returns whether this peer should hold relay reservations: no neighbour reached it at any address in `own`.

    own: addresses of this machine's interfaces, and configured ones. Being reached at another address is not enough: a
    NAT may have let in only the peer that dialled back.
    """
    return not any(address in own for address in findings.reached)


def choose_relays(
    me: PeerId,
    known: Mapping[PeerId, Announcement],
    held: Collection[PeerId],
    refused: Collection[PeerId],
    count: int = RELAYS_HELD,
) -> list[PeerId]:
    """Returns at most `count` relays at which this peer should hold reservations: first those in `held`, then others.

    All are peers that announce to relay and to be public, and are not in `refused`. Those in `held`, and the others,
    are each in the order of a hash of this peer's id and the relay's, so that peers spread over all relays. known: what
    each peer announces. held: the relays at which this peer has reservations now.
    """
    offering = [
        peer
        for peer, told in known.items()
        if peer != me and peer not in refused and told.relays_for > 0 and told.reachability == "public"
    ]
    return sorted(offering, key=lambda relay: (relay not in held, _relay_sort_key(me, relay)))[:count]


def build_announcement(
    me: PeerId, own: Sequence[str], findings: Findings, relay_addresses: Mapping[PeerId, Sequence[str]], relays_for: int
) -> Announcement:
    """Returns what this peer's claim should contain on how to connect to this peer.

    The announcement has at most MAX_ADDRESSES addresses: first direct ones, at most half of that number, then ones
    through the relays of `findings`. Among the direct ones `findings.reached`, at which others reached this peer, come
    first, then `own`.
    own: this machine's addresses that may be announced, without /p2p/PEER: configured ones, and those of interfaces.
    relay_addresses: for each relay, its addresses with /p2p/RELAY; an address through another relay is left out, and so
    is a relay of `findings` that is missing here. relays_for: see Announcement; 0 is announced unless this peer is
    public.
    """
    reachability = classify_reachability(findings)
    direct = tuple(f"{address}/p2p/{me}" for address in dict.fromkeys((*findings.reached, *own)))
    through = [
        f"{address}/p2p-circuit/p2p/{me}"
        for relay in findings.relays
        for address in relay_addresses.get(relay, ())
        if "/p2p-circuit" not in address
    ]
    addresses = (*direct[: MAX_ADDRESSES // 2], *through)[:MAX_ADDRESSES]
    return Announcement(reachability, addresses, relays_for if reachability == "public" else 0)


def _relay_sort_key(me: PeerId, relay: PeerId) -> bytes:
    return hashlib.sha256(f"agora relay 1\0{me}\0{relay}".encode()).digest()
