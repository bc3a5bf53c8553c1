"""Decides which strangers are dialled next: peers with a claim, with whom no HELLO was exchanged yet. Deterministic.

A claim costs its signer nothing, so it counts for nothing until a peer was met under its name at its addresses: see
docs/understand/limits.md. Dials are shared among the networks that the addresses are of, so that a thousand invented
claims delay those of one network, not the others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agora_protocol.addresses import address_prefix
from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView

MAX_DIALS: Final = 32  # maximum number of strangers dialled after one read of the directory
FIRST_WAIT_S: Final = 2.0
# A stranger is dialled again after FIRST_WAIT_S, then after twice as long each time, up to LONGEST_WAIT_S seconds.
LONGEST_WAIT_S: Final = 120.0


@dataclass(slots=True)
class _Dialled:
    """When one stranger that was dialled may be dialled again.

    again_at: the earliest time of the next dial. wait_s: seconds that must pass between the next dial and the one
    after.
    """

    again_at: float
    wait_s: float = FIRST_WAIT_S


class Acquaintances(Protocol):
    """Protocol: says with which peers HELLO (the first message on a connection) was exchanged, and dials others.

    Implemented by the local peer.
    """

    def is_met(self, peer: PeerId) -> bool:
        """Returns whether `peer` was met: HELLO was exchanged with it. Only such peers are among the view's peers."""

    async def connect_strangers(self, strangers: Sequence[PeerView]) -> None:
        """Dials all `strangers`; returns within a few seconds. Afterwards `is_met` is true of those that answered."""


class AllHandshaken:
    """Acquaintances that count every peer as met; for tests, and until Membership gets its real ones."""

    def is_met(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    async def connect_strangers(self, strangers: Sequence[PeerView]) -> None:
        """Does nothing, since every peer counts as met."""


class Meetings:
    """Remembers which strangers were dialled and when, and chooses which to dial next. Only `choose` changes it.

    A stranger is a peer with a claim, with whom no HELLO was exchanged yet. The caller does the dialling.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._dialled: dict[PeerId, _Dialled] = {}

    def choose(self, now: float, strangers: Mapping[PeerId, PeerView]) -> list[PeerView]:
        """Returns at most MAX_DIALS strangers to dial now, and records each of these as dialled. now: seconds.

        strangers: all present ones; dials of a peer that is not among them are forgotten. Leaves out strangers without
        addresses, and those whose wait since the last dial is not over. Those dialled less often come first; of equals,
        one of each network (by its first address) comes before a second one of any network, else in random order.
        """
        self._dialled = {peer: known for peer, known in self._dialled.items() if peer in strangers}
        due = [stranger for peer, stranger in strangers.items() if stranger.addresses and self._is_due(peer, now)]
        self._rng.shuffle(due)
        turns: Counter[str] = Counter()
        ranked: list[tuple[float, int, int, PeerView]] = []
        for stranger in sorted(due, key=lambda stranger: self._wait_s(stranger.peer)):
            prefix = address_prefix(stranger.addresses[0])
            ranked.append((self._wait_s(stranger.peer), turns[prefix], len(ranked), stranger))
            turns[prefix] += 1
        chosen = [stranger for *_, stranger in sorted(ranked, key=lambda entry: entry[:3])][:MAX_DIALS]
        for stranger in chosen:
            wait_s = self._wait_s(stranger.peer) or FIRST_WAIT_S
            self._dialled[stranger.peer] = _Dialled(now + wait_s, min(2.0 * wait_s, LONGEST_WAIT_S))
        return chosen

    def was_dialled(self, peer: PeerId) -> bool:
        """Returns whether `choose` has chosen this peer since it became a stranger.

        Returns False if the peer was not a stranger at the last `choose`.
        """
        return peer in self._dialled

    def _is_due(self, peer: PeerId, now: float) -> bool:
        # Returns whether a stranger may be dialled now: it never was, or its wait since the last dial is over.
        known = self._dialled.get(peer)
        return known is None or known.again_at <= now

    def _wait_s(self, peer: PeerId) -> float:
        # Returns the seconds to wait after a stranger's next dial; 0.0 for one that was never dialled.
        known = self._dialled.get(peer)
        return known.wait_s if known is not None else 0.0
