"""Decides which unverified peers are dialled next: those with a claim, with whom no HELLO was exchanged. Deterministic.

A claim costs its signer nothing, so it counts for nothing until a peer was reached under its name at its addresses: see
docs/understand/limits.md. Each network of addresses gets its part of the dials, so that a thousand invented claims
delay only the claims of their own network.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agora_protocol.addresses import address_prefix
from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView

MAX_DIALS: Final = 32  # maximum number of unverified peers dialled after one read of the directory
FIRST_WAIT_S: Final = 2.0
# A peer is dialled again after FIRST_WAIT_S, then after twice as long each time, up to LONGEST_WAIT_S.
LONGEST_WAIT_S: Final = 120.0


# One peer that was dialled: when it may be dialled again, and how long to wait after that dial.
@dataclass(slots=True)
class _Dialled:
    again_at: float
    wait_s: float = FIRST_WAIT_S


class UnverifiedDials:
    """Remembers which unverified peers were dialled and when, and chooses which to dial next; the caller dials."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._dialled: dict[PeerId, _Dialled] = {}

    def choose(self, now: float, unverified: Mapping[PeerId, PeerView]) -> list[PeerView]:
        """Returns at most MAX_DIALS of the unverified peers to dial now, and records these as dialled. now: seconds.

        unverified: all present ones; dials of others are forgotten. It leaves out peers without addresses, and those
        whose wait since the last dial is not over. Peers that were dialled less often come first. Among equals, one of
        each network (by its first address) comes before a second one of any network, otherwise in random order.
        """
        self._dialled = {peer: known for peer, known in self._dialled.items() if peer in unverified}
        due = [seen for peer, seen in unverified.items() if seen.addresses and self._is_due(peer, now)]
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
        """Returns whether `choose` has chosen this peer since it became unverified; False for other peers."""
        return peer in self._dialled

    def _is_due(self, peer: PeerId, now: float) -> bool:
        known = self._dialled.get(peer)
        return known is None or known.again_at <= now

    def _wait_s(self, peer: PeerId) -> float:
        # The wait doubles with each dial, so `choose` can sort by it. 0.0 means never dialled.
        known = self._dialled.get(peer)
        return known.wait_s if known is not None else 0.0
