"""A simulated newcomer's fetch of its stages' state, in pieces from several replicas at the same time.

Stands for state/transfer.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agora.planning.simulator.event_queue import EventQueue
from agora.planning.simulator.simulated_peer import Presence, SimulatedPeer

DONORS = 4  # maximum number of replicas from which a newcomer fetches at the same time
PIECE_S = 0.25  # seconds that one piece takes on the donor's link, so that boundaries need not wait for the whole state


class SimulatedFetch:
    """A newcomer's concurrent fetch of `size` bytes of state from several replicas; calls `done(peer)` at its end.

    `start` begins the fetch. A donor that goes sends nothing more; when all donors have gone, the rest counts as
    fetched from a checkpoint, without delay. If the peer goes or fetches another state meanwhile, `done` is never
    called.
    """

    __slots__ = ("_done", "_events", "_incarnation", "_left", "_open", "_peer", "_rng")

    def __init__(
        self,
        events: EventQueue,
        peer: SimulatedPeer,
        size: float,
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

    def start(self, donors: Sequence[SimulatedPeer]) -> None:
        """Starts to fetch concurrently from at most DONORS random ones of `donors`; without any, calls `done` now."""
        chosen = donors if len(donors) <= DONORS else self._rng.sample(list(donors), DONORS)
        for donor in chosen:
            self._open += 1
            self._next_piece(donor)
        if not chosen:
            self._done(self._peer)

    def _next_piece(self, donor: SimulatedPeer) -> None:
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
