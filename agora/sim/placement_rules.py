"""Decides which stages simulated machines hold, by the daemon's own placement and rebalancing.

Knows: which functions decide, and their arguments. Must not know: time, what a machine does with the decision.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from agora_protocol.ids import Span

from agora.sim.scenario import SimulatedModel
from agora.sim.simulated_peer import Equipment, SimulatedPeer
from agora.swarm.placement import Ability, StageDemands, choose_placement
from agora.swarm.rebalancing import judge_move, next_look_s
from agora.swarm.view import View

VERDICT_TTL_S = 2.0
"""Seconds for which a cached verdict on a span and machine kind is reused."""


class _ZeroDraws(random.Random):
    """Always draws 0: with it judge_move returns a move if any draw at all could lead to one."""

    def random(self) -> float:
        """Returns 0."""
        return 0.0


class DaemonPlacement:
    """Decides as the daemon does. It implements fleet_simulation.PlacementRules.

    model: the stages' costs. rebalancing: whether machines that serve ever move. Caches, per span and machine kind for
    VERDICT_TTL_S, whether any random draw could lead to a move. Machines' views differ in large runs, so this is an
    approximation.
    """

    def __init__(self, model: SimulatedModel, rebalancing: bool, rng: random.Random) -> None:
        self._mean_work = sum(model.work) / model.stages
        work = tuple(amount / self._mean_work for amount in model.work)
        self._demands = StageDemands(work, max(model.boundary_bytes, model.gradient_bytes), model.state_bytes)
        self._rebalancing = rebalancing
        self._rng = rng
        self._may_move: dict[tuple[Span, str], tuple[float, bool]] = {}

    def choose(self, view: View, peer: SimulatedPeer) -> Span | None:
        """Returns the span that a newcomer should hold; None: it stands by."""
        return choose_placement(view, self._demands, self._ability(peer.equipment), self._rng).span

    def reconsider(self, now: float, peer: SimulatedPeer, view: Callable[[], View]) -> Span | None:
        """Returns the span to which a serving peer should move; None: it stays. view: returns the peer's view.

        Remembers for VERDICT_TTL_S whether peers of this span and kind of machine may move at all.
        now: simulated seconds.
        """
        if not self._rebalancing or peer.span is None:
            return None
        alike = (peer.span, peer.equipment.kind)
        judged_at, may_move = self._may_move.get(alike, (-math.inf, False))
        if now - judged_at > VERDICT_TTL_S:
            may_move = self._move_target(view(), peer, _ZeroDraws()) is not None
            self._may_move[alike] = now, may_move
        return self._move_target(view(), peer, self._rng) if may_move else None

    def next_look_s(self) -> float | None:
        """Returns the random number of seconds until a peer judges its place again; None: never."""
        return next_look_s(self._rng)

    def _move_target(self, view: View, peer: SimulatedPeer, rng: random.Random) -> Span | None:
        """Returns the span to which judge_move moves the peer; None: it stays."""
        placement = judge_move(view, peer.id, self._demands, self._ability(peer.equipment), rng)
        return None if placement is None else placement.span

    def _ability(self, equipment: Equipment) -> Ability:
        """Returns what a machine can do, in stages of mean work per second and bytes per second."""
        return Ability(equipment.speed / self._mean_work, equipment.link.spec.rate, equipment.longest)
