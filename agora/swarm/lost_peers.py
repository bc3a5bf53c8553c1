"""Decides which peers count as gone before their claims end: their connection broke, and dialling them fails.

Deterministic: LostPeers changes only by the calls to it; `now` is an argument. Knows: who is connected, who is in the
view, which dials have failed. Must not know: how peers are dialled, who replicates what, the network.

A claim outlives a killed peer by half a minute. Whoever was connected to it can tell at once:

| a peer of the view that was connected                       | is                                           |
|-------------------------------------------------------------|----------------------------------------------|
| and is no longer                                            | dialled, once                                |
| and the dial succeeded                                      | there, as before                             |
| and the dial failed, while others are connected             | lost                                         |
| and the dial failed, while nobody is connected              | there: this machine's own link may be broken |
| and is lost, but connected again, or has a later claim      | there again                                  |
| and is lost for LOST_S                                      | what its claim says: others may reach it     |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView, View

LOST_S: Final = 30.0
"""Seconds for which a lost peer is disbelieved: more than a dead peer's claim lasts in the directory."""
MAX_DIALS: Final = 4
"""Maximum number of peers to dial that one `look` returns; the next ones return the rest."""


class LostPeers:
    """Remembers whose connection broke, and which peers are lost, each with the incarnation of its claim.

    Call `look` often; dial the peers that it returns, and call `record_failed_dial` for each that cannot be reached.
    """

    def __init__(self) -> None:
        self._connected: frozenset[PeerId] = frozenset()
        self._to_dial: dict[PeerId, None] = {}
        self._lost: dict[PeerId, tuple[int, float]] = {}

    def look(self, now: float, connected: Collection[PeerId], view: View) -> list[PeerView]:
        """Records who is connected now; forgets lost peers that are, or whose time is over.

        Returns the peers of the view to dial because their connection broke, each once, at most MAX_DIALS: the next
        calls return the rest.
        """
        live = frozenset(connected)
        self._to_dial |= dict.fromkeys(sorted(self._connected - live))
        self._connected = live
        self._to_dial = {peer: None for peer in self._to_dial if peer in view.peers and peer not in live}
        self._lost = {
            peer: (incarnation, until)
            for peer, (incarnation, until) in self._lost.items()
            if now < until and peer not in live
        }
        due = list(self._to_dial)[:MAX_DIALS]
        for peer in due:
            del self._to_dial[peer]
        return [view.peers[peer] for peer in due]

    def record_failed_dial(self, now: float, peer: PeerId, incarnation: int) -> bool:
        """Records that a peer that `look` returned could not be reached; returns whether it counts as lost now.

        incarnation: that of its claim when the dial began.
        """
        if not self._connected or peer in self._connected:
            return False
        self._lost[peer] = (incarnation, now + LOST_S)
        return True

    def is_lost(self, peer: PeerView) -> bool:
        """Returns whether the peer counts as gone; a claim of a later incarnation than the lost one brings it back."""
        known = self._lost.get(peer.peer)
        return known is not None and peer.incarnation <= known[0]
