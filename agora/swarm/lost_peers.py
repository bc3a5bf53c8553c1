"""Decides which peers count as gone before their claims end: their connection broke, and dialling them fails.

Deterministic: LostPeers changes only by the calls to it; `now` is an argument.

A claim outlives a killed peer by half a minute. A peer that was connected to the killed one notices immediately:

| a peer of the view that was connected                       | is                                           |
|-------------------------------------------------------------|----------------------------------------------|
| and is no longer                                            | dialled, once                                |
| and the dial succeeded                                      | there, as before                             |
| and the dial failed, while others are connected             | lost                                         |
| and the dial failed, while no peer is connected             | there: this machine's own link may be broken |
| and is lost, but connected again, or has a later claim      | there again                                  |
| and is lost for LOST_S                                      | as its claim states: others may reach it     |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agora_protocol.ids import PeerId

from agora.swarm.view import PeerView, View

# Seconds for which a lost peer's claim does not count: more than a dead peer's claim lasts in the directory.
LOST_S: Final = 30.0
# Maximum number of peers to dial that one `update_connected` returns; the next calls return the rest.
MAX_DIALS: Final = 4


class LostPeers:
    """Remembers which peers' connections broke, and which peers are lost: a dial after that failed.

    Call `update_connected` often, dial the peers that it returns, and call `record_failed_dial` for each of them that
    cannot be reached. Then ask `is_lost`. None is recorded as lost while this peer has no connection. A peer is lost
    for LOST_S, or until it is connected again or has a claim of a later incarnation.
    """

    def __init__(self) -> None:
        self._connected: frozenset[PeerId] = frozenset()
        self._to_dial: dict[PeerId, None] = {}
        self._lost: dict[PeerId, tuple[int, float]] = {}

    def update_connected(self, now: float, connected: Collection[PeerId], view: View) -> list[PeerView]:
        """Records which peers are connected now, and returns the peers to dial because their connections broke.

        A connection broke if the peer was connected at the former call and is not now. Returns each peer once, and at
        most MAX_DIALS: the next calls return the rest. Leaves out peers that are connected again or not in the view.
        Forgets lost peers that are connected, or that were lost LOST_S ago. now: seconds.
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
        """Records a peer, returned by `update_connected` and not reached, as lost for LOST_S; returns True.

        Returns False, and records nothing, if at the latest `update_connected` the peer was connected again, or no peer
        was: then this machine's own link may be broken. incarnation: that of the peer's claim when the dial began.
        """
        if not self._connected or peer in self._connected:
            return False
        self._lost[peer] = (incarnation, now + LOST_S)
        return True

    def is_lost(self, peer: PeerView) -> bool:
        """Returns whether the peer counts as gone: `record_failed_dial` recorded it, and it was not forgotten since.

        Returns False if the peer's claim has a later incarnation than the one that was recorded.
        """
        known = self._lost.get(peer.peer)
        return known is not None and peer.incarnation <= known[0]
