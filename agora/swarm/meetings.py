"""Decides which strangers are dialled next: peers with a claim, with whom no HELLO was exchanged yet. Deterministic.

Knows: claims, and which dials were begun when. Must not know: whether a dial succeeds (then the peer is no longer a
stranger), the network, or a clock: `now` and a random generator are passed in.

A claim costs its signer nothing, so it counts for nothing until somebody was met under its name at its addresses: see
docs/limits.md. Dials are shared among the networks that the addresses are of, so that a thousand invented claims delay
those of one network, not the others.
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

MAX_DIALS: Final = 32
"""Maximum number of strangers dialled after one read of the directory."""
FIRST_WAIT_S: Final = 2.0
LONGEST_WAIT_S: Final = 120.0
"""A stranger that did not answer is dialled again after FIRST_WAIT_S, then after twice as long each time."""


@dataclass(slots=True)
class _Dialled:
    """One stranger that was dialled. again_at: when it may be dialled again. wait_s: the wait after that dial."""

    again_at: float
    wait_s: float = FIRST_WAIT_S


class Acquaintances(Protocol):
    """Protocol: says with whom HELLO was exchanged, and dials others; implemented by the local peer."""

    def is_met(self, peer: PeerId) -> bool:
        """Returns whether HELLO was exchanged with a peer; only such peers are in the view."""

    async def meet(self, strangers: Sequence[PeerView]) -> None:
        """Dials strangers and returns within a few seconds; afterwards `is_met` is true of those that answered."""


class AllHandshaken:
    """Acquaintances that count every peer as met; for tests, and until others are set."""

    def is_met(self, peer: PeerId) -> bool:
        """Returns True."""
        return True

    async def meet(self, strangers: Sequence[PeerView]) -> None:
        """Does nothing: nobody is a stranger."""


class Meetings:
    """Remembers which strangers were dialled, and chooses the next ones. Only `choose` changes it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._dialled: dict[PeerId, _Dialled] = {}

    def choose(self, now: float, strangers: Mapping[PeerId, PeerView]) -> list[PeerView]:
        """Returns at most MAX_DIALS strangers to dial now, and records them as dialled.

        strangers: all there are now; dials of any other peer are forgotten. Strangers dialled less often come first. Of
        equals, each network has one before any has two.
        """
        self._dialled = {peer: known for peer, known in self._dialled.items() if peer in strangers}
        due = [seen for peer, seen in strangers.items() if seen.addresses and self._is_due(peer, now)]
        self._rng.shuffle(due)
        turns: Counter[str] = Counter()
        ranked: list[tuple[float, int, int, PeerView]] = []
        for seen in sorted(due, key=lambda seen: self._wait_s(seen.peer)):
            prefix = address_prefix(seen.addresses[0])
            ranked.append((self._wait_s(seen.peer), turns[prefix], len(ranked), seen))
            turns[prefix] += 1
        chosen = [seen for *_, seen in sorted(ranked, key=lambda entry: entry[:3])][:MAX_DIALS]
        for seen in chosen:
            wait_s = self._wait_s(seen.peer) or FIRST_WAIT_S
            self._dialled[seen.peer] = _Dialled(now + wait_s, min(2.0 * wait_s, LONGEST_WAIT_S))
        return chosen

    def was_dialled(self, peer: PeerId) -> bool:
        """Returns whether this stranger was chosen at least once."""
        return peer in self._dialled

    def was_unreachable(self, peer: PeerId) -> bool:
        """Returns whether a peer was dialled before and was still a stranger at the latest `choose`."""
        return self._wait_s(peer) > FIRST_WAIT_S

    def _is_due(self, peer: PeerId, now: float) -> bool:
        """Returns whether a stranger was never dialled, or long enough ago."""
        known = self._dialled.get(peer)
        return known is None or known.again_at <= now

    def _wait_s(self, peer: PeerId) -> float:
        """Returns the seconds to wait after a stranger's next dial; 0.0 for one that was never dialled."""
        known = self._dialled.get(peer)
        return known.wait_s if known is not None else 0.0
