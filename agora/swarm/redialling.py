"""Decides when peers that left the view are dialled again. Deterministic.

This is how a swarm that was split in two becomes one: each half goes on dialling the peers of the other half, however
many neighbours it has of its own. It begins FIRST_REDIAL_DELAY_S after a peer was last seen, then waits twice as long
each time, at most MAX_REDIAL_DELAY_S, which bounds how long two halves stay apart after their link is back. A peer
whose claim announced that it leaves is not dialled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import PeerId

from agora.swarm.view import View

# The first and the longest wait before a peer is dialled again.
FIRST_REDIAL_DELAY_S: Final = 5.0
MAX_REDIAL_DELAY_S: Final = 40.0
# A wait is made longer or shorter at random by this fraction at most, so that peers do not dial in step.
JITTER: Final = 0.25
# A peer is dialled while it was seen at most this many seconds before the peer that was seen last.
MEMORY_LIFETIME_S: Final = 24 * 3600.0
# Maximum number of peers remembered: those seen last. One that can be reached is enough to find its half.
MAX_REMEMBERED: Final = 256
MAX_DIALS: Final = 8  # maximum number of peers dialled at the same time; those that have waited longest come first


# One remembered peer. dial_at: when to dial it unless it comes back. wait_s: before jitter, after that dial.
@dataclass(slots=True)
class _KnownPeer:
    addresses: tuple[str, ...]
    seen_at: float
    dial_at: float
    wait_s: float = FIRST_REDIAL_DELAY_S


class Redialling:
    """Remembers up to MAX_REMEMBERED peers of the last day, and chooses which of those that left the view to dial.

    All times are seconds on one clock.
    """

    def __init__(self, me: PeerId, rng: random.Random) -> None:
        self._me = me
        self._rng = rng
        self._known: dict[PeerId, _KnownPeer] = {}

    def learn(self, now: float, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remembers a peer that was not in the view yet, such as one of the invite; its dial is due immediately."""
        if peer != self._me and addresses:
            self._known.setdefault(peer, _KnownPeer(tuple(addresses), now, now))

    def remember_view(self, now: float, view: View, may_dial: Callable[[str], bool] = lambda _: True) -> None:
        """Remembers the peers in the view; each is due FIRST_REDIAL_DELAY_S from now if it leaves the view.

        may_dial: whether an address that a peer announces may be dialled; others are not remembered, and what is known
        of a peer without any such address stays.
        """
        for peer, seen in view.peers.items():
            if seen.state == "leaving":
                self._known.pop(peer, None)
            elif peer != self._me and (addresses := tuple(filter(may_dial, seen.addresses))):
                self._known[peer] = _KnownPeer(addresses, now, now + FIRST_REDIAL_DELAY_S)
        stay = sorted(self._known.items(), key=lambda known: known[1].seen_at, reverse=True)[:MAX_REMEMBERED]
        latest = stay[0][1].seen_at if stay else now
        self._known = {peer: known for peer, known in stay if latest - known.seen_at <= MEMORY_LIFETIME_S}

    def take_due_peers(self, now: float, view: View) -> list[PeerId]:
        """Returns at most MAX_DIALS remembered peers that are due and not in the view, and counts them as dialled."""
        waiting = [peer for peer, known in self._known.items() if peer not in view.peers and known.dial_at <= now]
        chosen = sorted(waiting, key=lambda peer: (self._known[peer].dial_at, peer))[:MAX_DIALS]
        for peer in chosen:
            known = self._known[peer]
            known.dial_at = now + known.wait_s * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER)
            known.wait_s = min(2.0 * known.wait_s, MAX_REDIAL_DELAY_S)
        return chosen

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Returns the addresses last known of a peer; () for one that is not remembered."""
        known = self._known.get(peer)
        return known.addresses if known is not None else ()

    def remembered_peers(self) -> list[PeerId]:
        """Returns the peers that are remembered, the most recently seen first."""
        return sorted(self._known, key=lambda peer: (-self._known[peer].seen_at, peer))
