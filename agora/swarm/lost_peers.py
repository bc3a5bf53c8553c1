"""Decides which peers are lost: their connection broke, and a dial after that failed. Deterministic.

A claim outlives a killed peer by half a minute. A peer that was connected to the killed one notices immediately:

| a peer of the view that was connected                       | is                                           |
|-------------------------------------------------------------|----------------------------------------------|
| and is no longer                                            | dialled, once                                |
| and the dial succeeded                                      | there, as before                             |
| and the dial failed, while others are connected             | lost                                         |
| and the dial failed, while no peer is connected             | there: this machine's own link may be broken |
| and is lost, but connected again, or has a later claim      | there again                                  |
| and is lost for LOST_LIFETIME_S                             | as its claim states: others may reach it     |

A peer whose claim announced that it leaves is not dialled.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView, View

# Seconds for which a lost peer's claim does not count: more than a dead peer's claim lasts in the directory.
LOST_LIFETIME_S: Final = 30.0
# Maximum number of peers to dial that one `update_connected` returns; the next calls return the rest.
MAX_BROKEN_DIALS: Final = 4


def _must_be_there(view: View, peer: PeerId) -> bool:
    return (known := view.peers.get(peer)) is not None and known.state != "leaving"


class LostPeers:
    """Remembers which peers' connections broke, and which peers are lost: a dial after that failed.

    Call `update_connected` often, dial the peers that it returns, and call `record_failed_dial` for those that cannot
    be reached. Then ask `is_lost`.
    """

    def __init__(self) -> None:
        self._connected: frozenset[PeerId] = frozenset()
        self._to_dial: dict[PeerId, None] = {}
        self._lost: dict[PeerId, tuple[int, float]] = {}

    def update_connected(self, now: float, connected: Collection[PeerId], view: View) -> list[PeerView]:
        """Records which peers are connected now; returns the peers to dial because their connections broke, each once.

        At most MAX_BROKEN_DIALS: the next calls return the rest. Forgets lost peers that are connected, or that were
        lost LOST_LIFETIME_S ago.
        """
        live = frozenset(connected)
        self._to_dial |= dict.fromkeys(sorted(self._connected - live))
        self._connected = live
        self._to_dial = {peer: None for peer in self._to_dial if _must_be_there(view, peer) and peer not in live}
        self._lost = {
            peer: (incarnation, until)
            for peer, (incarnation, until) in self._lost.items()
            if now < until and peer not in live
        }
        due = list(self._to_dial)[:MAX_BROKEN_DIALS]
        for peer in due:
            del self._to_dial[peer]
        return [view.peers[peer] for peer in due]

    def record_failed_dial(self, now: float, peer: PeerId, incarnation: int) -> bool:
        """Records a peer that `update_connected` returned, and was not reached, as lost; returns whether it did.

        It does not if the peer is connected again, or no peer is: then this machine's own link may be broken.
        incarnation: that of the peer's claim when the dial began.
        """
        if not self._connected or peer in self._connected:
            return False
        self._lost[peer] = (incarnation, now + LOST_LIFETIME_S)
        return True

    def is_lost(self, peer: PeerView) -> bool:
        """Returns whether the peer counts as gone; False if its claim has a later incarnation than the one recorded."""
        known = self._lost.get(peer.peer)
        return known is not None and peer.incarnation <= known[0]
