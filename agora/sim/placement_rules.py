"""Where simulated machines hold stages: the product's own placement.

Knows: which functions decide. Must not know: time, what follows. No daemon moves by itself yet, so no machine does.
"""

from __future__ import annotations

import random

from agora_protocol.ids import Span

from agora.sim.scenario import SimulatedModel
from agora.sim.simulated_peer import SimulatedPeer
from agora.swarm.placement import choose_placement
from agora.swarm.view import View


class ProductPlacement:
    """The daemon's own choice of a span when it joins."""

    def __init__(self, model: SimulatedModel, rebalancing: bool, rng: random.Random) -> None:
        """rebalancing: whether machines may move; without a rule of the product's by which they would, none does."""
        self._stages = model.stages
        self._rng = rng

    def choose(self, view: View, peer: SimulatedPeer) -> Span | None:
        """Returns the span that a newcomer should hold."""
        return choose_placement(view, self._stages, max(peer.equipment.longest), self._rng).span

    def judge(self, view: View, peer: SimulatedPeer) -> Span | None:
        """Returns None: it stays."""
        return None

    def next_look_s(self) -> float | None:
        """Returns None: machines do not look at their place again."""
        return None
