"""A simulated newcomer's fetch of its stages' state, in pieces from several replicas at once.

Knows: bytes, links, donors. Must not know: what the state is, or when a peer serves. Stands for state/transfer.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agora.sim.event_queue import EventQueue
from agora.sim.simulated_peer import Presence, SimulatedPeer

DONORS = 4
"""Replicas from which a newcomer fetches at once."""
PIECE_S = 0.25
"""Seconds that one piece takes on the donor's link, so that boundaries need not wait for the whole state."""


class SimulatedFetch:
    """Fetches `size` bytes for `peer` from DONORS of the donors, then calls `done(peer)`; at once without donors.

    A donor that has gone is left out; when all have gone, the rest counts as fetched from a checkpoint.
    """

    __slots__ = ("_done", "_events", "_incarnation", "_left", "_open", "_peer", "_rng")

    def __init__(
        self,
        events: EventQueue,
        peer: SimulatedPeer,
        size: float,
        donors: Sequence[SimulatedPeer],
        rng: random.Random,
        done: Callable[[SimulatedPeer], None],
    ) -> None:
        self._events = events
        self._peer = peer
        self._incarnation = peer.incarnation
        self._left = size
        self._rng = rng
        self._done = done
        self._open = 0
        chosen = donors if len(donors) <= DONORS else rng.sample(list(donors), DONORS)
        for donor in chosen:
            self._open += 1
            self._next_piece(donor)
        if not chosen:
            done(peer)

    def _next_piece(self, donor: SimulatedPeer) -> None:
        """Asks a donor for the next piece. Ends the donor's part if no piece is left or the donor is down.

        Calls `done` when the last donor's part has ended. Does nothing if the peer no longer fetches this state.
        """
        if self._peer.presence is not Presence.JOINING or self._peer.incarnation != self._incarnation:
            return  # the peer is gone, or fetches other stages by now
        if self._left <= 0.0 or not donor.is_up:
            self._open -= 1
            if self._open == 0:
                self._done(self._peer)
            return
        link = donor.equipment.link
        size = min(self._left, PIECE_S * link.spec.rate)
        self._left -= size
        arrival = link.send(self._peer.equipment.link, size, self._events.now, self._rng)
        self._events.at(arrival, self._next_piece, donor)
